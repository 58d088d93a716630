"""Pictures in memory that two processes share: how one lies there, who may use which slot, and when it comes back.

The parent makes the memory (a memfd that cannot shrink, so that no access can fault), cuts it into slots and passes it
to the child. The child copies a decoded picture into a free slot and names the slot in a message; the parent looks at
it in place, and returns the slot with a byte on a pipe once its last reference is gone. Both hand-overs go through the
kernel, whose locks order the accesses to the pixels on any processor: nothing here relies on the order in which two
processes see each other's stores.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

SLOTS = 8
"""Slots of a memory. One that was never used costs address space only, and the child takes the lowest that is free."""
SLOTS_KEPT_FREE = 4
"""With no more than so many not in use here, a picture is copied out and its slot goes back at once: slow models, or
somebody who collects pictures, cannot leave the child without a slot."""
MAX_PICTURE_BYTES = 1 << 27
"""The largest picture that is handed over: 8K in four bytes a pixel."""
MAX_SIDE_PX = 16384
ASK = 255
"""On the pipe that returns slots: the reader wants one more picture."""

# swscale may read a little past the last row.
_PADDING_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

_PlaneForm = tuple[int, int, int]  # bytes a step, right shifts of width and height that give the number of steps


def _chroma(shift_x: int, shift_y: int, sample: int = 1) -> tuple[_PlaneForm, ...]:
    return ((sample, 0, 0), (sample, shift_x, shift_y), (sample, shift_x, shift_y))


_PLANAR = {"420": (1, 1), "422": (1, 0), "444": (0, 0), "440": (0, 1), "411": (2, 0), "410": (2, 2)}
PIXEL_FORMATS: dict[str, tuple[_PlaneForm, ...]] = {
    **{f"yuv{name}p": _chroma(*shifts) for name, shifts in _PLANAR.items()},
    **{f"yuvj{name}p": _chroma(*_PLANAR[name]) for name in ("420", "422", "444", "440", "411")},
    **{f"yuv{name}p{bits}le": _chroma(*_PLANAR[name], 2) for name in ("420", "422", "444", "440") for bits in (10, 12)},
    **dict.fromkeys(("nv12", "nv21"), ((1, 0, 0), (2, 1, 1))),
    "nv16": ((1, 0, 0), (2, 1, 0)),
    "p010le": ((2, 0, 0), (4, 1, 1)),
    **dict.fromkeys(("yuyv422", "uyvy422", "yvyu422"), ((4, 1, 0),)),
    "yuva420p": (*_chroma(1, 1), (1, 0, 0)),
    "gray": ((1, 0, 0),),
    **dict.fromkeys(("gray10le", "gray12le", "gray16le"), ((2, 0, 0),)),
    **dict.fromkeys(("rgb24", "bgr24"), ((3, 0, 0),)),
    **dict.fromkeys(("rgba", "bgra", "argb", "abgr", "rgb0", "bgr0", "0rgb", "0bgr"), ((4, 0, 0),)),
    "gbrp": ((1, 0, 0),) * 3,
    "gbrap": ((1, 0, 0),) * 4,
}
"""What may be handed over: FFmpeg's name, and how each plane lies. Anything else is handed over as RGB."""


@dataclass(frozen=True, slots=True)
class PictureForm:
    """A picture in a slot: its planes one after the other, their rows without gaps.

    `matrix` and `range` are FFmpeg's numbers (AVCOL_SPC_..., AVCOL_RANGE_...), `siting` that of AVCHROMA_LOC_...: where
    the chroma samples lie. `turn`: what makes it upright (see `place.Orientation`). `shown`: the camera's own upright
    width and height in px.
    """

    pixel_format: str
    width: int
    height: int
    matrix: int = 2
    range: int = 0
    siting: int = 0
    interlaced: bool = False
    turn: tuple[bool, bool, bool] = (False, False, False)
    shown: tuple[int, int] | None = None

    def planes(self) -> list[tuple[int, int]]:
        """(rows, bytes a row) of each plane. Raises KeyError for a format that is not in PIXEL_FORMATS."""
        return [
            (-(-self.height >> shift_y), step * -(-self.width >> shift_x))
            for step, shift_x, shift_y in PIXEL_FORMATS[self.pixel_format]
        ]

    @property
    def size_bytes(self) -> int:
        return sum(rows * row_bytes for rows, row_bytes in self.planes())


class Returns:
    """The parent's end of the pipe on which slots go back.

    A picture can end on any thread, inside of anything, even of this class: so the lock may be taken again by the one
    that holds it. With it no byte can go to a descriptor that was closed and is somebody else's by now.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor: int | None = descriptor
        self.lock = threading.RLock()

    def write(self, byte: int) -> None:
        """A slot's number, or ASK. Without effect where nobody reads any more."""
        with self.lock:
            if self._descriptor is not None:
                # full: the child has not looked for 64 Ki slots, and will be ended for it
                with contextlib.suppress(OSError):
                    os.write(self._descriptor, bytes((byte,)))

    def close(self) -> None:
        with self.lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


class SlotMemory:
    """The parent's side: makes the memory and looks at pictures in it.

    Pictures may outlive it: the mapping, and the descriptor that Python's mmap keeps with it, go with the last of them.
    Raises OSError where memory cannot be had.
    """

    def __init__(self, picture_bytes: int, returns: Returns) -> None:
        self.slot_bytes = math.ceil((picture_bytes + _PADDING_BYTES) / mmap.PAGESIZE) * mmap.PAGESIZE
        self.descriptor = os.memfd_create("camera-frames", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, SLOTS * self.slot_bytes)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            mapped = mmap.mmap(self.descriptor, SLOTS * self.slot_bytes, access=mmap.ACCESS_READ)
        except BaseException:
            self.close()
            raise
        self._whole: Bytes = np.frombuffer(mapped, np.uint8)
        self._returns = returns
        self._retired = False
        self._held: dict[int, weakref.ref[Bytes]] = {}

    @property
    def picture_bytes(self) -> int:
        """The largest picture that fits a slot."""
        return self.slot_bytes - _PADDING_BYTES

    def look(self, slot: int, size_bytes: int) -> Bytes:
        """The first bytes of a slot, read-only. The slot goes back when the last reference to the array is gone. Where
        few are left this is a copy, and it goes back at once. Raises ValueError where there is no such slot, or it is
        too small or in use here.
        """
        if not 0 <= slot < SLOTS or slot in self._held or not 0 < size_bytes <= self.picture_bytes:
            raise ValueError(f"slot {slot} with {size_bytes} bytes, which it cannot have")
        start = slot * self.slot_bytes
        array = self._whole[start : start + size_bytes]
        if SLOTS - len(self._held) <= SLOTS_KEPT_FREE:
            copy = np.empty(size_bytes + _PADDING_BYTES, np.uint8)
            copy[:size_bytes] = array
            self._give_back(slot)
            return copy[:size_bytes]
        # The reference is kept in `_held`: once this memory is gone nobody waits for its slots.
        self._held[slot] = weakref.ref(array, functools.partial(self._ended, slot))
        return array

    @property
    def held(self) -> int:
        """Number of slots that pictures still use here."""
        return len(self._held)

    def _ended(self, slot: int, _: weakref.ref[Bytes]) -> None:
        self._held.pop(slot, None)
        self._give_back(slot)

    def _give_back(self, slot: int) -> None:
        with self._returns.lock:
            if not self._retired:
                self._returns.write(slot)

    def retire(self) -> None:
        """Another memory takes its place, or the child is gone: its slots go back no more."""
        with self._returns.lock:
            self._retired = True
        self._whole = np.empty(0, np.uint8)
        self.close()

    def close(self) -> None:
        """Close the descriptor, once the child has its own."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class SlotWriter:
    """The child's side of a memory: the slots that are free, and the way into them."""

    def __init__(self, descriptor: int, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.free = set(range(SLOTS))
        self._memory: Bytes = np.frombuffer(mmap.mmap(descriptor, SLOTS * slot_bytes), np.uint8)
        os.close(descriptor)

    def fits(self, form: PictureForm) -> bool:
        return form.size_bytes + _PADDING_BYTES <= self.slot_bytes

    def put(self, form: PictureForm, planes: Sequence[Bytes]) -> int:
        """Copy a picture into the lowest free slot, which is returned. `planes`: [rows, at least the bytes of a row].

        Raises KeyError where no slot is free.
        """
        if not self.free:
            raise KeyError("no slot is free")
        slot = min(self.free)
        self.free.remove(slot)
        start = slot * self.slot_bytes
        for (rows, row_bytes), plane in zip(form.planes(), planes, strict=True):
            end = start + rows * row_bytes
            self._memory[start:end].reshape(rows, row_bytes)[:] = plane[:rows, :row_bytes]
            start = end
        return slot
