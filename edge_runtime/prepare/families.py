"""What models of one output layout are usually trained with: filled in where the caller does not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_runtime.records.spec import Color, Layout, Resize

Triple = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Family:
    """The usual preprocessing. None where models of the layout differ and a guess would be quietly wrong."""

    color: Color
    resize: Resize
    pad: int = 114
    scale: float = 1.0
    mean: Triple | None = (0.0, 0.0, 0.0)
    std: Triple | None = (1.0, 1.0, 1.0)


FAMILIES: Mapping[Layout, Family] = {
    "yolox": Family("BGR", "letterbox-topleft"),
    "nanodet": Family("BGR", "stretch", mean=(103.53, 116.28, 123.675), std=(57.375, 57.12, 58.395)),
    "centernet": Family("RGB", "letterbox-center"),
    "classify": Family("RGB", "crop", mean=None, std=None),
}

USUAL_NORMALISATIONS = (
    "--scale 1 --mean 127 127 127 --std 128 128 128 (TensorFlow's), or "
    "--scale 1 --mean 123.675 116.28 103.53 --std 58.395 57.12 57.375 (torchvision's)"
)
