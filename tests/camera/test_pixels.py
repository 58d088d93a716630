"""Scaling, colours, borders and normalisation of decoded pictures."""

from __future__ import annotations

import threading
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av import decode_image
from edge_runtime.camera.av_pixels import AvPixels, convert, scale
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Float32Array
from edge_runtime.records.spec import Color, InputSpec, Resize
from edge_runtime.vision.geometry import plan
from tests.camera.clips import encode, image

SOLID = [(200, 60, 30), (10, 240, 120), (255, 255, 255), (0, 0, 0), (0, 0, 255)]


def frame_of(rgb: NDArray[np.uint8], pix_fmt: str) -> av.VideoFrame:
    return av.VideoFrame.from_ndarray(rgb, "rgb24").reformat(format=pix_fmt)


def solid(colour: tuple[int, int, int], width: int = 64, height: int = 48) -> NDArray[np.uint8]:
    return np.full((height, width, 3), colour, np.uint8)


def scene(width: int, height: int) -> NDArray[np.uint8]:
    """A smooth picture with some edges, the same every time."""
    rng = np.random.default_rng(5)
    small = rng.integers(0, 256, (height // 24 + 2, width // 24 + 2, 3), dtype=np.uint8)
    picture = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    cv2.rectangle(picture, (width // 4, height // 4), (width // 2, height // 2), (255, 30, 60), -1)
    return np.ascontiguousarray(picture.astype(np.uint8))


def written(pixels: AvPixels, spec: InputSpec) -> Float32Array:
    place = np.full(spec.shape, np.nan, np.float32)
    assert pixels.write_into(place, spec) == plan(pixels.width, pixels.height, spec)
    assert not np.isnan(place).any()
    return place


@pytest.mark.parametrize("colour", SOLID)
@pytest.mark.parametrize("color", ["RGB", "BGR"])
@pytest.mark.parametrize(
    "pix_fmt",
    [
        "yuv420p",
        "yuvj420p",
        "yuv422p",
        "yuvj422p",
        "yuv444p",
        "nv12",
        "yuyv422",
        "yuv420p10le",
        "rgb24",
        "bgra",
        "gbrp",
    ],
)
def test_a_solid_colour_comes_out_as_it_is(pix_fmt: str, color: Color, colour: tuple[int, int, int]) -> None:
    pixels = AvPixels(frame_of(solid(colour), pix_fmt))
    place = written(pixels, InputSpec(96, 96, color=color, resize="stretch"))
    wanted = np.array(colour if color == "RGB" else colour[::-1], np.float32)[:, None, None]
    assert np.abs(place - wanted).max() <= 3
    assert np.abs(pixels.to_rgb().astype(int) - np.array(colour)).max() <= 3


@pytest.mark.parametrize("matrix", [1, 5, 6, 9])
@pytest.mark.parametrize("full", [False, True])
def test_declared_matrix_and_range_are_obeyed(matrix: int, full: bool) -> None:
    kr, kb = {1: (0.2126, 0.0722), 9: (0.2627, 0.0593)}.get(matrix, (0.299, 0.114))
    r, g, b = 200.0, 60.0, 30.0
    luma = kr * r + (1 - kr - kb) * g + kb * b
    cb, cr = (b - luma) / (2 - 2 * kb), (r - luma) / (2 - 2 * kr)
    values = (luma, 128 + cb, 128 + cr) if full else (16 + luma * 219 / 255, 128 + cb * 224 / 255, 128 + cr * 224 / 255)
    frame = av.VideoFrame(64, 64, "yuv444p")
    for plane, value in zip(frame.planes, values, strict=True):
        plane.update(bytes([round(value)]) * plane.buffer_size)
    frame.colorspace = matrix
    frame.color_range = 2 if full else 1
    place = written(AvPixels(frame), InputSpec(32, 32, resize="stretch"))
    assert np.abs(place - np.array([r, g, b], np.float32)[:, None, None]).max() <= 3


@pytest.mark.parametrize("matrix", [3, 10, 12, 14])
def test_a_reserved_or_rare_matrix_gives_a_picture(matrix: int) -> None:
    frame = frame_of(solid((128, 128, 128)), "yuv420p")
    frame.colorspace = matrix
    frame.color_trc = 3
    frame.color_primaries = 3
    assert np.abs(written(AvPixels(frame), InputSpec(32, 32)) - 128)[:, 8:24].max() <= 3


@pytest.mark.parametrize("level", [0, 77, 255])
def test_grey(level: int) -> None:
    frame = av.VideoFrame.from_ndarray(np.full((40, 50), level, np.uint8), "gray")
    assert np.abs(written(AvPixels(frame), InputSpec(32, 32, resize="stretch")) - level).max() <= 1


def test_palette() -> None:
    frame = av.VideoFrame(32, 32, "pal8")
    frame.planes[0].update(bytes([5]) * frame.planes[0].buffer_size)
    palette = np.zeros((256, 4), np.uint8)
    palette[5] = (30, 60, 200, 255)
    frame.planes[1].update(palette.tobytes())
    place = written(AvPixels(frame), InputSpec(16, 16, resize="stretch"))
    assert np.abs(place - np.array([200, 60, 30], np.float32)[:, None, None]).max() <= 3


@pytest.mark.parametrize(
    ("width", "height"), [(1, 1), (3, 5), (99, 1), (1, 99), (767, 575), (3775, 1571), (8000, 6000)]
)
@pytest.mark.parametrize("resize", ["letterbox-center", "letterbox-topleft", "stretch", "crop"])
def test_every_size_fills_the_place(width: int, height: int, resize: Resize) -> None:
    frame = av.VideoFrame(width, height, "yuv420p")
    for plane, value in zip(frame.planes, (100, 128, 128), strict=True):
        plane.update(bytes([value]) * plane.buffer_size)
    spec = InputSpec(160, 96, resize=resize)
    place = written(AvPixels(frame), spec)
    grey = (100 - 16) * 255 / 219
    transform = plan(width, height, spec)
    top, left = max(transform.top, 0), max(transform.left, 0)
    window = place[:, top : top + transform.resized_height, left : left + transform.resized_width]
    assert np.abs(window - grey).max() <= 3
    outside = place.copy()
    outside[:, top : top + transform.resized_height, left : left + transform.resized_width] = spec.pad
    assert (outside == spec.pad).all()


def test_a_shape_that_would_need_gigabytes_is_refused() -> None:
    with pytest.raises(CameraError, match="would be"):
        AvPixels(av.VideoFrame(2, 4000, "gray")).write_into(
            np.empty((3, 416, 416), np.float32), InputSpec(416, 416, resize="crop")
        )


@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_normalisation_and_its_border(color: Color) -> None:
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    plain = InputSpec(128, 128, color=color)
    spec = InputSpec(128, 128, color=color, scale=0.5, mean=mean, std=std, pad=7)
    pixels = AvPixels(frame_of(scene(320, 200), "yuv420p"))
    raw, place = written(pixels, plain), written(pixels, spec)
    transform = plan(320, 200, spec)
    rows = slice(transform.top, transform.top + transform.resized_height)
    m, s = np.array(mean)[:, None, None], np.array(std)[:, None, None]
    np.testing.assert_allclose(place[:, rows], (raw[:, rows] * 0.5 - m) / s, atol=1e-4)
    border = np.broadcast_to((7 * 0.5 - m) / s, (3, transform.top, 128))
    np.testing.assert_allclose(place[:, : transform.top], border, atol=1e-5)


def triangle(picture: NDArray[np.float32], size: int, axis: int) -> NDArray[np.float32]:
    """Resampled along an axis by a triangle as wide as a pixel of the larger grid, its weights adding up to 1."""
    length = picture.shape[axis]
    ratio = length / size
    centres = (np.arange(size)[:, None] + 0.5) * ratio - 0.5
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(length)[None] - centres) / max(1.0, ratio))
    weights /= weights.sum(axis=1, keepdims=True)
    moved = np.moveaxis(picture, axis, 0)
    return np.moveaxis(np.tensordot(weights, moved, axes=(1, 0)), 0, axis).astype(np.float32)


@pytest.mark.parametrize("size", [(416, 416), (224, 160), (320, 320)])
def test_scaling_down_is_bilinear_over_all_pixels(size: tuple[int, int]) -> None:
    rgb = scene(768, 576)
    spec = InputSpec(*size)
    transform = plan(768, 576, spec)
    place = written(AvPixels(frame_of(rgb, "yuv444p")), spec)
    window = place[
        :,
        transform.top : transform.top + transform.resized_height,
        transform.left : transform.left + transform.resized_width,
    ]
    wanted = triangle(
        triangle(rgb.astype(np.float32), transform.resized_height, axis=0), transform.resized_width, axis=1
    )
    difference = np.abs(window.transpose(1, 2, 0) - wanted)
    assert difference.mean() < 1.0
    assert np.percentile(difference, 99) < 5


def test_scaling_up_is_smooth_and_in_place() -> None:
    rgb = scene(64, 48)
    place = written(AvPixels(frame_of(rgb, "gbrp")), InputSpec(256, 192, resize="stretch"))
    wanted = cv2.resize(rgb.astype(np.float32), (256, 192), interpolation=cv2.INTER_LINEAR)
    assert np.abs(place.transpose(1, 2, 0) - wanted).mean() < 4


def test_a_crop_is_the_window_of_the_whole() -> None:
    rgb = scene(300, 200)
    spec = InputSpec(64, 64, resize="crop", short_side=96)
    transform = plan(300, 200, spec)
    place = written(AvPixels(frame_of(rgb, "gbrp")), spec)
    whole = written(
        AvPixels(frame_of(rgb, "gbrp")), InputSpec(transform.resized_width, transform.resized_height, resize="stretch")
    )
    top, left = -transform.top, -transform.left
    np.testing.assert_array_equal(place, whole[:, top : top + 64, left : left + 64])


def test_the_two_steps_are_the_whole() -> None:
    pixels = AvPixels(frame_of(scene(320, 240), "yuv420p"))
    spec = InputSpec(96, 96, mean=(1.0, 2.0, 3.0))
    transform = plan(320, 240, spec)
    place = np.full(spec.shape, np.nan, np.float32)
    convert(scale(pixels.frame, spec, transform), place, spec, transform)
    np.testing.assert_array_equal(place, written(pixels, spec))


def test_places_of_a_batch_and_wrong_places() -> None:
    spec = InputSpec(64, 64)
    pixels = AvPixels(frame_of(scene(100, 80), "yuv420p"))
    batch = np.full((3, 3, 64, 64), np.nan, np.float32)
    pixels.write_into(batch[1], spec)
    assert np.isnan(batch[[0, 2]]).all()
    np.testing.assert_array_equal(batch[1], written(pixels, spec))
    for wrong in (np.empty((3, 64, 32), np.float32), np.empty((3, 64, 64), np.float64)):
        with pytest.raises(ValueError, match="place is"):
            pixels.write_into(wrong, spec)


def test_one_frame_written_from_many_threads() -> None:
    frame = frame_of(scene(640, 480), "yuv420p")
    frame.colorspace, frame.color_range, frame.color_trc = 5, 1, 1
    pixels = AvPixels(frame)
    specs = [InputSpec(160, 160), InputSpec(96, 128, color="BGR", resize="stretch"), InputSpec(64, 64, resize="crop")]
    wanted = [written(pixels, spec) for spec in specs]
    wrong: list[int] = []

    def work() -> None:
        place = [np.empty(spec.shape, np.float32) for spec in specs]
        for _ in range(30):
            for index, spec in enumerate(specs):
                place[index][:] = np.nan
                pixels.write_into(place[index], spec)
                if not np.array_equal(place[index], wanted[index]):
                    wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuvj420p", "yuv422p", "yuv444p", "nv12", "rgb24"])
@pytest.mark.parametrize("width", [8, 33, 66, 200, 201])
def test_the_last_columns_are_the_pictures_own(width: int, pix_fmt: str) -> None:
    """swscale has a path that leaves them to whatever the memory held."""
    pixels = AvPixels(frame_of(scene(width, 48), pix_fmt))
    spec = InputSpec(width, 48, resize="stretch")
    place, rgb = written(pixels, spec), pixels.to_rgb()
    for level in (0, 255):
        held = [av.VideoFrame(width, 48, kind) for kind in ("gbrp", "gbrpf32le") for _ in range(4)]
        for plane in (plane for frame in held for plane in frame.planes):
            plane.update(bytes([level]) * plane.buffer_size)
        del held
        np.testing.assert_array_equal(written(pixels, spec), place)
        np.testing.assert_array_equal(pixels.to_rgb(), rgb)
    assert np.abs(place.transpose(1, 2, 0) - rgb).max() <= 1


@pytest.mark.parametrize(
    ("codec", "pix_fmt"), [("png", "rgb24"), ("mjpeg", "yuvj444p"), ("bmp", "bgr24"), ("png", "gray")]
)
def test_image_files(codec: str, pix_fmt: str) -> None:
    rgb = solid((120, 120, 120), 33, 17)
    assert np.abs(decode_image(image(rgb, codec, pix_fmt)).to_rgb().astype(int) - rgb).max() <= 3


@pytest.mark.parametrize(
    "data", [b"", b"hello", image(scene(64, 64), "mjpeg", "yuvj420p")[:900], b"\x89PNG\r\n\x1a\n123"]
)
def test_damaged_images_are_refused(data: bytes) -> None:
    with pytest.raises(CameraError):
        decode_image(data)


MATRICES = {
    "upright": (1, 0, 0, 1),
    "quarter clockwise": (0, 1, -1, 0),
    "half": (-1, 0, 0, -1),
    "quarter back": (0, -1, 1, 0),
    "mirrored": (-1, 0, 0, 1),
    "upside down": (1, 0, 0, -1),
    "transposed": (0, 1, 1, 0),
    "other diagonal": (0, -1, -1, 0),
}


def turned(rgb: NDArray[np.uint8], matrix: tuple[int, int, int, int]) -> NDArray[np.uint8]:
    """Pixel by pixel as a display matrix says: (x, y) goes to (a x + c y, b x + d y), moved back into the picture."""
    a, b, c, d = matrix
    rows, columns = np.mgrid[: rgb.shape[0], : rgb.shape[1]]
    x, y = a * columns + c * rows, b * columns + d * rows
    x, y = x - x.min(), y - y.min()
    out = np.zeros((y.max() + 1, x.max() + 1, 3), np.uint8)
    out[y, x] = rgb
    return out


def rotated_file(folder: Path, rgb: NDArray[np.uint8], terms: tuple[int, ...]) -> AvPixels:
    """The first picture of an MP4 file whose track has these a, b, c, d in 16.16."""
    path = encode(folder / "r.mp4", [rgb] * 3, options={"qp": "4"})
    data = bytearray(path.read_bytes())
    start = data.index(b"tkhd") + 4 + 40
    assert np.frombuffer(data[start : start + 36], ">i4").tolist() == [65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30]
    a, b, c, d = terms
    data[start : start + 36] = np.array([a, b, 0, c, d, 0, 0, 0, 1 << 30], ">i4").tobytes()
    path.write_bytes(data)
    with av.open(str(path)) as container:
        return AvPixels(next(container.decode(video=0)))


@pytest.mark.parametrize("name", MATRICES)
def test_pictures_come_out_upright(tmp_path: Path, name: str) -> None:
    matrix = MATRICES[name]
    rgb = scene(98, 62)
    pixels = rotated_file(tmp_path, rgb, tuple(65536 * term for term in matrix))
    upright = turned(rgb, matrix)
    assert (pixels.height, pixels.width) == upright.shape[:2]
    assert np.abs(pixels.to_rgb().astype(int) - upright).mean() < 16  # colours at half the resolution
    assert np.abs(pixels.to_rgb().astype(int) - upright[::-1, ::-1]).mean() > 20
    for resize in ("letterbox-center", "crop", "stretch"):
        spec = InputSpec(48, 40, resize=resize)
        plain = AvPixels(av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels.to_rgb()), "rgb24"))
        assert np.abs(written(pixels, spec) - written(plain, spec)).mean() < 2


def test_a_turn_that_is_no_quarter_is_refused_with_a_reason(tmp_path: Path) -> None:
    pixels = rotated_file(tmp_path, scene(64, 48), (46341, 46341, -46341, 46341))
    with pytest.raises(CameraError, match="degrees") as caught:
        pixels.write_into(np.empty((3, 32, 32), np.float32), InputSpec(32, 32))
    assert caught.value.code == "pixels_unreadable"
    with pytest.raises(CameraError):
        pixels.to_rgb()
    assert rotated_file(tmp_path, scene(64, 48), (65500, 1000, -1000, 65500)).width == 64
    assert rotated_file(tmp_path, scene(64, 48), (0, 0, 0, 0)).width == 64


@pytest.mark.parametrize("resize", ["letterbox-center", "letterbox-topleft", "stretch", "crop"])
def test_a_picture_that_hardware_has_scaled_keeps_its_size_and_transform(resize: Resize) -> None:
    rgb = scene(1280, 720)
    whole = AvPixels(frame_of(rgb, "yuv444p"))
    half = AvPixels(frame_of(cv2.resize(rgb, (640, 360), interpolation=cv2.INTER_AREA), "yuv444p"), size=(1280, 720))
    assert (half.width, half.height) == (1280, 720)
    spec = InputSpec(160, 96, resize=resize)
    assert np.abs(written(half, spec) - written(whole, spec)).mean() < 2
    assert half.to_rgb().shape == (720, 1280, 3)
    # Far too small is scaled up again.
    tiny = AvPixels(frame_of(cv2.resize(rgb, (80, 45), interpolation=cv2.INTER_AREA), "yuv444p"), size=(1280, 720))
    assert np.abs(written(tiny, spec) - written(whole, spec)).mean() < 20


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("pix_fmt", ["yuv420p", "yuv422p", "yuv444p", "gray", "nv12"])
def test_levels_are_those_of_bt601(pix_fmt: str, full: bool) -> None:
    """Random flat patches through the standard's own formulae, in floats."""
    rng = np.random.default_rng(2)
    for _ in range(12):
        y, cb, cr = (int(level) for level in rng.integers(40, 216, 3))
        frame = av.VideoFrame(33, 17, pix_fmt)
        for plane, levels in zip(frame.planes, ((y,), (cb, cr) if pix_fmt == "nv12" else (cb,), (cr,)), strict=False):
            plane.update((bytes(levels) * plane.buffer_size)[: plane.buffer_size])
        frame.color_range = 2 if full else 1
        # Grey is full range for swscale, whatever its tag says.
        luma = float(y) if full or pix_fmt == "gray" else (y - 16) / 219 * 255
        u, v = (0.0, 0.0) if pix_fmt == "gray" else (cb - 128.0, cr - 128.0)
        u, v = (u, v) if full else (u / 224 * 255, v / 224 * 255)
        wanted = np.clip([luma + 1.402 * v, luma - 0.344136 * u - 0.714136 * v, luma + 1.772 * u], 0, 255)
        place = written(AvPixels(frame), InputSpec(24, 24, resize="stretch"))
        assert np.abs(place - wanted[:, None, None]).max() <= 2.5


@pytest.mark.parametrize(("width", "height"), [(1, 1), (2, 3), (33, 17), (98, 62), (175, 143), (3775, 1571)])
@pytest.mark.parametrize(("codec", "pix_fmt"), [("mjpeg", "yuvj420p"), ("mjpeg", "yuvj422p"), ("mjpeg", "yuvj444p")])
def test_odd_sizes_through_a_decoder(width: int, height: int, codec: str, pix_fmt: str) -> None:
    rgb = cv2.resize(scene(64, 48), (width, height), interpolation=cv2.INTER_LINEAR)
    pixels = decode_image(image(np.ascontiguousarray(rgb), codec, pix_fmt))
    assert (pixels.width, pixels.height) == (width, height)
    written(pixels, InputSpec(64, 48))
    assert np.abs(pixels.to_rgb().astype(int) - rgb).mean() < (25 if width > 8 else 60)
