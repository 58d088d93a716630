"""A search that asks nothing: everything INT8, by min-max. What `prepare quantize` does with what is found is tested by
it, and naive INT8 is refused by it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_runtime.prepare.quant import Family, QuantPlan
from edge_runtime.prepare.quant_graph import operators_of, quantise
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_probe import Probe
from edge_runtime.prepare.quantize_records import MethodChoice, Progress, Searched, Tried


@dataclass
class NaiveSearch:
    """`speed`: what it says it measured for ONNX Runtime; None: float is better there."""

    speed: float | None = 2.0
    seen: list[tuple[str, int]] = field(default_factory=list)
    asked: list[tuple[float, int]] = field(default_factory=list)
    interrupt: bool = False

    def __call__(
        self,
        model: Any,
        meter: ActivationMeter,
        *,
        family: Family,
        probe: Probe,
        search_loss: float,
        method: MethodChoice,
        minutes: float | None,
        folder: Path,
        seed: int,
        progress: Progress,
    ) -> Searched:
        assert folder.is_dir()
        self.seen.append((family, meter.pictures))
        self.asked.append((search_loss, seed))
        if self.interrupt:
            raise KeyboardInterrupt
        ranges = meter.ranges("minmax", symmetric=family == "tensorrt")
        plan = QuantPlan(
            family, frozenset(operators_of(family)), frozenset(), ranges, "minmax", 7 if family == "onnxruntime" else 8
        )
        made: bytes = quantise(model, plan).SerializeToString(deterministic=True)
        judged = probe.judge(made, agreement=True)
        timed = family == "onnxruntime" and self.speed is not None
        tried = Tried(
            "everything",
            judged.loss,
            judged.agreement,
            1.0 / self.speed if timed and self.speed else None,
            self.speed if timed else None,
            self.speed * 0.9 if timed and self.speed else None,
            self.speed * 1.1 if timed and self.speed else None,
            1.0,
            len(made),
            min(judged.sqnr_db.values()),
            0,
            True,
            family == "tensorrt" or timed,
        )
        kept = None if family == "onnxruntime" and self.speed is None else made
        said = "nothing: keep float" if kept is None else "INT8 was not asked whether it pays"
        return Searched(
            kept, "minmax", 0, 1.0, search_loss, (tried,), (("loud <b>", 0.5), ("quiet", 0.25)), "made up", said
        )
