"""What the policy remembers, and what its steps hand to each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_runtime.governor.allocate import Allotment, Claim
from edge_runtime.governor.energy import EnergyState
from edge_runtime.governor.thermal import ThermalState
from edge_runtime.records.governing import GovernorWord, LimitWord, OperatingPoint

NS_PER_S = 1_000_000_000

UNKNOWN_W = 10.0
BASE_S = 4.0
"""Time constant of the base power that rises are decided by."""

STEADY_S, MAX_STEADY_S = 25.0, 240.0
"""Under an unchanged load, so long after the last change; doubled by every rise that had to be taken back."""

GOOD_SAMPLES = 4
"""So many good ones in a row before what they say is acted on again: a second."""


@dataclass(slots=True)
class PolicyState:
    """What the policy remembers between two samples. Treated as a value: `decide` returns a new one.

    `learned`: lane time of a frame by (model, variant), s. `offered`: what each camera brings, Hz. `shares`: of a
    model's frames, those that are run and not answered by its cache. `down`: models that run nothing. `base_w`: slow
    estimate of power without inference, W. `ordinary_w`: the power that this device is made for; the unit of all work,
    and so it stays what it was first. `seen`, `missing`, `good`: samples of power at the start, without a reading, with
    one. `still`: samples with the very same power; `still_work_w`: the load at the first of them;
    `disbelieved`: they do not show this device's power. `raising`: on the
    way up, step by step. `t_...`: since when more, and a heavier variant, have been possible; when the variant, the
    point and the load changed last; when more was given last under a steady load. `steady_s`: patience under a steady
    load. `punished_...`: less, for over-current or throttling, until then.
    """

    energy: EnergyState = field(default_factory=EnergyState)
    thermal: ThermalState = field(default_factory=ThermalState)
    learned: Mapping[tuple[str, str], float] = field(default_factory=dict)
    offered: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    down: frozenset[str] = frozenset()
    base_w: float = 0.0
    ordinary_w: float | None = None
    point: OperatingPoint | None = None
    limits: Mapping[str, LimitWord] = field(default_factory=dict)
    seen: int = 0
    missing: int = 0
    good: int = GOOD_SAMPLES
    safe: bool = False
    last_power_w: float | None = None
    still: int = 0
    still_work_w: float = 0.0
    disbelieved: bool = False
    raising: bool = False
    t_more_ns: int | None = None
    t_heavier_ns: int | None = None
    t_variant_ns: int | None = None
    t_clock_ns: int | None = None
    now_ns: int = 0
    t_changed_ns: int | None = None
    t_raised_ns: int | None = None
    steady_s: float = STEADY_S
    demand_hz: float = 0.0
    t_load_ns: int = 0
    punished_until_ns: int = 0
    t_throttled_ns: int = 0
    punished_work_w: float = math.inf
    punished_for: LimitWord = "over-current"
    punished_why: str = ""
    word: GovernorWord = "holding"
    t_word_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Limit:
    """What may be spent: load in watts by the known costs, and which limit that is. `hard_w`: by the budgets; `work_w`:
    by what may be tried, too, which is less where `caution` says so."""

    hard_w: float
    work_w: float
    word: LimitWord
    caution: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """Variants, a clock, and the rates that would follow."""

    variants: Mapping[str, str]
    gpu_hz: float | None
    claims: Sequence[Claim]
    allotment: Allotment
