"""Brightness in cells: what counts as the same scene, and what does not."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.records.frames import Float32Array, Transform
from edge_runtime.records.spec import Color, InputSpec, Resize
from edge_runtime.vision.geometry import plan
from edge_runtime.vision.scene import CEILING, FLOOR, TILE_PX, CameraNoise, is_still, luma_grid

SPEC = InputSpec(208, 208)
TRANSFORM = plan(384, 288, SPEC)
Three = tuple[float, float, float]
LUMA = np.array([0.299, 0.587, 0.114])


def place_of(levels: NDArray[np.floating], spec: InputSpec, transform: Transform) -> Float32Array:
    """A model's input that shows `levels` ([height, width, 3] RGB, 0-255, as large as what is seen of the picture)."""
    pixels: NDArray[np.float64] = np.full((spec.height, spec.width, 3), spec.pad, np.float64)
    top, left = max(0, transform.top), max(0, transform.left)
    pixels[top : top + levels.shape[0], left : left + levels.shape[1]] = levels
    if spec.color == "BGR":
        pixels = pixels[..., ::-1]
    values = (pixels * spec.scale - np.array(spec.mean)) / np.array(spec.std)
    return np.ascontiguousarray(values.transpose(2, 0, 1), np.float32)


def seen(transform: Transform) -> tuple[int, int]:
    """(height, width) of the part of the picture that is in the input, px."""
    return min(transform.resized_height, transform.dst_height), min(transform.resized_width, transform.dst_width)


def scene(seed: int = 1) -> NDArray[np.float64]:
    """Something with edges and areas, 20-220 levels, of TRANSFORM's size."""
    coarse = np.random.default_rng(seed).uniform(20, 220, (13, 13, 3))
    return np.asarray(np.kron(coarse, np.ones((12, 16, 1))), np.float64)


def grid_of(levels: NDArray[np.floating]) -> Float32Array:
    return luma_grid(place_of(levels, SPEC, TRANSFORM), SPEC, TRANSFORM)


def with_noise(levels: NDArray[np.floating], sigma: float, seed: int) -> NDArray[np.float64]:
    """Noise of single pixels, as large as it is once the picture has been scaled down."""
    return levels + np.random.default_rng(seed).normal(0, sigma, levels.shape)


@given(
    st.sampled_from(get_args(Color)),
    st.sampled_from(get_args(Resize)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([(1.0, (0.0,) * 3, (1.0,) * 3), (1 / 255, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]),
)
def test_a_cell_is_the_mean_luma_of_its_pixels(
    color: Color, resize: Resize, source: tuple[int, int], size: tuple[int, int], norm: tuple[float, Three, Three]
) -> None:
    scale, mean, std = norm
    spec = InputSpec(*size, color=color, resize=resize, scale=scale, mean=mean, std=std)
    transform = plan(*source, spec)
    height, width = seen(transform)
    levels = np.random.default_rng(0).uniform(0, 255, (height, width, 3))

    grid = luma_grid(place_of(levels, spec, transform), spec, transform)

    luma = levels @ LUMA
    rows, columns = cells(height), cells(width)
    assert grid.shape == (len(rows), len(columns))
    for row, ys in enumerate(rows):
        for column, xs in enumerate(columns):
            mean = np.mean([luma[y : y + TILE_PX, x : x + TILE_PX].mean() for y in ys for x in xs])
            assert grid[row, column] == pytest.approx(mean, abs=0.01)


def cells(side: int) -> list[tuple[int, ...]]:
    """Where the one or two tiles of each cell begin: every 4 px, the last so that it ends with the picture."""
    starts = list(range(0, max(1, side - TILE_PX + 1), TILE_PX))
    if side > TILE_PX and side % TILE_PX:
        starts.append(side - TILE_PX)
    return [(starts[0],)] if len(starts) == 1 else list(pairwise(starts))


def test_nothing_of_the_padding_is_seen() -> None:
    place = place_of(scene(), SPEC, TRANSFORM)
    other = place_of(scene(), replace(SPEC, pad=0), TRANSFORM)
    assert np.array_equal(luma_grid(place, SPEC, TRANSFORM), luma_grid(other, SPEC, TRANSFORM))


@lru_cache
def learn(sigma: float, pictures: int = 40) -> float:
    """Levels by which a cell may differ, once a camera's noise is known."""
    noise, levels = CameraNoise(), 0.0
    for seed in range(pictures):
        levels = noise.observe(grid_of(with_noise(scene(), sigma, seed)))
    return levels


@pytest.mark.parametrize("sigma", [0.0, 0.7, 1.4, 3.5])
def test_a_still_scene_is_still_under_its_own_noise(sigma: float) -> None:
    """1.4 levels is what is left of a sensor's 4 once 768 px have become 416; 3.5 of its 10."""
    levels = learn(sigma)
    reference = grid_of(with_noise(scene(), sigma, 1000))
    still = [is_still(grid_of(with_noise(scene(), sigma, seed)), reference, levels) for seed in range(2000, 2050)]
    assert all(still)


@pytest.mark.parametrize("sigma", [0.0, 1.4, 3.5])
@pytest.mark.parametrize("at", [(0, 0), (50, 103), (145, 203), (77, 5), (61, 64)])
def test_a_far_pedestrian_who_takes_a_step_is_seen(sigma: float, at: tuple[int, int]) -> None:
    """20 px high in a picture of 768 px: 11 x 5 once it is 416, 40 levels from what is behind; moved by 3 px."""
    levels = learn(sigma)
    y, x = at
    pictures = []
    for step in (0, 3):
        picture = scene()
        left = x + step if x < 200 else x - step
        picture[y : y + 11, left : left + 5] += 40 * (1 if picture[y, x].mean() < 128 else -1)
        pictures.append(grid_of(with_noise(picture, sigma, step)))
    assert not is_still(pictures[1], pictures[0], levels)


def test_slow_changes_add_up() -> None:
    reference = grid_of(scene())
    for step in range(100):
        picture = scene()
        picture[48:60, 32:48] += step * 0.1
        if not is_still(grid_of(picture), reference, FLOOR):
            assert FLOOR * 10 <= step <= FLOOR * 10 + 2
            return
    pytest.fail("a change of 10 levels was never seen")


def test_flickering_light_is_the_same_scene_and_hides_nobody() -> None:
    reference = grid_of(scene())
    for gain in (0.965, 0.99, 1.02, 1.035):
        assert is_still(grid_of(scene() * gain), reference, FLOOR), gain
        picture = scene()
        picture[50:61, 100:105] = 255 - picture[50:61, 100:105]
        assert not is_still(grid_of(picture * gain), reference, FLOOR), gain


def test_overexposed_areas_do_not_change_with_the_light() -> None:
    bright = scene()
    bright[:24] = 255
    reference = grid_of(bright)
    dimmed = bright * 1.03
    dimmed[:24] = 255
    assert is_still(grid_of(dimmed), reference, FLOOR)


@pytest.mark.parametrize("gain", [0.5, 0.9, 1.1])
def test_a_light_that_is_switched_is_a_change(gain: float) -> None:
    assert not is_still(grid_of(scene() * gain), grid_of(scene()), CEILING)


def test_in_the_dark_there_is_no_gain_to_find() -> None:
    dark = np.zeros_like(scene())
    assert is_still(grid_of(dark), grid_of(dark), FLOOR)
    assert not is_still(grid_of(dark + 10), grid_of(dark), FLOOR)


def test_what_cannot_be_compared_is_not_still() -> None:
    grid = grid_of(scene())
    assert not is_still(grid[:-1], grid, CEILING)
    broken = grid.copy()
    broken[3, 3] = np.nan
    assert not is_still(broken, grid, CEILING)
    assert not is_still(grid, broken, CEILING)


def test_levels_are_learned_between_a_floor_and_a_ceiling() -> None:
    assert learn(0.0) == FLOOR
    assert FLOOR < learn(4.0) < CEILING
    assert learn(40.0) == CEILING
    assert learn(40.0, pictures=8) == FLOOR, "before anything is known, nothing is allowed for"


def test_movement_is_no_noise() -> None:
    """Neither everything in half of the pictures, nor a part of the picture in all of them."""
    noise, levels = CameraNoise(), 0.0
    for seed in range(80):
        picture = with_noise(scene(), 0.3, seed)
        if seed % 8 < 4:
            picture = with_noise(scene(seed + 5), 0.3, seed)
        levels = noise.observe(grid_of(picture))
    assert levels == FLOOR

    noise = CameraNoise()
    for seed in range(80):
        picture = with_noise(scene(), 0.3, seed)
        picture[:8] = scene(seed + 5)[:8]
        levels = noise.observe(grid_of(picture))
    assert levels == FLOOR


def test_a_picture_of_another_size_starts_anew() -> None:
    noise = CameraNoise()
    for seed in range(20):
        levels = noise.observe(grid_of(with_noise(scene(), 40.0, seed)))
    assert levels == CEILING
    assert noise.observe(np.zeros((3, 3), np.float32)) == FLOOR
