"""Which detections met which boxes, kept picture by picture, so that any resample of the pictures can be measured.

COCOeval.evaluate matches within a picture and is the slow part, done once. COCOeval.accumulate ranks and sums over
the pictures; here that is done for a thousand resamples together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.prepare.metrics import AT_50, evaluated
from edge_runtime.prepare.samples import Dataset, Predictions

__all__ = ["AREAS", "Matches", "match"]

AREAS = ("all", "small", "medium", "large")
"""COCO's object sizes, by area: small up to 32 x 32 px, large from 96 x 96 px."""

# Weights of detections held at once (4 MB): they stay in the cache, and memory does not grow with the data.
_BLOCK = 1 << 19


@dataclass(frozen=True, slots=True)
class _Ranking:
    """Detections of one class at one object size, best first, ties in the order of pictures and detections.

    scores: [d] float64; pictures: [d] intp, index of the sample; counted: [10, d] bool, right or wrong at this IoU
    threshold (False: outside of the size, or on a crowd); hits: [10, d] bool, right.
    """

    scores: NDArray[np.float64]
    pictures: NDArray[np.intp]
    counted: NDArray[np.bool_]
    hits: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Matches:
    """Which detections met which boxes, picture by picture, by COCO's rules.

    truths: [sizes, classes, pictures] int64, boxes to be found; the sizes are `AREAS`, or the first of them alone.
    """

    truths: NDArray[np.int64]
    _rankings: tuple[tuple[_Ranking, ...], ...]
    _recalls: NDArray[np.float64]

    def all_sizes(self) -> Matches:
        """The same without small, medium and large objects apart: a quarter of the work where only mAP is asked for."""
        return replace(self, truths=self.truths[:1], _rankings=self._rankings[:1])

    def found(self, score: float) -> NDArray[np.int64]:
        """[pictures] int64: boxes met with an IoU of 0.5 by a detection of their class above `score` (0-1)."""
        found = np.zeros(self.truths.shape[2], np.int64)
        for ranking in self._rankings[0]:
            met = ranking.hits[AT_50] & (ranking.scores > score)
            found += np.bincount(ranking.pictures[met], minlength=found.size)
        return found

    def precision(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """[sizes, classes, 10 thresholds, resamples] float64: the average precision of every resample.

        `counts`: [pictures, resamples], how often each picture is in it. As COCOeval.accumulate computes it where
        the copies of a picture follow one another; NaN where there is no box to find. Only the precision at a hit
        can be the highest at some recall, so that only hits are looked at.
        """
        result = np.zeros((*self.truths.shape[:2], self._rankings[0][0].hits.shape[0], counts.shape[1]))
        copies = int(counts.max(initial=0))
        for size, rankings in enumerate(self._rankings):
            for class_id, ranking in enumerate(rankings):
                cell = result[size, class_id]
                positives = self.truths[size, class_id] @ counts
                if positives.any() and ranking.hits.any():
                    ranked, turns = _in_turns(ranking, copies)
                    width = max(1, _BLOCK // turns.size)
                    for start in range(0, counts.shape[1], width):
                        block = slice(start, start + width)
                        cell[:, block] = self._block(ranked, turns, counts[:, block], positives[block])
                cell[:, positives == 0] = np.nan
        return result

    def _block(
        self,
        ranking: _Ranking,
        turns: NDArray[np.intp],
        counts: NDArray[np.int64],
        positives: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        weights = counts[ranking.pictures]
        single = np.flatnonzero(turns)
        weights[single] = weights[single] >= turns[single, None]
        # Nearly all detections count at every threshold or at none: they are summed once for the ten.
        steady = ranking.counted.all(axis=0)
        steady_rows = np.flatnonzero(steady)
        steady_sums = _running(weights, steady_rows)
        result = np.zeros((ranking.hits.shape[0], counts.shape[1]))
        for threshold, (counted, hit) in enumerate(zip(ranking.counted, ranking.hits, strict=True)):
            places = np.flatnonzero(hit)
            rest = np.flatnonzero(counted & ~steady)
            total = steady_sums[np.searchsorted(steady_rows, places, side="right")]
            total += _running(weights, rest)[np.searchsorted(rest, places, side="right")]
            right = np.cumsum(weights[places], axis=0)
            # The divisor is COCOeval's: it keeps 0 / 0 from happening.
            precision = right / (total + np.spacing(1))
            precision = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
            reached = np.searchsorted(self._recalls, right / np.maximum(positives, 1), side="right")
            result[threshold] = (precision * np.diff(reached, axis=0, prepend=0)).sum(axis=0) / self._recalls.size
        return result


def match(dataset: Dataset, predictions: Predictions) -> Matches:
    """What COCO's evaluation matches in each picture. Raises as `average_precision`."""
    evaluation = evaluated(dataset, predictions)
    classes, pictures = len(dataset.labels), len(dataset.samples)
    truths = np.zeros((len(AREAS), classes, pictures), np.int64)
    cells = iter(evaluation.evalImgs)
    rankings: list[list[_Ranking]] = [[] for _ in AREAS]
    for class_id in range(classes):
        for size, of_size in enumerate(rankings):
            entries = [(i, entry) for i in range(pictures) if (entry := next(cells)) is not None]
            for i, entry in entries:
                truths[size, class_id, i] = entry["gtIgnore"].size - np.count_nonzero(entry["gtIgnore"])
            of_size.append(_rank(entries, len(evaluation.params.iouThrs)))
    return Matches(truths, tuple(map(tuple, rankings)), evaluation.params.recThrs)


def _rank(entries: list[tuple[int, dict[str, Any]]], thresholds: int) -> _Ranking:
    none = np.empty((thresholds, 0), np.bool_)
    scores = np.array([score for _, entry in entries for score in entry["dtScores"]], np.float64)
    pictures = np.array([i for i, entry in entries for _ in entry["dtScores"]], np.intp)
    counted = np.concatenate([none, *(entry["dtIgnore"] == 0 for _, entry in entries)], axis=1)
    hits = np.concatenate([none, *(entry["dtMatches"] != 0 for _, entry in entries)], axis=1) & counted
    order = np.argsort(-scores, kind="stable")
    order = order[counted[:, order].any(axis=0)]
    return _Ranking(scores[order], pictures[order], counted[:, order], hits[:, order])


def _running(weights: NDArray[np.int64], rows: NDArray[np.intp]) -> NDArray[np.int64]:
    """[rows + 1, resamples]: the weights of the first 0, 1, 2, … of `rows`, summed."""
    sums = np.zeros((rows.size + 1, weights.shape[1]), np.int64)
    np.cumsum(weights[rows], axis=0, out=sums[1:])
    return sums


def _in_turns(ranking: _Ranking, copies: int) -> tuple[_Ranking, NDArray[np.intp]]:
    """The ranking of up to `copies` of each picture, and for each detection the copy it is of, 0 for all at once.

    Copies of a detection stand together, except where detections of one picture have the same score: then those
    of the first copy come first, then those of the second, and so on.
    """
    count = ranking.scores.size
    fresh = (np.diff(ranking.scores) != 0) | (np.diff(ranking.pictures) != 0)
    starts = np.flatnonzero(np.concatenate(([True], fresh)))
    ends = np.append(starts[1:], count)
    # Without a hit among them their order makes no difference.
    tied = (ends - starts > 1) & (np.maximum.reduceat(ranking.hits.any(axis=0), starts) > 0)
    if copies < 2 or not tied.any():
        return ranking, np.zeros(count, np.intp)
    rows: list[NDArray[np.intp]] = []
    turns: list[NDArray[np.intp]] = []
    done = 0
    for start, end in zip(starts[tied].tolist(), ends[tied].tolist(), strict=True):
        rows += [np.arange(done, start), np.tile(np.arange(start, end), copies)]
        turns += [np.zeros(start - done, np.intp), np.repeat(np.arange(1, copies + 1), end - start)]
        done = end
    rows.append(np.arange(done, count))
    turns.append(np.zeros(count - done, np.intp))
    order = np.concatenate(rows)
    ranked = _Ranking(ranking.scores[order], ranking.pictures[order], ranking.counted[:, order], ranking.hits[:, order])
    return ranked, np.concatenate(turns)
