"""A camera's process in which a foreign call never comes back, with the interpreter's lock or without.

`python -m tests.camera.stuck_child CONTROL RETURNS PARENT`: the real one, but for its source, which the last word of
the address says how to spoil.
"""

from __future__ import annotations

import ctypes

from edge_runtime.camera import synthetic
from edge_runtime.camera.child import main
from edge_runtime.camera.synthetic import SyntheticOptions

_FRAMES = 5
_real = synthetic._background
_holding = False


def _background(number: int) -> tuple[int, int, int]:
    if number == _FRAMES:
        (ctypes.PyDLL(None) if _holding else ctypes.CDLL(None)).pause()
    return _real(number)


def _parse(url: str) -> SyntheticOptions:
    global _holding
    _holding = url.endswith("lock")
    return SyntheticOptions(96, 48, 100.0)


synthetic._background = _background
synthetic.parse_synthetic = _parse

if __name__ == "__main__":
    main()
