"""Average precision is COCO's to the last digit, top-1 and top-5 are what they are called."""

from __future__ import annotations

import numpy as np
import pytest

from edge_runtime.prepare.metrics import average_precision, class_names, top_k
from edge_runtime.prepare.samples import Boxes
from edge_runtime.records.frames import Output
from tests.prepare.made_up import (
    boxes,
    classification,
    coco_evaluation,
    dataset,
    detections,
    perturbed,
    predictions,
)

SMALL, MEDIUM, LARGE = (0, 0, 20, 20), (100, 0, 150, 50), (200, 200, 400, 400)
NOTHING = detections([], [], [])


def test_by_hand() -> None:
    data = dataset([boxes([SMALL, LARGE], [0, 0])])
    far = (500, 500, 520, 520)
    found = average_precision(data, predictions([detections([SMALL, far, LARGE], [0.9, 0.8, 0.7], [0, 0, 0])]))
    # Precision 1 at the recalls 0 to 0.5, then 2 of 3.
    expected = (51 + 50 * 2 / 3) / 101
    assert found.mean_ap == pytest.approx(expected, abs=1e-9)
    assert found.ap50 == found.ap75 == pytest.approx(expected, abs=1e-9)
    assert found.ap_small == pytest.approx(1)
    assert found.ap_medium is None
    assert found.ap_large == pytest.approx(1)
    assert found.per_class == {"red": pytest.approx(expected), "green": None, "blue": None}
    assert found.boxes == 2


def test_a_loose_box_counts_at_low_thresholds_only() -> None:
    data = dataset([boxes([LARGE], [1])])
    # 62 % of the box: an overlap of 0.62, enough for 0.5, 0.55 and 0.6.
    found = average_precision(data, predictions([detections([(200, 200, 324, 400)], [0.5], [1])]))
    assert found.ap50 == pytest.approx(1)
    assert found.ap75 == 0
    assert found.mean_ap == pytest.approx(0.3)


def test_a_crowd_is_neither_to_be_found_nor_wrong() -> None:
    data = dataset([boxes([LARGE, MEDIUM], [0, 0], crowd=[True, False])])
    inside = (210, 210, 300, 300)
    found = average_precision(data, predictions([detections([inside, MEDIUM], [0.9, 0.8], [0, 0])]))
    assert found.mean_ap == pytest.approx(1)
    assert found.boxes == 1
    alone = average_precision(dataset([boxes([LARGE], [0], crowd=[True])]), predictions([NOTHING]))
    assert alone.mean_ap is None
    assert alone.boxes == 0


def test_nothing_found_and_nothing_to_find(capsys: pytest.CaptureFixture[str]) -> None:
    data = dataset([boxes([LARGE], [0]), boxes([], [])])
    assert average_precision(data, predictions([NOTHING, NOTHING])).mean_ap == 0
    empty = average_precision(dataset([boxes([], [])]), predictions([detections([LARGE], [0.9], [0])]))
    assert (empty.mean_ap, empty.ap50, empty.ap_large, empty.boxes) == (None, None, None, 0)
    assert capsys.readouterr().out == ""


def test_the_size_is_that_of_the_annotation() -> None:
    truth = boxes([LARGE], [0])
    segment = Boxes(truth.boxes, truth.class_ids, truth.crowd, np.array([50.0 * 50], np.float32))
    found = average_precision(dataset([segment]), predictions([detections([LARGE], [0.9], [0])]))
    assert found.ap_medium == pytest.approx(1)
    assert found.ap_large is None


def test_a_hundred_detections_of_a_class_in_a_picture() -> None:
    data = dataset([boxes([LARGE], [0])])
    rows, scores = [SMALL] * 100 + [LARGE], np.linspace(0.9, 0.1, 101)
    assert average_precision(data, predictions([detections(rows, scores, [0] * 101)])).mean_ap == 0
    one_less = average_precision(data, predictions([detections(rows[1:], scores[1:], [0] * 100)]))
    assert one_less.mean_ap == pytest.approx(1 / 100)


@pytest.mark.parametrize("steps", [None, 8])
def test_as_pycocotools_by_its_own_way(steps: int | None) -> None:
    rng = np.random.default_rng(3)
    truths = []
    for _ in range(12):
        corner, sides = rng.uniform(0, 300, (6, 2)), rng.uniform(5, 200, (6, 2))
        crowd = rng.random(6) < 0.1
        truths.append(boxes(np.concatenate([corner, corner + sides], axis=1), rng.integers(0, 2, 6), crowd=crowd))
    data = dataset(truths)
    outputs = perturbed(data, 4, steps=steps)
    found = average_precision(data, predictions(outputs))
    stats = coco_evaluation(data, outputs).stats
    values = (found.mean_ap, found.ap50, found.ap75, found.ap_small, found.ap_medium, found.ap_large)
    assert values == pytest.approx(tuple(stats[:6]), abs=1e-9)
    assert 0.05 < stats[0] < 0.95


def test_top_1_and_top_5() -> None:
    data = dataset([0, 0, 1, 2], [*"abcdef"])
    outputs = [
        classification([0, 1], [0.9, 0.1]),
        classification([5, 4, 3, 2, 0], [0.3, 0.2, 0.2, 0.2, 0.1]),
        classification([], []),
        classification([2], [1.0]),
    ]
    found = top_k(data, predictions(outputs))
    assert (found.top1, found.top5) == (0.5, 0.75)
    assert found.per_class == {"a": 0.5, "b": 0.0, "c": 1.0}


def test_classes_of_the_same_label_stay_apart() -> None:
    assert class_names(("crane", "owl", "crane")) == ["crane #0", "owl", "crane #2"]
    data = dataset([0, 2], ["crane", "owl", "crane"])
    found = top_k(data, predictions([classification([0], [1.0]), classification([0], [1.0])]))
    assert found.per_class == {"crane #0": 1.0, "crane #2": 0.0}


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([NOTHING], "1 results for the 2 pictures"),
        ([NOTHING, classification([0], [1.0])], "001.jpg: a Classification, where Detections"),
        ([NOTHING, detections([LARGE], [0.5], [3])], "001.jpg: a class outside of the 3"),
        ([detections([LARGE], [0.5], [-1]), NOTHING], "000.jpg: a class outside of the 3"),
    ],
)
def test_detections_that_are_not_of_these_pictures(outputs: list[Output], words: str) -> None:
    data = dataset([boxes([LARGE], [0]), boxes([], [])])
    with pytest.raises(ValueError, match=words):
        average_precision(data, predictions(outputs))


def test_other_mismatches() -> None:
    named = classification([0], [1.0])
    with pytest.raises(ValueError, match="a class each and no boxes"):
        average_precision(dataset([1]), predictions([NOTHING]))
    with pytest.raises(ValueError, match="has boxes"):
        top_k(dataset([boxes([LARGE], [0])]), predictions([named]))
    with pytest.raises(ValueError, match="a Detections, where Classification"):
        top_k(dataset([1]), predictions([NOTHING]))
    with pytest.raises(ValueError, match="a class outside"):
        top_k(dataset([3]), predictions([named]))
    for measure in (average_precision, top_k):
        with pytest.raises(ValueError, match="no pictures"):
            measure(dataset([]), predictions([]))
