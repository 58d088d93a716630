from __future__ import annotations

import math
from typing import get_args

import cv2
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.records.frames import Transform
from edge_runtime.records.spec import InputSpec, Resize
from edge_runtime.vision.geometry import clip_boxes, plan, to_model, to_source

MODES: tuple[Resize, ...] = get_args(Resize)
modes = st.sampled_from(MODES)
source_widths, source_heights = st.integers(1, 8000), st.integers(1, 6000)
inputs = st.sampled_from([(416, 416), (320, 320), (512, 512), (1280, 1280), (224, 224), (640, 384), (32, 96)])
short_sides = st.sampled_from([None, 64, 256, 600])


def placed(transform: Transform) -> tuple[int, int, int, int]:
    return transform.resized_width, transform.resized_height, transform.left, transform.top


@pytest.mark.parametrize(
    ("mode", "source", "side", "wanted"),
    [
        ("letterbox-center", (3775, 1571), 1280, (1280, 533, 0, 373)),
        ("letterbox-center", (640, 480), 416, (416, 312, 0, 52)),
        ("letterbox-center", (480, 640), 416, (312, 416, 52, 0)),
        ("letterbox-center", (1, 1), 416, (416, 416, 0, 0)),
        ("letterbox-center", (8000, 1), 416, (416, 1, 0, 207)),
        ("letterbox-topleft", (640, 480), 416, (416, 312, 0, 0)),
        ("letterbox-topleft", (640, 427), 416, (416, 277, 0, 0)),
        ("letterbox-topleft", (1, 6000), 416, (1, 416, 0, 0)),
        ("stretch", (3775, 1571), 320, (320, 320, 0, 0)),
        ("crop", (640, 480), 224, (299, 224, -38, 0)),
        ("crop", (224, 224), 224, (224, 224, 0, 0)),
    ],
)
def test_known_places(mode: Resize, source: tuple[int, int], side: int, wanted: tuple[int, ...]) -> None:
    assert placed(plan(*source, InputSpec(side, side, resize=mode))) == wanted


@pytest.mark.parametrize(
    ("source", "short_side", "wanted"),
    [
        ((500, 375), 256, (341, 256, -58, -16)),
        ((375, 500), 256, (256, 341, -16, -58)),
        # A short side that would leave the crop uncovered grows to the crop.
        ((500, 375), 100, (299, 224, -38, 0)),
    ],
)
def test_crop_with_a_short_side(source: tuple[int, int], short_side: int, wanted: tuple[int, ...]) -> None:
    assert placed(plan(*source, InputSpec(224, 224, resize="crop", short_side=short_side))) == wanted


@pytest.mark.parametrize("source", [(0, 5), (5, 0), (-1, 5)])
def test_a_source_without_pixels_is_refused(source: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no pixels"):
        plan(*source, InputSpec(32, 32))


@settings(deadline=None, max_examples=400)
@given(modes, source_widths, source_heights, inputs, short_sides)
@example("letterbox-center", 3775, 1571, (1280, 1280), None)
@example("letterbox-center", 8000, 1, (32, 96), None)
@example("crop", 1, 6000, (640, 384), 64)
def test_a_letterbox_fits_and_a_crop_covers(
    mode: Resize, width: int, height: int, size: tuple[int, int], short_side: int | None
) -> None:
    t = plan(width, height, InputSpec(*size, resize=mode, short_side=short_side))
    assert (t.src_width, t.src_height, t.dst_width, t.dst_height) == (width, height, *size)
    assert all(isinstance(value, int) for value in placed(t))
    assert t.resized_width >= 1
    assert t.resized_height >= 1
    right, bottom = t.left + t.resized_width, t.top + t.resized_height
    if mode == "crop":
        assert t.left <= 0
        assert t.top <= 0
        assert right >= t.dst_width
        assert bottom >= t.dst_height
    else:
        assert t.left >= 0
        assert t.top >= 0
        assert right <= t.dst_width
        assert bottom <= t.dst_height
    if mode == "letterbox-center":
        # An odd remainder goes right and below.
        assert 0 <= (t.dst_width - right) - t.left <= 1
        assert 0 <= (t.dst_height - bottom) - t.top <= 1


@settings(deadline=None, max_examples=400)
@given(modes, source_widths, source_heights, inputs, short_sides, st.lists(st.floats(0, 1), min_size=4, max_size=4))
def test_there_and_back_is_the_same_box(
    mode: Resize, width: int, height: int, size: tuple[int, int], short_side: int | None, at: list[float]
) -> None:
    t = plan(width, height, InputSpec(*size, resize=mode, short_side=short_side))
    box = np.array([at], dtype=np.float64) * (width, height, width, height)
    there = to_model(t, box)
    back = to_source(t, there)
    assert there.dtype == back.dtype == np.float32
    # Only float32 is lost. A wrong padding or a ratio in place of the integers would show as 0.5 px and more.
    np.testing.assert_allclose(back, box, atol=0.01)
    # A detector whose edges are whole model px is off by at most half of one, in source px.
    off = np.abs(to_source(t, np.round(there)) - box)
    assert (off[:, 0::2] <= 0.5 * width / t.resized_width + 0.01).all()
    assert (off[:, 1::2] <= 0.5 * height / t.resized_height + 0.01).all()


def columns_of(t: Transform, low: int, high: int) -> list[int]:
    """Model columns that show source columns low to high, by sampling each column's middle."""
    found = []
    for u in range(max(t.left, 0), min(t.left + t.resized_width, t.dst_width)):
        source = math.floor((u - t.left + 0.5) * t.src_width / t.resized_width)
        if low <= source < high:
            found.append(u)
    return found


@settings(deadline=None, max_examples=200)
@given(modes, st.integers(1, 900), st.integers(1, 900), inputs, st.data())
def test_drawn_pixels_come_back_within_half_a_model_pixel(
    mode: Resize, width: int, height: int, size: tuple[int, int], data: st.DataObject
) -> None:
    t = plan(width, height, InputSpec(*size, resize=mode))
    low = data.draw(st.integers(0, width - 1))
    high = data.draw(st.integers(low + 1, width))
    shown = columns_of(t, low, high)
    if not shown or shown[0] == 0 or shown[-1] == t.dst_width - 1:
        return  # too thin to be sampled, or perhaps cut off by the crop
    (back,) = to_source(t, np.array([[shown[0], 0, shown[-1] + 1, 0]], dtype=np.float32))
    tolerance = max(0.51, 0.5 * width / t.resized_width + 0.01)
    assert abs(back[0] - low) <= tolerance
    assert abs(back[2] - high) <= tolerance


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("source", [(640, 480), (333, 777), (1920, 1080), (100, 60)])
def test_agrees_with_a_real_resizer(mode: Resize, source: tuple[int, int]) -> None:
    """A ramp whose value is its own x: after OpenCV's resize every model px must say where it came from."""
    t = plan(*source, InputSpec(416, 416, resize=mode))
    ramp = np.tile(np.arange(source[0], dtype=np.float32) + 0.5, (source[1], 1))
    resized = cv2.resize(ramp, (t.resized_width, t.resized_height), interpolation=cv2.INTER_LINEAR)[0]
    middles = np.arange(t.resized_width, dtype=np.float64) + 0.5 + t.left
    said = to_source(t, np.stack((middles, middles), axis=1))[:, 0]
    inside = (said > 1) & (said < source[0] - 1)
    np.testing.assert_allclose(resized[inside], said[inside], atol=source[0] * 1e-4)


def test_points_and_boxes_and_nothing_else() -> None:
    t = plan(640, 480, InputSpec(416, 416))
    np.testing.assert_allclose(to_model(t, np.array([[0.0, 0.0], [640, 480]])), [[0, 52], [416, 364]])
    assert to_source(t, np.empty((0, 4), np.float32)).shape == (0, 4)
    with pytest.raises(ValueError, match="3"):
        to_model(t, np.zeros((1, 3)))


def test_clipping() -> None:
    boxes = np.array([[-5, -6, 700, 500], [1, 2, 3, 4], [650, 10, 700, 20], [np.nan, 1, 2, 3]], dtype=np.float32)
    before = boxes.copy()
    clipped = clip_boxes(boxes, 640, 480)
    np.testing.assert_array_equal(clipped[:3], [[0, 0, 640, 480], [1, 2, 3, 4], [640, 10, 640, 20]])
    assert np.isnan(clipped[3, 0])
    np.testing.assert_array_equal(boxes, before)
    assert clipped.dtype == np.float32
