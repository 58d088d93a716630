"""What travels on a frame's way: frame, transform, detections, result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.spec import InputSpec

Float32Array = NDArray[np.float32]
InputArray = NDArray[Any]
"""One place of a model's input, or a batch of them, of its InputSpec's shape and dtype: float32 or uint8."""


@dataclass(frozen=True, slots=True)
class Transform:
    """How a source image lies in a model's input; postprocessing inverts this very object.

    The whole source (src_width x src_height px) was scaled to resized_width x resized_height px and its
    top-left corner put at (left, top) px of the model's input (dst_width x dst_height px): positive for
    a letterbox, negative where a crop cut something off. So per axis
    `model = source * resized / src + offset`, with the integer sizes and offsets that were applied.
    """

    src_width: int
    src_height: int
    dst_width: int
    dst_height: int
    resized_width: int
    resized_height: int
    left: int
    top: int


class Pixels(Protocol):
    """A decoded picture that can put itself into a model's input."""

    @property
    def width(self) -> int: ...

    @property
    def height(self) -> int: ...

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        """Scale, convert and pad into `place` (of `spec.shape` and `spec.dtype`, may hold old content); for float32
        places normalise too.

        Every element of `place` is written. May be called from several threads at once.
        Raises CameraError where the pixel format cannot be read.
        """
        ...

    def to_rgb(self) -> NDArray[np.uint8]:
        """A new [height, width, 3] uint8 RGB array, for previews and golden pictures."""
        ...


PictureKind = Literal["bgr24", "rgba", "nv12", "yuv420p"]
BT601_WEIGHTS = (0.299, 0.114)
LEFT_SITING = (0.0, 0.5)


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """How a whole picture lies in memory: upright, plane after plane, rows without gaps, a byte a sample.

    bgr24 is [h, w, 3], rgba [h, w, 4] (alpha counts for nothing), nv12 [h, w] and [h / 2, w / 2, 2] of U and V, yuv420p
    [h, w] and U and V apart, [h / 2, w / 2] each; halves are rounded up. Of the last two: `weights`, of red and blue in
    the brightness; `full_range`, 0-255 in place of 16-235; `siting`, where the first colour sample lies, px right
    of and below the first sample of brightness.
    """

    kind: PictureKind
    width: int
    height: int
    weights: tuple[float, float] = BT601_WEIGHTS
    full_range: bool = False
    siting: tuple[float, float] = LEFT_SITING

    @property
    def planes(self) -> tuple[tuple[int, int], ...]:
        """(rows, bytes a row) of each plane."""
        half_width, half_height = -(-self.width // 2), -(-self.height // 2)
        if self.kind == "bgr24":
            return ((self.height, 3 * self.width),)
        if self.kind == "rgba":
            return ((self.height, 4 * self.width),)
        if self.kind == "nv12":
            return (self.height, self.width), (half_height, 2 * half_width)
        return (self.height, self.width), (half_height, half_width), (half_height, half_width)

    @property
    def nbytes(self) -> int:
        return sum(rows * row_bytes for rows, row_bytes in self.planes)


@runtime_checkable
class WholePixels(Protocol):
    """What Pixels may offer besides: the picture as it was decoded, for a GPU that scales it."""

    def layout(self) -> PictureLayout | None:
        """How `copy_whole` leaves it: smaller than Pixels' `width` x `height` where hardware has scaled it already.
        None where it cannot, or the picture does not lie upright."""
        ...

    def copy_whole(self, target: NDArray[np.uint8]) -> None:
        """Copy it into `target` ([layout().nbytes] uint8), whose every byte is written. Any thread."""
        ...


@dataclass(slots=True)
class Frame:
    """One captured picture: decoded, intact, wanted.

    `frame_id` counts up per camera from 0. `t_capture_ns` is monotonic: when the packet left the
    demuxer, or for a paced file when it was due.
    """

    camera: str
    frame_id: int
    t_capture_ns: int
    pixels: Pixels


@dataclass(frozen=True, slots=True)
class Detections:
    """What a detector found, best score first.

    boxes: [n, 4] float32, x1 y1 x2 y2 in camera px inside the frame; scores: [n] float32, 0-1;
    class_ids: [n] int32. `cut` counts candidates left out by the top-k bound, `invalid` those with
    non-finite or empty boxes.
    """

    boxes: Float32Array
    scores: Float32Array
    class_ids: NDArray[np.int32]
    cut: int = 0
    invalid: int = 0

    def __len__(self) -> int:
        return int(self.scores.shape[0])


@dataclass(frozen=True, slots=True)
class Classification:
    """The best classes of a picture, best first: scores [k] float32 (softmax, 0-1), class_ids [k] int32."""

    scores: Float32Array
    class_ids: NDArray[np.int32]

    def __len__(self) -> int:
        return int(self.scores.shape[0])


Output = Detections | Classification
Decoder = Callable[[Mapping[str, NDArray[Any]], int, Transform], Output]


@dataclass(slots=True)
class Timings:
    """Monotonic nanoseconds at which a frame passed each stage; 0 where it has not been."""

    t_claim_ns: int = 0
    t_written_ns: int = 0
    t_run_ns: int = 0
    t_inferred_ns: int = 0
    t_result_ns: int = 0


@dataclass(slots=True)
class FrameResult:
    """What became of one frame on one model: in capture order per (camera, model).

    `cached`: the answer to an earlier frame, given again without a run.
    """

    camera: str
    model: str
    frame_id: int
    t_capture_ns: int
    width: int
    height: int
    engine: str
    variant: str
    labels: tuple[str, ...]
    output: Output
    timings: Timings = field(default_factory=Timings)
    cached: bool = False
