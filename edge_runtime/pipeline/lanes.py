"""What a lane does. A CPU lane preprocesses, infers and postprocesses on its own thread: a hand-off between
Python threads costs about 25 us of CPU, and there is nothing to overlap with on the same core."""

from __future__ import annotations

import logging
import time

from edge_runtime.engine.protocol import Lane
from edge_runtime.errors import EdgeError
from edge_runtime.pipeline.batch import Batch, Place, PlaceState
from edge_runtime.pipeline.cache import AnswerCache
from edge_runtime.pipeline.desk import Desk
from edge_runtime.pipeline.ledger import Ledger
from edge_runtime.records.frames import Detections, FrameResult, Output, Timings, Transform

log = logging.getLogger(__name__)


class BusyClock:
    """How long lanes have been inferring, over all lanes of a model; ns, only ever grows.

    Runs under way count up to now, so that a reader at 10 Hz sees a steady load and not steps.
    """

    def __init__(self, lanes: int) -> None:
        # each lane writes only its own slots, whole: a reader sees one state or the next, without a lock
        self._runs: list[tuple[int, int]] = [(0, 0)] * lanes  # ns in all, start of the run under way or 0
        self._since_ns = [0] * lanes

    def grow(self, lanes: int) -> None:
        """Make room for so many lanes; what was counted stays."""
        missing = max(0, lanes - len(self._runs))
        self._runs += [(0, 0)] * missing
        self._since_ns += [0] * missing

    def start(self, lane: int, now_ns: int) -> None:
        self._runs[lane] = (self._runs[lane][0], now_ns)

    def stop(self, lane: int, now_ns: int) -> None:
        total_ns, started_ns = self._runs[lane]
        self._runs[lane] = (total_ns + now_ns - started_ns, 0)

    def total_ns(self, now_ns: int) -> int:
        total = 0
        for total_ns, started_ns in self._runs:
            total += total_ns + (max(0, now_ns - started_ns) if started_ns else 0)
        return total

    def occupied(self, lane: int, since_ns: int) -> None:
        """A lane has had something in hand since then (a picture, a run, a result); 0: it has nothing."""
        self._since_ns[lane] = since_ns

    def longest_ns(self, now_ns: int) -> int:
        """For how long the lane that is longest at one thing has been at it; 0 when none has anything in hand."""
        return max((now_ns - since_ns for since_ns in self._since_ns if since_ns), default=0)


class LaneLoop:
    """The loop of one CPU lane thread of a model."""

    def __init__(self, desk: Desk, ledger: Ledger, busy: BusyClock, cache: AnswerCache, index: int) -> None:
        self._desk = desk
        self._ledger = ledger
        self._busy = busy
        self._cache = cache
        self._index = index

    def run(self) -> None:
        """Work until the desk says it is time to end."""
        desk = self._desk
        batch: Batch | None = None
        while (work := desk.next_work(lane=self._index, finished=batch)) is not None:
            if isinstance(work, Place):
                self._busy.occupied(self._index, work.t_claim_ns)
                batch = write_place(desk, work, self._ledger, self._cache, take=True)
            else:
                batch = work
            if batch is not None:
                self._busy.occupied(self._index, time.monotonic_ns())
                lane = batch.resident.lanes[self._index]
                try:
                    run_batch(batch, lane, self._index, desk.model, self._ledger, self._busy)
                except BaseException:  # this thread ends, but credit and lease go back
                    desk.done(batch)
                    raise
            self._busy.occupied(self._index, 0)


def write_place(desk: Desk, place: Place, ledger: Ledger, cache: AnswerCache, *, take: bool = False) -> Batch | None:
    """Preprocess a claimed frame straight into its place, and see whether its answer is known already; the place
    always goes back to the desk.

    With `take`, returns the batch to run where this place was the last it waited for.
    """
    transform = answer = None
    frame = place.entry.frame
    batch = place.batch
    try:
        transform = None if batch.buffer.pictures is None else _take_whole(place, cache)
        if transform is None:
            transform = frame.pixels.write_into(batch.buffer.array[place.index], batch.resident.info.input)
            answer = _known_answer(desk.model, place, transform, ledger, cache)
    except Exception as error:  # noqa: BLE001  one camera's picture must not cost the model its lane
        _complain("camera %s, frame %d: preprocessing failed: %s", frame.camera, frame.frame_id, error)
    except BaseException:  # this thread ends, but its place goes back
        desk.written(place, None)
        raise
    return desk.written(place, transform, take=take, answer=answer)


def _take_whole(place: Place, cache: AnswerCache) -> Transform | None:
    """Let the GPU scale the frame's picture, where it does. A cache has to see what the model sees, before the run."""
    pictures = place.batch.buffer.pictures
    assert pictures is not None
    if not cache.is_on:
        return pictures.take(place.index, place.entry.frame.pixels)
    pictures.clear(place.index)
    return None


def _known_answer(
    model: str, place: Place, transform: Transform, ledger: Ledger, cache: AnswerCache
) -> FrameResult | None:
    """The result of a frame that need not be inferred; else the place gets a memo for the answer to come."""
    resident, entry = place.batch.resident, place.entry
    picture = place.batch.buffer.array[place.index]
    look = cache.look(entry.stream, entry.frame.t_capture_ns, picture, transform, resident)
    if look is None:
        return None
    ledger.looked_up(model, resident.info.digest, look.outcome)
    place.memo = look.memo
    if look.output is None:
        return None
    return _result(model, place, transform, look.output, Timings(place.t_claim_ns), cached=True)


def run_batch(batch: Batch, lane: Lane, index: int, model: str, ledger: Ledger, busy: BusyClock) -> None:
    """Run a closed batch on `lane`, and turn its outputs into results in capture order."""
    resident = batch.resident
    info = resident.info
    t_run_ns = time.monotonic_ns()
    busy.start(index, t_run_ns)
    resident.tally.began(index, t_run_ns)
    try:
        lane.submit(batch.buffer, batch.size)
        outputs = lane.collect()
    except Exception as error:  # noqa: BLE001  whatever it raises, these frames end here, the lane goes on
        _complain("model %s, engine %s: a batch of %d failed: %s", model, info.variant, len(batch.places), error)
        failed = [place for place in batch.places if place.state is PlaceState.READY]
        for place in failed:
            ledger.fail(place.entry, "engine")
            ledger.deliver(place.entry.stream)
        resident.tally.failed(index, len(failed))
        return
    finally:
        t_inferred_ns = time.monotonic_ns()
        busy.stop(index, t_inferred_ns)
        resident.tally.began(index, 0)
    ready = sum(place.state is PlaceState.READY for place in batch.places)
    ledger.ran(model, info.digest, ready, t_inferred_ns - t_run_ns)
    sick = misread = 0
    for place in batch.places:
        if place.state is not PlaceState.READY:
            continue
        entry = place.entry
        frame = entry.frame
        assert place.transform is not None
        try:
            output = resident.decoder(outputs, place.index, place.transform)
        except Exception as error:  # noqa: BLE001  as above
            _complain("camera %s, model %s: postprocessing failed: %s", frame.camera, model, error)
            ledger.fail(entry, "postprocess")
            misread += 1
        else:
            unusable = is_sick(output)
            sick += unusable
            timings = Timings(place.t_claim_ns, place.t_written_ns, t_run_ns, t_inferred_ns)
            resolved = ledger.resolve(entry, _result(model, place, place.transform, output, timings))
            if resolved and place.memo is not None and not unusable:
                place.memo.keep(output)
        ledger.deliver(entry.stream)
    resident.tally.ran(index, ready - misread, sick)
    if misread:
        resident.tally.failed(index, misread)


def _result(
    model: str, place: Place, transform: Transform, output: Output, timings: Timings, *, cached: bool = False
) -> FrameResult:
    frame, info = place.entry.frame, place.batch.resident.info
    return FrameResult(
        camera=frame.camera,
        model=model,
        frame_id=frame.frame_id,
        t_capture_ns=frame.t_capture_ns,
        width=transform.src_width,
        height=transform.src_height,
        engine=info.digest,
        variant=info.variant,
        labels=info.output.labels,
        output=output,
        timings=timings,
        cached=cached,
    )


def is_sick(output: Output) -> bool:
    """Whether a model said nothing that can be used: only invalid boxes, or classes that are no numbers."""
    if isinstance(output, Detections):
        return len(output) == 0 and output.invalid > 0
    return len(output) == 0


_last_complaint_ns: dict[tuple[str, object], int] = {}
_COMPLAINT_INTERVAL_NS = 5_000_000_000


def _complain(message: str, *args: object) -> None:
    """Log at most one of a kind per camera or model every five seconds: a failing camera must not fill the journal."""
    now_ns = time.monotonic_ns()
    kind = (message, args[0])
    if now_ns - _last_complaint_ns.get(kind, -_COMPLAINT_INTERVAL_NS) >= _COMPLAINT_INTERVAL_NS:
        _last_complaint_ns[kind] = now_ns
        cause = args[-1]
        log.warning(message, *args, exc_info=None if isinstance(cause, EdgeError) else True)
