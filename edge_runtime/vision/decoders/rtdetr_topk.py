"""RT-DETR exported with its own selection: [b, K, 6], at most K boxes that the model has chosen itself.

Columns: centre x, centre y, width, height as shares of the model's input, score, class id. `rtdetr` reads
this form too, but for two labels, where the same shape could be box and two scores: a bundle with two labels
has to say which. `nms_iou` does not apply.
"""

from __future__ import annotations

import numpy as np

from edge_runtime.records.frames import Float32Array
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common, yolov10

COLUMNS = yolov10.COLUMNS
classes = yolov10.classes


def size_of(spec: InputSpec) -> Float32Array:
    """[4] float32: what turns shares of the input into model px, for x, y, width and height."""
    return np.array((spec.width, spec.height) * 2, dtype=np.float32)


class RtdetrTopkDecoder(yolov10.RowsDecoder):
    """Decodes one place of a batch. Holds only constants: safe from several threads at once."""

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:
        super().__init__(output, spec, shapes)
        self._size = size_of(spec)

    def boxes(self, columns: Float32Array) -> Float32Array:
        """Centre and size, in shares of the input."""
        return common.corners(columns * self._size)
