"""Fakes for what nobody has here: an engine whose cost is known, a camera that plays a script.

The fake engine computes something that can be checked: each place holds its frame's number, and the
output repeats it. So a stale place, a mixed-up batch or a wrong transform shows in the result.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.protocol import EngineInfo, InputBuffer
from edge_runtime.errors import EngineError
from edge_runtime.records.cameras import CameraEffort, CameraState, CameraStatus, SourceCounters
from edge_runtime.records.frames import Classification, Frame, Output, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec

WIDTH, HEIGHT = 8, 4


def spin(duration_s: float) -> None:
    """Take time as a lane does, with the GIL free."""
    if duration_s > 0:
        time.sleep(duration_s)


class FakePixels:
    """A picture that is nothing but its number. `before_write` may wait or raise."""

    def __init__(self, number: int, before_write: Callable[[], None] | None = None) -> None:
        self.number = number
        self.before_write = before_write
        self.width, self.height = WIDTH, HEIGHT

    def write_into(self, place: NDArray[np.float32], spec: InputSpec) -> Transform:
        if self.before_write is not None:
            self.before_write()
        place[:] = self.number
        return Transform(WIDTH, HEIGHT, spec.width, spec.height, spec.width, spec.height, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        return np.zeros((HEIGHT, WIDTH, 3), np.uint8)


class FakeLane:
    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._output: NDArray[np.float32] | None = None

    def submit(self, buffer: InputBuffer, count: int) -> None:
        engine = self._engine
        engine.enter(count)
        try:
            start = time.perf_counter()
            spin(engine.call_cost_s + count * engine.frame_cost_s)
            engine.busy_s += time.perf_counter() - start  # more than it costs: sleep() comes back late
            if engine.fail is not None and engine.fail():
                raise EngineError("injected")
            self._output = buffer.array[:count, 0, 0, 0].copy()
        finally:
            engine.leave()

    def collect(self) -> Mapping[str, NDArray[Any]]:
        assert self._output is not None
        return {"out": self._output}


class FakeEngine:
    """An engine of `call_cost_s` per run plus `frame_cost_s` per place, 1x1 px input."""

    def __init__(
        self,
        digest: str = "sha256:fake",
        *,
        call_cost_s: float = 0.0,
        frame_cost_s: float = 0.0,
        allowed: tuple[int, ...] | None = None,
        fail: Callable[[], bool] | None = None,
    ) -> None:
        self.info = EngineInfo(
            digest=digest,
            bundle="sha256:bundle",
            variant=digest.removeprefix("sha256:"),
            backend="fake",
            precision="fp32",
            input=InputSpec(1, 1),
            output=OutputSpec("classify", ("one",)),
            output_shapes={"out": (1,)},
        )
        self.allowed_batches = allowed
        self.call_cost_s = call_cost_s
        self.frame_cost_s = frame_cost_s
        self.fail = fail
        self.closed = False
        self.runs: list[int] = []
        self.busy_s = 0.0
        self.running = 0
        self.most_at_once = 0
        self.errors: list[str] = []
        self._lock = threading.Lock()

    def enter(self, count: int) -> None:
        with self._lock:
            if self.closed:
                self.errors.append("ran after close")
            if self.allowed_batches is not None and count not in self.allowed_batches:
                self.errors.append(f"ran a batch of {count}")
            self.running += 1
            self.most_at_once = max(self.most_at_once, self.running)
            self.runs.append(count)

    def leave(self) -> None:
        with self._lock:
            if self.closed:
                self.errors.append("closed while running")
            self.running -= 1

    def open_lane(self) -> FakeLane:
        return FakeLane(self)

    def allocate(self, max_batch: int) -> InputBuffer:
        return InputBuffer(0, np.full((max_batch, 3, 1, 1), -1, np.float32))

    def release(self, buffer: InputBuffer) -> None:
        buffer.array.fill(-2)

    def close(self) -> None:
        with self._lock:
            if self.running:
                self.errors.append("closed while running")
            if self.closed:
                self.errors.append("closed twice")
            self.closed = True


def fake_decoder(outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Output:
    """The frame's number comes back as its class."""
    return Classification(np.ones(1, np.float32), np.array([outputs["out"][index]], np.int32))


class ScriptedCamera:
    """Gives the frames that `script` yields (a number, or a prepared FakePixels), then ends."""

    def __init__(self, name: str, script: Iterable[int | FakePixels]) -> None:
        self.name = name
        self._script = iter(script)
        self._stop = threading.Event()
        self.closed = False
        self.given = 0
        self._state: CameraState = "up"
        self.cap: float | None = None
        self.base: float | None = None
        self.inputs: tuple[InputSpec, ...] = ()

    def read(self) -> Frame | None:
        if self._stop.is_set():
            return None
        item = next(self._script, None)
        if item is None or self._stop.is_set():
            self._state = "stopped"
            return None
        pixels = FakePixels(item) if isinstance(item, int) else item
        frame = Frame(self.name, self.given, time.monotonic_ns(), pixels)
        self.given += 1
        return frame

    def stop(self) -> None:
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """For scripts: wait as a paced source does; True when it is to stop."""
        return self._stop.wait(seconds)

    def pause(self) -> None:
        self._state = "paused"

    def resume(self) -> None:
        self._state = "up"

    def set_cap(self, fps: float | None) -> None:
        self.cap = fps

    def set_base(self, fps: float | None) -> None:
        self.base = fps

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        self.inputs = tuple(inputs)

    def close(self) -> None:
        self.closed = True

    def status(self) -> CameraStatus:
        return CameraStatus(self._state, None, 0)

    def source(self) -> SourceCounters:
        return SourceCounters(decoded=self.given)

    def effort(self) -> CameraEffort:
        return CameraEffort()
