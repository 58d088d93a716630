"""Every decoder against its slow reference over drawn outputs, plain and hostile; crowds; RT-DETR's own selection."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.records.frames import Detections
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.nms import MAX_CANDIDATES
from tests.vision import references
from tests.vision.chosen_heads import FORMS, make_head
from tests.vision.heads import Head, assert_same, assert_typed

# The layouts whose numbers are decoded by the model already, so that drawn ones can be computed with exactly.
EXACT = [form for form in FORMS if form not in ("yolox", "nanodet", "centernet")]
SIZES = ((64, 64), (128, 64), (64, 128))


def same_as_the_reference(head: Head) -> int:
    # Twice the model's size: the way back is exact, and no rounding can tip an overlap.
    width, height = 2 * head.width, 2 * head.height
    transform = plan(width, height, head.input)
    found = head.decode(transform)
    candidates = [c._replace(box=references.into_source(transform, c.box)) for c in head.reference()]
    iou = head.nms_iou if head.suppressed else None
    wanted, cut, invalid = references.select(candidates, width, height, iou, head.max_detections)
    assert_typed(found)
    assert found.class_ids.tolist() == [c.class_id for c in wanted]
    assert found.boxes.tolist() == [list(c.box) for c in wanted]
    np.testing.assert_allclose(found.scores, [min(c.score, 1) for c in wanted], rtol=1e-6)
    assert (found.cut, found.invalid) == (cut, invalid)
    return len(wanted)


def drawn(form: str, hostile: bool, data: st.DataObject) -> None:
    draw = data.draw
    head = make_head(
        form,
        *draw(st.sampled_from(SIZES)),
        classes=draw(st.integers(1, 7).filter(lambda k: k != 2 or form != "rtdetr rows")),
        rows=draw(st.integers(8, 60)),
        threshold=draw(st.sampled_from([0.0, 0.01, 0.25, 0.3, 0.5, 0.9, 1.0])),
        nms_iou=draw(st.sampled_from([0.0, 0.3, 0.45, 0.5, 0.65, 1.0])),
        max_detections=draw(st.sampled_from([1, 7, 300])),
    )
    head.noise(draw(st.integers(0, 2**32 - 1)), hostile=hostile)
    same_as_the_reference(head)


@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("form", EXACT)
@settings(deadline=None, max_examples=25)
@given(st.data())
def test_drawn_outputs(form: str, hostile: bool, data: st.DataObject) -> None:
    drawn(form, hostile, data)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("hostile", [False, True])
@pytest.mark.parametrize("form", EXACT)
@settings(deadline=None, max_examples=1000)
@given(st.data())
def test_many_drawn_outputs(form: str, hostile: bool, data: st.DataObject) -> None:
    drawn(form, hostile, data)


@pytest.mark.parametrize("form", EXACT)
def test_drawn_outputs_hold_something(form: str) -> None:
    found = []
    for seed in range(8):
        head = make_head(form, threshold=0.25)
        head.noise(seed)
        found.append(same_as_the_reference(head))
    assert min(found) >= 10


@pytest.mark.parametrize("form", ["rtdetr scores", "rtdetr logits"])
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(1, 300))
def test_rtdetr_takes_what_its_own_postprocessor_takes(form: str, seed: int, top: int) -> None:
    """The best pairs first and then the threshold, or the other way round: the same."""
    head = make_head(form, threshold=0.25, max_detections=top, resize="stretch")
    head.noise(seed)
    if form == "rtdetr scores":
        boxes, scores = head.outputs["output0"][0, :, :4], head.outputs["output0"][0, :, 4:].tolist()
    else:
        boxes, scores = head.outputs["pred_boxes"][0], references.sigmoids(head.outputs["logits"][0])
    wanted = [
        c
        for c in references.rtdetr_postprocessor(boxes, scores, head.width, head.height, top)
        if c.score > head.threshold
    ]
    found = head.decode(plan(head.width, head.height, head.input))
    assert found.class_ids.tolist() == [c.class_id for c in wanted]
    np.testing.assert_array_equal(found.boxes, np.clip([c.box for c in wanted], 0, 64).reshape(-1, 4))
    np.testing.assert_allclose(found.scores, [c.score for c in wanted], rtol=1e-6)


def hostile_crowd(form: str) -> tuple[Head, int]:
    """At least 25,000 candidates, all with scores above the threshold, and their number.

    One box in ten has NaN or infinity in it; the others may lie off the frame or have no size.
    """
    options: Mapping[str, tuple[tuple[int, int], dict[str, int]]] = {
        "yolox": ((1280, 1280), {"classes": 80}),
        "nanodet": ((1280, 1280), {"classes": 80}),
        "centernet": ((320, 320), {"classes": 80}),
        "yolov5": ((640, 640), {"classes": 80}),
        "yolov8": ((1280, 1280), {"classes": 80}),
        "rtdetr scores": ((640, 640), {"classes": 365, "rows": 300}),
        "rtdetr logits": ((640, 640), {"classes": 365, "rows": 300}),
    }
    size, sizes = options.get(form, ((640, 640), {"classes": 80, "rows": 25_000}))
    head = make_head(form, *size, **sizes, threshold=0.1)
    random = np.random.default_rng(0)
    side = size[0]

    def boxes(shape: tuple[int, ...], low: float, high: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        values = random.uniform(low, high, shape)
        bad = random.random(shape) < 1 / 40
        values[bad] = random.choice((np.nan, np.inf, -np.inf), int(bad.sum()))
        return values

    outputs = {name: array[0] for name, array in head.outputs.items()}
    if form == "centernet":
        outputs["heatmap"][...] = random.uniform(0.2, 0.9, outputs["heatmap"].shape)
        outputs["ltrb"][...] = boxes(outputs["ltrb"].shape, -20, 60)
        return head, outputs["heatmap"].size
    if form == "rtdetr logits":
        outputs["logits"][...] = random.uniform(-2, 4, outputs["logits"].shape)
        outputs["pred_boxes"][...] = boxes(outputs["pred_boxes"].shape, -0.2, 1.2)
        return head, outputs["logits"].size
    if form == "efficientnms":
        outputs["num_dets"][...] = head.rows
        outputs["det_scores"][...] = random.uniform(0.2, 0.9, head.rows)
        outputs["det_boxes"][...] = boxes((head.rows, 4), -100, side + 100)
        outputs["det_classes"][...] = random.integers(-1, 81, head.rows)
        return head, head.rows
    (rows,) = outputs.values()
    rows = rows.T if form == "yolov8" else rows
    rows[...] = random.uniform(0.4, 0.9, rows.shape)
    if form == "nanodet":
        rows[:, 80:] = boxes((rows.shape[0], 32), -3, 3)
    elif form == "yolox":
        rows[:, :4] = boxes((rows.shape[0], 4), -2, 3)
    elif "rtdetr" in form:
        rows[:, :4] = boxes((rows.shape[0], 4), -0.2, 1.2)
    else:
        rows[:, :4] = boxes((rows.shape[0], 4), -100, side + 100)
    if rows.shape[1] == 6:
        rows[:, 5] = random.integers(-1, 81, rows.shape[0])
    return head, rows.shape[0] * (365 if form == "rtdetr scores" else 1)


@pytest.mark.parametrize("form", FORMS)
def test_a_hostile_crowd_is_bounded_counted_and_always_the_same(form: str) -> None:
    head, count = hostile_crowd(form)
    assert count >= 25_000
    decoder, transform, outputs = head.decoder(), plan(1920, 1080, head.input), dict(head.outputs)
    taken = []

    def once(_: int = 0) -> Detections:
        start = time.thread_time()
        found = decoder(outputs, 0, transform)
        taken.append(time.thread_time() - start)
        assert isinstance(found, Detections)
        return found

    first = once()
    assert_typed(first)
    assert 1 <= len(first) <= 300
    assert first.invalid > count / 20
    # Every candidate is invalid, or cut, or one of the bounded number that enters suppression.
    assert first.invalid + first.cut + MAX_CANDIDATES == count
    assert np.isfinite(first.boxes).all()
    assert (first.boxes[:, 2:] > first.boxes[:, :2]).all()
    assert (first.boxes >= 0).all()
    assert (first.boxes <= (1920, 1080, 1920, 1080)).all()
    assert (np.diff(first.scores) <= 0).all()
    with ThreadPoolExecutor(3) as pool:
        for again in pool.map(once, range(6)):
            assert_same(again, first)
    print(f"{form}: {count} candidates in {min(taken) * 1e3:.1f} ms")
    assert min(taken) < 0.25


@pytest.mark.parametrize("form", FORMS)
def test_one_decoder_serves_several_threads(form: str) -> None:
    head = make_head(form, 128, 128, batch=8)
    for k in range(8):
        head.noise(k, k)
    decoder, transform, outputs = head.decoder(), plan(500, 500, head.input), dict(head.outputs)
    alone = [decoder(outputs, k, transform) for k in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda k: decoder(outputs, k % 8, transform), range(80)))
    for k, found in enumerate(together):
        wanted = alone[k % 8]
        assert isinstance(found, Detections)
        assert isinstance(wanted, Detections)
        assert_same(found, wanted)


@pytest.mark.parametrize("form", FORMS)
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32 - 1))
def test_hostile_noise_leaves_only_boxes_inside_the_frame(form: str, seed: int) -> None:
    head = make_head(form, threshold=0.1)
    head.noise(seed, hostile=True)
    transform = plan(101, 67, head.input)
    found = head.decode(transform)
    assert_typed(found)
    assert_same(head.decode(transform), found)
    assert np.isfinite(found.boxes).all()
    assert (found.boxes[:, 2:] > found.boxes[:, :2]).all()
    assert (found.boxes >= 0).all()
    assert (found.boxes <= (101, 67, 101, 67)).all()
    assert ((found.scores > 0.1) & (found.scores <= 1)).all()
    assert ((found.class_ids >= 0) & (found.class_ids < head.classes)).all()
