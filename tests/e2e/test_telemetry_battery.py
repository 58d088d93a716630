"""Windows and events while the broker is killed again and again, and the daemon with it: what is lost, and is it said?

Judged at the wire, between device and broker: a message has arrived once the broker has acknowledged it. From there on
it is the broker's, and a broker that is killed forgets what it had not yet passed on, whatever a device does. A plain
subscriber looks on, for the order in which readers get what they get.
"""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.telemetry.spool import SpoolOptions
from tests.e2e.mqtt_wire import Published, published
from tests.e2e.telemetry_child import EVENT_EVERY
from tests.mosquitto import Mosquitto, Seen, Subscriber, wait_until
from tests.relay import Relay

ROOT = "edge/v1/battery"
WINDOW = f"{ROOT}/telemetry/window"
GAP = f"{ROOT}/event/spool-gap"
IN_FLIGHT = 20
CAP_MB = 8
COMMIT_S = SpoolOptions().commit_s
LATE_S = 1.0
"""How much later than it should a commit may come on a machine that is busy with other tests."""


class Child:
    """The daemon's messaging in a process. `put`: (number, when), as it has said."""

    def __init__(self, config: Path, first: int, last: int, *, rate_hz: float, padding: int = 0) -> None:
        self.first, self.last = first, last
        self.put: list[tuple[int, float]] = []
        self.left: int | None = None
        self.dropped = 0
        self._t_changed_s = time.monotonic()
        self.t_killed_s: float | None = None
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.e2e.telemetry_child",
                config,
                str(first),
                str(last),
                str(rate_hz),
                str(padding),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, name="battery-child")
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, *values = line.split()
            if word == "put":
                self.put.append((int(values[0]), float(values[1])))
            elif word == "left":
                left, dropped = map(int, values)
                if (left, dropped) != (self.left, self.dropped):
                    self._t_changed_s = time.monotonic()
                self.dropped, self.left = dropped, left

    def wait_put(self, number: int, timeout_s: float) -> None:
        wait_until(lambda: self.said >= number or self.ended(), timeout_s, f"number {number}")
        assert self.said >= number, f"the child ended with {self._process.poll()}"

    def wait_dropped(self, rows: int) -> None:
        """Until so many rows have made room for others."""
        wait_until(lambda: self.dropped >= rows or self.ended(), 60, "a full spool")
        assert self.dropped >= rows, f"the child ended with {self._process.poll()}"

    def wait_settled(self) -> None:
        """Until everything it has put is on disk, or dropped: a row that makes room while in flight may arrive."""
        quiet_s = COMMIT_S + 0.2
        wait_until(lambda: self.left is not None and time.monotonic() - self._t_changed_s > quiet_s, 30, "a commit")

    @property
    def said(self) -> int:
        """The highest number that it has said to have put."""
        return self.put[-1][0] if self.put else -1

    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        """SIGKILL."""
        self.t_killed_s = time.monotonic()
        self._process.kill()
        self._finish()

    def stop(self) -> int:
        """Let it end by itself; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._finish()

    def _finish(self) -> int:
        code = self._process.wait(20)
        self._reader.join(10)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        return code

    def promised(self) -> int:
        """The highest number that must have been on disk when it was killed, or that it had put when it was not."""
        if self.t_killed_s is None:
            return self.said
        t_committed_s = self.t_killed_s - COMMIT_S - LATE_S
        return max((number for number, t_s in self.put if t_s <= t_committed_s), default=self.first - 1)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.ended():
            self.kill()


@dataclass(slots=True)
class LaneSeen:
    """A lane at the wire, over all connections."""

    first_sent: dict[int, Published] = field(default_factory=dict)  # by seq, in the order of their first sending
    taken: set[int] = field(default_factory=set)
    again: list[int] = field(default_factory=list)  # by connection: numbers that an earlier one had sent already
    twice: int = 0  # sent again in one and the same connection
    changed: int = 0  # numbers under which something else was sent before

    def missing(self) -> set[int]:
        return set(range(max(self.first_sent, default=-1) + 1)) - self.taken


def at_the_wire(relay: Relay) -> dict[str, LaneSeen]:
    """What became of every message of the lanes `telemetry` and `event`."""
    lanes = {"telemetry": LaneSeen(), "event": LaneSeen()}
    for up, down in zip(relay.recorded(), relay.recorded(client_to_server=False), strict=True):
        here: dict[str, set[int]] = {name: set() for name in lanes}
        before = {name: len(lane.first_sent) for name, lane in lanes.items()}
        known = {name: frozenset(lane.first_sent) for name, lane in lanes.items()}
        for message in published(up, down):
            name = "telemetry" if message.topic == WINDOW else "event" if f"{ROOT}/event/" in message.topic else ""
            if name not in lanes:
                continue
            lane, seq = lanes[name], int(json.loads(message.payload)["seq"])
            lane.twice += seq in here[name]
            here[name].add(seq)
            lane.changed += lane.first_sent.setdefault(seq, message).payload != message.payload
            if message.taken:
                lane.taken.add(seq)
        for name, lane in lanes.items():
            if before[name]:
                lane.again.append(len(here[name] & known[name]))
    return lanes


def gaps(payloads: Iterable[bytes]) -> list[dict[str, Any]]:
    """What gap records say."""
    return [json.loads(payload)["data"] for payload in payloads]


def said_missing(records: Sequence[dict[str, Any]], lane: str) -> set[int]:
    """The numbers that gap records speak of."""
    return {seq for each in records if each["lane"] == lane for seq in range(each["from_seq"], each["to_seq"] + 1)}


def ascending(numbers: Sequence[int]) -> bool:
    return all(one < other for one, other in itertools.pairwise(numbers))


def first_seqs(seen: Iterable[Seen], *, events: bool) -> list[int]:
    """As a reader got them, each at its first arrival."""
    return list(
        dict.fromkeys(
            int(json.loads(one.payload)["seq"])
            for one in seen
            if (one.topic.startswith(f"{ROOT}/event/") if events else one.topic == WINDOW)
        )
    )


def write_config(folder: Path, port: int, more: str = "") -> Path:
    path = folder / "config.toml"
    path.write_text(
        f'[device]\nid = "battery"\nhardware = "none"\nstore = "{folder / "store"}"\n'
        '[[camera]]\nname = "gate"\nurl = "synthetic:"\n[[model]]\nname = "detector"\nbundle = "bundled:centernet"\n'
        f"[mqtt]\nport = {port}\nbacklog_rate = 100000\n[telemetry]\n{more}",
        encoding="utf-8",
    )
    return path


def first_of(children: Sequence[Child]) -> int:
    """A number far above what a child that was killed may have put and not said."""
    return children[-1].said + 10_000 if children else 0


def _has_sent(relay: Relay, child: Child, number: int) -> bool:
    """Whether so many bytes have passed, or there is nothing that could."""
    return relay.bytes_up > number or child.left == 0 or child.ended()


def plan(seed: int, windows: int, broker_kills: int, child_kills: int) -> list[tuple[int, str]]:
    """When what is killed: after so many windows."""
    chance = random.Random(seed)
    what = ["broker"] * broker_kills + ["child"] * child_kills
    chance.shuffle(what)
    return list(zip(sorted(chance.sample(range(windows // 10, windows), len(what))), what, strict=True))


@pytest.mark.parametrize(
    ("windows", "rate_hz", "broker_kills", "child_kills", "away_s"),
    [
        pytest.param(1_000, 800.0, 3, 1, 0.5, id="a few"),
        pytest.param(100_000, 1_000.0, 20, 5, 5.0, id="many", marks=[pytest.mark.full, pytest.mark.timeout(1800)]),
    ],
)
def test_nothing_is_lost_while_broker_and_daemon_are_killed(
    tmp_path: Path, windows: int, rate_hz: float, broker_kills: int, child_kills: int, away_s: float
) -> None:
    chance = random.Random(windows)
    children: list[Child] = []
    with (
        Mosquitto(tmp_path / "broker") as broker,
        Subscriber(broker, WINDOW, f"{ROOT}/event/#") as reader,
        Relay(broker.port, record=True) as relay,
    ):
        config = write_config(tmp_path, relay.port)
        children.append(Child(config, 0, windows - 1, rate_hz=rate_hz))
        skipped = sent = 0
        try:
            for number, what in plan(windows, windows, broker_kills, child_kills):
                children[-1].wait_put(number + skipped, 60 + windows / rate_hz)
                wait_until(partial(_has_sent, relay, children[-1], sent + chance.randrange(100_000)), 60, "a window")
                if what == "broker":
                    broker.kill()
                    if chance.random() < 0.5:
                        time.sleep(chance.uniform(0, away_s))
                    broker.start()
                else:
                    children[-1].kill()
                    first = first_of(children)
                    skipped = first - number
                    # one kill may cost what the last interval brought
                    more = int(sum(each.t_killed_s is not None for each in children) * rate_hz * (COMMIT_S + LATE_S))
                    children.append(Child(config, first, windows - 1 + skipped + more, rate_hz=rate_hz))
                sent = relay.bytes_up
            last = children[-1]
            last.wait_put(last.last, 60 + windows / rate_hz)
            wait_until(lambda: last.left == 0 or last.ended(), 60 + windows / 500, "the end of the backlog")
            assert last.left == 0
            assert last.stop() == 0
        finally:
            for child in children:
                child.__exit__()
        lanes = at_the_wire(relay)
        relay_sessions = relay.accepted
        seen = reader.seen()
    records = gaps(each.payload for each in lanes["event"].first_sent.values() if each.topic == GAP)
    telemetry, event = lanes["telemetry"], lanes["event"]
    print(
        f"{len(telemetry.taken)} windows and {len(event.taken)} events taken over {relay_sessions} connections; sent "
        f"again per connection: {telemetry.again} and {event.again}; gap records: {records}; readers missed "
        f"{len(telemetry.taken - set(first_seqs(seen, events=False)))} windows that the broker had taken"
    )
    assert len(telemetry.taken) >= windows
    assert [child.dropped for child in children] == [0] * len(children)
    for name, lane in lanes.items():
        # what was promised is there, or is said not to be
        assert lane.missing() <= said_missing(records, name), name
        assert ascending(list(lane.first_sent)), name
        assert ascending(first_seqs(seen, events=name == "event")), name
        assert lane.twice == lane.changed == 0, name
        assert all(count <= IN_FLIGHT for count in lane.again), (name, lane.again)
    arrived = [round(json.loads(telemetry.first_sent[seq].payload)["uptime_s"]) for seq in sorted(telemetry.taken)]
    assert ascending(arrived)
    told = [
        data["number"]
        for seq in sorted(event.taken)
        if "number" in (data := json.loads(event.first_sent[seq].payload)["data"])
    ]
    for child in children:
        promised = set(range(child.first, child.promised() + 1))
        assert promised <= set(arrived), f"of {child.first}..: {sorted(promised - set(arrived))[:10]} are lost"
        assert {number for number in promised if number % EVENT_EVERY == 0} <= set(told)
    starts = Counter(each.topic.rpartition("/")[2] for each in event.first_sent.values())
    assert starts["unclean-start"] == child_kills


@pytest.mark.parametrize(
    ("windows", "child_kills"),
    [
        pytest.param(150, 1, id="a few", marks=pytest.mark.full),
        pytest.param(4_000, 5, id="many", marks=[pytest.mark.full, pytest.mark.timeout(600)]),
    ],
)
def test_what_a_full_spool_dropped_is_said_once_the_broker_is_back(
    tmp_path: Path, windows: int, child_kills: int
) -> None:
    """The broker is away for longer than the spool has room for."""
    children: list[Child] = []
    with (
        Mosquitto(tmp_path / "broker") as broker,
        Subscriber(broker, WINDOW, f"{ROOT}/event/#") as reader,
        Relay(broker.port, record=True) as relay,
    ):
        relay.refuse()
        config = write_config(tmp_path, relay.port, f"spool_mb = {CAP_MB}\n")
        try:
            for _ in range(child_kills):
                children.append(child := Child(config, first_of(children), 10**6, rate_hz=800.0, padding=24_000))
                # dies while it drops
                child.wait_dropped(windows)
                child.kill()
            first = first_of(children)
            children.append(child := Child(config, first, first + windows, rate_hz=800.0, padding=24_000))
            child.wait_put(first + windows, 60 + windows / 200)
            child.wait_settled()
            relay.ok()
            wait_until(lambda: children[-1].left == 0 or children[-1].ended(), 60, "the end of the backlog")
            wait_until(lambda: not _unsaid(reader.seen()), 30, "what is missing, or a record of it,")
            seen = reader.seen()
            assert children[-1].stop() == 0
        finally:
            for child in children:
                child.__exit__()
        lanes = at_the_wire(relay)
    records = gaps(one.payload for one in seen if one.topic == GAP)
    arrived = first_seqs(seen, events=False)
    print(f"{len(arrived)} windows arrived; gap records: {records}")
    missing = set(range(max(arrived) + 1)) - set(arrived)
    assert len(missing) > windows
    assert missing <= said_missing(records, "telemetry")
    assert not said_missing(records, "telemetry") & set(arrived)
    assert sum(each["count"] for each in records if each["lane"] == "telemetry") == len(missing)
    assert {each["reason"] for each in records} == {"full"}
    assert ascending(arrived)
    # of the windows, only the oldest were in the way
    assert lanes["telemetry"].taken == set(arrived)
    assert not lanes["event"].missing()


def _unsaid(seen: Sequence[Seen]) -> set[int]:
    """Numbers that neither arrived nor are said to be missing, so far."""
    arrived = first_seqs(seen, events=False)
    records = gaps(one.payload for one in seen if one.topic == GAP)
    return set(range(max(arrived, default=0) + 1)) - set(arrived) - said_missing(records, "telemetry")
