"""Where a prepared variant comes from, and by what it was let in: `prepared` of a bundle.toml's variant."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from edge_runtime.engine.manifest_values import FileTable, Finite, Name, Positive, Sha256, Table, Text, Unit

__all__ = ["GateTable", "PreparedTable", "SpeedTable"]

Count = Annotated[int, Field(ge=0)]


class GateTable(Table):
    """By what it was accepted: `value` of the variant against `float_value` of the one it was made of.

    `basis`: what was taken for right, labels or the float model's own answers. `loss`: relative, negative where it is
    better; `loss_high`: its 90 % bound, left out where the pictures were too few for one. `accept`: which of the two
    had to be within `max_loss`.
    """

    basis: Literal["labels", "agreement"]
    metric: Literal["mAP", "top1"]
    float_value: Unit
    value: Unit
    loss: Finite
    loss_high: Finite | None = None
    max_loss: Unit
    accept: Literal["bound", "point"]
    pictures: Annotated[int, Field(ge=1)]


class SpeedTable(Table):
    """How many times as fast as the variant it was made of, on one thread of which processor; of this file and that
    machine only. `low`, `high`: the ratio's 90 % interval."""

    ratio: Positive
    cpu: Text
    low: Positive | None = None
    high: Positive | None = None


class PreparedTable(Table):
    """A variant that was made of another one (`of`, a name; it need not be in the bundle any more) by calibration.

    `calibration_sha256`: over the pictures' own sha256, in whatever order they came. `kept_float`: how many operators
    that could be INT8 are not. `report`: a page on how it was chosen, listed in [files].
    """

    of: Name
    method: Literal["minmax", "entropy", "percentile", "mse"]
    calibration_sha256: Sha256
    calibration_images: Annotated[int, Field(ge=1)]
    kept_float: Count
    gate: GateTable
    speed: SpeedTable | None = None
    report: FileTable | None = None
