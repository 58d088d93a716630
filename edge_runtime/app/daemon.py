"""The daemon: everything that one device does, composed from a configuration."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.app.cameras import CameraSwitch
from edge_runtime.app.door import DaemonDoor, History
from edge_runtime.app.health import (
    LOOK_PERIOD_S,
    Health,
    HealthInput,
    LaneView,
    LoopView,
    Supervisor,
    Watchdog,
    stall_limit_for,
)
from edge_runtime.app.identity import clock_synced, make_identity
from edge_runtime.app.messaging import Messaging
from edge_runtime.app.models import LoadedModel, lanes_for, load_model
from edge_runtime.app.sd_notify import Notifier
from edge_runtime.bundled import bundled_media
from edge_runtime.camera.open import open_camera
from edge_runtime.clock import SystemClock
from edge_runtime.config import CameraConfig, Config
from edge_runtime.control.commands import camera, ping
from edge_runtime.control.dispatcher import Dispatcher, Door
from edge_runtime.errors import BundleError, EdgeError
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.cameras import STOPPED_ON_REQUEST
from edge_runtime.records.commands import Reply
from edge_runtime.records.events import ReportedModel
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import WindowReport
from edge_runtime.sim.module import MODULES, SimDevice, SimPower, SimThermal
from edge_runtime.telemetry.windows import ModelView, WindowBuilder, WindowLoop, WindowSources, describe
from edge_runtime.threads import ThreadGroup
from edge_runtime.web.access import read_token
from edge_runtime.web.server import WebServer

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms lets one busy thread turn a GIL-free call of 0.45 ms into 5.6 ms."""

SWEEP_PERIOD_S = 1.0
LOAD_DEADLINE_S = 180.0
"""What systemd is told that loading and warming up one model may take."""

STOP_S = 4.5
"""All of a stop; it has to be over in 5 s."""
PIPELINE_STOP_S = 2.0
RUNTIME_DIRECTORY = "RUNTIME_DIRECTORY"
"""systemd's variable: where the control socket goes, if it is set."""

WindowSink = Callable[[WindowReport], None]
ResultSink = Callable[[FrameResult], None]


@dataclass(frozen=True, slots=True)
class Observers:
    """Who else is told: of every window (on the windows' thread) and of every result (on lane threads)."""

    window: WindowSink | None = None
    result: ResultSink | None = None


class Daemon:
    """One device at work. `start`, then `wait`, then `stop`; or `run`, which is all three.

    `start` raises BundleError where no model at all can be loaded, UsageError or EdgeError where `[mqtt]`,
    `[web]` or the control socket cannot be as they are configured.
    """

    def __init__(self, config: Config, observers: Observers | None = None, notifier: Notifier | None = None) -> None:
        self._config = config
        self._observers = observers or Observers()
        self._notifier = notifier or Notifier()
        self._clock = SystemClock()
        self.identity: Identity = make_identity(config.device.id)
        self._ending = threading.Event()
        self._requested = False
        # a signal handler may write to a pipe, and may not touch a lock
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._alarms: list[str] = []
        self._fatal: str | None = None
        self._dead: list[str] = []
        self._threads = ThreadGroup(self._thread_died)
        self.pipeline = Pipeline(self._on_result, self._thread_died)
        self.messaging = Messaging(config, self.identity, self._clock)
        self._switch = CameraSwitch(
            self.pipeline.camera,
            {each.name: each.fps for each in config.cameras},
            {each.name for each in config.cameras if each.pace == "max"},
        )
        self._dispatcher = Dispatcher(
            self.identity,
            self._clock,
            clock_synced,
            {"ping": ping(self.identity, self._clock), "camera": camera(self._switch)},
            observe=self._tell_command,
        )
        self._supervisor = Supervisor(
            self._look,
            Watchdog(self._notifier),
            stall_limit_s=stall_limit_for([model.timeout_s for model in config.models]),
        )
        self._history = History()
        self._sampler: Sampler | None = None
        self._windows: WindowLoop | None = None
        self._web: WebServer | None = None
        self._camera_states: dict[str, str] = {}
        self.models: list[LoadedModel] = []

    # --- life

    def run(self) -> int:
        """Start, work until `request_stop` or a fatal fault, stop. Returns the exit code: 0 or 1."""
        try:
            self.start()
            self.wait()
            log.info("stopping")
        finally:
            self.stop()
        return 0 if self.fatal is None else 1

    @property
    def fatal(self) -> str | None:
        """Why it stopped by itself; None where it was asked to, or runs."""
        return self._fatal

    def alarm(self, message: str) -> None:
        """Something outside is wrong, and stays so: degraded from here on."""
        self._alarms.append(message)

    def start(self) -> None:
        """Load and warm up everything, then let frames flow. Returns early where a stop is requested meanwhile."""
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        token = None if config.web is None or config.web.token_file is None else read_token(config.web.token_file)
        self._load_models()
        if self.stopping:
            return
        self.messaging.start(config.device.store)
        for model in self.models:
            self.pipeline.add_model(
                model.config.name,
                model.resident,
                lanes=model.lanes,
                batch_timeout_s=model.config.batch_timeout_ms / 1e3,
                timeout_s=model.config.timeout_s,
                down_reason=None if model.error is None else str(model.error),
            )
        for each in config.cameras:
            self._add_camera(each)
        sampler = self._sampler = self._make_sampler()
        # what is loaded by now stays for good: the collector need not walk it again and again
        gc.collect()
        gc.freeze()
        # a window needs a reading at or before its start
        sampler.start()
        builder = WindowBuilder(self.identity, self._window_sources(sampler), self._clock)
        self._windows = WindowLoop(builder, self._on_window, config.telemetry.window_s, self._thread_died)
        self._start_web(sampler, token)
        self.pipeline.start()
        self._windows.start()
        self.messaging.obey(self._dispatcher)
        self._report_models()
        self._notifier.ready(f"cameras: {len(config.cameras)}, models: {len(config.models)}")
        self._threads.spawn("supervisor", self._supervise)
        device = self.identity.device
        log.info("%s is running; cameras: %d, models: %d", device, len(config.cameras), len(config.models))

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, or stops by itself."""
        return self._requested or self._ending.is_set()

    def request_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler: it takes no lock."""
        self._requested = True
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has stopped
            os.write(self._wake_write, b"x")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a stop is requested or a fatal fault; False when the time is up first."""
        if not self.stopping:
            select.select([self._wake_read], [], [], None if timeout_s is None else max(0.0, timeout_s))
        return self.stopping

    def stop(self) -> bool:
        """Stop within 5 s whatever hangs; True when every thread ended. Idempotent."""
        end = time.monotonic() + STOP_S

        def left_s(most: float) -> float:
            return max(0.05, min(most, end - time.monotonic()))

        self._ending.set()
        self._notifier.stopping()
        stuck: list[str] = []

        def step(action: Callable[[], list[str] | None]) -> None:
            # one that fails must not keep the others from what they have to save
            try:
                stuck.extend(action() or ())
            except Exception:
                log.exception("a part did not stop as it should")
                stuck.append("?")

        step(lambda: self.pipeline.stop(left_s(PIPELINE_STOP_S)))
        if (windows := self._windows) is not None:
            # the last window has everything that was in flight
            step(lambda: windows.stop(left_s(0.8)))
        step(self.pipeline.close)
        if (web := self._web) is not None:
            step(lambda: web.stop(left_s(0.5)))
        step(lambda: self.messaging.stop(left_s))
        if (sampler := self._sampler) is not None:
            step(lambda: sampler.stop(left_s(0.3)))
        step(lambda: self._threads.join(left_s(0.3)))
        if stuck:
            log.error("did not end in time: %s", ", ".join(stuck))
        return not stuck

    def health(self) -> Health:
        """The supervisor's last judgement."""
        return self._supervisor.health()

    # --- composition

    def _load_models(self) -> None:
        config = self._config
        lanes = lanes_for(config.models)
        for wanted in config.models:
            if self.stopping:
                return
            self._notifier.extend_timeout(int(LOAD_DEADLINE_S * 1e6))
            streams = sum(wanted.name in each.models for each in config.cameras)
            self.models.append(load_model(wanted, lanes=lanes[wanted.name], streams=streams))
        errors = [model.error for model in self.models if model.error is not None]
        if len(errors) == len(self.models):
            raise errors[0] if len(errors) == 1 else _no_model(errors)
        for model in self.models:
            if model.error is not None:
                log.error("model %s is down: %s", model.config.name, model.error)

    def _add_camera(self, config: CameraConfig) -> None:
        url = f"file:{bundled_media(config.source.location)}" if config.source.kind == "bundled" else config.url
        source = open_camera(name=config.name, url=url, fps=config.fps, pace=config.pace, loop=config.loop)
        self.pipeline.add_camera(source, config.models, full_pace=config.pace == "max", priority=config.priority)

    def _make_sampler(self) -> Sampler:
        hardware = self._config.device.hardware
        keep_s = 2 * self._config.telemetry.window_s + 10
        if hardware.startswith("sim:"):
            device = SimDevice(MODULES[hardware.removeprefix("sim:")], self.pipeline.busy_ns, self.pipeline.lanes)
            log.info("power and temperature are simulated: %s", hardware)
            return Sampler(SimPower(device), SimThermal(device), keep_s=keep_s, on_death=self._thread_died)
        reason = 'hardware = "none"' if hardware == "none" else "no power sensor that this version can read"
        log.info("no power is measured: %s", reason)
        return Sampler(None, None, keep_s=keep_s, none_reason=reason)

    def _window_sources(self, sampler: Sampler) -> WindowSources:
        return WindowSources(
            cut=self.pipeline.cut,
            cameras=self.pipeline.cameras,
            models=self._model_views,
            energy=sampler.energy,
            thermal=sampler.temperature,
            clock_synced=clock_synced,
            fps_wanted=self._switch.wanted,
        )

    def _start_web(self, sampler: Sampler, token: str | None) -> None:
        config = self._config
        store = config.device.store
        door = DaemonDoor(
            identity=self.identity,
            clock=self._clock,
            store=store,
            pipeline=self.pipeline,
            messaging=self.messaging,
            sampler=sampler,
            dispatcher=self._dispatcher,
            history=self._history,
            judgement=self.health,
            models=self._model_views,
            fps_wanted=self._switch.wanted,
        )
        # one folder is enough for us; systemd would give several, separated by colons
        runtime = os.environ.get(RUNTIME_DIRECTORY, "").partition(":")[0]
        self._web = WebServer(
            door,
            (Path(runtime) if runtime else store) / "control.sock",
            listen=None if config.web is None else config.web.listen,
            token=token,
            names=() if config.web is None else config.web.names,
            on_death=self._thread_died,
        )
        try:
            self._web.start()
        except EdgeError as error:
            if not self._alarms or error.code != "socket_unusable":
                raise
            # the store takes no writes, which is an alarm already; frames need no socket
            log.error("no control socket: %s", error)
            self._web = None

    def _model_views(self) -> list[ModelView]:
        views = []
        for name, model in self.pipeline.models.items():
            resident = model.desk.resident()
            if resident is None:
                views.append(ModelView(name, None, "", "", 0, model.desk.down_reason))
            else:
                info = resident.info
                views.append(ModelView(name, info.digest, info.variant, info.backend, resident.places, None))
        return views

    def _report_models(self) -> None:
        models = []
        for model in self.models:
            info = None if model.resident is None else model.resident.info
            models.append(
                ReportedModel(
                    name=model.config.name,
                    engine=None if info is None else info.digest,
                    bundle=None if info is None else info.bundle,
                    variant=None if info is None else info.variant,
                    backend=None if info is None else info.backend,
                    state="down" if info is None else "up",
                    source="configuration",
                )
            )
            if model.error is not None and self.messaging.events is not None:
                self.messaging.events.emit(
                    "model", f"model {model.config.name} is down: {model.error}", severity="error",
                    model=model.config.name, state="down", code=model.error.code,
                )  # fmt: skip
        self.messaging.reported(models)

    # --- on other threads

    def _on_result(self, result: FrameResult) -> None:
        self.messaging.result(result)
        if self._observers.result is not None:
            self._observers.result(result)

    def _on_window(self, report: WindowReport) -> None:
        log.info("%s", describe(report))
        self._history.add(report)
        self.messaging.window(report, self._history.renumber)
        if self._observers.window is not None:
            self._observers.window(report)

    def _supervise(self) -> None:
        t_swept = time.monotonic()
        while True:
            self._supervisor.tick()
            if self._ending.wait(LOOK_PERIOD_S):
                return
            self._supervisor.awake()
            self._tell_cameras()
            if time.monotonic() - t_swept >= SWEEP_PERIOD_S:
                t_swept = time.monotonic()
                if failed := self.pipeline.sweep():
                    log.warning("%d frames were in flight past their time-out and were failed", failed)

    def _look(self) -> HealthInput:
        now_ns = time.monotonic_ns()
        loops = self.messaging.loops()
        if self._windows is not None:
            loops["windows"] = LoopView(self._windows.tick_ns, 2 * self._config.telemetry.window_s + 10)
        if self._sampler is not None and self._sampler.supervised:
            loops["sampler"] = LoopView(self._sampler.tick_ns, 10.0)
        models = self.pipeline.models
        return HealthInput(
            now_ns=now_ns,
            loops=loops,
            oldest_admitted_ns=self.pipeline.ledger.oldest_ns(),
            lanes={
                name: LaneView(model.busy.longest_ns(now_ns), model.desk.unclaimed_ns())
                for name, model in models.items()
            },
            cameras={view.name: view.status for view in self.pipeline.cameras()},
            broker=self.messaging.broker_view(),
            models_down={
                name: reason for name, model in models.items() if (reason := model.desk.down_reason) is not None
            },
            threads_dead=[*self._dead, *self.messaging.dead()],
            alarms=[*self._alarms, *self.messaging.alarms()],
        )

    def _tell_cameras(self) -> None:
        """An event for every camera whose state is another one than at the last look."""
        events = self.messaging.events
        for view in self.pipeline.cameras():
            state, reason = view.status.state, view.status.reason
            before = self._camera_states.get(view.name)
            if state == before or state == "starting" or reason == STOPPED_ON_REQUEST:
                continue
            self._camera_states[view.name] = state
            if events is not None:
                bad = state in ("down", "stalled")
                text = f"camera {view.name} is {state}" + (f": {reason}" if reason else "")
                events.emit(
                    "camera", text, severity="warning" if bad else "info", camera=view.name, state=state,
                    reason=reason, before=before,
                )  # fmt: skip

    def _tell_command(self, name: str, door: Door, reply: Reply) -> None:
        error = reply.error
        if error is None:
            log.info("command %s (%s): obeyed", name, door)
        if self.messaging.events is not None and name != "ping":
            text = f"command {name}: " + ("obeyed" if error is None else f"refused: {error.message}")
            self.messaging.events.emit(
                "command", text, severity="info" if error is None else "warning", name=name, door=door,
                id=reply.id, ok=error is None, code=None if error is None else error.code,
            )  # fmt: skip

    def _thread_died(self, name: str, error: BaseException) -> None:
        # one thread less and nobody would notice: end, and let the service manager start anew
        self._dead.append(name)
        self._fatal = f"thread {name} died: {error!r}"
        log.critical("%s; stopping", self._fatal)
        self._ending.set()
        self.request_stop()


def _no_model(errors: list[EdgeError]) -> BundleError:
    return BundleError("no model could be loaded:\n" + "\n".join(f"  {error}" for error in errors), code="no_model")
