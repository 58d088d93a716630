"""Geometry against what the models were trained with, and boxes there and back, from 1x1 to 8000x6000 px."""

from __future__ import annotations

from fractions import Fraction
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from edge_runtime.records.spec import InputSpec, Resize
from edge_runtime.vision.geometry import plan, to_model, to_source
from tests.vision.test_geometry import placed

MODES: tuple[Resize, ...] = get_args(Resize)
SIZES = [
    *((side, side) for side in (224, 256, 320, 384, 416, 512, 544, 608, 640, 768, 800, 1024, 1280, 1536)),
    *((640, 384), (384, 640), (640, 480), (960, 544), (1280, 736), (1920, 1088), (512, 288), (640, 352)),
]
widths, heights = st.integers(1, 8000), st.integers(1, 6000)
sizes = st.sampled_from(SIZES)
shares = st.floats(0, 1, allow_subnormal=False)

Place = tuple[int, int, int, int]
"""Width and height of the resized source, and the px left of it and above it."""


def ultralytics(width: int, height: int, size: tuple[int, int]) -> Place:
    """`LetterBox.__call__` with auto=False, scale_fill=False, scaleup=True, center=True."""
    new_shape, shape = (size[1], size[0]), (height, width)
    r = min(new_shape[0] / shape[0], new_shape[1] / shape[1])
    new_unpad = max(round(shape[1] * r), 1), max(round(shape[0] * r), 1)
    dw, dh = (new_shape[1] - new_unpad[0]) / 2, (new_shape[0] - new_unpad[1]) / 2
    top, bottom = round(dh - 0.1), round(dh + 0.1)
    left, right = round(dw - 0.1), round(dw + 0.1)
    # The picture that it makes has the size of the model's input.
    assert (left + new_unpad[0] + right, top + new_unpad[1] + bottom) == size
    return (*new_unpad, left, top)


def yolox_preproc(width: int, height: int, size: tuple[int, int]) -> Place:
    """`yolox.data.data_augment.preproc`; OpenCV refuses a side of 0 px there, and 1 px is ours."""
    input_size = size[1], size[0]
    r = min(input_size[0] / height, input_size[1] / width)
    return max(int(width * r), 1), max(int(height * r), 1), 0, 0


def torchvision_crop(width: int, height: int, size: tuple[int, int], short_side: int) -> Place:
    """`Resize(short_side)`, `CenterCrop(size)`, for crops that fit."""
    short, long = (width, height) if width <= height else (height, width)
    new_short, new_long = short_side, int(short_side * long / short)
    new_width, new_height = (new_short, new_long) if width <= height else (new_long, new_short)
    crop_top = round((new_height - size[1]) / 2.0)
    crop_left = round((new_width - size[0]) / 2.0)
    return new_width, new_height, -crop_left, -crop_top


def least_cover(width: int, height: int, size: tuple[int, int]) -> tuple[Fraction, Fraction]:
    """The sides of the source scaled by the least factor with which it covers the crop."""
    r = max(Fraction(size[0], width), Fraction(size[1], height))
    return width * r, height * r


def check_place(width: int, height: int, size: tuple[int, int], extra: int) -> None:
    centre = plan(width, height, InputSpec(*size, resize="letterbox-center"))
    assert placed(centre) == ultralytics(width, height, size)
    corner = plan(width, height, InputSpec(*size, resize="letterbox-topleft"))
    assert placed(corner) == yolox_preproc(width, height, size)
    assert placed(plan(width, height, InputSpec(*size, resize="stretch"))) == (*size, 0, 0)
    short = max(size) + extra
    crop = plan(width, height, InputSpec(*size, resize="crop", short_side=short))
    assert placed(crop) == torchvision_crop(width, height, size, short)
    least = plan(width, height, InputSpec(*size, resize="crop"))
    for side, wanted in zip((least.resized_width, least.resized_height), least_cover(width, height, size), strict=True):
        assert abs(side - wanted) <= Fraction(501, 1000)
    assert least.left == -round((least.resized_width - size[0]) / 2)
    assert least.top == -round((least.resized_height - size[1]) / 2)


def check_there_and_back(
    mode: Resize, width: int, height: int, size: tuple[int, int], extra: int | None, at: list[float]
) -> None:
    short_side = None if extra is None else max(size) + extra
    t = plan(width, height, InputSpec(*size, resize=mode, short_side=short_side))
    if mode == "letterbox-center":
        resized_width, resized_height, left, top = ultralytics(width, height, size)
    elif mode == "letterbox-topleft":
        resized_width, resized_height, left, top = yolox_preproc(width, height, size)
    elif mode == "stretch":
        resized_width, resized_height, left, top = (*size, 0, 0)
    elif short_side is not None:
        resized_width, resized_height, left, top = torchvision_crop(width, height, size, short_side)
    else:
        resized_width, resized_height, left, top = placed(t)
    source = np.array(at).reshape(-1, 4) * (width, height, width, height)
    scale = np.array((resized_width / width, resized_height / height) * 2)
    # As the model would say it: in its own px, in float32.
    said = (source * scale + (left, top, left, top)).astype(np.float32)
    assert np.abs(to_source(t, said) - source).max() <= 0.51
    assert np.abs(to_source(t, to_model(t, source)) - source).max() <= 0.51


boxes = st.lists(shares, min_size=4, max_size=4) | st.lists(shares, min_size=32, max_size=32)
extras = st.none() | st.sampled_from([0, 8, 32, 57, 256])


@settings(deadline=None, max_examples=300)
@given(widths, heights, sizes, st.sampled_from([0, 8, 32, 57, 256]))
@example(3775, 1571, (1280, 1280), 0)
@example(1, 1, (416, 416), 0)
@example(8000, 6000, (640, 640), 32)
def test_places_are_the_published_ones(width: int, height: int, size: tuple[int, int], extra: int) -> None:
    check_place(width, height, size, extra)


@pytest.mark.full
@pytest.mark.timeout(600)
@settings(deadline=None, max_examples=3_000)
@given(widths, heights, sizes, st.integers(0, 300))
def test_many_places_are_the_published_ones(width: int, height: int, size: tuple[int, int], extra: int) -> None:
    check_place(width, height, size, extra)


@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=150)
@given(widths, heights, sizes, extras, boxes)
@example(3775, 1571, (1280, 1280), None, [0.1, 0.2, 0.3, 0.4])
@example(8000, 1, (224, 224), 0, [0, 0, 1, 1])
@example(1, 6000, (1920, 1088), None, [0, 0, 1, 1])
def test_boxes_come_back(
    mode: Resize, width: int, height: int, size: tuple[int, int], extra: int | None, at: list[float]
) -> None:
    check_there_and_back(mode, width, height, size, extra if mode == "crop" else None, at)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@settings(deadline=None, max_examples=3_000)
@given(widths, heights, sizes, extras, boxes)
def test_many_boxes_come_back(
    mode: Resize, width: int, height: int, size: tuple[int, int], extra: int | None, at: list[float]
) -> None:
    check_there_and_back(mode, width, height, size, extra if mode == "crop" else None, at)


def test_an_odd_padding_is_not_computed_anew() -> None:
    """3775x1571 at 1280: 373 px above and 374 below; formulas that halve the remainder shift every box."""
    t = plan(3775, 1571, InputSpec(1280, 1280))
    assert placed(t) == (1280, 533, 0, 373)
    assert t.dst_height - t.top - t.resized_height == 374
    said = np.array([[0, 373, 1280, 906], [320, 373, 640, 906]], dtype=np.float32)
    assert to_source(t, said).tolist() == [[0, 0, 3775, 1571], [943.75, 0, 1887.5, 1571]]
    wrong = to_source(t, said + np.array([0, 1, 0, 1], dtype=np.float32))
    assert wrong[0, 1] == pytest.approx(1571 / 533)  # nearly 3 px of the camera
