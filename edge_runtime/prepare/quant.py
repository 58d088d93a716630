"""What the parts of INT8 preparation hand to each other: ranges, a plan of what is quantised, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = ["Family", "Method", "QuantPlan", "TensorRange"]

Family = Literal["onnxruntime", "tensorrt"]
"""Which rules an artefact keeps: `tensorrt` is symmetric S8S8 with Q/DQ at weights, biases in float; `onnxruntime` is
U8 activations and S8 weights, biases of int32, which its CPU kernels are made for."""
Method = Literal["minmax", "entropy", "percentile", "mse"]
"""How a range is chosen from what a tensor was seen to hold."""


@dataclass(frozen=True, slots=True)
class TensorRange:
    """What of a tensor is kept: values beyond are cut. `low <= 0 <= high`, as zero has to be exact."""

    low: float
    high: float


Ranges: TypeAlias = Mapping[str, TensorRange]


@dataclass(frozen=True, slots=True)
class QuantPlan:
    """What of a float32 model becomes INT8, and how.

    `operators`: the op types that are quantised at all; `keep_float`: names of nodes that are not, though of one.
    `ranges`: by name of a float activation. `weight_bits`: 8, or 7 where the CPU's U8S8 product of two pairs saturates
    (AVX2 and AVX-512 without VNNI: onnxruntime's `reduce_range`).
    """

    family: Family
    operators: frozenset[str]
    keep_float: frozenset[str]
    ranges: Ranges
    method: Method
    weight_bits: Literal[7, 8] = 8
