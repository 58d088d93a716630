"""Answers given again: the right ones, to the right frames, and counted as what they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.cache import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_ANSWERS,
    PROBE,
    TRIAL_FRAMES,
    AnswerCache,
    Look,
)
from edge_runtime.pipeline.ledger import Ledger, Stream
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.activity import CacheCounters, CacheMode, LedgerCut
from edge_runtime.records.frames import Classification, Detections, FrameResult, Output, Transform
from tests.awaiting import wait_until
from tests.fakes import FakeEngine, ScriptedCamera, fake_decoder
from tests.pipeline.test_ledger import identity_holds

HERE = Transform(16, 16, 16, 16, 16, 16, 0, 0)
THERE = Transform(32, 32, 16, 16, 16, 16, 0, 0)
SECOND = 1_000_000_000


def make_resident(name: str = "one", *, lanes: int = 2, places: int = 1, tried: bool = True, **engine: Any) -> Resident:
    resident = Resident(
        FakeEngine(f"sha256:{name}", **engine), fake_decoder, lanes=lanes, places=places, buffers=2 * lanes + 1
    )
    if tried:
        resident.tally.ran(0, TRIAL_FRAMES, 0)
    return resident


def make_stream(camera: str = "cam") -> Stream:
    return Ledger().open_stream(camera, "model", lambda _: None)


def answer(number: int) -> Classification:
    return Classification(np.ones(1, np.float32), np.array([number], np.int32))


def number_of(output: Output | None) -> int | None:
    return None if output is None else int(output.class_ids[0])


def shows(value: float) -> NDArray[np.float32]:
    return np.full((3, 16, 16), value, np.float32)


class Asking:
    """Frames that are asked for one after the other, a second apart."""

    def __init__(self, mode: CacheMode, max_age_s: float = 1000.0) -> None:
        self.cache = AnswerCache(mode, max_age_s)
        self.resident = make_resident()
        self.stream = make_stream()
        self.now_s = 0

    def ask(
        self, picture: NDArray[np.float32], transform: Transform = HERE, stream: Stream | None = None, after_s: int = 1
    ) -> Look:
        self.now_s += after_s
        look = self.cache.look(stream or self.stream, self.now_s * SECOND, picture, transform, self.resident)
        assert look is not None
        assert (look.output is not None) == (look.outcome == "hit")
        assert (look.memo is not None) == (look.outcome == "miss")
        return look

    def infer(self, picture: NDArray[np.float32], number: int, **where: Any) -> Look:
        """Ask, and answer it where the cache cannot."""
        look = self.ask(picture, **where)
        if look.memo is not None:
            look.memo.keep(answer(number))
        return look


# --- both


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_the_same_picture_gets_the_same_answer(mode: CacheMode) -> None:
    asking = Asking(mode)
    assert asking.infer(shows(100), 1).outcome == "miss"
    for _ in range(3):
        assert number_of(asking.infer(shows(100), 2).output) == 1
    assert asking.infer(shows(150), 3).outcome == "miss"
    assert number_of(asking.infer(shows(150), 4).output) == 3


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_another_engine_and_another_way_into_the_input_ask_anew(mode: CacheMode) -> None:
    asking = Asking(mode)
    asking.infer(shows(100), 1)
    assert asking.ask(shows(100), THERE).outcome == "miss"
    asking.resident = make_resident("two")
    assert asking.infer(shows(100), 2).outcome == "miss"
    assert number_of(asking.ask(shows(100)).output) == 2


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_an_answer_is_a_copy_that_nobody_can_change(mode: CacheMode) -> None:
    asking = Asking(mode)
    own = Detections(np.ones((2, 4), np.float32), np.ones(2, np.float32), np.ones(2, np.int32), cut=3, invalid=4)
    memo = asking.ask(shows(1)).memo
    assert memo is not None
    memo.keep(own)
    own.boxes[:] = 7
    output = asking.ask(shows(1)).output
    assert isinstance(output, Detections)
    assert (output.cut, output.invalid, output.boxes.max()) == (3, 4, 1)
    for array in (output.boxes, output.scores, output.class_ids):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_a_new_engine_runs_its_first_frames_itself(mode: CacheMode) -> None:
    """Whoever put it in place looks at its first results: a still scene must not hide that it does not work."""
    asking = Asking(mode)
    asking.resident = make_resident(tried=False)
    for number in range(TRIAL_FRAMES):
        assert asking.infer(shows(100), number).outcome == "bypassed"
        asking.resident.tally.ran(0, 1, 0)
    assert [asking.infer(shows(100), 1).outcome for _ in range(2)] == ["miss", "hit"]


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_what_it_is_set_to_changes_while_it_is_asked(mode: CacheMode) -> None:
    asking = Asking(mode, 5.0)
    asking.infer(shows(100), 1)
    asking.cache.configure(mode, 5.0)
    assert asking.ask(shows(100)).outcome == "hit", "nothing has changed"
    asking.cache.configure("off", 5.0)
    assert asking.cache.look(asking.stream, 0, shows(100), HERE, asking.resident) is None
    asking.cache.configure(mode, 5.0)
    assert asking.ask(shows(100)).outcome == "miss"


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_a_removed_camera_leaves_nothing_behind(mode: CacheMode) -> None:
    asking = Asking(mode)
    asking.infer(shows(100), 1)
    kind = asking.cache._kind
    held = kind._pauses if mode == "exact" else kind._scenes  # type: ignore[union-attr]
    assert len(held) == 1
    asking.stream.removed = True
    asking.cache.forget(asking.stream)
    assert asking.ask(shows(100)).outcome == "bypassed", "one more that was on its way"
    assert len(held) == 0


@pytest.mark.parametrize("mode", ["exact", "scene"])
def test_lanes_may_ask_at_the_same_time(mode: CacheMode) -> None:
    """Each answer is the number that its picture shows, whoever inferred it."""
    cache, resident = AnswerCache(mode, 1000.0), make_resident()
    streams = [make_stream(str(index)) for index in range(2)]
    wrong: list[int] = []
    hits: list[int] = []
    barrier = threading.Barrier(4)

    def lane(index: int) -> None:
        barrier.wait()
        for step in range(400):
            number = 10 * (step // 40)
            look = cache.look(streams[index % 2], step * SECOND, shows(number), HERE, resident)
            assert look is not None
            if look.memo is not None:
                look.memo.keep(answer(number))
            elif look.output is not None:
                hits.append(number)
                if number_of(look.output) != number:
                    wrong.append(number)

    threads = [threading.Thread(target=lane, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(hits) > 400


# --- exact


def test_exact_knows_an_input_on_any_camera_and_only_that_very_input() -> None:
    asking = Asking("exact")
    asking.infer(shows(100), 1)
    assert number_of(asking.ask(shows(100), stream=make_stream("other")).output) == 1
    nearly = shows(100)
    nearly[2, 15, 15] = np.nextafter(np.float32(100), np.float32(101))
    assert asking.ask(nearly).outcome == "miss"
    assert number_of(asking.ask(shows(100), after_s=10**6).output) == 1, "it does not age"


def test_exact_keeps_the_latest_used_answers() -> None:
    asking = Asking("exact")
    for number in range(MAX_ANSWERS):
        asking.infer(shows(number), number, stream=make_stream())
    assert asking.ask(shows(0)).outcome == "hit"
    asking.infer(shows(1000), 1000)
    assert asking.ask(shows(0)).outcome == "hit", "it was used"
    assert asking.ask(shows(1)).outcome == "miss", "it was the oldest then"
    assert len(asking.cache._kind._answers) == MAX_ANSWERS  # type: ignore[union-attr]


def test_exact_stops_hashing_where_that_is_useless_and_tries_again_later_and_later() -> None:
    asking = Asking("exact")
    pauses = [min(FIRST_PAUSE << step, LONGEST_PAUSE) for step in range(9)]
    frames = sum(pauses) + PROBE * len(pauses)
    outcomes = [asking.infer(shows(number), number).outcome for number in range(frames)]
    runs = [(outcome, len(list(same))) for outcome, same in groupby(outcomes)]
    assert runs == [run for pause in pauses for run in (("miss", PROBE), ("bypassed", pause))]

    # another camera is judged by itself, and a useful probe makes the next pause short again
    other = make_stream("other")
    assert asking.infer(shows(-0.5), 1, stream=other).outcome == "miss"
    assert [asking.infer(shows(-0.5), 1).outcome for _ in range(PROBE)] == ["hit"] * PROBE
    assert [asking.infer(shows(-step - 1), 1).outcome for step in range(PROBE)] == ["miss"] * PROBE
    pause = [asking.infer(shows(-1000 - step), 1).outcome for step in range(FIRST_PAUSE + 1)]
    assert pause == ["bypassed"] * FIRST_PAUSE + ["miss"]


# --- scene


def test_a_scene_is_a_cameras_own() -> None:
    asking = Asking("scene")
    asking.infer(shows(100), 1)
    other = make_stream("other")
    assert asking.infer(shows(100), 2, stream=other).outcome == "miss"
    assert number_of(asking.ask(shows(100)).output) == 1
    assert number_of(asking.ask(shows(100), stream=other).output) == 2


def test_a_still_scene_is_looked_at_anew_when_its_answer_is_old() -> None:
    asking = Asking("scene", max_age_s=10)
    asking.infer(shows(100), 1)
    assert [asking.infer(shows(100), 2).outcome for _ in range(11)] == ["hit"] * 9 + ["miss", "hit"]
    assert number_of(asking.ask(shows(100)).output) == 2


def test_a_picture_is_compared_with_the_one_that_was_inferred() -> None:
    asking = Asking("scene")
    outcomes = [asking.infer(shows(100) + step * 0.5 * ramp(), step).outcome for step in range(20)]
    missed = [step for step, outcome in enumerate(outcomes) if outcome == "miss"]
    assert missed == [0, 7, 14], "each time that 3 levels are exceeded"


def ramp() -> NDArray[np.float32]:
    """Something that no common change of brightness explains."""
    picture = np.zeros((3, 16, 16), np.float32)
    picture[:, 8:] = 1
    return picture


def test_an_answer_that_never_came_is_no_reference() -> None:
    asking = Asking("scene")
    assert asking.ask(shows(100)).outcome == "miss"
    assert asking.ask(shows(100)).outcome == "miss", "the run failed, say"


def test_an_earlier_frame_that_comes_back_late_replaces_nothing() -> None:
    asking = Asking("scene")
    first, second = asking.ask(shows(100)).memo, asking.ask(shows(100)).memo
    assert first is not None
    assert second is not None
    second.keep(answer(2))
    first.keep(answer(1))
    assert number_of(asking.ask(shows(100)).output) == 2


# --- in the pipeline


class Rig:
    """A pipeline with a cache whose frames show numbers."""

    def __init__(self, mode: CacheMode, resident: Resident, *, lanes: int = 2, batch_timeout_s: float = 0.005) -> None:
        self.results: dict[str, list[FrameResult]] = {}
        self.deaths: list[str] = []
        self.pipeline = Pipeline(self._take, lambda name, _: self.deaths.append(name))
        self.pipeline.add_model(
            "m", resident, lanes=lanes, batch_timeout_s=batch_timeout_s, cache=mode, cache_max_age_s=1000.0
        )

    def _take(self, result: FrameResult) -> None:
        self.results.setdefault(result.camera, []).append(result)

    def play(self, scripts: Mapping[str, list[int]]) -> LedgerCut:
        """Play all of them to their end at full pace; every frame must have its own number as its answer."""
        for name, script in scripts.items():
            self.pipeline.add_camera(ScriptedCamera(name, script), ["m"], full_pace=True)
        self.pipeline.start()
        wait_until(lambda: not self.pipeline.active() and self.pipeline.ledger.in_flight() == 0)
        assert self.pipeline.stop() == []
        self.pipeline.close()
        assert self.deaths == []
        cut = self.pipeline.cut()
        identity_holds(cut)
        for name, script in scripts.items():
            results = self.results.get(name, [])
            assert [result.frame_id for result in results] == list(range(len(script)))
            assert [number_of(result.output) for result in results] == script
        return cut


def counts(cut: LedgerCut) -> CacheCounters:
    (engine,) = cut.engines.values()
    assert engine.cache.hits + engine.cache.misses == engine.cache.lookups
    return engine.cache


def test_cached_frames_are_counted_as_cached_and_have_no_part_in_latency_and_runs() -> None:
    resident = make_resident(lanes=1)
    cut = Rig("exact", resident, lanes=1).play({"a": [5] * 10 + [6] * 10})
    (stream,), (engine,) = cut.streams, cut.engines.values()
    assert (stream.counters.completed, stream.counters.cached) == (2, 18)
    assert (engine.counters.completed, engine.counters.cached, engine.batches, engine.places) == (2, 18, 2, 2)
    assert sum(stream.latency.buckets()) == sum(engine.latency.buckets()) == 2
    assert counts(cut) == CacheCounters(lookups=20, hits=18, misses=2)
    assert isinstance(resident.engine, FakeEngine)
    assert resident.engine.runs == [1, 1]


def test_a_cached_result_has_its_own_frames_place_in_time() -> None:
    rig = Rig("exact", make_resident(lanes=1), lanes=1)
    rig.play({"a": [5, 5]})
    own, given = rig.results["a"]
    assert (own.cached, given.cached) == (False, True)
    assert (given.camera, given.model, given.engine, given.frame_id) == ("a", "m", "sha256:one", 1)
    assert given.t_capture_ns > own.t_capture_ns
    timings = given.timings
    assert given.t_capture_ns <= timings.t_claim_ns <= timings.t_written_ns <= timings.t_result_ns
    assert timings.t_run_ns == timings.t_inferred_ns == 0


def test_without_a_cache_nobody_is_asked() -> None:
    cut = Rig("off", make_resident()).play({"a": [5] * 10})
    assert counts(cut) == CacheCounters()
    assert cut.streams[0].counters.completed == 10


def test_a_frame_whose_run_failed_is_no_answer() -> None:
    failing = [True, True]
    resident = make_resident(lanes=1, fail=lambda: bool(failing and failing.pop()))
    rig = Rig("exact", resident, lanes=1)
    rig.pipeline.add_camera(ScriptedCamera("a", [5] * 5), ["m"], full_pace=True)
    rig.pipeline.start()
    wait_until(lambda: not rig.pipeline.active() and rig.pipeline.ledger.in_flight() == 0)
    assert rig.pipeline.stop() == []
    rig.pipeline.close()
    counters = rig.pipeline.cut().streams[0].counters
    assert (counters.failed, counters.completed, counters.cached) == (2, 1, 2)


def test_an_answer_that_holds_nothing_usable_is_not_given_again() -> None:
    def no_numbers(outputs: Mapping[str, NDArray[Any]], index: int, transform: Transform) -> Output:
        return Classification(np.zeros(0, np.float32), np.zeros(0, np.int32))

    resident = make_resident(lanes=1)
    resident.decoder = no_numbers
    rig = Rig("exact", resident, lanes=1)
    rig.pipeline.add_camera(ScriptedCamera("a", [5] * 5), ["m"], full_pace=True)
    rig.pipeline.start()
    wait_until(lambda: not rig.pipeline.active() and rig.pipeline.ledger.in_flight() == 0)
    assert rig.pipeline.stop() == []
    rig.pipeline.close()
    assert rig.pipeline.cut().streams[0].counters.completed == 5


@settings(max_examples=40, deadline=None)
@given(
    mode=st.sampled_from(["exact", "scene"]),
    lanes=st.integers(1, 3),
    places=st.integers(1, 4),
    scripts=st.lists(st.lists(st.sampled_from([0, 50, 100]), max_size=40), min_size=1, max_size=3),
)
def test_every_frame_gets_its_own_answer_whatever_is_cached(
    mode: CacheMode, lanes: int, places: int, scripts: list[list[int]]
) -> None:
    rig = Rig(mode, make_resident(lanes=lanes, places=places), lanes=lanes, batch_timeout_s=0.0005)
    cut = rig.play({f"c{index}": script for index, script in enumerate(scripts)})
    total = sum(map(len, scripts))
    ended = [(stream.counters.completed, stream.counters.cached) for stream in cut.streams]
    assert sum(map(sum, ended)) == total
    if total:
        assert counts(cut).hits == sum(cached for _, cached in ended)
        assert counts(cut).misses == sum(completed for completed, _ in ended)


def test_an_exchange_under_a_still_scene_asks_the_new_engine() -> None:
    rig = Rig("scene", make_resident("old"))

    def script() -> Iterator[int]:
        yield from (50, 50)
        wait_until(lambda: len(rig.results.get("a", [])) == 2)
        rig.pipeline.models["m"].desk.exchange(make_resident("new"))
        yield 50
        wait_until(lambda: len(rig.results["a"]) == 3)
        yield 50

    rig.pipeline.add_camera(ScriptedCamera("a", script()), ["m"], full_pace=True)
    rig.pipeline.start()
    wait_until(lambda: not rig.pipeline.active() and rig.pipeline.ledger.in_flight() == 0)
    assert rig.pipeline.stop() == []
    rig.pipeline.close()
    seen = [(result.frame_id, result.engine, result.cached) for result in rig.results["a"]]
    assert seen[2:] == [(2, "sha256:new", False), (3, "sha256:new", True)]
