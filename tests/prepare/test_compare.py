"""A comparison says what is so: nothing where nothing changed, and where something did, how much and which."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import UsageError
from edge_runtime.prepare.compare import compare
from edge_runtime.prepare.comparison import Comparison, Picture
from edge_runtime.prepare.metrics import average_precision
from edge_runtime.prepare.samples import Dataset
from edge_runtime.records.frames import Classification, Detections
from tests.prepare.made_up import (
    boxes,
    classification,
    coco_val128,
    dataset,
    detections,
    perturbed,
    predictions,
)

BOX, OTHER = (0, 0, 50, 50), (200, 200, 400, 400)
NOTHING = detections([], [], [])


def made_up(seed: int, pictures: int = 8) -> Dataset:
    rng = np.random.default_rng(seed)
    truths = []
    for _ in range(pictures):
        corner, sides = rng.uniform(0, 300, (5, 2)), rng.uniform(8, 200, (5, 2))
        truths.append(boxes(np.concatenate([corner, corner + sides], axis=1), rng.integers(0, 3, 5)))
    return dataset(truths)


def detected(data: Dataset, seed: int, steps: int | None = 10) -> list[Detections]:
    return perturbed(data, seed, steps=steps)


def without_class(found: Detections, class_id: int) -> Detections:
    kept = found.class_ids != class_id
    return Detections(found.boxes[kept], found.scores[kept], found.class_ids[kept])


def right_or_wrong(right: list[bool]) -> list[Classification]:
    return [classification([0, 1], [0.75, 0.25]) if one else classification([1, 0], [0.5, 0.25]) for one in right]


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1 << 30))
def test_the_same_predictions_differ_by_nothing(seed: int) -> None:
    data = made_up(seed)
    found = predictions(detected(data, seed))
    same = compare(data, found, found, seed=seed, resamples=100)
    assert (same.difference, same.low, same.high) == (0, 0, 0)
    assert same.verdict == "no difference shown"
    assert same.a == same.b == pytest.approx(average_precision(data, found).mean_ap, abs=1e-9)
    for change in (*same.measures.values(), *same.classes.values()):
        assert change.difference == 0
        assert change.low in (0, None)
    shift = same.confidence
    assert (shift.lower_quartile, shift.median, shift.upper_quartile) == (0, 0, 0)
    assert (shift.only_a, shift.only_b, same.changed, same.worst) == (0, 0, 0, ())


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1 << 30))
def test_swapped_it_is_negated(seed: int) -> None:
    data = made_up(seed)
    a, b = predictions(detected(data, seed)), predictions(detected(data, seed + 1))
    there, back = compare(data, a, b, resamples=100), compare(data, b, a, resamples=100)
    assert there.low is not None
    assert there.high is not None
    assert (back.a, back.b, back.difference) == (there.b, there.a, -there.difference)
    assert (back.low, back.high) == pytest.approx((-there.high, -there.low), abs=1e-12)
    assert there.confidence.median is not None
    assert back.confidence.median == pytest.approx(-there.confidence.median, abs=1e-12)
    assert (back.confidence.only_a, back.confidence.only_b) == (there.confidence.only_b, there.confidence.only_a)
    assert back.changed == there.changed


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 1 << 30), st.integers(0, 2))
def test_a_class_that_is_no_longer_found(seed: int, lost: int) -> None:
    data = made_up(seed)
    found = detected(data, seed)
    result = compare(
        data, predictions(found), predictions([without_class(each, lost) for each in found]), resamples=100
    )
    for i, name in enumerate(data.labels):
        change = result.classes[name]
        if i == lost:
            assert change.b == 0
            assert change.difference == -change.a
            assert result.confidence_classes.get(name) is None
        else:
            assert change.difference == 0
            assert change.low in (0, None)
    assert result.confidence.only_a == sum(
        int(((each.class_ids == lost) & (each.scores > 0.1)).sum()) for each in found
    )
    assert result.confidence.only_b == 0


def test_a_seed_repeats_and_another_does_not() -> None:
    data = made_up(1)
    a, b = predictions(detected(data, 1)), predictions(detected(data, 2))
    first, again, other = (compare(data, a, b, seed=seed, resamples=100) for seed in (7, 7, 8))
    assert first == again
    assert (first.a, first.b) == (other.a, other.b)
    assert (first.low, first.high) != (other.low, other.high)


def missing_four_of_sixteen() -> Comparison:
    data = dataset([boxes([BOX], [0])] * 16)
    found = detections([BOX], [0.75], [0])
    outputs = [NOTHING if i in (2, 5, 7, 11) else found for i in range(16)]
    return compare(data, predictions([found] * 16), predictions(outputs))


def test_detections_by_hand() -> None:
    result = missing_four_of_sixteen()
    # Precision 1 up to the recall of 0.75: 76 of 101 recalls.
    assert result.a == pytest.approx(1)
    assert result.b == pytest.approx(76 / 101)
    assert result.low is not None
    assert result.high is not None
    # 16 draws, each missing with 1/4: 0 to 8 of them in 95 %.
    assert -8 / 16 - 0.01 <= result.low <= -6 / 16
    assert -2 / 16 <= result.high < 0
    assert result.verdict == "b is worse"
    assert set(result.measures) == {"AP50", "AP75", "medium"}
    assert set(result.classes) == {"red"}
    assert result.classes["red"].count == 16
    assert result.changed == 4
    assert result.worst == tuple(Picture(f"{i:03d}.jpg", 1, 1, 0) for i in (2, 5, 7, 11))
    assert (result.confidence.pairs, result.confidence.only_a, result.confidence.only_b) == (12, 4, 0)


def test_classifications_by_hand() -> None:
    data = dataset([0] * 10)
    a, b = right_or_wrong([True] * 10), right_or_wrong([i not in (3, 6) for i in range(10)])
    result = compare(data, predictions(a), predictions(b), resamples=20_000)
    assert (result.metric, result.a, result.b) == ("top1", 1.0, 0.8)
    # The wrong ones in a draw are binomial (10, 0.2): none in 11 %, five or more in 3.3 %, six or more in 0.6 %.
    assert (result.low, result.high) == (-0.5, 0.0)
    assert result.verdict == "no difference shown"
    assert result.measures["top5"].difference == 0
    assert result.classes["red"].count == result.classes["red"].pictures == 10
    assert (result.confidence.pairs, result.confidence.only_a, result.confidence.only_b) == (8, 2, 2)
    assert [picture.name for picture in result.worst] == ["003.jpg", "006.jpg"]
    assert result.changed == 2
    back = compare(data, predictions(b), predictions(a), resamples=20_000)
    assert (back.low, back.high, back.worst) == (0.0, 0.5, ())


def test_a_classifier_that_gives_nothing_and_one_that_is_sure() -> None:
    data = dataset([0] * 20)
    a = right_or_wrong([True] * 20)
    b = [classification([], []), classification([1], [0.875]), *right_or_wrong([False] * 10), *a[12:]]
    result = compare(data, predictions(a), predictions(b), resamples=200)
    assert result.verdict == "b is worse"
    assert result.changed == 12
    assert result.worst[0].name == "001.jpg"
    assert (result.confidence.only_a, result.confidence.only_b) == (12, 11)


def test_confidence() -> None:
    """Each detection meets its own neighbour, and low scores count only where the other is above 0.1."""
    data = dataset([boxes([BOX, OTHER], [0, 1])] * 12)
    a = detections([BOX, (1, 1, 51, 51), OTHER, OTHER], [0.75, 0.5, 0.25, 0.05], [0, 0, 1, 2])
    b = detections([BOX, (1, 1, 51, 51), OTHER, OTHER], [0.5, 0.25, 0.0625, 0.5], [0, 0, 1, 2])
    result = compare(data, predictions([a] * 12), predictions([b] * 12), resamples=100)
    assert result.confidence.pairs == 48
    medians = {name: shift.median for name, shift in result.confidence_classes.items()}
    assert medians == pytest.approx({"red": -0.25, "green": -0.1875, "blue": 0.45})
    lower = replace(predictions([b] * 12), outputs=(without_class(b, 0),) * 12)
    result = compare(data, predictions([a] * 12), lower, resamples=100)
    assert (result.confidence.only_a, result.confidence.only_b) == (24, 0)
    assert set(result.confidence_classes) == {"green", "blue"}


def test_the_worst_pictures_come_first() -> None:
    data = dataset([boxes([BOX, OTHER], [0, 0])] * 14)
    both, one = detections([BOX, OTHER], [0.9, 0.8], [0, 0]), detections([BOX], [0.9], [0])
    outputs = [*[both] * 2, *[one] * 9, *[NOTHING] * 3]
    result = compare(data, predictions([both] * 14), predictions(outputs), resamples=100)
    assert [picture.name for picture in result.worst] == [f"{i:03d}.jpg" for i in (11, 12, 13, *range(2, 9))]
    assert (result.worst[0].found_b, result.worst[3].found_b, result.changed) == (0, 1, 12)


def test_few_pictures_give_no_interval() -> None:
    data = dataset([boxes([BOX], [0])] * 4 + [boxes([OTHER], [1])] * 5)
    found = [detections([BOX], [0.9], [0])] * 4 + [detections([OTHER], [0.9], [1])] * 5
    lost = [NOTHING] * 4 + found[4:]
    result = compare(data, predictions(found), predictions(lost), resamples=100)
    assert result.classes["red"].verdict == "too few pictures"
    assert result.classes["red"].low is None
    assert result.classes["red"].difference == pytest.approx(-1)
    assert result.classes["green"].verdict == "no difference shown"
    assert "no interval: 4 pictures" in result.table()


def test_the_table() -> None:
    lines = missing_four_of_sixteen().table().splitlines()
    assert lines[0].startswith("b is worse: mAP 1.000 -> 0.752, -0.248 (95 % interval -0.")
    assert "4 of 16 pictures have other detections above 0.3" in lines
    assert lines[-1] == "  011.jpg  1 -> 0 of 1"
    order = [next(i for i, line in enumerate(lines) if line.startswith(words)) for words in ("  AP50", "1 of 1 ")]
    order += [next(i for i, line in enumerate(lines) if line.startswith(words)) for words in ("confidence", "where")]
    assert order == sorted(order)


def test_the_table_keeps_to_its_width() -> None:
    long = "a name that someone thought would say everything " * 3
    truths = [boxes([BOX, OTHER], [0, 1])] * 40
    data = dataset(truths, [long, long + "else"])
    data = replace(
        data, root=Path(long), samples=tuple(replace(sample, name=long + sample.name) for sample in data.samples)
    )
    found = detections([BOX, OTHER], [0.9, 0.5], [0, 1])
    worse = detections([BOX], [0.4], [0])
    a, b = predictions([found] * 40, variant=long), replace(predictions([worse] * 40), bundle=long)
    lines = compare(data, a, b, resamples=100).table().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("b is worse")


def test_the_document() -> None:
    result = missing_four_of_sixteen()
    document = json.loads(json.dumps(result.to_json(), allow_nan=False))
    for key in ("metric", "a", "b", "difference", "low", "high", "verdict", "changed", "seed", "resamples"):
        assert document[key] == getattr(result, key)
    assert document["images"] == 16
    assert document["subject_b"]["variant"] == "fp32-416"
    assert document["measures"]["AP50"]["count"] == 16
    assert document["classes"]["red"]["verdict"] == "b is worse"
    assert document["worst"][0] == {"name": "002.jpg", "truths": 1, "found_a": 1, "found_b": 0}


def test_what_cannot_be_compared() -> None:
    data = dataset([boxes([BOX], [0])] * 5)
    found = predictions([detections([BOX], [0.9], [0])] * 5)
    with pytest.raises(UsageError, match=r"above a score of 0\.01, b above 0\.3") as caught:
        compare(data, found, replace(found, score_threshold=0.3))
    assert caught.value.code == "not_comparable"
    with pytest.raises(UsageError, match="nothing to compare by"):
        compare(dataset([boxes([], [])] * 5), found, found)
    with pytest.raises(ValueError, match="4 results for the 5 pictures"):
        compare(data, found, replace(found, outputs=found.outputs[:4]))
    with pytest.raises(ValueError, match="a Classification, where Detections"):
        compare(data, found, predictions([classification([0], [1.0])] * 5))
    with pytest.raises(ValueError, match="a class outside of the 2"):
        compare(
            dataset([boxes([BOX], [0])] * 5, ["red", "green"]), found, predictions([detections([BOX], [1], [2])] * 5)
        )
    with pytest.raises(ValueError, match="no pictures"):
        compare(dataset([]), predictions([]), predictions([]))
    with pytest.raises(ValueError, match="100 at least"):
        compare(data, found, found, resamples=99)


@pytest.mark.assets
def test_coco(assets: Path) -> None:
    """Boxes half a step looser are worse, and a picture's truth is not."""
    data = coco_val128(assets)
    a, b = (predictions(perturbed(data, 1, jitter=jitter, false=2, steps=100)) for jitter in (0.1, 0.13))
    result = compare(data, a, b)
    print(result.table())
    assert result.verdict == "b is worse"
    assert {change.verdict for change in result.measures.values()} == {"b is worse"}
    assert sum(change.count for change in result.classes.values()) == 898
    assert sum(result.measures[size].count for size in ("small", "medium", "large")) == 898
    assert result.a == pytest.approx(average_precision(data, a).mean_ap, abs=1e-9)
