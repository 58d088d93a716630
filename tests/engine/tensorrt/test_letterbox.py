"""The letterbox kernel: the same source as the GPU's, compiled for the CPU, against numpy, OpenCV and swscale."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.engine.tensorrt.letterbox import BLOCK, KINDS, SOURCE, Source, arguments, reference, source_of
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureKind, PictureLayout, Transform
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan
from tests.engine.tensorrt import kernel_cpu

KINDS_OF_SOURCE: tuple[PictureKind, ...] = ("bgr24", "rgba", "nv12", "yuv420p")
MEAN, STD = (123.0, 117.0, 104.0), (58.0, 57.0, 57.5)
WHERE_NVCC = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]


def picture_of(layout: PictureLayout, seed: int = 1) -> NDArray[np.uint8]:
    """A random picture: smooth with noise, so that a wrong pixel and a wrong mean both show."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0 : layout.height, 0 : layout.width]
    base = 127 + 90 * np.sin(columns / 17 + seed)[..., None] * np.cos(rows / 13)[..., None]
    picture = np.clip(base + random.normal(0, 25, (layout.height, layout.width, 4)), 0, 255).astype(np.uint8)
    if layout.kind in ("bgr24", "rgba"):
        return np.ascontiguousarray(picture[..., : 3 if layout.kind == "bgr24" else 4]).reshape(-1)
    brightness = picture[..., 0].reshape(-1)
    return np.concatenate((brightness, random.integers(60, 200, layout.nbytes - brightness.size, np.uint8)))


def padded(source: Source, picture: NDArray[np.uint8], layout: PictureLayout) -> tuple[Source, Any]:
    """The same picture with rubbish behind each row, and what keeps it."""
    start, kept = 0, list[NDArray[np.uint8]]()
    for rows, row_bytes in layout.planes:
        wide = np.full((rows, row_bytes + 40), 255, np.uint8)
        wide[:, :row_bytes] = picture[start : start + rows * row_bytes].reshape(rows, row_bytes)
        kept.append(wide)
        start += rows * row_bytes
    source = replace(source, address=kept[0].ctypes.data, pitch=kept[0].shape[1])
    if len(kept) > 1:
        source = replace(source, chroma=kept[1].ctypes.data, chroma_pitch=kept[1].shape[1])
    if len(kept) > 2:
        colours = np.concatenate(kept[1:])
        kept.append(colours)
        source = replace(source, chroma=colours.ctypes.data, chroma_next=kept[1].nbytes)
    return source, kept


def kernel(
    picture: NDArray[np.uint8],
    layout: PictureLayout,
    spec: InputSpec,
    *,
    smooth: bool = True,
    transform: Transform | None = None,
    gaps: bool = False,
) -> Any:
    """What the kernel writes into a place that held rubbish."""
    source, kept = source_of(layout, picture.ctypes.data), picture
    if gaps:
        source, kept = padded(source, picture, layout)
    guard = 64
    raw = np.full(int(np.prod(spec.shape)) * spec.dtype.itemsize + 2 * guard, 0xA5, np.uint8)
    place = raw[guard:-guard].view(spec.dtype).reshape(spec.shape)
    transform = transform or plan(layout.width, layout.height, spec)
    values = arguments(source, place.ctypes.data, spec, transform, smooth=smooth)
    try:
        kernel_cpu.run(values, (-(-spec.width // BLOCK[0]), -(-spec.height // BLOCK[1])))
    except kernel_cpu.Unavailable as reason:
        pytest.skip(str(reason))
    del kept
    assert (raw[:guard] == 0xA5).all(), "it wrote before the place"
    assert (raw[-guard:] == 0xA5).all(), "it wrote behind the place"
    return place


def close(found: Any, expected: Any) -> None:
    """As near as float32 is to float64; of bytes, one step where a half, of which plain bilinear has many, differs."""
    if found.dtype == np.uint8:
        difference = np.abs(found.astype(int) - expected.astype(int))
        assert difference.max() <= 1
        assert (difference > 0).mean() < 0.05
    else:
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-3 * max(1.0, float(np.abs(expected).max()) / 255))


@pytest.mark.parametrize("kind", KINDS_OF_SOURCE)
@pytest.mark.parametrize("resize", ["letterbox-center", "letterbox-topleft", "stretch", "crop"])
@pytest.mark.parametrize("smooth", [True, False])
def test_the_kernel_is_what_numpy_says(kind: PictureKind, resize: Any, smooth: bool) -> None:
    cases: Any = (("float32", "RGB", (160, 90)), ("float32", "BGR", (48, 36)), ("bgr24", "RGB", (49, 105)),
                  ("rgba", "BGR", (161, 90)))  # fmt: skip
    for pixel, color, size in cases:
        spec = InputSpec(48, 36, color, resize, 114, 1.0, MEAN, STD, pixel=pixel)
        layout = PictureLayout(kind, *size)
        picture = picture_of(layout)
        expected = reference(picture, layout, spec, smooth=smooth)
        for gaps in (False, True):
            close(kernel(picture, layout, spec, smooth=smooth, gaps=gaps), expected)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 301), (3775, 7)])
@pytest.mark.parametrize("kind", KINDS_OF_SOURCE)
def test_odd_sizes(kind: PictureKind, size: tuple[int, int]) -> None:
    spec, layout = InputSpec(64, 48), PictureLayout(kind, *size)
    picture = picture_of(layout)
    close(kernel(picture, layout, spec), reference(picture, layout, spec))


@pytest.mark.parametrize("kind", ["nv12", "yuv420p"])
@pytest.mark.parametrize(
    "colours",
    [
        {"weights": (0.2126, 0.0722), "siting": (0.5, 0.5)},
        {"full_range": True, "siting": (0.0, 0.0)},
        {"weights": (0.2627, 0.0593), "full_range": True, "siting": (0.5, 1.0)},
    ],
)
def test_colours_of_every_kind(kind: PictureKind, colours: dict[str, Any]) -> None:
    spec, layout = InputSpec(48, 36), PictureLayout(kind, 131, 77, **colours)
    picture = picture_of(layout)
    expected = reference(picture, layout, spec)
    close(kernel(picture, layout, spec), expected)
    plain = reference(picture, PictureLayout(kind, 131, 77), spec)
    assert np.abs(expected - plain).max() > 1


def test_a_picture_that_hardware_has_scaled_lies_as_the_cameras_own_would() -> None:
    spec, layout = InputSpec(48, 48), PictureLayout("nv12", 96, 54)
    whole = plan(1920, 1080, spec)
    picture = picture_of(layout)
    found = kernel(picture, layout, spec, transform=whole)
    close(found, reference(picture, layout, spec, transform=whole))
    close(found, reference(picture, layout, spec))  # its sides are in proportion


@pytest.mark.parametrize("size", [(640, 360), (77, 133)])
def test_plain_it_is_opencvs_bilinear(size: tuple[int, int]) -> None:
    layout = PictureLayout("bgr24", *size)
    flat = picture_of(layout, seed=3)
    picture = flat.reshape(size[1], size[0], 3)
    spec = InputSpec(416, 416, "BGR", pad=0)
    transform = plan(*size, spec)
    inside = (transform.resized_width, transform.resized_height)
    scaled = cv2.resize(picture.astype(np.float32), inside, interpolation=cv2.INTER_LINEAR)
    expected = np.zeros((416, 416, 3), np.float32)
    expected[transform.top :, transform.left :][: inside[1], : inside[0]] = scaled
    np.testing.assert_allclose(kernel(flat, layout, spec, smooth=False), expected.transpose(2, 0, 1), atol=0.02)


@pytest.mark.parametrize("resize", ["letterbox-center", "crop"])
@pytest.mark.parametrize(
    ("pixel_format", "matrix", "full"),
    [("bgr24", 2, False), ("rgba", 2, False), ("yuv420p", 2, False), ("nv12", 1, False), ("yuv420p", 9, False),
     ("nv12", 6, True), ("yuvj420p", 5, True), ("yuv420p", 7, False)],
)  # fmt: skip
def test_smooth_it_is_what_cameras_write_now(resize: Any, pixel_format: str, matrix: int, full: bool) -> None:
    """Within what swscale's integers round: so the accuracy that was measured with cameras holds for it as well."""
    kind: Any = {"yuvj420p": "yuv420p"}.get(pixel_format, pixel_format)
    plain = PictureLayout(kind, 768, 432)
    flat, planes, start = picture_of(plain, seed=5), [], 0
    for rows, row_bytes in plain.planes:
        planes.append((memoryview(flat[start : start + rows * row_bytes].tobytes()), row_bytes))
        start += rows * row_bytes
    frame = frame_of(pixel_format, 768, 432, planes, full_range=full)
    frame.colorspace = matrix
    pixels = AvPixels(frame)
    layout = pixels.layout()
    assert layout is not None
    assert layout.full_range == full
    picture = np.full(layout.nbytes, 7, np.uint8)
    pixels.copy_whole(picture)
    np.testing.assert_array_equal(picture, flat)
    spec = InputSpec(224, 224, "RGB", resize)
    place = np.empty(spec.shape, np.float32)
    pixels.write_into(place, spec)
    difference = np.abs(kernel(picture, layout, spec) - place)
    assert difference.mean() < 1.0
    assert difference.max() < 8.0
    aliased = np.abs(kernel(picture, layout, spec, smooth=False) - place)
    assert aliased.mean() > 4 * difference.mean()


def test_a_place_of_nv12_is_refused() -> None:
    spec = InputSpec(64, 64, pixel="nv12")
    with pytest.raises(EngineError, match="nv12") as error:
        arguments(Source("bgr24", 64, 64, 0, 192), 0, spec, plan(64, 64, spec), smooth=True)
    assert error.value.code == "letterbox_unsupported"


def test_its_arguments_are_those_of_the_source() -> None:
    head = SOURCE.read_text().partition('extern "C"')[2].partition("(")[2].partition(")")[0]
    letters = ["P" if "*" in each else "i" if "int " in each else "f" for each in head.split(",")]
    assert "".join(letters) == KINDS


@pytest.mark.parametrize("gpu", ["sm_87", pytest.param("sm_110", marks=pytest.mark.full)])
def test_nvcc_takes_it(gpu: str, tmp_path: Path) -> None:
    nvcc = next((each for each in WHERE_NVCC if each and Path(each).exists()), None)
    if nvcc is None:
        pytest.skip("there is no nvcc")
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, timeout=60).stdout.split()
    if gpu not in known:
        pytest.skip(f"this nvcc knows no {gpu}")
    command = [nvcc, f"-arch={gpu}", "-cubin", "-Werror", "all-warnings", "-Xptxas", "-v", "-o", str(tmp_path / "out")]
    done = subprocess.run([*command, str(SOURCE)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
