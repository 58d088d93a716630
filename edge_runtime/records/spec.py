"""What a model wants as input and says as output, as declared by its bundle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Color = Literal["RGB", "BGR"]
Resize = Literal["letterbox-center", "letterbox-topleft", "stretch", "crop"]
Pixel = Literal["float32"]
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
    """The input of one variant: one image, NCHW float32, `value = (pixel * scale - mean) / std`.

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
    def shape(self) -> tuple[int, int, int]:
        """[C, H, W] of one place in a batch."""
        return (3, self.height, self.width)


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
