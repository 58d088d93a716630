"""What the daemon tells of itself beside windows: an event and a line in the log for everything that happened."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

from edge_runtime.app.messaging import Messaging
from edge_runtime.control.dispatcher import Door
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.records.cameras import STOPPED_ON_REQUEST, CameraView
from edge_runtime.records.commands import Reply
from edge_runtime.records.events import Scalar, Severity
from edge_runtime.records.power import SensorSwitch
from edge_runtime.records.window import WindowReport

log = logging.getLogger(__name__)

LEVELS: Mapping[Severity, int] = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Teller:
    """Turns what happens into events. Each method is called on one thread; without a broker only the log is told."""

    def __init__(self, messaging: Messaging) -> None:
        self._messaging = messaging
        self._camera_states: dict[str, str] = {}

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

    def sensor(self, switch: SensorSwitch) -> None:
        """Power or temperature is read from another source from now on."""
        if (events := self._messaging.events) is not None:
            severity: Severity = "warning" if switch.after is None else "info"
            events.emit(
                "sensor", str(switch), severity=severity, what=switch.what, before=switch.before,
                after=switch.after, reason=switch.reason,
            )  # fmt: skip


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
