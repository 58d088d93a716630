"""Whether a coarser model may take the float model's place: by its loss on pictures that nothing was tuned on.

A model in FP16 or INT8 is made with the help of pictures, and layers are chosen by what they cost on pictures. What it
loses is therefore measured on others, and once: a set that was looked at again and again is no longer held out.

The loss is relative: (float - candidate) / float, of mAP or top-1. Both models saw the same pictures. As many as there
are, are drawn with repeats, the loss is measured on that very draw, and of many such losses the 90th percentile is the
bound (a paired bootstrap, Efron): of a hundred sets of pictures such as these, some ninety would have the true loss
below it. What decides is this bound, not the loss that was seen; a loss of 0 on ten pictures proves little.

Where a picture is right or wrong (top-1), few or none change sides, and drawing those few again understates what other
pictures would show. So one picture more is counted on which the candidate alone is wrong. With none lost of n pictures
the bound is then about 2 / n, where the exact one is 2.3 / n.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import RefusedError, UsageError
from edge_runtime.prepare.matches import match
from edge_runtime.prepare.metrics import ranks_of_truth
from edge_runtime.prepare.samples import Boxes, Dataset, Predictions, Sample
from edge_runtime.records.frames import Detections

__all__ = ["Accept", "Basis", "Gate", "HeldOut", "agreement_truth", "judge", "judge_losses"]

Accept = Literal["bound", "point"]
"""What has to be within the allowed loss: the 90 % bound, or the loss as it was seen."""
Basis = Literal["labels", "agreement"]
"""What is taken for right: labels, or what the float model says."""

CONFIDENCE = 0.9
RESAMPLES = 2000
LEAST_PICTURES = 32
"""Fewer give no bound, whatever they say: what did not happen in so few may well happen."""
_ROUNDING = 1e-9
_BLOCK = 250
"""Resamples measured at a time: memory does not grow with their number."""


@dataclass(frozen=True, slots=True)
class Gate:
    """What was found, and whether it is enough.

    `float_value`, `candidate`: the metric (0-1). `loss`: relative, negative where the candidate is better;
    `low`, `high`: its one-sided 90 % bounds, None with too few pictures. `pictures_needed`: about how many pictures
    would bring the bound within `max_loss` if the loss stayed what it is; None where that is no question of number.
    """

    metric: Literal["mAP", "top1"]
    basis: Basis
    float_value: float
    candidate: float
    loss: float
    low: float | None
    high: float | None
    max_loss: float
    accept: Accept
    pictures: int
    pictures_needed: int | None
    seed: int
    resamples: int

    @property
    def passed(self) -> bool:
        value = self.loss if self.accept == "point" else self.high
        return value is not None and value <= self.max_loss + _ROUNDING

    @property
    def verdict(self) -> Literal["accepted", "loses too much", "not enough data"]:
        if self.passed:
            return "accepted"
        return "loses too much" if self.loss > self.max_loss + _ROUNDING else "not enough data"

    def __str__(self) -> str:
        truth = "" if self.basis == "labels" else " against the float model's own answers"
        bound = "no bound" if self.high is None else f"at most {self.high:.2%} (90 %)"
        told = (
            f"{self.verdict}: {self.metric}{truth} {self.float_value:.4f} -> {self.candidate:.4f}, "
            f"a loss of {self.loss:.2%}, {bound}, and {self.max_loss:.2%} is allowed; {self.pictures} pictures"
        )
        needed = self.pictures_needed
        if needed is None or self.passed:
            return told
        if self.high is None:
            return f"{told}, and {needed} are the least that give a bound"
        return f"{told}, and about {needed} would be enough if the loss stayed so"

    def as_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        return {**asdict(self), "passed": self.passed, "verdict": self.verdict, "confidence": CONFIDENCE}

    def check(self, where: str) -> None:
        """Raises RefusedError with the numbers: code "loses_too_much" or "not_enough_data"."""
        if self.passed:
            return
        if self.verdict == "loses too much":
            remedy = "keep more of the model in float, or allow a greater --max-loss"
        else:
            remedy = "evaluate on more pictures; --accept point takes the loss as it was seen"
        raise RefusedError(str(self), code=self.verdict.replace(" ", "_"), where=where, remedy=remedy)


class HeldOut:
    """A dataset that is given out once, and holds no picture that the candidate was made with."""

    def __init__(self, dataset: Dataset, used: Iterable[str], digests: Iterable[str]) -> None:
        """`digests`: sha256 of the dataset's pictures; `used`: of those that made the candidate.

        Raises UsageError (code "not_held_out") where a picture is in both.
        """
        if both := set(used) & set(digests):
            raise UsageError(
                f"{len(both)} of its {len(dataset.samples)} pictures were calibrated with as well, and would be judged "
                "by what they made",
                code="not_held_out",
                where=str(dataset.root),
                remedy="calibrate on other pictures",
            )
        self._dataset: Dataset | None = dataset

    def take(self) -> Dataset:
        """The dataset. Raises ValueError when it was taken before."""
        dataset, self._dataset = self._dataset, None
        if dataset is None:
            raise ValueError("a held-out set is measured once: what is chosen by it is no longer judged by it")
        return dataset


def judge(
    dataset: Dataset,
    reference: Predictions,
    candidate: Predictions,
    *,
    max_loss: float,
    accept: Accept = "bound",
    basis: Basis = "labels",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Gate:
    """The candidate against the float model on the same held-out pictures. The same arguments give the same numbers.

    Raises UsageError (code "dataset_invalid") where the float model itself finds nothing, ValueError where the
    predictions are not of this dataset or were taken above different scores.
    """
    if reference.score_threshold != candidate.score_threshold:
        raise ValueError("the two were measured above different scores")
    counts = _draw(len(dataset.samples), seed, resamples)
    if isinstance(dataset.samples[0].truth, Boxes):
        metric: Literal["mAP", "top1"] = "mAP"
        before, after = _mean_ap(dataset, reference, counts), _mean_ap(dataset, candidate, counts)
        seen = float(before[0]), float(after[0])
    else:
        metric = "top1"
        before, after = (
            _top1((ranks_of_truth(dataset, said)[1] < 1).astype(np.int64), counts, extra)
            for said, extra in ((reference, 1), (candidate, 0))
        )
        count = len(dataset.samples)
        # the imaginary picture is for the bound alone
        seen = (float(before[0]) * (count + 1) - 1) / count, float(after[0]) * (count + 1) / count
    if not seen[0] > 0:
        raise UsageError(
            f"the float model's own {metric} is {seen[0]:.4f} on these {len(dataset.samples)} pictures, so that "
            "nothing can be lost",
            code="dataset_invalid",
            where=str(dataset.root),
            remedy="evaluate on pictures of what the model is to find; `prepare evaluate` says how right it is",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        losses = (before[1:] - after[1:]) / before[1:]
    losses = losses[np.isfinite(losses)]
    gate = judge_losses(seen, losses, len(dataset.samples), metric=metric, max_loss=max_loss, accept=accept)
    return replace(gate, basis=basis, seed=seed, resamples=resamples)


def judge_losses(
    seen: tuple[float, float],
    losses: NDArray[np.float64],
    pictures: int,
    *,
    metric: Literal["mAP", "top1"],
    max_loss: float,
    accept: Accept,
) -> Gate:
    """The judgement on the metric of (float, candidate) and the relative losses of the resamples ([n])."""
    loss = (seen[0] - seen[1]) / seen[0]
    low = high = None
    needed = LEAST_PICTURES if pictures < LEAST_PICTURES and loss <= max_loss + _ROUNDING else None
    if pictures >= LEAST_PICTURES and losses.size:
        low, high = (float(np.quantile(losses, share)) for share in (1 - CONFIDENCE, CONFIDENCE))
        room, width = max_loss - loss, high - loss
        if high > max_loss + _ROUNDING and room > _ROUNDING and width > 0:
            needed = math.ceil(pictures * (width / room) ** 2)
    return Gate(
        metric=metric,
        basis="labels",
        float_value=seen[0],
        candidate=seen[1],
        loss=loss,
        low=low,
        high=high,
        max_loss=max_loss,
        accept=accept,
        pictures=pictures,
        pictures_needed=needed,
        seed=0,
        resamples=int(losses.size),
    )


def agreement_truth(dataset: Dataset, reference: Predictions, score_threshold: float) -> Dataset:
    """The same pictures with what the float model says in place of labels: boxes above `score_threshold` (0-1), or
    its best class. What the candidate then loses is what it says otherwise, right or wrong: it is stricter than a
    loss by labels, since the float model itself is never wrong.

    Raises UsageError (code "dataset_invalid") where it says nothing of any picture.
    """
    samples: list[Sample] = []
    for sample, output in zip(dataset.samples, reference.outputs, strict=True):
        if isinstance(output, Detections):
            kept = output.scores > score_threshold
            boxes = output.boxes[kept]
            area = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
            truth = Boxes(boxes, output.class_ids[kept], np.zeros(len(boxes), np.bool_), area)
            samples.append(replace(sample, truth=truth))
        elif len(output):
            samples.append(replace(sample, truth=int(output.class_ids[0])))
    if not any(not isinstance(each.truth, Boxes) or len(each.truth.boxes) for each in samples):
        raise UsageError(
            f"the float model finds nothing in these {len(dataset.samples)} pictures, so that there is nothing to "
            "agree on",
            code="dataset_invalid",
            where=str(dataset.root),
            remedy="take pictures of what the model is to find, or labelled ones by --evaluate",
        )
    return replace(dataset, samples=tuple(samples))


def _draw(pictures: int, seed: int, resamples: int) -> NDArray[np.int64]:
    """[pictures, 1 + resamples] int64: how often each picture is in each draw; the first has each of them once."""
    counts = np.ones((pictures, 1 + resamples), np.int64)
    shares = np.full(pictures, 1 / pictures)
    counts[:, 1:] = np.random.default_rng(seed).multinomial(pictures, shares, resamples).T
    return counts


def _mean_ap(dataset: Dataset, said: Predictions, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """[draws]: COCO's mAP of each draw, 0 where a draw has no box to find."""
    matches = match(dataset, said).all_sizes()
    values = np.zeros(counts.shape[1])
    for start in range(0, counts.shape[1], _BLOCK):
        block = slice(start, start + _BLOCK)
        # [classes, thresholds, draws]
        precision = matches.precision(counts[:, block])[0].mean(axis=1)
        valid = ~np.isnan(precision)
        sums = np.where(valid, precision, 0.0).sum(axis=0)
        values[block] = sums / np.maximum(valid.sum(axis=0), 1)
    return values


def _top1(right: NDArray[np.int64], counts: NDArray[np.int64], extra: int) -> NDArray[np.float64]:
    """[draws]: the share of right pictures, with the imaginary one of which `extra` says whether it is right (it may
    be drawn as often as any other)."""
    total = counts.shape[0] + 1
    imaginary = np.random.default_rng(total).binomial(total, 1 / total, counts.shape[1])
    imaginary[0] = 1
    shares: NDArray[np.float64] = (right @ counts + extra * imaginary) / (counts.sum(axis=0) + imaginary)
    return shares
