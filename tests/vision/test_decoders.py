"""Every detector's decoder: planted boxes, the slow references, hostile outputs, reused buffers, time."""

from __future__ import annotations

import time

import numpy as np
import pytest

from edge_runtime.errors import EngineError
from edge_runtime.records.frames import Detections
from edge_runtime.records.spec import Resize
from edge_runtime.vision.geometry import plan, to_model
from tests.vision import references
from tests.vision.chosen_heads import FORMS, make_head
from tests.vision.heads import assert_same, assert_typed

layouts = pytest.mark.parametrize("layout", FORMS)


def assert_typed_and_empty(found: Detections) -> None:
    assert len(found) == 0
    assert_typed(found)


@layouts
@pytest.mark.parametrize("resize", ["letterbox-center", "letterbox-topleft", "stretch", "crop"])
@pytest.mark.parametrize("source", [(1920, 1080), (1571, 3775), (400, 300), (101, 97)])
def test_a_planted_box_is_found_where_it_was(layout: str, resize: Resize, source: tuple[int, int]) -> None:
    head = make_head(layout, 416, 320, classes=80, resize=resize)
    transform = plan(*source, head.input)
    w, h = source
    wanted = np.array([[0.42 * w, 0.41 * h, 0.51 * w, 0.58 * h], [0.6 * w, 0.55 * h, 0.66 * w, 0.64 * h]])
    for box, score, class_id in zip(to_model(transform, wanted).tolist(), (0.9, 0.6), (3, 79), strict=True):
        head.plant(tuple(box), score, class_id)
    found = head.decode(transform)
    np.testing.assert_allclose(found.boxes, wanted, atol=0.02 + 1e-5 * max(source))
    np.testing.assert_allclose(found.scores, (0.9, 0.6), atol=1e-6)
    assert found.class_ids.tolist() == [3, 79]
    assert (found.cut, found.invalid) == (0, 0)


@layouts
@pytest.mark.parametrize("seed", range(4))
def test_same_as_the_slow_reference(layout: str, seed: int) -> None:
    head = make_head(layout, 96, 64, classes=5, threshold=0.25, nms_iou=0.4567, max_detections=40)
    head.noise(seed)
    transform = plan(1000, 700, head.input)
    found = head.decode(transform)
    candidates = [c._replace(box=references.into_source(transform, c.box)) for c in head.reference()]
    assert len(candidates) > 20
    iou = head.nms_iou if head.suppressed else None
    wanted, cut, invalid = references.select(candidates, 1000, 700, iou, head.max_detections)
    assert len(wanted) > 5
    np.testing.assert_allclose(found.boxes, [c.box for c in wanted], atol=0.01)
    np.testing.assert_allclose(found.scores, [c.score for c in wanted], atol=1e-6)
    assert found.class_ids.tolist() == [c.class_id for c in wanted]
    assert (found.cut, found.invalid) == (cut, invalid)
    assert (found.boxes >= 0).all()
    assert (found.boxes <= (1000, 700, 1000, 700)).all()
    assert (np.diff(found.scores) <= 0).all()


@layouts
def test_nothing_found_is_typed(layout: str) -> None:
    head = make_head(layout)
    if layout == "nanodet":
        head.outputs["output"][..., head.classes :] = 5.0  # distances alone are no candidate
    assert_typed_and_empty(head.decode(plan(640, 480, head.input)))


@layouts
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -3e38])
def test_outputs_gone_bad_find_nothing_and_are_counted(layout: str, value: float) -> None:
    head = make_head(layout)
    head.fill(value)
    found = head.decode(plan(640, 480, head.input))
    if value in (3e38, -3e38) and layout == "nanodet":
        # Bins that are all equal are a distance of 3.5 strides, whatever their height.
        assert np.isfinite(found.boxes).all()
        return
    assert_typed_and_empty(found)
    assert (found.invalid > 0) == (not value < 0)


@layouts
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -50.0])
def test_one_bad_box_does_not_take_the_others_along(layout: str, value: float) -> None:
    head = make_head(layout)
    head.plant((10, 10, 30, 40), 0.8, 2)
    transform = plan(64, 64, head.input)
    alone = head.decode(transform)
    head.plant((40, 40, 60, 60), 0.9, 1)
    head.spoil_box(value)
    found = head.decode(transform)
    if value < 0 and not head.any_size:
        assert (len(found), found.invalid) == (2, 0)
        return
    assert found.invalid == 1
    np.testing.assert_array_equal(found.boxes, alone.boxes)


@layouts
def test_a_bad_score_shows_in_the_counter(layout: str) -> None:
    head = make_head(layout)
    head.plant((10, 10, 30, 40), 0.8, 2)
    head.spoil_score(np.nan)
    found = head.decode(plan(64, 64, head.input))
    assert found.class_ids.tolist() == [2]
    assert found.invalid == 1


@layouts
def test_boxes_off_the_frame_are_rejected_and_others_clipped(layout: str) -> None:
    head = make_head(layout)
    transform = plan(64, 16, head.input)  # 24 px of padding above and below
    head.plant((2, 2, 30, 20), 0.9, 1)  # in the padding only
    head.plant((34, 20, 62, 42), 0.8, 2)
    found = head.decode(transform)
    assert found.class_ids.tolist() == [2]
    np.testing.assert_allclose(found.boxes, [[34, 0, 62, 16]], atol=0.01)
    assert found.invalid == 1


@layouts
def test_a_place_is_read_alone_and_nothing_of_it_is_kept(layout: str) -> None:
    single = make_head(layout)
    single.noise(5)
    transform = plan(300, 200, single.input)
    wanted = single.decode(transform)
    assert len(wanted) > 3
    batch = make_head(layout, batch=4)
    batch.fill(np.nan, 0)
    batch.noise(5, 1)
    batch.noise(6, 2)
    batch.fill(1e30, 3)
    found = batch.decode(transform, 1)
    assert_same(found, wanted)
    for array in batch.outputs.values():
        for part in (found.boxes, found.scores, found.class_ids):
            assert not np.shares_memory(part, array)
        array[...] = 7.0  # the lane's next run
    assert_same(found, wanted)


@layouts
def test_outputs_may_be_read_only_and_half_precision(layout: str) -> None:
    head = make_head(layout)
    head.plant((10, 10, 30, 40), 0.75, 2)
    transform = plan(64, 64, head.input)
    wanted = head.decode(transform)
    halves = {
        name: array.astype(np.float16 if array.dtype == np.float32 else array.dtype)
        for name, array in head.outputs.items()
    }
    for array in halves.values():
        array.setflags(write=False)
    found = head.decoder()(dict(halves), 0, transform)
    assert isinstance(found, Detections)
    assert found.boxes.dtype == found.scores.dtype == np.float32
    np.testing.assert_allclose(found.boxes, wanted.boxes, atol=0.1)


@layouts
def test_only_scores_above_the_threshold(layout: str) -> None:
    head = make_head(layout, threshold=0.5)
    head.plant((10, 10, 30, 40), 0.5, 2)
    head.plant((40, 10, 60, 40), np.nextafter(np.float32(0.5), np.float32(1)), 3)
    assert head.decode(plan(64, 64, head.input)).class_ids.tolist() == [3]


@layouts
def test_suppression_is_ours_where_the_model_has_none(layout: str) -> None:
    head = make_head(layout, 128, 128)
    head.plant((32, 32, 62, 62), 0.9, 1)
    head.plant((34, 33, 66, 63), 0.8, 1)
    assert len(head.decode(plan(128, 128, head.input))) == (1 if head.suppressed else 2)


@layouts
def test_max_detections_keeps_the_best(layout: str) -> None:
    head = make_head(layout, max_detections=2)
    for k, score in enumerate((0.4, 0.9, 0.6)):
        head.plant((4 + 20 * k, 10, 18 + 20 * k, 24), score, k)
    assert head.decode(plan(64, 64, head.input)).class_ids.tolist() == [1, 2]


@layouts
def test_outputs_that_are_not_the_declared_ones_are_refused(layout: str) -> None:
    head = make_head(layout)
    decoder, transform = head.decoder(), plan(64, 64, head.input)
    name = next(iter(head.outputs))
    with pytest.raises(EngineError, match=r"missing") as caught:
        decoder({}, 0, transform)
    assert caught.value.code == "output_mismatch"
    with pytest.raises(EngineError, match="of shape"):
        decoder({**head.outputs, name: head.outputs[name][:, :-1]}, 0, transform)
    for index in (1, -1):
        with pytest.raises(EngineError, match="of shape"):
            decoder(dict(head.outputs), index, transform)


@pytest.mark.parametrize(
    ("layout", "side"),
    [
        ("yolox", 416),
        ("nanodet", 320),
        ("centernet", 416),
        ("yolov5", 640),
        ("yolov8", 640),
        ("yolov10", 640),
        ("rtdetr scores", 640),
        ("rtdetr rows", 640),
        ("rtdetr logits", 640),
        ("rtdetr-topk", 640),
        ("efficientnms", 640),
    ],
)
def test_a_frame_with_few_candidates_is_cheap(layout: str, side: int) -> None:
    head = make_head(layout, side, side, classes=80, rows=300)
    for k in range(12):
        x, y = 30 + 60 * (k % 4), 40 + 70 * (k // 4)
        head.plant((x, y, x + 40, y + 50), 0.4 + k / 40, k % 5)
    transform, decoder = plan(1920, 1080, head.input), head.decoder()
    outputs = dict(head.outputs)
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        decoder(outputs, 0, transform)
        taken.append(time.perf_counter() - start)
    # 0.2 ms on an idle core; the best of many runs, with room for a slow machine.
    assert min(taken) < 0.001
