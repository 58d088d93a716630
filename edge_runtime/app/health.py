"""Health: `judge` decides from a look at everything, `Supervisor` looks, `Watchdog` feeds systemd's or does not.

| state | when | watchdog | /healthz |
|---|---|---|---|
| ok | all is well | fed | 200 |
| degraded | something outside, or one part, is missing: camera, broker, model, an alarm | fed | 200 |
| wedged | a loop is silent, a frame or a run under way is overdue, a thread died | not fed | 503 |

No input is not a stall: what is not there cannot be overdue. There is no memory in the judgement, so what has recovered
is ok at the next look; the hysteresis is the watchdog's own time, within which nothing is killed.

Time is the kernel's CLOCK_MONOTONIC, which stands still while the machine is suspended, as systemd's watchdog does.
Where it goes on while this process does not (SIGSTOP, a debugger, a frozen cgroup or virtual machine), every loop is
silent for the same time; the supervisor sees that gap in its own looks and takes it off every age. If the gap is longer
than WatchdogSec, systemd kills the process all the same.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from edge_runtime.app.sd_notify import Notifier
from edge_runtime.records.cameras import CameraStatus

log = logging.getLogger(__name__)

HealthState = Literal["ok", "degraded", "wedged"]

STALL_LIMIT_S = 15.0
"""A frame without a result fails after `timeout_s` (10 s) already: only what the sweep cannot help gets this old."""

LOOK_PERIOD_S = 0.5
PAUSE_S = 2.0
"""A supervisor that was away for longer than this was not running, and neither was anybody else."""
UNSEEN_S = 5.0
"""Nobody has looked for this long: what the supervisor said last is no longer true."""


@dataclass(frozen=True, slots=True)
class LoopView:
    """A supervised loop: when it last went round (monotonic), and for how long it may be silent."""

    last_tick_ns: int
    max_silence_s: float


@dataclass(frozen=True, slots=True)
class LaneView:
    """The lanes of one model.

    `longest_run_ns`: for how long the longest run under way has been running, 0 when none is. `unclaimed_ns`: for how
    long frames have been waiting there without any being claimed, 0 when none waits. A live camera's frames never get
    old, each replaces the one before; only this tells that nobody takes them.
    """

    longest_run_ns: int = 0
    unclaimed_ns: int = 0


@dataclass(frozen=True, slots=True)
class BrokerView:
    """The broker connection; `reason` says why there is none."""

    connected: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class HealthInput:
    """One look at everything. Names map to views; `models_down` maps to the reason.

    `oldest_admitted_ns` is when (monotonic) the oldest frame in flight was admitted. `broker` is None where MQTT is not
    configured. `alarms` are sentences about whatever else makes it degraded: derated, the store is full.
    """

    now_ns: int
    loops: Mapping[str, LoopView] = field(default_factory=dict)
    oldest_admitted_ns: int | None = None
    lanes: Mapping[str, LaneView] = field(default_factory=dict)
    cameras: Mapping[str, CameraStatus] = field(default_factory=dict)
    broker: BrokerView | None = None
    models_down: Mapping[str, str] = field(default_factory=dict)
    threads_dead: Sequence[str] = ()
    alarms: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Pause:
    """This process did not run for `lost_ns`, until `t_end_ns` (monotonic)."""

    t_end_ns: int
    lost_ns: int


@dataclass(frozen=True, slots=True)
class Health:
    """The judgement. `reasons` are sentences, the gravest first; none when ok. They hold no running numbers, so that
    equal trouble gives equal reasons."""

    state: HealthState
    reasons: tuple[str, ...] = ()

    @property
    def wedged(self) -> bool:
        return self.state == "wedged"

    def __str__(self) -> str:
        return self.state if not self.reasons else f"{self.state}: {'; '.join(self.reasons)}"


def judge(view: HealthInput, stall_limit_s: float = STALL_LIMIT_S, pauses: Sequence[Pause] = ()) -> Health:
    """The rules. Pure: the same look gives the same judgement."""

    def age_s(since_ns: int) -> float:
        lost_ns = sum(pause.lost_ns for pause in pauses if pause.t_end_ns > since_ns)
        return (view.now_ns - since_ns - lost_ns) / 1e9

    wedged = [f"thread {name} died" for name in view.threads_dead]
    wedged += [
        f"loop {name} has been silent for more than {loop.max_silence_s:g} s"
        for name, loop in view.loops.items()
        if age_s(loop.last_tick_ns) > loop.max_silence_s
    ]
    for model, lane in view.lanes.items():
        if age_s(view.now_ns - lane.longest_run_ns) > stall_limit_s:
            wedged.append(f"model {model}: a lane has been in one run for more than {stall_limit_s:g} s")
        if age_s(view.now_ns - lane.unclaimed_ns) > stall_limit_s:
            wedged.append(f"model {model}: no lane has taken a waiting frame for more than {stall_limit_s:g} s")
    if view.oldest_admitted_ns is not None and age_s(view.oldest_admitted_ns) > stall_limit_s:
        wedged.append(f"a frame has been in flight for more than {stall_limit_s:g} s")

    # starting, paused and stopped are no faults: it begins, or somebody wanted it so
    degraded = [f"model {name} is down: {reason}" for name, reason in view.models_down.items()]
    degraded += [
        f"camera {name} is {status.state}" + (f": {status.reason}" if status.reason else "")
        for name, status in view.cameras.items()
        if status.state in ("down", "stalled")
    ]
    if view.broker is not None and not view.broker.connected:
        degraded.append("the broker is away" + (f": {view.broker.reason}" if view.broker.reason else ""))
    degraded += view.alarms

    state: HealthState = "wedged" if wedged else "degraded" if degraded else "ok"
    return Health(state, (*wedged, *degraded))


def dump_stacks() -> None:
    """The stacks of all threads to standard error, with the names that faulthandler does not know."""
    names = ", ".join(f"0x{thread.ident or 0:016x} {thread.name}" for thread in threading.enumerate())
    log.critical("threads: %s", names)
    sys.stderr.flush()
    try:
        faulthandler.dump_traceback(all_threads=True)
    except (AttributeError, OSError, RuntimeError, ValueError) as error:  # a standard error without a descriptor
        log.critical("their stacks cannot be shown: %s", error)


class Watchdog:
    """Feeds systemd's watchdog as long as nothing is wedged. Called by one thread.

    When something is, the reasons and the stacks of all threads are logged once, and nothing more is said: unless it
    recovers, systemd sends SIGABRT within WatchdogSec, at which faulthandler shows the stacks again.
    """

    def __init__(self, notifier: Notifier, dump: Callable[[], None] = dump_stacks) -> None:
        self._notifier = notifier
        self._dump = dump
        self._interval_s = notifier.watchdog_interval_s
        self._fed_ns: int | None = None
        self._last = Health("ok")

    def tick(self, health: Health, now_ns: int) -> bool:
        """Call it at each look; whether the watchdog was fed."""
        last, self._last = self._last, health
        if health != last:
            self._tell(health, last)
        if health.wedged:
            if not last.wedged:
                self._dump()
            self._fed_ns = None  # should it recover, it is fed at once
            return False
        if self._interval_s is None or (self._fed_ns is not None and now_ns - self._fed_ns < self._interval_s * 1e9):
            return False
        fed = self._notifier.watchdog()
        if fed:  # else again at the next look: half of systemd's time is left
            self._fed_ns = now_ns
        return fed

    def _tell(self, health: Health, last: Health) -> None:
        if health.wedged:
            log.critical("health: %s", health)
        elif health.state != last.state:
            log.log(logging.INFO if health.state == "ok" else logging.WARNING, "health: %s", health)
        self._notifier.status(str(health))


class Supervisor:
    """Looks, judges and feeds: call `tick` at once and then every LOOK_PERIOD_S on one thread, `health` from any.

    `look` may wait for locks: if one is never free again, nobody feeds the watchdog, which is right.
    """

    def __init__(
        self,
        look: Callable[[], HealthInput],
        watchdog: Watchdog,
        *,
        stall_limit_s: Callable[[], float] = lambda: STALL_LIMIT_S,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._look = look
        self._watchdog = watchdog
        self._stall_limit_s = stall_limit_s
        self._clock_ns = clock_ns
        self._pauses: deque[Pause] = deque(maxlen=64)
        self._t_done_ns: int | None = None
        self._t_awake_ns: int | None = None
        self._health = Health("ok")

    def awake(self) -> None:
        """Call it when the wait between two looks is over: what is done from here to `tick` is work, and no pause."""
        self._t_awake_ns = self._clock_ns()

    def tick(self) -> Health:
        """One look, and what follows from it."""
        now_ns = self._clock_ns()
        # from the end of the last look: a look that takes long is a stall of ours, and no pause
        awake_ns, self._t_awake_ns = self._t_awake_ns or now_ns, None
        if self._t_done_ns is not None and (gap_ns := awake_ns - self._t_done_ns) > PAUSE_S * 1e9:
            self._pauses.append(Pause(awake_ns, gap_ns - int(LOOK_PERIOD_S * 1e9)))
            log.warning("this process did not run for %.1f s", gap_ns / 1e9)
        health = judge(self._look(), self._stall_limit_s(), tuple(self._pauses))
        self._watchdog.tick(health, now_ns)
        self._health = health
        self._t_done_ns = self._clock_ns()
        return health

    def health(self) -> Health:
        """The last judgement, or wedged where nobody has looked for UNSEEN_S. Never waits."""
        done_ns = self._t_done_ns
        if done_ns is not None and self._clock_ns() - done_ns > UNSEEN_S * 1e9:
            last = self._health
            return Health("wedged", (f"the supervisor has not looked for more than {UNSEEN_S:g} s", *last.reasons))
        return self._health


def stall_limit_for(timeouts_s: Sequence[float]) -> float:
    """The stall limit where frames may take up to `timeouts_s` (one per model): never less than half as much again."""
    return max(STALL_LIMIT_S, *(1.5 * timeout_s for timeout_s in timeouts_s)) if timeouts_s else STALL_LIMIT_S
