"""What a frame costs, learned while running: module power = base + scale x work + picture x offered.

*Work* is the planned or measured load in watts by the costs that are known beforehand (a profile, or time on a lane):
frames per second x joules per frame, summed over models. `scale` is how far those costs are off on this very device.
*Offered* is what cameras bring, pictures per second, whatever becomes of them: they are decoded, at `picture` joules
each. `base` is everything else: idle power, leakage.

A Kalman filter tracks the three from smoothed readings; its covariance says how far the answer may be trusted for a
load that has not been tried yet. A load that stands still says nothing about costs: they are left alone then, since the
unevenness of the load as it is measured (whole frames) would pull them down. What power does meanwhile is the base's,
and shows at once in a fast offset.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LAG_S = 0.7
"""Power follows the load by about this: conversion of the sensor, capacitors, clocks."""
SMOOTH_S = 1.5
"""Several frames of a slow camera, and two or three readings of the slowest sensor."""
OFFSET_S = 0.6
STILL_S = 6.0
MOVED = 0.08
"""The load has moved where it differs from its mean over STILL_S by this share."""
BASE_DRIFT = 0.003
"""Random walk of the base, as a share of the power per root second: leakage, other programs."""
SCALE_DRIFT = 0.02
"""Random walk of the costs per root second while the load moves, relative: other pictures, other clocks."""
MAX_SCALE_SD = 0.25
"""Beyond this (relative) costs do not become uncertain with time alone."""
REPEATS = 6.0
"""Smoothed readings resemble those before: so many of them tell as much as one would."""
LAG_DOUBT = 0.5
"""While the load moves, power may be off by this share of what is still to come: no two devices' lags are the same."""
LEAST_SCALE, MOST_SCALE = 0.1, 10.0

Vector = tuple[float, float, float]
Matrix = tuple[Vector, Vector, Vector]


@dataclass(frozen=True, slots=True)
class EnergyState:
    """The estimate after some readings: W, 1, J.

    `work_w`, `offered_hz`: the load as the sensor sees it by now. `now_hz`: what is offered now. `smooth_*`: smoothed
    load and power. `still_w`, `still_hz`: the load's long means. `unrest_w`: how much of the load power has not shown
    of late. `covariance` of (base, scale, picture). `noise_var`: of a reading, W^2.
    """

    offset_w: float = 0.0
    slow_base_w: float = 0.0
    scale: float = 1.0
    picture_j: float = 0.0
    covariance: Matrix = ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
    work_w: float = 0.0
    offered_hz: float = 0.0
    now_hz: float = 0.0
    smooth_work_w: float = 0.0
    smooth_hz: float = 0.0
    smooth_w: float = 0.0
    still_w: float = 0.0
    still_hz: float = 0.0
    unrest_w: float = 0.0
    noise_var: float = 0.0
    started: bool = False

    @property
    def base_w(self) -> float:
        """Module power without any inference, with what cameras bring now, W."""
        return max(0.0, self.slow_base_w + self.offset_w + self.picture_j * self.now_hz)

    def power_w(self, work_w: float) -> float:
        """Module power expected at a load, W."""
        return self.base_w + self.scale * work_w

    def sd_w(self, work_w: float) -> float:
        """How far that may be off, one standard deviation, W: at the load of now by what a reading is off, further away
        by what the scale may be."""
        away_w = work_w - self.work_w
        return math.sqrt(self.noise_var / REPEATS + away_w * away_w * self.covariance[1][1])


def begun(power_w: float, work_w: float, offered_hz: float, *, scale_sd: float, picture_j: float) -> EnergyState:
    """The estimate after one reading. `scale_sd`: how far the known costs may be off, relative; `picture_j`: what a
    picture may take to decode, with no better knowledge than that."""
    picture_j = min(picture_j, 0.3 * power_w / max(offered_hz, 1e-9))
    base_w = max(0.0, power_w - work_w - picture_j * offered_hz)
    # the sum is known as well as a reading is: what the costs are off by is taken from the base
    pairs = ((-work_w, 1.0, 0.0, scale_sd**2), (-offered_hz, 0.0, 1.0, picture_j**2))
    covariance = [[(0.02 * power_w) ** 2, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    for first, second, third, variance in pairs:
        way = (first, second, third)
        for row in range(3):
            for column in range(3):
                covariance[row][column] += way[row] * way[column] * variance
    return EnergyState(
        0.0, base_w, 1.0, picture_j, _matrix(covariance), work_w, offered_hz, offered_hz, work_w, offered_hz, power_w,
        work_w, offered_hz, 0.0, (0.01 * power_w) ** 2, True,
    )  # fmt: skip


def measured(
    state: EnergyState, power_w: float, work_w: float, offered_hz: float, span_s: float, quantum_w: float
) -> EnergyState:
    """One reading more: mean power over `span_s` seconds in which the load was `work_w` and `offered_hz`."""
    before_w, before_hz = state.work_w, state.offered_hz
    state = missed(state, work_w, offered_hz, span_s)
    # the load as a first-order lag shows it, on the average over the span
    late = -math.expm1(-span_s / LAG_S) * LAG_S / span_s
    mean_w, mean_hz = work_w + (before_w - work_w) * late, offered_hz + (before_hz - offered_hz) * late
    keep, still = math.exp(-span_s / SMOOTH_S), math.exp(-span_s / STILL_S)
    surprise_w = power_w - (state.slow_base_w + state.scale * mean_w + state.picture_j * mean_hz)
    offset_w = surprise_w + (state.offset_w - surprise_w) * math.exp(-span_s / OFFSET_S)
    odd_w = surprise_w - state.offset_w
    noise_var = state.noise_var + 0.05 * (min(odd_w * odd_w, 9 * state.noise_var) - state.noise_var)
    state = replace(
        state,
        offset_w=offset_w,
        smooth_work_w=mean_w + (state.smooth_work_w - mean_w) * keep,
        smooth_hz=mean_hz + (state.smooth_hz - mean_hz) * keep,
        smooth_w=power_w + (state.smooth_w - power_w) * keep,
        still_w=mean_w + (state.still_w - mean_w) * still,
        still_hz=mean_hz + (state.still_hz - mean_hz) * still,
        unrest_w=abs(work_w - mean_w) + (state.unrest_w - abs(work_w - mean_w)) * keep,
        noise_var=max(noise_var, (0.003 * power_w) ** 2, (0.3 * quantum_w) ** 2),
    )
    return _corrected(state, power_w, span_s)


def missed(state: EnergyState, work_w: float, offered_hz: float, span_s: float) -> EnergyState:
    """Time that passed without a reading, under this load."""
    keep = math.exp(-span_s / LAG_S)
    return replace(
        state,
        work_w=work_w + (state.work_w - work_w) * keep,
        offered_hz=offered_hz + (state.offered_hz - offered_hz) * keep,
        now_hz=offered_hz,
    )


def unsure(state: EnergyState, relative: float) -> EnergyState:
    """After a change whose cost is only known by its share: the scale may be off by `relative` more."""
    # what is measured now stays as sure as it is: the base takes the opposite
    way = (-state.work_w, 1.0, 0.0)
    added = (relative * state.scale) ** 2
    covariance = [
        [state.covariance[row][column] + way[row] * way[column] * added for column in range(3)] for row in range(3)
    ]
    return replace(state, covariance=_matrix(covariance))


def _corrected(state: EnergyState, power_w: float, span_s: float) -> EnergyState:
    """One step of the Kalman filter, on the smoothed reading."""
    seen = (1.0, state.smooth_work_w, state.smooth_hz)
    moved = _moved(state.smooth_work_w, state.still_w) or _moved(state.smooth_hz, state.still_hz)
    rows = [list(row) for row in state.covariance]
    rows[0][0] += (BASE_DRIFT * power_w) ** 2 * span_s
    if moved:
        for index, value in ((1, state.scale), (2, state.picture_j)):
            most = max(rows[index][index], (MAX_SCALE_SD * value) ** 2)
            rows[index][index] = min(rows[index][index] + (SCALE_DRIFT * value) ** 2 * span_s, most)
    reach = [sum(row[k] * seen[k] for k in range(3)) for row in rows]
    noise_var = REPEATS * (state.noise_var + (LAG_DOUBT * state.scale * state.unrest_w) ** 2)
    total = sum(reach[k] * seen[k] for k in range(3)) + noise_var
    gain = [each / total for each in reach] if moved else [reach[0] / total, 0.0, 0.0]
    surprise_w = state.smooth_w - (
        state.slow_base_w + state.scale * state.smooth_work_w + state.picture_j * state.smooth_hz
    )
    base_w = min(max(0.0, state.slow_base_w + gain[0] * surprise_w), power_w)
    scale = min(max(state.scale + gain[1] * surprise_w, LEAST_SCALE), MOST_SCALE)
    picture_j = max(0.0, state.picture_j + gain[2] * surprise_w)
    # (I - K h) P (I - K h)' + K R K', which holds for any gain
    covariance = [
        [
            rows[i][j] - gain[i] * reach[j] - reach[i] * gain[j] + gain[i] * gain[j] * total
            for j in range(3)
        ]
        for i in range(3)
    ]  # fmt: skip
    # what the slow estimate took over is no longer the offset's, at the load of now
    taken_w = (
        (base_w - state.slow_base_w)
        + (scale - state.scale) * state.work_w
        + (picture_j - state.picture_j) * state.offered_hz
    )
    return replace(
        state, slow_base_w=base_w, scale=scale, picture_j=picture_j, offset_w=state.offset_w - taken_w,
        covariance=_matrix(covariance),
    )  # fmt: skip


def _moved(now: float, mean: float) -> bool:
    return abs(now - mean) > MOVED * max(now, mean, 1e-9)


def _matrix(rows: list[list[float]]) -> Matrix:
    """Symmetric, with a positive diagonal."""
    for index in range(3):
        rows[index][index] = max(rows[index][index], 1e-12)
    first, second, third = rows
    return (
        (first[0], first[1], first[2]),
        (first[1], second[1], second[2]),
        (first[2], second[2], third[2]),
    )
