"""Pictures in shared memory: as they were decoded, for as long as anybody looks at them, and no longer."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.av_raw import Assembler, Disassembler, siting_of
from edge_runtime.camera.shared_frames import (
    ASK,
    PIXEL_FORMATS,
    SLOTS,
    SLOTS_KEPT_FREE,
    Bytes,
    PictureForm,
    Returns,
    SlotMemory,
    SlotWriter,
)
from edge_runtime.camera.synthetic import SyntheticPixels, read_number
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec
from tests.camera.clips import encode, image

SPECS = (InputSpec(64, 64), InputSpec(96, 80, resize="stretch", color="BGR"))


def busy_pictures(count: int, width: int, height: int, seed: int = 0) -> list[Bytes]:
    """RGB pictures with edges and colours everywhere: chroma that is half a pixel off shows."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (count, height // 6 + 1, width // 6 + 1, 3), np.uint8)
    return [np.kron(each, np.ones((6, 6, 1), np.uint8))[:height, :width] for each in small]


def decoded(path: Path) -> list[AvPixels]:
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "NONE"
        return [AvPixels(frame) for frame in container.decode(video=0)]


def drawn(pixels: Pixels) -> list[Any]:
    """What models get to see of a picture."""
    places = [np.full(spec.shape, np.nan, np.float32) for spec in SPECS]
    transforms = [pixels.write_into(place, spec) for place, spec in zip(places, SPECS, strict=True)]
    return [*transforms, *(place.tobytes() for place in places)]


class Pair:
    """Both sides of one memory, and the pipe between them."""

    def __init__(self, picture_bytes: int) -> None:
        self.pipe, writing = os.pipe()
        os.set_blocking(self.pipe, False)
        self.returns = Returns(writing)
        self.memory = SlotMemory(picture_bytes, self.returns)
        self.writer = SlotWriter(os.dup(self.memory.descriptor), self.memory.slot_bytes)
        self.memory.close()

    def returned(self) -> list[int]:
        try:
            return list(os.read(self.pipe, 4096))
        except BlockingIOError:
            return []

    def close(self) -> None:
        self.memory.retire()
        self.returns.close()
        os.close(self.pipe)
        del self.writer


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair(192 * 96 * 4)
    yield pair
    pair.close()


def through(pair: Pair, pixels: Pixels) -> AvPixels:
    form, planes = Disassembler().take_apart(pixels)
    slot = pair.writer.put(form, planes)
    return Assembler().assemble(form, pair.memory.look(slot, form.size_bytes))


@pytest.mark.parametrize("name", PIXEL_FORMATS)
@pytest.mark.parametrize("size", [(64, 32), (33, 17)])
def test_every_format_lies_as_ffmpeg_says(name: str, size: tuple[int, int]) -> None:
    form = PictureForm(name, *size)
    data = np.random.default_rng(1).integers(0, 256, form.size_bytes, np.uint8)
    frame = Assembler().assemble(form, data).frame
    start = 0
    for (rows, row_bytes), plane in zip(form.planes(), frame.planes, strict=True):
        lines: Any = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        assert len(lines) == rows
        assert (lines[:, :row_bytes].ravel() == data[start : start + rows * row_bytes]).all()
        start += rows * row_bytes
    again, planes = Disassembler().take_apart(AvPixels(frame))
    assert (again.pixel_format, again.width, again.height) == (name, *size)
    assert np.concatenate(
        [p[:rows, :n].ravel() for p, (rows, n) in zip(planes, form.planes(), strict=True)]
    ).tobytes() == (data.tobytes())


ENCODINGS = {
    "h264 4:2:0": ("libx264", "yuv420p", "mp4", {}),
    "h264 4:2:0, full range": ("libx264", "yuvj420p", "mp4", {}),
    "h264 4:2:2": ("libx264", "yuv422p", "mp4", {}),
    "h264 4:4:4": ("libx264", "yuv444p", "mp4", {}),
    "h264 interlaced": ("libx264", "yuv420p", "mp4", {"x264-params": "tff=1"}),
    "h264 10 bits": ("libx264", "yuv420p10le", "mp4", {}),
    "mjpeg 4:2:0": ("mjpeg", "yuvj420p", "avi", {}),
    "mjpeg 4:2:2": ("mjpeg", "yuvj422p", "avi", {}),
    "mjpeg 4:4:4": ("mjpeg", "yuvj444p", "avi", {}),
    "ffv1 bgra": ("ffv1", "bgra", "mkv", {}),
    "ffv1 grey": ("ffv1", "gray", "mkv", {}),
}


@pytest.mark.parametrize("case", ENCODINGS)
def test_a_picture_is_to_models_what_it_was_to_its_decoder(case: str, tmp_path: Path, pair: Pair) -> None:
    codec, pixel_format, container, options = ENCODINGS[case]
    path = encode(
        tmp_path / f"x.{container}",
        busy_pictures(3, 192, 96),
        codec=codec,
        pix_fmt=pixel_format,
        options=options,
    )
    pictures = decoded(path)
    assert len(pictures) == 3
    for pixels in pictures:
        assert drawn(through(pair, pixels)) == drawn(pixels)


@pytest.mark.parametrize("size", [(98, 54), (97, 53), (130, 2), (16, 16)])
def test_odd_sizes_too(size: tuple[int, int], tmp_path: Path, pair: Pair) -> None:
    for pixels in decoded(encode(tmp_path / "x.avi", busy_pictures(2, *size), codec="mjpeg", pix_fmt="yuvj420p")):
        assert drawn(through(pair, pixels)) == drawn(pixels)


def test_where_the_chroma_lies_is_found_out(tmp_path: Path) -> None:
    """Not an idle question: taken for the wrong one, a picture differs where it has coloured edges."""
    (left, *_) = decoded(encode(tmp_path / "x.mp4", busy_pictures(2, 192, 96)))
    (centre, *_) = decoded(encode(tmp_path / "x.avi", busy_pictures(2, 192, 96), codec="mjpeg", pix_fmt="yuvj420p"))
    assert (siting_of(left.frame), siting_of(centre.frame)) == (1, 2)
    form, planes = Disassembler().take_apart(left)
    data = np.concatenate([p[:rows, :n].ravel() for p, (rows, n) in zip(planes, form.planes(), strict=True)])
    wrong = Assembler().assemble(PictureForm(form.pixel_format, 192, 96, form.matrix, form.range, 2), data)
    assert drawn(wrong) != drawn(left)


def test_a_turn_and_a_camera_s_own_size_come_along(pair: Pair) -> None:
    data = np.random.default_rng(2).integers(0, 256, 192 * 96, np.uint8)
    turned = Assembler().assemble(PictureForm("gray", 192, 96, turn=(True, False, True)), data)
    assert (turned.width, turned.height) == (96, 192)
    assert drawn(through(pair, turned)) == drawn(turned)
    scaled = Assembler().assemble(PictureForm("gray", 192, 96, shown=(1920, 960)), data)
    there = through(pair, scaled)
    assert (there.width, there.height) == (1920, 960)
    assert drawn(there) == drawn(scaled)


def test_other_pixels_come_as_rgb(pair: Pair) -> None:
    assert read_number(through(pair, SyntheticPixels(77, 96, 48)).to_rgb()) == 77
    with_palette = av.CodecContext.create("png", "r").decode(av.Packet(image(busy_pictures(1, 64, 32)[0])))
    pixels = AvPixels(with_palette[0].reformat(format="rgb8"))
    assert (through(pair, pixels).to_rgb() == pixels.to_rgb()).all()


def test_a_slot_comes_back_with_the_last_reference_and_only_then(pair: Pair) -> None:
    gc.disable()
    try:
        pixels = through(pair, SyntheticPixels(1, 96, 48))
        frame = pixels.frame
        plane: Any = memoryview(frame.planes[0])
        drawn(pixels)
        del pixels, frame
        assert (pair.returned(), pair.memory.held) == ([], 1)
        del plane
        assert (pair.returned(), pair.memory.held) == ([0], 0)
    finally:
        gc.enable()


def test_pictures_that_are_kept_stay_as_they_are(pair: Pair) -> None:
    """However many, in whatever order they end, while their slots are used again."""
    rng = random.Random(5)
    kept: list[tuple[int, AvPixels]] = []
    assembler = Assembler()
    views = 0
    for number in range(600):
        pair.writer.free.update(pair.returned())
        form, planes = Disassembler().take_apart(SyntheticPixels(number, 96, 48))
        slot = pair.writer.put(form, planes)  # raises where none is free
        kept.append((number, assembler.assemble(form, pair.memory.look(slot, form.size_bytes))))
        views = max(views, pair.memory.held)
        while kept and rng.random() < 0.48:
            of, pixels = kept.pop(rng.randrange(len(kept)))
            assert read_number(pixels.to_rgb()) == of
            del pixels
    assert views == SLOTS - SLOTS_KEPT_FREE
    assert len(kept) > SLOTS
    assert [read_number(pixels.to_rgb()) for _, pixels in kept] == [number for number, _ in kept]


def test_pictures_outlive_their_memory_and_then_return_nothing(pair: Pair) -> None:
    pixels = through(pair, SyntheticPixels(9, 96, 48))
    pair.memory.retire()
    pair.memory = SlotMemory(10, pair.returns)
    assert read_number(pixels.to_rgb()) == 9
    del pixels
    assert pair.returned() == []
    pair.returns.write(ASK)
    assert pair.returned() == [ASK]


def test_nothing_is_written_to_a_descriptor_that_became_another(pair: Pair) -> None:
    pixels = through(pair, SyntheticPixels(9, 96, 48))
    pair.returns.close()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    try:
        del pixels
        with pytest.raises(BlockingIOError):
            os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def test_the_memory_cannot_be_taken_away() -> None:
    reading, writing = os.pipe()
    returns = Returns(writing)
    memory = SlotMemory(1000, returns)
    try:
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(memory.descriptor, size)
    finally:
        memory.retire()
        returns.close()
        os.close(reading)


@pytest.mark.parametrize(("slot", "size"), [(-1, 10), (SLOTS, 10), (0, 0), (0, 1 << 20), (3, 10)])
def test_a_slot_that_cannot_be_is_refused(pair: Pair, slot: int, size: int) -> None:
    held = pair.memory.look(3, 100)
    with pytest.raises(ValueError, match="cannot have"):
        pair.memory.look(slot, size)
    assert held.size == 100
