"""What a broker that fails in one way or another does to the frames: a whole daemon, one fault after the other."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.app.daemon import Daemon, Observers
from edge_runtime.app.machine import Machine, choose_machine
from edge_runtime.bench.nothing import nothing_camera
from edge_runtime.bench.telemetry_broker import HOST, BenchBroker, Line, Reader, wait_for
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import CameraConfig, parse_config
from edge_runtime.engine.protocol import Engine, EngineInfo, InputBuffer, Lane
from edge_runtime.mqtt.session import Incoming
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.power import SensorSwitch
from edge_runtime.records.window import Latency, WindowReport

DEVICE = "bench"
FINE = "fine"
FAULTS = ("killed", "frozen", "swallowing", "slow", "refusing")
"""Of the broker: SIGKILL, SIGSTOP; of the line to it: takes everything and passes nothing on, 2 kB/s, closes every
connection at once."""
SETTLE_S = 2.0
BACK_S = 120.0
"""How long a device may take to find a broker that is back: its back-off grows to a minute."""
_WARM_UP_S = 1.0


@dataclass(frozen=True, slots=True)
class FaultPhase:
    """`of_fine`: frames per second over those of the phases without a fault. `p99_ms`: capture to result."""

    name: str
    seconds: float
    frames_hz: float
    of_fine: float
    p99_ms: float | None


@dataclass(frozen=True, slots=True)
class Faults:
    """Results of the whole run: `made`, `arrived` at a subscriber, `dropped` as the daemon has counted them. What is in
    none of the two was handed to a connection that then broke: of that, nobody can tell how much arrived."""

    cameras: int
    fps: float
    phases: tuple[FaultPhase, ...]
    made: int
    arrived: int
    dropped: int

    @property
    def untold(self) -> int:
        return self.made - self.arrived - self.dropped


class AtOnceEngine:
    """An engine that ran once, and gives that answer to everything from then on, at once."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        buffer = engine.allocate(1)
        buffer.array.fill(114.0)
        lane = engine.open_lane()
        lane.submit(buffer, 1)
        self._answer = {name: np.array(values) for name, values in lane.collect().items()}
        engine.release(buffer)
        self.allowed_batches: tuple[int, ...] | None = (1,)

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def open_lane(self) -> Lane:
        return _AtOnceLane(self._answer)

    def allocate(self, max_batch: int) -> InputBuffer:
        return self._engine.allocate(max_batch)

    def release(self, buffer: InputBuffer) -> None:
        self._engine.release(buffer)

    def close(self) -> None:
        self._engine.close()


class _AtOnceLane:
    def __init__(self, answer: Mapping[str, NDArray[Any]]) -> None:
        self._answer = answer

    def submit(self, buffer: InputBuffer, count: int) -> None:
        pass

    def collect(self) -> Mapping[str, NDArray[Any]]:
        return self._answer


def _choose(
    hardware: str,
    pipeline: Pipeline,
    *,
    on_switch: Callable[[SensorSwitch], None],
    on_death: Callable[[str, BaseException], None],
) -> Machine:
    machine = choose_machine(hardware, pipeline, on_switch=on_switch, on_death=on_death)
    return replace(machine, wrap=AtOnceEngine)


@contextmanager
def daemon_at_work(
    store: Path, cameras: int, fps: float, observers: Observers, *, mqtt_port: int | None = None
) -> Iterator[Daemon]:
    """A daemon with cameras without pixels and the bundled model, which answers at once. Without a broker its sensors
    are simulated and it has a budget; with one, nobody governs it."""
    store.mkdir(parents=True)
    text = f"""
[device]
id = "{DEVICE}"
hardware = "{"sim:orin-nano-8gb" if mqtt_port is None else "none"}"
store = {json.dumps(str(store))}
[[model]]
name = "detector"
bundle = "bundled:centernet"
variant = "fp32-416"
max_batch = 1
[telemetry]
window_s = 1.0
"""
    if mqtt_port is None:
        text += "[budget]\npower_w = 15.0\n"
    else:
        text += f'[mqtt]\nhost = "{HOST}"\nport = {mqtt_port}\nresults = true\n'
    for number in range(cameras):
        text += f'[[camera]]\nname = "camera-{number}"\nurl = "synthetic:"\n'

    def open_source(config: CameraConfig) -> Camera:
        return nothing_camera(config.name, fps)

    daemon = Daemon(parse_config(text, "bench", store), observers, choose=_choose, open_source=open_source)
    try:
        daemon.start()
        daemon.wait(_WARM_UP_S)
        yield daemon
    finally:
        daemon.stop()


def window_of(folder: Path, cameras: int) -> WindowReport:
    """A window as a daemon with so many cameras makes it, with latencies that differ as those of real ones do."""
    reports: list[WindowReport] = []
    with daemon_at_work(folder, cameras, 15.0, Observers(window=reports.append)):
        wait_for(lambda: len(reports) >= 2, 30.0)
    report, chance = reports[1], random.Random(cameras)  # the last one of all is shorter
    return report.model_copy(
        update={
            "cameras": [each.model_copy(update=_scattered(each.latency_ms, chance)) for each in report.cameras],
            "models": [each.model_copy(update=_scattered(each.latency_ms, chance)) for each in report.models],
            **_scattered(report.latency_ms, chance),
        }
    )


def _scattered(latency: Latency, chance: random.Random) -> dict[str, Latency]:
    """150 frames over the histogram, at random: what answers at once is too much alike to be compressed fairly."""
    middle = chance.uniform(20.0, 60.0)
    values = sorted(chance.lognormvariate(math.log(middle), 0.4) for _ in range(150))
    bounds = [math.inf if bound is None else bound for bound, _ in latency.buckets]
    counts = Counter(bisect_left(bounds, value) for value in values)
    return {
        "latency_ms": Latency(
            p50=round(values[75], 2),
            p99=round(values[148], 2),
            buckets=[(bound, counts[index]) for index, (bound, _) in enumerate(latency.buckets)],
        )
    }


class FaultRun:
    """A daemon, its broker and the line between them, as a context; `phase` after `phase`."""

    def __init__(self, folder: Path, *, cameras: int = 2, fps: float = 15.0) -> None:
        self._folder = folder
        self._cameras = cameras
        self._fps = fps
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._latencies_ms: list[float] = []
        self._arrived: set[int] = set()
        self._phases: list[tuple[str, float, int, list[float]]] = []

    def __enter__(self) -> FaultRun:
        with ExitStack() as stack:
            self._broker = stack.enter_context(BenchBroker(self._folder))
            self._line = stack.enter_context(Line(self._broker.port))
            self._reader = stack.enter_context(Reader(self._broker.port, DEVICE, self._read))
            self._daemon = stack.enter_context(
                daemon_at_work(
                    self._folder / "faults",
                    self._cameras,
                    self._fps,
                    Observers(result=self._take),
                    mqtt_port=self._line.port,
                )
            )
            self._wait_connected()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *details: Any) -> None:
        self._stack.__exit__(*details)

    def phase(self, name: str, seconds: float) -> None:
        """Count frames for so long, under the fault `name` or none; then mend it and wait until all is well again."""
        begin, end = self._switches(name)
        begin()
        try:
            before, t_start_s = self._made(), time.monotonic()
            self._daemon.wait(seconds)
            span_s = time.monotonic() - t_start_s
            with self._lock:
                latencies_ms = self._latencies_ms[before:]
            self._phases.append((name, span_s, len(latencies_ms), latencies_ms))
        finally:
            end()
        if name != FINE:
            self._reader.wait(BACK_S)
            self._wait_connected()
            self._daemon.wait(min(SETTLE_S, seconds))

    def result(self) -> Faults:
        """What was seen until now."""
        fine = [(frames, span_s) for name, span_s, frames, _ in self._phases if name == FINE]
        fine_hz = sum(frames for frames, _ in fine) / max(1e-9, sum(span_s for _, span_s in fine))
        phases = [
            FaultPhase(
                name,
                round(span_s, 2),
                round(frames / span_s, 3),
                round(frames / span_s / fine_hz, 4) if fine_hz else 0.0,
                round(float(np.percentile(latencies_ms, 99)), 2) if latencies_ms else None,
            )
            for name, span_s, frames, latencies_ms in self._phases
        ]
        now = self._daemon.messaging.mqtt_now()
        with self._lock:
            made, arrived = len(self._latencies_ms), len(self._arrived)
        return Faults(self._cameras, self._fps, tuple(phases), made, arrived, 0 if now is None else now.results_dropped)

    def _switches(self, name: str) -> tuple[Callable[[], None], Callable[[], None]]:
        """How a fault begins, and how it ends."""
        if name == "killed":
            return self._broker.kill, self._broker.start
        if name == "frozen":
            return self._broker.freeze, self._broker.thaw
        if name == "swallowing":
            return lambda: self._line.set("swallowing"), lambda: self._line.set("ok")
        if name == "slow":
            return lambda: self._line.set("slow"), lambda: self._line.set("ok")
        if name == "refusing":
            return lambda: self._line.set("refusing"), lambda: self._line.set("ok")
        return lambda: None, lambda: None

    def _wait_connected(self) -> None:
        wait_for(lambda: (now := self._daemon.messaging.mqtt_now()) is not None and now.connected, BACK_S)

    def _made(self) -> int:
        with self._lock:
            return len(self._latencies_ms)

    def _take(self, result: FrameResult) -> None:
        with self._lock:
            self._latencies_ms.append((result.timings.t_result_ns - result.t_capture_ns) / 1e6)

    def _read(self, incoming: Incoming) -> None:
        if "/results/" in incoming.topic:
            seq = int(json.loads(incoming.payload)["seq"])
            with self._lock:
                self._arrived.add(seq)


def script(faults: Sequence[str]) -> list[str]:
    """Every fault between two phases without any."""
    return [FINE, *(name for fault in faults for name in (fault, FINE))]
