"""Pictures handed over whole: what real streams are said to be is what the scaler of the CPU makes of them."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest

from edge_runtime.camera.av_pixels import AvPixels, frame_of
from edge_runtime.camera.av_raw import Assembler, Disassembler
from edge_runtime.camera.synthetic import SyntheticPixels
from edge_runtime.camera.whole import kind_of, layout_of
from edge_runtime.engine.tensorrt.letterbox import reference
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import PictureLayout, WholePixels
from edge_runtime.records.spec import InputSpec
from tests.camera.clips import encode
from tests.camera.test_shared_frames import ENCODINGS, busy_pictures, decoded

SPEC = InputSpec(64, 64)
WHOLE = {"h264 4:2:0", "h264 4:2:0, full range", "mjpeg 4:2:0"}


def handed_over(pixels: AvPixels, layout: PictureLayout) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    picture = np.full(layout.nbytes, 0xA5, np.uint8)
    pixels.copy_whole(picture)
    return picture


@pytest.mark.parametrize("case", ENCODINGS)
def test_it_is_to_a_gpu_what_it_is_to_the_cpu(case: str, tmp_path: Path) -> None:
    codec, pixel_format, container, options = ENCODINGS[case]
    path = encode(
        tmp_path / f"x.{container}", busy_pictures(2, 192, 96), codec=codec, pix_fmt=pixel_format, options=options
    )
    for pixels in decoded(path):
        layout = pixels.layout()
        assert (layout is not None) == (case in WHOLE)
        if layout is None:
            with pytest.raises(CameraError):
                pixels.copy_whole(np.empty(1, np.uint8))
            continue
        picture = handed_over(pixels, layout)
        place = np.empty(SPEC.shape, np.float32)
        transform = pixels.write_into(place, SPEC)
        difference = np.abs(reference(picture, layout, SPEC, transform=transform) - place)
        assert difference.mean() < 0.3
        assert difference.max() < 4
        # and through memory that two processes share
        form, planes = Disassembler().take_apart(pixels)
        data = np.concatenate([p[:rows, :n].ravel() for p, (rows, n) in zip(planes, form.planes(), strict=True)])
        shared = Assembler().assemble(form, data)
        assert shared.layout() == layout
        np.testing.assert_array_equal(handed_over(shared, layout), picture)


@pytest.mark.parametrize("name", ["nv12", "yuv420p", "bgr24", "rgba"])
@pytest.mark.parametrize("size", [(64, 48), (33, 17)])
def test_rows_are_copied_without_gaps(name: str, size: tuple[int, int]) -> None:
    layout = PictureLayout(name, *size)  # type: ignore[arg-type]
    flat, planes, start = np.random.default_rng(3).integers(0, 255, layout.nbytes, np.uint8), [], 0
    for rows, row_bytes in layout.planes:
        wide = np.full((rows, row_bytes + 64), 7, np.uint8)
        wide[:, :row_bytes] = flat[start : start + rows * row_bytes].reshape(rows, row_bytes)
        planes.append((memoryview(wide.tobytes()), row_bytes + 64))
        start += rows * row_bytes
    pixels = AvPixels(frame_of(name, *size, planes))
    assert isinstance(pixels, WholePixels)
    np.testing.assert_array_equal(handed_over(pixels, layout), flat)


def test_what_a_picture_that_was_scaled_in_hardware_is() -> None:
    frame = av.VideoFrame(96, 54, "nv12")
    layout = AvPixels(frame, (1920, 1080)).layout()
    assert layout is not None
    assert (layout.width, layout.height) == (96, 54)


def test_what_is_not_handed_over() -> None:
    assert not isinstance(SyntheticPixels(1, 64, 48), WholePixels)
    assert kind_of("yuv420p", interlaced=True) is None
    assert kind_of("rgba", interlaced=True) == "rgba"
    assert kind_of("p010le", interlaced=False) is None
    # colours that no matrix of three by three makes
    assert layout_of("nv12", "nv12", 4, 4, matrix=8, colour_range=1, siting=0) is None
