"""Every layout through a real graph: what the model says becomes the box that it means."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.records.frames import Detections
from edge_runtime.vision.decode import build_decoder
from edge_runtime.vision.geometry import plan
from tests.engine.graphs import node, write_bundle
from tests.vision.chosen_heads import FORMS, make_head


def answering(outputs: Mapping[str, NDArray[Any]]) -> bytes:
    """A model [b, 3, H, W] that answers every picture with these outputs ([1, ...]) times the picture's mean."""
    nodes = [node("ReduceMean", ["x"], ["mean"], axes=[1, 2, 3], keepdims=1)]
    tensors, infos = [], []
    for name, array in outputs.items():
        kind = helper.np_dtype_to_tensor_dtype(array.dtype)
        tensors.append(numpy_helper.from_array(array, f"{name}_said"))
        tensors.append(numpy_helper.from_array(np.array([-1] + [1] * (array.ndim - 1), np.int64), f"{name}_axes"))
        nodes.append(node("Reshape", ["mean", f"{name}_axes"], [f"{name}_flat"]))
        nodes.append(node("Cast", [f"{name}_flat"], [f"{name}_times"], to=kind))
        nodes.append(node("Mul", [f"{name}_said", f"{name}_times"], [name]))
        infos.append(helper.make_tensor_value_info(name, kind, ["batch", *array.shape[1:]]))
    picture = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3, "height", "width"])
    graph = helper.make_graph(nodes, "answering", [picture], infos, tensors)
    data: bytes = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8
    ).SerializeToString()
    return data


@pytest.mark.parametrize(("form", "integers"), [*((form, np.int32) for form in FORMS), ("efficientnms", np.int64)])
def test_planted_boxes_through_an_engine(form: str, integers: type[np.generic], tmp_path: Path) -> None:
    head = make_head(form, 96, 64, resize="stretch")
    boxes, scores, class_ids = [[10, 12, 42, 40], [50, 20, 80, 60]], [0.75, 0.5], [2, 5]
    for box, score, class_id in zip(boxes, scores, class_ids, strict=True):
        head.plant((box[0], box[1], box[2], box[3]), score, class_id)
    said = {name: array.astype(integers) if array.dtype.kind == "i" else array for name, array in head.outputs.items()}
    root = write_bundle(
        tmp_path / "bundle",
        answering(said),
        layout=head.layout,
        size=(96, 64),
        labels=head.output.labels,
        output={"layout": head.layout, "score_threshold": head.threshold},
    )
    engine = load_engine(load_bundle(root))
    try:
        buffer, lane = engine.allocate(3), engine.open_lane()
        buffer.array[0], buffer.array[1], buffer.array[2] = 1, 0, 1
        lane.submit(buffer, 3)
        outputs = lane.collect()
        assert {name: array.dtype for name, array in outputs.items()} == {n: a.dtype for n, a in said.items()}
        decoder = build_decoder(engine.info.output, engine.info.input, engine.info.output_shapes)
        transform = plan(960, 320, engine.info.input)
        for index, count in enumerate((2, 0, 2)):
            found = decoder(outputs, index, transform)
            assert isinstance(found, Detections)
            np.testing.assert_allclose(found.boxes, np.array(boxes[:count]).reshape(-1, 4) * [10, 5, 10, 5], atol=1e-2)
            np.testing.assert_allclose(found.scores, scores[:count], atol=1e-6)
            assert found.class_ids.tolist() == class_ids[:count]
    finally:
        engine.close()
