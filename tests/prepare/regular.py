"""A model of regular convolutions as large as YOLOv8n, with drawn weights: what INT8 is good at, and no licence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

__all__ = ["YoloSized", "yolo_sized"]


class YoloSized:
    """Nodes and stored tensors, added one layer after the other.

    Weights are He's (2015), scaled so that a SiLU's output has about the variance of its input, as batch normalisation
    would keep it; biases are small.
    """

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self.nodes: list[Any] = []
        self.stored: dict[str, NDArray[np.float32]] = {}
        self._count = 0

    def node(self, kind: str, inputs: Sequence[str], outputs: int = 1, **given: Any) -> list[str]:
        self._count += 1
        name = f"{kind}_{self._count}"
        names = [f"{name}.{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name, **given))
        return names

    def store(self, name: str, value: NDArray[Any]) -> str:
        self.stored[name] = np.asarray(value)
        return name

    def conv(self, source: str, before: int, after: int, side: int = 1, stride: int = 1, *, plain: bool = False) -> str:
        stem = f"layer{self._count}"
        gain = 8.0 if plain else 2.8  # the mean square of SiLU of a normal variable is 0.36
        weights = self._rng.normal(0, (gain / (side * side * before)) ** 0.5, (after, before, side, side))
        stored = [
            self.store(f"{stem}.weight", weights.astype(np.float32)),
            self.store(f"{stem}.bias", self._rng.normal(0, 0.1, after).astype(np.float32)),
        ]
        (made,) = self.node("Conv", [source, *stored], pads=[side // 2] * 4, strides=[stride] * 2)
        if plain:
            return made
        (gate,) = self.node("Sigmoid", [made])
        return self.node("Mul", [made, gate])[0]

    def c2f(self, source: str, before: int, after: int, depth: int, *, shortcut: bool) -> str:
        half = after // 2
        halves = self.store(f"split{self._count}", np.array([half, half], np.int64))
        parts = self.node("Split", [self.conv(source, before, after), halves], 2, axis=1)
        for _ in range(depth):
            inner = self.conv(self.conv(parts[-1], half, half, 3), half, half, 3)
            parts.append(self.node("Add", [parts[-1], inner])[0] if shortcut else inner)
        return self.conv(self.join(parts), half * len(parts), after)

    def join(self, parts: Sequence[str]) -> str:
        return self.node("Concat", parts, axis=1)[0]

    def twice(self, source: str) -> str:
        scales = self.store("twice", np.array([1, 1, 2, 2], np.float32))
        return self.node(
            "Resize", [source, "", scales], mode="nearest", coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )[0]  # fmt: skip


def yolo_sized(side: int = 416, classes: int = 80, seed: int = 0) -> Any:
    """The widths and depths of YOLOv8n: 3.2 million parameters, 8.7 GFLOP at 640. One output, [1, 4 + classes, places]:
    boxes of four numbers, and scores (0-1), as that model joins them."""
    net = YoloSized(seed)
    x = net.conv(net.conv("images", 3, 16, 3, 2), 16, 32, 3, 2)
    x = net.conv(net.c2f(x, 32, 32, 1, shortcut=True), 32, 64, 3, 2)
    fine = net.c2f(x, 64, 64, 2, shortcut=True)
    middle = net.c2f(net.conv(fine, 64, 128, 3, 2), 128, 128, 2, shortcut=True)
    x = net.c2f(net.conv(middle, 128, 256, 3, 2), 256, 256, 1, shortcut=True)
    pooled = [net.conv(x, 256, 128)]
    for _ in range(3):
        pooled += net.node("MaxPool", [pooled[-1]], kernel_shape=[5, 5], pads=[2] * 4, strides=[1, 1])
    coarse = net.conv(net.join(pooled), 512, 256)
    up = net.c2f(net.join([net.twice(coarse), middle]), 384, 128, 1, shortcut=False)
    low = net.c2f(net.join([net.twice(up), fine]), 192, 64, 1, shortcut=False)
    mid = net.c2f(net.join([net.conv(low, 64, 64, 3, 2), up]), 192, 128, 1, shortcut=False)
    high = net.c2f(net.join([net.conv(mid, 128, 128, 3, 2), coarse]), 384, 256, 1, shortcut=False)
    heads = []
    for source, width, step in ((low, 64, 8), (mid, 128, 16), (high, 256, 32)):
        boxes = net.conv(net.conv(net.conv(source, width, 64, 3), 64, 64, 3), 64, 64, plain=True)
        scores = net.conv(net.conv(net.conv(source, width, 80, 3), 80, 80, 3), 80, classes, plain=True)
        places = net.store(f"places{step}", np.array([1, -1, (side // step) ** 2], np.int64))
        heads.append([net.node("Reshape", [each, places])[0] for each in (boxes, scores)])
    boxes, scores = (net.node("Concat", each, axis=2)[0] for each in zip(*heads, strict=True))
    # distances: the expectation over sixteen bins of each side of a box
    count = sum((side // step) ** 2 for step in (8, 16, 32))
    bins = net.store("bins", np.array([1, 4, 16, count], np.int64))
    (soft,) = net.node("Softmax", [net.node("Reshape", [boxes, bins])[0]], axis=2)
    weights = net.store("numbers", np.arange(16, dtype=np.float32).reshape(1, 1, 16, 1))
    axes = net.store("axes", np.array([2], np.int64))
    (sides,) = net.node("ReduceSum", [net.node("Mul", [soft, weights])[0], axes], keepdims=0)
    net.nodes.append(helper.make_node("Concat", [sides, *net.node("Sigmoid", [scores])], ["output"], "answer", axis=1))
    graph = helper.make_graph(
        net.nodes,
        "regular",
        [helper.make_tensor_value_info("images", TensorProto.FLOAT, [1, 3, side, side])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, 4 + classes, count])],
        [numpy_helper.from_array(value, name) for name, value in net.stored.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
