"""A device in virtual time: cameras, lanes and batches as discrete events, over the plant and its sensors.

No threads, no clock: hours go by in seconds, and the same seed gives the same run. What is modelled of the pipeline:
caps on a grid of capture times, mailboxes that keep only the newest picture, claims by priority and age, batches that
wait for company, lanes that a slower clock stretches.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Protocol

from edge_runtime.records.governing import (
    Budget,
    CameraSeen,
    Decision,
    GovernorSample,
    ModelSeen,
    OperatingPoint,
    Site,
)
from edge_runtime.sim.gauge import Gauge
from edge_runtime.sim.load import SimLoad
from edge_runtime.sim.module import declared
from edge_runtime.sim.parts import Batch, Camera, Lane, Mailbox, Model, take
from edge_runtime.sim.plant import Plant
from edge_runtime.sim.sensors import SENSOR_PERIOD_S, SimSensor

GOVERNOR_PERIOD_S = 0.25

_TICKS_A_SECOND = 10
_PICTURE, _FINISHED, _DEADLINE = 0, 1, 2
_CPU_BACKLOG_S = 1.0
"""More CPU work than this is not waited for; it was lost with the pictures that it was for."""


class Steered(Protocol):
    """A governor, as far as a world is concerned. `begin`: the point to begin with, before anything has been seen."""

    def begin(self, site: Site, budget: Budget) -> OperatingPoint: ...

    def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision: ...


@dataclass(frozen=True, slots=True)
class Second:
    """What really was in one second: mean module power (W), highest Tj (degC), for how long the hardware throttled (s),
    pictures given and frames completed by camera (once a model), variants by model, changes of the operating
    point, latencies (ms; only where they are kept)."""

    power_w: float
    tj_c: float
    throttled_s: float
    offered: tuple[int, ...]
    completed: tuple[int, ...]
    variants: tuple[str, ...]
    changes: int
    latencies_ms: tuple[float, ...]


class World:
    """`load` on the `plant`, seen through `sensor`. `truth` has what no governor is told, second by second.

    Begins without any cap, on every model's first variant. `keep_latencies`: in `truth`, too.
    """

    def __init__(
        self, plant: Plant, load: SimLoad, sensor: SimSensor, *, seed: int = 0, keep_latencies: bool = False
    ) -> None:
        self.plant = plant
        self.now_s = 0.0
        self.truth: list[Second] = []
        self.point: OperatingPoint | None = None
        self._random = random.Random(seed).random
        self._sensor = sensor
        self._gauge = Gauge(sensor)
        self._quantum_w = declared(plant.parameters.name).quantum_w
        self._keep_latencies = keep_latencies
        self._heap: list[tuple[float, int, int, Camera | Lane | Batch, int]] = []
        self._sequence = 0
        self._ticks = 0
        self._speed = plant.speed
        self._cpu_s = 0.0
        self._t_observed_s = 0.0
        self._power_sum = self._throttled_s = 0.0
        self._tj_c = plant.tj_c
        self._changes = 0
        self._latencies_ms: list[float] = []
        self.models = {each.name: Model(each) for each in load.models}
        self.cameras = {each.name: Camera(each) for each in load.cameras}
        self._lanes = max(1, sum(each.lanes for each in load.models))
        for camera in self.cameras.values():
            for name in camera.model.models:
                mailbox = Mailbox(camera, self.models[name])
                camera.mailboxes.append(mailbox)
                self.models[name].mailboxes.append(mailbox)
            # cameras are not started by one hand
            hz = camera.model.schedule.hz(0.0)
            camera.due_s = self._random() / hz if hz > 0 else self._next_change(camera)
            self._push(camera.due_s, _PICTURE, camera)

    # --- as a governor sees it

    def apply(self, point: OperatingPoint) -> None:
        """Run like this from now on; at once."""
        if point == self.point:
            return
        self.point = point
        self._changes += 1
        for name, camera in self.cameras.items():
            camera.limit(point.fps.get(name))
        for name, model in self.models.items():
            model.timeout_s = point.batch_timeout_ms.get(name, model.model.batch_timeout_ms) / 1e3
            model.batch = max(1, min(point.batch.get(name, model.model.places), model.model.places))
            variant = point.variants.get(name)
            if variant is not None and variant != model.variant.name:
                if (batch := model.open) is not None:
                    model.open = None
                    self._start(model, batch)
                model.choose(variant)
            self._feed(model)
        self.plant.cap_hz = point.gpu_hz
        self._stretch()

    def observe(self) -> GovernorSample:
        """What has happened since the last look, through the sensors."""
        gauged = self._gauge.look()
        cameras = {}
        for name, camera in self.cameras.items():
            cameras[name] = CameraSeen(camera.offered - camera.seen, camera.model.schedule.hz(self.now_s) > 0)
            camera.seen = camera.offered
        models = {name: self._seen(model) for name, model in self.models.items()}
        span_s = self.now_s - self._t_observed_s
        self._t_observed_s = self.now_s
        newest = gauged.newest
        return GovernorSample(
            t_ns=round(self.now_s * 1e9),
            span_s=span_s,
            power_w=gauged.power_w,
            tj_c=gauged.tj_c,
            cameras=cameras,
            models=models,
            power_reason=gauged.power_reason,
            tj_reason=gauged.tj_reason,
            quantum_w=self._quantum_w,
            throttling=None if newest is None else newest.throttling,
            gpu_hz=None if newest is None else newest.gpu_hz,
        )

    def _seen(self, model: Model) -> ModelSeen:
        model.account(self.now_s)
        busy_s, model.busy_seen_s = model.busy_s - model.busy_seen_s, model.busy_s
        seen = ModelSeen(model.variant.name, busy_s, model.frames, model.batches, tuple(model.latencies_ms))
        model.frames = model.batches = 0
        model.latencies_ms = []
        return seen

    # --- time

    def advance(self, until_s: float) -> None:
        """Let everything happen up to that time (s since the start, not before now)."""
        heap = self._heap
        while True:
            tick_s = (self._ticks + 1) / _TICKS_A_SECOND
            if heap and heap[0][0] < tick_s:
                t_s, _, kind, what, version = heap[0]
                if t_s > until_s:
                    break
                heapq.heappop(heap)
                self.now_s = t_s
                if kind == _PICTURE:
                    assert isinstance(what, Camera)
                    self._picture(what)
                elif kind == _FINISHED:
                    assert isinstance(what, Lane)
                    if what.version == version:
                        self._finished(what)
                elif isinstance(what, Batch) and what.model.open is what:
                    self._feed(what.model)
                continue
            if tick_s > until_s:
                break
            self.now_s = tick_s
            self._ticks += 1
            self._tick()
        self.now_s = until_s

    def _push(self, t_s: float, kind: int, what: Camera | Lane | Batch, version: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (t_s, self._sequence, kind, what, version))

    def _picture(self, camera: Camera) -> None:
        now_s = self.now_s
        each = camera.model
        hz = each.schedule.hz(now_s)
        if hz <= 0:
            camera.due_s = self._next_change(camera)
            self._push(camera.due_s, _PICTURE, camera)
            return
        camera.offered += 1
        self._cpu_s += each.decode_s
        if camera.wants(now_s):
            for mailbox in camera.mailboxes:
                mailbox.put(now_s)
                self._feed(mailbox.model)
        interval_s = 1.0 / hz
        camera.due_s += interval_s
        if camera.due_s < now_s - interval_s:  # it was down
            camera.due_s = now_s + interval_s
        self._push(max(now_s, camera.due_s + interval_s * each.jitter * (2.0 * self._random() - 1.0)), _PICTURE, camera)

    def _next_change(self, camera: Camera) -> float:
        """When a camera that is down may come back."""
        changes = [change_s for change_s in camera.model.schedule.changes if change_s > self.now_s]
        return changes[0] + 1e-9 if changes else self.now_s + SENSOR_PERIOD_S

    def _feed(self, model: Model) -> None:
        """Let idle lanes claim what waits."""
        while model.idle:
            batch = model.open
            if batch is None:
                if not model.ready:
                    return
                batch = Batch(model)
            while model.ready and len(batch.frames) < model.batch:
                frame = take(model)
                batch.frames.append(frame)
                batch.deadline_s = min(batch.deadline_s, frame[0] + model.timeout_s)
            if len(batch.frames) < model.batch and self.now_s < batch.deadline_s and self._worth_waiting(batch):
                if model.open is not batch or batch.deadline_s < batch.wake_s:
                    model.open = batch
                    batch.wake_s = batch.deadline_s
                    self._push(batch.deadline_s, _DEADLINE, batch)
                return
            model.open = None
            self._start(model, batch)

    def _worth_waiting(self, batch: Batch) -> bool:
        """Whether some camera is likely to bring another frame in time, by its rhythm."""
        now_s, deadline_s = self.now_s, batch.deadline_s
        return any(mailbox.expects_before(now_s, deadline_s) for mailbox in batch.model.mailboxes)

    def _start(self, model: Model, batch: Batch) -> None:
        now_s = self.now_s
        model.account(now_s)
        lane = model.idle.pop()
        model.running.append(lane)
        lane.frames = batch.frames
        count = len(batch.frames)
        variant = batch.variant
        self._cpu_s += variant.preprocess_s * count
        lane.end_s = now_s + (variant.overhead_s + variant.frame_s * count) / self._speed
        lane.version += 1
        self._push(lane.end_s, _FINISHED, lane, lane.version)

    def _finished(self, lane: Lane) -> None:
        now_s = self.now_s
        model = lane.model
        model.account(now_s)
        model.running.remove(lane)
        model.idle.append(lane)
        model.batches += 1
        model.frames += len(lane.frames)
        for t_capture_s, mailbox in lane.frames:
            mailbox.completed += 1
            latency_ms = (now_s - t_capture_s) * 1e3
            model.latencies_ms.append(latency_ms)
            if self._keep_latencies:
                self._latencies_ms.append(latency_ms)
        lane.frames = []
        self._feed(model)

    def _stretch(self) -> None:
        """The clock may have changed: runs under way go on at the new one."""
        before, now = self._speed, self.plant.speed
        if before == now:
            return
        self._speed = now
        for model in self.models.values():
            for lane in model.running:
                lane.end_s = self.now_s + (lane.end_s - self.now_s) * before / now
                lane.version += 1
                self._push(lane.end_s, _FINISHED, lane, lane.version)

    def _tick(self) -> None:
        plant, now_s = self.plant, self.now_s
        busy_s = 0.0
        for model in self.models.values():
            model.account(now_s)
            busy_s += model.busy_s - model.busy_ticked_s
            model.busy_ticked_s = model.busy_s
        room_s = SENSOR_PERIOD_S * plant.parameters.cpu_cores
        cpu_s = min(self._cpu_s, room_s)
        self._cpu_s = min(self._cpu_s - cpu_s, _CPU_BACKLOG_S)
        plant.step(SENSOR_PERIOD_S, busy_s / (self._lanes * SENSOR_PERIOD_S), cpu_s / room_s)
        self._sensor.convert(plant)
        self._gauge.poll(round(now_s * 1e9))
        self._power_sum += plant.power_w
        self._tj_c = max(self._tj_c, plant.tj_c)
        if plant.throttled:
            self._throttled_s += SENSOR_PERIOD_S
        if plant.shutdown and self._heap:  # nothing runs any more, and what is in flight stays so
            self._heap.clear()
            for model in self.models.values():
                model.halt(now_s)
        self._stretch()
        if self._ticks % _TICKS_A_SECOND == 0:
            self._close_second()

    def _close_second(self) -> None:
        offered, completed = [], []
        for camera in self.cameras.values():
            offered.append(camera.offered - camera.told_offered)
            camera.told_offered = camera.offered
            done = sum(mailbox.completed for mailbox in camera.mailboxes)
            completed.append(done - camera.told_completed)
            camera.told_completed = done
        self.truth.append(
            Second(
                self._power_sum / _TICKS_A_SECOND,
                self._tj_c,
                self._throttled_s,
                tuple(offered),
                tuple(completed),
                tuple(model.variant.name for model in self.models.values()),
                self._changes,
                tuple(self._latencies_ms),
            )
        )
        self._power_sum = self._throttled_s = 0.0
        self._tj_c = self.plant.tj_c
        self._changes = 0
        self._latencies_ms = []


def steer(
    world: World, controller: Steered, site: Site, budget: Budget, until_s: float, period_s: float = GOVERNOR_PERIOD_S
) -> list[tuple[float, Decision]]:
    """Let `controller` decide every `period_s` until then; its decisions are applied at once. Returns those that
    changed the state or the point, with their times (s)."""
    decisions: list[tuple[float, Decision]] = []
    start_s = world.now_s
    world.apply(controller.begin(site, budget))
    for number in range(1, math.floor((until_s - start_s) / period_s + 1e-9) + 1):
        world.advance(start_s + number * period_s)
        before = world.point
        decision = controller.step(site, budget, world.observe())
        world.apply(decision.point)
        if not decisions or decision.state != decisions[-1][1].state or decision.point != before:
            decisions.append((world.now_s, decision))
    world.advance(until_s)
    return decisions
