"""The spool against a model: never lost after a commit, never a number twice, order kept, over crashes and restarts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_runtime.mqtt.outbox import Row
from edge_runtime.telemetry.spool import LaneLimits
from tests.telemetry.spools import Opened, read_all

CAPACITY = 12
LIMITS = (LaneLimits("event", CAPACITY, 1 << 20), LaneLimits("telemetry", CAPACITY, 1 << 20))
NAMES = st.sampled_from(["event", "telemetry"])


class SpoolMachine(RuleBasedStateMachine):
    """`kept`: rows that must be there, by number. `maybe`: done or evicted ones that a crash may bring back."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spool-"))
        self.sessions = 0
        self.store = self.folder / "0"
        self.store.mkdir()
        self.words = 0
        self.pending: dict[str, list[str]] = {"event": [], "telemetry": []}
        self.kept: dict[str, dict[int, str]] = {"event": {}, "telemetry": {}}
        self.maybe: dict[str, dict[int, str]] = {"event": {}, "telemetry": {}}
        self.ever: dict[str, dict[int, str]] = {"event": {}, "telemetry": {}}
        self.opened = self.open()

    def open(self) -> Opened:
        self.sessions += 1
        return Opened(self.store, f"s{self.sessions}", lanes=LIMITS)

    @rule(name=NAMES, count=st.integers(1, 5))
    def append(self, name: str, count: int) -> None:
        for _ in range(count):
            self.opened.put(f"w{self.words}", lane=name)
            self.pending[name].append(f"w{self.words}")
            self.words += 1

    @rule()
    def commit(self) -> None:
        self.opened.flush()
        self.committed()
        for rows in self.maybe.values():
            rows.clear()

    def committed(self) -> None:
        """What was pending has numbers now, above all before; where a lane is full, the oldest rows are gone."""
        for name, pending in self.pending.items():
            start = max(self.ever[name], default=-1) + 1
            for seq, word in enumerate(pending, start):
                assert seq not in self.ever[name]
                self.ever[name][seq] = self.kept[name][seq] = word
            pending.clear()
            for seq in sorted(self.kept[name])[:-CAPACITY]:
                del self.kept[name][seq]

    @rule(name=NAMES, data=st.data())
    def deliver(self, name: str, data: st.DataObject) -> None:
        rows = self.check(name)
        picks = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        chosen = [row.token for row, pick in zip(rows, picks, strict=True) if pick]
        if len(chosen) > 1:
            self.opened.spool.lane(name).refuse(chosen[0], "refused for good")
            self.forget(name, chosen.pop(0))
        self.opened.spool.lane(name).done([*chosen, 10_000])
        for seq in chosen:
            self.forget(name, seq)

    def forget(self, name: str, seq: int) -> None:
        found = self.kept[name].pop(seq, None)
        if found is not None:
            self.maybe[name][seq] = found

    @rule()
    def restart(self) -> None:
        assert self.opened.close()
        self.committed()
        for rows in self.maybe.values():
            rows.clear()
        self.opened = self.open()
        previous = self.opened.spool.previous
        assert previous is not None
        assert previous.clean
        self.check_last_seq()

    @rule()
    def crash(self) -> None:
        """The files as they are at this instant are all that is left."""
        store = self.folder / str(self.sessions)
        shutil.copytree(self.store, store)
        self.opened.close()
        self.store = store
        for pending in self.pending.values():
            pending.clear()
        self.opened = self.open()
        previous = self.opened.spool.previous
        assert previous is not None
        assert not previous.clean
        self.check_last_seq()
        for name in self.kept:
            # what was done, and not yet deleted, is sent again: at least once
            for row in read_all(self.opened.spool, name):
                if row.token in self.maybe[name]:
                    self.kept[name][row.token] = self.maybe[name][row.token]
            self.maybe[name].clear()

    def check_last_seq(self) -> None:
        previous = self.opened.spool.previous
        assert previous is not None
        assert previous.last_seq == {name: max(rows) for name, rows in self.ever.items() if rows}

    @precondition(lambda self: any(self.kept.values()))
    @rule(name=NAMES, back=st.integers(0, 15))
    def read_from(self, name: str, back: int) -> None:
        after = max(self.kept[name], default=0) - back
        rows = read_all(self.opened.spool, name, after=after, limit=3)
        assert [row.token for row in rows] == sorted(seq for seq in self.kept[name] if seq > after)

    def check(self, name: str) -> list[Row]:
        rows = read_all(self.opened.spool, name)
        found = {row.token: row.message.payload.decode().split()[1] for row in rows}
        assert list(found) == sorted(found)
        assert found == self.kept[name]
        return rows

    @invariant()
    def counts(self) -> None:
        for name, kept in self.kept.items():
            assert self.opened.spool.lane(name).waiting() == len(kept) + len(self.pending[name])
        assert self.opened.alarms == []

    def teardown(self) -> None:
        for name in self.kept:
            self.check(name)
        self.opened.close()
        shutil.rmtree(self.folder)


TestSpool = SpoolMachine.TestCase
TestSpool.settings = settings(
    max_examples=10,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class SpoolMachineFull(SpoolMachine):
    """The same, more often."""


SpoolMachineFull.TestCase.settings = settings(TestSpool.settings, max_examples=100)
TestSpoolFull = pytest.mark.full(SpoolMachineFull.TestCase)
