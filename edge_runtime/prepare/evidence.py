"""How much a model sees in a picture under one way of feeding and reading it, without knowing the truth.

Confidence alone misleads: NanoDet-m fed with pixels that are not normalised finds three times as many boxes,
with higher scores, and they are junk. What is there is found in the mirrored picture as well, and junk is not.
So every picture is run as it is and mirrored: confidence on which both agree counts for the settings, the rest
against them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.protocol import Engine, Lane
from edge_runtime.records.frames import Classification, Decoder, Detections, Float32Array, Output, Pixels, Transform
from edge_runtime.records.spec import InputSpec

__all__ = ["Seen", "View", "agreement"]

_SAME_IOU = 0.5
_AGAINST = 0.5
"""How much unmatched confidence counts against: measured, see sanity.py."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One picture under one way: `output` as found, `agreed` and `total` its confidence (sums of scores)."""

    output: Output
    agreed: float
    total: float

    @property
    def evidence(self) -> float:
        return self.agreed - _AGAINST * (self.total - self.agreed)


class View:
    """Runs single pictures, as they are and mirrored, on one lane of an engine. Closing it frees the buffer."""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine = engine
        self._lane = lane
        self._count = engine.allowed_batches[0] if engine.allowed_batches else 1
        self._buffer = engine.allocate(self._count)

    @property
    def place(self) -> Float32Array:
        """[3, H, W] float32: the input of the last run."""
        place: Float32Array = self._buffer.array[0]
        return place

    def run(self, picture: Pixels, spec: InputSpec) -> tuple[Mapping[str, NDArray[Any]], Transform]:
        """Outputs, copied, and where the picture lies. Raises CameraError or EngineError."""
        transform = picture.write_into(self._buffer.array[0], spec)
        return self._infer(), transform

    def mirror(self, transform: Transform) -> tuple[Mapping[str, NDArray[Any]], Transform]:
        """The same for the input of the run before, left and right exchanged."""
        place = self._buffer.array[0]
        place[:] = place[:, :, ::-1].copy()
        left = transform.dst_width - transform.left - transform.resized_width
        return self._infer(), replace(transform, left=left)

    def _infer(self) -> Mapping[str, NDArray[Any]]:
        self._buffer.array[1:] = self._buffer.array[0]
        self._lane.submit(self._buffer, self._count)
        return {name: array[:1].copy() for name, array in self._lane.collect().items()}

    def see(self, picture: Pixels, spec: InputSpec, decoder: Decoder) -> Seen:
        """Run and judge one picture. Raises CameraError or EngineError."""
        outputs, transform = self.run(picture, spec)
        return self.judge(outputs, transform, decoder)

    def judge(self, outputs: Mapping[str, NDArray[Any]], transform: Transform, decoder: Decoder) -> Seen:
        """What `run` gave, judged against its mirror image. Raises EngineError."""
        mirrored, back = self.mirror(transform)
        return agreement(decoder(outputs, 0, transform), decoder(mirrored, 0, back), transform.src_width)

    def close(self) -> None:
        self._engine.release(self._buffer)


def agreement(found: Output, mirrored: Output, width: int) -> Seen:
    """What a picture and its mirror image agree on.

    found, mirrored: of the picture, `width` px wide, and of the picture mirrored (in that one's px). Detections
    of a class agree by the smaller score times the overlap, where they overlap by more than half, best first.
    A classifier's best class agrees by the smaller of its two probabilities.
    """
    if isinstance(found, Classification):
        assert isinstance(mirrored, Classification)
        if not len(found) or not len(mirrored):
            return Seen(found, 0.0, 0.0)
        other = dict(zip(mirrored.class_ids.tolist(), mirrored.scores.tolist(), strict=True))
        best = float(found.scores[0])
        return Seen(found, min(best, other.get(int(found.class_ids[0]), 0.0)), best)
    assert isinstance(mirrored, Detections)
    total = float(found.scores.sum() + mirrored.scores.sum()) / 2
    if not len(found) or not len(mirrored):
        return Seen(found, 0.0, total)
    boxes = mirrored.boxes.copy()
    boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    overlaps = overlap(found.boxes, boxes)
    overlaps[found.class_ids[:, None] != mirrored.class_ids[None]] = 0
    agreed = 0.0
    for row, score in enumerate(found.scores.tolist()):
        column = int(overlaps[row].argmax())
        if overlaps[row, column] > _SAME_IOU:
            agreed += min(score, float(mirrored.scores[column])) * float(overlaps[row, column])
            overlaps[:, column] = 0
    return Seen(found, agreed, total)


def overlap(boxes: Float32Array, others: Float32Array) -> NDArray[np.float64]:
    """[n, m] intersection over union of two lists of boxes, x1 y1 x2 y2."""
    low = np.maximum(boxes[:, None, :2], others[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], others[None, :, 2:])
    both = np.clip(high - low, 0, None).prod(axis=2, dtype=np.float64)
    areas = [(one[:, 2:] - one[:, :2]).prod(axis=1, dtype=np.float64) for one in (boxes, others)]
    result: NDArray[np.float64] = both / np.maximum(areas[0][:, None] + areas[1][None] - both, 1e-9)
    return result
