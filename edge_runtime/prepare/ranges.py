"""How large every tensor of a model gets on real pictures, seen one picture after the other.

The largest magnitudes are taken inside of the graph, so that what is kept is one number a tensor, whatever the number
of pictures and the size of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.errors import BundleError
from edge_runtime.prepare.half_graph import FloatGraph
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

__all__ = ["RangeMeter"]

_PREFIX = "range/"


class RangeMeter:
    """The largest magnitudes of a model's float32 tensors over the pictures it was shown."""

    def __init__(self, graph: FloatGraph, where: str) -> None:
        """`where` names the model's file. Raises BundleError where ONNX Runtime does not run the model."""
        made: Any = onnx.ModelProto()
        made.CopyFrom(graph.model)
        self.names = [*graph.inputs, *(name for node in graph.nodes for name in graph.made(node))]
        nodes = list(made.graph.node)
        outputs = []
        for index, name in enumerate(self.names):
            nodes.append(helper.make_node("Abs", [name], [f"{_PREFIX}{index}/abs"]))
            nodes.append(helper.make_node("ReduceMax", [f"{_PREFIX}{index}/abs"], [f"{_PREFIX}{index}"], keepdims=0))
            outputs.append(helper.make_tensor_value_info(f"{_PREFIX}{index}", TensorProto.FLOAT, []))
        del made.graph.node[:]
        made.graph.node.extend(nodes)
        made.graph.output.extend(outputs)
        self._session = open_session(made.SerializeToString(), where)
        (self._input,) = self._session.get_inputs()
        self._where = where
        self.pictures = 0
        self._largest: NDArray[np.float64] = np.zeros(len(self.names))

    def show(self, pictures: Iterable[Pixels], spec: InputSpec) -> None:
        """Run the model on every picture, each of which may be gone when the next one comes.

        `spec` is the input of one of the model's variants. Raises CameraError for a picture that cannot be read,
        BundleError (code "non_finite") where the model answers with NaN or infinity.
        """
        side = self._input.shape[0]
        batch = np.zeros((side if isinstance(side, int) and side > 0 else 1, *spec.shape), spec.dtype)
        for picture in pictures:
            picture.write_into(batch[0], spec)
            batch[1:] = batch[0]
            results = self._session.run(None, {self._input.name: batch})
            answers = len(results) - len(self.names)
            if not all(np.isfinite(answer).all() for answer in results[:answers] if answer.dtype.kind == "f"):
                raise BundleError(
                    f"answers picture {self.pictures + 1} of the calibration with values that are not finite",
                    code="non_finite",
                    where=self._where,
                    remedy="the model overflows in float32 already, or its weights are damaged: export it again",
                )
            seen = np.array([float(value) for value in results[answers:]])
            # What holds nothing but NaN counts as infinite; a maximum leaves out single ones.
            self._largest = np.maximum(self._largest, np.where(np.isnan(seen), np.inf, seen))
            self.pictures += 1

    def largest(self) -> dict[str, float]:
        """Tensor -> its largest magnitude over all pictures; infinite where it held anything that is not finite."""
        return dict(zip(self.names, self._largest.tolist(), strict=True))
