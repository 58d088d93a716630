"""Whole pictures beside an input buffer's places: page-locked memory that cameras' pictures are copied into.

Who writes and who runs are different threads. The memory of a place grows with the largest picture that comes for it,
and is made when the first one comes: a buffer that load never needs has none.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.tensorrt.cuda import HostMemory, try_free
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureLayout, Pixels, Transform, WholePixels
from edge_runtime.records.spec import InputSpec
from edge_runtime.vision.geometry import plan

log = logging.getLogger(__name__)

MiB = 1024 * 1024
MOST_SIDE_PX = 8192
"""A larger picture is scaled on the CPU."""
MOST_BYTES = 256 * MiB
"""Page-locked memory that an engine's pictures may take together; what does not fit is scaled on the CPU."""
_USUAL_BYTES = 1920 * 1080 * 3 // 2


def expected_bytes(places: int) -> int:
    """What an engine's pictures will take in so many places: of Full HD in nv12, since nobody knows the cameras' before
    they come, and at most MOST_BYTES."""
    return min(places * _USUAL_BYTES, MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A picture that a run is to scale into place `index`. `view` keeps its memory, whatever becomes of the buffer."""

    index: int
    layout: PictureLayout
    transform: Transform
    host: HostMemory
    view: NDArray[np.uint8]


class PictureMemory:
    """Page-locked memory for an engine's pictures, at most `most_bytes` of it. Any thread."""

    def __init__(self, owner: GpuOwner, where: str, *, mapped: bool, most_bytes: int = MOST_BYTES) -> None:
        self._owner = owner
        self._where = where
        self._mapped = mapped
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._lacking_bytes: int | None = None
        self._told = False

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def may_have(self, nbytes: int, instead_of: int) -> bool:
        """Whether there would be room for one picture in place of one of `instead_of` bytes, as far as is known."""
        with self._lock:
            if self._lacking_bytes is not None and nbytes >= self._lacking_bytes:
                return False
            if self._used_bytes - instead_of + nbytes > self._most_bytes:
                self._lack(f"they would take more than {self._most_bytes // MiB} MiB")
                return False
        return True

    def make(self, nbytes: int) -> HostMemory | None:
        """Memory for one picture; None where there is none, which is said once."""
        with self._lock:
            if self._lacking_bytes is not None and nbytes >= self._lacking_bytes:
                return None
            if self._used_bytes + nbytes > self._most_bytes:
                self._lack(f"they would take more than {self._most_bytes // MiB} MiB")
                return None
            self._used_bytes += nbytes
        try:
            return self._owner.call(lambda: self._owner.cuda.host(nbytes, self._mapped))
        except EngineError as error:
            with self._lock:
                self._used_bytes -= nbytes
                # it is not asked for again for every frame: the GPU's thread has other things to do
                self._lacking_bytes = nbytes
                self._lack(error.message)
            return None

    def give_back(self, host: HostMemory) -> None:
        """Free it when nothing views it any more."""
        with self._lock:
            self._used_bytes -= host.nbytes
        owner = self._owner
        host.let_go(lambda: owner.post(lambda: try_free(owner.cuda.free_host, host)))

    def _lack(self, why: str) -> None:
        if not self._told:
            self._told = True
            log.warning("%s: some pictures are scaled on the CPU: %s", self._where, why)


class Pictures:
    """Those of one input buffer; see engine.protocol.PicturePlaces."""

    def __init__(self, memory: PictureMemory, spec: InputSpec, places: int) -> None:
        self._memory = memory
        self._spec = spec
        self._hosts: list[HostMemory | None] = [None] * places
        self._waiting: list[Waiting | None] = [None] * places
        self._lock = threading.Lock()
        self._runs = 0
        self._released = False

    def take(self, index: int, pixels: Pixels) -> Transform | None:
        """See PicturePlaces. Raises as WholePixels' methods do."""
        with self._lock:
            self._waiting[index] = None
            runs = self._runs
        layout = pixels.layout() if isinstance(pixels, WholePixels) else None
        if layout is None or not is_for_the_gpu(layout, self._spec):
            return None
        host = self._room(index, layout.nbytes)
        if host is None:
            return None
        transform = plan(pixels.width, pixels.height, self._spec)
        view = host.first(layout.nbytes)
        assert isinstance(pixels, WholePixels)
        pixels.copy_whole(view)
        with self._lock:
            # a writer that comes after its batch has run is too late: its picture is not for the next one
            if runs == self._runs and not self._released:
                self._waiting[index] = Waiting(index, layout, transform, host, view)
        return transform

    def clear(self, index: int) -> None:
        """See PicturePlaces."""
        with self._lock:
            self._waiting[index] = None

    def begin_run(self, count: int) -> tuple[Waiting, ...]:
        """The pictures of the first `count` places, which are a run's own from now on; by place."""
        with self._lock:
            self._runs += 1
            found = tuple(each for each in self._waiting[:count] if each is not None)
            self._waiting = [None] * len(self._waiting)
        return found

    def release(self) -> None:
        """Give all memory back: what is still written into, or run, is freed after that. Idempotent."""
        with self._lock:
            self._released = True
            hosts, self._hosts = self._hosts, [None] * len(self._hosts)
            self._waiting = [None] * len(self._waiting)
        for host in hosts:
            if host is not None:
                self._memory.give_back(host)

    def _room(self, index: int, nbytes: int) -> HostMemory | None:
        """The place's memory, for a picture so large."""
        with self._lock:
            host = self._hosts[index]
            if self._released:
                return None
            if host is not None:
                if host.nbytes >= nbytes:
                    return host
                # one that comes to nothing costs the place nothing: else each smaller picture has to make it anew
                if not self._memory.may_have(nbytes, host.nbytes):
                    return None
                self._hosts[index] = None
        if host is not None:  # first: two of them may not fit
            self._memory.give_back(host)
        made = self._memory.make(nbytes)
        return None if made is None else self._keep(index, made)

    def _keep(self, index: int, made: HostMemory) -> HostMemory | None:
        """The place has it from now on, unless all was given back meanwhile: by a close, under a stuck writer."""
        with self._lock:
            if not self._released:
                self._hosts[index] = made
                return made
        self._memory.give_back(made)
        return None


def is_for_the_gpu(layout: PictureLayout, spec: InputSpec) -> bool:
    """Whether a picture is larger than the model's input, in px, and no larger than may be."""
    if max(layout.width, layout.height) > MOST_SIDE_PX:
        return False
    return layout.width * layout.height > spec.width * spec.height
