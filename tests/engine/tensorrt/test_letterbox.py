"""The letterbox kernel: the same source as the GPU's, compiled for the CPU, against numpy, OpenCV and swscale."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.engine.tensorrt.letterbox import BLOCK, KINDS, SOURCE, Source, SourceKind, arguments, reference
from edge_runtime.errors import EngineError
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan
from tests.engine.tensorrt import kernel_cpu

KINDS_OF_SOURCE: tuple[SourceKind, ...] = ("bgr24", "rgba", "nv12")
MEAN, STD = (123.0, 117.0, 104.0), (58.0, 57.0, 57.5)
WHERE_NVCC = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]


def planes_of(kind: SourceKind, width: int, height: int, seed: int = 1) -> tuple[NDArray[np.uint8], ...]:
    """A random picture: smooth with noise, so that a wrong pixel and a wrong mean both show."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    base = 127 + 90 * np.sin(columns / 17 + seed)[..., None] * np.cos(rows / 13)[..., None]
    picture = np.clip(base + random.normal(0, 25, (height, width, 4)), 0, 255).astype(np.uint8)
    if kind == "bgr24":
        return (np.ascontiguousarray(picture[..., :3]),)
    if kind == "rgba":
        return (picture,)
    chroma = random.integers(60, 200, (-(-height // 2), -(-width // 2), 2), np.uint8)
    return np.ascontiguousarray(picture[..., 0]), chroma


def kernel(planes: tuple[NDArray[np.uint8], ...], kind: SourceKind, spec: InputSpec, *, smooth: bool = True) -> Any:
    """What the kernel writes into a place that held rubbish, from rows with rubbish behind them."""
    padded = []
    for plane in planes:
        rows = plane.reshape(plane.shape[0], -1)
        wide = np.full((rows.shape[0], rows.shape[1] + 40), 255, np.uint8)
        wide[:, : rows.shape[1]] = rows
        padded.append(wide)
    height, width = planes[0].shape[:2]
    chroma = (padded[1].ctypes.data, padded[1].shape[1]) if kind == "nv12" else (0, 0)
    source = Source(kind, width, height, padded[0].ctypes.data, padded[0].shape[1], *chroma)
    guard = 64
    raw = np.full(int(np.prod(spec.shape)) * spec.dtype.itemsize + 2 * guard, 0xA5, np.uint8)
    place = raw[guard:-guard].view(spec.dtype).reshape(spec.shape)
    transform = plan(width, height, spec)
    values = arguments(source, place.ctypes.data, spec, transform, smooth=smooth)
    try:
        kernel_cpu.run(values, (-(-spec.width // BLOCK[0]), -(-spec.height // BLOCK[1])))
    except kernel_cpu.Unavailable as reason:
        pytest.skip(str(reason))
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
def test_the_kernel_is_what_numpy_says(kind: SourceKind, resize: Any, smooth: bool) -> None:
    cases: Any = (("float32", "RGB", (160, 90)), ("float32", "BGR", (48, 36)), ("bgr24", "RGB", (49, 105)),
                  ("rgba", "BGR", (161, 90)))  # fmt: skip
    for pixel, color, size in cases:
        spec = InputSpec(48, 36, color, resize, 114, 1.0, MEAN, STD, pixel=pixel)
        planes = planes_of(kind, *size)
        close(kernel(planes, kind, spec, smooth=smooth), reference(planes, kind, spec, smooth=smooth))


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (2, 301), (3775, 7)])
@pytest.mark.parametrize("kind", KINDS_OF_SOURCE)
def test_odd_sizes(kind: SourceKind, size: tuple[int, int]) -> None:
    spec = InputSpec(64, 48)
    planes = planes_of(kind, *size)
    close(kernel(planes, kind, spec), reference(planes, kind, spec, smooth=True))


@pytest.mark.parametrize("size", [(640, 360), (77, 133)])
def test_plain_it_is_opencvs_bilinear(size: tuple[int, int]) -> None:
    (picture,) = planes_of("bgr24", *size, seed=3)
    spec = InputSpec(416, 416, "BGR", pad=0)
    transform = plan(*size, spec)
    inside = (transform.resized_width, transform.resized_height)
    scaled = cv2.resize(picture.astype(np.float32), inside, interpolation=cv2.INTER_LINEAR)
    expected = np.zeros((416, 416, 3), np.float32)
    expected[transform.top :, transform.left :][: inside[1], : inside[0]] = scaled
    np.testing.assert_allclose(kernel((picture,), "bgr24", spec, smooth=False), expected.transpose(2, 0, 1), atol=0.02)


@pytest.mark.parametrize("resize", ["letterbox-center", "crop"])
def test_smooth_it_is_what_cameras_write_now(resize: Any) -> None:
    """Within what swscale's integers round: so the accuracy that was measured with cameras holds for it as well."""
    (picture,) = planes_of("bgr24", 768, 432, seed=5)
    spec = InputSpec(224, 224, "RGB", resize)
    place = np.empty(spec.shape, np.float32)
    AvPixels(av.VideoFrame.from_ndarray(picture, "bgr24")).write_into(place, spec)
    difference = np.abs(kernel((picture,), "bgr24", spec) - place)
    assert difference.mean() < 1.0
    assert difference.max() < 8.0
    aliased = np.abs(kernel((picture,), "bgr24", spec, smooth=False) - place)
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
