"""A detector with the weight of YOLOv8n and nothing learned: for measuring, where no such model is at hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SIZE = 416
CLASSES = 80
BLOCKS = 7
_SEED = 20250101
_NEVER = -12.0
"""Bias of the heat map before its sigmoid: no score comes near any threshold."""


def build_heavy_model(path: Path, *, blocks: int = BLOCKS) -> None:
    """Write an ONNX of layout `centernet`, [b, 3, 416, 416]: `blocks` 3 x 3 convolutions of 64 channels at stride 4.

    Seven of them are about 3 G multiply-adds with stem and head, some 40 ms on one server core. The weights are
    seeded: the same file everywhere.
    """
    rng = np.random.default_rng(_SEED)
    nodes, weights = [], []

    def conv(
        source: str, target: str, channels_in: int, channels_out: int, *, kernel: int, stride: int, bias: float
    ) -> None:
        scale = np.sqrt(2.0 / (channels_in * kernel * kernel))
        shape = (channels_out, channels_in, kernel, kernel)
        weights.append(numpy_helper.from_array((rng.standard_normal(shape) * scale).astype(np.float32), f"{target}_w"))
        weights.append(numpy_helper.from_array(np.full(channels_out, bias, np.float32), f"{target}_b"))
        pad = kernel // 2
        nodes.append(
            helper.make_node(
                "Conv",
                [source, f"{target}_w", f"{target}_b"],
                [target],
                kernel_shape=[kernel, kernel],
                strides=[stride, stride],
                pads=[pad, pad, pad, pad],
            )
        )

    def relu(source: str, target: str) -> None:
        nodes.append(helper.make_node("Relu", [source], [target]))

    weights.append(numpy_helper.from_array(np.float32(1 / 255), "unit"))
    nodes.append(helper.make_node("Mul", ["images", "unit"], ["scaled"]))
    conv("scaled", "stem1", 3, 32, kernel=3, stride=2, bias=0.0)
    relu("stem1", "stem1_r")
    conv("stem1_r", "stem2", 32, 64, kernel=3, stride=2, bias=0.0)
    relu("stem2", "body0_r")
    for block in range(blocks):
        conv(f"body{block}_r", f"body{block + 1}", 64, 64, kernel=3, stride=1, bias=0.0)
        relu(f"body{block + 1}", f"body{block + 1}_r")
    last = f"body{blocks}_r"
    conv(last, "heat_raw", 64, CLASSES, kernel=1, stride=1, bias=_NEVER)
    weights.append(numpy_helper.from_array(np.float32(-1), "ceiling"))
    nodes.append(helper.make_node("Min", ["heat_raw", "ceiling"], ["heat_low"]))
    nodes.append(helper.make_node("Sigmoid", ["heat_low"], ["heatmap"]))
    conv(last, "ltrb_raw", 64, 4, kernel=1, stride=1, bias=0.0)
    relu("ltrb_raw", "ltrb")
    grid = SIZE // 4
    graph = helper.make_graph(
        nodes,
        "heavy",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])],
        [
            helper.make_tensor_value_info("heatmap", TensorProto.FLOAT, ["batch", CLASSES, grid, grid]),
            helper.make_tensor_value_info("ltrb", TensorProto.FLOAT, ["batch", 4, grid, grid]),
        ],
        weights,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))
