"""The accuracy gate: what is accepted, what is refused, and how often its bound is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import EXIT_REFUSED, RefusedError, UsageError
from edge_runtime.prepare.gate import LEAST_PICTURES, Gate, HeldOut, agreement_truth, judge, judge_losses
from edge_runtime.prepare.matches import match
from edge_runtime.prepare.metrics import average_precision
from edge_runtime.prepare.samples import Dataset
from edge_runtime.records.frames import Detections, Output
from tests.prepare.made_up import boxes, classification, dataset, detections, predictions

FLOAT_RIGHT = 0.9


def classified(
    rng: np.random.Generator, pictures: int, *, lost: float, won: float
) -> tuple[Dataset, list[list[Output]]]:
    """Pictures of one class, what the float model says of them and what the candidate does: of all pictures it loses
    the share `lost` and wins `won`."""
    right = rng.random(pictures) < FLOAT_RIGHT
    draw = rng.random(pictures)
    after = np.where(right, draw >= lost / FLOAT_RIGHT, draw < won / (1 - FLOAT_RIGHT))
    said: list[list[Output]] = [
        [classification([0 if each else 1], [0.9]) for each in answers.tolist()] for answers in (right, after)
    ]
    return dataset([0] * pictures), said


def judged(rng: np.random.Generator, pictures: int, *, lost: float, won: float = 0.0, resamples: int = 300) -> Gate:
    data, (before, after) = classified(rng, pictures, lost=lost, won=won)
    return judge(data, predictions(before), predictions(after), max_loss=0.01, seed=1, resamples=resamples)


def found(
    rng: np.random.Generator, pictures: int, *, miss: float, shift: float
) -> tuple[Dataset, list[Detections], list[Detections]]:
    """A detector's pictures with two boxes each: both models find what they find in the same pictures, and the
    candidate misses the share `miss` of it and moves its boxes by `shift` of their side."""
    truths, before, after = [], [], []
    for _ in range(pictures):
        corner = rng.uniform(0, 300, (2, 2)).astype(np.float32)
        rows = np.concatenate([corner, corner + rng.uniform(30, 90, (2, 2)).astype(np.float32)], axis=1)
        classes = rng.integers(0, 2, 2)
        truths.append(boxes(rows, classes))
        near = rows + (rng.standard_normal(rows.shape) * 4).astype(np.float32)
        scores = rng.uniform(0.2, 0.95, 2)
        before.append(detections(near, scores, classes))
        kept = rng.random(2) >= miss
        moved = near + (rng.standard_normal(near.shape) * shift * 60).astype(np.float32)
        after.append(detections(moved[kept], scores[kept], classes[kept]))
    return dataset(truths, ("red", "green")), before, after


def test_a_candidate_that_loses_nothing_is_accepted() -> None:
    gate = judged(np.random.default_rng(0), 1000, lost=0.0)
    assert (gate.verdict, gate.passed, gate.loss) == ("accepted", True, 0.0)
    assert gate.high is not None
    assert 0 < gate.high < 0.005  # none of a thousand lost is no proof that none ever is
    gate.check("here")

    data, before, _ = found(np.random.default_rng(0), 60, miss=0.0, shift=0.0)
    same = judge(data, predictions(before), predictions(before), max_loss=0.01, resamples=200)
    assert (same.metric, same.verdict, same.loss, same.high) == ("mAP", "accepted", 0.0, 0.0)


def test_a_candidate_that_loses_a_twentieth_is_refused() -> None:
    gates = [judged(np.random.default_rng(1), 2000, lost=0.05)]
    data, before, after = found(np.random.default_rng(1), 150, miss=0.05, shift=0.0)
    gates.append(judge(data, predictions(before), predictions(after), max_loss=0.01, resamples=200))
    for gate in gates:
        assert (gate.verdict, gate.passed) == ("loses too much", False)
        assert 0.02 < gate.loss < 0.09
        assert gate.pictures_needed is None  # more pictures would not help
        with pytest.raises(RefusedError, match=r"a loss of \d\.\d\d%, at most .* 1\.00% is allowed") as caught:
            gate.check("bundle fp16-416")
        assert (caught.value.exit_code, caught.value.code) == (EXIT_REFUSED, "loses_too_much")
        assert caught.value.where == "bundle fp16-416"


def test_too_few_pictures_are_no_proof_and_how_many_would_be_is_said() -> None:
    rng = np.random.default_rng(2)
    gate = judged(rng, 100, lost=0.0)
    assert (gate.loss, gate.verdict) == (0.0, "not enough data")
    with pytest.raises(RefusedError, match=r"100 pictures, and about \d+ would be enough") as caught:
        gate.check("here")
    assert caught.value.code == "not_enough_data"
    assert gate.pictures_needed is not None
    assert 200 <= gate.pictures_needed <= 1000
    assert judged(rng, gate.pictures_needed, lost=0.0).passed

    few = judged(rng, LEAST_PICTURES - 1, lost=0.0)
    assert (few.high, few.verdict, few.pictures_needed) == (None, "not enough data", LEAST_PICTURES)
    assert "no bound" in str(few)


def test_the_point_is_enough_where_that_is_asked_for() -> None:
    data, (before, after) = classified(np.random.default_rng(3), 100, lost=0.0, won=0.0)
    said = predictions(before), predictions(after)
    assert not judge(data, *said, max_loss=0.01, resamples=200).passed
    gate = judge(data, *said, max_loss=0.01, accept="point", resamples=200)
    assert (gate.verdict, gate.as_dict()["passed"], gate.as_dict()["accept"]) == ("accepted", True, "point")


@settings(max_examples=50, deadline=None)
@given(
    seen=st.tuples(st.floats(0.05, 1.0), st.floats(0.0, 1.0)),
    spread=st.floats(0.0, 0.2),
    max_loss=st.floats(0.0, 0.3),
    pictures=st.integers(1, 5000),
)
def test_what_decides(seen: tuple[float, float], spread: float, max_loss: float, pictures: int) -> None:
    loss = (seen[0] - seen[1]) / seen[0]
    losses = np.array(loss + spread * np.linspace(-1, 1, 201), np.float64)
    point = judge_losses(seen, losses, pictures, metric="mAP", max_loss=max_loss, accept="point")
    bound = judge_losses(seen, losses, pictures, metric="mAP", max_loss=max_loss, accept="bound")
    assert point.passed == (loss <= max_loss + 1e-9)
    if bound.passed:
        assert pictures >= LEAST_PICTURES
        assert bound.high is not None
        assert bound.high <= max_loss + 1e-9
        assert bound.pictures_needed is None
    if bound.pictures_needed is not None:
        assert bound.pictures_needed >= pictures
        assert bound.verdict == "not enough data"


def test_the_same_arguments_give_the_same_numbers() -> None:
    data, before, after = found(np.random.default_rng(4), 40, miss=0.02, shift=0.02)
    said = predictions(before), predictions(after)
    first = judge(data, *said, max_loss=0.01, seed=5, resamples=200)
    assert first == judge(data, *said, max_loss=0.01, seed=5, resamples=200)
    assert first.high != judge(data, *said, max_loss=0.01, seed=6, resamples=200).high


def test_the_metric_is_the_one_that_evaluate_gives() -> None:
    data, before, after = found(np.random.default_rng(5), 40, miss=0.1, shift=0.05)
    gate = judge(data, predictions(before), predictions(after), max_loss=0.01, resamples=100)
    assert gate.float_value == pytest.approx(average_precision(data, predictions(before)).mean_ap)
    assert gate.candidate == pytest.approx(average_precision(data, predictions(after)).mean_ap)
    counts = np.ones((40, 3), np.int64)
    matches = match(data, predictions(after))
    assert np.array_equal(matches.all_sizes().precision(counts)[0], matches.precision(counts)[0], equal_nan=True)


def coverage(runs: int, pictures: int, *, lost: float, won: float) -> float:
    """How often the true loss lies within the 90 % bound."""
    rng = np.random.default_rng(7)
    true = (lost - won) / FLOAT_RIGHT
    gates = [judged(rng, pictures, lost=lost, won=won) for _ in range(runs)]
    return sum(gate.high is not None and true <= gate.high for gate in gates) / runs


@pytest.mark.parametrize(("lost", "won"), [(0.05, 0.02), pytest.param(0.005, 0.0, marks=pytest.mark.full)])
def test_nine_of_ten_bounds_hold(lost: float, won: float) -> None:
    assert coverage(40, 300, lost=lost, won=won) >= 0.82


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("lost", "won", "most"),
    # Where few pictures change sides the picture that is added makes the bound careful.
    [(0.05, 0.02, 0.95), (0.02, 0.01, 0.97), (0.01, 0.01, 1.0), (0.005, 0.0, 1.0)],
)
def test_nine_of_ten_bounds_hold_in_many_runs(lost: float, won: float, most: float) -> None:
    assert 0.88 <= coverage(1000, 300, lost=lost, won=won) <= most


@pytest.mark.full
@pytest.mark.timeout(900)
def test_nine_of_ten_bounds_of_detectors_hold() -> None:
    large = found(np.random.default_rng(8), 6000, miss=0.02, shift=0.01)
    first, second = (average_precision(large[0], predictions(said)).mean_ap for said in large[1:])
    assert first is not None
    assert second is not None
    true = (first - second) / first
    rng, held, runs = np.random.default_rng(9), 0, 200
    for _ in range(runs):
        data, before, after = found(rng, 80, miss=0.02, shift=0.01)
        gate = judge(data, predictions(before), predictions(after), max_loss=0.01, resamples=300)
        held += gate.high is not None and true <= gate.high
    assert 0.83 <= held / runs <= 0.97


def test_held_out_pictures_are_measured_once_and_are_no_others() -> None:
    data = dataset([0, 1, 2])
    held = HeldOut(data, used={"a", "b"}, digests=["c", "d"])
    assert held.take() is data
    with pytest.raises(ValueError, match="measured once"):
        held.take()
    with pytest.raises(UsageError, match="1 of its 3 pictures were calibrated with as well") as caught:
        HeldOut(data, used={"a", "b"}, digests=["b", "c"])
    assert caught.value.code == "not_held_out"


def test_without_labels_the_float_model_is_right() -> None:
    data, before, after = found(np.random.default_rng(10), 40, miss=0.3, shift=0.0)
    truth = agreement_truth(data, predictions(before), 0.3)
    same = judge(truth, predictions(before), predictions(before), max_loss=0.01, basis="agreement", resamples=100)
    assert same.float_value == pytest.approx(1.0)
    assert (same.loss, same.basis) == (0.0, "agreement")
    assert "against the float model's own answers" in str(same)
    other = judge(truth, predictions(before), predictions(after), max_loss=0.01, resamples=100)
    assert 0.15 < other.loss < 0.45

    labels = dataset([0] * 40)
    said = [classification([i % 3], [0.9]) for i in range(40)]
    truth = agreement_truth(labels, predictions(said), 0.3)
    assert [sample.truth for sample in truth.samples] == [i % 3 for i in range(40)]

    nothing = [detections(np.zeros((0, 4)), [], [])] * 40
    with pytest.raises(UsageError, match="finds nothing in these 40 pictures"):
        agreement_truth(data, predictions(nothing), 0.3)


def test_what_cannot_be_judged() -> None:
    data, before, after = found(np.random.default_rng(11), 40, miss=0.0, shift=0.0)
    nothing = [detections(np.zeros((0, 4)), [], [])] * 40
    with pytest.raises(UsageError, match=r"the float model's own mAP is 0\.0000") as caught:
        judge(data, predictions(nothing), predictions(after), max_loss=0.01, resamples=100)
    assert caught.value.where == str(Path("made-up"))
    with pytest.raises(ValueError, match="above different scores"):
        judge(data, predictions(before), predictions(after, score_threshold=0.3), max_loss=0.01)
