"""The synthetic camera and the factory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.synthetic import (
    SyntheticCamera,
    SyntheticOptions,
    SyntheticPixels,
    parse_synthetic,
    read_number,
)
from edge_runtime.errors import CameraError
from edge_runtime.records.spec import InputSpec, Resize
from edge_runtime.vision.geometry import plan


def test_options() -> None:
    assert parse_synthetic("synthetic:") == SyntheticOptions()
    assert parse_synthetic("synthetic:?width=64&height=32&fps=12.5&frames=3") == SyntheticOptions(64, 32, 12.5, 3)


@pytest.mark.parametrize("url", ["synthetic:?colour=red", "synthetic:?fps=fast", "synthetic:?width=0", "synthetic:x"])
def test_wrong_options_say_what_would_be_right(url: str) -> None:
    with pytest.raises(CameraError) as caught:
        parse_synthetic(url)
    assert caught.value.remedy


def test_frames_are_numbered_and_exactly_spaced() -> None:
    camera = SyntheticCamera(name="s", url="synthetic:?width=64&height=32&fps=200&frames=30")
    frames = list(iter(camera.read, None))
    assert [read_number(frame.pixels.to_rgb()) for frame in frames] == list(range(30))
    assert [frame.frame_id for frame in frames] == list(range(30))
    assert {b.t_capture_ns - a.t_capture_ns for a, b in pairwise(frames)} == {5_000_000}
    assert (camera.status().state, camera.status().reason) == ("stopped", "end of frames")
    assert camera.source().decoded == 30
    assert camera.read() is None


@pytest.mark.parametrize("number", [0, 1, 4711, (1 << 24) - 1])
@pytest.mark.parametrize("resize", ["letterbox-center", "letterbox-topleft", "stretch"])
@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_the_number_survives_the_model_input(number: int, resize: Resize, color: str) -> None:
    spec = InputSpec(416, 416, color="BGR" if color == "BGR" else "RGB", resize=resize, mean=(3.0, 5.0, 7.0))
    place = np.full(spec.shape, np.nan, np.float32)
    pixels = SyntheticPixels(number, 768, 576)
    transform = pixels.write_into(place, spec)
    assert transform == plan(768, 576, spec)
    assert not np.isnan(place).any()
    picture = place + np.array(spec.mean, np.float32)[:, None, None]
    picture = picture[:, transform.top : transform.top + transform.resized_height, transform.left :][
        :, :, : transform.resized_width
    ]
    assert read_number(picture.transpose(1, 2, 0)) == number
    colour = pixels.to_rgb()[-1, -1].tolist()
    assert picture[:, -1, -1].tolist() == (colour if color == "RGB" else colour[::-1])


def test_crop_and_a_picture_without_a_number() -> None:
    spec = InputSpec(32, 64, resize="crop")
    place = np.full(spec.shape, np.nan, np.float32)
    SyntheticPixels(5, 300, 100).write_into(place, spec)
    assert not np.isnan(place).any()
    with pytest.raises(ValueError, match="no synthetic number"):
        read_number(
            np.full((64, 64, 3), 128, np.uint8) * np.array([0, 1, 0], np.uint8)
            + SyntheticPixels(9, 64, 64).to_rgb() // 3
        )


@pytest.mark.parametrize("url", ["ftp://admin:secret@cam/1", "bundled:vtest"])
def test_an_unknown_kind_of_camera_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(CameraError) as caught:
        open_camera(CameraOptions(name="gate", url=url))
    assert "secret" not in str(caught.value)
    assert caught.value.where == "gate"


def test_the_factory_gives_what_the_url_says() -> None:
    assert isinstance(open_camera(CameraOptions(name="s", url="synthetic:?frames=1")), SyntheticCamera)
    assert type(open_camera(CameraOptions(name="f", url="file:/nowhere.mp4"))).__name__ == "AvCamera"
    assert type(open_camera(CameraOptions(name="f", url="clips/a.mp4"))).__name__ == "AvCamera"
