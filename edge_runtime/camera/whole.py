"""What a decoded picture is to a GPU that scales it: FFmpeg's words for formats, colours and sitings as a layout."""

from __future__ import annotations

from edge_runtime.records.frames import BT601_WEIGHTS, LEFT_SITING, PictureKind, PictureLayout

_KINDS: dict[str, PictureKind] = {
    "bgr24": "bgr24",
    "rgba": "rgba",
    "rgb0": "rgba",
    "nv12": "nv12",
    "yuv420p": "yuv420p",
    "yuvj420p": "yuv420p",
}
_YUV = ("nv12", "yuv420p")
_WEIGHTS = {
    1: (0.2126, 0.0722),
    2: BT601_WEIGHTS,
    4: (0.30, 0.11),
    5: BT601_WEIGHTS,
    6: BT601_WEIGHTS,
    7: (0.212, 0.087),
    9: (0.2627, 0.0593),
}
"""By AVCOL_SPC_...: what swscale takes for each."""
_SITINGS = {2: (0.5, 0.5), 3: (0.0, 0.0), 4: (0.5, 0.0), 5: (0.0, 1.0), 6: (0.5, 1.0)}
"""By AVCHROMA_LOC_...; any other is on the left."""
_FULL_RANGE = 2


def kind_of(pixel_format: str, *, interlaced: bool) -> PictureKind | None:
    """None for what is not handed over whole. Colours of an interlaced picture belong to lines of one field."""
    kind = _KINDS.get(pixel_format)
    return None if interlaced and kind in _YUV else kind


def layout_of(
    kind: PictureKind, pixel_format: str, width: int, height: int, *, matrix: int, colour_range: int, siting: int
) -> PictureLayout | None:
    """`matrix`, `colour_range` and `siting`: FFmpeg's numbers. None where such colours are not handed over whole."""
    if kind not in _YUV:
        return PictureLayout(kind, width, height)
    weights = _WEIGHTS.get(matrix)
    if weights is None:
        return None
    full_range = pixel_format == "yuvj420p" or colour_range == _FULL_RANGE
    return PictureLayout(kind, width, height, weights, full_range, _SITINGS.get(siting, LEFT_SITING))
