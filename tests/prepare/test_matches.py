"""Resamples measured together are what pycocotools makes of a dataset in which the pictures really are repeated."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from pycocotools.cocoeval import COCOeval

from edge_runtime.prepare.matches import match
from edge_runtime.prepare.metrics import AT_50, AT_75
from edge_runtime.prepare.samples import Boxes, Dataset
from edge_runtime.records.frames import Detections
from tests.prepare.made_up import (
    boxes,
    coco_evaluation,
    coco_val128,
    dataset,
    detections,
    perturbed,
    predictions,
    repeated,
)

# Few places, sizes and scores: boxes overlap, and scores tie within a picture and between pictures.
box = st.builds(
    lambda x, y, width, height: (x, y, x + width, y + height),
    st.sampled_from([0, 10, 60]),
    st.sampled_from([0, 12]),
    st.sampled_from([20, 26, 50, 120]),
    st.sampled_from([20, 30, 110]),
)
class_id = st.integers(0, 1)
truth = st.lists(st.tuples(box, class_id, st.integers(0, 5).map(lambda n: n == 0)), max_size=4).map(
    lambda rows: boxes([row[0] for row in rows], [row[1] for row in rows], crowd=[row[2] for row in rows])
)
found = st.lists(st.tuples(box, st.integers(1, 4).map(lambda n: n / 4), class_id), max_size=5).map(
    lambda rows: detections([row[0] for row in rows], [row[1] for row in rows], [row[2] for row in rows])
)
picture = st.tuples(truth, found, st.integers(0, 3))


def of_cells(evaluation: COCOeval) -> NDArray[np.float64]:
    """[sizes, classes, thresholds] average precision, NaN where there is no box."""
    precision = evaluation.eval["precision"][..., 2].mean(axis=1)
    cells: NDArray[np.float64] = np.where(precision < 0, np.nan, precision).transpose(2, 1, 0)
    return cells


def by_pycocotools(data: Dataset, outputs: list[Detections], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    again, found = repeated(data, outputs, counts)
    return of_cells(coco_evaluation(again, found.outputs))


@settings(deadline=None, max_examples=60)
@given(st.lists(picture, min_size=1, max_size=5).filter(lambda rows: any(len(row[1]) and row[2] for row in rows)))
def test_repeated_pictures(pictures: list[tuple[Boxes, Detections, int]]) -> None:
    data = dataset([row[0] for row in pictures], ["red", "green"])
    outputs = [row[1] for row in pictures]
    counts = np.array([row[2] for row in pictures])
    # The same among others: the copies of one draw do not change another.
    draws = np.stack([np.ones_like(counts), counts, counts[::-1] + 1], axis=1)
    values = match(data, predictions(outputs)).precision(draws)
    for i, drawn in enumerate(draws.T):
        np.testing.assert_allclose(values[..., i], by_pycocotools(data, outputs, drawn), rtol=0, atol=1e-9)


def test_ties_within_a_repeated_picture() -> None:
    """A right and a wrong detection of one score: in three copies they take turns."""
    data = dataset([boxes([(0, 0, 50, 50), (100, 0, 150, 50)], [0, 0])], ["red"])
    outputs = [detections([(300, 0, 350, 50), (0, 0, 50, 50), (100, 0, 150, 50)], [0.5, 0.5, 0.5], [0, 0, 0])]
    counts = np.array([3])
    values = match(data, predictions(outputs)).precision(counts[:, None])[..., 0]
    np.testing.assert_allclose(values, by_pycocotools(data, outputs, counts), rtol=0, atol=1e-9)
    assert values[0, 0, 0] == pytest.approx(2 / 3)


def test_what_is_found() -> None:
    data = dataset([boxes([(0, 0, 50, 50), (100, 0, 150, 50)], [0, 1]), boxes([(0, 0, 9, 9)], [0], crowd=[True])])
    first = detections([(0, 0, 50, 50), (0, 0, 50, 49), (100, 0, 150, 50)], [0.9, 0.8, 0.2], [0, 0, 1])
    matches = match(data, predictions([first, detections([(0, 0, 9, 9)], [0.9], [0])]))
    assert matches.found(0.3).tolist() == [1, 0]
    assert matches.found(0.1).tolist() == [2, 0]
    assert matches.truths[0].sum(axis=0).tolist() == [2, 0]


@pytest.mark.assets
def test_coco(assets: Path) -> None:
    data = coco_val128(assets)
    outputs = perturbed(data, 1, false=8, steps=100)
    draws = np.random.default_rng(2).multinomial(128, np.full(128, 1 / 128), size=1000).T
    counts = np.concatenate([np.ones((128, 1), np.int64), draws], axis=1)
    matches = match(data, predictions(outputs))
    start = time.process_time()
    values = matches.precision(counts)
    took_s = time.process_time() - start
    print(f"1000 resamples of 128 pictures, {sum(map(len, outputs))} detections: {took_s:.2f} s")
    assert took_s < 10
    evaluation = coco_evaluation(data, outputs)
    np.testing.assert_allclose(values[..., 0], of_cells(evaluation), rtol=0, atol=1e-9)
    every = values[0, ..., 0]
    ours = [np.nanmean(part) for part in (every, every[:, AT_50], every[:, AT_75], *values[1:, ..., 0])]
    np.testing.assert_allclose(ours, evaluation.stats[:6], rtol=0, atol=1e-9)
    np.testing.assert_allclose(values[..., 1], by_pycocotools(data, outputs, counts[:, 1]), rtol=0, atol=1e-9)
