"""An artefact for TensorRT judged on a CPU: as the graph says, whatever kernels the CPU has."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from edge_runtime.prepare.quant import QuantPlan, TensorRange
from edge_runtime.prepare.quant_graph import activations, float_model, operators_of, quantise
from edge_runtime.prepare.quant_imitate import imitate_symmetric
from tests.engine.graphs import graph, node


def test_it_answers_as_the_graph_says() -> None:
    """Large weights and activations, whose products saturate in pairs on a CPU without VNNI."""
    rng = np.random.default_rng(0)
    weights = rng.uniform(0.5, 1.0, (8, 3, 3, 3)).astype(np.float32)
    nodes = [
        node("Conv", ["x", "w"], ["a"], name="one", pads=[1, 1, 1, 1]),
        node("Conv", ["a", "v"], ["y"], name="two", pads=[1, 1, 1, 1]),
    ]
    data = graph(
        nodes, outputs=[("y", ("batch", 8, 32, 32))], initializers={"w": weights, "v": weights[:, :1].repeat(8, 1)}
    )
    model = float_model(data, "m")
    ranges = {name: TensorRange(-100_000.0, 100_000.0) for name in activations(model)}
    plan = QuantPlan("tensorrt", operators_of("tensorrt"), frozenset(), ranges, "minmax")
    made = quantise(model, plan).SerializeToString()
    picture = rng.uniform(3000, 4000, (1, 3, 32, 32)).astype(np.float32)
    wanted = _run(made, picture, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)
    imitation = imitate_symmetric(made)
    # it is the graph itself where nothing is optimised
    assert np.array_equal(_run(imitation, picture, ort.GraphOptimizationLevel.ORT_DISABLE_ALL), wanted)
    found = _run(imitation, picture, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


def _run(model: bytes, picture: np.ndarray[tuple[int, ...], np.dtype[np.float32]], level: object) -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, {"x": picture})[0]
