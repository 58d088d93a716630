"""The pipeline of a device: cameras with a capture thread each, models with a desk and lanes each."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from edge_runtime.camera.protocol import Camera
from edge_runtime.engine.slot import EngineSlot, Resident
from edge_runtime.errors import EdgeError, EngineError
from edge_runtime.pipeline.cache import AnswerCache
from edge_runtime.pipeline.desk import Desk
from edge_runtime.pipeline.lanes import BusyClock, LaneLoop
from edge_runtime.pipeline.ledger import Ledger, Stream
from edge_runtime.pipeline.mailbox import Mailbox
from edge_runtime.records.activity import CacheMode, LedgerCut
from edge_runtime.records.cameras import REMOVED, CameraStatus, CameraView
from edge_runtime.records.frames import Frame, FrameResult
from edge_runtime.threads import ThreadGroup

log = logging.getLogger(__name__)

MODEL_DOWN_POLL_S = 0.5
LANE_END_S = 15.0
"""How long the run in hand of a lane that is to end may take."""

ResultSink = Callable[[FrameResult], None]


@dataclass(slots=True)
class ModelPipe:
    """A model at work. Its lane threads belong to it; contexts belong to its engine."""

    name: str
    desk: Desk
    busy: BusyClock
    timeout_ns: int
    cache: AnswerCache
    threads: dict[int, threading.Thread] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What a model has done since the start. `variant`: what new batches run on, None: down. `busy_ns`: inference, over
    its lanes, runs under way included; `batches` and `frames`: runs that ended, and frames in them."""

    variant: str | None
    busy_ns: int
    batches: int
    frames: int


_Target = tuple[Desk, Mailbox, Stream]


@dataclass(slots=True, eq=False)
class _Feed:
    """A camera at work, with the streams and mailboxes that its frames go to.

    `targets` is another tuple whenever its models change: a frame goes to those that were there when it came.
    `ended`: its capture thread brings nothing any more. `told`: its last counts were cut.
    """

    camera: Camera
    serial: int
    full_pace: bool = False
    priority: int = 0
    targets: tuple[_Target, ...] = ()
    thread: threading.Thread | None = None
    t_removed_ns: int = 0
    ended: bool = False
    told: bool = False

    def view(self) -> CameraView:
        status = self.camera.status()
        if self.t_removed_ns:
            status = CameraStatus("stopped", REMOVED, self.t_removed_ns)
        models = tuple(desk.model for desk, _, _ in self.targets)
        return CameraView(
            self.camera.name, models, status, self.camera.source(), self.camera.effort(), serial=self.serial
        )


class Pipeline:
    """Owns capture and lane threads. Add models, then cameras, then `start`; `stop` ends it for good.

    `on_result` gets every result, in capture order per (camera, model), on lane threads: it must be quick
    and must not block. `on_death(thread, error)` is told when one of its threads died.
    """

    def __init__(self, on_result: ResultSink, on_death: Callable[[str, BaseException], None] | None = None) -> None:
        self.ledger = Ledger()
        self._on_result = on_result
        self._models: dict[str, ModelPipe] = {}
        self._feeds: dict[str, _Feed] = {}
        self._removed: list[_Feed] = []
        self._serials = itertools.count(1)
        self._lock = threading.Lock()
        self._expecting = threading.Lock()  # else what a camera is told last might be what was found out first
        self._capture_threads = ThreadGroup(on_death)
        self._lane_threads = ThreadGroup(on_death)
        self._started = False
        self._stopped = False

    def add_model(
        self,
        name: str,
        resident: Resident | None,
        *,
        lanes: int,
        batch_timeout_s: float = 0.02,
        timeout_s: float = 10.0,
        down_reason: str | None = None,
        others: Sequence[Resident] = (),
        cache: CacheMode = "off",
        cache_max_age_s: float = 10.0,
    ) -> ModelPipe:
        """A model, up with `resident` (and `others` on its ladder) or down for `down_reason`.

        A frame without a result `timeout_s` after its capture is failed; a writer gets as long as that, too.
        `cache`: when an earlier answer is given again in place of a run, for `cache_max_age_s` at the most.
        """
        desk = Desk(
            name,
            EngineSlot(resident, down_reason, others),
            self.ledger,
            lanes=lanes,
            batch_timeout_s=batch_timeout_s,
            grace_s=min(1.0, timeout_s),
            exchanged=lambda: self._exchanged(name),
        )
        model = ModelPipe(name, desk, BusyClock(lanes), int(timeout_s * 1e9), AnswerCache(cache, cache_max_age_s))
        self._models[name] = model
        if self._started:
            self._start_lanes(model)
        return model

    def add_camera(self, camera: Camera, models: Sequence[str], *, full_pace: bool = False, priority: int = 0) -> None:
        """A camera whose frames go to every one of `models`. The pipeline reads and closes it, unless this raises:
        EdgeError (code "stopping") after `stop`, RuntimeError where no thread can be had."""
        feed = _Feed(camera, next(self._serials), full_pace, priority)
        with self._lock:
            if self._stopped:
                raise EdgeError("the daemon is stopping", code="stopping", where=camera.name, retryable=True)
            feed.targets = tuple(self._attach(feed, name) for name in models)
            self._feeds[camera.name] = feed
            if self._started:
                try:
                    self._start_capture(feed)
                except BaseException:
                    del self._feeds[camera.name]
                    self._detach(feed.targets)
                    raise
        self._expect(feed)

    def set_priority(self, name: str, priority: int) -> None:
        """See Desk.set_priority. Raises KeyError where there is no such camera."""
        with self._lock:
            feed = self._feeds[name]
            feed.priority = priority
            for desk, mailbox, _ in feed.targets:
                desk.set_priority(mailbox, priority)

    def set_models(self, name: str, models: Sequence[str]) -> None:
        """Let a camera's next frames go to `models`, while it runs on. What waits for one that no longer sees it is
        dropped as `removed`, what is claimed still finishes. Raises KeyError where there is no such camera or model.
        """
        with self._lock:
            feed = self._feeds[name]
            before = {desk.model: (desk, mailbox, stream) for desk, mailbox, stream in feed.targets}
            feed.targets = tuple(before.pop(each) if each in before else self._attach(feed, each) for each in models)
            if feed.ended:
                for desk, mailbox, _ in feed.targets:
                    desk.ended(mailbox)
            self._detach(before.values())
        self._expect(feed)

    def set_lanes(self, name: str, lanes: int, within_s: float = LANE_END_S) -> None:
        """Let a model work on so many lanes; see Desk.set_lanes for when. Fewer: they have ended when this returns.

        Raises EngineError, and leaves it as it was, where one that is to end does not come back `within_s`.
        """
        model = self._models[name]
        before = model.desk.lanes
        model.busy.grow(lanes)
        model.desk.set_lanes(lanes)
        end = time.monotonic() + within_s
        for index in range(lanes, before):
            thread = model.threads.get(index)
            if thread is None:
                continue
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                model.desk.set_lanes(before)
                self._start_lanes(model)
                raise EngineError(
                    f"lane {index} has a picture in hand and does not come back",
                    code="lane_busy",
                    where=name,
                    remedy="try again, or restart the daemon",
                    retryable=True,
                )
        if self._started:
            self._start_lanes(model)

    def remove_camera(self, name: str) -> None:
        """Stop a camera; what waits is dropped as `removed`, what is claimed still finishes.

        Its capture thread lets go of the source soon: see `await_removed`. Raises KeyError where there is none.
        """
        with self._lock:
            feed = self._feeds.pop(name)
            feed.t_removed_ns = time.monotonic_ns()
            self._removed.append(feed)
            self._detach(feed.targets)
        feed.camera.stop()
        if feed.thread is None:
            feed.camera.close()
            feed.ended = True

    def await_removed(self, within_s: float) -> list[str]:
        """Wait until cameras that were removed have let go of their sources, `within_s` after each was removed at the
        most: one that never does holds up nobody for ever. The names of those that have not."""
        with self._lock:
            going = [(feed, feed.thread) for feed in self._removed if feed.thread is not None]
        for feed, thread in going:
            thread.join(max(0.0, feed.t_removed_ns / 1e9 + within_s - time.monotonic()))
        return [feed.camera.name for feed, thread in going if thread.is_alive()]

    def _attach(self, feed: _Feed, model: str) -> _Target:
        desk = self._models[model].desk
        stream = self.ledger.open_stream(feed.camera.name, model, self._on_result, patient=feed.full_pace)
        return desk, desk.attach(stream, full_pace=feed.full_pace, priority=feed.priority), stream

    def _detach(self, targets: Iterable[_Target]) -> None:
        for desk, mailbox, stream in targets:
            desk.detach(mailbox)
            self.ledger.remove_stream(stream)
            self._models[desk.model].cache.forget(stream)

    def start(self) -> None:
        for model in self._models.values():
            self._start_lanes(model)
        with self._lock:
            self._started = True
            for feed in self._feeds.values():
                self._start_capture(feed)

    def stop(self, deadline_s: float = 3.0) -> list[str]:
        """Stop cameras, finish what is claimed, fail what does not come back. `close` comes after it.

        Returns the names of threads that did not end within `deadline_s`. A capture thread in a blocking
        read holds nothing and ends by its own time-out.
        """
        end = time.monotonic() + deadline_s
        with self._lock:
            if self._stopped:
                return []
            self._stopped = True
            feeds = list(self._feeds.values())
        for feed in feeds:
            feed.camera.stop()
        for model in self._models.values():
            model.desk.stop()
        stuck_lanes = self._lane_threads.join(max(0.0, end - time.monotonic()))
        stuck_captures = self._capture_threads.join(max(0.0, end - time.monotonic()))
        self.ledger.sweep(time.monotonic_ns() + 1, reason="stopping", final=True)
        return stuck_lanes + stuck_captures

    def close(self) -> None:
        """Close the engines, where no lane is stuck in one. After `stop`."""
        if not self._lane_threads.alive():
            for model in self._models.values():
                model.desk.exchange(None, "stopped")

    def camera(self, name: str) -> Camera | None:
        """The camera of that name, to pause, resume or cap; None where there is none."""
        with self._lock:
            feed = self._feeds.get(name)
        return None if feed is None else feed.camera

    # --- looking

    @property
    def models(self) -> dict[str, ModelPipe]:
        return self._models

    def cameras(self) -> list[CameraView]:
        """Every camera as it stands now."""
        with self._lock:
            feeds = list(self._feeds.values())
        return [feed.view() for feed in feeds]

    def cameras_of_cut(self) -> list[CameraView]:
        """Every camera of the last cut: first those that were removed and whose counts it ended, then all others.
        Several may have the same name."""
        with self._lock:
            feeds = [*self._removed, *self._feeds.values()]
        return [feed.view() for feed in feeds]

    def active(self) -> bool:
        """Whether any capture thread still runs: files that do not loop come to an end."""
        return bool(self._capture_threads.alive())

    def busy_ns(self) -> int:
        """Cumulative time that lanes spent inferring, over all models, ns."""
        now_ns = time.monotonic_ns()
        return sum(model.busy.total_ns(now_ns) for model in self._models.values())

    def work(self, name: str) -> Work:
        """What a model has done; the difference of two is what it did between them."""
        model = self._models[name]
        resident = model.desk.resident()
        busy_ns = model.busy.total_ns(time.monotonic_ns())
        return Work(None if resident is None else resident.info.variant, busy_ns, *self.ledger.ran_in_all(name))

    def lanes(self) -> int:
        return sum(model.desk.lanes for model in self._models.values())

    def sweep(self) -> int:
        """Fail the frames that are in flight past their model's time-out; how many."""
        now_ns = time.monotonic_ns()
        return sum(self.ledger.sweep(now_ns - model.timeout_ns, model.name) for model in self._models.values())

    def cut(self) -> LedgerCut:
        """See Ledger.cut. For one caller: a camera that was removed is forgotten after the cut with its last counts."""
        with self._lock:
            over = [feed for feed in self._removed if feed.told]
            self._removed = [feed for feed in self._removed if not feed.told]
            for feed in self._removed:
                feed.told = feed.ended
        for feed in over:
            for desk, _, stream in feed.targets:
                # again: a frame that was claimed when its camera was removed may have been remembered since
                self._models[desk.model].cache.forget(stream)
        return self.ledger.cut()

    # --- what cameras are told of models

    def _exchanged(self, model: str) -> None:
        """A model's ladder is another one."""
        with self._lock:
            feeds = [feed for feed in self._feeds.values() if any(desk.model == model for desk, _, _ in feed.targets)]
            if self._stopped:
                return
        for feed in feeds:
            self._expect(feed)

    def _expect(self, feed: _Feed) -> None:
        with self._expecting:
            inputs = {each.info.input: None for desk, _, _ in feed.targets for each in desk.ladder()}
            feed.camera.expect(tuple(inputs))

    # --- threads

    def _start_lanes(self, model: ModelPipe) -> None:
        for index in range(model.desk.lanes):
            if index not in model.threads or not model.threads[index].is_alive():
                loop = LaneLoop(model.desk, self.ledger, model.busy, model.cache, index)
                model.threads[index] = self._lane_threads.spawn(f"lane-{model.name}-{index}", loop.run)

    def _start_capture(self, feed: _Feed) -> None:
        feed.thread = self._capture_threads.spawn(f"cam-{feed.camera.name}", lambda: self._capture(feed))

    @staticmethod
    def _await_a_model(feed: _Feed) -> None:
        """With every model down there is nothing to decode for."""
        while not any(desk.usable(mailbox, MODEL_DOWN_POLL_S) for desk, mailbox, _ in feed.targets):
            pass

    def _capture(self, feed: _Feed) -> None:
        camera = feed.camera
        try:
            self._await_a_model(feed)
            while (frame := camera.read()) is not None:
                self._hand_over(feed, frame)
                # Its pixels are not to outlive their use: the next ones are decoded meanwhile.
                del frame
        finally:
            with self._lock:
                feed.ended = True
                for desk, mailbox, _ in feed.targets:
                    desk.ended(mailbox)
            camera.close()

    def _hand_over(self, feed: _Feed, frame: Frame) -> None:
        if feed.full_pace:
            # a file waits for a model that pauses: nothing of it is lost, and nothing decoded for nobody
            self._await_a_model(feed)
        targets = feed.targets
        for desk, mailbox, _ in targets:
            desk.wait_for_room(mailbox)
        entries = [self.ledger.captured(stream, frame) for _, _, stream in targets]
        for (desk, mailbox, _), entry in zip(targets, entries, strict=True):
            desk.put(mailbox, entry)
