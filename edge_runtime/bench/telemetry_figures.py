"""What reports cost: the start with a backlog, delays while it drains, bytes on disk and on the line."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from edge_runtime.app.identity import make_identity
from edge_runtime.app.messaging import Messaging
from edge_runtime.bench.telemetry_broker import HOST, BenchBroker, Line, Reader, wait_for
from edge_runtime.bench.telemetry_faults import DEVICE
from edge_runtime.clock import SystemClock
from edge_runtime.config import parse_config
from edge_runtime.mqtt.session import Incoming
from edge_runtime.records.window import WindowReport
from edge_runtime.telemetry.spool import TELEMETRY, Spool, SpoolOptions
from edge_runtime.telemetry.topics import Topics

WINDOWS_A_DAY = 8640
"""At the default `window_s`, 10 s."""
BEAT_S = 0.25
"""So often a window and an event are made while a backlog drains."""
CAP_MB = 8
"""The smallest `spool_mb`."""
OVERFLOW = 3
"""How often a file of the cap's size is filled."""
MOST_WINDOWS = 100_000
_FILL_PIECE = 2000
_COMMIT_ROWS = SpoolOptions().commit_rows
_UNCOMMITTED_S = SpoolOptions().commit_s + 0.1


@dataclass(frozen=True, slots=True)
class Backlog:
    """`start_s`: from the call until frames may flow. Delays from the moment a window or an event was made until a
    subscriber had it, p50 and p99; `live_lost`: windows of which no live copy came. `drained_hz`: stored windows that
    arrived a second."""

    rows: int
    start_s: float
    seconds: float
    live_ms: tuple[float, float] | None
    live_lost: int
    event_ms: tuple[float, float] | None
    drained_hz: float


@dataclass(frozen=True, slots=True)
class Wear:
    """Per window: bytes of its JSON, bytes that the thread "spool" wrote to the disk (None where the kernel does not
    count them), bytes sent to the broker; and what a day of windows of 10 s comes to, in MB of 10^6 bytes."""

    cameras: int
    broker: str
    windows: int
    payload_bytes: int
    written_bytes: int | None
    uplink_bytes: int | None

    @property
    def written_mb_a_day(self) -> float | None:
        return None if self.written_bytes is None else round(self.written_bytes * WINDOWS_A_DAY / 1e6, 1)


@dataclass(frozen=True, slots=True)
class Filled:
    """The largest that the spool's file, and its write-ahead log, were while `windows` were put: more than fit."""

    cap_bytes: int
    windows: int
    file_bytes: int
    log_bytes: int


@contextmanager
def messaging_at(store: Path, port: int, more: str = "", device: str = DEVICE) -> Iterator[Messaging]:
    """The daemon's side of the broker, started, without a daemon."""
    store.mkdir(parents=True, exist_ok=True)
    text = (
        f'[device]\nid = "{device}"\nstore = {json.dumps(str(store))}\n'
        '[[camera]]\nname = "camera"\nurl = "synthetic:"\n[[model]]\nname = "detector"\nbundle = "bundled:centernet"\n'
        f'[mqtt]\nhost = "{HOST}"\nport = {port}\n[telemetry]\n{more}'
    )
    messaging = Messaging(parse_config(text, "bench", store), make_identity(device), SystemClock())
    try:
        messaging.start(store)
        yield messaging
    finally:
        messaging.stop(lambda most: most)


def fill(store: Path, report: WindowReport, rows: int, progress: Callable[[int], None]) -> None:
    """Put so many windows into a spool, as a daemon whose broker is away does, but faster."""
    store.mkdir(parents=True, exist_ok=True)
    marker = 10**15
    head, _, tail = report.model_copy(update={"seq": marker}).to_json().partition(str(marker).encode())
    spool = Spool(store, make_identity(DEVICE), SystemClock())
    spool.start()
    try:
        topic = Topics(DEVICE).window
        for done in range(0, rows, _FILL_PIECE):
            for _ in range(min(_FILL_PIECE, rows - done)):
                spool.append(TELEMETRY, topic, lambda seq: b"%b%d%b" % (head, seq, tail))
            spool.flush(30.0)
            progress(done)
    finally:
        spool.close(30.0)


@dataclass(slots=True)
class _Arrivals:
    """When what arrived, monotonic s. Numbers are the windows' and events' own."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    live_s: dict[int, float] = field(default_factory=dict)
    event_s: dict[int, float] = field(default_factory=dict)
    windows: int = 0

    def take(self, incoming: Incoming) -> None:
        now_s = time.monotonic()
        kind = incoming.topic.rpartition("/")[2]
        with self.lock:
            if kind == "live":
                self.live_s.setdefault(round(json.loads(incoming.payload)["uptime_s"]), now_s)
            elif kind == "window":
                self.windows += 1
            elif (number := json.loads(incoming.payload)["data"].get("number")) is not None:
                self.event_s.setdefault(number, now_s)


def measure_backlog(
    folder: Path, report: WindowReport, *, rows: int, seconds: float, progress: Callable[[int], None] = lambda _: None
) -> Backlog:
    """Start with so many windows on disk, and make new ones while they drain at the default rate."""
    store = folder / "backlog"
    fill(store, report, rows, progress)
    arrivals = _Arrivals()
    made_s: dict[int, float] = {}
    with BenchBroker(folder) as broker, Reader(broker.port, DEVICE, arrivals.take):
        t_start_s = time.monotonic()
        with messaging_at(store, broker.port) as messaging:
            start_s = time.monotonic() - t_start_s
            wait_for(lambda: arrivals.windows > 0, 30.0)
            before, t_begun_s = arrivals.windows, time.monotonic()
            number = 0
            while (now_s := time.monotonic()) < t_begun_s + seconds:
                number += 1
                made_s[number] = now_s
                messaging.window(report.model_copy(update={"uptime_s": float(number)}), lambda _: None)
                if messaging.events is not None:
                    messaging.events.emit("camera", "one more", number=number)
                time.sleep(BEAT_S)
            drained_hz = (arrivals.windows - before) / (time.monotonic() - t_begun_s)
            wait_for(lambda: len(arrivals.live_s) == len(arrivals.event_s) == number, 5.0)
    return Backlog(
        rows,
        round(start_s, 3),
        seconds,
        _delays_ms(made_s, arrivals.live_s),
        len(made_s) - len(arrivals.live_s),
        _delays_ms(made_s, arrivals.event_s),
        round(drained_hz, 1),
    )


def _delays_ms(made_s: dict[int, float], came_s: dict[int, float]) -> tuple[float, float] | None:
    delays = [(came_s[number] - t_s) * 1e3 for number, t_s in made_s.items() if number in came_s]
    return (round(float(np.percentile(delays, 50)), 1), round(float(np.percentile(delays, 99)), 1)) if delays else None


def measure_wear(folder: Path, reports: Sequence[tuple[int, WindowReport]], *, windows: int) -> list[Wear]:
    """For reports of so many cameras each, with the broker there and away: all at once, a window at a time, with a
    commit between one and the next, as they are 10 s apart on a device."""
    with ExitStack() as stack:
        broker = stack.enter_context(BenchBroker(folder))
        runs = []
        for cameras, report in reports:
            for word in ("there", "away"):
                line = stack.enter_context(Line(broker.port))
                if word == "away":
                    line.set("refusing")
                before = _spool_threads()
                device = f"{DEVICE}-{cameras}-{word}"
                messaging = stack.enter_context(messaging_at(folder / device, line.port, device=device))
                (thread,) = _spool_threads() - before
                runs.append((cameras, word, report, line, messaging, thread))
        # the first windows write what a start writes
        marks: list[tuple[int | None, int]] = []
        for number in range(windows + 2):
            if number == 2:
                marks = [(_written_bytes(thread), line.bytes_up) for *_, line, _, thread in runs]
            for _, _, report, _, messaging, _ in runs:
                messaging.window(report, lambda _: None)
            time.sleep(_UNCOMMITTED_S)
        found = []
        for (cameras, word, report, line, _, thread), (written, sent) in zip(runs, marks, strict=True):
            now = _written_bytes(thread)
            found.append(
                Wear(
                    cameras,
                    word,
                    windows,
                    len(report.to_json()),
                    None if now is None or written is None else round((now - written) / windows),
                    round((line.bytes_up - sent) / windows) if word == "there" else None,
                )
            )
        return found


def _spool_threads() -> set[int]:
    return {thread.native_id for thread in threading.enumerate() if thread.name == "spool" and thread.native_id}


def _written_bytes(thread: int) -> int | None:
    """What a thread has passed to write(2) so far; None where the kernel does not count."""
    try:
        lines = Path(f"/proc/self/task/{thread}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), None)


def measure_cap(folder: Path, report: WindowReport, progress: Callable[[int], None] = lambda _: None) -> Filled:
    """Fill the smallest spool several times over, with the broker away, and look at its files all the while."""
    store = folder / "cap"
    file, log = store / "spool.sqlite", store / "spool.sqlite-wal"
    most = {file: 0, log: 0}
    number, last = 0, -1

    def note(report: WindowReport) -> None:
        nonlocal last
        last = round(report.uptime_s)

    def all_noted() -> bool:
        return last == number - 1

    with Line(1) as line:  # nobody listens on port 1
        line.set("refusing")
        with messaging_at(store, line.port, f"spool_mb = {CAP_MB}\n") as messaging:
            while not _overflown(messaging) and number < MOST_WINDOWS:
                for _ in range(_COMMIT_ROWS):
                    messaging.window(report.model_copy(update={"uptime_s": float(number)}), note)
                    number += 1
                progress(number)
                # more than can wait for a commit would be lost before it comes to the file
                wait_for(all_noted, 30.0)
                most = {path: max(size, _size_bytes(path)) for path, size in most.items()}
        most = {path: max(size, _size_bytes(path)) for path, size in most.items()}
    return Filled(CAP_MB << 20, number, most[file], most[log])


def _overflown(messaging: Messaging) -> bool:
    """Whether so much was dropped that the file has been filled several times."""
    spool = messaging.spool_now()
    return spool is not None and any(
        lane.dropped >= (OVERFLOW - 1) * lane.queued for lane in spool.lanes if lane.name == TELEMETRY and lane.queued
    )


def _size_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
