"""A model's lanes under live cameras in virtual time: newest-only mailboxes, batches, and rates as planned."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_runtime.camera.pacing import RateCap
from edge_runtime.governor.tuner import Tuner, TunerState, Tuning
from edge_runtime.records.governing import ModelSeen, ModelSite, VariantSite

STEP_S = 0.25
_NS = 1e9


@dataclass(slots=True)
class Look:
    """One step: what was offered and what came of it."""

    t_s: float
    offered_hz: float
    latencies_ms: list[float]
    busy_share: float
    tuning: Tuning
    depth: int


@dataclass(slots=True)
class _Camera:
    cap: RateCap
    waiting_s: float | None = None
    phase: float = 0.0


@dataclass(slots=True)
class World:
    """`rate(t_s)`: pictures a second of each of `cameras`, at even phases, or all at once `in_step`. `costs_s`: for
    each variant, the heaviest first, lane time of a run of n frames; `beside_s` per frame comes to it, and busy time
    leaves it out. `planned`: whether variants and rates are as the tuner says."""

    rate: Callable[[float], float]
    costs_s: Sequence[Callable[[int], float]]
    cameras: int = 8
    lanes: int = 2
    places: int = 1
    sizes: tuple[int, ...] | None = None
    beside_s: float = 0.0
    in_step: bool = False
    planned: bool = True
    budget_ms: float | None = 80.0
    seed: int = 1
    tuner: Tuner = field(default_factory=Tuner)

    def run(self, seconds: float) -> list[Look]:
        """The looks of a tuner that governs it, one every STEP_S."""
        rng = random.Random(self.seed)
        variants = tuple(VariantSite(str(depth), cost_s(1)) for depth, cost_s in enumerate(self.costs_s))
        site = ModelSite("m", self.lanes, variants, self.places, self.sizes)
        depth = 0
        t_variant_s = 0.0
        state, tuning = TunerState(), Tuning(self.places, site.batch_timeout_ms, 0.95, None, overloaded=False)
        cameras = [_Camera(RateCap(None)) for _ in range(self.cameras)]
        order = itertools.count()
        events: list[tuple[float, int, str, int]] = []
        for index in range(self.cameras):
            at = 0.0 if self.in_step else index / self.cameras
            heapq.heappush(events, (at / self.rate(0.0), next(order), "picture", index))
        heapq.heappush(events, (STEP_S, next(order), "step", 0))
        free = self.lanes
        running: dict[int, tuple[float, list[float]]] = {}
        looks: list[Look] = []
        offered = batches = 0
        busy_s = 0.0  # of this step, runs under way left out
        learned_s = [cost_s(1) for cost_s in self.costs_s]
        done: list[float] = []
        while True:
            t_s, _, what, index = heapq.heappop(events)
            if what == "picture":
                camera = cameras[index]
                offered += 1
                if camera.cap.wants(int(t_s * _NS)):
                    camera.waiting_s = t_s
                jitter = rng.uniform(-0.05, 0.05) / self.rate(t_s) if not self.in_step else 0.0
                camera.phase += jitter
                heapq.heappush(events, (t_s + 1 / self.rate(t_s) + jitter, next(order), "picture", index))
            elif what == "done":
                free += 1
                started_s, captured = running.pop(index)
                beside_s = self.beside_s * len(captured)
                busy_s += t_s - beside_s - max(started_s, (len(looks)) * STEP_S)
                batches += 1
                done += [(t_s - each) * 1e3 for each in captured]
            elif what == "step":
                now_busy_s = busy_s + sum(
                    max(0.0, t_s - max(started_s, len(looks) * STEP_S)) for started_s, _ in running.values()
                )
                seen = ModelSeen(str(depth), now_busy_s, len(done), batches, tuple(done))
                offered_hz = offered / STEP_S
                state, tuning = self.tuner.step(site, self.budget_ms, seen, STEP_S, offered_hz, state)
                looks.append(Look(t_s, offered_hz, done, now_busy_s / STEP_S / self.lanes, tuning, depth))
                if done and t_s - t_variant_s > 2 * STEP_S:
                    learned_s[depth] += (now_busy_s / len(done) - learned_s[depth]) * 0.2
                if self.planned:
                    have_s = tuning.utilisation * self.lanes
                    if tuning.overloaded and depth + 1 < len(self.costs_s) and t_s - t_variant_s >= 1.0:
                        depth, t_variant_s = depth + 1, t_s
                    elif depth and offered_hz * learned_s[depth - 1] < 0.75 * have_s and not tuning.overloaded:
                        depth, t_variant_s = depth - 1, t_s
                    self._plan(cameras, offered_hz, learned_s[depth], tuning)
                offered = batches = 0
                busy_s, done = 0.0, []
                if t_s >= seconds:
                    return looks
                heapq.heappush(events, (t_s + STEP_S, next(order), "step", 0))
            while free:
                ready = sorted(
                    (each.waiting_s, place) for place, each in enumerate(cameras) if each.waiting_s is not None
                )
                if not ready:
                    break
                limit = min(tuning.batch, self.places)
                deadline_s = ready[0][0] + tuning.batch_timeout_ms / 1e3
                if len(ready) < min(limit, self.cameras) and t_s < deadline_s - 1e-9:
                    heapq.heappush(events, (deadline_s, next(order), "look", 0))
                    break
                taken = ready[:limit]
                for _, place in taken:
                    cameras[place].waiting_s = None
                free -= 1
                key = next(order)
                running[key] = (t_s, [captured_s for captured_s, _ in taken])
                took_s = self.costs_s[depth](len(taken)) * rng.uniform(0.95, 1.05) + self.beside_s * len(taken)
                heapq.heappush(events, (t_s + took_s, next(order), "done", key))

    def _plan(self, cameras: list[_Camera], offered_hz: float, busy_s: float, tuning: Tuning) -> None:
        most_hz = tuning.utilisation * self.lanes / busy_s
        share = most_hz / offered_hz if offered_hz else 1.0
        for camera in cameras:
            camera.cap.change(None if share >= 1.0 else max(0.2, share * offered_hz / self.cameras))
