"""What the daemon tells of itself beside windows: an event and a line in the log for everything that happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Literal

from edge_runtime.app.messaging import Messaging
from edge_runtime.control.dispatcher import Door
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.records.cameras import STOPPED_ON_REQUEST, CameraView
from edge_runtime.records.commands import Reply
from edge_runtime.records.events import Scalar, Severity
from edge_runtime.records.governing import Budget, Decision, GovernorSample, GovernorWord, OperatingPoint
from edge_runtime.records.power import SensorSwitch
from edge_runtime.records.window import WindowReport

log = logging.getLogger(__name__)

LEVELS: Mapping[Severity, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


POINT_EVENT_NS = 10_000_000_000
"""While the governor looks for its way the point may change several times a second, which would fill the spool."""


class Teller:
    """Turns what happens into events. Each method is called on one thread; without a broker only the log is told."""

    def __init__(self, messaging: Messaging) -> None:
        self._messaging = messaging
        self._camera_states: dict[str, str] = {}
        self._governor = _GovernorTold()

    def cameras(self, views: Iterable[CameraView]) -> None:
        """An event for every camera whose state is another one than at the last look."""
        for view in views:
            state, reason = view.status.state, view.status.reason
            before = self._camera_states.get(view.name)
            if state == before or state == "starting" or reason == STOPPED_ON_REQUEST:
                continue
            self._camera_states[view.name] = state
            if (events := self._messaging.events) is not None:
                bad = state in ("down", "stalled")
                text = f"camera {view.name} is {state}" + (f": {reason}" if reason else "")
                events.emit(
                    "camera", text, severity="warning" if bad else "info", camera=view.name, state=state,
                    reason=reason, before=before,
                )  # fmt: skip

    def command(self, name: str, door: Door, reply: Reply) -> None:
        """A command was obeyed or not."""
        error = reply.error
        if error is None:
            log.info("command %s (%s): obeyed", name, door)
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
