"""How long models run beside each other: one run, one thread, one after the other in turns.

Two figures that were taken one after the other tell more of what else the machine did than of the models. In turns,
what slows one slows all, and the ratio of a round is right even where its times are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_runtime.engine.onnxrt import open_session
from edge_runtime.engine.session_check import grey_picture
from edge_runtime.records.spec import InputSpec

__all__ = ["Latencies", "measure_latency"]

_WARM_UP = 3
_LEAST_ROUNDS = 5
_LEVEL = 0.9
_RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of each model, in their order: `median_ms` of a run of one batch, and `speed` against the first model: the
    median over the rounds of the first one's time by its own (above 1: faster; the first one's is 1). `low` and `high`
    are its 90 % interval (bootstrap over the rounds, Efron)."""

    median_ms: tuple[float, ...]
    speed: tuple[float, ...]
    rounds: int
    low: tuple[float, ...]
    high: tuple[float, ...]


def measure_latency(
    models: Sequence[bytes],
    spec: InputSpec,
    *,
    where: str,
    rounds: int = 30,
    limit_s: float = 20.0,
    picture: Any = None,
    seed: int = 0,
    clock: Callable[[], float] = time.thread_time,
) -> Latencies:
    """Run ONNX models of one input (`spec`) in turns, each on one thread that does not spin.

    `clock` (s) is that thread's CPU time: what it waits for others is no model's matter.

    `picture`: [*spec.shape] of `spec.dtype`, grey where none is given: a quantised model does the same work whatever it
    sees. It ends after `rounds`, or from the fifth on when `limit_s` of seconds are over. A round goes forwards or
    backwards by turns, so that none always follows the same one. `seed`: of the bootstrap.

    Raises BundleError where one cannot be loaded (`where` names it), ValueError without models.
    """
    if not models:
        raise ValueError("no models to measure")
    runs = [_runner(model, spec, where, picture) for model in models]
    for run in runs:
        for _ in range(_WARM_UP):
            run()
    times: list[list[float]] = []
    started = clock()
    while len(times) < rounds and (len(times) < _LEAST_ROUNDS or clock() - started < limit_s):
        taken = [0.0] * len(runs)
        order = range(len(runs)) if len(times) % 2 == 0 else reversed(range(len(runs)))
        for place in order:
            before = clock()
            runs[place]()
            taken[place] = (clock() - before) * 1e3
        times.append(taken)
    all_ms = np.array(times)
    ratios = all_ms[:, :1] / np.maximum(all_ms, 1e-9)
    draws = np.random.default_rng(seed).integers(0, len(times), (_RESAMPLES, len(times)))
    low, high = np.quantile(np.median(ratios[draws], axis=1), ((1 - _LEVEL) / 2, (1 + _LEVEL) / 2), axis=0)
    return Latencies(
        tuple(np.median(all_ms, axis=0).tolist()),
        tuple(np.median(ratios, axis=0).tolist()),
        len(times),
        tuple(low.tolist()),
        tuple(high.tolist()),
    )


def _runner(model: bytes, spec: InputSpec, where: str, picture: Any) -> Callable[[], object]:
    session = open_session(model, where)
    (only,) = session.get_inputs()
    side = only.shape[0]
    count = side if isinstance(side, int) and side > 0 else 1
    batch = grey_picture(spec, count)
    if picture is not None:
        batch[:] = picture
    feed = {only.name: batch}
    return lambda: session.run(None, feed)
