"""The claim protocol of one model: frames wait in mailboxes, are claimed into batches, and are run.

One Condition guards all of it (M). Under it there is no I/O, no close and no callback; the ledger's lock
is a leaf below it. Frame, ticket, lease and place are taken together, so there is no batch without a
frame, and a stale frame never gets a ticket. Invariant: `credits + batches opened and not done = lanes + 1`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto

from edge_runtime.engine.slot import EngineSlot, Resident
from edge_runtime.pipeline.batch import Batch, Place, PlaceState
from edge_runtime.pipeline.lateness import Lateness
from edge_runtime.pipeline.ledger import Entry, Ledger, Stream
from edge_runtime.pipeline.mailbox import Mailbox, ReadyQueue
from edge_runtime.records.frames import FrameResult, Transform

log = logging.getLogger(__name__)

_After = list[Stream | Resident]

FULL_PACE_WAITING = 2
"""Frames that a camera at full pace may have waiting: one to claim, one decoded meanwhile."""


class Desk:
    """Mailboxes, open and closed batches, credits and the slot of one model.

    `batch_timeout_s`: how long after its capture a frame may wait for company. `grace_s`: how long after
    its batch was closed a writer may still come; then its place is voided and its frame fails as `late`.
    `split`: claimers (preprocess workers) and runners (the GPU's owner) are different threads. `exchanged` is called
    after the ladder has become another one, on the thread that changed it, holding nothing.
    """

    def __init__(
        self,
        model: str,
        slot: EngineSlot,
        ledger: Ledger,
        *,
        lanes: int,
        batch_timeout_s: float = 0.02,
        grace_s: float = 1.0,
        split: bool = False,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        exchanged: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.lanes = lanes
        self._slot = slot
        self._ledger = ledger
        self._timeout_ns = int(batch_timeout_s * 1e9)
        self._grace_ns = int(grace_s * 1e9)
        self._monitor = threading.Lock()
        self._work = threading.Condition(self._monitor)
        self._split = split
        self._clock_ns = clock_ns
        self._exchanged = exchanged
        self._mailboxes: list[Mailbox] = []
        self._ready = ReadyQueue()
        self._open: Batch | None = None
        self._limit: int | None = None
        self._open_limit = 1
        self._lateness = Lateness()
        self._closed: deque[Batch] = deque()
        self._credits = lanes + 1
        self._running = 0
        self._stopping = False
        self._t_moved_ns = 0  # when something was claimed last, or frames began to wait
        if slot.current is not None:
            self._announce(slot.current)

    # --- producers

    def attach(self, stream: Stream, *, full_pace: bool = False, priority: int = 0) -> Mailbox:
        """A mailbox for a camera's frames."""
        capacity = FULL_PACE_WAITING if full_pace else None
        mailbox = Mailbox(stream, self._monitor, capacity=capacity, priority=priority)
        with self._monitor:
            self._mailboxes.append(mailbox)
        return mailbox

    def ended(self, mailbox: Mailbox) -> None:
        """Its source has come to its end: nobody need wait for another frame of it."""
        with self._monitor:
            mailbox.ended = True
            self._wake()

    def wait_for_room(self, mailbox: Mailbox) -> None:
        """At full pace: wait until `put` will not have to. Only the mailbox's one producer may rely on it."""
        with self._monitor:
            while (
                mailbox.capacity is not None
                and len(mailbox.entries) >= mailbox.capacity
                and self._closed_for(mailbox) is None
            ):
                mailbox.space.wait()

    def detach(self, mailbox: Mailbox) -> None:
        """The camera was removed: what waits is dropped as `removed`, its producer wakes."""
        with self._monitor:
            if mailbox.removed:
                return
            mailbox.removed = True
            self._mailboxes.remove(mailbox)
            self._drop_waiting(mailbox, "removed")
            self._work.notify_all()

    def set_priority(self, mailbox: Mailbox, priority: int) -> None:
        """From the next claim on, its frames go before those of a lower priority."""
        with self._monitor:
            mailbox.priority = priority

    def put(self, mailbox: Mailbox, entry: Entry) -> bool:
        """Let a captured frame wait for a place. At full pace this waits for room.

        False where it was dropped at once: model down, camera removed, stopping.
        """
        with self._monitor:
            while True:
                if (reason := self._closed_for(mailbox)) is not None:
                    self._ledger.drop(entry, reason)
                    return False
                if mailbox.capacity is None or len(mailbox.entries) < mailbox.capacity:
                    break
                mailbox.space.wait()
            now_ns = self._clock_ns()
            if mailbox.capacity is None and mailbox.entries:
                self._ledger.stale(mailbox.entries.popleft())
            if mailbox.t_put_ns:
                gap_ns = now_ns - mailbox.t_put_ns
                known_ns = mailbox.interval_ns or gap_ns
                mailbox.interval_ns = known_ns + (gap_ns - known_ns) // 8
            mailbox.t_put_ns = now_ns
            mailbox.entries.append(entry)
            if not self._ready:
                self._t_moved_ns = now_ns
            self._ready.add(mailbox)
            self._wake()
        return True

    def usable(self, mailbox: Mailbox, timeout_s: float) -> bool:
        """Whether frames are worth bringing, waiting up to `timeout_s` for it: the model is up, or it all ends."""
        with self._monitor:
            if self._closed_for(mailbox) == "model_down":
                mailbox.space.wait(timeout_s)
            return self._closed_for(mailbox) != "model_down"

    # --- lanes and workers

    def next_work(
        self, *, lane: int = 0, claim: bool = True, run: bool = True, finished: Batch | None = None
    ) -> Place | Batch | None:
        """Wait for something to do: a Place to write, a Batch to run, or None when it is time for `lane` to end.

        What is returned must come back exactly once: a Place through `written`, a Batch through `done` or,
        saving a turn under M, as `finished` of the next call.
        """
        while True:
            found = self._look(claim, run, wait=True, finished=finished, lane=lane)
            finished = None
            if found is _Sign.END:
                return None
            if not isinstance(found, _Sign):
                return found

    def poll(self, *, claim: bool = True, run: bool = True) -> Place | Batch | None:
        """Like `next_work`, but None when there is nothing to do now."""
        while (found := self._look(claim, run, wait=False)) is _Sign.AGAIN:
            pass
        return None if isinstance(found, _Sign) else found

    def _look(
        self, claim: bool, run: bool, *, wait: bool, finished: Batch | None = None, lane: int = 0
    ) -> Place | Batch | _Sign:
        """One look at what there is to do; where there is nothing, wait once."""
        after: _After = []
        with self._monitor:
            if finished is not None:
                self._take_back(finished, after)
                # an engine that is to be closed now must not wait for the next frame
                wait = wait and not after
            found = self._leave() if lane >= self.lanes else self._look_once(claim, run, wait, after)
        if after:
            self._settle_after(after)
        return _Sign.AGAIN if found is _Sign.NOTHING and finished is not None else found

    def _leave(self) -> _Sign:
        """One lane less. What it was woken for is somebody else's now."""
        self._wake()
        return _Sign.END

    def _look_once(self, claim: bool, run: bool, wait: bool, after: _After) -> Place | Batch | _Sign:
        now_ns = self._clock_ns()
        if run and (batch := self._runnable()) is not None:
            return batch
        if self._stopping and (not run or (self._open is None and not self._closed)):
            return _Sign.END
        if claim and (place := self._claim(now_ns)) is not None:
            if self._ready:
                self._wake()  # there is more: pass the baton to another idle lane
            return place
        wake_ns = self._tend(now_ns, after) if run else None
        if wake_ns is not None and wake_ns <= now_ns:
            return _Sign.AGAIN
        if wait:
            self._work.wait(None if wake_ns is None else (wake_ns - now_ns) / 1e9)
            return _Sign.AGAIN
        return _Sign.NOTHING

    def written(
        self,
        place: Place,
        transform: Transform | None,
        reason: str = "preprocess",
        *,
        take: bool = False,
        answer: FrameResult | None = None,
    ) -> Batch | None:
        """The writer left the buffer. `transform` None: it failed for `reason`, the place is void.

        `answer`: its result is known already; the frame is done, and its place leaves the batch.

        With `take`, a writer that is a lane gets the batch to run at once, where it was the last one it waited for.
        """
        after: _After = []
        batch = place.batch
        taken: Batch | None = None
        with self._monitor:
            batch.writers -= 1
            if place.state is PlaceState.WRITING:
                batch.writing -= 1
                place.t_written_ns = self._clock_ns()
                if answer is not None:
                    self._answer(place, answer, after)
                elif transform is not None:
                    place.transform = transform
                    place.state = PlaceState.READY
                else:
                    self._void(place, reason, after)
                if batch is self._open and batch.taken == 0:
                    self._close(batch, place.t_written_ns, after)  # nobody is in it that could wait for others
                elif batch.closed and batch.writing == 0 and not self._settle(batch, after):
                    if take:
                        self._closed.remove(batch)
                        self._running += 1
                        taken = batch
                    elif self._split:
                        self._wake()  # else the writer is a lane and comes for it itself
            elif batch.done and batch.writers == 0:
                # it came late: its place was voided and the batch went without it
                batch.resident.free.append(batch.buffer)
                self._wake()
        if after:
            self._settle_after(after)
        return taken

    def done(self, batch: Batch) -> None:
        """A batch came back from its lane: credit, lease and (when no writer is inside) buffer are free again."""
        after: _After = []
        with self._monitor:
            self._take_back(batch, after)
        self._settle_after(after)

    # --- the owner

    def exchange(self, resident: Resident | None, reason: str | None = None, *, others: Sequence[Resident] = ()) -> int:
        """Let new batches open against `resident`; the open batch is closed. Returns ns under M.

        `others` stay loaded beside it; of the old ladder, what is neither is closed after its last batch, by
        whoever brings that back (here, when it has none). None takes the model down for `reason`: what waits is
        dropped as `model_down`.
        """
        after: _After = []
        with self._monitor:
            start_ns = self._clock_ns()
            self._exchange(resident, reason, others, after)
            held_ns = self._clock_ns() - start_ns
        self._settle_after(after)
        self._exchanged()
        return held_ns

    def choose(self, variant: str) -> bool:
        """Make the ladder's `variant` of the bundle that runs current, and keep all others on the ladder.

        False, and nothing done, where the model is down or the ladder has no such variant.
        """
        after: _After = []
        with self._monitor:
            current, ladder = self._slot.current, self._slot.ladder
            if current is None:
                return False
            info = current.info
            found = [each for each in ladder if (each.info.variant, each.info.bundle) == (variant, info.bundle)]
            if not found:
                return False
            if variant != info.variant:
                self._exchange(found[0], None, [each for each in ladder if each is not found[0]], after)
        self._settle_after(after)
        return True

    def set_lanes(self, lanes: int) -> None:
        """From now on so many lanes work here; a lane beyond that ends when it has brought back what it has in hand.

        More lanes than the current resident has only after it was exchanged for one that has them, and fewer before.
        """
        with self._monitor:
            # below zero while more batches are open than the fewer lanes may have
            self._credits += lanes - self.lanes
            self.lanes = lanes
            self._work.notify_all()

    def set_batch_timeout(self, batch_timeout_s: float) -> None:
        """From the next batch on, how long after its capture a frame may wait for company."""
        with self._monitor:
            self._timeout_ns = int(batch_timeout_s * 1e9)

    def set_latency_limit(self, limit_s: float | None) -> None:
        """From now on, a live or paced frame whose result would come later after its capture is dropped as `overload`
        when it is its turn, and the next one is taken; None: none is."""
        with self._monitor:
            self._lateness.allow(limit_s)

    def set_batch_limit(self, limit: int) -> None:
        """From the next batch on, at most so many frames in one, at least 1; see `fitting` for what comes of it."""
        with self._monitor:
            self._limit = max(1, limit)

    def stop(self) -> None:
        """Nothing is claimed any more; what waits is dropped as `stopping`; batches in hand are finished."""
        after: _After = []
        with self._monitor:
            self._stopping = True
            if self._open is not None:
                self._close(self._open, self._clock_ns(), after)
            self._drop_all("stopping")
            self._work.notify_all()
        self._settle_after(after)

    @property
    def down_reason(self) -> str | None:
        """Why the model has no engine; None when it has one."""
        with self._monitor:
            return None if self._slot.current is not None else (self._slot.reason or "no engine")

    def resident(self) -> Resident | None:
        """The resident that new batches open against."""
        with self._monitor:
            return self._slot.current

    def ladder(self) -> tuple[Resident, ...]:
        """Every resident that can be made current at once, the current one first."""
        with self._monitor:
            return self._slot.ladder

    def unclaimed_ns(self) -> int:
        """For how long frames have been waiting without any being claimed; 0 when none waits."""
        with self._monitor:
            if not self._ready or self._slot.current is None or self._stopping:
                return 0
            return max(0, self._clock_ns() - self._t_moved_ns)

    def audit(self) -> tuple[int, int]:
        """(free credits, batches opened and not done): their sum is always lanes + 1."""
        with self._monitor:
            return self._credits, (self._open is not None) + len(self._closed) + self._running

    def _settle_after(self, after: _After) -> None:
        """What an action under M leaves to be done when M is free: engines to close, results to deliver."""
        for item in after:
            if isinstance(item, Resident):
                try:
                    item.close()
                except Exception:  # an old engine that cannot be closed must not cost the work in hand
                    log.exception("model %s: engine %s could not be closed", self.model, item.info.digest)
            else:
                self._ledger.deliver(item)

    # --- under M

    def _exchange(
        self, resident: Resident | None, reason: str | None, others: Sequence[Resident], after: _After
    ) -> None:
        if self._open is not None:
            self._close(self._open, self._clock_ns(), after)
        after.extend(self._slot.exchange(resident, reason, others))
        if resident is not None:
            self._announce(resident)
            for mailbox in self._mailboxes:
                mailbox.space.notify_all()
        else:
            self._drop_all("model_down")
        self._work.notify_all()

    def _announce(self, resident: Resident) -> None:
        info = resident.info
        self._ledger.set_engine(self.model, info.digest, info.variant, info.backend)

    def _closed_for(self, mailbox: Mailbox) -> str | None:
        if self._stopping:
            return "stopping"
        if mailbox.removed:
            return "removed"
        return "model_down" if self._slot.current is None else None

    def _drop_waiting(self, mailbox: Mailbox, reason: str) -> None:
        while mailbox.entries:
            self._ledger.drop(mailbox.entries.popleft(), reason)
        self._ready.discard(mailbox)
        mailbox.space.notify_all()

    def _drop_all(self, reason: str) -> None:
        for mailbox in self._mailboxes:
            self._drop_waiting(mailbox, reason)

    def _wake(self) -> None:
        # lanes that claim and run are all alike: one is enough. Claimers and runners are not.
        if self._split:
            self._work.notify_all()
        else:
            self._work.notify()

    def _runnable(self) -> Batch | None:
        """The first closed batch whose places are all READY or VOID."""
        for batch in self._closed:
            if batch.writing == 0:
                self._closed.remove(batch)
                self._running += 1
                return batch
        return None

    def _claim(self, now_ns: int) -> Place | None:
        """Take frame, ticket, lease and place together, or nothing."""
        resident = self._slot.current
        if self._stopping or resident is None or not self._ready:
            return None
        batch = self._open
        if batch is None and (self._credits <= 0 or not resident.free):
            return None
        while (entry := self._ready.take(len(self._mailboxes))) is not None:
            if self._lateness.too_late(entry, now_ns):
                self._ledger.drop(entry, "overload")
                self._t_moved_ns = now_ns
                continue
            if not self._ledger.ticket(entry, resident.info.digest):
                continue  # it timed out while it waited
            if batch is None:
                self._credits -= 1
                leased = self._slot.acquire()
                batch = self._open = Batch(leased, leased.free.pop(), 0)
                # no frame waits for company beyond its deadline; where load made it late already,
                # those that wait join at once and the batch goes as soon as none is left
                batch.deadline_ns = entry.frame.t_capture_ns + self._timeout_ns
                self._open_limit = leased.places if self._limit is None else fitting(self._limit, leased)
                if self._open_limit > 1:
                    self._wake()  # an idle lane began to wait before there was this deadline
            else:
                batch.deadline_ns = min(batch.deadline_ns, entry.frame.t_capture_ns + self._timeout_ns)
            self._t_moved_ns = now_ns
            place = batch.add(entry, now_ns)
            if batch.taken >= self._open_limit:
                self._open = None
                batch.closed = True
                batch.t_closed_ns = now_ns
                self._closed.append(batch)
            return place
        return None

    def _close(self, batch: Batch, now_ns: int, after: _After) -> None:
        """No more frames join it; it runs when its writers are done."""
        self._open = None
        batch.closed = True
        batch.t_closed_ns = now_ns
        self._closed.append(batch)
        if batch.writing == 0:
            self._settle(batch, after)

    def _void(self, place: Place, reason: str, after: _After) -> None:
        place.state = PlaceState.VOID
        if self._ledger.fail(place.entry, reason):
            after.append(place.entry.stream)

    def _answer(self, place: Place, answer: FrameResult, after: _After) -> None:
        place.state = PlaceState.CACHED
        place.batch.vacant.append(place.index)
        answer.timings.t_written_ns = place.t_written_ns
        if self._ledger.resolve(place.entry, answer):
            after.append(place.entry.stream)

    def _settle(self, batch: Batch, after: _After) -> bool:
        """All its places are decided: where none is left to run, it is done without a run (True)."""
        for place in batch.places:
            if place.state is PlaceState.READY:
                return False
        self._closed.remove(batch)
        self._finish(batch, after)
        return True

    def _take_back(self, batch: Batch, after: _After) -> None:
        self._running -= 1
        now_ns = self._clock_ns()
        self._lateness.took(now_ns - batch.places[0].t_claim_ns)
        for place in batch.places:
            if place.state is PlaceState.READY and not place.entry.stream.patient:
                self._lateness.came(now_ns - place.entry.frame.t_capture_ns)
        self._finish(batch, after)
        if self._split:
            self._wake()

    def _finish(self, batch: Batch, after: _After) -> None:
        """Credit and lease go back, once; the buffer only when nobody writes into it."""
        assert not batch.done
        batch.done = True
        # a place knows its batch: left as a ring, they would hold their pictures until the collector comes
        batch.places = []
        self._credits += 1
        if batch.writers == 0:
            batch.resident.free.append(batch.buffer)
        if self._stopping:
            self._work.notify_all()  # who waited for the last batch may go
        if (resident := self._slot.release(batch.resident)) is not None:
            after.append(resident)

    def _tend(self, now_ns: int, after: _After) -> int | None:
        """An idle lane's duties: close the open batch when due, void overdue places.

        Returns when to look again (monotonic ns; not after `now_ns` for at once), None for when something happens.
        """
        wake_ns: int | None = None
        if (batch := self._open) is not None:
            if now_ns >= batch.deadline_ns or not self._worth_waiting(now_ns, batch.deadline_ns):
                self._close(batch, now_ns, after)
                return now_ns
            wake_ns = batch.deadline_ns
        for batch in tuple(self._closed):
            if batch.writing == 0:
                return now_ns
            overdue_ns = batch.t_closed_ns + self._grace_ns
            if now_ns < overdue_ns:
                wake_ns = overdue_ns if wake_ns is None else min(wake_ns, overdue_ns)
                continue
            for place in batch.places:
                if place.state is PlaceState.WRITING:
                    self._void(place, "late", after)
            batch.writing = 0
            self._settle(batch, after)
            return now_ns
        return wake_ns

    def _worth_waiting(self, now_ns: int, deadline_ns: int) -> bool:
        """Whether some camera is likely to bring another frame by the deadline."""
        return any(mailbox.expects_before(now_ns, deadline_ns) for mailbox in self._mailboxes)


def fitting(limit: int, resident: Resident) -> int:
    """The most frames that a batch may have under `limit`: a size that the engine runs without padding, where there is
    one below it."""
    if limit >= resident.places:
        return resident.places
    return max((size for size in resident.sizes if size <= limit), default=limit)


class _Sign(Enum):
    """What a look at the desk found where it found no work."""

    AGAIN = auto()
    NOTHING = auto()
    END = auto()
