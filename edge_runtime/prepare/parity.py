"""Whether a model with preprocessing inside still says what it said without: on the same pixels, and on its own.

On the same pixels (`vision.pixels.normalised` of the bytes) outputs may differ by rounding only. One value in a
thousand may differ by more: a heat map that keeps its peaks only gives a peak to one neighbour or the other by the last
bit.
Through the camera's door each model gets the picture as its own format has it, bytes against floats and for nv12 a
quarter of the colours: there what was found is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.session_check import output_shapes
from edge_runtime.errors import RefusedError
from edge_runtime.prepare.evidence import overlap
from edge_runtime.records.frames import Decoder, Detections, InputArray, Output, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.pixels import normalised

__all__ = ["Parity", "prove_parity"]

SAME_PIXELS = {"fp32": 1e-3, "fp16": 1e-2, "int8": 5e-2}
"""Allowed on the same pixels, by precision: coarser numbers round differently where the input's last bit does."""
MAX_LOST = 0.1
"""Share of the sure detections that may be lost or won through the camera's door."""
_QUANTILE = 0.999
_SURE = 0.1
"""A detection is sure where its score is so much above the threshold."""
_SAME_BOX_IOU = 0.5
_ROWS = ("yolov10", "rtdetr-topk", "efficientnms")


@dataclass(frozen=True, slots=True)
class Parity:
    """What two models say to the same pictures.

    `deviation`: on the same pixels, of outputs' values the 999th of 1000 by difference, as a share of the output's
    largest magnitude (0 where outputs are rows of detections, whose order is free); `allowed` what it may be.
    `sure`: sure detections of either model, or pictures with a sure class; `lost` those that the other does not have.
    `score_change`: mean difference of the scores of what both found, through the camera's door.
    """

    pictures: int
    deviation: float
    allowed: float
    sure: int
    lost: int
    score_change: float

    def __str__(self) -> str:
        return (
            f"{self.pictures} pictures: on the same pixels {self.deviation:.2g} of an output's range ({self.allowed:g} "
            f"allowed); through the camera's door {self.sure - self.lost} of {self.sure} sure results are the same "
            f"({1 - MAX_LOST:.0%} wanted), scores {self.score_change:.3f} off on the average"
        )


def prove_parity(
    plain: tuple[bytes, InputSpec],
    fused: tuple[bytes, InputSpec],
    output: OutputSpec,
    precision: str,
    pictures: Sequence[Path],
    read_image: ReadImage,
    where: str,
    *,
    what: str = "the model with its preprocessing inside",
) -> Parity:
    """Compare a model (file, input) with what was made of it over the pictures, at least one.

    Outputs that only the first has are not looked at. `what` the other is, in words, for a refusal.

    Raises RefusedError (code "parity") with the figures, BundleError where one of them does not run.
    """
    one, other = (_Model(data, spec, output, where) for data, spec in (plain, fused))
    allowed, worst = SAME_PIXELS[precision], 0.0
    sure = lost = 0
    changes: list[float] = []
    for path in pictures:
        picture = read_image(path)
        place, transform = other.place, picture.write_into(other.place, other.spec)
        said = other.run(place)
        same = one.run(normalised(place, other.spec))
        if output.layout not in _ROWS:
            worst = max(worst, *(_deviation(same[name], said[name]) for name in said))
        if (unlike := _compare(one.read(same, transform), other.read(said, transform), output.score_threshold)).lost:
            raise _refused(
                f"on the same pixels {unlike.lost} of {unlike.sure} sure results are not the same",
                str(path),
                where,
                what,
            )
        way = picture.write_into(one.place, one.spec)
        seen = _compare(one.read(one.run(one.place), way), other.read(said, transform), output.score_threshold)
        sure, lost = sure + seen.sure, lost + seen.lost
        changes += seen.changes
    change = float(np.mean(changes)) if changes else 0.0
    parity = Parity(len(pictures), worst, allowed, sure, lost, change)
    if worst > allowed or lost > MAX_LOST * sure:
        raise _refused(str(parity), None, where, what)
    return parity


def _refused(message: str, picture: str | None, where: str, what: str) -> RefusedError:
    told = message if picture is None else f"{message} ({picture})"
    return RefusedError(
        f"{what} does not say what the model says: {told}",
        code="parity",
        where=where,
        remedy="look whether the variant itself is right (`prepare evaluate`); else report the model",
    )


class _Model:
    """A session that runs one picture at a time."""

    def __init__(self, data: bytes, spec: InputSpec, output: OutputSpec, where: str) -> None:
        self.spec = spec
        self.place: InputArray = np.zeros(spec.shape, spec.dtype)
        self._session = open_session(data, where)
        shapes, batch = output_shapes(self._session, spec, where)
        self._batch = batch or 1
        self._name = self._session.get_inputs()[0].name
        self._decoder: Decoder = build_decoder(output, spec, shapes)

    def run(self, place: InputArray) -> dict[str, NDArray[Any]]:
        """Outputs [batch, ...]."""
        names = [output.name for output in self._session.get_outputs()]
        batch = np.ascontiguousarray(np.broadcast_to(place, (self._batch, *place.shape)))
        return dict(zip(names, self._session.run(None, {self._name: batch}), strict=True))

    def read(self, outputs: Mapping[str, NDArray[Any]], transform: Transform) -> Output:
        return self._decoder(outputs, 0, transform)


def _deviation(wanted: NDArray[Any], found: NDArray[Any]) -> float:
    if wanted.shape != found.shape:
        return float("inf")
    difference = np.abs(wanted.astype(np.float64) - found).ravel()
    if not np.isfinite(difference).all():
        return float("inf")
    scale = float(np.abs(wanted).max(initial=0.0)) or 1.0
    return float(np.quantile(difference, _QUANTILE, method="lower")) / scale


@dataclass(frozen=True, slots=True)
class _Comparison:
    sure: int
    lost: int
    changes: Sequence[float]


def _compare(one: Output, other: Output, threshold: float) -> _Comparison:
    """What both found, by classes and boxes; scores of what one is sure of and the other has at all."""
    if not isinstance(one, Detections) or not isinstance(other, Detections):
        if not len(one) or not len(other):
            return _Comparison(0, 0, ())
        leads = [float(each.scores[0]) - (float(each.scores[1]) if len(each) > 1 else 0.0) for each in (one, other)]
        same = bool(one.class_ids[0] == other.class_ids[0])
        differences = [abs(float(one.scores[0] - other.scores[0]))] if same else []
        return _Comparison(int(max(leads) > _SURE), int(max(leads) > _SURE and not same), differences)
    ious = overlap(one.boxes, other.boxes)
    ious[one.class_ids[:, None] != other.class_ids[None]] = 0.0
    sure = lost = 0
    changes: list[float] = []
    for these, those, matches in ((one, other, ious), (other, one, ious.T)):
        for row in np.flatnonzero(these.scores > threshold + _SURE):
            sure += 1
            if not len(those) or matches[row].max() < _SAME_BOX_IOU:
                lost += 1
            else:
                changes.append(abs(float(these.scores[row] - those.scores[matches[row].argmax()])))
    return _Comparison(sure, lost, changes)
