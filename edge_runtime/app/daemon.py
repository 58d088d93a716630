"""The daemon: everything that one device does, composed from a configuration."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from edge_runtime.app.identity import clock_synced, make_identity
from edge_runtime.app.models import LoadedModel, lanes_for, load_model
from edge_runtime.app.results import ResultPublisher
from edge_runtime.bundled import bundled_media
from edge_runtime.camera.open import open_camera
from edge_runtime.clock import SystemClock, utc_text
from edge_runtime.config import CameraConfig, Config, MqttConfig
from edge_runtime.errors import BundleError, EdgeError, MqttError, UsageError
from edge_runtime.hardware.sampler import Sampler
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings, Presence
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records import messages
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import WindowReport
from edge_runtime.sim.module import MODULES, SimDevice, SimPower, SimThermal
from edge_runtime.telemetry.topics import Topics
from edge_runtime.telemetry.windows import ModelView, WindowBuilder, WindowLoop, WindowSources, describe
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
"""Python's default of 5 ms lets one busy thread turn a GIL-free call of 0.45 ms into 5.6 ms."""

SWEEP_PERIOD_S = 1.0
PIPELINE_DEADLINE_S = 2.5
MQTT_DEADLINE_S = 1.0

WindowSink = Callable[[WindowReport], None]
ResultSink = Callable[[FrameResult], None]


@dataclass(frozen=True, slots=True)
class Observers:
    """Who else is told: of every window (on the windows' thread) and of every result (on lane threads)."""

    window: WindowSink | None = None
    result: ResultSink | None = None


class Daemon:
    """One device at work. `start`, then `wait`, then `stop`; or `run`, which is all three.

    `start` raises BundleError where no model at all can be loaded.
    """

    def __init__(self, config: Config, observers: Observers | None = None) -> None:
        self._config = config
        self._observers = observers or Observers()
        self._clock = SystemClock()
        self.identity: Identity = make_identity(config.device.id)
        self._topics = Topics(self.identity.device)
        self._ending = threading.Event()
        self._fatal: str | None = None
        self._threads = ThreadGroup(self._thread_died)
        self.pipeline = Pipeline(self._on_result, self._thread_died)
        self._publish_result: ResultSink | None = None
        self._broker: object | None = None
        self.mqtt: MqttLink | None = None
        self._sampler: Sampler | None = None
        self._windows: WindowLoop | None = None
        self.models: list[LoadedModel] = []
        self._losses: dict[str, int] = {}

    # --- life

    def run(self) -> int:
        """Start, work until `request_stop` or a fatal fault, stop. Returns the exit code: 0 or 1."""
        try:
            self.start()
            self.wait()
        finally:
            clean = self.stop()
        return 0 if clean and self._fatal is None else 1

    def start(self) -> None:
        """Load and warm up everything, then let frames flow."""
        config = self._config
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        lanes = lanes_for(config.models)
        for wanted in config.models:
            streams = sum(wanted.name in camera.models for camera in config.cameras)
            self.models.append(load_model(wanted, lanes=lanes[wanted.name], streams=streams))
        errors = [model.error for model in self.models if model.error is not None]
        if len(errors) == len(self.models):
            raise errors[0] if len(errors) == 1 else _no_model(errors)
        for model in self.models:
            if model.error is not None:
                log.error("model %s is down: %s", model.config.name, model.error)
        if config.mqtt is not None:
            self._start_mqtt(config.mqtt)
        for model in self.models:
            self.pipeline.add_model(
                model.config.name,
                model.resident,
                lanes=model.lanes,
                batch_timeout_s=model.config.batch_timeout_ms / 1e3,
                timeout_s=model.config.timeout_s,
                down_reason=None if model.error is None else str(model.error),
            )
        for camera in config.cameras:
            self._add_camera(camera)
        self._sampler = self._make_sampler()
        # what is loaded by now stays for good: the collector need not walk it again and again
        gc.collect()
        gc.freeze()
        # a window needs a reading at or before its start
        self._sampler.start()
        builder = WindowBuilder(self.identity, self._window_sources(self._sampler), self._clock)
        self._windows = WindowLoop(builder, self._on_window, config.telemetry.window_s)
        self.pipeline.start()
        self._windows.start()
        self._threads.spawn("supervisor", self._supervise)
        log.info(
            "%s is running; cameras: %d, models: %d", self.identity.device, len(config.cameras), len(config.models)
        )

    @property
    def stopping(self) -> bool:
        """Whether it has been asked to stop, or stops by itself."""
        return self._ending.is_set()

    def request_stop(self) -> None:
        """Let `wait` return. Safe in a signal handler."""
        self._ending.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Until a stop is requested or a fatal fault; False when the time is up first."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        # in slices: a signal handler runs between them on every platform
        while not self._ending.is_set():
            left = 3600.0 if end is None else end - time.monotonic()
            if left <= 0:
                return False
            self._ending.wait(min(left, 1.0))
        return True

    def stop(self) -> bool:
        """Stop within 5 s whatever hangs; True when everything ended cleanly. Idempotent."""
        self._ending.set()
        stuck = self.pipeline.stop(PIPELINE_DEADLINE_S)
        if self._windows is not None:
            # the last window has everything that was in flight
            stuck += self._windows.stop()
        self.pipeline.close()
        if self._sampler is not None:
            stuck += self._sampler.stop(0.5)
        stuck += self._threads.join(0.5)
        if self.mqtt is not None:
            self.mqtt.close(MQTT_DEADLINE_S)
        self._stop_broker()
        captures = [name for name in stuck if name.startswith("cam-")]
        if stuck:
            log.warning("threads that did not end in time: %s", ", ".join(stuck))
        # a capture thread in a blocking read ends by its own time-out, and does not make an exit unclean
        return len(stuck) == len(captures)

    # --- composition

    def _start_mqtt(self, mqtt: MqttConfig) -> None:
        host, port, protocol = mqtt.host, mqtt.port, mqtt.protocol
        if mqtt.broker == "embedded":
            from edge_runtime.mqtt.embedded import EmbeddedBroker

            broker = EmbeddedBroker(port=port)
            try:
                broker.start()
            except MqttError as error:
                # a service manager that tries again would fail again: it is the configuration that must change
                raise UsageError(error.message, code=error.code, where=error.where, remedy=error.remedy) from error
            self._broker = broker
            host, port = broker.host, broker.port
            protocol = broker.protocol
            log.info("embedded broker on %s:%d", host, port)
        settings = BrokerSettings(
            host=host,
            port=port,
            client_id=f"edge-runtime-{self.identity.device}",
            protocol=protocol,
            username=mqtt.username,
            password_file=mqtt.password_file,
            ca_file=mqtt.ca_file,
            cert_file=mqtt.cert_file,
            key_file=mqtt.key_file,
            keepalive_s=mqtt.keepalive_s,
        )
        presence = Presence(
            self._topics.presence,
            online=self._presence(online=True),
            offline=self._presence(online=False, will=True),
            goodbye=lambda: self._presence(online=False),
        )
        self.mqtt = MqttLink(settings, presence=presence, capacity=mqtt.queue)
        if mqtt.results:
            self._publish_result = ResultPublisher(self.identity, self._clock, clock_synced, self.mqtt.publish_now)
        self.mqtt.start()

    def _presence(self, *, online: bool, will: bool = False) -> bytes:
        return messages.Presence(
            online=online,
            device=self.identity.device,
            boot=self.identity.boot,
            session=self.identity.session,
            version=self.identity.version,
            t_utc=None if will else utc_text(self._clock.utc()),
        ).to_json()

    def _add_camera(self, config: CameraConfig) -> None:
        url = f"file:{bundled_media(config.source.location)}" if config.source.kind == "bundled" else config.url
        full_pace = config.pace == "max"
        camera = open_camera(name=config.name, url=url, fps=config.fps, pace=config.pace, loop=config.loop)
        self.pipeline.add_camera(camera, config.models, full_pace=full_pace, priority=config.priority)

    def _make_sampler(self) -> Sampler:
        hardware = self._config.device.hardware
        keep_s = 2 * self._config.telemetry.window_s + 10
        if hardware.startswith("sim:"):
            device = SimDevice(MODULES[hardware.removeprefix("sim:")], self.pipeline.busy_ns, self.pipeline.lanes)
            log.info("power and temperature are simulated: %s", hardware)
            return Sampler(SimPower(device), SimThermal(device), keep_s=keep_s)
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
            fps_wanted={camera.name: camera.fps for camera in self._config.cameras},
        )

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

    # --- on other threads

    def _on_result(self, result: FrameResult) -> None:
        if self._publish_result is not None:
            self._publish_result(result)
        if self._observers.result is not None:
            self._observers.result(result)

    def _on_window(self, report: WindowReport) -> None:
        log.info("%s", describe(report))
        self._tell_losses()
        if self.mqtt is not None:
            self.mqtt.publish(self._topics.window, report.to_json())
        if self._observers.window is not None:
            self._observers.window(report)

    def _tell_losses(self) -> None:
        """What did not reach the broker since the window before, and why."""
        if self.mqtt is None:
            return
        status = self.mqtt.status()
        losses = {
            "messages dropped from a full queue": status.dropped,
            "messages refused by the broker": status.refused,
            "results not sent": status.results_dropped,
        }
        lost = [f"{count - self._losses.get(what, 0)} {what}" for what, count in losses.items()]
        if losses != self._losses and any(losses.values()):
            word = "connected" if status.connected else status.reason
            log.warning("mqtt (%s): %s", word, ", ".join(part for part in lost if not part.startswith("0 ")))
        self._losses = losses

    def _supervise(self) -> None:
        while not self._ending.wait(SWEEP_PERIOD_S):
            if failed := self.pipeline.sweep():
                log.warning("%d frames were in flight past their time-out and were failed", failed)

    def _thread_died(self, name: str, error: BaseException) -> None:
        # one thread less and nobody would notice: end, and let the service manager start anew
        self._fatal = f"thread {name} died: {error!r}"
        log.critical("%s; stopping", self._fatal)
        self._ending.set()

    def _stop_broker(self) -> None:
        if self._broker is not None:
            from edge_runtime.mqtt.embedded import EmbeddedBroker

            assert isinstance(self._broker, EmbeddedBroker)
            self._broker.stop(1.0)
            self._broker = None


def _no_model(errors: list[EdgeError]) -> BundleError:
    return BundleError("no model could be loaded:\n" + "\n".join(f"  {error}" for error in errors), code="no_model")
