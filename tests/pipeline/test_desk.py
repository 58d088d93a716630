"""The claim protocol, driven step by step by one thread: every interleaving of cameras, lanes, stuck writers,
failures, swaps, removals and stops that Hypothesis can think of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from edge_runtime.engine.slot import EngineSlot, Resident
from edge_runtime.pipeline.batch import Batch, Place, PlaceState
from edge_runtime.pipeline.desk import Desk
from edge_runtime.pipeline.ledger import Ledger, Stream
from edge_runtime.pipeline.mailbox import Mailbox
from edge_runtime.records.activity import Counters
from edge_runtime.records.frames import Classification, Frame, FrameResult, Transform
from tests.fakes import FakeEngine, FakePixels, fake_decoder
from tests.pipeline.test_ledger import identity_holds, make_result

TRANSFORM = Transform(8, 4, 1, 1, 1, 1, 0, 0)
MS = 1_000_000


def make_resident(
    name: str = "one", *, lanes: int = 2, places: int = 1, allowed: tuple[int, ...] | None = None
) -> Resident:
    engine = FakeEngine(f"sha256:{name}", allowed=allowed)
    return Resident(engine, fake_decoder, lanes=lanes, places=places, buffers=2 * lanes + 1)


def is_closed(resident: Resident) -> bool:
    assert isinstance(resident.engine, FakeEngine)
    return resident.engine.closed


class Bench:
    """A desk under a clock that the test moves."""

    def __init__(self, resident: Resident, *, lanes: int = 2, timeout_ms: int = 20, grace_ms: int = 100) -> None:
        self.now_ns = 1_000 * MS
        self.ledger = Ledger(self.clock)
        self.slot = EngineSlot(resident)
        self.lanes = lanes
        self.desk = Desk(
            "model",
            self.slot,
            self.ledger,
            lanes=lanes,
            batch_timeout_s=timeout_ms / 1e3,
            grace_s=grace_ms / 1e3,
            clock_ns=self.clock,
        )
        self.seen: dict[str, list[FrameResult]] = {}
        self.boxes: dict[str, Mailbox] = {}
        self.numbers: Counter[str] = Counter()

    def clock(self) -> int:
        return self.now_ns

    def camera(self, name: str, *, full_pace: bool = False, priority: int = 0) -> Mailbox:
        results = self.seen.setdefault(name, [])
        stream = self.ledger.open_stream(name, "model", results.append)
        box = self.boxes[name] = self.desk.attach(stream, full_pace=full_pace, priority=priority)
        return box

    def put(self, name: str) -> bool:
        box = self.boxes[name]
        frame = Frame(name, self.numbers[name], self.now_ns, FakePixels(self.numbers[name]))
        self.numbers[name] += 1
        return self.desk.put(box, self.ledger.captured(box.stream, frame))

    def claim(self) -> Place:
        work = self.desk.poll()
        assert isinstance(work, Place), work
        return work

    def write(self, place: Place, *, fails: bool = False) -> None:
        place.batch.buffer.array[place.index] = place.entry.frame.frame_id
        self.desk.written(place, None if fails else TRANSFORM)

    def hit(self, place: Place) -> None:
        """The frame's answer was known already."""
        place.batch.buffer.array[place.index] = -3
        number = place.entry.frame.frame_id
        output = Classification(np.ones(1, np.float32), np.array([number], np.int32))
        self.desk.written(place, TRANSFORM, answer=replace(make_result(place.entry, output), cached=True))

    def run(self, batch: Batch, *, fails: bool = False) -> None:
        """What a lane does with a closed batch."""
        resident = batch.resident
        engine = resident.engine
        assert isinstance(engine, FakeEngine)
        engine.enter(batch.size)
        engine.leave()
        for place in batch.places:
            entry = place.entry
            if place.state is not PlaceState.READY:
                continue
            if fails:
                self.ledger.fail(entry, "engine")
            else:
                number = batch.buffer.array[place.index, 0, 0, 0]
                output = Classification(np.ones(1, np.float32), np.array([number], np.int32))
                self.ledger.resolve(entry, make_result(entry, output))
            self.ledger.deliver(entry.stream)
        self.desk.done(batch)

    def work_off(self) -> int:
        """Do all there is to do; how many batches ran."""
        ran = 0
        while (work := self.desk.poll()) is not None:
            if isinstance(work, Place):
                self.write(work)
            else:
                self.run(work)
                ran += 1
        return ran


# --- one at a time


def test_only_the_newest_frame_of_a_live_camera_is_used() -> None:
    bench = Bench(make_resident())
    bench.camera("a")
    for _ in range(3):
        bench.put("a")
    bench.work_off()
    assert [result.frame_id for result in bench.seen["a"]] == [2]
    counters = bench.ledger.cut().streams[0].counters
    assert (counters.captured, counters.stale, counters.completed) == (3, 2, 1)


def test_a_batch_closes_when_it_is_full() -> None:
    bench = Bench(make_resident(places=2))
    for name in "ab":
        bench.camera(name)
        bench.put(name)
    first, second = bench.claim(), bench.claim()
    assert first.batch is second.batch
    bench.write(first)
    assert bench.desk.poll() is None  # one writer is still inside
    bench.write(second)
    batch = bench.desk.poll()
    assert isinstance(batch, Batch)
    bench.run(batch)
    assert [len(results) for results in bench.seen.values()] == [1, 1]


def test_a_partial_batch_goes_at_its_oldest_frames_deadline() -> None:
    bench = Bench(make_resident(places=4), timeout_ms=20)
    bench.camera("a")
    bench.camera("b", full_pace=True)  # another frame is always likely: waiting may help
    bench.put("a")
    bench.now_ns += 5 * MS
    place = bench.claim()
    bench.write(place)
    assert bench.desk.poll() is None
    bench.now_ns += 14 * MS  # 19 ms after the capture
    assert bench.desk.poll() is None
    bench.now_ns += 1 * MS
    assert bench.work_off() == 1
    assert len(bench.seen["a"]) == 1


def test_a_partial_batch_goes_at_once_when_nobody_else_is_expected() -> None:
    bench = Bench(make_resident(places=4), timeout_ms=20)
    bench.camera("a")
    for _ in range(3):  # a rhythm of 100 ms: the next frame is far beyond the deadline
        bench.now_ns += 100 * MS
        bench.put("a")
        assert bench.work_off() == 1


def test_frames_that_wait_join_a_late_batch_before_it_goes() -> None:
    bench = Bench(make_resident(places=4), timeout_ms=20)
    for name in "abc":
        bench.camera(name)
        bench.put(name)
    bench.now_ns += 50 * MS  # overload: every deadline has passed
    assert bench.work_off() == 1
    assert [len(results) for results in bench.seen.values()] == [1, 1, 1]


@pytest.mark.parametrize(
    ("places", "allowed", "limit", "most"),
    [
        (4, None, 3, 3),
        (4, None, 9, 4),
        (4, None, 0, 1),
        (4, (1, 2, 4), 3, 2),
        (3, (1, 2, 4), 3, 3),
        (4, (4,), 2, 2),
        (1, None, 4, 1),
    ],
)
def test_the_limit_of_a_batch_rounds_down_to_what_the_engine_runs(
    places: int, allowed: tuple[int, ...] | None, limit: int, most: int
) -> None:
    bench = Bench(make_resident(places=places, allowed=allowed))
    bench.desk.set_batch_limit(limit)
    for name in "abcde":
        bench.camera(name)
        bench.put(name)
    claimed = [bench.claim() for _ in range(most)]
    assert all(place.batch is claimed[0].batch for place in claimed)
    assert claimed[0].batch.closed


def test_a_limit_counts_from_the_next_batch_on() -> None:
    bench = Bench(make_resident(places=3))
    for name in "abcdef":
        bench.camera(name)
        bench.put(name)
    first = bench.claim()
    bench.desk.set_batch_limit(1)
    others = [bench.claim() for _ in range(3)]
    assert [place.batch is first.batch for place in others] == [True, True, False]
    assert others[-1].batch.closed


def test_a_step_on_the_ladder_keeps_the_others_and_touches_no_other_bundle() -> None:
    one, two, old = make_resident("one"), make_resident("two"), make_resident("old")
    assert isinstance(old.engine, FakeEngine)
    old.info = replace(old.info, bundle="sha256:another")
    bench = Bench(one, lanes=2)
    assert not bench.desk.choose("two")
    bench.desk.exchange(one, others=[two, old])
    bench.camera("a")
    bench.put("a")
    place = bench.claim()
    assert bench.desk.choose("two")
    assert bench.desk.ladder() == (two, one, old)
    assert bench.desk.choose("two")
    assert not bench.desk.choose("old")
    assert not bench.desk.choose("three")
    assert bench.desk.ladder() == (two, one, old)
    assert place.batch.resident is one
    bench.write(place)
    bench.put("a")
    bench.work_off()
    assert [result.engine for result in bench.seen["a"]] == ["sha256:one", "sha256:two"]
    bench.desk.exchange(None, "down")
    assert not bench.desk.choose("one")


def test_a_writer_that_comes_late_loses_its_place_and_blocks_no_other_camera() -> None:
    bench = Bench(make_resident(places=2), grace_ms=100)
    bench.camera("stuck")
    bench.camera("good")
    bench.put("stuck")
    bench.put("good")
    stuck, good = bench.claim(), bench.claim()
    bench.write(good)
    bench.now_ns += 99 * MS
    assert bench.desk.poll() is None
    bench.now_ns += 1 * MS
    assert bench.work_off() == 1
    assert len(bench.seen["good"]) == 1
    resident = stuck.batch.resident
    assert stuck.batch.buffer not in resident.free  # its writer is still inside
    # it costs one buffer and nothing else: the other camera goes on
    for _ in range(10):
        bench.put("good")
        bench.now_ns += 200 * MS
        bench.work_off()
    assert len(bench.seen["good"]) == 11
    bench.write(stuck)
    assert stuck.batch.buffer in resident.free
    assert bench.seen["stuck"] == []
    cut = {stream.camera: stream for stream in bench.ledger.cut().streams}
    assert cut["stuck"].failures == {"late": 1}


def test_a_batch_of_void_places_is_done_without_a_run() -> None:
    resident = make_resident()
    bench = Bench(resident)
    bench.camera("a")
    bench.put("a")
    bench.write(bench.claim(), fails=True)
    assert bench.desk.poll() is None
    assert isinstance(resident.engine, FakeEngine)
    assert resident.engine.runs == []
    assert bench.desk.audit() == (3, 0)
    assert bench.ledger.cut().streams[0].counters.failed == 1


@pytest.mark.parametrize("places", [1, 4])
def test_an_answer_that_is_known_needs_no_run_and_waits_for_nobody(places: int) -> None:
    resident = make_resident(places=places)
    bench = Bench(resident)
    bench.camera("a", full_pace=True)  # another frame is always likely
    for _ in range(3):
        bench.put("a")
        bench.now_ns += MS
        bench.hit(bench.claim())
        assert bench.desk.audit() == (3, 0)
        assert len(resident.free) == resident.buffers
    assert bench.desk.poll() is None
    assert isinstance(resident.engine, FakeEngine)
    assert resident.engine.runs == []
    assert [result.frame_id for result in bench.seen["a"]] == [0, 1, 2]
    cut = bench.ledger.cut()
    identity_holds(cut)
    counters = cut.streams[0].counters
    assert (counters.captured, counters.completed, counters.cached) == (3, 0, 3)
    assert cut.streams[0].latency.values_ns == []


def test_a_full_batch_goes_without_the_frame_whose_answer_is_known() -> None:
    resident = make_resident(places=3)
    bench = Bench(resident)
    for name in "abc":
        bench.camera(name)
        bench.put(name)
    first, second, third = (bench.claim() for _ in range(3))
    bench.write(second)
    bench.hit(third)
    bench.hit(first)
    assert [len(results) for results in bench.seen.values()] == [1, 0, 1]
    assert bench.work_off() == 1
    assert isinstance(resident.engine, FakeEngine)
    assert resident.engine.runs == [2], "what comes after the last frame that is left is not run"
    assert len(bench.seen["b"]) == 1


def test_while_a_batch_is_open_its_free_places_are_taken_first() -> None:
    bench = Bench(make_resident(places=3))
    for name in "abcd":
        bench.camera(name, full_pace=True)
        bench.put(name)
    first, second = bench.claim(), bench.claim()
    bench.hit(first)
    third = bench.claim()
    assert (third.batch, third.index) == (second.batch, 0)
    assert not third.batch.closed
    fourth = bench.claim()
    assert (fourth.index, fourth.batch.closed) == (2, True)
    for place in (second, third, fourth):
        bench.write(place)
    batch = bench.desk.poll()
    assert isinstance(batch, Batch)
    assert batch.size == 3
    bench.run(batch)
    assert [len(results) for results in bench.seen.values()] == [1, 1, 1, 1]


def test_a_known_answer_waits_for_the_frames_before_it() -> None:
    bench = Bench(make_resident())
    bench.camera("a", full_pace=True)
    bench.put("a")
    bench.put("a")
    first, second = bench.claim(), bench.claim()
    bench.hit(second)
    assert bench.seen["a"] == []
    bench.write(first)
    bench.work_off()
    assert [(result.frame_id, result.cached) for result in bench.seen["a"]] == [(0, False), (1, True)]


def test_an_answer_for_a_place_that_was_voided_meanwhile_is_discarded() -> None:
    bench = Bench(make_resident(), grace_ms=100)
    bench.camera("a")
    bench.put("a")
    place = bench.claim()
    bench.now_ns += 100 * MS
    assert bench.desk.poll() is None
    bench.hit(place)
    assert bench.seen["a"] == []
    assert place.batch.buffer in place.batch.resident.free
    (stream,) = bench.ledger.cut().streams
    assert (stream.counters.cached, stream.failures) == (0, {"late": 1})


def test_an_exchange_lets_the_old_engine_finish_its_batches_and_closes_it_after_the_last() -> None:
    old, new = make_resident("old", places=2), make_resident("new", places=2)
    bench = Bench(old)
    bench.camera("a")
    bench.camera("b")
    bench.put("a")
    place = bench.claim()
    bench.desk.exchange(new)
    bench.put("b")
    second = bench.claim()
    assert second.batch.resident is new
    bench.write(place)
    assert not is_closed(old)
    batch = bench.desk.poll()
    assert isinstance(batch, Batch)
    assert batch.resident is old
    bench.run(batch)
    assert is_closed(old)
    bench.write(second)
    bench.now_ns += 100 * MS
    bench.work_off()
    assert [result.engine for result in bench.seen["a"]] == ["sha256:old"]
    assert [result.engine for result in bench.seen["b"]] == ["sha256:new"]
    cut = bench.ledger.cut()
    identity_holds(cut)
    assert {digest: engine.counters.completed for (_, digest), engine in cut.engines.items()} == {
        "sha256:old": 1,
        "sha256:new": 1,
    }


def test_a_model_that_is_down_drops_its_frames_with_the_reason() -> None:
    bench = Bench(make_resident())
    bench.camera("a")
    bench.put("a")
    bench.desk.exchange(None, "it broke")
    assert not bench.put("a")
    assert bench.desk.down_reason == "it broke"
    assert bench.ledger.cut().streams[0].counters.dropped == {"model_down": 2}


def test_a_partial_batch_is_padded_to_an_allowed_size() -> None:
    resident = make_resident(places=8, allowed=(1, 4, 8))
    bench = Bench(resident)
    for count in (1, 2, 4, 5, 8):
        for index in range(count):
            name = f"{count}-{index}"
            bench.camera(name)
            bench.put(name)
        bench.now_ns += 50 * MS
        assert bench.work_off() == 1
    assert isinstance(resident.engine, FakeEngine)
    assert resident.engine.runs == [1, 4, 4, 8, 8]
    assert resident.engine.errors == []
    assert all(len(results) == 1 for results in bench.seen.values())


def test_priority_goes_first_and_starves_nobody() -> None:
    bench = Bench(make_resident())
    names = ["high", "low1", "low2", "low3"]
    for name in names:
        bench.camera(name, priority=1 if name == "high" else 0)
        bench.put(name)
    served = []
    for _ in range(40):
        place = bench.claim()
        name = place.entry.frame.camera
        served.append(name)
        bench.write(place)
        batch = bench.desk.poll()
        assert isinstance(batch, Batch)
        bench.run(batch)
        bench.put(name)  # everybody always has a frame waiting
    assert served[0] == "high"
    for name in names:
        gaps = np.diff([index for index, other in enumerate(served) if other == name])
        assert gaps.max() - 1 <= len(names) - 1, (name, served)


def test_another_priority_counts_from_the_next_claim_on() -> None:
    bench = Bench(make_resident())
    for name in ("one", "two", "three"):
        bench.camera(name)
        bench.put(name)
    bench.desk.set_priority(bench.boxes["three"], 1)
    assert bench.claim().entry.frame.camera == "three"
    bench.desk.set_priority(bench.boxes["two"], 2)
    assert bench.claim().entry.frame.camera == "two"


def test_a_fast_camera_is_not_starved_by_older_frames_of_slow_ones() -> None:
    bench = Bench(make_resident())
    for name in ("fast", "slow1", "slow2"):
        bench.camera(name)
        bench.put(name)
    served: Counter[str] = Counter()
    for _ in range(30):
        bench.put("fast")  # its frame is always the newest
        place = bench.claim()
        name = place.entry.frame.camera
        served[name] += 1
        bench.write(place)
        batch = bench.desk.poll()
        assert isinstance(batch, Batch)
        bench.run(batch)
        bench.put(name)
    assert served["fast"] == 10


def test_stop_drops_what_waits_and_finishes_what_is_claimed() -> None:
    bench = Bench(make_resident())
    bench.camera("a")
    bench.camera("b")
    bench.put("a")
    bench.put("b")
    place = bench.claim()
    bench.desk.stop()
    assert not bench.put("b")
    bench.write(place)
    assert bench.work_off() == 1
    assert bench.desk.next_work() is None
    cut = {stream.camera: stream.counters for stream in bench.ledger.cut().streams}
    assert cut["a"].completed == 1
    assert cut["b"].dropped == {"stopping": 2}


# --- too late to be worth a lane


def served(bench: Bench, ms: int) -> int:
    """Claim, write and run what is next, `ms` from claim to result; which frame it was."""
    place = bench.claim()
    bench.now_ns += ms * MS
    number = place.entry.frame.frame_id
    bench.write(place)
    batch = bench.desk.poll()
    assert isinstance(batch, Batch)
    bench.run(batch)
    return number


def lateness_bench() -> Bench:
    """Two cameras on one lane that takes 30 ms a frame, both seen to give results."""
    bench = Bench(make_resident(lanes=1), lanes=1)
    for name in ("a", "b"):
        bench.camera(name)
    for _ in range(40):
        for name in ("a", "b"):
            bench.put(name)
            served(bench, 30)
    bench.desk.set_latency_limit(0.08)
    return bench


def counts(bench: Bench, name: str) -> Counters:
    return next(stream.counters for stream in bench.ledger.cut().streams if stream.camera == name)


def test_what_would_come_too_late_is_left_out_and_the_next_one_is_taken() -> None:
    bench = lateness_bench()
    bench.ledger.cut()
    bench.put("a")
    bench.now_ns += 60 * MS  # 60 + 30 ms are more than 80
    bench.put("b")
    assert served(bench, 30) == 40
    assert bench.desk.poll() is None
    assert len(bench.seen["b"]) == 41
    cut = {stream.camera: stream.counters for stream in bench.ledger.cut().streams}
    assert cut["a"].dropped == {"overload": 1}
    assert cut["a"].balanced()
    assert (cut["b"].completed, cut["b"].dropped) == (1, {})


def test_what_comes_in_time_is_served() -> None:
    bench = lateness_bench()
    bench.put("a")
    bench.now_ns += 40 * MS
    served(bench, 30)
    assert counts(bench, "a").dropped == {}


def test_late_results_raise_the_margin_and_results_in_time_take_it_back() -> None:
    """In the long run one in two hundred is late, however runs are spread."""
    bench = lateness_bench()
    late = total = 0
    for number in range(4000):
        bench.put("a")
        bench.now_ns += (number % 7) * 10 * MS  # waited 0 to 60 ms
        if bench.ledger.in_flight() == 0:
            continue
        work = bench.desk.poll()
        if work is None:
            continue
        assert isinstance(work, Place)
        waited_ns = bench.now_ns - work.entry.frame.t_capture_ns
        took_ms = 30 + (25 if number % 50 == 0 else 0)
        bench.now_ns += took_ms * MS
        bench.write(work)
        batch = bench.desk.poll()
        assert isinstance(batch, Batch)
        bench.run(batch)
        total += 1
        late += waited_ns + took_ms * MS > 80 * MS
    assert total > 2000
    assert late / total <= 0.01


def test_a_camera_without_results_is_served_however_late() -> None:
    bench = lateness_bench()
    bench.now_ns += 2000 * MS
    bench.put("a")
    bench.now_ns += 500 * MS
    served(bench, 30)
    assert counts(bench, "a").dropped == {}


def test_without_a_limit_nothing_is_too_late() -> None:
    bench = lateness_bench()
    bench.desk.set_latency_limit(None)
    bench.put("a")
    bench.now_ns += 500 * MS
    served(bench, 30)
    assert counts(bench, "a").dropped == {}


def test_a_source_that_waits_for_its_frames_loses_none() -> None:
    bench = lateness_bench()
    stream = bench.ledger.open_stream("file", "model", lambda _: None, patient=True)
    box = bench.desk.attach(stream, full_pace=True)
    stream.t_result_ns = bench.now_ns
    bench.desk.put(box, bench.ledger.captured(stream, Frame("file", 0, bench.now_ns, FakePixels(0))))
    bench.now_ns += 500 * MS
    assert bench.claim().entry.frame.camera == "file"


# --- all of it, in any order


class DeskMachine(RuleBasedStateMachine):
    """Any schedule of what may happen to a desk."""

    @initialize(
        lanes=st.integers(1, 3),
        places=st.integers(1, 4),
        allowed=st.sampled_from([None, (1, 2, 4), (4,), (2, 3)]),
        cameras=st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=5),
    )
    def begin(self, lanes: int, places: int, allowed: tuple[int, ...] | None, cameras: list[tuple[bool, int]]) -> None:
        self.lanes, self.places, self.allowed = lanes, places, allowed
        self.residents = [make_resident("0", lanes=lanes, places=places, allowed=allowed)]
        self.bench = Bench(self.residents[0], lanes=lanes)
        self.streams: list[Stream] = []
        self.full_pace: dict[str, bool] = {}
        for full_pace, priority in cameras:
            self.add(full_pace, priority)
        self.writing: list[Place] = []
        self.running: list[Batch] = []
        self.buffers_in_use: dict[int, Batch] = {}
        self.opened_by: dict[int, tuple[Batch, str]] = {}
        self.limit = 99
        self.limits: dict[int, int] = {}
        self.totals = Counters()
        self.stopped = False
        self.largest = len(cameras)
        self.passes: dict[str, int] = {}

    def add(self, full_pace: bool, priority: int) -> None:
        name = f"c{len(self.streams)}"
        self.streams.append(self.bench.camera(name, full_pace=full_pace, priority=priority).stream)
        self.full_pace[name] = full_pace

    @rule(index=st.integers(0, 10), times=st.integers(1, 3))
    def put(self, index: int, times: int) -> None:
        boxes = self.bench.boxes
        name = list(boxes)[index % len(boxes)]
        for _ in range(times):
            box = boxes[name]
            if box.capacity is not None and len(box.entries) >= box.capacity:
                return  # its producer would wait
            self.bench.put(name)

    @rule(claim=st.booleans(), run=st.booleans())
    def look(self, claim: bool, run: bool) -> None:
        ready = {name for name, box in self.bench.boxes.items() if box.entries}
        work = self.bench.desk.poll(claim=claim, run=run)
        if isinstance(work, Place):
            self.count_passes(ready, work.entry.frame.camera)
            assert claim
            self.writing.append(work)
            other = self.buffers_in_use.setdefault(id(work.batch.buffer), work.batch)
            assert other is work.batch, "a buffer was handed out while another batch used it"
            # the batch is kept with it: a freed one's id would be another's soon
            self.opened_by.setdefault(id(work.batch), (work.batch, work.batch.resident.info.digest))
            assert work.index < self.limits.setdefault(id(work.batch), self.limit), (
                "more than the limit it was opened by"
            )
        elif isinstance(work, Batch):
            assert run
            assert all(place.state is not PlaceState.WRITING for place in work.places)
            assert [place.index for place in work.places] == list(range(len(work.places)))
            left = [place.index for place in work.places if place.state is PlaceState.READY]
            assert left
            assert max(left) < work.size <= work.resident.sizes[-1]
            assert (work, work.resident.info.digest) == self.opened_by[id(work)]
            assert work.resident.leases > 0
            self.running.append(work)

    def count_passes(self, ready: set[str], served: str) -> None:
        """How often each camera has been passed over while it had a frame: counted here, apart from the desk."""
        for name, box in self.bench.boxes.items():
            waited = name in ready and name != served and box.entries
            self.passes[name] = self.passes.get(name, 0) + 1 if waited else 0
            # while cameras come and go the bound is that of the most there were
            assert self.passes[name] <= self.largest - 1, (name, self.passes)

    @precondition(lambda self: self.writing)
    @rule(index=st.integers(0, 10), fails=st.booleans())
    def write(self, index: int, fails: bool) -> None:
        self.bench.write(self.writing.pop(index % len(self.writing)), fails=fails)

    @precondition(lambda self: self.writing)
    @rule(index=st.integers(0, 10))
    def hit(self, index: int) -> None:
        """The cache knows the answer."""
        place = self.writing.pop(index % len(self.writing))
        batch = place.batch
        alone = not batch.closed and batch.taken == 1
        self.bench.hit(place)
        assert batch.done or not alone, "a batch with nobody in it went on"

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 10), fails=st.booleans())
    def run_batch(self, index: int, fails: bool) -> None:
        self.bench.run(self.running.pop(index % len(self.running)), fails=fails)

    @rule(ms=st.sampled_from([1, 10, 25, 150]))
    def wait(self, ms: int) -> None:
        self.bench.now_ns += ms * MS

    @rule(age_ms=st.sampled_from([0, 50, 300]))
    def sweep(self, age_ms: int) -> None:
        self.bench.ledger.sweep(self.bench.now_ns - age_ms * MS)

    @precondition(lambda self: not self.stopped)
    @rule(what=st.sampled_from(["down", "fresh", "beside", "switch", "switch"]), index=st.integers(0, 3))
    def swap(self, what: str, index: int) -> None:
        """Down, another engine alone, another one beside the old ladder, or a step on the ladder."""
        desk = self.bench.desk
        ladder = desk.ladder()
        if what == "down":
            desk.exchange(None, "broken")
        elif what == "switch":
            if ladder:
                chosen = ladder[index % len(ladder)]
                desk.exchange(chosen, others=[each for each in ladder if each is not chosen])
                assert desk.resident() is chosen
                assert set(map(id, desk.ladder())) == set(map(id, ladder))
        else:
            resident = make_resident(
                str(len(self.residents)), lanes=self.lanes, places=self.places, allowed=self.allowed
            )
            self.residents.append(resident)
            desk.exchange(resident, others=ladder[:2] if what == "beside" else ())

    @precondition(lambda self: not self.stopped)
    @rule(lanes=st.integers(1, 3))
    def set_lanes(self, lanes: int) -> None:
        self.bench.desk.set_lanes(lanes)
        self.lanes = lanes

    @rule(limit_s=st.sampled_from([None, 0.001, 0.05, 0.5]))
    def set_latency_limit(self, limit_s: float | None) -> None:
        self.bench.desk.set_latency_limit(limit_s)

    @rule(limit=st.integers(0, 5))
    def set_batch_limit(self, limit: int) -> None:
        self.bench.desk.set_batch_limit(limit)
        self.limit = max(1, limit)

    @precondition(lambda self: not self.stopped)
    @rule(index=st.integers(0, 3))
    def choose(self, index: int) -> None:
        desk = self.bench.desk
        ladder = desk.ladder()
        if ladder:
            variant = ladder[index % len(ladder)].info.variant
            assert desk.choose(variant)
            current = desk.resident()
            assert current is not None
            assert current.info.variant == variant
            assert set(map(id, desk.ladder())) == set(map(id, ladder))

    @precondition(lambda self: len(self.bench.boxes) > 1)
    @rule(index=st.integers(0, 10))
    def remove(self, index: int) -> None:
        name = list(self.bench.boxes)[index % len(self.bench.boxes)]
        box = self.bench.boxes.pop(name)
        self.bench.desk.detach(box)
        self.bench.ledger.remove_stream(box.stream)

    @rule(full_pace=st.booleans(), priority=st.integers(0, 2))
    def add_camera(self, full_pace: bool, priority: int) -> None:
        if len(self.bench.boxes) < 6:
            self.add(full_pace, priority)
            self.largest = max(self.largest, len(self.bench.boxes))

    @precondition(lambda self: not self.stopped)
    @rule()
    def stop(self) -> None:
        self.stopped = True
        self.bench.desk.stop()

    @rule()
    def cut(self) -> None:
        cut = self.bench.ledger.cut()
        identity_holds(cut)
        for stream in cut.streams:
            self.totals.add(stream.counters)

    @invariant()
    def credits_and_batches_are_conserved(self) -> None:
        if not hasattr(self, "bench"):
            return
        free, batches = self.bench.desk.audit()
        assert free + batches == self.lanes + 1
        assert free >= 0 or batches <= 3 + 1  # opened while there were more lanes, of which there are at most 3

    @invariant()
    def buffers_with_a_writer_are_not_free(self) -> None:
        if not hasattr(self, "bench"):
            return
        for place in self.writing:
            assert all(place.batch.buffer is not buffer for buffer in place.batch.resident.free)
        for batch in self.running:
            assert all(batch.buffer is not buffer for buffer in batch.resident.free)
        busy = {id(place.batch.buffer) for place in self.writing} | {id(batch.buffer) for batch in self.running}
        for key, batch in list(self.buffers_in_use.items()):
            if batch.done and key not in busy:
                del self.buffers_in_use[key]

    @invariant()
    def engines_behave(self) -> None:
        for resident in getattr(self, "residents", []):
            assert resident.engine.errors == []
            assert not (resident.engine.closed and resident.leases)
            assert not (resident.engine.closed and resident in self.bench.slot.ladder)

    def teardown(self) -> None:
        if not hasattr(self, "bench"):
            return
        bench = self.bench
        # stuck writers never come back; everything else must still come to its end
        bench.desk.stop()
        for batch in self.running:
            bench.run(batch)
        for _ in range(200):
            bench.now_ns += 50 * MS
            bench.work_off()
        free, batches = bench.desk.audit()
        assert (free, batches) == (self.lanes + 1, 0)
        bench.ledger.sweep(bench.now_ns + 1)
        self.cut()
        assert bench.ledger.in_flight() == 0
        assert self.totals.captured == sum(bench.numbers.values()) == self.totals.ended()
        for stream in self.streams:
            assert stream.next_release == stream.next_ticket
        for name, results in bench.seen.items():
            ids = [result.frame_id for result in results]
            assert ids == sorted(set(ids)), name
            for result in results:
                assert isinstance(result.output, Classification)
                assert result.output.class_ids[0] == result.frame_id, "another frame's pixels"
        cached = sum(result.cached for results in bench.seen.values() for result in results)
        assert (self.totals.cached, self.totals.completed) == (cached, sum(map(len, bench.seen.values())) - cached)
        for resident in self.residents:
            assert isinstance(resident.engine, FakeEngine)
            assert resident.leases == 0
            assert resident.engine.closed == resident.closed.is_set() == (resident not in bench.slot.ladder)


DeskMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestDesk = DeskMachine.TestCase


class DeskMachineFull(DeskMachine):
    """The same, many times over."""


DeskMachineFull.TestCase.settings = settings(max_examples=2000, stateful_step_count=80, deadline=None)
TestDeskFull = pytest.mark.full(pytest.mark.timeout(1800)(DeskMachineFull.TestCase))
