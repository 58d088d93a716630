"""Pictures of noise: they reach what photographs of a golden set do not, and need no file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import InputArray, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.pixels import factors

__all__ = ["Noise"]

_SIDE = 64


@dataclass(frozen=True, slots=True)
class Noise:
    """A picture (`records.frames.Pixels`) of independent values 0-255, the same at every call with a seed and size."""

    seed: int
    width: int = _SIDE
    height: int = _SIDE

    def write_into(self, place: InputArray, spec: InputSpec) -> Transform:
        """Fill the place, `spec.shape` of `spec.dtype`, at its own size: noise has no size of its own."""
        values = np.random.default_rng(self.seed).integers(0, 256, spec.shape, np.uint8)
        if spec.pixel == "float32":
            gain, offset = factors(spec)
            place[:] = values * gain[:, None, None] + offset[:, None, None]
        else:
            place[:] = values
        return Transform(spec.width, spec.height, spec.width, spec.height, spec.width, spec.height, 0, 0)

    def to_rgb(self) -> NDArray[np.uint8]:
        """[height, width, 3] uint8."""
        values: NDArray[np.uint8] = np.random.default_rng(self.seed).integers(
            0, 256, (self.height, self.width, 3), np.uint8
        )
        return values
