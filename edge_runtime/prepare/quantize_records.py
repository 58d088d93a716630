"""What `prepare quantize` asks of a search, and what it has found in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from edge_runtime.engine.bundle import Bundle
from edge_runtime.prepare.calibration_set import Difference
from edge_runtime.prepare.comparison import Comparison
from edge_runtime.prepare.gate import Gate
from edge_runtime.prepare.quant import Family, Method
from edge_runtime.prepare.quant_meter import ActivationMeter
from edge_runtime.prepare.quant_probe import Probe

__all__ = [
    "SEARCHING",
    "Artefact",
    "CalibrationFacts",
    "MethodChoice",
    "Outcome",
    "Progress",
    "QuantizeResult",
    "Search",
    "Searched",
    "Tried",
]

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how many are done, and of how many (0: not known)."""
SEARCHING = "searching"
"""How what is going on begins where steps of the search are counted, and not pictures."""
MethodChoice = Method | Literal["auto"]
Outcome = Literal["accepted", "refused", "nothing to gain"]


@dataclass(frozen=True, slots=True)
class Tried:
    """A candidate of a search. `loss`: relative, on calibration pictures, against the float model's answers; `speed`:
    how many times as fast as the float model in the same run, with its 90 % interval (`speed_low`, `speed_high`), None
    where it was not measured; `int8_share` (0-1): of the multiplications, those in INT8; `kept_float`: nodes that
    could be INT8 and are not; `front`: none is both faster (smaller, where speed is not known) and nearer."""

    name: str
    loss: float
    agreement: float | None
    latency_ms: float | None
    speed: float | None
    speed_low: float | None
    speed_high: float | None
    int8_share: float
    size_bytes: int
    sqnr_db: float | None
    kept_float: int
    front: bool
    chosen: bool


@dataclass(frozen=True, slots=True)
class Searched:
    """What a search found for one family: the chosen model (ONNX), None where float is better, and what led to it.

    `allowed`: what a candidate may lose on calibration pictures, against the float model's answers, which is stricter
    than by labels. `sensitivities`: nodes or blocks with what they cost when they alone are INT8, the worst first;
    `unit` says what that number is. `said`: in one line what INT8 brings. `improved`: what made the model better for
    INT8. `notes`: what was not tried, say.
    """

    model: bytes | None
    method: Method
    kept_float: int
    float_ms: float | None
    allowed: float
    tried: tuple[Tried, ...]
    sensitivities: tuple[tuple[str, float], ...]
    unit: str
    said: str
    improved: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> Tried | None:
        return next((each for each in self.tried if each.chosen), None)


class Search(Protocol):
    """Finds what of a model becomes INT8. It sees calibration pictures alone."""

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
        """`model`: an onnx.ModelProto as `float_model` makes it; `search_loss`: what may be lost on the probe's
        pictures against the float model's own answers (relative); `folder`: exists, for what a later run may take up;
        `seed`: of all that is drawn."""
        ...


@dataclass(frozen=True, slots=True)
class CalibrationFacts:
    """What was calibrated with. `unlike`: in what it differs from the pictures that were judged by."""

    sha256: str
    images: int
    unlike: tuple[Difference, ...]


@dataclass(frozen=True, slots=True)
class Artefact:
    """An INT8 variant that was made or tried. `gate` and `comparison` are None where the search found nothing."""

    name: str
    source: str
    family: Family
    outcome: Outcome
    searched: Searched
    gate: Gate | None
    comparison: Comparison | None

    def told(self) -> str:
        """In one line what became of it."""
        if self.gate is None:
            return self.searched.said
        worst = ", ".join(name for name, _ in self.searched.sensitivities[:3])
        told = f"; the worst layers: {worst}" if self.gate.verdict == "loses too much" and worst else ""
        return f"{self.gate}{told}"


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """The new bundle, None where no artefact was worth writing; what became of each; the page that tells it."""

    bundle: Bundle | None
    artefacts: tuple[Artefact, ...]
    calibration: CalibrationFacts
    report: Path
    notes: tuple[str, ...]

    @property
    def refused(self) -> tuple[Artefact, ...]:
        return tuple(each for each in self.artefacts if each.outcome == "refused")

    @property
    def code(self) -> str | None:
        """Of a refusal: "loses_too_much", "not_enough_data" or "nothing_to_gain"; None where there is none."""
        gates = [each.gate for each in self.refused if each.gate is not None]
        if gates:
            words = [gate.verdict for gate in gates]
            return "loses_too_much" if "loses too much" in words else "not_enough_data"
        return "nothing_to_gain" if self.bundle is None else None
