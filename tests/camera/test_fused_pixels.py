"""Pictures as bytes, for models with their preprocessing inside: the same picture as in floats, to half a level."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.bundled import bundled_media
from edge_runtime.camera.av_pixels import AvPixels, convert, scale
from edge_runtime.camera.av_raw import Assembler, Disassembler
from edge_runtime.camera.synthetic import SyntheticPixels, read_number
from edge_runtime.records.frames import Float32Array, InputArray, Pixels, Transform
from edge_runtime.records.spec import InputSpec, Pixel, Resize
from edge_runtime.vision.geometry import plan, to_model, to_source
from edge_runtime.vision.pixels import normalised
from tests.camera.test_pixels import MATRICES, frame_of, rotated_file, scene, solid

PIXELS: list[Pixel] = ["bgr24", "rgba", "nv12"]
COLOURS = [(10, 240, 120), (255, 255, 255), (0, 0, 0), (0, 0, 255)]
SIZES = [(99, 1), (1, 99), (767, 575), (3775, 1571)]
RESIZES: list[Resize] = ["letterbox-center", "letterbox-topleft", "stretch", "crop"]


@pytest.fixture(scope="module")
def clip() -> AvPixels:
    with av.open(str(bundled_media("vtest"))) as container:
        return AvPixels(next(container.decode(video=0)))


def written(pixels: Pixels, spec: InputSpec) -> tuple[InputArray, Transform]:
    """The place, the same whatever it held before."""
    places = [np.full(spec.shape, poison, spec.dtype) for poison in (0, 201)]
    transforms = {pixels.write_into(place, spec) for place in places}
    np.testing.assert_array_equal(places[0], places[1])
    assert transforms == {plan(pixels.width, pixels.height, spec)}
    return places[0], transforms.pop()


def in_floats(pixels: AvPixels, spec: InputSpec, transform: Transform) -> Float32Array:
    """The same part of the picture through the writer of floats."""
    plain = InputSpec(spec.width, spec.height, spec.color, spec.resize, spec.pad)
    place = np.empty(plain.shape, np.float32)
    turn = pixels.orientation
    convert(scale(pixels.frame, plain, transform, turn), place, plain, transform, turn)
    return place


def inner(transform: Transform) -> tuple[slice, slice, slice]:
    """The picture without its edge, where nv12's colours mix with the padding's."""
    top, left = max(transform.top, 0), max(transform.left, 0)
    bottom = min(transform.top + transform.resized_height, transform.dst_height)
    right = min(transform.left + transform.resized_width, transform.dst_width)
    return slice(None), slice(top + 2, bottom - 2), slice(left + 2, right - 2)


def assert_near(bytes_: Float32Array, floats: Float32Array, transform: Transform, pixel: Pixel) -> None:
    if pixel != "nv12":
        assert np.abs(bytes_ - floats).max() <= 1.01
        return
    difference = np.abs(bytes_ - floats)[inner(transform)]
    assert difference.mean() < 2.0
    assert np.percentile(difference, 99) < 16


@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("size", [(416, 416), pytest.param((320, 192), marks=pytest.mark.full), (158, 94)])
def test_a_frame_of_the_clip(clip: AvPixels, pixel: Pixel, resize: Resize, size: tuple[int, int]) -> None:
    assert clip.frame.format.name == "yuv420p"
    spec = InputSpec(*size, color="BGR" if size[0] == 320 else "RGB", resize=resize, pixel=pixel)
    place, transform = written(clip, spec)
    assert_near(normalised(place, spec), in_floats(clip, spec, transform), transform, pixel)


@pytest.mark.parametrize("pixel", PIXELS)
def test_a_crop_with_a_short_side_of_its_own(clip: AvPixels, pixel: Pixel) -> None:
    spec = InputSpec(224, 160, resize="crop", short_side=257, pixel=pixel)
    place, transform = written(clip, spec)
    assert_near(normalised(place, spec), in_floats(clip, spec, transform), transform, pixel)


@pytest.mark.parametrize("colour", [(200, 60, 30), *(pytest.param(each, marks=pytest.mark.full) for each in COLOURS)])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv444p", "nv12", "yuv420p10le", "bgra", "gbrp"])
@pytest.mark.parametrize("pixel", PIXELS)
def test_a_solid_colour_comes_out_as_it_is(pixel: Pixel, pix_fmt: str, colour: tuple[int, int, int]) -> None:
    pixels = AvPixels(frame_of(solid(colour), pix_fmt))
    for size in (96, 48):
        spec = InputSpec(size, 48, resize="stretch", pixel=pixel)
        place, _ = written(pixels, spec)
        assert np.abs(normalised(place, spec) - np.array(colour, np.float32)[:, None, None]).max() <= 4


@pytest.mark.parametrize("matrix", [1, 5, 6, 9])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("pixel", PIXELS)
def test_what_the_camera_says_of_its_colours_is_obeyed(pixel: Pixel, full: bool, matrix: int) -> None:
    kr, kb = {1: (0.2126, 0.0722), 9: (0.2627, 0.0593)}.get(matrix, (0.299, 0.114))
    r, g, b = 200.0, 60.0, 30.0
    luma = kr * r + (1 - kr - kb) * g + kb * b
    cb, cr = (b - luma) / (2 - 2 * kb), (r - luma) / (2 - 2 * kr)
    values = (luma, 128 + cb, 128 + cr) if full else (16 + luma * 219 / 255, 128 + cb * 224 / 255, 128 + cr * 224 / 255)
    for pix_fmt in ("yuv444p", "yuv420p"):
        frame = av.VideoFrame(64, 64, pix_fmt)
        for plane, value in zip(frame.planes, values, strict=True):
            plane.update(bytes([round(value)]) * plane.buffer_size)
        frame.colorspace, frame.color_range = matrix, 2 if full else 1
        for side in (32, 64):
            spec = InputSpec(side, side, resize="stretch", pixel=pixel)
            place, _ = written(AvPixels(frame), spec)
            assert np.abs(normalised(place, spec) - np.array([r, g, b], np.float32)[:, None, None]).max() <= 4


@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("resize", RESIZES)
@pytest.mark.parametrize("size", [(1, 1), (3, 5), *(pytest.param(each, marks=pytest.mark.full) for each in SIZES)])
def test_grey_frames_of_every_size(size: tuple[int, int], resize: Resize, pixel: Pixel) -> None:
    frame = av.VideoFrame(*size, "gray")
    frame.planes[0].update(bytes([100]) * frame.planes[0].buffer_size)
    spec = InputSpec(160, 96, resize=resize, pixel=pixel, pad=17)
    place, transform = written(AvPixels(frame), spec)
    seen = normalised(place, spec)
    rows, columns = (
        slice(max(start, 0), max(start, 0) + side)
        for start, side in ((transform.top, transform.resized_height), (transform.left, transform.resized_width))
    )
    assert np.abs(seen[:, rows, columns] - 100).max() <= 2
    outside = seen.copy()
    outside[:, rows, columns] = 17
    assert np.abs(outside - 17).max() <= 1
    if pixel == "nv12":
        assert not any(value % 2 for value in (*transform_integers(transform),))


def transform_integers(transform: Transform) -> tuple[int, ...]:
    return transform.left, transform.top, transform.resized_width, transform.resized_height


@pytest.mark.parametrize("resize", RESIZES)
def test_nv12_is_planned_on_whole_colour_samples(resize: Resize) -> None:
    rng = np.random.default_rng(3)
    for _ in range(400):
        width, height, w, h = (int(side) for side in rng.integers(1, 900, 4))
        spec = InputSpec(2 * w, 2 * h, resize=resize, pixel="nv12")
        transform = plan(width, height, spec)
        assert not any(value % 2 for value in transform_integers(transform))
        assert transform.resized_width >= 2 <= transform.resized_height
        over_x = transform.left + transform.resized_width - spec.width
        over_y = transform.top + transform.resized_height - spec.height
        if resize == "crop":
            assert transform.left <= 0 >= transform.top
            assert over_x >= 0 <= over_y
        else:
            assert transform.left >= 0 <= transform.top
            assert over_x <= 0 >= over_y
        plain = plan(width, height, InputSpec(spec.width, spec.height, resize=resize))
        near = zip(transform_integers(transform), transform_integers(plain), strict=True)
        assert all(abs(one - other) <= 2 for one, other in near)
        box = np.array([[0.0, 0.0, width, height]])
        np.testing.assert_allclose(to_source(transform, to_model(transform, box)), box, rtol=1e-5, atol=1e-3)


def test_an_odd_nv12_input_cannot_be_planned() -> None:
    for size in ((95, 96), (96, 95)):
        with pytest.raises(ValueError, match="even"):
            plan(640, 480, InputSpec(*size, pixel="nv12"))


@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("name", ["quarter clockwise", "half", "transposed", "mirrored"])
def test_pictures_come_out_upright(tmp_path: Path, name: str, pixel: Pixel) -> None:
    pixels = rotated_file(tmp_path, scene(98, 62), tuple(65536 * term for term in MATRICES[name]))
    for resize in ("letterbox-center", "crop"):
        spec = InputSpec(64, 56, resize=resize, pixel=pixel)
        place, transform = written(pixels, spec)
        wanted = in_floats(pixels, spec, transform)
        limit = 1.0 if pixel != "nv12" else 12.0
        assert np.abs(normalised(place, spec) - wanted)[inner(transform)].mean() < limit
        assert np.abs(normalised(place, spec) - wanted[:, ::-1, ::-1])[inner(transform)].mean() > 20


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv444p", "nv12", "rgb24"])
@pytest.mark.parametrize("width", [34, *(pytest.param(each, marks=pytest.mark.full) for each in (8, 66, 200))])
@pytest.mark.parametrize("pixel", PIXELS)
def test_the_last_columns_are_the_pictures_own(pixel: Pixel, width: int, pix_fmt: str) -> None:
    """swscale has a path for pictures that are not scaled that leaves them to whatever the memory held."""
    pixels = AvPixels(frame_of(scene(width, 48), pix_fmt))
    spec = InputSpec(width, 48, resize="stretch", pixel=pixel)
    place, transform = written(pixels, spec)
    for level in (0, 255):
        held = [av.VideoFrame(width, 48, kind) for kind in ("gbrp", "nv12") for _ in range(4)]
        for plane in (plane for frame in held for plane in frame.planes):
            plane.update(bytes([level]) * plane.buffer_size)
        del held
        np.testing.assert_array_equal(written(pixels, spec)[0], place)
    # colours of single pixels are more than nv12 holds
    limit = 1.01 if pixel != "nv12" else 24.0
    difference = np.abs(normalised(place, spec) - in_floats(pixels, spec, transform))
    assert (difference.max() if pixel != "nv12" else difference[:, :, -2:].mean()) <= limit


@pytest.mark.parametrize("pixel", PIXELS)
def test_swapped_channels_do_not_pass(pixel: Pixel) -> None:
    """Bytes are the same for RGB and BGR models: the graph orders them."""
    pixels = AvPixels(frame_of(solid((220, 100, 20)), "yuv444p"))
    specs = [InputSpec(32, 32, color=color, resize="stretch", pixel=pixel) for color in ("RGB", "BGR")]
    places = [written(pixels, spec)[0] for spec in specs]
    np.testing.assert_array_equal(places[0], places[1])
    for spec, wanted in zip(specs, ((220, 100, 20), (20, 100, 220)), strict=True):
        means = normalised(places[0], spec).mean(axis=(1, 2))
        assert np.abs(means - wanted).max() < 3


def test_alpha_and_wrong_places(clip: AvPixels) -> None:
    spec = InputSpec(64, 64, pixel="rgba")
    batch = np.zeros((3, *spec.shape), np.uint8)
    clip.write_into(batch[1], spec)
    assert (batch[1, ..., 3] == 255).all()
    assert not batch[[0, 2]].any()
    for wrong in (
        np.empty((64, 64, 3), np.uint8),
        np.empty((64, 64, 4), np.float32),
        np.empty((3, 64, 64), np.float32),
    ):
        with pytest.raises(ValueError, match="place is"):
            clip.write_into(wrong, spec)


@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("resize", RESIZES)
def test_synthetic_pictures(pixel: Pixel, resize: Resize) -> None:
    pixels = SyntheticPixels(1234, 768, 576)
    spec = InputSpec(320, 240, resize=resize, pixel=pixel)
    place, transform = written(pixels, spec)
    seen = normalised(place, spec)
    plain = np.empty((3, 240, 320), np.float32)
    pixels.write_into(plain, InputSpec(320, 240, resize=resize))
    assert np.abs(seen - plain)[inner(transform)].mean() < 2
    assert read_number(seen.transpose(1, 2, 0)) == 1234


@pytest.mark.parametrize("pixel", PIXELS)
def test_pictures_of_another_process(clip: AvPixels, pixel: Pixel) -> None:
    form, planes = Disassembler().take_apart(clip)
    rows = [plane[:count, :width].reshape(-1) for plane, (count, width) in zip(planes, form.planes(), strict=True)]
    data: NDArray[np.uint8] = np.concatenate([*rows, np.zeros(64, np.uint8)])[: form.size_bytes]
    spec = InputSpec(416, 416, pixel=pixel)
    shared = Assembler().assemble(form, data)
    np.testing.assert_array_equal(written(shared, spec)[0], written(clip, spec)[0])
