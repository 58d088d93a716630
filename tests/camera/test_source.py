"""The reading loop: under a cap it waits, loses nothing, and wakes at once; live, it knows whether its source lives."""

from __future__ import annotations

import logging
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

import pytest

from edge_runtime.backoff import Backoff
from edge_runtime.camera.ledger import Ledger, StateLog
from edge_runtime.camera.liveness import Liveness
from edge_runtime.camera.pacing import NEVER_NS
from edge_runtime.camera.session import REFUSED, STALLED, Intake, Picture, Session
from edge_runtime.camera.source import REFUSED_S, SourceCamera
from edge_runtime.camera.synthetic import SyntheticCamera, SyntheticPixels, read_number
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Frame
from tests.awaiting import wait_until

SOON_S = 0.5


def camera(frames: int = 1000) -> SyntheticCamera:
    return SyntheticCamera(name="c", url=f"synthetic:?width=64&height=32&frames={frames}", pace="max")


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_cap_at_full_pace_makes_it_wait_and_loses_no_picture() -> None:
    capped = camera(frames=12)
    capped.set_cap(50)
    start = time.monotonic()
    frames = list(iter(capped.read, None))
    assert time.monotonic() - start >= 11 / 50
    assert [read_number(frame.pixels.to_rgb()) for frame in frames] == list(range(12))
    source = capped.source()
    assert (source.decoded, source.skipped_rate) == (12, 0)
    # its capture is when it was read, not when its turn was
    gaps = [b.t_capture_ns - a.t_capture_ns for a, b in pairwise(frames)]
    assert min(gaps) > 0.25e9 / 50


def test_a_cap_that_is_lifted_leaves_it_as_fast_as_it_was() -> None:
    capped = camera(frames=200)
    capped.set_cap(1)
    assert capped.read() is not None
    capped.set_cap(None)
    start = time.monotonic()
    assert len(list(iter(capped.read, None))) == 199
    assert time.monotonic() - start < 5


def waiting(capped: SyntheticCamera, pool: ThreadPoolExecutor, cap: float) -> Callable[[], Frame | None]:
    """Reads its second frame, which is not due for a long time; returns how to wait for it."""
    capped.set_cap(cap)
    if cap:
        assert capped.read() is not None
    future = pool.submit(capped.read)
    return lambda: future.result(SOON_S + 5)


@pytest.mark.parametrize("cap", [0.01, 0.0])
def test_a_changed_cap_wakes_it(pool: ThreadPoolExecutor, cap: float) -> None:
    capped = camera()
    result = waiting(capped, pool, cap)
    start = time.monotonic()
    capped.set_cap(None)
    assert result() is not None
    assert time.monotonic() - start < SOON_S


def test_a_stop_wakes_it(pool: ThreadPoolExecutor) -> None:
    capped = camera()
    result = waiting(capped, pool, 0.01)
    start = time.monotonic()
    capped.stop()
    assert result() is None
    assert time.monotonic() - start < SOON_S


def test_a_pause_wakes_it_and_the_picture_comes_after_it(pool: ThreadPoolExecutor) -> None:
    capped = camera()
    result = waiting(capped, pool, 0.01)
    capped.pause()
    wait_until(lambda: capped.status().state == "paused", SOON_S, "the pause")
    capped.set_cap(None)
    assert capped.status().state == "paused"
    capped.resume()
    frame = result()
    assert frame is not None
    assert read_number(frame.pixels.to_rgb()) == 1


def test_a_cap_below_the_configured_rate_skips_where_it_is_paced() -> None:
    paced = SyntheticCamera(name="c", url="synthetic:?width=64&height=32&fps=200&frames=60", fps=100)
    paced.set_cap(150)
    given = sum(1 for _ in iter(paced.read, None))
    assert abs(given - 30) <= 1
    assert paced.source().skipped_rate == 60 - given
    held = SyntheticCamera(name="c", url="synthetic:?width=64&height=32&fps=200&frames=60", fps=100)
    held.set_cap(20)
    assert abs(sum(1 for _ in iter(held.read, None)) - 6) <= 1


# --- live sources that do not do as they should


class Script:
    """Sessions that do what `play` says, and a count of how often one was opened."""

    def __init__(self, play: Callable[[Intake, int], Iterator[Picture]]) -> None:
        self._play = play
        self.opened = 0
        self.closed = 0
        self.interval_ns: int | None = None
        self._intake: Intake | None = None

    def __call__(self, intake: Intake) -> Script:
        self.opened += 1
        self._intake = intake
        return self

    def pictures(self) -> Iterator[Picture]:
        assert self._intake is not None
        return self._play(self._intake, self.opened)

    def close(self) -> None:
        self.closed += 1


def live(script: Callable[[Intake], Session], **options: Any) -> SourceCamera:
    return SourceCamera("gate", script, live=True, **{"backoff": Backoff(base_s=0.01, limit_s=0.01), **options})


@pytest.fixture
def reading(pool: ThreadPoolExecutor) -> Iterator[Callable[[SourceCamera], SourceCamera]]:
    cameras: list[SourceCamera] = []

    def read(camera: SourceCamera) -> SourceCamera:
        cameras.append(camera)

        def work() -> None:
            while camera.read() is not None:
                pass
            camera.close()

        pool.submit(work)
        return camera

    yield read
    for camera in cameras:
        camera.stop()


Read = Callable[[SourceCamera], SourceCamera]


def picture() -> Picture:
    return Picture(SyntheticPixels(0, 64, 32), None, time.monotonic_ns())


def failing(code: str | None = None) -> Callable[[Intake, int], Iterator[Picture]]:
    def play(_intake: Intake, opened: int) -> Iterator[Picture]:
        if opened:
            raise CameraError("it is broken", code=code, retryable=True)
        yield picture()

    return play


@pytest.mark.parametrize("end", ["stop", "pause"])
def test_a_back_off_ends_at_once(reading: Read, end: str) -> None:
    camera = reading(live(Script(failing()), backoff=Backoff(base_s=60, limit_s=60, jitter=False)))
    wait_until(lambda: camera.status().reason == "it is broken")
    start = time.monotonic()
    getattr(camera, end)()
    wait_until(lambda: camera.status().state == {"stop": "stopped", "pause": "paused"}[end], SOON_S)
    assert time.monotonic() - start < SOON_S


def test_a_changed_cap_does_not_end_a_back_off(reading: Read) -> None:
    script = Script(failing())
    camera = reading(live(script, backoff=Backoff(base_s=60, limit_s=60, jitter=False)))
    wait_until(lambda: camera.status().state == "down")
    for fps in range(20):
        camera.set_cap(fps)
        time.sleep(0.005)
    assert script.opened == 1


def test_after_a_refused_password_it_waits_longer(reading: Read) -> None:
    script = Script(failing(REFUSED))
    camera = reading(live(script, refused_s=0.3))
    wait_until(lambda: script.opened == 2)
    start = time.monotonic()
    wait_until(lambda: script.opened == 4)
    assert time.monotonic() - start >= 0.5  # two waits of 0.3 s, the first of which had begun
    assert camera.status().state == "down"
    patient = Script(failing(REFUSED))
    reading(live(patient))
    wait_until(lambda: patient.opened == 1)
    time.sleep(0.3)
    assert patient.opened == 1
    assert REFUSED_S >= 30


@pytest.mark.parametrize("cap", [0, 0.001])
def test_a_cap_does_not_keep_it_from_being_up_after_a_fault_or_a_pause(reading: Read, cap: float) -> None:
    """What is not wanted shows as well that the source is there."""
    goes_on = threading.Event()

    def play(intake: Intake, opened: int) -> Iterator[Picture]:
        while opened != 1 or not goes_on.is_set():
            intake.arrived()
            early_ns, _ = intake.early(None, time.monotonic_ns())
            if early_ns:
                intake.ledger.count(skipped_codec=1)
            else:
                yield picture()
            time.sleep(0.005)

    script = Script(play)
    camera = reading(live(script))
    wait_until(lambda: camera.status().state == "up")
    camera.set_cap(cap)
    goes_on.set()
    wait_until(lambda: script.opened == 2 and camera.status().state == "up", 2, "it")
    camera.pause()
    wait_until(lambda: camera.status().state == "paused")
    camera.resume()
    wait_until(lambda: script.opened == 3 and camera.status().state == "up", 2, "it")
    decoded, skipped = camera.source().decoded, camera.source().skipped_codec
    wait_until(lambda: camera.source().skipped_codec > skipped + 10)
    assert camera.source().decoded == decoded
    assert camera.source().skipped_rate == 2


def test_a_surprise_is_told_once_not_at_every_try(reading: Read, caplog: pytest.LogCaptureFixture) -> None:
    def play(intake: Intake, opened: int) -> Iterator[Picture]:
        if opened:
            raise RuntimeError(f"never thought of: try {opened} of rtsp://op:s3'cret@cam/1")
        yield picture()

    script = Script(play)
    camera = reading(live(script))
    wait_until(lambda: script.opened >= 20)
    assert camera.status().state == "down"
    told = [record.getMessage() for record in caplog.records if "Traceback" in record.getMessage()]
    assert len(told) == 1
    assert "never thought of" in told[0]
    assert "cret" not in caplog.text


def test_a_picture_that_is_not_wanted_is_freed_before_the_next_is_decoded(reading: Read) -> None:
    class Pixels(SyntheticPixels):
        """With a weak reference."""

    held: list[int] = []
    camera: SourceCamera | None = None

    def play(_intake: Intake, _opened: int) -> Iterator[Picture]:
        last: weakref.ref[Pixels] | None = None
        while True:
            held.append(last is not None and last() is not None)
            pixels = Pixels(0, 64, 32)
            last = weakref.ref(pixels)
            coming = Picture(pixels, None, time.monotonic_ns())
            del pixels
            yield coming
            del coming
            time.sleep(0.001)

    camera = reading(live(Script(play), fps=1))
    wait_until(lambda: camera.source().skipped_rate > 20)
    assert not any(held)


def test_an_open_and_a_read_that_do_not_come_back_are_told_of(reading: Read) -> None:
    """A resolver without an answer, a driver that is wedged: whatever the library promised about time-outs."""
    opens, reads = threading.Event(), threading.Event()
    reads.set()

    def play(intake: Intake, _opened: int) -> Iterator[Picture]:
        while reads.wait(10):
            intake.arrived()
            yield picture()
            time.sleep(0.01)

    script = Script(play)

    def opener(intake: Intake) -> Session:
        opens.wait(10)
        return script(intake)

    camera = reading(live(opener, open_s=0.2, stall_s=0.3))
    wait_until(lambda: camera.status().state == "down", 0.2 + SOON_S)
    assert camera.status().reason == "no answer within 0.2 s"
    opens.set()
    wait_until(lambda: camera.status().state == "up")
    reads.clear()
    wait_until(lambda: camera.status().state == "stalled", 0.3 + SOON_S)
    status = camera.status()
    assert status.reason == "no data for 0.3 s"
    assert camera.status().since_ns == status.since_ns <= time.monotonic_ns()
    reads.set()
    wait_until(lambda: camera.status().state == "up")


def test_packets_without_pictures_do_not_keep_it_from_stopping_or_pausing(reading: Read) -> None:
    def play(intake: Intake, opened: int) -> Iterator[Picture]:
        while opened:
            intake.ledger.count(corrupt=1)
            intake.arrived()
            time.sleep(0.005)
        yield picture()

    script = Script(play)
    camera = reading(live(script, stall_s=60))
    wait_until(lambda: camera.status().reason == "connected, no picture yet" or camera.source().corrupt > 5)
    camera.pause()
    wait_until(lambda: camera.status().state == "paused" and script.closed == 1, SOON_S)
    camera.resume()
    wait_until(lambda: script.opened == 2, SOON_S)
    camera.stop()
    wait_until(lambda: camera.status().state == "stopped" and script.closed == 2, SOON_S)


class Stopwatch:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)

    def utc(self) -> datetime:
        return datetime.now(timezone.utc)


class Watched:
    """A Liveness with `stall_s` of 1 s, and its clock: 10 packets a second come."""

    def __init__(self, stall_s: float = 1.0) -> None:
        self.clock = Stopwatch()
        self.ledger = Ledger(self.clock)
        self.liveness = Liveness(self.ledger, StateLog("gate", self.clock), 2.0, stall_s, self.clock)
        self.liveness.opening()
        self.liveness.opened()
        self.liveness.asked()

    def picture(self) -> None:
        self.ledger.deliver()
        self.liveness.answered(True)
        self.liveness.asked()

    def packets(self, seconds: float, step_s: float = 0.0, **counted: int) -> tuple[str, str | None, float | None]:
        """(state and reason at the end, and after how long it was given up)."""
        for number in range(round(seconds * 10)):
            self.clock.now_s += 0.1
            try:
                self.liveness.arrived(round(step_s * 1e9))
            except CameraError as error:
                return ("given up" if error.code == STALLED else error.code), error.message, number / 10
            self.ledger.count(**counted)
        status = self.liveness.status()
        return status.state, status.reason, None


def test_a_source_that_waits_for_its_first_key_frame_is_starting_for_half_a_minute() -> None:
    watched = Watched()
    assert watched.packets(29, pre_key=1) == ("starting", "connected, waits for its first key frame", None)
    state, reason, _ = watched.packets(5, pre_key=1)
    assert state == "given up"
    assert reason == (
        "data comes, but for 30.1 s no picture in it could be decoded: 302 packets, 0 corrupt, 301 before a key frame"
    )
    slow = Watched(stall_s=10.0)
    assert slow.packets(39, pre_key=1)[0] == "starting"
    assert slow.packets(3, pre_key=1)[0] == "given up"


@pytest.mark.parametrize("first", [True, False])
def test_data_without_an_intact_picture_is_a_stall_and_given_up_after_four(first: bool) -> None:
    watched = Watched()
    if not first:
        watched.picture()
    assert watched.packets(0.9, corrupt=1)[0] != "stalled"
    state, reason, _ = watched.packets(0.5, corrupt=1)
    assert state == "stalled"
    assert reason is not None
    assert re.search(r"for 1 s no picture in it could be decoded: 1\d packets, 1\d corrupt, 0 before", reason)
    assert watched.packets(2.0, corrupt=1)[:2] == (state, reason), "no running numbers"
    state, _, after_s = watched.packets(5.0, corrupt=1)
    assert state == "given up"
    assert after_s == pytest.approx(0.7, abs=0.3)


def test_a_picture_ends_a_stall_and_its_count() -> None:
    watched = Watched()
    assert watched.packets(2, corrupt=1)[0] == "stalled"
    watched.picture()
    assert watched.packets(0.9, corrupt=1)[0] == "up"
    for _ in range(40):
        watched.picture()
        assert watched.packets(0.5, corrupt=1)[0] == "up"


def test_a_cap_that_lets_nothing_be_decoded_is_no_stall() -> None:
    watched = Watched()
    watched.picture()
    assert watched.packets(3600, step_s=NEVER_NS / 1e9, skipped_codec=1) == ("up", None, None)
    # a picture every 5 s is wanted, and one of those was damaged
    watched.ledger.count(corrupt=1)
    assert watched.packets(8, step_s=5.0, skipped_codec=1) == ("up", None, None)


def test_a_silence_before_data_is_not_counted_as_data_without_pictures() -> None:
    watched = Watched()
    watched.picture()
    watched.clock.now_s += 0.95
    assert watched.packets(0.9) == ("up", None, None)
    assert watched.packets(0.3)[0] == "stalled"  # nothing is skipped, nothing is wrong, nothing comes out


def test_the_log_tells_of_changes_not_of_tries(caplog: pytest.LogCaptureFixture) -> None:
    clock = Stopwatch()
    told = StateLog("gate", clock)
    with caplog.at_level(logging.INFO):
        for _ in range(1000):
            clock.now_s += 30
            told.tell("down", "Connection refused")
        told.tell("up", "640 x 480 px")
        assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
        caplog.clear()
        for _ in range(1800):  # up and down twice a second for half an hour
            clock.now_s += 0.5
            told.tell("down", "closed")
            clock.now_s += 0.5
            told.tell("up", "640 x 480 px")
        assert 35 <= len(caplog.records) <= 41
        assert re.search(r"\d\d changes before this were not logged", caplog.text)


def test_a_camera_that_keeps_failing_logs_one_line(reading: Read, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(failing())
    with caplog.at_level(logging.DEBUG):
        camera = reading(live(script))
        wait_until(lambda: script.opened >= 30)
        camera.stop()
        wait_until(lambda: camera.status().state == "stopped")
    assert [record.getMessage() for record in caplog.records] == ["camera gate: down: it is broken"]


class _Sour:
    """Gives one picture, then fails; closing it fails, too."""

    interval_ns = None

    def pictures(self) -> Iterator[Picture]:
        yield Picture(SyntheticPixels(0, 64, 32), 0, time.monotonic_ns())
        raise CameraError("lost at rtsp://op:s3cret@host/1", retryable=True)

    def close(self) -> None:
        raise OSError("cannot close rtsp://op:s3cret@host/1")


def test_a_source_that_cannot_be_closed_is_opened_again_and_told_without_its_password(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sour = SourceCamera("c", lambda _: _Sour(), live=True, backoff=Backoff(base_s=0.01, limit_s=0.01))
    assert [sour.read() is not None for _ in range(3)] == [True] * 3
    sour.stop()
    sour.close()
    assert sour.status().state == "stopped"
    assert "cannot be closed" in caplog.text
    assert "s3cret" not in caplog.text


def test_one_that_was_removed_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    """Its successor may have its name."""
    opening, go_on = threading.Event(), threading.Event()

    def opener(_: Intake) -> Session:
        opening.set()
        assert go_on.wait(5)
        raise CameraError("no answer", retryable=True)

    removed = SourceCamera("c", opener, live=True)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(removed.read)
        assert opening.wait(5)
        removed.stop()
        go_on.set()
        assert reading.result(5) is None
    removed.close()
    assert "no answer" not in caplog.text
