"""What the pixel formats mean: grey, colours, and the brightness that the scene cache reads."""

from __future__ import annotations

import colorsys

import cv2
import numpy as np
import pytest

from edge_runtime.records.spec import Color, InputSpec, Pixel
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.pixels import fill_level, normalised, upsampled, yuv_of
from edge_runtime.vision.scene import luma_grid

PIXELS: list[Pixel] = ["float32", "bgr24", "rgba", "nv12"]
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def test_shapes_and_dtypes() -> None:
    spec = {pixel: InputSpec(64, 48, pixel=pixel) for pixel in PIXELS}
    assert [spec[pixel].shape for pixel in PIXELS] == [(3, 48, 64), (48, 64, 3), (48, 64, 4), (72, 64)]
    assert [spec[pixel].dtype.name for pixel in PIXELS] == ["float32", "uint8", "uint8", "uint8"]


@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("level", [0.0, 114.0, 255.0])
def test_a_level_is_the_same_grey_in_every_format(pixel: Pixel, level: float) -> None:
    spec = InputSpec(32, 16, scale=0.5, mean=MEAN, std=STD, pixel=pixel)
    batch = np.full((2, *spec.shape), 7, spec.dtype)
    fill_level(batch, spec, level)
    wanted = ((level * 0.5 - np.array(MEAN)) / STD)[:, None, None]
    for place in batch:
        assert np.abs(normalised(place, spec) - wanted).max() < 0.01


def test_colours_go_to_nv12_and_back_as_opencv_has_it() -> None:
    for hue in np.linspace(0, 1, 13):
        colour = [round(255 * level) for level in colorsys.hsv_to_rgb(float(hue), 0.7, 0.8)]
        spec = InputSpec(4, 4, pixel="nv12")
        place = np.empty(spec.shape, np.uint8)
        y, u, v = yuv_of(*colour)
        place[:4], place[4:, ::2], place[4:, 1::2] = y, u, v
        ours = normalised(place, spec)[:, 0, 0]
        assert np.abs(ours - colour).max() <= 2
        assert np.abs(ours - cv2.cvtColor(place, cv2.COLOR_YUV2RGB_NV12)[0, 0]).max() <= 2


@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_nv12_of_single_pixels_is_clipped_where_no_colour_is_meant(color: Color) -> None:
    spec = InputSpec(2, 2, color=color, pixel="nv12")
    place = np.array([[0, 255], [16, 235], [255, 0]], np.uint8)
    seen = normalised(place, spec)
    assert seen.min() >= 0
    assert seen.max() <= 255


def test_colours_between_samples_are_linear() -> None:
    chroma = np.array([[0, 100], [200, 100]], np.uint8)
    wanted = [[0, 50, 100, 100], [50, 75, 100, 100], [150, 125, 100, 100], [200, 150, 100, 100]]
    np.testing.assert_allclose(upsampled(chroma), wanted)


@pytest.mark.parametrize("pixel", ["bgr24", "rgba", "nv12"])
@pytest.mark.parametrize("source", [(300, 200), (64, 64), (50, 222), (4, 2)])
def test_the_scene_cache_sees_the_same_brightness(pixel: Pixel, source: tuple[int, int]) -> None:
    spec = InputSpec(64, 64, color="BGR", mean=MEAN, std=STD, pixel=pixel)
    rng = np.random.default_rng(2)
    place = rng.integers(16, 236, spec.shape, np.uint8)
    if pixel == "nv12":
        place[64:] = 128
    plain = InputSpec(64, 64, color="BGR", mean=MEAN, std=STD)
    transform = plan(*source, spec)
    ours = luma_grid(place, spec, transform)
    theirs = luma_grid(normalised(place, spec), plain, transform)
    np.testing.assert_allclose(ours, theirs, atol=0.05)
