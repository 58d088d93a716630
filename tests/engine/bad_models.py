"""Bundles whose manifest and digests are right and whose model is bad, each in one way.

Every function writes a whole bundle into the folder `root` and returns it. The variant is `fp32`, or `fp32-320` for
a copy of the shipped bundle. Bright means a picture with a pixel above 200: grey, which warms an engine up, is not.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.conftest import ROOT
from tests.engine.graphs import CLASSES, SIDE, classifier, graph, nan_classifier, node, write_bundle

SHIPPED = ROOT / "engines" / "centernet"

When = Literal["always", "bright", "loading"]

_BRIGHT = 200.0
_FOR_EVER = 2**62


def good(root: Path) -> Path:
    """Nothing wrong with it: any batch, an answer at once."""
    return write_bundle(root, classifier())


def truncated(root: Path) -> Path:
    """The first half of the shipped model."""
    return _shipped(root, (SHIPPED / "model.onnx").read_bytes()[: (SHIPPED / "model.onnx").stat().st_size // 2])


def bit_flipped(root: Path, bit: int = 29) -> Path:
    """The shipped model with one bit of its first layer's largest weight flipped; 23 to 30 are a float's exponent.

    Not every bit can be found: one in a channel that the golden pictures leave at 0 changes no golden output.
    """
    model = onnx.load(SHIPPED / "model.onnx")
    tensor = next(t for t in model.graph.initializer if len(t.dims) == 4 and t.data_type == TensorProto.FLOAT)
    values = numpy_helper.to_array(tensor).copy()
    flat = values.reshape(-1).view(np.uint32)
    flat[int(np.abs(values).argmax())] ^= np.uint32(1 << bit)
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    return _shipped(root, model.SerializeToString())


def wrong_input_size(root: Path) -> Path:
    """Takes pictures of another size than the variant says."""
    return write_bundle(root, classifier(shape=("batch", 3, SIDE + 8, SIDE + 8)))


def wrong_layout(root: Path) -> Path:
    """A classifier that is declared as a detector."""
    return write_bundle(root, classifier(), layout="yolox")


def wrong_labels(root: Path) -> Path:
    """Answers for three classes, and two are named."""
    return write_bundle(root, classifier(), labels=("red", "green"))


def answers_nan(root: Path, when: When = "always") -> Path:
    """NaN for every picture, or for bright ones."""
    if when == "always":
        return write_bundle(root, nan_classifier())
    nodes = [_most(), node("Sub", ["limit", "most"], ["left"]), node("Log", ["left"], ["log"])]
    return _added(root, nodes, "log", {"limit": _BRIGHT})


def hangs(root: Path, when: When = "always") -> Path:
    """Loops for ever: in every run, in those of bright pictures, or already while constants are folded at loading.

    Loops themselves are not folded; a chain of products of large constants is, for minutes.
    """
    if when == "loading":
        side = 2048
        fill = helper.make_tensor("", TensorProto.FLOAT, [1], [1.0])
        chain = [node("MatMul", ["c0" if n == 0 else f"p{n}", "c0"], [f"p{n + 1}"]) for n in range(3000)]
        nodes = [node("ConstantOfShape", ["side"], ["c0"], value=fill), *chain]
        nodes.append(node("ReduceMean", [f"p{len(chain)}"], ["slow"], keepdims=0))
        return _added(root, nodes, "slow", {"side": [side, side]})
    body = helper.make_graph(
        [node("Mul", ["value", "half"], ["less"]), node("Identity", ["going"], ["go"])],
        "body",
        [
            helper.make_tensor_value_info("number", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("value", TensorProto.FLOAT, []),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("less", TensorProto.FLOAT, []),
        ],
        [numpy_helper.from_array(np.array(0.5, np.float32), "half")],
    )
    nodes = [*_chosen(when, "count"), node("Loop", ["count", "", "most"], ["looped"], body=body)]
    return _added(root, nodes, "looped", {"then": _FOR_EVER, "else": 1})


def crashes(root: Path, when: When = "loading") -> Path:
    """Divides the smallest integer by -1: on x86 the processor ends the process with SIGFPE. Others do not."""
    nodes = [node("Div", ["number", "minus"], ["quotient"]), node("Cast", ["quotient"], ["float"], to=1)]
    smallest, one = -(2**63), 1
    if when == "loading":
        return _added(root, nodes, "float", {"number": smallest, "minus": -1})
    return _added(root, [*_chosen(when, "number"), *nodes], "float", {"then": smallest, "else": one, "minus": -1})


def hogs_memory(root: Path, size_bytes: int, when: When = "bright") -> Path:
    """Fills that much memory in a run, or where its constants are folded at loading."""
    fill = helper.make_tensor("", TensorProto.FLOAT, [1], [1.0])
    nodes = [
        node("ConstantOfShape", ["shape"], ["huge"], value=fill),
        node("ReduceMean", ["huge"], ["filled"], keepdims=0),
    ]
    if when == "loading":
        return _added(root, nodes, "filled", {"shape": [size_bytes // 4]})
    return _added(root, [*_chosen(when, "shape"), *nodes], "filled", {"then": [size_bytes // 4], "else": [1]})


def slow(root: Path, layers: int = 40) -> Path:
    """Convolves 64 channels `layers` times before it answers."""
    weights = np.full((64, 64, 3, 3), 1e-4, np.float32)
    nodes = [node("Conv", ["x", "first"], ["a0"], pads=[1, 1, 1, 1])]
    nodes += [node("Conv", [f"a{n}", "more"], [f"a{n + 1}"], pads=[1, 1, 1, 1]) for n in range(layers)]
    nodes.append(node("ReduceMean", [f"a{layers}"], ["slow"], keepdims=0))
    return _added(root, nodes, "slow", {"first": weights[:, :3], "more": weights})


def external_data(root: Path) -> Path:
    """Its weight lies in a second file, which is there."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, [1], [1.0])
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "w.bin"
    write_bundle(root, graph([_means(), node("Mul", ["means", "w"], ["y"])], initializers={"w": weight}))
    np.ones(1, np.float32).tofile(root / "w.bin")
    return root


def _means() -> Any:
    return node("ReduceMean", ["x"], ["means"], axes=[2, 3], keepdims=0)


def _most() -> Any:
    """The largest value of all pictures of a batch, [] float32."""
    return node("ReduceMax", ["x"], ["most"], keepdims=0)


def _chosen(when: When, name: str) -> list[Any]:
    """`name` is the constant `then` for the pictures meant, and `else` for the others."""
    limit = helper.make_tensor("", TensorProto.FLOAT, [], [_BRIGHT if when == "bright" else -1.0])
    return [
        _most(),
        node("Constant", [], ["limit"], value=limit),
        node("Greater", ["most", "limit"], ["meant"]),
        node("Where", ["meant", "then", "else"], [name]),
    ]


def _added(root: Path, nodes: Sequence[Any], value: str, initializers: dict[str, Any]) -> Path:
    """A classifier whose answer has the scalar `value`, made by `nodes`, added to it."""
    whole = [_means(), *nodes, node("Add", ["means", value], ["y"])]
    return write_bundle(root, graph(whole, outputs=[("y", ("batch", CLASSES))], initializers=initializers))


def _shipped(root: Path, model: bytes) -> Path:
    """The shipped bundle around another model, its golden pictures and outputs as they are."""
    shutil.copytree(SHIPPED, root)
    (root / "model.onnx").write_bytes(model)
    old = hashlib.sha256((SHIPPED / "model.onnx").read_bytes()).hexdigest()
    manifest = (root / "bundle.toml").read_text()
    (root / "bundle.toml").write_text(manifest.replace(old, hashlib.sha256(model).hexdigest()))
    return root
