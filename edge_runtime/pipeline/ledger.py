"""The ledger: every captured frame ends in exactly one counter, and results leave in capture order.

One lock, a leaf: nothing is called under it. It makes all transitions of a frame on a model:

    WAITING  captured, in a mailbox             -> STALE, DROPPED, FAILED (ended), or TICKETED
    TICKETED claimed; holds a place in order    -> READY, or FAILED (ended; its ticket is skipped)
    READY    has a result, waits for its turn   -> COMPLETED (ended)
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum

from edge_runtime.records.activity import CacheOutcome, Counters, EngineCounters, LedgerCut, Samples, StreamCut
from edge_runtime.records.frames import Frame, FrameResult

log = logging.getLogger(__name__)


RECENT = 4096
"""Latencies kept per model until `latencies_since` takes them: four seconds at a thousand frames a second."""

_Recent = deque[tuple[int, int]]
"""(monotonic time of the result, latency) of completed frames, ns."""


class State(IntEnum):
    """Where a frame is on its way."""

    WAITING = 0
    TICKETED = 1
    READY = 2
    ENDED = 3


class Stream:
    """One camera on one model. `patient`: its frames may wait as long as it takes to be claimed (full pace)."""

    __slots__ = (
        "camera", "counters", "draining", "entries", "failures", "fed", "gap_ns", "latency", "model", "next_release",
        "next_ticket", "outbox", "patient", "pending", "recent", "removed", "sink", "t_result_ns",
    )  # fmt: skip

    def __init__(
        self, camera: str, model: str, sink: Callable[[FrameResult], None], patient: bool, recent: _Recent
    ) -> None:
        self.camera = camera
        self.model = model
        self.sink = sink
        self.counters = Counters()
        self.latency = Samples()
        self.failures: dict[str, int] = {}
        self.entries: set[Entry] = set()
        self.next_ticket = 0
        self.next_release = 0
        self.pending: dict[int, Entry] = {}
        self.outbox: deque[FrameResult] = deque()
        self.draining = False
        self.removed = False
        self.patient = patient
        self.t_result_ns = 0
        self.gap_ns = 0  # the longest time between two results since `Ledger.begin_gaps`
        self.fed = False  # whether a frame was captured since then
        self.recent = recent  # its model's, shared with the model's other streams


class Entry:
    """One frame on one model."""

    __slots__ = ("engine", "frame", "result", "state", "stream", "t_admitted_ns", "ticket", "window")

    def __init__(self, stream: Stream, frame: Frame, t_admitted_ns: int, window: int) -> None:
        self.stream = stream
        self.frame = frame
        self.state = State.WAITING
        self.ticket = -1
        self.result: FrameResult | None = None
        self.engine: str | None = None
        self.t_admitted_ns = t_admitted_ns
        self.window = window


class Ledger:
    """Counts, tickets and their order. Every public method may be called from any thread, also under M."""

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._engines: dict[tuple[str, str], EngineCounters] = {}
        self._current: dict[str, str] = {}
        self._labels: dict[str, tuple[str, str]] = {}
        self._past: dict[str, Counters] = {}
        self._recent: dict[str, _Recent] = {}
        self._ran: dict[str, tuple[int, int]] = {}
        self._window = 0

    # --- streams and engines

    def open_stream(
        self, camera: str, model: str, sink: Callable[[FrameResult], None], *, patient: bool = False
    ) -> Stream:
        """A new stream; its results go to `sink` one at a time, in capture order, on changing threads.

        `patient`: its source waits for its frames, so the time-out of a frame begins when it is claimed.
        """
        with self._lock:
            stream = Stream(camera, model, sink, patient, self._recent.setdefault(model, deque(maxlen=RECENT)))
            self._streams.append(stream)
        return stream

    def remove_stream(self, stream: Stream) -> None:
        """It stays listed until nothing of it is in flight and its last counts were cut."""
        with self._lock:
            stream.removed = True

    def set_engine(self, model: str, engine: str, variant: str = "", backend: str = "") -> None:
        """From now on, `engine` is the one that `model` opens batches against."""
        with self._lock:
            self._current[model] = engine
            self._labels[engine] = (variant, backend)

    # --- a frame's transitions

    def captured(self, stream: Stream, frame: Frame) -> Entry:
        """A frame was captured; it is in flight from here on."""
        with self._lock:
            entry = Entry(stream, frame, self._clock_ns(), self._window)
            stream.counters.captured += 1
            stream.fed = True
            stream.entries.add(entry)
            if stream.removed and stream not in self._streams:
                self._streams.append(stream)  # its camera gave one more while it was being removed
        return entry

    def stale(self, entry: Entry) -> bool:
        """A newer frame replaced it before it was claimed."""
        with self._lock:
            if entry.state is not State.WAITING:
                return False
            entry.stream.counters.stale += 1
            self._end(entry).counters.stale += 1
            return True

    def drop(self, entry: Entry, reason: str) -> bool:
        """It will never be used, for `reason` (a snake_case word)."""
        with self._lock:
            if entry.state is not State.WAITING:
                return False
            for counters in (entry.stream.counters, self._end(entry).counters):
                counters.dropped[reason] = counters.dropped.get(reason, 0) + 1
            return True

    def ticket(self, entry: Entry, engine: str) -> bool:
        """Claim it for `engine`: it gets the next ticket of its stream. False where it has ended already."""
        with self._lock:
            if entry.state is not State.WAITING:
                return False
            stream = entry.stream
            entry.state = State.TICKETED
            entry.engine = engine
            if stream.patient:
                entry.t_admitted_ns = self._clock_ns()
            entry.ticket = stream.next_ticket
            stream.next_ticket += 1
            stream.pending[entry.ticket] = entry
            return True

    def resolve(self, entry: Entry, result: FrameResult) -> bool:
        """It has a result. False (and the result is discarded) where it was failed meanwhile.

        Call `deliver(entry.stream)` afterwards, holding no lock.
        """
        with self._lock:
            if entry.state is not State.TICKETED:
                return False
            entry.state = State.READY
            entry.result = result
            self._release(entry.stream)
            return True

    def fail(self, entry: Entry, reason: str) -> bool:
        """It ends without a result, and its ticket (if it has one) no longer holds up later ones.

        Call `deliver(entry.stream)` afterwards, holding no lock.
        """
        with self._lock:
            return self._fail(entry, reason)

    def sweep(
        self, older_than_ns: int, model: str | None = None, *, reason: str = "timeout", final: bool = False
    ) -> int:
        """Fail every frame (of `model`) admitted before that monotonic time which has no result; how many.

        Frames that wait in a patient stream are spared, unless this is the `final` sweep.

        A finished frame that only waits for an earlier one is released by that one's failure.
        """
        failed = 0
        touched: list[Stream] = []
        with self._lock:
            for stream in self._streams:
                if model is not None and stream.model != model:
                    continue
                overdue = [
                    entry
                    for entry in stream.entries
                    if entry.t_admitted_ns < older_than_ns
                    and (
                        entry.state is State.TICKETED
                        or (entry.state is State.WAITING and (final or not stream.patient))
                    )
                ]
                for entry in overdue:
                    self._fail(entry, reason)
                failed += len(overdue)
                if overdue:
                    touched.append(stream)
        for stream in touched:
            self.deliver(stream)
        return failed

    def deliver(self, stream: Stream) -> None:
        """Hand released results to the stream's sink. One thread at a time drains a stream; others return."""
        if not stream.outbox:
            return
        with self._lock:
            if stream.draining:
                return
            stream.draining = True
        while True:
            with self._lock:
                if not stream.outbox:
                    stream.draining = False
                    return
                result = stream.outbox.popleft()
            try:
                stream.sink(result)
            except Exception:  # a bad consumer must not cost a lane
                log.exception("camera %s, model %s: a consumer of results failed", stream.camera, stream.model)

    # --- batches

    def ran(self, model: str, engine: str, places: int, inference_ns: int) -> None:
        """A batch of `places` frames ran on `engine` for `inference_ns`."""
        with self._lock:
            counters = self._engine(model, engine)
            counters.batches += 1
            counters.places += places
            counters.inference.add(inference_ns)
            batches, frames = self._ran.get(model, (0, 0))
            self._ran[model] = batches + 1, frames + places

    def looked_up(self, model: str, engine: str, outcome: CacheOutcome) -> None:
        """A model's cache was asked, or not, for a frame that `engine` would run."""
        with self._lock:
            self._engine(model, engine).cache.count(outcome)

    # --- looking

    def in_flight(self) -> int:
        """Frames captured and not ended, over all streams."""
        with self._lock:
            return sum(len(stream.entries) for stream in self._streams)

    def oldest_ns(self) -> int | None:
        """Monotonic time at which the oldest frame in flight was admitted; None when there is none.

        A frame that waits in a patient stream has all the time in the world and does not count.
        """
        with self._lock:
            return min(
                (
                    entry.t_admitted_ns
                    for stream in self._streams
                    for entry in stream.entries
                    if not (stream.patient and entry.state is State.WAITING)
                ),
                default=None,
            )

    def totals(self, model: str) -> Counters:
        """A model's frames since the start, over all its cameras (`carried_in` and `in_flight` say nothing here)."""
        with self._lock:
            total = Counters()
            total.add(self._past.get(model, Counters()))
            for stream in self._streams:
                if stream.model == model:
                    total.add(stream.counters)
            return total

    def ran_in_all(self, model: str) -> tuple[int, int]:
        """(batches, frames in them) that a model ran since the start."""
        with self._lock:
            return self._ran.get(model, (0, 0))

    def latencies_since(self, model: str, t_ns: int) -> list[int]:
        """Capture to result in ns, of a model's frames that completed after that monotonic time; the newest RECENT.

        For one reader: what was returned, or is older than `t_ns`, is forgotten.
        """
        with self._lock:
            recent = self._recent.get(model)
            if not recent:
                return []
            latencies_ns = [latency_ns for t_result_ns, latency_ns in recent if t_result_ns > t_ns]
            recent.clear()
            return latencies_ns

    def begin_gaps(self, model: str) -> None:
        """Measure the longest gap between two results of each of a model's cameras anew. For one caller at a time."""
        with self._lock:
            for stream in self._streams:
                if stream.model == model:
                    stream.gap_ns, stream.fed = 0, bool(stream.entries)

    def longest_gap_ns(self, model: str) -> int | None:
        """The longest gap between two results of one camera since `begin_gaps`, the one under way included.

        A camera that has brought no frame since then (it is paused, or at its end) waits for none and does not count.
        None where no other camera of the model has had a result yet.
        """
        with self._lock:
            now_ns = self._clock_ns()
            return max(
                (
                    max(stream.gap_ns, now_ns - stream.t_result_ns)
                    for stream in self._streams
                    if stream.model == model and stream.fed and stream.t_result_ns and not stream.removed
                ),
                default=None,
            )

    def cut(self) -> LedgerCut:
        """End the window: everything counted since the last cut; counting starts anew."""
        with self._lock:
            streams = []
            for stream in self._streams:
                counters = stream.counters
                # counted from the open entries and not derived, so that the identity can prove something
                counters.in_flight = len(stream.entries)
                for entry in stream.entries:
                    self._attribute(entry).counters.in_flight += 1
                streams.append(StreamCut(stream.camera, stream.model, counters, stream.latency, stream.failures))
                self._past.setdefault(stream.model, Counters()).add(counters)
                stream.counters = Counters(carried_in=counters.in_flight)
                stream.latency = Samples()
                stream.failures = {}
            self._streams = [stream for stream in self._streams if not stream.removed or stream.entries]
            engines, self._engines = self._engines, {}
            living = {*self._current.values(), *(entry.engine for s in self._streams for entry in s.entries)}
            self._labels = {engine: label for engine, label in self._labels.items() if engine in living}
            self._window += 1
            return LedgerCut(streams, engines)

    # --- under the lock

    def _engine(self, model: str, engine: str) -> EngineCounters:
        key = (model, engine)
        counters = self._engines.get(key)
        if counters is None:
            counters = self._engines[key] = EngineCounters(*self._labels.get(engine, ("", "")))
        return counters

    def _attribute(self, entry: Entry) -> EngineCounters:
        """The counters of the engine a frame belongs to, the frame itself counted as captured or carried in."""
        model = entry.stream.model
        engine = self._engine(model, entry.engine or self._current.get(model, ""))
        if entry.window == self._window:
            engine.counters.captured += 1
        else:
            engine.counters.carried_in += 1
        return engine

    def _end(self, entry: Entry) -> EngineCounters:
        entry.state = State.ENDED
        entry.stream.entries.remove(entry)
        return self._attribute(entry)

    def _fail(self, entry: Entry, reason: str) -> bool:
        if entry.state not in (State.WAITING, State.TICKETED):
            return False
        stream = entry.stream
        stream.counters.failed += 1
        stream.failures[reason] = stream.failures.get(reason, 0) + 1
        self._end(entry).counters.failed += 1
        self._release(stream)
        return True

    def _release(self, stream: Stream) -> None:
        """Let every frame go whose turn it is."""
        pending = stream.pending
        while (entry := pending.get(stream.next_release)) is not None:
            if entry.state is State.TICKETED:
                return
            del pending[stream.next_release]
            stream.next_release += 1
            if entry.state is State.READY:
                result = entry.result
                assert result is not None
                result.timings.t_result_ns = self._clock_ns()
                latency_ns = result.timings.t_result_ns - result.t_capture_ns
                if stream.t_result_ns:
                    stream.gap_ns = max(stream.gap_ns, result.timings.t_result_ns - stream.t_result_ns)
                stream.t_result_ns = result.timings.t_result_ns
                engine = self._end(entry)
                if result.cached:
                    stream.counters.cached += 1
                    engine.counters.cached += 1
                else:
                    stream.counters.completed += 1
                    stream.latency.add(latency_ns)
                    stream.recent.append((stream.t_result_ns, latency_ns))
                    engine.counters.completed += 1
                    engine.latency.add(latency_ns)
                stream.outbox.append(result)
