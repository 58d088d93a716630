"""What the GPU's checks of `device-check` work with: engines of one plan, runs of them, answers compared."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.engine.tensorrt.gpu import Gpu
from edge_runtime.engine.tensorrt.plan import read_sidecar
from edge_runtime.engine.tensorrt.runtime import TensorRtEngine, load_plan
from edge_runtime.engine.tensorrt.stopwatch import Stopwatch
from edge_runtime.hardware.memory import available_bytes, resident_bytes
from edge_runtime.records.frames import InputArray

RUNS = 50
"""Of each thing that is timed; the median counts."""


@dataclass(frozen=True, slots=True)
class Bench:
    """What the checks work with. `gpu` has the door `stopwatch`; `plan` is the file of the variant's plan; compiled
    kernels are kept in `kernels`. What follows tells memory, and loads NVRTC."""

    gpu: Gpu
    stopwatch: Stopwatch
    bundle: Bundle
    variant: str
    plan: Path
    read_image: ReadImage
    kernels: Path
    reloads: int = 100
    available_bytes: Callable[[], int | None] = available_bytes
    resident_bytes: Callable[[], int | None] = resident_bytes
    load_library: Callable[[str], Any] = ctypes.CDLL

    def load(self, *, graphs: bool = True, mapped: bool = False) -> TensorRtEngine:
        """An engine of the plan, warm. Raises as runtime.load_plan does."""
        return load_plan(
            self.gpu.owner,
            self.gpu.trt,
            self.bundle,
            self.variant,
            self.plan.read_bytes(),
            read_sidecar(self.plan),
            here=self.gpu.here,
            where=str(self.plan),
            prefer_mapped=mapped,
            graphs=graphs,
        )

    @contextmanager
    def loaded(self, *, graphs: bool = True, mapped: bool = False) -> Iterator[TensorRtEngine]:
        """The same, and closed at the end."""
        engine = self.load(graphs=graphs, mapped=mapped)
        try:
            yield engine
        finally:
            engine.close()


class Work:
    """A lane with a picture of its own, and what it answered alone."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.seed = seed
        self.error: BaseException | None = None
        self.worst = 0.0
        self._engine = engine
        self._count = least(engine)
        self._lane: Lane = engine.open_lane()
        self._buffer: InputBuffer = engine.allocate(self._count)
        fill(self._buffer.array, seed)
        self._answer: Mapping[str, NDArray[Any]] = {}

    def alone(self, runs: int) -> float:
        """Seconds of so many runs, after one that is remembered."""
        self._answer = copied(self._run())
        started = time.perf_counter()
        for _ in range(runs):
            self._run()
        return time.perf_counter() - started

    def again(self, runs: int) -> None:
        """The same beside others; on a thread of its own."""
        try:
            for _ in range(runs):
                self.worst = max(self.worst, deviation(self._run(), self._answer))
        except BaseException as error:  # noqa: BLE001  raised where the threads are joined
            self.error = error

    def _run(self) -> Mapping[str, NDArray[Any]]:
        self._lane.submit(self._buffer, self._count)
        return self._lane.collect()

    def close(self) -> None:
        self._engine.release(self._buffer)


@contextmanager
def running(engine: Engine) -> Iterator[Callable[[], Mapping[str, NDArray[Any]]]]:
    """Runs the smallest batch, of noise, on a lane of its own."""
    count = least(engine)
    lane, buffer = engine.open_lane(), engine.allocate(count)
    fill(buffer.array, 0)

    def run() -> Mapping[str, NDArray[Any]]:
        lane.submit(buffer, count)
        return lane.collect()

    try:
        yield run
    finally:
        engine.release(buffer)


def least(engine: Engine) -> int:
    return engine.allowed_batches[0] if engine.allowed_batches else 1


def fill(array: InputArray, seed: int) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)
    array[:] = noise if array.dtype == np.uint8 else noise.astype(np.float32) / np.float32(255)


def copied(answer: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.array(each) for name, each in answer.items()}


def deviation(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> float:
    """The largest difference of any output, as a share of its largest magnitude; infinite where shapes differ."""
    return max(deviations(found, expected).values(), default=float("inf"))


def deviations(found: Mapping[str, NDArray[Any]], expected: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    result = {}
    for name, wanted in expected.items():
        answer = found.get(name)
        if answer is None or answer.shape != wanted.shape:
            result[name] = float("inf")
            continue
        scale = float(np.abs(wanted.astype(np.float64)).max(initial=0.0)) or 1.0
        difference = np.abs(answer.astype(np.float64) - wanted)
        result[name] = float(difference.max(initial=0.0)) / scale if np.isfinite(difference).all() else float("inf")
    return result


def median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(RUNS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e3
