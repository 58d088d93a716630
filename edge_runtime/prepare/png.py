"""A PNG writer for golden pictures: the same pixels give the same bytes, whatever library is installed."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_UP = 2


def encode_png(pixels: NDArray[np.uint8], level: int = 9) -> bytes:
    """An 8-bit RGB PNG of [height, width, 3] uint8 pixels, every row stored as its difference to the one above;
    `level` is zlib's, 1 (fast) to 9 (small)."""
    height, width, _ = pixels.shape
    rows = pixels.reshape(height, width * 3)
    above = np.vstack((np.zeros((1, width * 3), np.uint8), rows[:-1]))
    filtered = np.empty((height, 1 + width * 3), np.uint8)
    filtered[:, 0] = _UP
    np.subtract(rows, above, out=filtered[:, 1:])  # modulo 256, as the format has it
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(filtered.tobytes(), level)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
