"""A temperature budget as watts, from a thermal model that is learned while running.

The module is two thermal masses: the die, which follows power within seconds, and the heat sink, which takes minutes:

    dTj/dt = heat x P - loss x Tj + ambient + die x dP/dt

`heat` is one over the sink's heat capacity (degC/J), `loss` one over its time constant (1/s), `ambient` what the
surroundings bring (degC/s), `die` the resistance from die to sink (degC/W). A Kalman filter tracks the four. Both sides
are filtered alike, so that nothing has to be differentiated: the difference of two low-pass filters of a signal is its
derivative, filtered by both.

Where the model is right, so is the answer at once; where it is not, `ambient` takes up the difference, and at the
limit, with Tj at rest, the answer is the present power whatever the other three say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

HORIZON_S = 20.0
"""Tj may come up to its limit within this time, and not sooner."""
FAST_S, SLOW_S = 2.0, 8.0
EVERY_S = 1.0
"""How often the model is corrected: the filters do not know more sooner."""
BELOW_C = 0.15
"""So far below its limit Tj is held: a few steps of a zone's reading, and far less than the degree that counts."""

CAPACITY_J_C_W = 4.0
"""Heat capacity of the sink, J/degC, per watt of ordinary power, to begin with: the smaller end of what the modules'
public time constants and resistances give, which errs on the side of slowness."""
LEAST_CAPACITY_J_C_W = 1.0
MOST_DIE_C_W = 1.0
FIRST_LOSS = 0.01
FIRST_DIE_C_W = 0.3
RANGES = ((0.0004, 1.0), (0.002, 0.08), (-10.0, 10.0), (0.0, 1.0))
"""What heat, loss, ambient and die can be at all."""
SLOPE_SD = 0.004
"""Noise of the filtered derivative, degC/s: readings in steps of 1/32 to 1/2 degC."""
AMBIENT_DRIFT = 0.003
"""Random walk of `ambient` per root second: a fan that starts, sun, a draught."""
RATE_DRIFT = 0.004
"""The same of the others, relative."""

Vector = tuple[float, float, float, float]
Matrix = tuple[Vector, Vector, Vector, Vector]


@dataclass(frozen=True, slots=True)
class ThermalState:
    """Filters of Tj (degC) and power (W), and the model: (heat, loss, ambient, die) with its covariance."""

    tj_c: float = 0.0
    fast_c: float = 0.0
    slow_c: float = 0.0
    both_c: float = 0.0
    fast_w: float = 0.0
    slow_w: float = 0.0
    both_w: float = 0.0
    model: Vector = (0.0, 0.0, 0.0, 0.0)
    covariance: Matrix = ((0.0,) * 4,) * 4
    due_s: float = 0.0
    ordinary_w: float = 1.0
    started: bool = False

    @property
    def power_w(self) -> float:
        """Power over the last seconds, W."""
        return self.fast_w

    @property
    def slope_c_s(self) -> float:
        """How fast Tj rises, degC/s."""
        return (self.fast_c - self.slow_c) / (SLOW_S - FAST_S)


def felt(state: ThermalState, tj_c: float, power_w: float, span_s: float, ordinary_w: float) -> ThermalState:
    """One reading more. `ordinary_w`: the power that this device is made for, to begin with a sink that fits it."""
    if not state.started:
        heat = 1.0 / (CAPACITY_J_C_W * ordinary_w)
        ambient = FIRST_LOSS * tj_c - heat * power_w  # as if at rest, until something else shows
        variances = (heat**2, 0.006**2, 0.3**2, 0.15**2)
        covariance = tuple(
            tuple(variances[row] if row == column else 0.0 for column in range(4)) for row in range(4)
        )  # fmt: skip
        return ThermalState(
            tj_c, tj_c, tj_c, tj_c, power_w, power_w, power_w, (heat, FIRST_LOSS, ambient, FIRST_DIE_C_W),
            covariance, EVERY_S, ordinary_w, True,  # type: ignore[arg-type]
        )  # fmt: skip
    fast, slow = math.exp(-span_s / FAST_S), math.exp(-span_s / SLOW_S)
    fast_c = tj_c + (state.fast_c - tj_c) * fast
    fast_w = power_w + (state.fast_w - power_w) * fast
    state = replace(
        state,
        tj_c=tj_c,
        fast_c=fast_c,
        slow_c=tj_c + (state.slow_c - tj_c) * slow,
        both_c=fast_c + (state.both_c - fast_c) * slow,
        fast_w=fast_w,
        slow_w=power_w + (state.slow_w - power_w) * slow,
        both_w=fast_w + (state.both_w - fast_w) * slow,
        due_s=state.due_s - span_s,
    )
    return state if state.due_s > 0 else _corrected(state)


def allowed_w(state: ThermalState, limit_c: float) -> float:
    """Module power with which Tj comes up to `limit_c` within the horizon and not beyond, W; it may be below 0."""
    heat, loss, ambient, die = state.model
    left = math.exp(-loss * HORIZON_S)
    target_c = limit_c - BELOW_C
    # Tj(H) = settled + (Tj + die x (P - now) - settled) x left, settled = (heat x P + ambient) / loss
    gain = heat / loss * (1.0 - left) + die * left
    base_c = ambient / loss * (1.0 - left) + (max(state.fast_c, state.tj_c) - die * state.fast_w) * left
    modelled_w = (target_c - base_c) / gain
    # a model that has not seen enough must not say that a cool device is hot: the quickest sink there is takes longer
    room_c = target_c - max(state.fast_c, state.tj_c) - HORIZON_S * max(0.0, state.slope_c_s)
    return max(
        modelled_w, state.fast_w + room_c / (MOST_DIE_C_W + HORIZON_S / (LEAST_CAPACITY_J_C_W * state.ordinary_w))
    )


def _corrected(state: ThermalState) -> ThermalState:
    """The model after a look at how Tj moved: one step of the Kalman filter."""
    seen = (state.both_w, -state.both_c, 1.0, (state.fast_w - state.slow_w) / (SLOW_S - FAST_S))
    model = state.model
    drift = (
        (RATE_DRIFT * model[0]) ** 2, (RATE_DRIFT * model[1]) ** 2, AMBIENT_DRIFT**2, (RATE_DRIFT * model[3]) ** 2,
    )  # fmt: skip
    rows = [list(row) for row in state.covariance]
    for index in range(4):
        rows[index][index] += drift[index] * EVERY_S
    reach = [sum(row[k] * seen[k] for k in range(4)) for row in rows]
    total = sum(reach[k] * seen[k] for k in range(4)) + SLOPE_SD**2
    surprise = state.slope_c_s - sum(model[k] * seen[k] for k in range(4))
    values = []
    for index in range(4):
        low, high = RANGES[index]
        values.append(min(max(model[index] + reach[index] / total * surprise, low), high))
    covariance = tuple(
        tuple(rows[row][column] - reach[row] * reach[column] / total for column in range(4)) for row in range(4)
    )
    return replace(
        state, model=(values[0], values[1], values[2], values[3]), covariance=covariance, due_s=EVERY_S,  # type: ignore[arg-type]
    )  # fmt: skip
