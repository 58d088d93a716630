from __future__ import annotations

import math

import numpy as np
import pytest

from edge_runtime.records.frames import Classification, Decoder
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.geometry import plan

SPEC = InputSpec(224, 224, resize="crop", short_side=256)
TRANSFORM = plan(500, 375, SPEC)


def decoder(classes: int) -> Decoder:
    return build_decoder(OutputSpec("classify", tuple(map(str, range(classes)))), SPEC, {"anything": (1, classes)})


def classify(logits: list[float]) -> Classification:
    result = decoder(len(logits))({"anything": np.array([logits], dtype=np.float32)}, 0, TRANSFORM)
    assert isinstance(result, Classification)
    assert result.scores.dtype == np.float32
    assert result.class_ids.dtype == np.int32
    return result


def test_softmax_of_the_best_five() -> None:
    logits = [0.5, 3.0, -2.0, 1.0, 2.0, 0.0, 4.0]
    total = sum(math.exp(value) for value in logits)
    found = classify(logits)
    assert found.class_ids.tolist() == [6, 1, 4, 3, 0]
    np.testing.assert_allclose(found.scores, [math.exp(logits[k]) / total for k in (6, 1, 4, 3, 0)], rtol=1e-6)


def test_ties_go_by_class_and_few_classes_are_all_given() -> None:
    assert classify([1.0] * 9).class_ids.tolist() == [0, 1, 2, 3, 4]
    assert classify([1.0, 2.0]).class_ids.tolist() == [1, 0]


@pytest.mark.parametrize("logits", [[1e30, 0, -1e30], [3e38, -3e38, 0], [-1e4, -1e4 - 1, -2e4], [0.0, -math.inf, -200]])
def test_extreme_logits_are_stable(logits: list[float]) -> None:
    found = classify(logits)
    assert np.isfinite(found.scores).all()
    assert found.scores.sum() == pytest.approx(1.0, abs=1e-6)
    assert found.class_ids[0] == 0


@pytest.mark.parametrize("bad", [[math.nan, 1, 2], [math.inf, 1, 2], [-math.inf] * 3, [math.nan] * 3])
def test_logits_without_an_order_say_nothing(bad: list[float]) -> None:
    found = classify(bad)
    assert len(found) == 0
    assert (found.scores.shape, found.class_ids.shape) == ((0,), (0,))


def test_a_place_is_read_alone_and_nothing_of_it_is_kept() -> None:
    batch = np.full((3, 6), np.nan, dtype=np.float32)
    batch[1] = [0, 1, 2, 3, 4, 5]
    found = decoder(6)({"anything": batch}, 1, TRANSFORM)
    batch[...] = 0
    assert found.class_ids.tolist() == [5, 4, 3, 2, 1]
    assert found.scores[0] > 0.6
