"""The rules of health, the watchdog's feeding, and what the supervisor sees."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.app.health import (
    STALL_LIMIT_S,
    BrokerView,
    Health,
    HealthInput,
    LaneView,
    LoopView,
    Pause,
    Supervisor,
    Watchdog,
    judge,
    stall_limit_for,
)
from edge_runtime.app.sd_notify import Notifier
from edge_runtime.records.cameras import CameraState, CameraStatus

S = 1_000_000_000
NOW = 1_000 * S
ROOT = Path(__file__).resolve().parents[2]


def camera(state: CameraState, reason: str | None = None) -> CameraStatus:
    return CameraStatus(state, reason, 0)


GOOD = HealthInput(
    now_ns=NOW,
    loops={"windows": LoopView(NOW - S, 20.0), "mqtt-net": LoopView(NOW, 10.0)},
    oldest_admitted_ns=NOW - S // 10,
    lanes={"detector": LaneView(S // 50, S // 100)},
    cameras={"gate": camera("up"), "yard": camera("paused"), "clip": camera("stopped"), "new": camera("starting")},
    broker=BrokerView(True),
)


def test_all_well_is_ok() -> None:
    assert judge(GOOD) == Health("ok")
    assert str(judge(GOOD)) == "ok"


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(GOOD, cameras={"gate": camera("down", "refused")}), "camera gate is down: refused"),
        (replace(GOOD, cameras={"gate": camera("stalled")}), "camera gate is stalled"),
        (replace(GOOD, broker=BrokerView(False, "refused")), "the broker is away: refused"),
        (replace(GOOD, models_down={"detector": "no bundle"}), "model detector is down: no bundle"),
        (replace(GOOD, alarms=["derated: power"]), "derated: power"),
    ],
)
def test_what_is_missing_degrades(view: HealthInput, reason: str) -> None:
    assert judge(view) == Health("degraded", (reason,))


@pytest.mark.parametrize(
    ("view", "reason"),
    [
        (replace(GOOD, loops={"pump": LoopView(NOW - 6 * S, 5.0)}), "loop pump has been silent for more than 5 s"),
        (replace(GOOD, oldest_admitted_ns=NOW - 16 * S), "a frame has been in flight for more than 15 s"),
        (
            replace(GOOD, lanes={"detector": LaneView(16 * S)}),
            "model detector: a lane has been in one run for more than 15 s",
        ),
        (
            replace(GOOD, lanes={"detector": LaneView(0, 16 * S)}),
            "model detector: no lane has taken a waiting frame for more than 15 s",
        ),
        (replace(GOOD, threads_dead=["lane-detector-0"]), "thread lane-detector-0 died"),
    ],
)
def test_what_is_stuck_is_wedged_first_of_all(view: HealthInput, reason: str) -> None:
    assert judge(view) == Health("wedged", (reason,))
    worse = judge(replace(view, broker=BrokerView(False)))
    assert worse == Health("wedged", (reason, "the broker is away"))


def test_the_limits_are_met_to_the_nanosecond() -> None:
    at_limit = replace(GOOD, oldest_admitted_ns=NOW - 15 * S, lanes={"detector": LaneView(15 * S)})
    assert judge(at_limit).state == "ok"
    assert judge(replace(at_limit, oldest_admitted_ns=NOW - 15 * S - 1)).wedged


def test_a_slow_models_frames_are_no_stall() -> None:
    assert stall_limit_for([]) == STALL_LIMIT_S
    assert stall_limit_for([10.0]) == STALL_LIMIT_S
    assert stall_limit_for([10.0, 60.0]) == 90.0


# --- properties

states = st.sampled_from(["starting", "up", "paused", "stalled", "down", "stopped"])
sentences = st.text("abc ", max_size=8)
cameras = st.dictionaries(sentences, st.builds(CameraStatus, states, st.none() | sentences, st.integers(0, NOW)))
brokers = st.none() | st.builds(BrokerView, st.booleans(), sentences)


@given(
    now_ns=st.integers(0, 10**18),
    ages=st.dictionaries(sentences, st.floats(0, 1)),
    cameras=cameras,
    broker=brokers,
    models_down=st.dictionaries(sentences, sentences),
    alarms=st.lists(sentences),
)
def test_no_input_is_never_a_stall(
    now_ns: int,
    ages: dict[str, float],
    cameras: dict[str, CameraStatus],
    broker: BrokerView | None,
    models_down: dict[str, str],
    alarms: list[str],
) -> None:
    view = HealthInput(
        now_ns,
        loops={name: LoopView(now_ns - int(age * 5 * S), 5.0) for name, age in ages.items()},
        lanes={"detector": LaneView()},
        cameras=cameras,
        broker=broker,
        models_down=models_down,
        alarms=alarms,
    )
    health = judge(view)
    assert not health.wedged
    faults = models_down or alarms or any(c.state in ("down", "stalled") for c in cameras.values())
    assert (health.state == "degraded") == bool(faults or (broker is not None and not broker.connected))
    assert bool(health.reasons) == (health.state != "ok")


@given(cameras=cameras, broker=brokers, silence_s=st.floats(5.001, 1e6))
def test_a_silent_loop_is_wedged_whatever_else_there_is(
    cameras: dict[str, CameraStatus], broker: BrokerView | None, silence_s: float
) -> None:
    loops = {"good": LoopView(NOW, 5.0), "bad": LoopView(NOW - int(silence_s * S), 5.0)}
    view = HealthInput(NOW, loops=loops, cameras=cameras, broker=broker)
    assert judge(view).reasons[0] == "loop bad has been silent for more than 5 s"
    # and as soon as it goes round again, it is as if nothing had been
    again = replace(view, loops={**loops, "bad": LoopView(NOW, 5.0)})
    assert judge(again) == judge(replace(view, loops={}))


@given(shift=st.integers(-(10**17), 10**17), age_s=st.integers(0, 30))
def test_only_differences_of_time_count(shift: int, age_s: int) -> None:
    def view(now: int) -> HealthInput:
        return HealthInput(now, {"loop": LoopView(now - age_s * S, 20.0)}, now - age_s * S)

    assert judge(view(NOW)) == judge(view(NOW + shift))


@given(
    lost_s=st.integers(3, 10_000),
    before_s=st.floats(0, 14.9),
    after_s=st.floats(0, 14.9),
)
def test_a_pause_of_everything_stalls_nobody_but_hides_no_stall(lost_s: int, before_s: float, after_s: float) -> None:
    woke_ns = NOW - int(after_s * S)
    since_ns = woke_ns - lost_s * S - int(before_s * S)
    view = HealthInput(NOW, {"loop": LoopView(since_ns, 15.0)}, since_ns, {"detector": LaneView(NOW - since_ns)})
    pauses = [Pause(woke_ns, lost_s * S)]
    assert judge(view, pauses=pauses).wedged == (before_s + after_s > 15.0)
    # what began after it is as old as it is
    young = replace(view, loops={}, lanes={}, oldest_admitted_ns=woke_ns)
    assert not judge(young, pauses=pauses).wedged
    assert judge(replace(young, now_ns=woke_ns + 16 * S), pauses=pauses).wedged


# --- feeding


class Listener:
    """systemd's end, and a count of stack dumps."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(self.path)
        self.socket.setblocking(False)
        self.dumps = 0
        self.watchdog = Watchdog(Notifier(self.path, watchdog_interval_s=5.0), self.dump)

    def dump(self) -> None:
        self.dumps += 1

    def received(self) -> list[str]:
        words = []
        with suppress(BlockingIOError):
            while True:
                words.append(self.socket.recv(4096).decode())
        return words


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[Listener]:
    listener = Listener(tmp_path / "notify")
    yield listener
    listener.socket.close()


OK = Health("ok")
WEDGED = Health("wedged", ("a frame has been in flight for more than 15 s",))


def test_a_healthy_daemon_is_fed_at_the_interval(listener: Listener) -> None:
    fed = [t for t in range(100) if listener.watchdog.tick(OK, NOW + t * S // 4)]
    assert fed == [0, 20, 40, 60, 80]
    assert listener.received() == ["WATCHDOG=1"] * 5


def test_a_degraded_daemon_is_fed_for_ever_and_says_why_once(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    degraded = Health("degraded", ("camera gate is down: refused",))
    with caplog.at_level(logging.INFO):
        words = []
        for t in range(600):
            assert listener.watchdog.tick(degraded, NOW + t * S) == (t % 5 == 0)
            words += listener.received()
        assert words == ["STATUS=degraded: camera gate is down: refused", *["WATCHDOG=1"] * 120]
        listener.watchdog.tick(OK, NOW + 600 * S)
    assert [record.getMessage() for record in caplog.records] == [
        "health: degraded: camera gate is down: refused",
        "health: ok",
    ]
    assert listener.dumps == 0


def test_a_wedged_daemon_starves_and_shows_its_stacks_once_per_stall(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    assert listener.watchdog.tick(OK, NOW)
    assert not any(listener.watchdog.tick(WEDGED, NOW + t * S) for t in range(1, 60))
    assert listener.dumps == 1
    assert [r.levelno for r in caplog.records] == [logging.CRITICAL]
    assert listener.received() == ["WATCHDOG=1", f"STATUS={WEDGED}"]
    # it recovers: fed at the very next look
    assert listener.watchdog.tick(OK, NOW + 60 * S)
    assert listener.received() == ["STATUS=ok", "WATCHDOG=1"]
    assert not listener.watchdog.tick(WEDGED, NOW + 61 * S)
    assert listener.dumps == 2


def test_a_word_that_is_lost_is_said_again_at_the_next_look(listener: Listener) -> None:
    watchdog = Watchdog(Notifier("/nowhere", watchdog_interval_s=5.0))
    assert not watchdog.tick(OK, NOW)
    watchdog._notifier = Notifier(listener.path, watchdog_interval_s=5.0)
    assert watchdog.tick(OK, NOW + S // 4)


def test_without_a_watchdog_a_stall_is_told_all_the_same() -> None:
    dumps: list[bool] = []
    watchdog = Watchdog(Notifier(), lambda: dumps.append(True))
    assert not watchdog.tick(OK, NOW)
    assert not watchdog.tick(WEDGED, NOW + S)
    assert dumps == [True]


def test_the_dump_names_every_thread_and_shows_where_it_is() -> None:
    code = (
        "import logging, threading\n"
        "from edge_runtime.app.health import dump_stacks\n"
        "logging.basicConfig()\n"
        "end = threading.Event()\n"
        "def stuck_in_a_lane(): end.wait()\n"
        "thread = threading.Thread(target=stuck_in_a_lane, name='lane-detector-0'); thread.start()\n"
        "dump_stacks(); end.set(); thread.join()\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stderr
    named = re.search(r"(0x[0-9a-f]{16}) lane-detector-0", shown)
    assert named is not None, shown
    assert f"Thread {named.group(1)} " in shown
    assert "in stuck_in_a_lane" in shown
    assert "in dump_stacks" in shown


def test_a_dump_without_a_standard_error_raises_nothing() -> None:
    code = (
        "import sys, io\nfrom edge_runtime.app.health import dump_stacks\nsys.stderr = io.StringIO()\ndump_stacks()\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={**os.environ}, timeout=60)


# --- the supervisor


class Device:
    """A clock, a loop that ticks and a supervisor that looks at it."""

    def __init__(self, listener: Listener) -> None:
        self.now_ns = NOW
        self.tick_ns = NOW
        self.running = True
        self.run_since_ns: int | None = None
        self.supervisor = Supervisor(self.look, listener.watchdog, clock_ns=lambda: self.now_ns)

    def look(self) -> HealthInput:
        run_ns = 0 if self.run_since_ns is None else self.now_ns - self.run_since_ns
        return HealthInput(self.now_ns, {"windows": LoopView(self.tick_ns, 5.0)}, lanes={"detector": LaneView(run_ns)})

    def live(self, seconds: float, done: Callable[[Health], bool] = lambda _: False) -> float:
        """Let time pass, a look every 0.25 s; how long it took until `done`."""
        start_ns = self.now_ns
        while self.now_ns < start_ns + seconds * S:
            self.now_ns += S // 4
            if self.running:
                self.tick_ns = self.now_ns
            if done(self.supervisor.tick()):
                break
        return (self.now_ns - start_ns) / S


def test_a_stuck_lane_is_wedged_within_the_limit_and_ok_at_once_when_it_comes_back(listener: Listener) -> None:
    device = Device(listener)
    device.live(3)
    device.run_since_ns = device.now_ns
    assert device.live(60, lambda health: health.wedged) == pytest.approx(15.25)
    assert device.supervisor.health().wedged
    device.run_since_ns = None
    assert device.live(1, lambda health: not health.wedged) == 0.25
    assert listener.received()[-1] == "WATCHDOG=1"


def test_a_process_that_was_stopped_for_an_hour_wakes_healthy(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(listener)
    device.live(3)
    device.run_since_ns = device.now_ns - S  # a run was under way
    device.now_ns += 3600 * S
    # nobody else has run yet: all ticks are an hour old
    assert device.supervisor.tick() == OK
    assert "did not run for 3600" in caplog.text
    # the run goes on, and is stuck indeed: that shows as late as if it had not been interrupted
    assert device.live(60, lambda health: health.wedged) == pytest.approx(14, abs=0.5)


def test_a_loop_that_died_in_a_pause_is_found_after_it(listener: Listener) -> None:
    device = Device(listener)
    device.live(3)
    device.running = False
    device.now_ns += 100 * S
    assert device.live(60, lambda health: health.wedged) == pytest.approx(5, abs=0.5)


def test_a_supervisor_that_no_longer_looks_is_wedged_for_whoever_asks(listener: Listener) -> None:
    device = Device(listener)
    assert device.supervisor.health() == OK
    device.live(1)
    device.now_ns += 6 * S
    assert device.supervisor.health().reasons == ("the supervisor has not looked for more than 5 s",)
    device.supervisor.tick()
    assert device.supervisor.health() == OK


def test_ten_minutes_without_any_camera_are_no_stall(listener: Listener) -> None:
    """In virtual time, look by look: degraded with the reason, the watchdog fed throughout."""
    now_ns = [1_000_000_000]

    def look() -> HealthInput:
        return HealthInput(
            now_ns=now_ns[0],
            loops={"windows": LoopView(now_ns[0] - 100_000_000, 30.0)},
            lanes={"detector": LaneView()},
            cameras={"gate": camera("down", "no route to host"), "yard": camera("stalled", "no data for 5 s")},
        )

    notifier = Notifier(listener.path, watchdog_interval_s=15.0)
    supervisor = Supervisor(look, Watchdog(notifier), clock_ns=lambda: now_ns[0])
    fed = 0
    for _ in range(1200):
        now_ns[0] += 500_000_000
        supervisor.awake()
        health = supervisor.tick()
        assert health.state == "degraded"
        assert "gate" in health.reasons[0]
        fed += sum("WATCHDOG=1" in word for word in listener.received())
    assert fed >= 600 / 15 - 1


def test_what_the_supervisor_does_itself_hides_no_stall() -> None:
    """Sweeping and telling take their time between two looks; a stuck lane grows old all the same."""
    now_ns = [1_000_000_000]
    t_stuck_ns = now_ns[0]
    supervisor = Supervisor(
        lambda: HealthInput(now_ns=now_ns[0], lanes={"detector": LaneView(now_ns[0] - t_stuck_ns)}),
        Watchdog(Notifier(None), dump=lambda: None),
        stall_limit_s=lambda: 15.0,
        clock_ns=lambda: now_ns[0],
    )
    for _ in range(8):
        now_ns[0] += 500_000_000
        supervisor.awake()
        now_ns[0] += 2_000_000_000  # its own work
        health = supervisor.tick()
    assert health.state == "wedged"
