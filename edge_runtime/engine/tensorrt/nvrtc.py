"""NVRTC, CUDA's compiler as a library: makes a kernel for the GPU that is here, whichever door reaches it.

Through ctypes: PyCUDA's own compiler needs nvcc and a host compiler on the path, and cuda.bindings is not always there.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edge_runtime.durable import write_atomic
from edge_runtime.engine.tensorrt.api import NvrtcLibrary
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

_OLDEST_MAJOR = 11
_FOLDERS = ("", "/usr/local/cuda/lib64/", "/usr/local/cuda/targets/aarch64-linux/lib/")
_OPTIONS = ("--std=c++14", "--fmad=true")


def kernel_image(folder: Path, source: Path, here: Here, *, load: Callable[[str], Any] = ctypes.CDLL) -> bytes:
    """The compiled kernels of a source file for this device: kept in `folder`, by the source, how it is compiled, the
    GPU and the driver.

    Raises EngineError: see compile_kernels.
    """
    text = source.read_text("utf-8")
    digest = hashlib.sha256("\0".join((text, *_OPTIONS)).encode()).hexdigest()[:16]
    kept = folder / f"{source.stem}-{digest}-{here.compute_capability}-{here.driver}.cubin"
    try:
        known, _, image = kept.read_bytes().partition(b"\n")
        if image and hashlib.sha256(image).hexdigest().encode() == known:
            return image
    except OSError:
        pass
    image = compile_kernels(text, source.name, here, load=load)
    try:
        folder.mkdir(exist_ok=True)
        write_atomic(kept, hashlib.sha256(image).hexdigest().encode() + b"\n" + image)
    except OSError as error:
        log.info("%s is compiled again at the next start: it cannot be kept: %s", source.name, error.strerror)
    return image


def compile_kernels(source: str, name: str, here: Here, *, load: Callable[[str], Any] = ctypes.CDLL) -> bytes:
    """A cubin of this CUDA source for the GPU of `here`; `name` stands in messages.

    Raises EngineError: "nvrtc_missing" where the library is not there, "kernel_invalid" with its own words.
    """
    library: NvrtcLibrary = _library(here, load)
    program = ctypes.c_void_p()
    _do(
        library,
        "nvrtcCreateProgram",
        library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None),
    )
    try:
        options = [each.encode() for each in (f"-arch=sm_{here.compute_capability.replace('.', '')}", *_OPTIONS)]
        answer = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if answer:
            raise EngineError(
                f"{name} does not compile for compute capability {here.compute_capability}: {_log(library, program)}",
                code="kernel_invalid",
                where="NVRTC",
                remedy="report this with the versions of CUDA and of the driver",
            )
        size = ctypes.c_size_t()
        _do(library, "nvrtcGetCUBINSize", library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        _do(library, "nvrtcGetCUBIN", library.nvrtcGetCUBIN(program, image))
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _library(here: Here, load: Callable[[str], Any]) -> NvrtcLibrary:
    """That of the driver's own CUDA, else an older one: what a newer compiler makes, a driver need not load."""
    newest = int(here.driver.partition(".")[0])
    reasons = []
    for major in range(newest, _OLDEST_MAJOR - 1, -1):
        for folder in _FOLDERS:
            try:
                return load(f"{folder}libnvrtc.so.{major}")
            except OSError as error:  # noqa: PERF203  a handful of names
                reasons.append(str(error))
    raise EngineError(
        f"there is no NVRTC of CUDA {newest} or older: {reasons[0] if reasons else f'CUDA {here.driver} is too old'}",
        code="nvrtc_missing",
        where="NVRTC",
        remedy=f"install JetPack's package cuda-nvrtc-{here.driver.replace('.', '-')}: docs/jetson.md",
    )


def _log(library: NvrtcLibrary, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    if library.nvrtcGetProgramLogSize(program, ctypes.byref(size)) or not size.value:
        return "it says no reason"
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return " ".join(text.value.decode("utf-8", "replace").split())[:500]


def _do(library: NvrtcLibrary, call: str, answer: int) -> None:
    if answer:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        words = library.nvrtcGetErrorString(answer) or b"no words"
        raise EngineError(f"{call} failed: {bytes(words).decode()} ({answer})", code="kernel_invalid", where="NVRTC")
