"""The letterbox kernel of this process: compiled when it is first wanted, tried once, kept until the GPU is let go."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from edge_runtime.engine.tensorrt.cuda import Cuda, CudaFatal
from edge_runtime.engine.tensorrt.letterbox import (
    SOURCE,
    LetterboxKernel,
    reference,
    require_supported,
    source_of,
)
from edge_runtime.engine.tensorrt.nvrtc import kernel_image
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError
from edge_runtime.records.frames import PictureLayout
from edge_runtime.records.spec import InputSpec

log = logging.getLogger(__name__)

Letterbox: TypeAlias = Literal["auto", "cpu", "gpu"]

_TRIAL = PictureLayout("nv12", 70, 50)
_TRIAL_SPEC = InputSpec(32, 32)
MOST_LEVELS = 0.1
"""How far a value of the kernel may be from what numpy says, in levels of 0-255."""


class Scaler:
    """Any thread. `folder` keeps the compiled kernel; `load` finds libraries."""

    def __init__(self, owner: GpuOwner, here: Here, folder: Path, *, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._owner = owner
        self._here = here
        self._folder = folder
        self._load = load
        self._lock = threading.Lock()
        self._kernel: LetterboxKernel | None = None
        self._lack: EngineError | None = None

    def kernel_for(self, spec: InputSpec, wanted: Letterbox, where: str) -> LetterboxKernel | None:
        """What scales pictures into places of `spec`; None where the CPU does, and with "auto" the log says why.

        Raises EngineError with "gpu" where it cannot be had: "letterbox_unsupported", "letterbox_wrong", and what
        nvrtc.kernel_image and CUDA say; CudaFatal.
        """
        if wanted == "cpu":
            return None
        try:
            require_supported(spec)
            return self._get()
        except CudaFatal:
            raise
        except EngineError as error:
            if wanted == "gpu":
                raise EngineError(
                    f"the GPU cannot scale pictures: {error.message}",
                    code=error.code,
                    where=where,
                    remedy=f'{error.remedy or "see the log"}; or set letterbox = "auto"',
                ) from None
            log.info("%s: pictures are scaled on the CPU: %s", where, error.message)
            return None

    def _get(self) -> LetterboxKernel:
        """Made now where it was not before. Raises EngineError, again and again."""
        with self._lock:
            if self._kernel is None and self._lack is None:
                try:
                    self._kernel = self._make()
                except CudaFatal:
                    raise
                except EngineError as error:
                    self._lack = error.with_traceback(None)
            if self._kernel is None:
                lack = self._lack
                assert lack is not None
                raise EngineError(lack.message, code=lack.code, where=lack.where, remedy=lack.remedy)
            return self._kernel

    def _make(self) -> LetterboxKernel:
        image = kernel_image(self._folder, SOURCE, self._here, load=self._load)
        return self._owner.call(lambda: self._load_and_try(image))

    def _load_and_try(self, image: bytes) -> LetterboxKernel:
        """On the owner's thread."""
        cuda = self._owner.cuda
        kernel = LetterboxKernel(cuda, image)
        try:
            off = _levels_off(cuda, kernel)
            if not off <= MOST_LEVELS:
                raise EngineError(
                    f"the letterbox kernel is wrong on this GPU: {off:.3g} levels off",
                    code="letterbox_wrong",
                    where="GPU",
                    remedy="report this with the versions of CUDA and of the driver",
                )
        except CudaFatal:
            raise
        except BaseException:
            kernel.close()
            raise
        # what was adopted last is closed first: engines that use it, which are loaded later
        self._owner.adopt(kernel)
        return kernel


def _levels_off(cuda: Cuda, kernel: LetterboxKernel) -> float:
    """The largest difference of a small picture from what numpy says; infinite where it is no number."""
    noise = np.random.default_rng(11).integers(20, 230, _TRIAL.nbytes, np.uint8)
    nbytes = int(np.prod(_TRIAL_SPEC.shape)) * _TRIAL_SPEC.dtype.itemsize
    free: list[Callable[[], object]] = []
    try:
        stream = cuda.stream()
        free.append(lambda: cuda.free_stream(stream))
        there = cuda.host(_TRIAL.nbytes)
        free.append(lambda: cuda.free_host(there))
        back = cuda.host(nbytes)
        free.append(lambda: cuda.free_host(back))
        source = cuda.allocate(_TRIAL.nbytes)
        free.append(lambda: cuda.free(source))
        place = cuda.allocate(nbytes)
        free.append(lambda: cuda.free(place))
        there.array[:] = noise
        cuda.copy_in(source.address, there, _TRIAL.nbytes, stream)
        kernel.enqueue(source_of(_TRIAL, source.address), place.address, _TRIAL_SPEC, stream)
        cuda.copy_out(back, place.address, nbytes, stream)
        cuda.synchronise(stream)
        found = np.array(back.array).view(_TRIAL_SPEC.dtype).reshape(_TRIAL_SPEC.shape)
    finally:
        for each in reversed(free):
            each()
    difference = np.abs(found.astype(np.float64) - reference(noise, _TRIAL, _TRIAL_SPEC))
    return float(difference.max()) if np.isfinite(difference).all() else float("inf")
