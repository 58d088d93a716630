"""A fake of NVRTC's library: it gives every program the image that the fake machines know."""

from __future__ import annotations

import ctypes
from typing import Any

from edge_runtime.engine.tensorrt.letterbox import NAME
from tests.engine.tensorrt.fake_parts import CUBIN

IMAGE = CUBIN + NAME.encode()


def _words(answer: int) -> bytes:
    return b"NVRTC_ERROR_OUT_OF_MEMORY"


class FakeNvrtc:
    """Enough of the library to be compiled with; `answers` are its calls' error numbers."""

    def __init__(self, **answers: int) -> None:
        self.answers = answers
        self.options: list[bytes] = []
        self.open = 0
        self.nvrtcGetErrorString = _words  # ctypes' functions take attributes, and so do plain ones

    def nvrtcCreateProgram(self, program: Any, *source: Any) -> int:  # noqa: N802
        self.open += not self.answers.get("create")
        return self.answers.get("create", 0)

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:  # noqa: N802
        self.options = list(options)
        return self.answers.get("compile", 0)

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = len(IMAGE)
        return self.answers.get("size", 0)

    def nvrtcGetCUBIN(self, program: Any, image: Any) -> int:  # noqa: N802
        ctypes.memmove(image, IMAGE, len(IMAGE))
        return 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:  # noqa: N802
        size._obj.value = 0
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:  # noqa: N802
        self.open -= 1
        return 0
