"""What models of one output layout are usually trained with: the convention that their authors document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edge_runtime.records.spec import Color, Layout, Resize

Triple = tuple[float, float, float]

ZEROS: Triple = (0.0, 0.0, 0.0)
ONES: Triple = (1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Family:
    """The usual preprocessing, and where it is documented. None where models of the layout differ."""

    documented: str
    color: Color | None = None
    resize: Resize | None = None
    pad: int = 114
    scale: float | None = None
    mean: Triple | None = None
    std: Triple | None = None

    def usual(self) -> Mapping[str, Any]:
        """By the names of bundle.toml's `[input]`."""
        return {key: getattr(self, key) for key in ("color", "resize", "pad", "scale", "mean", "std")}


_ULTRALYTICS = Family("Ultralytics' LetterBox, and / 255", "RGB", "letterbox-center", 114, 1 / 255, ZEROS, ONES)
_RTDETR = Family("RT-DETR's configuration: a plain resize, divided by 255", "RGB", "stretch", 114, 1 / 255, ZEROS, ONES)

FAMILIES: Mapping[Layout, Family] = {
    "yolox": Family("YOLOX's preproc from 0.2.0 on", "BGR", "letterbox-topleft", 114, 1.0, ZEROS, ONES),
    "nanodet": Family(
        "NanoDet-m's configuration", "BGR", "stretch", 114, 1.0, (103.53, 116.28, 123.675), (57.375, 57.12, 58.395)
    ),
    "centernet": Family("MobileNetV3-CenterNet of @vladmandic/human", "RGB", "letterbox-center", 114, 1.0, ZEROS, ONES),
    "yolov5": _ULTRALYTICS,
    "yolov8": _ULTRALYTICS,
    "yolov10": _ULTRALYTICS,
    "rtdetr": _RTDETR,
    "rtdetr-topk": _RTDETR,
    "efficientnms": Family("nothing: it depends on the network in front of the NMS"),
    "classify": Family("torchvision's and timm's evaluation transforms", "RGB", "crop", 114, 1.0),
}

CAUTIONS: Mapping[Layout, str] = {
    "yolox": "YOLOX models of version 0.1.0 want --color RGB --scale 1/255 "
    "--mean 0.485 0.456 0.406 --std 0.229 0.224 0.225",
}
"""What a layout does not tell and its users trip over."""

NORMALISATIONS: Mapping[str, tuple[float, Triple, Triple]] = {
    "none, values 0-255": (1.0, ZEROS, ONES),
    "none, values 0-1": (1 / 255, ZEROS, ONES),
    "torchvision's": (1.0, (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "TensorFlow's": (1.0, (127.5, 127.5, 127.5), (127.5, 127.5, 127.5)),
}
"""The normalisations in common use, as (scale, mean, std) of an RGB input."""

USUAL_NORMALISATIONS = (
    "--scale 1 --mean 127 127 127 --std 128 128 128 (TensorFlow's), or "
    "--scale 1 --mean 123.675 116.28 103.53 --std 58.395 57.12 57.375 (torchvision's)"
)
