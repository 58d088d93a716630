"""What a frame costs the processor by the format that a model takes: writing it into the batch, and running the model.

All formats take the same frames in turn, each frame in another order, so that what else this machine does meanwhile
falls on all of them alike; what is compared are the ratios within a frame.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.session_check import DTYPES, output_shapes
from edge_runtime.errors import UsageError
from edge_runtime.records.frames import InputArray, Pixels
from edge_runtime.records.spec import InputSpec, Pixel

__all__ = ["REPEATS", "InputCost", "measure_inputs"]

REPEATS = 60
"""Frames that each format is measured on."""

_LEVEL = 0.9
_RESAMPLES = 1000
_WARM_UP = 2


@dataclass(frozen=True, slots=True)
class InputCost:
    """CPU time of one frame on one thread, medians. `ratio`: to float32, the median over frames; `low` and `high` are
    its 90 % interval (bootstrap over frames). `frame_bytes`: what is written for a frame, and handed to the model."""

    pixel: Pixel
    frame_bytes: int
    write_ms: float
    run_ms: float
    ratio: float
    low: float
    high: float

    @property
    def faster(self) -> bool:
        """Faster than float32, and not by chance."""
        return self.high < 1

    def __str__(self) -> str:
        return (
            f"{self.write_ms + self.run_ms:.2f} ms of CPU a frame ({self.write_ms:.2f} to write, {self.run_ms:.2f} to "
            f"run), {self.ratio:.3f} of float32 ({self.low:.3f} to {self.high:.3f}), {self.frame_bytes} bytes"
        )


def measure_inputs(
    models: Mapping[Pixel, tuple[bytes, InputSpec]],
    frames: Sequence[Pixels],
    where: str,
    *,
    repeats: int = REPEATS,
    seed: int = 0,
    clock: Callable[[], int] = time.thread_time_ns,
) -> tuple[InputCost, ...]:
    """The cost of every format of one model, "float32" among them, in the order given.

    models: the ONNX file and its input, by format. frames: as the cameras decode them, at least one; `repeats` frames
    are run on each model, from the first again where there are fewer. clock: CPU time of this thread, ns; a session has
    no other.

    Raises UsageError without frames, BundleError where a model does not run.
    """
    if not frames:
        raise UsageError("there are no frames to measure with", remedy="name a clip or pictures")
    trials = {pixel: _Trial(data, spec, where) for pixel, (data, spec) in models.items()}
    order = list(trials)
    taken: dict[Pixel, list[tuple[int, int]]] = {pixel: [] for pixel in order}
    for turn in range(-_WARM_UP, repeats):
        frame = frames[turn % len(frames)]
        place = turn % len(order)
        for pixel in order[place:] + order[:place]:
            measured = trials[pixel].run(frame, clock)
            if turn >= 0:
                taken[pixel].append(measured)
    rng = np.random.default_rng(seed)
    draws = rng.integers(0, repeats, (_RESAMPLES, repeats))
    times = {pixel: np.array(pairs, np.float64) / 1e6 for pixel, pairs in taken.items()}
    floats = times["float32"].sum(axis=1)
    return tuple(_cost(pixel, trials[pixel], times[pixel], floats, draws) for pixel in order)


def _cost(
    pixel: Pixel, trial: _Trial, times: NDArray[np.float64], floats: NDArray[np.float64], draws: NDArray[np.int64]
) -> InputCost:
    ratios = times.sum(axis=1) / np.maximum(floats, 1e-9)
    low, high = np.quantile(np.median(ratios[draws], axis=1), ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2))
    write_ms, run_ms = np.median(times, axis=0)
    return InputCost(
        pixel, trial.place.nbytes, float(write_ms), float(run_ms), float(np.median(ratios)), float(low), float(high)
    )


class _Trial:
    def __init__(self, data: bytes, spec: InputSpec, where: str) -> None:
        session = open_session(data, where)
        shapes, batch = output_shapes(session, spec, where)
        count = batch or 1
        self._spec = spec
        self._session = session
        whole = np.zeros((count, *spec.shape), spec.dtype)
        self.place: InputArray = whole[0]
        # bound once, as a lane does it: what is measured is the model, not the library's door
        self._held = [
            np.zeros((count, *shapes[output.name][1:]), DTYPES[output.type]) for output in session.get_outputs()
        ]
        self._binding = session.io_binding()
        name = session.get_inputs()[0].name
        self._binding.bind_input(name, "cpu", 0, whole.dtype.type, whole.shape, whole.ctypes.data)
        for output, array in zip(session.get_outputs(), self._held, strict=True):
            self._binding.bind_output(output.name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def run(self, frame: Pixels, clock: Callable[[], int]) -> tuple[int, int]:
        start = clock()
        frame.write_into(self.place, self._spec)
        written = clock()
        self._session.run_with_iobinding(self._binding)
        return written - start, clock() - written
