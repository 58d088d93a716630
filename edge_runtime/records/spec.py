"""What a model wants as input and says as output, as declared by its bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

Color = Literal["RGB", "BGR"]
Resize = Literal["letterbox-center", "letterbox-topleft", "stretch", "crop"]
Pixel = Literal["float32", "bgr24", "rgba", "nv12"]
Layout = Literal[
    "centernet",
    "yolox",
    "nanodet",
    "yolov5",
    "yolov8",
    "yolov10",
    "rtdetr",
    "rtdetr-topk",
    "efficientnms",
    "classify",
]
Task = Literal["detect", "classify"]


@dataclass(frozen=True, slots=True)
class InputSpec:
    """The input of one variant: what the first layer sees is NCHW float32, `value = (pixel * scale - mean) / std`.

    `pixel` says what is written for it. `float32`: just that. The others are bytes, and the graph itself makes that of
    them: `bgr24` and `rgba` hold pixels of 0-255 in the order of their name, whatever `color` is (alpha counts for
    nothing), `nv12` one brightness a pixel and one colour for 2 x 2 of them, in BT.601 and limited range
    (`vision/pixels.py` says it in numbers).

    `width` and `height` are px. `pad` is the 0-255 pixel value around a letterbox, normalised like any
    other pixel. `mean` and `std` are per channel in the order of `color`. `short_side` (px, only with
    `resize = "crop"`): the source's short side is scaled to it before the centre crop to width x height;
    None means no more than needed, so the crop's own larger fit.
    """

    width: int
    height: int
    color: Color = "RGB"
    resize: Resize = "letterbox-center"
    pad: int = 114
    scale: float = 1.0
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    short_side: int | None = None
    pixel: Pixel = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one place in a batch: float32 [3, H, W], bgr24 [H, W, 3], rgba [H, W, 4], nv12 [H * 3 / 2, W]: H rows of
        brightness, then H / 2 of U and V in turn."""
        if self.pixel == "bgr24":
            return (self.height, self.width, 3)
        if self.pixel == "rgba":
            return (self.height, self.width, 4)
        if self.pixel == "nv12":
            return (self.height * 3 // 2, self.width)
        return (3, self.height, self.width)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of a place: float32, or uint8 where preprocessing is in the graph."""
        import numpy as np  # not before it is needed: the command line reads this file, and answers at once

        return np.dtype(np.float32 if self.pixel == "float32" else np.uint8)


@dataclass(frozen=True, slots=True)
class OutputSpec:
    """How a model's outputs are read: the declared layout and its thresholds.

    `score_threshold` and `nms_iou` are 0-1; `labels` is one word per class.
    """

    layout: Layout
    labels: tuple[str, ...]
    score_threshold: float = 0.3
    nms_iou: float = 0.6
    max_detections: int = 300
