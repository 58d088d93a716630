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
from functools import partial
from pathlib import Path

from edge_runtime.app.backing import Backing
from edge_runtime.app.budget import BudgetKeeper
from edge_runtime.app.building import PLANS, Builder, PlanMaker
from edge_runtime.app.camera_set import OpenSource, open_source
from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.command_door import CommandDoor
from edge_runtime.app.door import DaemonDoor, History
from edge_runtime.app.engines import KERNELS, Engines
from edge_runtime.app.governing import Governing, find_profile
from edge_runtime.app.gpu_faults import FAULTS_NAME, GpuFaults
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
from edge_runtime.app.keeper import ModelKeeper
from edge_runtime.app.loader import Loader
from edge_runtime.app.machine import Choose, choose_machine
from edge_runtime.app.messaging import Messaging
from edge_runtime.app.overlay import OVERLAY_NAME, OverlayFile
from edge_runtime.app.proof import prove
from edge_runtime.app.reread import Reread
from edge_runtime.app.sd_notify import Notifier
from edge_runtime.app.shelf import Shelf
from edge_runtime.app.swap import Swapper
from edge_runtime.app.telling import IdleWatch, Teller
from edge_runtime.camera.av import decode_image
from edge_runtime.clock import SystemClock
from edge_runtime.config import Config
from edge_runtime.control.commands import camera, ping, reload, set_budget, variant
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.control.journal import JOURNAL_NAME, CommandJournal
from edge_runtime.engine.onnxrt_cache import FOLDER as SESSIONS
from edge_runtime.engine.onnxrt_cache import SessionCache
from edge_runtime.engine.tensorrt.gpu import open_gpu
from edge_runtime.engine.tensorrt.plans import PlanStore
from edge_runtime.errors import EdgeError
from edge_runtime.hardware.memory import available_bytes, use_one_arena
from edge_runtime.hardware.protocol import ClockControl
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.governing import Operating
from edge_runtime.records.identity import Identity
from edge_runtime.records.power import Unavailable
from edge_runtime.records.window import WindowReport
from edge_runtime.telemetry.operating import ModelView
from edge_runtime.telemetry.windows import WindowBuilder, WindowLoop, WindowSources, describe
from edge_runtime.threads import ThreadGroup
from edge_runtime.web.access import read_token
from edge_runtime.web.server import WebServer

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms lets one busy thread turn a GIL-free call of 0.45 ms into 5.6 ms."""

SWEEP_PERIOD_S = 1.0
LOAD_DEADLINE_S = 300.0
"""What systemd is told that loading and warming up one model may take."""

GOVERNOR_SILENCE_S = 5.0
"""Its lease lapses long before: then it has had its chance."""

STOP_S = 4.5
"""All of a stop; it has to be over in 5 s."""
PIPELINE_STOP_S = 2.0
LOADER_STOP_S = 0.7
"""A proof is killed at once; a session that is being created cannot be, and ends with the process."""
BUILDER_STOP_S = 0.5
GPU_STOP_S = 0.5
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

    def __init__(
        self,
        config: Config,
        observers: Observers | None = None,
        notifier: Notifier | None = None,
        config_file: Path | None = None,
        choose: Choose = choose_machine,
        open_source: OpenSource = open_source,
    ) -> None:
        """`config_file` is read again on `request_reread`. `choose`: what `[device] hardware` means. `open_source`:
        what a `[[camera]]` means, in place of its `url`."""
        self._config = config
        self._observers = observers or Observers()
        self._notifier = notifier or Notifier()
        self._clock = SystemClock()
        self.identity: Identity = make_identity(config.device.id)
        self._ending = threading.Event()
        self._requested = False
        self._loading = False
        self._reread_wanted = False
        # a signal handler may write to a pipe, and may not touch a lock
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._alarms: list[str] = []
        self._fatal: str | None = None
        self._dead: list[str] = []
        self._threads = ThreadGroup(self._thread_died)
        self.pipeline = Pipeline(self._on_result, self._thread_died)
        self.messaging = Messaging(config, self.identity, self._clock)
        self._tell = Teller(self.messaging)
        # a simulated module has to be there before its engines
        self._machine = choose(
            config.device.hardware, self.pipeline, on_switch=self._tell.sensor, on_death=self._thread_died
        )
        sensors = self._machine.sensors
        unmeasured = sensors.reason if isinstance(sensors, Unavailable) else None
        self.budget = BudgetKeeper(config.budget, unmeasured=unmeasured, tell=self._tell.budget)
        self.cameras = CameraKeeper(
            config.cameras,
            [each.name for each in config.models],
            self.pipeline,
            OverlayFile(config.device.store / OVERLAY_NAME),
            open_source,
            tell=self._tell.camera,
            changed=self._cameras_changed,
        )
        self._loader = Loader(self._thread_died)
        self.shelf = Shelf(config.device.store, self._clock)
        self._plans = PlanStore(config.device.store / PLANS)
        keys = config.engine.plan_keys
        maker = PlanMaker(self._plans, prove=prove, free_bytes=available_bytes, plan_keys=keys)
        kernels = config.device.store / KERNELS
        self._gpu_faults = GpuFaults(config.device.store / FAULTS_NAME, self._clock)
        # a simulated module has no GPU but the simulated one
        gpu = None if self._machine.wrap is not None else lambda: open_gpu(self._gpu_died, kernels=kernels)
        sessions = SessionCache(config.device.store / SESSIONS)
        self.engines = Engines(maker, gpu, sessions)
        self._builder = Builder(
            maker,
            self.engines.here,
            made=lambda model: self.keeper.plans_made(model),
            failed=lambda model, error: self.keeper.plans_failed(model, error),
            on_death=self._thread_died,
        )
        self.keeper = ModelKeeper(
            config,
            self.pipeline,
            self.shelf,
            Swapper(
                self.pipeline,
                prove=partial(prove, sessions=sessions.folder),
                free_bytes=available_bytes,
                read_image=lambda path: decode_image(path.read_bytes()),
                cancel=self._loader.cancel,
                wrap=self._machine.wrap,
                engines=self.engines,
            ),
            self._loader,
            tell=self._tell.model,
            changed=self._report,
            backing=Backing(self.engines, want=self._builder.want, maker=maker),
        )
        self._journal = CommandJournal(
            config.device.store / JOURNAL_NAME, self._clock, clock_synced, self.identity.boot
        )
        self._dispatcher = Dispatcher(
            self.identity,
            self._clock,
            clock_synced,
            {
                "ping": ping(self.identity, self._clock),
                "camera": camera(self.cameras),
                "reload": reload(self.keeper),
                "variant": variant(self.keeper),
                "set-budget": set_budget(self.budget),
            },
            journal=self._journal,
            observe=self._tell.command,
        )
        self._commands = CommandDoor(self._dispatcher, config.device.id, self._thread_died)
        self._reread = Reread(
            config, config_file, self.keeper, self.cameras, self.messaging, self._notifier, budget=self.budget.apply
        )
        self._supervisor = Supervisor(
            self._look,
            Watchdog(self._notifier),
            stall_limit_s=lambda: stall_limit_for([model.timeout_ns / 1e9 for model in self.pipeline.models.values()]),
        )
        self._history = History()
        self._sampler: Sampler | None = None
        self._governing: Governing | None = None
        self._windows: WindowLoop | None = None
        self._web: WebServer | None = None
        self._idle = IdleWatch()

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
        use_one_arena()
        token = None if config.web is None or config.web.token_file is None else read_token(config.web.token_file)
        self.cameras.load()
        self.keeper.count_cameras(self.cameras.cameras())
        self._sweep_plans()
        self._loading = True
        try:
            self.keeper.load(self._keep_loading)
        finally:
            self._loading = False
        if self.stopping:
            return
        self.messaging.start(
            config.device.store,
            self._commands.attach,
            hardware=self._machine.name,
            sensors=not isinstance(self._machine.sensors, Unavailable),
        )
        self.cameras.start()
        sampler = self._sampler = self._make_sampler()
        # what is loaded by now stays for good: the collector need not walk it again and again
        gc.collect()
        gc.freeze()
        # a window needs a reading at or before its start
        sampler.start()
        governing = self._governing = self._make_governing(sampler)
        builder = WindowBuilder(self.identity, self._window_sources(sampler), self._clock)
        self._windows = WindowLoop(builder, self._on_window, config.telemetry.window_s, self._thread_died)
        # whoever sends an id again shall find it known from the first moment on
        self._journal.open()
        self._start_web(sampler, token)
        governing.begin()
        governing.start()
        self.pipeline.start()
        self._windows.start()
        self._loader.start()
        self._builder.start()
        self._commands.start()
        self.keeper.tell_start()
        self.cameras.tell_start()
        self._report()
        cameras = len(self.cameras.cameras())
        self._notifier.ready(f"cameras: {cameras}, models: {len(config.models)}")
        self._threads.spawn("supervisor", self._supervise)
        device = self.identity.device
        log.info("%s is running; cameras: %d, models: %d", device, cameras, len(config.models))

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, or stops by itself."""
        return self._requested or self._ending.is_set()

    def request_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler: it takes no lock that the main thread may hold."""
        self._requested = True
        if self._loading:
            self._loader.cancel.set()  # a proof may take minutes
        with contextlib.suppress(OSError):  # full: it is awake already; closed: it has stopped
            os.write(self._wake_write, b"x")

    def request_reread(self) -> None:
        """Let `wait` have the configuration read again, as SIGHUP wants. Safe in a signal handler."""
        self._reread_wanted = True
        with contextlib.suppress(OSError):
            os.write(self._wake_write, b"h")

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a stop is requested or a fatal fault; False when the time is up first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.stopping:
            left_s = None if end is None else end - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            select.select([self._wake_read], [], [], left_s)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
            if self._reread_wanted and not self.stopping:
                self._reread_wanted = False
                self._loader.post("configuration read again", self._reread.run)
        return self.stopping

    def stop(self) -> bool:
        """Stop within 5 s whatever hangs; True when every thread ended. Idempotent."""
        end = time.monotonic() + STOP_S

        def left_s(most: float) -> float:
            return max(0.05, min(most, end - time.monotonic()))

        self._ending.set()
        self._commands.halt()
        self._notifier.stopping()
        stuck: list[str] = []

        def step(action: Callable[[], list[str] | None]) -> None:
            # one that fails must not keep the others from what they have to save
            try:
                stuck.extend(action() or ())
            except Exception:
                log.exception("a part did not stop as it should")
                stuck.append("?")

        # first of all: a job that loads a model gives up
        step(lambda: self._loader.stop(left_s(LOADER_STOP_S)))
        step(lambda: self._builder.stop(left_s(BUILDER_STOP_S)))
        if (governing := self._governing) is not None:
            # what it would see from here on is nobody's wish; its point stays until nothing runs any more
            step(lambda: governing.stop(left_s(0.3)))
        step(lambda: self.pipeline.stop(left_s(PIPELINE_STOP_S)))
        if (sampler := self._sampler) is not None:
            sampler.hurry()
        if (windows := self._windows) is not None:
            # the last window has everything that was in flight
            step(lambda: windows.stop(left_s(0.8)))
        step(self.pipeline.close)
        step(lambda: self.engines.stop(left_s(GPU_STOP_S)))
        if governing is not None:
            step(governing.close)
        if (web := self._web) is not None:
            step(lambda: web.stop(left_s(0.5)))
        # what they answer is to be sent, too
        step(lambda: self._commands.stop(left_s(0.5)))
        step(lambda: self.messaging.stop(left_s))
        step(lambda: [] if self._journal.close(left_s(0.3)) else ["the commands' journal"])
        if sampler is not None:
            step(lambda: sampler.stop(left_s(0.3)))
        step(lambda: self._threads.join(left_s(0.3)))
        if stuck:
            log.error("did not end in time: %s", ", ".join(stuck))
        return not stuck

    def health(self) -> Health:
        """The supervisor's last judgement."""
        return self._supervisor.health()

    # --- composition

    def _keep_loading(self) -> bool:
        """Before every model: whether to go on, and systemd waits for it."""
        self._notifier.extend_timeout(int(LOAD_DEADLINE_S * 1e6))
        return not self.stopping

    def _sweep_plans(self) -> None:
        try:
            for name in self._plans.sweep():
                log.info("what an interrupted build left was removed: %s", name)
        except (EdgeError, OSError) as error:
            log.warning("what an interrupted build left could not be removed: %s", error)

    def _make_sampler(self) -> Sampler:
        machine, hardware = self._machine, self._config.device.hardware
        if isinstance(machine.sensors, Unavailable):
            log.info("no power is measured: %s", machine.sensors.reason)
            for trouble in self.budget.unheld():
                log.warning("%s", trouble)
        elif machine.wrap is not None:
            log.info("power and temperature are simulated: %s", hardware)
        keep_s = 2 * self._config.telemetry.window_s + 10
        return Sampler(machine.sensors, idle=machine.idle, keep_s=keep_s, on_death=self._thread_died)

    def _make_governing(self, sampler: Sampler) -> Governing:
        profile, trouble = find_profile(self._config, self._machine)
        if trouble is not None:
            self._tell.profile(trouble)
        return Governing(
            self.pipeline,
            self.keeper,
            self.cameras,
            self.budget.current,
            sampler,
            profile=profile,
            profile_trouble=trouble,
            clock=self._gpu_clock(),
            tell=self._tell.governor,
            hold=lambda: self._builder.building,
            on_death=self._thread_died,
        )

    def _gpu_clock(self) -> ClockControl | None:
        """The GPU's clock, where anything runs there: it is no means against what runs on the CPU."""
        return self._machine.clock if self._machine.wrap is not None or self.engines.has_gpu else None

    def _window_sources(self, sampler: Sampler) -> WindowSources:
        return WindowSources(
            cut=self.pipeline.cut,
            cameras=self.pipeline.cameras_of_cut,
            models=self._model_views,
            energy=sampler.energy,
            thermal=sampler.temperature,
            clock_synced=clock_synced,
            fps_wanted=self.cameras.wanted,
            operating=self.operating,
            seconds_above=sampler.seconds_above,
        )

    def operating(self) -> Operating:
        """How this device is governed now. Any thread."""
        governing = self._governing
        return Operating(self.budget.current()) if governing is None else governing.operating()

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
            cameras=self.cameras,
            keeper=self.keeper,
            shelf=self.shelf,
            budget=self.budget,
            operating=self.operating,
            gpu_faults=self._gpu_faults,
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

    def _report(self) -> None:
        self.messaging.reported(self.keeper.reported(), self.cameras.reported())

    def _cameras_changed(self) -> None:
        self.keeper.count_cameras(self.cameras.cameras())
        self._report()

    # --- on other threads

    def _on_result(self, result: FrameResult) -> None:
        self.messaging.result(result)
        if self._observers.result is not None:
            self._observers.result(result)

    def _on_window(self, report: WindowReport) -> None:
        log.info("%s", describe(report))
        self._history.add(report)
        self.messaging.window(report, self._history.renumber)
        if self._sampler is not None:
            self._idle.look(report, self.pipeline.busy_ns(), self._sampler)
        if self._observers.window is not None:
            self._observers.window(report)

    def _supervise(self) -> None:
        t_swept = time.monotonic()
        while True:
            self._supervisor.tick()
            if self._ending.wait(LOOK_PERIOD_S):
                return
            self._supervisor.awake()
            if self._governing is not None:
                self._governing.check()
            self._tell.cameras(self.pipeline.cameras())
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
        governing = self._governing
        if governing is not None:
            loops["governor"] = LoopView(governing.tick_ns, GOVERNOR_SILENCE_S)
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
            alarms=[
                *self._alarms,
                *self.budget.unheld(),
                *self.keeper.alarms(),
                *self.cameras.alarms(),
                *self.messaging.alarms(),
                *self._journal.alarms(),
                *(() if governing is None else governing.alarms()),
            ],
        )

    def _gpu_died(self, message: str) -> None:
        """A sticky error: nothing on the GPU works in this process any more. On the thread "gpu"."""
        self._fatal = message
        self._tell.gpu(message, self._gpu_faults.add(message))
        log.critical("%s; stopping", message)
        self._ending.set()
        self.request_stop()

    def _thread_died(self, name: str, error: BaseException) -> None:
        # one thread less and nobody would notice: end, and let the service manager start anew
        self._dead.append(name)
        self._fatal = f"thread {name} died: {error!r}"
        log.critical("%s; stopping", self._fatal)
        self._ending.set()
        self.request_stop()
