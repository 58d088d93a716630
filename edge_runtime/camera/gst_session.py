"""One GStreamer pipeline from open to end: encoded pictures watched, decoded ones copied out once.

Nothing is imported of GStreamer: `gstreamer`, its door, hands in what is used of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_runtime.camera.av_pixels import AvPixels
from edge_runtime.camera.gst_building import build
from edge_runtime.camera.gst_library import Library
from edge_runtime.camera.gst_pipelines import Plan, capture_ns, needed_size, raw_caps
from edge_runtime.camera.gst_pixels import PixelReader
from edge_runtime.camera.gst_reasons import hide, reason_of_all, tells_of_damage
from edge_runtime.camera.gst_units import Units
from edge_runtime.camera.nals import NalReader
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.session import STALLED, Intake, Picture
from edge_runtime.clock import Clock
from edge_runtime.errors import CameraError

log = logging.getLogger(__name__)

_SLICE_NS = 200_000_000
"""Longest wait for a picture before the bus and the time are looked at."""
_SHOW_NS = 500_000_000
"""A picture is handed on at least so often, whatever the cap: whoever reads must notice a stop."""
_CLOSE_S = 0.3
_WAITED_NS = 1_000_000
"""A picture that was waited for so long came just now."""


class GstSession:
    """A Session on a pipeline (see gst_pipelines). Raises CameraError where it cannot be opened within `open_s`.

    Stopping a pipeline takes as long as its driver likes, and rtspsrc ends no read in the middle of a packet: it is
    done on a thread of its own, which goes to `stopping` where that takes longer than 0.3 s.
    """

    def __init__(
        self,
        library: Library,
        plan: Plan,
        options: CameraOptions,
        intake: Intake,
        clock: Clock,
        stopping: list[threading.Thread],
    ) -> None:
        self._library = library
        self._plan = plan
        self._options = options
        self._intake = intake
        self._clock = clock
        self._stopping = stopping
        self.interval_ns: int | None = None
        self._reader = PixelReader(library)
        self._unit_caps: tuple[Any, tuple[int, int] | None, bool] | None = None
        self._units: Units | None = None
        self._units_sink: Any = None
        self._sink: Any = None
        self._gate: Any = None
        self._key_only = False
        self._asked: tuple[object, ...] | None = None
        self._cpu_ns = 0
        self._unit_cost_ns = 0.0
        self._late_ns = 0
        self._queue: Any = None
        self._fresh = False
        self._first: Any = None
        self._decoder: Any = None
        self._nals: NalReader | None = None
        self._thread_id = 0
        self._complaints: deque[int | None] = deque(maxlen=256)
        self._branch = ""
        self._failed = False
        self._pipeline = build(library, plan, options.ca_file)
        self._bus = self._pipeline.get_bus()
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        """Start, and wait until it is known what comes."""
        gst = self._library.Gst
        end_ns = time.monotonic_ns() + round(self._options.open_s * 1e9)
        if self._pipeline.set_state(gst.State.PLAYING) == gst.StateChangeReturn.FAILURE:
            self._check_bus()
            raise CameraError("GStreamer cannot start it", retryable=True)
        while not self._opened():
            self._check_bus()
            if self._ended():
                return
            if time.monotonic_ns() >= end_ns:
                raise CameraError(self._silent_reason(), retryable=True)

    def _opened(self) -> bool:
        """Whether the first unit or picture is here; waits for it a little."""
        pipeline = self._pipeline
        if self._sink is None:
            branch = self._linked()
            if branch is None:
                # Nothing to wait on: which branch the source links is told by nothing but a callback.
                time.sleep(0.01)
                return False
            self._rest_others(branch)
            prefix = f"{branch}_" if branch else ""
            self._sink = pipeline.get_by_name(f"{prefix}sink")
            self._units_sink = pipeline.get_by_name(f"{prefix}units")
            self._gate = pipeline.get_by_name(f"{prefix}gate")
            self._branch = branch
            if not branch:
                self._tame(self._sink)
            if self._units_sink is not None:
                self._units = Units(self._intake.ledger, intra_only=branch == "mjpeg")
                if branch != "mjpeg":
                    self._nals = NalReader("hevc" if branch == "h265" else branch, None)
                self._decoder = pipeline.get_by_name(f"{prefix}decoder")
                self._queue = pipeline.get_by_name(f"{self._plan.thread}{branch}")
                self._thread_id = _thread_id(f"{self._plan.thread}{branch}:src")
                # GLib's threads have had other work before.
                self._cpu_ns = _thread_cpu_ns(self._thread_id) or 0
                self._library.complaints.watch(self._thread_id, self._complained)
        if self._units_sink is None:
            self._first = self._sink.try_pull_sample(_SLICE_NS)
            if self._first is not None:
                self._declare(self._first.get_caps())
            return self._first is not None
        sample = self._units_sink.try_pull_sample(_SLICE_NS)
        if sample is None:
            return False
        self._declare(sample.get_caps())
        self._take_unit(sample, self._clock.monotonic_ns())
        return True

    def _rest_others(self, branch: str) -> None:
        """The other branches will never see data: their decoding threads are ended."""
        for other in self._plan.branches:
            queue = self._pipeline.get_by_name(f"{self._plan.thread}{other}")
            if other != branch and queue is not None:
                queue.set_locked_state(True)
                queue.set_state(self._library.Gst.State.NULL)

    def _tame(self, sink: Any) -> None:
        """An operator's own appsink: no clock, no signals, no queue without an end."""
        if sink is None:
            raise CameraError("its pipeline has no appsink named sink", code="gst_pipeline")
        sink.set_property("sync", False)
        sink.set_property("emit-signals", False)
        sink.set_property("enable-last-sample", False)
        if sink.get_property("max-buffers") == 0:
            sink.set_property("max-buffers", 2)
        if sink.get_property("caps") is None:
            sink.set_property("caps", self._library.Gst.Caps.from_string(raw_caps(self._plan.chain, None)))

    def _linked(self) -> str | None:
        for branch in self._plan.branches:
            first = self._pipeline.get_by_name(f"{branch}_in")
            if first is None or (pad := first.get_static_pad("sink")) is None or pad.is_linked():
                return branch
        return None

    def _silent_reason(self) -> str:
        source = self._pipeline.get_by_name("src")
        if self._sink is None and source is not None and self._plan.text.startswith("rtspsrc"):
            pads = [pad for pad in source.srcpads if pad.get_current_caps() is not None]
            if pads:
                return "its stream has no video in H.264, H.265 or MJPEG"
        if self._sink is None and not self._plan.live:
            return f"no video in H.264, H.265 or MJPEG was found in it within {self._options.open_s:g} s"
        return f"no answer within {self._options.open_s:g} s"

    def _declare(self, caps: Any) -> None:
        found, numerator, denominator = caps.get_structure(0).get_fraction("framerate")
        if found and denominator:
            self.interval_ns = nominal_interval_ns(numerator / denominator)

    def pictures(self) -> Iterator[Picture]:
        """Intact pictures in presentation order; the rest is counted. Raises CameraError."""
        skipped = 0
        if self._sink is None:
            return
        shown_ns = heard_ns = time.monotonic_ns()
        while True:
            asked_ns = time.monotonic_ns()
            sample = self._first or self._sink.try_pull_sample(_SLICE_NS)
            self._first = None
            now_ns = time.monotonic_ns()
            heard = self._take_units(sample is not None and now_ns - asked_ns > _WAITED_NS) or sample is not None
            if heard:
                heard_ns = now_ns
                self._intake.arrived()
            if sample is None:
                if self._ended():
                    return
                self._check_bus()
                if self._failed:
                    return
                self._check_silence(now_ns - heard_ns)
                continue
            self._watch_inputs()
            taken = self._intact(sample)
            if taken is None:
                continue
            pts_ns, t_packet_ns, size = taken
            if self._units is not None:
                skipped += self._units.take_skipped()
            early_ns, step_ns = self._intake.early(pts_ns, t_packet_ns, skipped)
            self._choose_gate(step_ns)
            if early_ns and now_ns - shown_ns < _SHOW_NS:
                # Its content is not even copied.
                skipped += 1
                self._intake.ledger.count(decoded=1, skipped_rate=1)
                continue
            yield Picture(self._pixels(sample, size), pts_ns, t_packet_ns, skipped)
            skipped = 0
            # Whoever reads may have slept or paused meanwhile: that was no silence of the source.
            shown_ns = heard_ns = time.monotonic_ns()

    def _ended(self) -> bool:
        if self._sink is None or not self._sink.get_property("eos"):
            return False
        if self._units is not None:
            self._units.end()
        return True

    def _check_silence(self, quiet_ns: int) -> None:
        if quiet_ns >= self._options.stall_s * 1e9:
            # What a depayloader or a parser drops is not seen here.
            reason = f"no data that makes a picture for {self._options.stall_s:g} s"
            raise CameraError(reason, code=STALLED, retryable=True)

    def _check_bus(self) -> None:
        """Raises CameraError for an error on the bus; that of a file ends it instead, as for damaged data."""
        gst = self._library.Gst
        errors = []
        while (message := self._bus.pop_filtered(gst.MessageType.ERROR)) is not None:
            error, debug = message.parse_error()
            errors.append((error.domain, error.code, error.message, debug or ""))
        if not errors:
            return
        self._clock.monotonic_ns()  # a sign of life, before a look at the network that may take as long as the wait did
        reason = reason_of_all(errors, self._options)
        text = hide(reason.text, self._plan.secrets)
        if not self._plan.live and self._sink is not None:
            log.warning("a file ends early: %s", text)
            self._intake.ledger.count(corrupt=1)
            self._failed = True
            return
        raise CameraError(text, code=reason.code, remedy=reason.remedy, retryable=True)

    # --- units

    def _take_units(self, waited: bool) -> bool:
        """Those that came since. `waited`: a picture was waited for, and is here now."""
        if self._units_sink is None:
            return False
        samples = []
        while (sample := self._units_sink.try_pull_sample(0)) is not None:
            samples.append(sample)
        now_ns = self._clock.monotonic_ns()
        self._fresh = waited and len(samples) == 1 and self._queue.get_property("current-level-buffers") == 0
        if self._fresh and self._plan.live:
            self._learn_lateness(samples[-1])
        for sample in samples:
            self._take_unit(sample, now_ns)
        return bool(samples)

    def _learn_lateness(self, sample: Any) -> None:
        """By how much the times of a unit that came just now, and was decoded at once, are behind.

        A jitter buffer derives them from the camera's: they are as many ms behind as the first packets were early.
        """
        clock, running_ns = self._pipeline.get_clock(), self._running_ns(sample)
        if clock is not None and running_ns is not None:
            age_ns = clock.get_time() - self._pipeline.get_base_time() - running_ns
            self._late_ns = age_ns - round(self._unit_cost_ns)

    def _take_unit(self, sample: Any, now_ns: int) -> None:
        gst, buffer = self._library.Gst, sample.get_buffer()
        assert self._units is not None
        flags = int(buffer.get_flags())
        gap = bool(flags & int(gst.BufferFlags.DISCONT))
        if self._nals is not None:
            with self._library.mapped(buffer) as data:
                gap = self._nals.look(data).gap or gap
        self._units.arrive(
            self._pts_ns(buffer),
            key=not flags & int(gst.BufferFlags.DELTA_UNIT),
            gap=gap,
            whole=not flags & int(gst.BufferFlags.CORRUPTED) and (self._branch != "mjpeg" or self._whole(buffer)),
            size=self._unit_size(sample.get_caps()),
            t_ns=self._capture_ns(sample, now_ns),
        )

    def _whole(self, buffer: Any) -> bool:
        """Whether a JPEG has its end: without, decoders make its lower part up. Encoders may pad behind the end."""
        size = buffer.get_size()
        return b"\xff\xd9" in bytes(buffer.extract_dup(max(0, size - 64), min(size, 64)))

    def _unit_size(self, caps: Any) -> tuple[int, int] | None:
        if self._unit_caps is None or not self._unit_caps[0].is_equal(caps):
            structure = caps.get_structure(0)
            (wide, width), (high, height) = structure.get_int("width"), structure.get_int("height")
            self._unit_caps = caps, (width, height) if wide and high else None, structure.has_field("colorimetry")
        return self._unit_caps[1]

    def _pts_ns(self, buffer: Any) -> int | None:
        pts: int = buffer.pts
        return None if pts == self._library.Gst.CLOCK_TIME_NONE else pts

    def _running_ns(self, sample: Any) -> int | None:
        """Time since the pipeline was started, by the segment that a buffer is in."""
        gst, pts_ns = self._library.Gst, self._pts_ns(sample.get_buffer())
        if pts_ns is None:
            return None
        running: int = sample.get_segment().to_running_time(gst.Format.TIME, pts_ns)
        return None if running == gst.CLOCK_TIME_NONE else running

    def _capture_ns(self, sample: Any, now_ns: int) -> int:
        if not self._plan.live or (clock := self._pipeline.get_clock()) is None:
            return now_ns
        base_ns = self._pipeline.get_base_time() + self._late_ns
        return capture_ns(now_ns, clock.get_time(), base_ns, self._running_ns(sample))

    def _choose_gate(self, step_ns: int) -> None:
        """Key frames alone, where the cap wants no more than they are."""
        if self._gate is None or self._units is None or self._branch == "mjpeg":
            return
        interval_ns = self._units.key_interval_ns
        limit_ns = min(step_ns * 51 // 50, self._options.stall_s * 1e9)
        key_only = interval_ns is not None and interval_ns <= limit_ns
        if key_only != self._key_only:
            flags = self._library.Gst.BufferFlags
            self._gate.set_property("drop-buffer-flags", flags.DELTA_UNIT if key_only else flags(0))
            self._units.gate(key_only)
            self._key_only = key_only

    # --- pictures

    def _intact(self, sample: Any) -> tuple[int | None, int, tuple[int, int] | None] | None:
        """(presentation time, time of arrival, the camera's size) of a picture that can be shown; counts others."""
        buffer = sample.get_buffer()
        pts_ns = self._pts_ns(buffer)
        flagged = bool(int(buffer.get_flags()) & self._library.bad_flags)
        if self._units is not None:
            self._account()
            while self._complaints:
                self._units.complain(self._complaints.popleft())
            good, unit = self._units.picture(pts_ns, flagged=flagged, newest=self._fresh)
            if not good:
                return None
            if unit is not None:
                return None if self._plan.untimed else pts_ns, unit.t_ns, unit.size
        elif flagged:
            self._intake.ledger.count(corrupt=1)
            return None
        return pts_ns, self._capture_ns(sample, self._clock.monotonic_ns()), None

    def _pixels(self, sample: Any, size: tuple[int, int] | None) -> AvPixels:
        own = (size or self._source_size()) if self._plan.scales else None
        labelled = self._unit_caps is None or self._unit_caps[2]
        return self._reader.read(sample, own, jpeg=self._branch == "mjpeg", labelled=labelled)

    def _source_size(self) -> tuple[int, int] | None:
        """The size (px) that goes into the converter."""
        converter = self._pipeline.get_by_name(f"{self._branch}_convert")
        caps = converter.get_static_pad("sink").get_current_caps() if converter is not None else None
        if caps is None:
            return None
        structure = caps.get_structure(0)
        return structure.get_int("width")[1], structure.get_int("height")[1]

    def _watch_inputs(self) -> None:
        """Ask the converter for what the models need, where it scales for nothing."""
        if not self._plan.scales:
            return
        size, inputs = self._source_size(), tuple(self._intake.inputs)
        if size is None or self._asked == (size, inputs):
            return
        self._asked = (size, inputs)
        caps = raw_caps(self._plan.chain, needed_size(*size, inputs))
        scale = self._pipeline.get_by_name(f"{self._branch}_scale")
        scale.set_property("caps", self._library.Gst.Caps.from_string(caps))

    # --- effort

    def _account(self) -> None:
        """CPU time of the thread that decodes, since the last picture."""
        assert self._units is not None
        cpu_ns = _thread_cpu_ns(self._thread_id)
        if cpu_ns is None:
            return
        spent_ns, self._cpu_ns = cpu_ns - self._cpu_ns, cpu_ns
        units, skipped = self._units.take_counts()
        if units and not self._key_only:
            cost_ns = spent_ns / units
            self._unit_cost_ns += (cost_ns - self._unit_cost_ns) * (0.05 if self._unit_cost_ns else 1.0)
        self._intake.ledger.spent(decode_cpu_ns=spent_ns, saved_cpu_ns=round(skipped * self._unit_cost_ns))

    def _complained(self, level: int, text: str) -> None:
        """On the decoder's thread: it makes up a part of the unit that it was given last."""
        error = level <= int(self._library.Gst.DebugLevel.ERROR)
        if tells_of_damage(text, error=error, intra_only=self._branch == "mjpeg"):
            decoder = self._decoder
            frames = decoder.get_frames() if decoder is not None else None
            self._complaints.append(frames[-1].pts if frames else None)

    def close(self) -> None:
        """Begin to stop the pipeline, and wait 0.3 s for it. Idempotent."""
        pipeline, self._pipeline = self._pipeline, None
        if pipeline is None:
            return
        self._sink = self._units_sink = self._gate = self._queue = self._decoder = self._first = None
        self._bus.set_flushing(True)
        self._bus = None
        self._library.complaints.watch(self._thread_id, None)
        null = self._library.Gst.State.NULL
        stopper = threading.Thread(target=lambda: pipeline.set_state(null), name="gst-close", daemon=True)
        stopper.start()
        stopper.join(_CLOSE_S)
        if stopper.is_alive():
            self._stopping.append(stopper)


def _thread_id(name: str) -> int:
    """The id of this process's thread of this (kernel's) name; 0 where there is none."""
    wanted = name.encode()[:15]
    for task in os.listdir("/proc/self/task"):  # noqa: PTH208
        with contextlib.suppress(OSError):
            if Path(f"/proc/self/task/{task}/comm").read_bytes().rstrip(b"\n") == wanted:
                return int(task)
    return 0


def _thread_cpu_ns(thread_id: int) -> int | None:
    """CPU time of this process's thread of this (kernel's) id; None where there is none."""
    try:
        # CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED of linux/posix-timers.h: what pthread_getcpuclockid(3) makes.
        return time.clock_gettime_ns((~thread_id << 3) | 6) if thread_id else None
    except OSError:
        return None
