"""Two variants on the same pictures: is one really worse, at what, and which pictures show it.

Both saw the same pictures, so what makes a picture hard or easy drops out of the difference. The interval is a
paired bootstrap over pictures (Efron, percentile): as many pictures as there are, are drawn with repeats, a and b are
both measured on that very draw, and of many such differences the middle 95 % are taken.

It says how far the difference may come from which pictures were taken. It does not say

- how good a or b is: the figures of few pictures read high (128 of COCO do); only their difference can be used;
- anything of other pictures than such as these: another camera, night, rain;
- that a and b are equal, where it contains 0: with fewer pictures it is wider, and more stays hidden in it.

Every class has its own interval: of 80 such, some four miss 0 by chance. A class that few pictures have counts only in
draws that have it, and there with more boxes than it really has: mAP comes out higher in the draws than on the
pictures as they are, and a difference somewhat larger, so that the interval may lie a little off its middle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pycocotools import mask

from edge_runtime.errors import UsageError
from edge_runtime.prepare.comparison import LEAST_PICTURES, SEEN_SCORE, Change, Comparison, Picture, Shift, Subject
from edge_runtime.prepare.matches import AREAS, match
from edge_runtime.prepare.metrics import AT_50, AT_75, class_names, ranks_of_truth, xywh
from edge_runtime.prepare.samples import Boxes, Dataset, Predictions
from edge_runtime.records.frames import Detections, Output

__all__ = ["compare"]

_PERCENTILES = (2.5, 97.5)
_LEAST_RESAMPLES = 100
_PAIR_IOU = 0.5
_PAIR_SCORE = 0.1
_LEAST_PAIRS = 10
_WORST_SHOWN = 10


@dataclass(frozen=True, slots=True)
class _Changes:
    overall: Change | None
    measures: Mapping[str, Change | None]
    classes: Mapping[str, Change | None]
    worst: tuple[Picture, ...]


@dataclass(frozen=True, slots=True)
class _Pairs:
    """What a and b found, together or alone.

    class_ids: [n] int32; a, b: [n] float64, their scores, NaN where only the other found it.
    """

    class_ids: NDArray[np.int32]
    a: NDArray[np.float64]
    b: NDArray[np.float64]

    def of_class(self, class_id: int) -> _Pairs:
        of = self.class_ids == class_id
        return _Pairs(self.class_ids[of], self.a[of], self.b[of])


def compare(dataset: Dataset, a: Predictions, b: Predictions, *, seed: int = 0, resamples: int = 1000) -> Comparison:
    """What b does otherwise than a on `dataset`: mAP of detectors, top-1 of classifiers, by size and by class.

    The same arguments give the same numbers. Raises UsageError where a and b cannot be compared (different score
    thresholds) or the pictures have nothing to find, and ValueError where the predictions are not of this dataset
    or `resamples` is below 100.

    The confidence shift is over detections of the same class that overlap by an IoU of 0.5 or more and of which
    one at least has a score above 0.1, each taken once, best scores first; for a classifier, over pictures of which
    both name the same class. What lies below `score_threshold` in one of them counts as found by the other only.
    """
    if resamples < _LEAST_RESAMPLES:
        raise ValueError(f"{resamples} resamples give no interval: {_LEAST_RESAMPLES} at least")
    if a.score_threshold != b.score_threshold:
        raise UsageError(
            f"a has detections above a score of {a.score_threshold:g}, b above {b.score_threshold:g}",
            code="not_comparable",
            where=dataset.name,
            remedy="evaluate both with one score threshold: what a higher one leaves out costs mAP",
        )
    detects = any(isinstance(sample.truth, Boxes) for sample in dataset.samples)
    changes = (_detection_changes if detects else _classification_changes)(dataset, a, b, seed, resamples)
    if changes.overall is None:
        raise UsageError(
            "no picture has a box to find (crowds do not count), so there is nothing to compare by",
            code="not_comparable",
            where=dataset.name,
            remedy="take labelled pictures of what the model is to find",
        )
    pairs = [_pair(of_a, of_b) for of_a, of_b in zip(a.outputs, b.outputs, strict=True)]
    seen = SEEN_SCORE if detects else 0.0
    every = _Pairs(
        np.concatenate([of.class_ids for of in pairs]),
        np.concatenate([of.a for of in pairs]),
        np.concatenate([of.b for of in pairs]),
    )
    names = class_names(dataset.labels)
    shifts = {names[i]: _shift(every.of_class(i)) for i in np.unique(every.class_ids).tolist()}
    return Comparison(
        metric="mAP" if detects else "top1",
        dataset=dataset.name,
        data_sha256=dataset.sha256,
        pictures=len(dataset.samples),
        score_threshold=a.score_threshold,
        subjects=(_subject(a), _subject(b)),
        overall=changes.overall,
        measures={name: change for name, change in changes.measures.items() if change},
        classes={name: change for name, change in changes.classes.items() if change},
        confidence=_shift(every),
        confidence_classes={name: shift for name, shift in shifts.items() if shift.pairs >= _LEAST_PAIRS},
        changed=sum(bool(((of.a > seen) != (of.b > seen)).any()) for of in pairs),
        worst=changes.worst,
        seed=seed,
        resamples=resamples,
    )


def _detection_changes(dataset: Dataset, a: Predictions, b: Predictions, seed: int, resamples: int) -> _Changes:
    matches_a, matches_b = match(dataset, a), match(dataset, b)
    counts = _draw(len(dataset.samples), seed, resamples)
    # [sizes, classes, thresholds, draws]
    values_a, values_b = matches_a.precision(counts), matches_b.precision(counts)
    truths = matches_a.truths

    def of_size(size: int, thresholds: slice = slice(None)) -> Change | None:
        mean_a, mean_b = (_mean(values[size, :, thresholds]) for values in (values_a, values_b))
        return _change(mean_a, mean_b, truths[size].sum(axis=0))

    measures = {f"AP{percent}": of_size(0, slice(at, at + 1)) for percent, at in ((50, AT_50), (75, AT_75))}
    measures.update({name: of_size(size) for size, name in enumerate(AREAS) if size})
    classes = {
        name: _change(_mean(values_a[0, i]), _mean(values_b[0, i]), truths[0, i])
        for i, name in enumerate(class_names(dataset.labels))
    }
    found_a, found_b = matches_a.found(SEEN_SCORE), matches_b.found(SEEN_SCORE)
    worst = _worst(dataset, truths[0].sum(axis=0), found_a, found_b, (found_a - found_b).astype(np.float64))
    return _Changes(of_size(0), measures, classes, worst)


def _classification_changes(dataset: Dataset, a: Predictions, b: Predictions, seed: int, resamples: int) -> _Changes:
    truths, ranks_a = ranks_of_truth(dataset, a)
    _, ranks_b = ranks_of_truth(dataset, b)
    counts = _draw(len(dataset.samples), seed, resamples)

    def of(pictures: NDArray[np.bool_], best: int) -> Change | None:
        drawn = pictures @ counts
        share_a, share_b = (
            np.where(drawn > 0, ((ranks < best) & pictures) @ counts / np.maximum(drawn, 1), np.nan)
            for ranks in (ranks_a, ranks_b)
        )
        return _change(share_a, share_b, pictures.astype(np.int64))

    every = np.ones(len(dataset.samples), np.bool_)
    classes = {name: of(truths == i, 1) for i, name in enumerate(class_names(dataset.labels)) if (truths == i).any()}
    right_a, right_b = (ranks_a < 1).astype(np.int64), (ranks_b < 1).astype(np.int64)
    # The surer b is of its wrong class, the worse.
    sure = np.array([output.scores[0] if len(output) else 0.0 for output in b.outputs])
    worst = _worst(dataset, every.astype(np.int64), right_a, right_b, (right_a - right_b) * (1 + sure))
    return _Changes(of(every, 1), {"top5": of(every, 5)}, classes, worst)


def _draw(pictures: int, seed: int, resamples: int) -> NDArray[np.int64]:
    """[pictures, 1 + resamples] int64: how often each picture is in each draw; the first has each of them once."""
    draws = np.random.default_rng(seed).integers(0, pictures, (resamples, pictures))
    places = draws + pictures * np.arange(resamples)[:, None]
    counts = np.bincount(places.ravel(), minlength=pictures * resamples).reshape(resamples, pictures)
    return np.ascontiguousarray(np.concatenate([np.ones((1, pictures), np.int64), counts]).T)


def _mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """[draws] of [..., draws]: the mean of what is not NaN, NaN where all is."""
    flat = values.reshape(-1, values.shape[-1])
    valid = ~np.isnan(flat)
    count = valid.sum(axis=0)
    sums = np.where(valid, flat, 0.0).sum(axis=0)
    return np.where(count > 0, sums / np.maximum(count, 1), np.nan)


def _change(a: NDArray[np.float64], b: NDArray[np.float64], truths: NDArray[np.int64]) -> Change | None:
    """a, b: [draws], the pictures as they are first; truths: [pictures]. None where there is nothing to find."""
    pictures = int(np.count_nonzero(truths))
    if not pictures:
        return None
    low = high = None
    if pictures >= LEAST_PICTURES:
        differences = (b - a)[1:]
        low, high = np.percentile(differences[~np.isnan(differences)], _PERCENTILES).tolist()
    return Change(float(a[0]), float(b[0]), low, high, int(truths.sum()), pictures)


def _worst(
    dataset: Dataset,
    truths: NDArray[np.int64],
    found_a: NDArray[np.int64],
    found_b: NDArray[np.int64],
    loss: NDArray[np.float64],
) -> tuple[Picture, ...]:
    """The pictures with the greatest loss, all arrays [pictures]; ties in the dataset's order."""
    order = np.argsort(-loss, kind="stable")[:_WORST_SHOWN].tolist()
    return tuple(
        Picture(dataset.samples[i].name, int(truths[i]), int(found_a[i]), int(found_b[i])) for i in order if loss[i] > 0
    )


def _pair(a: Output, b: Output) -> _Pairs:
    """Pairs of the same class; see `compare`."""
    if isinstance(a, Detections) and isinstance(b, Detections):
        left, right = _pair_boxes(a, b)
        alone_a, alone_b = _alone(a, left), _alone(b, right)
    else:
        same = bool(len(a) and len(b) and a.class_ids[0] == b.class_ids[0])
        left = right = np.arange(int(same))
        alone_a, alone_b = (np.arange(min(len(output), 1 - int(same))) for output in (a, b))
    class_ids = np.concatenate([a.class_ids[left], a.class_ids[alone_a], b.class_ids[alone_b]])
    scores_a = np.concatenate([a.scores[left], a.scores[alone_a], np.full(len(alone_b), np.nan)])
    scores_b = np.concatenate([b.scores[right], np.full(len(alone_a), np.nan), b.scores[alone_b]])
    return _Pairs(class_ids, scores_a, scores_b)


def _pair_boxes(a: Detections, b: Detections) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices into a and b of each pair, both [pairs]."""
    if not len(a) or not len(b):
        return np.empty(0, np.intp), np.empty(0, np.intp)
    iou = mask.iou(np.array(xywh(a.boxes)), np.array(xywh(b.boxes)), [0] * len(b))
    higher = np.maximum(a.scores[:, None], b.scores)
    fits = (iou >= _PAIR_IOU) & (a.class_ids[:, None] == b.class_ids) & (higher > _PAIR_SCORE)
    left, right = np.nonzero(fits)
    # Of equal scores the better overlap, then the surer partner: a detection that did not change meets itself.
    order = np.lexsort((-np.minimum(a.scores[left], b.scores[right]), -iou[left, right], -higher[left, right]))
    free_a, free_b = np.ones(len(a), np.bool_), np.ones(len(b), np.bool_)
    kept: list[int] = []
    for place in order.tolist():
        if free_a[left[place]] and free_b[right[place]]:
            free_a[left[place]] = free_b[right[place]] = False
            kept.append(place)
    chosen = np.array(kept, np.intp)
    return left[chosen], right[chosen]


def _alone(found: Detections, paired: NDArray[np.intp]) -> NDArray[np.intp]:
    alone = found.scores > _PAIR_SCORE
    alone[paired] = False
    return np.flatnonzero(alone)


def _shift(pairs: _Pairs) -> Shift:
    only_a, only_b = int(np.isnan(pairs.b).sum()), int(np.isnan(pairs.a).sum())
    moved = pairs.b - pairs.a
    moved = moved[~np.isnan(moved)]
    if not moved.size:
        return Shift(0, None, None, None, only_a, only_b)
    lower, median, upper = np.percentile(moved, (25, 50, 75)).tolist()
    return Shift(moved.size, lower, median, upper, only_a, only_b)


def _subject(of: Predictions) -> Subject:
    return Subject(of.bundle, of.digest, of.engine, of.variant, of.backend, of.scaler)
