"""The frame identity, tickets and their order."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.pipeline.ledger import RECENT, Entry, Ledger, Stream
from edge_runtime.records.activity import CacheCounters, Counters, LedgerCut
from edge_runtime.records.frames import Classification, Frame, FrameResult, Output
from tests.fakes import FakePixels

EMPTY = Classification(np.zeros(0, np.float32), np.zeros(0, np.int32))
ACTIONS = ("capture", "ticket", "resolve") * 2 + ("fail", "stale", "drop", "sweep", "swap", "cut")


def make_frame(number: int, camera: str = "cam") -> Frame:
    return Frame(camera, number, number, FakePixels(number))


def make_result(entry: Entry, output: Output = EMPTY) -> FrameResult:
    frame = entry.frame
    return FrameResult(
        camera=frame.camera,
        model=entry.stream.model,
        frame_id=frame.frame_id,
        t_capture_ns=frame.t_capture_ns,
        width=8,
        height=4,
        engine=entry.engine or "",
        variant="v",
        labels=(),
        output=output,
    )


def identity_holds(cut: LedgerCut) -> None:
    """For every stream, every engine, and in total: by stream and by engine the same."""
    by_stream, by_engine = Counters(), Counters()
    for stream in cut.streams:
        assert stream.counters.balanced(), stream
        by_stream.add(stream.counters)
    for engine in cut.engines.values():
        assert engine.counters.balanced()
        by_engine.add(engine.counters)
    assert by_stream == by_engine


def open_stream(ledger: Ledger) -> tuple[Stream, list[int]]:
    seen: list[int] = []
    return ledger.open_stream("cam", "model", lambda result: seen.append(result.frame_id)), seen


def test_results_leave_in_capture_order_whatever_order_lanes_finish_in() -> None:
    ledger = Ledger()
    stream, seen = open_stream(ledger)
    entries = [ledger.captured(stream, make_frame(number)) for number in range(4)]
    for entry in entries:
        assert ledger.ticket(entry, "e")
    for index in (2, 1, 3):
        assert ledger.resolve(entries[index], make_result(entries[index]))
        ledger.deliver(stream)
    assert seen == []
    assert ledger.resolve(entries[0], make_result(entries[0]))
    ledger.deliver(stream)
    assert seen == [0, 1, 2, 3]
    cut = ledger.cut()
    identity_holds(cut)
    assert cut.streams[0].counters.completed == 4


def test_a_failed_frame_does_not_hold_up_later_ones() -> None:
    ledger = Ledger()
    stream, seen = open_stream(ledger)
    first, second = (ledger.captured(stream, make_frame(number)) for number in range(2))
    ledger.ticket(first, "e")
    ledger.ticket(second, "e")
    ledger.resolve(second, make_result(second))
    assert ledger.fail(first, "engine")
    ledger.deliver(stream)
    assert seen == [1]
    cut = ledger.cut()
    assert (cut.streams[0].counters.completed, cut.streams[0].counters.failed) == (1, 1)
    assert cut.streams[0].failures == {"engine": 1}


def test_a_late_result_is_discarded_and_counted_nowhere_twice() -> None:
    now = [0]
    ledger = Ledger(lambda: now[0])
    stream, seen = open_stream(ledger)
    entry = ledger.captured(stream, make_frame(0))
    ledger.ticket(entry, "e")
    now[0] = 100
    assert ledger.sweep(50) == 1
    assert not ledger.resolve(entry, make_result(entry))
    assert not ledger.fail(entry, "engine")
    assert not ledger.drop(entry, "x")
    assert not ledger.stale(entry)
    assert not ledger.ticket(entry, "e")
    assert seen == []
    cut = ledger.cut()
    identity_holds(cut)
    assert cut.streams[0].counters.failed == 1
    assert cut.streams[0].failures == {"timeout": 1}


def test_sweep_spares_a_finished_frame_that_waits_for_an_earlier_one() -> None:
    now = [0]
    ledger = Ledger(lambda: now[0])
    stream, seen = open_stream(ledger)
    first, second = (ledger.captured(stream, make_frame(number)) for number in range(2))
    ledger.ticket(first, "e")
    ledger.ticket(second, "e")
    ledger.resolve(second, make_result(second))
    assert ledger.sweep(1) == 1
    assert seen == [1]
    assert ledger.in_flight() == 0


def test_a_removed_stream_stays_listed_until_nothing_of_it_is_in_flight() -> None:
    ledger = Ledger()
    stream, _ = open_stream(ledger)
    entry = ledger.captured(stream, make_frame(0))
    ledger.ticket(entry, "e")
    ledger.remove_stream(stream)
    assert ledger.cut().streams[0].counters.in_flight == 1
    ledger.resolve(entry, make_result(entry))
    cut = ledger.cut()
    assert (cut.streams[0].counters.carried_in, cut.streams[0].counters.completed) == (1, 1)
    assert ledger.cut().streams == []


def test_a_consumer_that_raises_costs_nothing_but_its_own_result(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()

    def consume(result: FrameResult) -> None:
        raise ValueError("bad consumer")

    stream = ledger.open_stream("cam", "model", consume)
    for number in range(2):
        entry = ledger.captured(stream, make_frame(number))
        ledger.ticket(entry, "e")
        ledger.resolve(entry, make_result(entry))
        ledger.deliver(stream)
    assert ledger.cut().streams[0].counters.completed == 2
    assert "a consumer of results failed" in caplog.text


def test_delivery_is_in_order_and_one_at_a_time_under_threads() -> None:
    ledger = Ledger()
    seen: list[int] = []
    inside = threading.Lock()

    def consume(result: FrameResult) -> None:
        assert inside.acquire(blocking=False), "two threads deliver at once"
        seen.append(result.frame_id)
        inside.release()

    stream = ledger.open_stream("cam", "model", consume)
    count = 2000
    entries = [ledger.captured(stream, make_frame(number)) for number in range(count)]
    for entry in entries:
        ledger.ticket(entry, "e")

    def work(part: int) -> None:
        for entry in entries[part::4]:
            ledger.resolve(entry, make_result(entry))
            ledger.deliver(stream)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == list(range(count))


@given(st.data())
def test_the_identity_holds_whatever_happens(data: st.DataObject) -> None:
    now = [0]
    ledger = Ledger(lambda: now[0])
    seen: dict[str, list[int]] = {"a": [], "b": []}
    streams = [
        ledger.open_stream(name, "model", lambda result, name=name: seen[name].append(result.frame_id))  # type: ignore[misc]
        for name in seen
    ]
    entries: list[Entry] = []
    numbers = dict.fromkeys(seen, 0)
    engine = "e0"
    ledger.set_engine("model", engine)
    totals = Counters()
    for _ in range(data.draw(st.integers(1, 60))):
        now[0] += 1
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "capture":
            stream = data.draw(st.sampled_from(streams))
            entries.append(ledger.captured(stream, make_frame(numbers[stream.camera], stream.camera)))
            numbers[stream.camera] += 1
        elif action == "swap":
            engine = f"e{now[0]}"
            ledger.set_engine("model", engine)
        elif action == "sweep":
            ledger.sweep(now[0] - data.draw(st.integers(0, 20)))
        elif action == "cut":
            cut = ledger.cut()
            identity_holds(cut)
            for counted in cut.streams:
                totals.add(counted.counters)
        elif entries:
            entry = data.draw(st.sampled_from(entries))
            if action == "ticket":
                # frames of a camera are claimed in capture order: the mailbox is a queue
                older = [e for e in entries if e.stream is entry.stream and e.frame.frame_id < entry.frame.frame_id]
                if all(e.state for e in older):
                    ledger.ticket(entry, engine)
            elif action == "resolve":
                ledger.resolve(entry, make_result(entry))
            elif action == "fail":
                ledger.fail(entry, "x")
            elif action == "stale":
                ledger.stale(entry)
            else:
                ledger.drop(entry, "y")
            ledger.deliver(entry.stream)
    ledger.sweep(now[0] + 1)
    cut = ledger.cut()
    identity_holds(cut)
    for counted in cut.streams:
        totals.add(counted.counters)
    assert ledger.in_flight() == 0
    assert totals.captured == sum(numbers.values()) == totals.ended()
    for stream in streams:
        assert stream.next_release == stream.next_ticket
        assert not stream.pending
    for order in seen.values():
        assert order == sorted(set(order))
    assert sum(map(len, seen.values())) == totals.completed


def test_the_longest_gap_is_that_of_cameras_that_bring_frames() -> None:
    now = [1_000]
    ledger = Ledger(lambda: now[0])
    streams = [ledger.open_stream(name, "model", lambda _: None) for name in ("gate", "paused")]

    def result(stream: Stream, number: int) -> None:
        entry = ledger.captured(stream, make_frame(number, stream.camera))
        assert ledger.ticket(entry, "e")
        assert ledger.resolve(entry, make_result(entry))

    assert ledger.longest_gap_ns("model") is None
    for stream in streams:
        result(stream, 0)
    now[0] = 3_600_000
    result(streams[0], 1)
    ledger.begin_gaps("model")
    assert ledger.longest_gap_ns("model") is None  # nothing has come since
    for number, moment in enumerate((3_600_010, 3_600_050), 2):
        now[0] = moment
        result(streams[0], number)
    now[0] = 3_600_060
    assert ledger.longest_gap_ns("model") == 40
    # a frame that gets no result is one that is waited for
    ledger.captured(streams[0], make_frame(4, "gate"))
    now[0] = 3_600_200
    assert ledger.longest_gap_ns("model") == 150


def test_a_cached_result_keeps_its_turn_and_is_counted_apart() -> None:
    ledger = Ledger()
    stream, seen = open_stream(ledger)
    first, second = (ledger.captured(stream, make_frame(number)) for number in range(2))
    ledger.ticket(first, "e")
    ledger.ticket(second, "e")
    assert ledger.resolve(second, replace(make_result(second), cached=True))
    ledger.deliver(stream)
    assert seen == []
    ledger.resolve(first, make_result(first))
    ledger.deliver(stream)
    assert seen == [0, 1]
    cut = ledger.cut()
    identity_holds(cut)
    (counted,), engine = cut.streams, cut.engines["model", "e"]
    for counters in (counted.counters, engine.counters):
        assert (counters.completed, counters.cached) == (1, 1)
    assert len(counted.latency.values_ns) == len(engine.latency.values_ns) == 1
    assert len(ledger.latencies_since("model", 0)) == 1


def test_lookups_are_hits_and_misses() -> None:
    ledger = Ledger()
    for outcome in ("hit", "miss", "miss", "bypassed"):
        ledger.looked_up("model", "e", outcome)
    assert ledger.cut().engines["model", "e"].cache == CacheCounters(lookups=3, hits=1, misses=2, bypassed=1)
    assert ledger.cut().engines == {}


def test_latencies_are_those_of_completed_frames_and_told_once() -> None:
    now = [1_000]
    ledger = Ledger(lambda: now[0])
    stream, _ = open_stream(ledger)
    other = ledger.open_stream("other", "model", lambda _: None)
    elsewhere = ledger.open_stream("cam", "second", lambda _: None)

    def complete(where: Stream, captured_ns: int, result_ns: int) -> None:
        now[0] = captured_ns
        entry = ledger.captured(where, make_frame(captured_ns))
        ledger.ticket(entry, "engine")
        now[0] = result_ns
        ledger.resolve(entry, make_result(entry))
        ledger.deliver(where)

    complete(stream, 1_000, 1_030)
    complete(other, 1_010, 1_050)
    complete(elsewhere, 1_020, 1_090)
    failed = ledger.captured(stream, make_frame(1_095))
    ledger.ticket(failed, "engine")
    ledger.fail(failed, "engine")
    assert ledger.latencies_since("model", 1_030) == [40]
    complete(stream, 1_100, 1_200)
    assert ledger.latencies_since("model", 0) == [100]
    assert ledger.latencies_since("model", 0) == []
    assert ledger.latencies_since("second", 0) == [70]
    assert ledger.latencies_since("third", 0) == []
    for number in range(RECENT + 10):
        complete(stream, 2_000 + number, 2_000 + 2 * number)
    kept = ledger.latencies_since("model", 0)
    assert kept == list(range(10, RECENT + 10))


def test_runs_are_counted_over_windows() -> None:
    ledger = Ledger()
    assert ledger.ran_in_all("model") == (0, 0)
    ledger.ran("model", "one", 3, 10)
    ledger.cut()
    ledger.ran("model", "two", 1, 10)
    ledger.ran("other", "one", 5, 10)
    assert ledger.ran_in_all("model") == (2, 4)
