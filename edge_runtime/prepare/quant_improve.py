"""What makes a float model lose less in INT8: equal channels, weights rounded for what they take, biases corrected.

Each gives a new float model, so that the quantiser need not know of it. None is certain to help: a search keeps what
does, on calibration pictures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from edge_runtime.prepare.quant import QuantPlan
from edge_runtime.prepare.quant_layers import (
    Layer,
    Statistics,
    layers,
    replace_biases,
    replace_weights,
    see_layers,
)
from edge_runtime.prepare.quant_probe import Probe

__all__ = ["correct_biases", "equalise", "round_weights", "see"]

_PICTURES = 16
_COLUMNS = 64
"""Whose errors are carried on to those behind them at once."""
_DAMPING = 0.01
"""Of the mean variance: keeps the inverse from trusting what few patches say."""
_MOST_SCALE = 64.0


def equalise(model: Any) -> Any:
    """Cross-layer equalisation: of two convolutions with nothing between but a Relu, LeakyRelu or MaxPool, channels of
    the first are made smaller and inputs of the second larger by a power of two, or the other way round, so that both
    reach as far. The answers stay the same but for rounding. Clip (Relu6) is no such thing: it is left alone.

    After Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction, 2019, equation 11.
    """
    made: Any = onnx.ModelProto()
    made.CopyFrom(model)
    takers: dict[str, list[Any]] = {}
    for node in made.graph.node:
        for name in node.input:
            takers.setdefault(name, []).append(node)
    outputs = {value.name for value in made.graph.output}
    known = {name: layer for name, layer in layers(made).items() if layer.node.op_type == "Conv"}
    stored_users = {name: len(nodes) for name, nodes in takers.items()}
    current = {name: layer.weights.copy() for name, layer in known.items()}
    weights: dict[str, NDArray[np.float32]] = {}
    biases: dict[str, NDArray[np.float32]] = {}
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    for name, layer in known.items():
        other = _follower(layer.node, takers, outputs)
        if other is None or other.name not in known or other.name == name:
            continue
        second = known[other.name]
        if max(stored_users[layer.stored], stored_users[second.stored]) > 1:
            continue
        if layer.bias is not None and (layer.bias not in values or stored_users[layer.bias] > 1):
            continue
        scales = _scales(current[name], current[second.name])
        if scales is None:
            continue
        one, two = current[name], current[second.name]
        current[name] = (one.reshape(scales.size, -1) / scales[:, None]).reshape(one.shape)
        current[second.name] = _per_input(two, scales, multiply=True)
        if layer.bias is not None:
            bias = biases.get(name, values[layer.bias].astype(np.float32))
            biases[name] = (bias / scales).astype(np.float32)
        weights.update({each.name: each.as_stored(current[each.name]) for each in (layer, second)})
    return replace_biases(replace_weights(made, weights), biases)


def see(model: Any, plan: QuantPlan, probe: Probe, seed: int = 0) -> Mapping[str, Statistics]:
    """What both need to know of the layers that the plan makes INT8, seen on calibration pictures."""
    return see_layers(model, plan, probe, _PICTURES, seed)


def round_weights(model: Any, plan: QuantPlan, seen: Mapping[str, Statistics]) -> Any:
    """Weights of the layers that the plan makes INT8 put on the grid that they will have, one after the other, each
    rounding's error made good by those that follow, as far as the layer's inputs go together.

    Least squares by the covariance of the inputs on calibration pictures: Frantar et al., GPTQ, 2022 (its column by
    column form). The largest weight of a channel keeps its place at the end of the grid, so that the quantiser finds
    the same scale and rounds nothing anew. What a mean shift is left is for `correct_biases`.
    """
    top = 64 if plan.weight_bits == 7 else 127
    known = layers(model)
    changed = {}
    for name, of_layer in seen.items():
        layer = known[name]
        changed[name] = layer.as_stored(_rounded(layer.weights, of_layer.covariance, top))
    return replace_weights(model, changed)


def correct_biases(model: Any, plan: QuantPlan, seen: Mapping[str, Statistics], original: Any = None) -> Any:
    """Biases changed by what rounding of weights and inputs shifts each output channel on the average.

    `original`: the model whose outputs are wanted, where `model` has rounded weights already. After Nagel et al., 2019,
    section 4.2, with means that were seen, and of each layer alone: errors of those before it are theirs to correct.
    """
    top = 64 if plan.weight_bits == 7 else 127
    known = layers(model)
    wanted = layers(original) if original is not None else known
    values = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    biases: dict[str, NDArray[np.float32]] = {}
    for name, of_layer in seen.items():
        layer = known[name]
        if layer.node.op_type == "MatMul" or (layer.bias is not None and layer.bias not in values):
            continue
        shift = _shift(wanted[name], _nearest(layer.weights, top), of_layer)
        before = values[layer.bias].reshape(-1).astype(np.float64) if layer.bias is not None else np.zeros(shift.size)
        if before.size == shift.size:
            biases[name] = (before - shift).astype(np.float32)
    return replace_biases(model, biases)


def _shift(layer: Layer, rounded: NDArray[np.float64], seen: Statistics) -> NDArray[np.float64]:
    """[outputs]: how much larger the mean output is with rounded weights and inputs."""
    found = np.einsum("gok,gk->go", rounded, seen.rounded) - np.einsum("gok,gk->go", layer.weights, seen.mean)
    return np.asarray(found.reshape(-1), np.float64)


def _steps(weights: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    """[groups, outputs]: the grid's step of each channel, as the quantiser chooses it."""
    steps: NDArray[np.float64] = np.abs(weights).max(axis=2) / top
    return np.where(steps > 0, steps, 1.0)


def _nearest(weights: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    steps = _steps(weights, top)[..., None]
    return np.asarray(np.clip(np.round(weights / steps), -top, top) * steps)


def _rounded(weights: NDArray[np.float64], covariance: NDArray[np.float64], top: int) -> NDArray[np.float64]:
    """[groups, outputs, inputs]: weights on the grid; see `round_weights`."""
    steps = _steps(weights, top)
    size = weights.shape[2]
    variance = np.trace(covariance, axis1=1, axis2=2) / size
    damped = covariance + np.eye(size) * np.maximum(variance * _DAMPING, 1e-12)[:, None, None]
    # the upper factor of the inverse: its rows say how an error at one place is made good behind it
    upper = np.linalg.cholesky(np.linalg.inv(damped)).transpose(0, 2, 1)
    left = weights.copy()
    ends = np.abs(weights).argmax(axis=2)
    made = np.zeros_like(weights)
    for start in range(0, size, _COLUMNS):
        end = min(start + _COLUMNS, size)
        errors = np.zeros((*weights.shape[:2], end - start))
        for place in range(start, end):
            wanted = left[:, :, place]
            number = np.clip(np.round(wanted / steps), -top, top)
            number = np.where(ends == place, np.sign(weights[:, :, place]) * top, number)
            made[:, :, place] = number * steps
            error = (wanted - made[:, :, place]) / upper[:, None, place, place]
            left[:, :, place:end] -= error[..., None] * upper[:, None, place, place:end]
            errors[:, :, place - start] = error
        left[:, :, end:] -= errors @ upper[:, start:end, end:]
    zero = np.abs(weights).max(axis=2) == 0
    made[zero] = 0.0
    # where errors ran away against the ends of the grid the nearest is better
    nearest = _nearest(weights, top)
    worse = _error(made - weights, covariance) > _error(nearest - weights, covariance)
    return np.where(worse[..., None], nearest, made)


def _error(difference: NDArray[np.float64], covariance: NDArray[np.float64]) -> NDArray[np.float64]:
    """[groups, outputs]: the variance that a difference of weights makes at the output."""
    return np.asarray(np.einsum("goi,gij,goj->go", difference, covariance, difference, optimize=True))


def _follower(node: Any, takers: dict[str, list[Any]], outputs: set[str]) -> Any:
    """The one convolution behind a node through what keeps positive scales, None where there is another taker."""
    name = node.output[0]
    while name not in outputs and len(takers.get(name, [])) == 1:
        (behind,) = takers[name]
        if behind.op_type == "Conv":
            return behind if behind.input[0] == name else None
        if behind.op_type not in ("Relu", "LeakyRelu", "MaxPool", "Identity") or len(behind.output) > 1:
            return None
        name = behind.output[0]
    return None


def _scales(one: NDArray[np.float64], two: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """[channels] powers of two by which the first layer's outputs are divided; None where there is nothing to do."""
    before = np.abs(one).max(axis=2).reshape(-1)
    # of the second layer, the reach of the weights of each input
    if two.shape[0] == 1:
        behind = np.abs(two).reshape(two.shape[1], before.size, -1).max(axis=(0, 2))
    else:
        behind = np.abs(two).reshape(two.shape[0], two.shape[1], before.size // two.shape[0], -1).max(axis=(1, 3))
    behind = behind.reshape(-1)
    both = (before > 0) & (behind > 0)
    scales = np.ones(before.size)
    scales[both] = np.sqrt(before[both] / behind[both])
    scales[both] /= np.exp(np.log(scales[both]).mean()) if both.any() else 1.0
    # of a power of two the float model rounds as before
    scales = np.exp2(np.round(np.log2(np.clip(scales, 1 / _MOST_SCALE, _MOST_SCALE))))
    return None if (scales == 1).all() else scales


def _per_input(weights: NDArray[np.float64], scales: NDArray[np.float64], *, multiply: bool) -> NDArray[np.float64]:
    groups, outputs, size = weights.shape
    each = scales.size // groups
    factors = (scales if multiply else 1 / scales).reshape(groups, 1, each, 1)
    return (weights.reshape(groups, outputs, each, -1) * factors).reshape(groups, outputs, size)
