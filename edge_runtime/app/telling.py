"""What the daemon tells of itself beside windows: an event and a line in the log for everything that happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from edge_runtime.app.messaging import Messaging
from edge_runtime.control.dispatcher import Door
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.records.cameras import STOPPED_ON_REQUEST, CameraStatus, CameraView
from edge_runtime.records.commands import Reply
from edge_runtime.records.events import Scalar, Severity
from edge_runtime.records.governing import Budget, Decision, GovernorSample, GovernorWord, OperatingPoint
from edge_runtime.records.power import SensorSwitch
from edge_runtime.records.window import WindowReport

log = logging.getLogger(__name__)

LEVELS: Mapping[Severity, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


POINT_EVENT_NS = 10_000_000_000
"""While the governor looks for its way the point may change several times a second, which would fill the spool."""
FLAP_EVENT_NS = 10_000_000_000
"""A camera that goes to and fro between the same two states is told of at most once in this time ..."""
FLAP_NS = 60_000_000_000
"""... where it has gone the same way within this time before."""


class Teller:
    """Turns what happens into events. Each method is called on one thread; without a broker only the log is told."""

    def __init__(self, messaging: Messaging) -> None:
        self._messaging = messaging
        self._camera_states: dict[int, _CameraTold] = {}
        self._governor = _GovernorTold()

    def cameras(self, views: Iterable[CameraView]) -> None:
        """An event for every camera whose state is another one than the one that was told last.

        Of a camera that flaps not every change; what it came to is told in the end, with how many were left out.
        """
        known, self._camera_states = self._camera_states, {}
        for view in views:
            told = self._camera_states[view.serial] = known.get(view.serial) or _CameraTold()
            change = told.look(view.status, time.monotonic_ns())
            if change is not None and (events := self._messaging.events) is not None:
                state, reason = view.status.state, view.status.reason
                bad = state in ("down", "stalled")
                text = f"camera {view.name} is {state}" + (f": {reason}" if reason else "")
                if change.left_out:
                    text += f" ({change.left_out} changes before it were not told)"
                events.emit(
                    "camera", text, severity="warning" if bad else "info", camera=view.name, state=state,
                    reason=reason, before=change.before, before_s=change.before_s, left_out=change.left_out,
                )  # fmt: skip

    def camera(self, severity: Severity, text: str, data: Mapping[str, Scalar]) -> None:
        """A camera was added, removed or changed, or could not be as it was wanted."""
        log.log(LEVELS[severity], "%s", text)
        if (events := self._messaging.events) is not None:
            events.emit("camera", text, severity=severity, **data)

    def command(self, name: str, door: Door, reply: Reply) -> None:
        """A command was obeyed or not."""
        error = reply.error
        if error is None:
            log.info("command %s (%s, id %s): obeyed", name, door, reply.id)
        if (events := self._messaging.events) is not None and name != "ping":
            text = f"command {name}: " + ("obeyed" if error is None else f"refused: {error.message}")
            events.emit(
                "command", text, severity="info" if error is None else "warning", name=name, door=door,
                id=reply.id, ok=error is None, code=None if error is None else error.code,
            )  # fmt: skip

    def model(self, severity: Severity, text: str, data: Mapping[str, Scalar]) -> None:
        """A model changed, or was not changed."""
        log.log(LEVELS[severity], "%s", text)
        if (events := self._messaging.events) is not None:
            events.emit("model", text, severity=severity, **data)

    def budget(self, severity: Severity, text: str, data: Mapping[str, Scalar]) -> None:
        """Another budget is in force."""
        log.log(LEVELS[severity], "%s", text)
        if (events := self._messaging.events) is not None:
            events.emit("governor", text, severity=severity, what="budget", **data)

    def governor(self, decision: Decision, budget: Budget, sample: GovernorSample) -> None:
        """The governor looked at `sample` and decided. Wants calling after every decision: a change of the point that
        follows another one closely is told later, if it lasts."""
        changed = self._governor.tell(decision, sample.t_ns)
        if changed is None:
            return
        text = f"governor {decision.state}: {decision.because}"
        severity: Severity = "warning" if decision.state == "safe" else "info"
        if changed == "state":
            log.log(LEVELS[severity], "%s", text)
        if (events := self._messaging.events) is not None:
            point = decision.point
            events.emit(
                "governor", text, severity=severity, what=changed, state=decision.state, because=decision.because,
                power_w=sample.power_w, tj_c=sample.tj_c, budget_power_w=budget.power_w,
                budget_temperature_c=budget.temperature_c, budget_latency_p99_ms=budget.latency_p99_ms,
                variants=_pairs(point.variants), batch=_pairs(point.batch), gpu_hz=point.gpu_hz,
                fps=_pairs({name: f"{fps:.4g}" for name, fps in point.fps.items() if fps is not None}),
                limits=_pairs(decision.limits),
            )  # fmt: skip

    def profile(self, trouble: str) -> None:
        """This device's own profile is not used."""
        log.error("%s", trouble)
        if (events := self._messaging.events) is not None:
            events.emit("governor", trouble, severity="error", what="profile")

    def gpu(self, error: str, count: int) -> None:
        """A fault of the GPU ends the daemon, the `count`th that this store knows of."""
        if (events := self._messaging.events) is not None:
            events.emit("gpu", f"the daemon ends for a fault of the GPU: {error}", severity="error", count=count)

    def sensor(self, switch: SensorSwitch) -> None:
        """Power or temperature is read from another source from now on."""
        if (events := self._messaging.events) is not None:
            severity: Severity = "warning" if switch.after is None else "info"
            events.emit(
                "sensor", str(switch), severity=severity, what=switch.what, before=switch.before,
                after=switch.after, reason=switch.reason,
            )  # fmt: skip


def _pairs(values: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


class _Change(NamedTuple):
    """From which state a camera came, after how many seconds in it (None: nobody saw it begin), and how many changes
    since the last event were left out."""

    before: str
    before_s: float | None
    left_out: int


class _CameraTold:
    """What was told of one camera."""

    def __init__(self) -> None:
        self._told = "starting"
        self._seen: CameraStatus | None = None
        self._before: tuple[str, float | None] = ("starting", None)
        self._t_told_ns: dict[tuple[str, str], int] = {}
        self._left_out = 0

    def look(self, now: CameraStatus, now_ns: int) -> _Change | None:
        """What has to be told now; None: nothing."""
        if now.reason == STOPPED_ON_REQUEST or (now.state == "starting" and self._seen is not None):
            return None  # a start is only told by what comes of it
        seen, self._seen = self._seen, now
        changed = now.state != ("starting" if seen is None else seen.state)
        if changed:
            self._before = ("starting", None)
            if seen is not None:
                self._before = (seen.state, round(max(0, now.since_ns - seen.since_ns) / 1e9, 3))
        if now.state == "starting" or (now.state == self._told and not changed):
            return None
        way = (self._before[0], now.state)
        there, back = (now_ns - self._t_told_ns.get(each, -FLAP_NS) for each in (way, way[::-1]))
        if there < FLAP_NS and min(there, back) < FLAP_EVENT_NS:
            self._left_out += changed
            return None
        if now.state == self._told:
            return None  # it came back to what was told before anybody was told otherwise
        self._t_told_ns[way] = now_ns
        self._told = now.state
        # one that is told late was counted when it came
        left_out, self._left_out = max(0, self._left_out - (not changed)), 0
        return _Change(*self._before, left_out)


class _GovernorTold:
    """What was told of the governor: every change of its state, and of the point at most one in `POINT_EVENT_NS`."""

    def __init__(self) -> None:
        self._state: GovernorWord | None = None
        self._point: OperatingPoint | None = None
        self._told_ns = 0

    def tell(self, decision: Decision, now_ns: int) -> Literal["state", "point"] | None:
        """What has to be told now; None: nothing."""
        changed: Literal["state", "point"] = "point"
        if decision.state == "off" and self._state is None:
            return None  # nothing to hold, from the start on
        if decision.state != self._state:
            changed = "state"
        elif decision.point == self._point or now_ns - self._told_ns < POINT_EVENT_NS:
            return None
        self._state, self._point, self._told_ns = decision.state, decision.point, now_ns
        return changed


class IdleWatch:
    """Learns the module's idle power from windows in which no frame came and no lane ran. On the windows' thread."""

    def __init__(self) -> None:
        self._since_ns = time.monotonic_ns()
        self._busy_ns = 0

    def look(self, report: WindowReport, busy_ns: int, sampler: Sampler) -> None:
        """A window ended now, after `busy_ns` of lane time since the start."""
        since_ns, now_ns = self._since_ns, time.monotonic_ns()
        idle = busy_ns == self._busy_ns and report.frames.captured == 0 and report.frames.carried_in == 0
        self._since_ns, self._busy_ns = now_ns, busy_ns
        if idle and sampler.supervised:
            sampler.learn_idle(since_ns, now_ns)
