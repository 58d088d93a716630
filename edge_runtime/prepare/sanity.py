"""The sanity run: does a model, fed and read as chosen, see something in real pictures, and would another way see more?

It refuses a model whose answers are not finite, not activated, off the frame, empty or the same whatever the
picture; and settings of which one change (colour order, normalisation, layout) is clearly better by what a
picture and its mirror image agree on (`evidence.py`). Clearly: over all pictures by more than a twentieth of the
confidence found, and by more than two standard errors of the pictures' differences (four, under 8 pictures); or
more than three times as much.

Measured with YOLOX-Nano, NanoDet-m, MobileNetV3-CenterNet (128 COCO pictures) and EfficientNet-Lite0 (100 of
ImageNet), 400 random draws each, one wrong setting at a time. Refused, in percent of the draws of so many pictures:

    pictures                                            4         8        16        32        64
    right settings, all four                     0 to 0.5  0 to 0.3         0         0         0
    normalisation, YOLOX and CenterNet                100       100       100       100       100
    none instead of its own, NanoDet, Lite0       92 to 96 97 to 100      100       100       100
    another one instead of its own, NanoDet, Lite0 3 to 29  12 to 66  41 to 99 74 to 100 98 to 100
    colour order                                   3 to 7   9 to 30  37 to 88 70 to 100      100

So what this run cannot see: a swapped colour order on few pictures (it costs some points of accuracy, and most
pictures hardly change); normalisations that are nearly the same, such as NanoDet's with its means in the other
order (3 to 20 %, and no clear loss); and the way of resizing, whatever the number of pictures: letterbox, stretch
and crop find as much, so they are not tried at all. Accuracy on labelled pictures shows these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.protocol import Engine
from edge_runtime.prepare.answers import told
from edge_runtime.prepare.evidence import Seen, View, overlap
from edge_runtime.prepare.families import FAMILIES, NORMALISATIONS
from edge_runtime.records.frames import Classification, Detections, Float32Array, Transform
from edge_runtime.records.spec import Color, InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder, suggest_layout
from edge_runtime.vision.geometry import to_model

__all__ = ["SanityReport", "Trial", "alternatives", "better", "run_sanity"]

LEAST_TO_COMPARE = 4
_ERRORS = ((16, 2.0), (8, 2.5), (0, 4.0))
"""From so many pictures on, so many standard errors: with 2 everywhere, 8 pictures gave one false alarm in 100."""
_GAIN = 0.05
_FAR_MORE = 3.0
_TRACE = 0.3
"""Evidence per picture, about one sure box in three pictures: less is nothing to build on."""
_NEARLY_ALL = 0.9
_ABOVE_ONE = 1.001
_FEW_BOXES = 8
_SAME_BOX_IOU = 0.95
_SAME_OUTPUT = 1e-3
_OTHER_PICTURE = 12.0
"""Mean difference of two inputs, in levels of 255, from which they count as different pictures."""
_FLAT = 0.9


@dataclass(frozen=True, slots=True)
class Trial:
    """One way to feed and read the model; `flags` are those that make it of the chosen one, "" for that itself."""

    flags: str
    input: InputSpec
    output: OutputSpec


@dataclass(slots=True)
class SanityReport:
    """What the run saw.

    pictures: how many were run; `seen`: by the trial's flags ("" is as chosen) what each picture showed;
    `problems`: why the settings are refused, in words; `better`: the flags of the alternative that is clearly
    better, `leads`: of one that only may be.
    """

    pictures: int
    seconds: float
    seen: Mapping[str, list[Seen]]
    problems: list[str] = field(default_factory=list)
    better: str | None = None
    leads: str | None = None

    def evidence(self, flags: str = "") -> float:
        """The sum over the pictures; 0 is nothing, one sure box adds about 1."""
        return sum(seen.evidence for seen in self.seen[flags])


def alternatives(chosen: InputSpec, output: OutputSpec, shapes: Mapping[str, tuple[int, ...]]) -> list[Trial]:
    """The plausible ways that differ from the chosen one in one thing: colour, normalisation or layout."""
    trials = []
    other: Color = "BGR" if chosen.color == "RGB" else "RGB"
    trials.append(Trial(f"--color {other}", replace(chosen, color=other), output))
    ranges = [_range(chosen)]
    own = FAMILIES[output.layout]
    usual = [(own.scale, own.mean, own.std)] if own.color == chosen.color else []
    for scale, mean, std in [*usual, *NORMALISATIONS.values()]:
        if scale is None or mean is None or std is None:
            continue
        if chosen.color == "BGR" and (scale, mean, std) not in usual:
            mean, std = (mean[2], mean[1], mean[0]), (std[2], std[1], std[0])
        spec = replace(chosen, scale=scale, mean=mean, std=std)
        if any(_near(_range(spec), seen) for seen in ranges):
            continue
        ranges.append(_range(spec))
        flags = f"--scale {told(scale)} --mean {told(mean)} --std {told(std)}"
        trials.append(Trial(flags, spec, output))
    fits = suggest_layout(shapes, chosen.width, chosen.height, classes=len(output.labels))
    layouts = [fit.layout for fit in fits if fit.layout not in (output.layout, "classify")]
    return trials + [Trial(f"--layout {word}", chosen, replace(output, layout=word)) for word in layouts]


def _range(spec: InputSpec) -> NDArray[np.float64]:
    """[2, 3]: what black and white become."""
    levels = np.array([[0.0], [255.0]]) * spec.scale
    result: NDArray[np.float64] = (levels - np.array(spec.mean)) / np.array(spec.std)
    return result


def _near(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Whether two normalisations are the same but for rounding: 127 and 127.5, say."""
    return bool((np.abs(one - other) < 0.05 * (other[1] - other[0])).all())


def run_sanity(
    engine: Engine,
    pictures: Sequence[Path],
    read_image: ReadImage,
    trials: Sequence[Trial],
    *,
    limit_s: float = 60.0,
) -> SanityReport:
    """Run the pictures (at least one) as the engine's bundle says, and under every trial.

    Past `limit_s`, but not before `LEAST_TO_COMPARE` pictures, the rest is left out. Raises CameraError for a
    picture that cannot be read, EngineError where a run fails.
    """
    start = time.monotonic()
    shapes, chosen = engine.info.output_shapes, Trial("", engine.info.input, engine.info.output)
    ways = [(trial, build_decoder(trial.output, trial.input, shapes)) for trial in (chosen, *trials)]
    seen: dict[str, list[Seen]] = {trial.flags: [] for trial, _ in ways}
    view = View(engine, engine.open_lane())
    faults = _Faults(engine)
    done = 0
    try:
        for path in pictures:
            picture = read_image(path)
            for trial, decoder in ways:
                if trial.flags:
                    seen[trial.flags].append(view.see(picture, trial.input, decoder))
                    continue
                outputs, transform = view.run(picture, trial.input)
                faults.add(outputs, transform, view.place)
                seen[""].append(view.judge(outputs, transform, decoder))
            done += 1
            if done >= LEAST_TO_COMPARE and time.monotonic() - start > limit_s:
                break
    finally:
        view.close()
    report = SanityReport(done, time.monotonic() - start, seen)
    report.problems = faults.told(seen[""])
    if done >= LEAST_TO_COMPARE:
        _compare(report)
    return report


def _compare(report: SanityReport) -> None:
    ranked = sorted((flags for flags in report.seen if flags), key=report.evidence, reverse=True)
    for flags in ranked:
        if better(report.seen[""], report.seen[flags]):
            report.better = flags
            report.problems.append(
                f"{flags} is clearly better: evidence {report.evidence(flags):.2f} against "
                f"{report.evidence():.2f} over {report.pictures} pictures"
            )
            return
    best = ranked[0] if ranked else None
    if best is not None and report.evidence(best) > report.evidence() + 0.05 * _confidence(report.seen[best]):
        report.leads = best


def _confidence(seen: Sequence[Seen]) -> float:
    return sum(one.total for one in seen)


def better(chosen: Sequence[Seen], other: Sequence[Seen]) -> bool:
    """Whether the same pictures, at least two, say clearly more under the other way; see the module's text."""
    count = len(chosen)
    ours, theirs = (np.array([one.evidence for one in seen]) for seen in (chosen, other))
    gain = float((theirs - ours).sum())
    confidence = max(_confidence(chosen), _confidence(other))
    if theirs.sum() <= 0 or gain <= max(_GAIN * confidence, 0.02 * count):
        return False
    if theirs.sum() > max(_FAR_MORE * ours.sum(), _TRACE * count):
        return True
    # Pictures with much in them differ by more: weighed by the root of what was found, as counts are.
    differences = (theirs - ours) / np.sqrt([a.total + b.total + 0.5 for a, b in zip(chosen, other, strict=True)])
    error = float(differences.std(ddof=1)) / math.sqrt(count)
    errors = next(errors for least, errors in _ERRORS if count >= least)
    return float(differences.mean()) > errors * max(error, 1e-6)


class _Faults:
    """Gathers what is wrong with the outputs as chosen, picture by picture."""

    def __init__(self, engine: Engine) -> None:
        spec, output, shapes = engine.info.input, engine.info.output, engine.info.output_shapes
        self._spec = spec
        self._classes = len(output.labels)
        # Above any score of 0-1, a decoder finds what is not activated; without suppression it counts all.
        self._over = build_decoder(replace(output, score_threshold=_ABOVE_ONE), spec, shapes)
        self._all = build_decoder(replace(output, nms_iou=1.0, max_detections=100_000), spec, shapes)
        self._infinite = self._raw = self._pictures = 0
        self._kept = self._invalid = self._tiny = self._whole = self._boxes = 0
        self._probabilities = True
        self._first: tuple[Mapping[str, NDArray[Any]], Float32Array, Detections | Classification] | None = None
        self._others = 0
        self._same_outputs = self._same_boxes = True

    def add(self, outputs: Mapping[str, NDArray[Any]], transform: Transform, place: Float32Array) -> None:
        self._pictures += 1
        self._infinite += any(not np.isfinite(array).all() for array in outputs.values() if array.dtype.kind == "f")
        found = self._all(outputs, 0, transform)
        if isinstance(found, Detections):
            over = self._over(outputs, 0, transform)
            self._raw += isinstance(over, Detections) and len(over) + over.cut > 0
            self._kept += len(found) + found.cut
            self._invalid += found.invalid
            found = replace(found, boxes=to_model(transform, found.boxes))
            self._measure(found, transform)
        else:
            (logits,) = outputs.values()
            self._probabilities &= bool(logits.min() >= 0 and abs(float(logits[0].sum()) - 1) < 0.01)
        if self._first is None:
            self._first = outputs, place.copy(), found
        else:
            self._judge_sameness(outputs, place, found)

    def _measure(self, found: Detections, transform: Transform) -> None:
        sides = found.boxes[:, 2:] - found.boxes[:, :2]
        whole = np.minimum(
            [transform.resized_width, transform.resized_height], [transform.dst_width, transform.dst_height]
        )
        self._boxes += len(found)
        self._tiny += int((sides < 1).any(axis=1).sum())
        self._whole += int((sides > 0.99 * whole).all(axis=1).sum())

    def _judge_sameness(
        self, outputs: Mapping[str, NDArray[Any]], place: Float32Array, found: Detections | Classification
    ) -> None:
        assert self._first is not None
        first_outputs, first_place, first = self._first
        per_level = np.array(self._spec.std, np.float32) / np.float32(self._spec.scale)
        levels = np.abs(place - first_place).mean(axis=(1, 2)) * per_level
        if levels.mean() < _OTHER_PICTURE:
            return
        self._others += 1
        for name, array in outputs.items():
            if array.dtype.kind == "f":
                before = first_outputs[name]
                scale = float(np.abs(before).max()) or 1.0
                self._same_outputs &= bool((np.abs(array - before) <= _SAME_OUTPUT * scale).all())
        if not isinstance(found, Detections) or not isinstance(first, Detections) or not len(first):
            self._same_boxes = False
        elif self._same_boxes:
            same = len(found) == len(first) and bool((found.class_ids == first.class_ids).all())
            self._same_boxes = same and bool((np.diag(overlap(found.boxes, first.boxes)) > _SAME_BOX_IOU).all())

    def told(self, seen: Sequence[Seen]) -> list[str]:
        """The faults in words, of these pictures as chosen."""
        of = f"of {self._pictures} pictures"
        problems = []
        if self._infinite:
            problems.append(f"outputs are not finite (NaN or infinite) on {self._infinite} {of}")
        if self._raw:
            problems.append(f"scores are above 1 on {self._raw} {of}: not activated, or of another layout")
        candidates = self._kept + self._invalid
        if candidates >= _FEW_BOXES and self._invalid > _NEARLY_ALL * candidates:
            problems.append(f"{self._invalid} of {candidates} boxes are off the picture, empty or not finite")
        if self._boxes >= _FEW_BOXES:
            for count, what in ((self._tiny, "less than 1 px"), (self._whole, "the whole picture")):
                if count > _NEARLY_ALL * self._boxes:
                    problems.append(f"{count} of {self._boxes} boxes are {what}")
        if self._others >= 2 and (self._same_outputs or self._same_boxes):
            what = "outputs are" if self._same_outputs else "boxes are"
            problems.append(f"the {what} the same whatever the picture ({self._others + 1} different ones)")
        if all(isinstance(one.output, Classification) for one in seen):
            problems += self._told_of_classes(seen)
        elif not any(len(one.output) for one in seen):
            problems.append(f"nothing is found on any {of}")
        return problems

    def _told_of_classes(self, seen: Sequence[Seen]) -> list[str]:
        if self._probabilities:
            return ["its outputs are probabilities already, and logits are read: export it without the softmax"]
        best = [float(one.output.scores[0]) if len(one.output) else 0.0 for one in seen]
        # The best of C classes by chance has 1 / C.
        flat = sum(score < (1 / self._classes) ** _FLAT for score in best)
        return [f"no class stands out on {flat} of {len(best)} pictures"] if flat > _NEARLY_ALL * len(best) else []
