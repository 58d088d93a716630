"""Every number arrives, waits, or is in a gap: after any sequence of puts, deliveries, refusals, kills, power cuts,
failing disks, damaged files and full lanes."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_runtime.mqtt.outbox import Row
from edge_runtime.telemetry.spool import LaneLimits
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from tests.telemetry.spools import FakeClock, Opened, gap_words

CAPACITY = 9
LANES = (LaneLimits("event", CAPACITY, 1 << 20, 600.0), LaneLimits("telemetry", CAPACITY, 1 << 20, 600.0))
NAMES = ("event", "telemetry")


class Failing(AbstractContextManager[None]):
    def __enter__(self) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def __exit__(self, *_: object) -> None:
        pass


class CoverMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="spool-"))
        self.store = self.folder / "0"
        self.store.mkdir()
        self.stores = 0
        self.sessions = 0
        self.boots = 1
        self.words = 0
        self.clock = FakeClock()
        self.delivered: dict[str, set[int]] = {name: set() for name in NAMES}
        self.told: list[tuple[str, int, int]] = []
        self.failing = False
        self.patched = mock.patch.object(SpoolFile, "_transaction", self._transaction())
        self.patched.start()
        self.snapshot: Path | None = None
        self.opened = self.open()

    def _transaction(self) -> object:
        real = SpoolFile._transaction
        machine = self

        def transaction(file: SpoolFile) -> AbstractContextManager[None]:
            return Failing() if machine.failing else real(file)

        return transaction

    def open(self) -> Opened:
        self.sessions += 1
        self.snapshot = None
        return Opened(
            self.store,
            f"s{self.sessions}",
            boot=f"b{self.boots}",
            lanes=LANES,
            gap_message=gap_words,
            clock=self.clock,
        )

    def copy(self) -> Path:
        self.stores += 1
        copied = self.folder / str(self.stores)
        shutil.copytree(self.store, copied)
        return copied

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 6))
    def put(self, name: str, count: int) -> None:
        for _ in range(count):
            self.opened.put(f"w{self.words}", lane=name)
            self.words += 1

    @rule(wait_s=st.sampled_from([0, 5, 700]))
    def flush(self, wait_s: int) -> None:
        self.clock.now_ns += wait_s * 10**9
        self.opened.spool.flush(10)

    @rule(name=st.sampled_from(NAMES), data=st.data())
    def deliver(self, name: str, data: st.DataObject) -> None:
        rows = self.opened.read_all(name)
        for row in rows[: data.draw(st.integers(0, len(rows)))]:
            fate = data.draw(st.sampled_from(["done", "done", "refused", "in flight"]))
            if fate == "done":
                self.arrive(name, row)
                self.opened.spool.lane(name).done([row.token])
            elif fate == "refused":
                self.opened.spool.lane(name).refuse(row.token, "refused for good")

    def arrive(self, name: str, row: Row) -> None:
        self.delivered[name].add(row.token)
        if row.message.topic == "t/gap":
            lane, from_seq, to_seq, *_ = row.message.payload.decode().split()[1].split(":")
            self.told.append((lane, int(from_seq), int(to_seq)))

    @rule()
    def restart(self) -> None:
        self.opened.close()
        self.failing = False
        self.opened = self.open()

    @rule()
    def kill(self) -> None:
        store = self.copy()
        self.opened.close()
        self.store, self.failing = store, False
        self.opened = self.open()

    @rule()
    def save(self) -> None:
        """What reaches the disk by itself, without being asked."""
        if not self.failing:
            self.snapshot = self.copy()

    @precondition(lambda self: self.snapshot is not None)
    @rule()
    def power_cut(self) -> None:
        """The file is what it was a while ago; what was fsynced beside it is as it is."""
        assert self.snapshot is not None
        store = self.snapshot
        shutil.copyfile(self.store / "spool.seq", store / "spool.seq")
        self.opened.close()
        self.store, self.failing = store, False
        self.boots += 1
        self.opened = self.open()

    @rule(seed=st.integers(0, 99))
    def damage(self, seed: int) -> None:
        """Somebody writes into the file while nobody has it open."""
        self.opened.close()
        self.failing = False
        path = self.store / "spool.sqlite"
        if path.exists():
            data = bytearray(path.read_bytes())
            start = random.Random(seed).randrange(max(1, len(data)))
            data[start : start + 2048] = random.Random(seed).randbytes(min(2048, len(data) - start))
            path.write_bytes(data)
        self.opened = self.open()

    @precondition(lambda self: not self.failing)
    @rule()
    def damage_that_shows(self) -> None:
        """The open file turns out to be damaged; of each lane only the ends can be read."""
        keeper = self.opened.spool._keeper
        real = SpoolFile.rescue

        def ends(file: SpoolFile, lane: str, *most: int) -> object:
            rows = real(file, lane, *most)
            return rows[:2] + rows[-1:]

        def malformed(*_: object, **_more: object) -> object:
            write.stop()
            raise SpoolFileError("malformed", corrupt=True)

        write = mock.patch.object(SpoolFile, "write", malformed)
        with mock.patch.object(SpoolFile, "rescue", ends):
            write.start()
            if not self.opened.spool.flush(10) and keeper.on_disk:
                raise AssertionError("the flush did not come to an end")

    @rule()
    def disk_fails(self) -> None:
        self.failing = True
        self.opened.spool.flush(10)

    @rule()
    def disk_is_back(self) -> None:
        self.failing = False
        self.opened.spool.flush(10)

    @invariant()
    def covered(self) -> None:
        read = {name: [row.token for row in self.opened.read_all(name)] for name in NAMES}
        book = self.opened.spool._keeper._gaps
        for name, seqs in read.items():
            assert seqs == sorted(set(seqs))
            known = self.delivered[name] | set(seqs)
            gaps = [(gap.lane, gap.from_seq, gap.to_seq) for gap in (*book.pending, *book.said.values())] + self.told
            for lane, from_seq, to_seq in gaps:
                assert from_seq <= to_seq
                if lane == name:
                    known |= set(range(from_seq, to_seq + 1))
            lane_now = self.opened.spool.lane(name)
            done = set(lane_now._gone)
            missing = set(range(lane_now.next_seq)) - known - done
            assert not missing, (name, missing, gaps)

    def teardown(self) -> None:
        self.opened.close()
        self.patched.stop()
        shutil.rmtree(self.folder)


TestCover = CoverMachine.TestCase
TestCover.settings = settings(
    max_examples=4,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


class CoverMachineFull(CoverMachine):
    """The same, more often."""


CoverMachineFull.TestCase.settings = settings(TestCover.settings, max_examples=100, stateful_step_count=40)
TestCoverFull = pytest.mark.timeout(900)(pytest.mark.full(CoverMachineFull.TestCase))
