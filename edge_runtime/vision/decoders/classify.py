"""A classifier: [b, C] logits to the best classes by softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Classification, Transform
from edge_runtime.records.spec import InputSpec, OutputSpec
from edge_runtime.vision.decoders import common
from edge_runtime.vision.nms import best_first

TOP = 5


def classes(shapes: common.Shapes, width: int, height: int) -> int:  # noqa: ARG001  every layout's signature
    """How many classes an output of this shape has. Raises LayoutMisfit when it is not [1, C]."""
    _, shape = common.only_output(shapes)
    if len(shape) != 2 or shape[1] < 1:
        raise common.LayoutMisfit(f"its output is [1, classes], and the model's is {list(shape)}")
    return shape[1]


class ClassifyDecoder:
    """Softmax and the best five (fewer where there are fewer classes), ties by class id.

    The thresholds of the OutputSpec do not apply. A NaN or +inf among the logits leaves no order to speak
    of: the result is empty, not a guess; -inf is a class of probability 0.
    """

    def __init__(self, output: OutputSpec, spec: InputSpec, shapes: common.Shapes) -> None:  # noqa: ARG002
        self._name, shape = common.only_output(shapes)
        self._shape = shape[1:]

    def __call__(
        self,
        outputs: Mapping[str, NDArray[Any]],
        index: int,
        transform: Transform,  # noqa: ARG002  a whole picture's class has no place in it
    ) -> Classification:
        logits = common.place(outputs, self._name, index, self._shape).astype(np.float32)
        highest = logits.max()
        if not np.isfinite(highest):
            return Classification(scores=np.empty(0, dtype=np.float32), class_ids=np.empty(0, dtype=np.int32))
        with np.errstate(over="ignore", under="ignore"):
            # Shifted by the highest: exp never overflows, and the sum is at least 1.
            weights = np.exp(logits - highest)
        order = best_first(logits, TOP)
        return Classification(scores=weights[order] / weights.sum(), class_ids=order.astype(np.int32))
