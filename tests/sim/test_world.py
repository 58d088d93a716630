"""The world in virtual time: counts add up, lanes and power follow arithmetic, caps and batches are the pipeline's."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.pipeline import mailbox as pipeline
from edge_runtime.pipeline.mailbox import ReadyQueue
from edge_runtime.records.governing import Budget, Decision, GovernorSample, OperatingPoint, Site
from edge_runtime.sim.load import SimCamera, SimLoad, SimModel, SimVariant, Sine, Steps, flapping
from edge_runtime.sim.module import declared, plant_parameters
from edge_runtime.sim.parts import take
from edge_runtime.sim.plant import Plant, PlantParameters
from edge_runtime.sim.sensors import Fault, SimSensor
from edge_runtime.sim.world import World, steer

NX = plant_parameters("orin-nx-16gb", "40W")
HEAVY, LIGHT = SimVariant("heavy", 0.02), SimVariant("light", 0.005)


def steady(name: str, hz: float, **options: object) -> SimCamera:
    return SimCamera(name, Steps((hz,)), ("model",), **options)  # type: ignore[arg-type]


def load(
    *cameras: SimCamera, lanes: int = 1, places: int = 1, variants: tuple[SimVariant, ...] = (HEAVY, LIGHT)
) -> SimLoad:
    return SimLoad(cameras, (SimModel("model", lanes, variants, places),))


def world(
    what: SimLoad, each: PlantParameters = NX, *, ambient_c: float = 25.0, faults: tuple[Fault, ...] = ()
) -> World:
    sensor = SimSensor(declared(each.name), faults=faults)
    return World(Plant(each, ambient_c), what, sensor, keep_latencies=True)


def point(
    variant: str = "heavy", *, batch: int = 1, timeout_ms: float = 20.0, gpu_hz: float | None = None, **fps: float
) -> OperatingPoint:
    return OperatingPoint({"model": variant}, fps, {"model": batch}, {"model": timeout_ms}, gpu_hz)


def fps(what: World, name: str, start: int) -> float:
    index = list(what.cameras).index(name)
    return statistics.fmean(second.completed[index] for second in what.truth[start:])


# --- arithmetic


def test_lanes_and_power_follow_arithmetic() -> None:
    what = world(load(steady("a", 20, decode_s=0.0), lanes=2, variants=(SimVariant("heavy", 0.02, preprocess_s=0.0),)))
    what.advance(600)
    what.observe()
    what.advance(1200)
    sample = what.observe()
    assert sample.models["model"].busy_s / (600 * 2) == pytest.approx(20 * 0.02 / 2, rel=0.01)
    assert sample.models["model"].frames == pytest.approx(20 * 600, abs=2)
    settled = what.plant.settled(20 * 0.02 / 2, 0.0)
    assert settled is not None
    mean_w = statistics.fmean(second.power_w for second in what.truth[600:])
    assert mean_w == pytest.approx(settled[0], rel=0.005)
    assert sample.power_w == pytest.approx(mean_w, rel=0.01)
    assert sample.tj_c == pytest.approx(settled[1], abs=0.3)


def test_decoding_and_preprocessing_load_the_cpu() -> None:
    what = world(
        load(steady("a", 50, wanted_hz=10, decode_s=0.02), variants=(SimVariant("heavy", 0.001, preprocess_s=0.05),))
    )
    what.advance(60)
    want = (50 * 0.02 + 10 * 0.05) / NX.cpu_cores
    watts = statistics.fmean(second.power_w for second in what.truth[20:])
    settled = what.plant.settled(0.01, want)
    assert settled is not None
    assert watts == pytest.approx(settled[0], rel=0.03)


def test_an_idle_lane_answers_at_once_and_a_busy_one_when_it_is_free() -> None:
    what = world(load(steady("a", 10)))
    what.advance(20)
    latencies = [each for second in what.truth for each in second.latencies_ms]
    assert [min(latencies), max(latencies)] == pytest.approx([20, 20])
    crowded = world(load(steady("a", 100, jitter=0.0)))
    crowded.advance(60)
    # capacity 50 a second; newest only: what is claimed was captured less than an interval ago
    assert fps(crowded, "a", 10) == pytest.approx(50, rel=0.01)
    latencies = [each for second in crowded.truth[10:] for each in second.latencies_ms]
    assert 20 <= max(latencies) <= 30.001


def test_a_capped_clock_stretches_runs_also_those_under_way() -> None:
    what = world(load(steady("a", 5), variants=(SimVariant("heavy", 0.1),)))
    what.advance(10)
    what.apply(point(gpu_hz=NX.gpu_steps_hz[0]))
    what.advance(20)
    stretch = NX.gpu_max_hz / NX.gpu_steps_hz[0]
    assert what.truth[15].latencies_ms[0] > 100
    busy = what.observe()
    what.advance(30)
    busy = what.observe()
    assert busy.models["model"].busy_s == pytest.approx(10 * min(1.0, 5 * 0.1 * stretch), rel=0.05)
    assert busy.gpu_hz == NX.gpu_steps_hz[0]


def test_the_speed_of_a_run_changes_in_its_middle() -> None:
    what = world(load(steady("a", 0.5, jitter=0.0), variants=(SimVariant("heavy", 1.0),)))
    camera = what.cameras["a"]
    start_s = camera.due_s
    what.advance(start_s + 0.5)
    what.apply(point(gpu_hz=408e6))
    what.advance(10)
    first = next(each for second in what.truth for each in second.latencies_ms)
    assert first == pytest.approx((0.5 + 0.5 * 1173 / 408) * 1e3, rel=1e-6)


# --- counts


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.5, 60), st.integers(0, 2), st.floats(0, 0.4)), min_size=1, max_size=5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.lists(
        st.tuples(st.floats(0.05, 3), st.integers(0, 3), st.sampled_from((0.0, 0.1, 3.0, 40.0)), st.integers(0, 8)),
        max_size=6,
    ),
)
def test_every_frame_is_counted_once(
    cameras: list[tuple[float, int, float]], lanes: int, places: int, moves: list[tuple[float, int, float, int]]
) -> None:
    each = [steady(f"c{i}", hz, priority=priority, jitter=jitter) for i, (hz, priority, jitter) in enumerate(cameras)]
    what = world(load(*each, lanes=lanes, places=places))
    completed = 0
    for seconds, kind, value, step in moves:
        what.advance(what.now_s + seconds)
        gpu_hz = NX.gpu_steps_hz[step % len(NX.gpu_steps_hz)]
        variant = "light" if kind % 2 else "heavy"
        what.apply(point(variant, batch=kind + 1, timeout_ms=value, gpu_hz=gpu_hz, c0=value))
        sample = what.observe()
        assert sample.models["model"].busy_s <= sample.span_s * lanes + 1e-6
        assert len(sample.models["model"].latencies_ms) == sample.models["model"].frames
        completed += sample.models["model"].frames
        model = what.models["model"]
        in_hand = [frame for lane in model.running for frame in lane.frames]
        in_hand += [] if model.open is None else model.open.frames
        assert len(model.running) + len(model.idle) == lanes
        assert not (model.idle and model.ready)
        for camera in what.cameras.values():
            for mailbox in camera.mailboxes:
                held = sum(frame[1] is mailbox for frame in in_hand) + (mailbox in model.ready)
                assert mailbox.captured == mailbox.completed + mailbox.stale + held
                assert mailbox.captured <= camera.offered
        assert completed == sum(mailbox.completed for mailbox in model.mailboxes)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = []
    for _ in range(2):
        what = world(load(steady("a", 17), steady("b", 29, jitter=0.3), lanes=2))
        what.advance(120)
        runs.append(what.truth)
    assert runs[0] == runs[1]


# --- the pipeline's ways


def test_a_cap_holds_its_rate_exactly_and_zero_means_none() -> None:
    what = world(load(steady("a", 25), steady("b", 30), lanes=4))
    what.apply(point(a=15.0, b=0.0))
    what.advance(110)
    assert fps(what, "a", 10) == pytest.approx(15, abs=0.1)
    assert fps(what, "b", 10) == 0
    sample = what.observe()
    assert sample.cameras["b"].offered == pytest.approx(30 * 110, abs=2)
    what.apply(replace(point(), fps={"a": None, "b": None}))
    what.advance(130)
    assert fps(what, "a", 115) == pytest.approx(25, abs=0.1)


def test_a_cap_beyond_what_is_wanted_is_none() -> None:
    what = world(load(steady("a", 30, wanted_hz=10)))
    what.apply(point(a=20.0))
    what.advance(60)
    assert fps(what, "a", 10) == pytest.approx(10, abs=0.1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.lists(st.integers(-1, 4), max_size=60))
def test_claims_are_in_the_pipelines_order(priorities: list[int], moves: list[int]) -> None:
    """The same frames come to a model's queue here and in the pipeline, and are claimed (-1) from both."""
    each = [steady(f"c{index}", 1, priority=priority) for index, priority in enumerate(priorities)]
    model = world(load(*each)).models["model"]
    queue, monitor = ReadyQueue(), threading.Lock()
    boxes = [pipeline.Mailbox(cast(Any, None), monitor, capacity=None, priority=each) for each in priorities]
    for number, move in enumerate(moves):
        if move >= 0:
            index = move % len(boxes)
            boxes[index].entries.clear()
            boxes[index].entries.append(cast(Any, index))
            queue.add(boxes[index])
            model.mailboxes[index].put(float(number))
        elif queue:
            assert cast(Any, queue.take(len(boxes))) == model.mailboxes.index(take(model)[1])
        assert [model.mailboxes.index(mailbox) for mailbox in model.ready] == [boxes.index(box) for box in queue._ready]


def test_batches_fill_and_a_lone_frame_does_not_wait_for_ever() -> None:
    variants = (SimVariant("heavy", 0.002, overhead_s=0.02),)
    what = world(load(*[steady(f"c{i}", 25) for i in range(4)], places=4, variants=variants))
    what.advance(60)
    sample = what.observe()
    assert sample.models["model"].frames / sample.models["model"].batches > 1.8
    # a batch of one takes 22 ms: 100 frames a second fit only together
    assert sum(fps(what, f"c{i}", 10) for i in range(4)) == pytest.approx(100, rel=0.02)
    lone = world(load(steady("a", 5, jitter=0.0), places=4, variants=variants))
    lone.advance(20)
    # its next frame cannot come in time, and so it is not waited for
    assert max(each for second in lone.truth[5:] for each in second.latencies_ms) == pytest.approx(22)
    pair = world(load(steady("a", 50, jitter=0.0), places=4, variants=variants))
    pair.apply(point(batch=4, timeout_ms=100.0))
    pair.advance(20)
    assert max(each for second in pair.truth[5:] for each in second.latencies_ms) <= 100 + 28.1


def test_another_variant_serves_new_batches() -> None:
    what = world(load(steady("a", 40)))
    what.advance(10)
    assert what.observe().models["model"].variant == "heavy"
    what.apply(point("light"))
    what.advance(20)
    sample = what.observe()
    assert sample.models["model"].variant == "light"
    assert min(sample.models["model"].latencies_ms) == pytest.approx(5)
    with pytest.raises(KeyError):
        what.apply(point("missing"))


def test_cameras_come_and_go_by_their_schedules() -> None:
    what = world(
        load(
            SimCamera("flap", flapping(10, 20, 100), ("model",)),
            SimCamera("step", Steps((2, 20), (50,)), ("model",)),
            SimCamera("wave", Sine(5, 15, 40), ("model",)),
            lanes=2,
        )
    )
    for until_s, live in ((5, True), (15, False), (25, True)):
        what.advance(until_s)
        assert what.observe().cameras["flap"].live is live
    what.advance(100)
    offered = [[second.offered[index] for second in what.truth] for index in range(3)]
    assert sum(offered[0]) == pytest.approx(10 * 50, abs=8)
    assert sum(offered[0][11:20]) == 0
    assert sum(offered[1][:50]) == pytest.approx(100, abs=2)
    assert sum(offered[1][50:]) == pytest.approx(1000, abs=12)
    assert sum(offered[2][:80]) == pytest.approx(800, abs=8)
    for index, camera in enumerate(what.cameras.values()):
        assert camera.model.schedule.mean_hz(0, 100) * 100 == pytest.approx(sum(offered[index]), abs=12)


def test_two_models_of_a_camera_both_get_its_frames() -> None:
    models = tuple(SimModel(name, 1, (LIGHT,)) for name in ("one", "two"))
    what = world(SimLoad((SimCamera("a", Steps((10,)), ("one", "two")),), models))
    what.advance(20)
    sample = what.observe()
    assert sample.models["one"].frames == sample.models["two"].frames == pytest.approx(200, abs=2)
    assert sum(what.truth[10].completed) == pytest.approx(20, abs=2)


# --- sensors, heat and time


def test_a_governor_sees_sensors_and_not_the_truth() -> None:
    what = world(load(steady("a", 20)), faults=(Fault("missing", 10, 20), Fault("minus_256", 30, 40)))
    seen: list[GovernorSample] = []

    class Recorder:
        def begin(self, site: Site, budget: Budget) -> OperatingPoint:
            return point()

        def step(self, site: Site, budget: Budget, sample: GovernorSample) -> Decision:
            seen.append(sample)
            return Decision(point(), "holding", "", {}, changed=False)

    decisions = steer(what, Recorder(), load(steady("a", 20)).site(), Budget(), 50)
    assert len(seen) == 200
    assert len(decisions) == 1
    assert all(sample.span_s == pytest.approx(0.25) for sample in seen)
    for sample in seen:
        t_s = sample.t_ns / 1e9
        if 10.2 < t_s < 20:
            assert sample.power_w is None
            assert sample.tj_c is None
            assert sample.power_reason
        elif 30.2 < t_s < 40:
            assert sample.power_w is not None
            assert sample.tj_c is None
            assert sample.tj_reason
        elif t_s < 10 or t_s > 40.2:
            assert sample.power_w is not None
            assert sample.tj_c is not None
            assert sample.quantum_w == 0.04


def test_a_hot_device_throttles_its_lanes() -> None:
    hot = NX.scaled(thermal_resistance=3.0, power=1.5, tau=0.3)
    what = world(load(steady("a", 60), variants=(SimVariant("heavy", 0.015),)), hot, ambient_c=45.0)
    what.advance(300)
    assert sum(second.throttled_s for second in what.truth) > 60
    assert fps(what, "a", 200) < 55
    assert max(second.tj_c for second in what.truth) < hot.critical_c
    assert what.observe().throttling is not None


def test_a_device_that_switched_itself_off_does_nothing_more() -> None:
    what = world(load(steady("a", 60)), NX.scaled(leakage=30.0, thermal_resistance=2.0), ambient_c=45.0)
    what.advance(3000)
    assert what.plant.shutdown
    assert fps(what, "a", 2900) == 0
    assert what.truth[-1].power_w == pytest.approx(0)
    camera = what.cameras["a"].mailboxes[0]
    assert camera.captured >= camera.completed + camera.stale


def speed_of(hours: float) -> float:
    what = world(load(*[steady(f"c{i}", 30) for i in range(4)], lanes=2, variants=(SimVariant("heavy", 0.018),)))
    started = time.process_time()
    what.advance(hours * 3600)
    assert len(what.truth) == round(hours * 3600)
    return hours * 3600 / (time.process_time() - started)


def test_minutes_go_by_in_a_moment() -> None:
    # five times less than what one core does
    assert speed_of(0.1) > 300


@pytest.mark.full
def test_a_day_goes_by_in_minutes() -> None:
    assert speed_of(24) > 300
