"""A camera without pixels and an engine without work: what is left is the framework's own cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.camera.session import Intake, Picture, Session
from edge_runtime.camera.source import SourceCamera
from edge_runtime.engine.protocol import EngineInfo, InputBuffer
from edge_runtime.records.frames import Detections, Float32Array, Output, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.geometry import plan

_INPUT = InputSpec(416, 416)
_EMPTY = Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int32))


class NothingPixels:
    """A picture of a size that is never read or written."""

    __slots__ = ("_transform",)

    def __init__(self, transform: Transform) -> None:
        self._transform = transform

    @property
    def width(self) -> int:
        return self._transform.src_width

    @property
    def height(self) -> int:
        return self._transform.src_height

    def write_into(self, place: Float32Array, spec: InputSpec) -> Transform:  # noqa: ARG002
        return self._transform

    def to_rgb(self) -> NDArray[np.uint8]:
        return np.zeros((self.height, self.width, 3), np.uint8)


class _NothingSession:
    def __init__(self, fps: float, width: int, height: int) -> None:
        self.interval_ns: int | None = round(1e9 / fps)
        self._fps = fps
        self._pixels = NothingPixels(plan(width, height, _INPUT))

    def pictures(self) -> Iterator[Picture]:
        number = 0
        while True:
            yield Picture(self._pixels, round(number * 1e9 / self._fps), time.monotonic_ns())
            number += 1

    def close(self) -> None:
        pass


def nothing_camera(name: str, fps: float, width: int = 768, height: int = 576) -> SourceCamera:
    """A camera at an exact rate with the product's own pacing, stamps and counters, and no pixels."""

    def open_session(_: Intake) -> Session:
        return _NothingSession(fps, width, height)

    return SourceCamera(name, open_session, live=False, fps=None, pace="realtime", loop=False)


class _NothingLane:
    _outputs: Mapping[str, NDArray[Any]] = {"out": np.zeros((64, 1), np.float32)}

    def submit(self, buffer: InputBuffer, count: int) -> None:
        pass

    def collect(self) -> Mapping[str, NDArray[Any]]:
        return self._outputs


class NothingEngine:
    """Answers at once that nothing was found."""

    def __init__(self) -> None:
        self.info = EngineInfo(
            digest="sha256:nothing",
            bundle="sha256:nothing",
            variant="nothing",
            backend="nothing",
            precision="none",
            input=_INPUT,
            output=OutputSpec("yolox", ("nothing",)),
            output_shapes={"out": (1, 1)},
        )
        self.allowed_batches: tuple[int, ...] | None = None

    def open_lane(self) -> _NothingLane:
        return _NothingLane()

    def allocate(self, max_batch: int) -> InputBuffer:
        return InputBuffer(0, np.empty((max_batch, *_INPUT.shape), np.float32))

    def release(self, buffer: InputBuffer) -> None:
        pass

    def close(self) -> None:
        pass


def find_nothing(outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Output:  # noqa: ARG001
    """The decoder of a NothingEngine."""
    return _EMPTY
