"""How far a candidate's answers are from the float model's, on calibration pictures: no label is looked at.

Agreement with the float model as it is said plainly (its detections as truth) is far stricter than a loss by labels:
the float model is never wrong by it, and a box that moves by a pixel counts at an IoU of 0.95, where by labels neither
would have met the object so well. So labels are drawn from what the float model says: an object is where a detection
of score s is with probability s, and its edges are off by some hundredths of its sides, as detectors are. Both models
are measured by the same draws, and the relative difference is the loss to be expected. For a classifier the same is
exact: its float probabilities say how often each class is right. Plain agreement is said beside it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.session_check import output_shapes
from edge_runtime.errors import UsageError
from edge_runtime.prepare.evaluate import COCO_DETECTIONS, COCO_SCORE
from edge_runtime.prepare.evidence import overlap
from edge_runtime.prepare.gate import agreement_truth
from edge_runtime.prepare.parallel import in_parallel
from edge_runtime.prepare.quick_ap import quick_map
from edge_runtime.prepare.samples import Boxes, Dataset, Predictions, Sample
from edge_runtime.records.frames import Classification, Decoder, Detections, InputArray, Output, Pixels, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder

__all__ = ["Judgement", "Probe"]

_SAMPLES = 2048
_DRAWS = 4
_EDGE_NOISE = 0.05
"""Of a box's side: standard deviation of an edge. Boxes of detectors that meet an object have an IoU of about 0.85."""
_LEAST_DB, _MOST_DB = -100.0, 200.0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a candidate loses on the probe's pictures.

    `loss`: relative, of mAP or top-1, to be expected by labels; below 0 where chance favours it. `agreement` (0-1):
    mAP with the float model's detections as truth, or the share of pictures with the same first class; None where it
    was not asked for. `distance` (0-1): mean difference of scores and boxes, of a classifier the noise of the worst
    output by its signal; smooth where the others jump. `sqnr_db`: by output, signal to noise in dB.
    """

    loss: float
    agreement: float | None
    distance: float
    sqnr_db: Mapping[str, float]


class Probe:
    """Keeps some of the pictures it is shown, as the model takes them, in a file; then judges candidates by them."""

    def __init__(
        self,
        model: bytes,
        spec: InputSpec,
        output: OutputSpec,
        folder: Path,
        *,
        where: str,
        most: int = 128,
        lanes: int = 1,
        seed: int = 0,
    ) -> None:
        """`model`: the float model; `folder`: exists, for one file of `most` inputs. Of more pictures than `most`,
        every second, fourth, ... is kept. `lanes`: threads that run candidates.

        Raises BundleError where ONNX Runtime does not run the model, OSError where the disk has no room.
        """
        self.spec = spec
        self.where = where
        self.seen = 0
        self._output = output
        self._lanes = lanes
        self._seed = seed
        self.model = model
        self._path = folder / "inputs.npy"
        self._inputs: NDArray[Any] = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
            self._path, mode="w+", dtype=spec.dtype, shape=(most, *spec.shape)
        )
        with self._path.open("r+b") as file:  # on a full disk a write into the map would kill the process
            os.posix_fallocate(file.fileno(), 0, self._path.stat().st_size)
        self._stride = 1
        self._slots: list[tuple[int, Transform]] = []
        self._free = list(range(most))[::-1]
        self._reference: _Answers | None = None
        self._truth: list[Boxes] | None = None
        self._base = 0.0

    @property
    def pictures(self) -> int:
        """How many are kept."""
        return len(self._slots)

    @property
    def classifies(self) -> bool:
        """Whether answers are classes of whole pictures."""
        return self._output.layout == "classify"

    def show(self, picture: Pixels) -> None:
        """Look at the next picture, which may be gone afterwards. Raises CameraError where it cannot be read."""
        index, self.seen = self.seen, self.seen + 1
        if index % self._stride:
            return
        if not self._free:
            self._stride *= 2
            self._free = [slot for slot, _ in self._slots[1::2]]
            self._slots = self._slots[::2]
            if index % self._stride:
                return
        self._reference = None
        slot = self._free.pop()
        self._slots.append((slot, picture.write_into(self._inputs[slot], self.spec)))

    def inputs(self, count: int | None = None) -> Iterator[InputArray]:
        """Kept pictures one by one, [1, *spec.shape], at most `count`, spread evenly. Not to be written to."""
        for place in self._places(count):
            yield self._inputs[self._slots[place][0]][None]

    def digest(self) -> str:
        """sha256 (64 hex digits) of the float model, the kept pictures, and how the probe judges."""
        told = repr((self.spec, self._output, self._seed, _DRAWS, _EDGE_NOISE))
        hashed = hashlib.sha256(told.encode() + hashlib.sha256(self.model).digest())
        for each in self.inputs():
            hashed.update(np.ascontiguousarray(each).data)
        return hashed.hexdigest()

    def judge(self, candidate: bytes, *, agreement: bool = False) -> Judgement:
        """Run the candidate over all kept pictures.

        Raises UsageError (code "dataset_invalid") where the float model finds nothing in them, BundleError where the
        candidate does not run.
        """
        reference = self._refer()
        said = self._run(candidate, list(range(self.pictures)), reference.positions)
        return Judgement(
            self._loss(said.outputs),
            self._agreement(said.outputs) if agreement else None,
            _distance(reference, said),
            _sqnr(reference.samples, said.samples),
        )

    def distance(self, candidate: bytes, count: int) -> float:
        """`Judgement.distance` on at most `count` of the pictures: quick, to put candidates in order."""
        reference = self._refer()
        places = self._places(count)
        said = self._run(candidate, places, [reference.positions[place] for place in places])
        return _distance(reference.of(places), said)

    def _places(self, count: int | None) -> list[int]:
        if count is None or count >= self.pictures:
            return list(range(self.pictures))
        return [index * self.pictures // count for index in range(count)]

    def _refer(self) -> _Answers:
        if self._reference is None:
            if not self._slots:
                raise UsageError(
                    "no picture was shown", code="too_few_pictures", remedy="name pictures to calibrate by"
                )
            self._reference = self._run(self.model, list(range(self.pictures)), None)
            outputs = self._reference.outputs
            if isinstance(outputs[0], Detections):
                self._truth = self._drawn(outputs)
                self._base = _mean_ap(self._truth, outputs * _DRAWS)
            else:
                self._base = float(np.mean([_share(each, each) for each in outputs]))
            if not self._base > 0:
                agreement_truth(_dataset(outputs), _said(outputs), 1.0)  # says what is wrong
        return self._reference

    def _run(self, model: bytes, places: Sequence[int], positions: Sequence[_Positions] | None) -> _Answers:
        session = open_session(model, self.where)
        shapes, batch = output_shapes(session, self.spec, self.where)
        loose = OutputSpec(self._output.layout, self._output.labels, COCO_SCORE, self._output.nms_iou, COCO_DETECTIONS)
        decoder = build_decoder(loose, self.spec, shapes)
        runner = _Runner(session, decoder, batch or 1)

        def work(index: int) -> tuple[Output, _Positions, _Samples]:
            slot, transform = self._slots[places[index]]
            return runner(self._inputs[slot], transform, None if positions is None else positions[index])

        done = in_parallel([work] * min(self._lanes, len(places)), len(places), name="judge")
        return _Answers([each[0] for each in done], [each[1] for each in done], [each[2] for each in done])

    def _drawn(self, outputs: Sequence[Output]) -> list[Boxes]:
        """The pictures `_DRAWS` times over, each with labels drawn from the float model's detections."""
        rng = np.random.default_rng(self._seed)
        drawn = []
        for found in list(outputs) * _DRAWS:
            if not isinstance(found, Detections):
                raise ValueError("detections and classifications are mixed")
            there = rng.random(len(found)) < found.scores
            sides = found.boxes[:, 2:] - found.boxes[:, :2]
            edges = rng.normal(0.0, _EDGE_NOISE, found.boxes.shape) * np.concatenate([sides, sides], axis=1)
            boxes = (found.boxes + edges)[there].astype(np.float32)
            area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
            drawn.append(Boxes(boxes, found.class_ids[there], np.zeros(len(boxes), np.bool_), area))
        return drawn

    def _loss(self, said: list[Output]) -> float:
        if self._truth is not None:
            return (self._base - _mean_ap(self._truth, said * _DRAWS)) / self._base
        pairs = zip(self._refer().outputs, said, strict=True)
        return (self._base - float(np.mean([_share(one, other) for one, other in pairs]))) / self._base

    def _agreement(self, said: list[Output]) -> float:
        reference = self._refer().outputs
        if isinstance(reference[0], Classification):
            same = [
                len(one) > 0 and len(other) > 0 and one.class_ids[0] == other.class_ids[0]
                for one, other in zip(reference, said, strict=True)
            ]
            return float(np.mean(same))
        truth = agreement_truth(_dataset(reference), _said(reference), self._output.score_threshold)
        return _mean_ap([sample.truth for sample in truth.samples if isinstance(sample.truth, Boxes)], said)


_Positions = dict[str, NDArray[np.intp]]
_Samples = dict[str, NDArray[np.float32]]


@dataclass(slots=True)
class _Answers:
    """Of each picture what was decoded, and samples of the raw outputs with their positions."""

    outputs: list[Output]
    positions: list[_Positions]
    samples: list[_Samples]

    def of(self, places: Sequence[int]) -> _Answers:
        return _Answers(
            [self.outputs[place] for place in places],
            [self.positions[place] for place in places],
            [self.samples[place] for place in places],
        )


class _Runner:
    def __init__(self, session: Any, decoder: Decoder, batch: int) -> None:
        self._session = session
        self._decoder = decoder
        self._batch = batch
        self._input = session.get_inputs()[0].name
        self._names = [output.name for output in session.get_outputs()]

    def __call__(
        self, place: InputArray, transform: Transform, positions: _Positions | None
    ) -> tuple[Output, _Positions, _Samples]:
        batch = np.ascontiguousarray(np.broadcast_to(place, (self._batch, *place.shape)))
        outputs = dict(zip(self._names, self._session.run(None, {self._input: batch}), strict=True))
        flat = {name: value[0].ravel() for name, value in outputs.items() if value.dtype.kind == "f"}
        if positions is None:
            positions = {name: _picked(value) for name, value in flat.items()}
        samples = {name: flat[name][where].astype(np.float32) for name, where in positions.items()}
        return self._decoder(outputs, 0, transform), positions, samples


def _picked(value: NDArray[Any]) -> NDArray[np.intp]:
    """Positions of the largest magnitudes, and as many spread evenly."""
    half = min(_SAMPLES // 2, value.size)
    largest = np.argpartition(-np.abs(value), half - 1)[:half]
    return np.union1d(largest, np.linspace(0, value.size - 1, half).astype(np.intp))


def _sqnr(wanted: Sequence[_Samples], found: Sequence[_Samples]) -> dict[str, float]:
    result = {}
    for name in wanted[0]:
        signal = sum(float(np.square(each[name], dtype=np.float64).sum()) for each in wanted)
        noise = sum(
            float(np.square(one[name].astype(np.float64) - other[name]).sum())
            for one, other in zip(wanted, found, strict=True)
        )
        ratio = 10 * np.log10(signal / noise) if signal > 0 and noise > 0 else (_MOST_DB if noise == 0 else _LEAST_DB)
        result[name] = float(np.clip(np.nan_to_num(ratio, nan=_LEAST_DB), _LEAST_DB, _MOST_DB))
    return result


def _distance(wanted: _Answers, found: _Answers) -> float:
    total = far = 0.0
    for one, other in zip(wanted.outputs, found.outputs, strict=True):
        if not (isinstance(one, Detections) and isinstance(other, Detections)):
            # scores of few pictures are sure or anything; what they are made of moves with every error
            worst = min(_sqnr(wanted.samples, found.samples).values(), default=0.0)
            return 0.0 if worst >= _MOST_DB else min(1.0, float(10 ** (-worst / 20)))
        for these, those in ((one, other), (other, one)):
            total += float(these.scores.sum())
            far += float((these.scores * (1 - _met(these, those))).sum())
    return far / total if total > 0 else 0.0


def _met(these: Detections, those: Detections) -> NDArray[np.float64]:
    """[n] 0-1: how well each is found among the others: IoU by ratio of scores, of the best of its class."""
    if not len(these) or not len(those):
        return np.zeros(len(these))
    met = overlap(these.boxes, those.boxes).astype(np.float64)
    met *= these.class_ids[:, None] == those.class_ids[None]
    ratio = those.scores[None] / np.maximum(these.scores[:, None], 1e-9)
    best: NDArray[np.float64] = (met * np.minimum(ratio, 1 / np.maximum(ratio, 1e-9))).max(axis=1)
    return best


def _share(wanted: Output, found: Output) -> float:
    """The float model's probability (0-1) of the class that is named first."""
    if not len(found):
        return 0.0
    return float(wanted.scores[wanted.class_ids == found.class_ids[0]].sum())


def _dataset(outputs: Sequence[Output]) -> Dataset:
    nothing = Boxes(np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32))
    samples = tuple(Sample(str(index), Path(str(index)), nothing) for index in range(len(outputs)))
    return Dataset(Path("calibration"), "calibration", (), samples, "0" * 64)


def _said(outputs: Sequence[Output]) -> Predictions:
    times = (0.0,) * len(outputs)
    return Predictions("", "", "", "", "onnxruntime", "", COCO_SCORE, tuple(outputs), times)


def _mean_ap(truths: Sequence[Boxes], said: Sequence[Output]) -> float:
    return quick_map(truths, [found for found in said if isinstance(found, Detections)])
