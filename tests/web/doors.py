"""A daemon that is nothing but its answers, and clients that speak to the real server."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from edge_runtime.records.status import (
    BudgetNow,
    CameraNow,
    DecodeTotals,
    FrameTotals,
    GovernorNow,
    Health,
    LatencyTotals,
    ModelNow,
    MqttNow,
    PowerNow,
    SpoolLane,
    SpoolNow,
    StatusReport,
)
from edge_runtime.records.window import (
    CacheCounts,
    FrameCounts,
    Latency,
    OperatingPointWindow,
    SourceCounts,
    ThermalWindow,
    WindowReport,
)
from edge_runtime.web.door import BundleUpload, Entry, StoredBundle

THERMAL = ThermalWindow(
    tj_c=61.5, zones={"cpu": 55.0}, throttling=False, source="simulated", over_current={}, reasons={}
)
BUDGET = BudgetNow(
    power_w=15.0, temperature_c=None, latency_p99_ms=80.0, max_power_w=20.0, set_by="command", violated_s=2.5
)
NO_BUDGET = BudgetNow(
    power_w=None, temperature_c=None, latency_p99_ms=None, max_power_w=None, set_by="configuration", violated_s=0.0
)
TOKEN = "correct-horse-battery-staple"


def window(seq: int = 0) -> WindowReport:
    """A window of 10 s with 148 frames."""
    return WindowReport(
        device="gate-07",
        boot="boot",
        session="session",
        seq=seq,
        clock_synced=True,
        uptime_s=10.0 * (seq + 1),
        t_start_utc="2026-01-01T00:00:00.000Z",
        t_end_utc="2026-01-01T00:00:10.000Z",
        t_utc="2026-01-01T00:00:10.000Z",
        duration_s=10.0,
        frames=FrameCounts(
            carried_in=0, captured=148, completed=148, cached=0, stale=0, dropped={}, failed=0, in_flight=0
        ),
        fps=14.8,
        latency_ms=Latency(p50=31.0, p99=44.2, buckets=[(5.0, 0), (None, 148)]),
        cameras=[],
        models=[],
        energy=None,
        fps_per_watt=1.219,
        fps_per_watt_reason=None,
        mixed=False,
        thermal=None,
        operating_point=None,
        governor=None,
        budget=None,
    )


class FakeUpload:
    """What came, and how it ended: "" so far. `before_write` and `before_finish` may wait or raise."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended = ""
        self.threads: set[str] = set()
        self.before_write: Callable[[], object] = lambda: None
        self.before_finish: Callable[[], object] = lambda: None

    def write(self, chunk: bytes) -> None:
        self.threads.add(threading.current_thread().name)
        self.before_write()
        self.received += chunk

    def finish(self) -> StoredBundle:
        self.before_finish()
        self.ended = "kept"
        return StoredBundle("sha256:" + "0" * 64, "tiny", "1", ("fp32", "int8"), len(self.received), True)

    def abort(self) -> None:
        self.ended = self.ended or "aborted"


class FakeDoor:
    """`frames` completed so far. `before_snapshot`, `before_execute` and `before_upload` may wait or raise."""

    def __init__(self, store: Path = Path("/var/lib/edge-runtime")) -> None:
        self.store = store
        self.current = Health(state="ok", reasons=[])
        self.frames = 100
        self.count = 400
        self.executed: list[tuple[str, bytes, Entry]] = []
        self.before_health: Callable[[], object] = lambda: None
        self.before_snapshot: Callable[[], object] = lambda: None
        self.before_execute: Callable[[], object] = lambda: None
        self.before_upload: Callable[[FakeUpload], object] = lambda _: None
        self.uploads: list[FakeUpload] = []
        self.reason = 'no "picture"\\\n\x1b[31m'
        self.bare = False
        self.two_models = False
        self.result: object = None
        self.refusal: dict[str, object] | None = None

    def health(self) -> Health:
        self.before_health()
        return self.current

    def windows(self, last: int) -> Sequence[WindowReport]:
        return [window(seq) for seq in range(max(0, self.count - last), self.count)]

    def execute(self, name: str, body: bytes, door: Entry) -> tuple[int, bytes]:
        self.before_execute()
        self.executed.append((name, body, door))
        error = self.refusal
        answer = {"id": "1", "ok": error is None, "error": error, "result": self.result}
        return 200 if error is None else 400, json.dumps(answer).encode()

    def open_upload(self) -> BundleUpload:
        upload = FakeUpload()
        self.before_upload(upload)
        self.uploads.append(upload)
        return upload

    def snapshot(self) -> StatusReport:
        self.before_snapshot()
        up = CameraNow(
            name="gate",
            model="detector",
            state="up",
            reason=None,
            since_s=90.0,
            fps=14.8,
            frames=FrameTotals(captured=self.frames + 13, completed=self.frames, stale=7, dropped={"stopping": 2}),
            latency=LatencyTotals(buckets=[(5.0, 1), (10.0, self.frames - 3), (None, 2)], sum_ms=9.0 * self.frames),
            source="overlay",
            address="rtsp://***@10.0.0.9/main",
            cap_fps=15.0,
            delivered=SourceCounts(
                decoded=self.frames + 20, skipped_rate=7, skipped_codec=30, corrupt=1, pre_key=2, duplicate=0
            ),
            decode=DecodeTotals(cpu_s=4.5, saved_cpu_s=1.25, opened=3, backend="pyav"),
        )
        second = up.model_copy(update={"model": "other"})
        down = CameraNow(name="yard", model="detector", state="down", reason=self.reason, since_s=3700.0, fps=None)
        model = ModelNow(
            name="detector",
            engine="sha256:abc",
            variant="fp32-416",
            backend="onnxruntime",
            max_batch=1,
            lanes=2,
            cache=CacheCounts(lookups=30, hits=25, misses=5, bypassed=70),
        )
        other = model.model_copy(update={"name": "other", "engine": None, "cache": None})
        mqtt = MqttNow(
            connected=False,
            reason="refused",
            since_s=5.0,
            queued=3,
            dropped=1,
            results_dropped=4,
            refused=0,
            published=50,
        )
        spool = SpoolNow(where="disk", size_bytes=4096, lanes=[SpoolLane(name="event", queued=2, dropped=0)])
        return StatusReport(
            device="gate-07",
            boot="boot",
            session="session",
            version="9.9",
            pid=os.getpid(),
            store=str(self.store),
            t_utc="2026-01-01T00:00:00.000Z",
            clock_synced=True,
            uptime_s=812.5,
            health=self.current,
            cameras_removed=[] if self.bare else ["roof"],
            cameras=[] if self.bare else [up, *([second] if self.two_models else []), down],
            models=[] if self.bare else [model, other],
            power=None
            if self.bare
            else PowerNow(source="simulated", rails=["VDD_IN"], watts=12.5, joules_total=10150.0),
            power_reason="no sensor" if self.bare else None,
            thermal=None if self.bare else THERMAL,
            budget=NO_BUDGET if self.bare else BUDGET,
            governor=GovernorNow(state="off", because="no budget is set", changes=0, estimates={})
            if self.bare
            else GovernorNow(state="derating", because="15 W are taken", changes=5, estimates={}),
            operating_point=OperatingPointWindow(
                variants={"detector": "fp32-416"},
                fps={} if self.bare else {"gate": 7.5, "yard": None},
                batch={"detector": 1},
                limits={} if self.bare else {"gate": "power"},
            ),
            mqtt=None if self.bare else mqtt,
            spool=None if self.bare else spool,
            window=None if self.bare else window(),
            gpu_faults=0 if self.bare else 2,
        )


class Gate:
    """Holds whoever calls it until it is opened; tells how many wait."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self.waiting = 0

    def __call__(self) -> None:
        with self._lock:
            self.waiting += 1
        assert self._open.wait(30), "the gate was never opened"
        with self._lock:
            self.waiting -= 1

    def open(self) -> None:
        self._open.set()


class Answer:
    """An HTTP answer, read to its end."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = response.headers
        self.body = response.read()

    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


def dial(where: Path | tuple[str, int], timeout_s: float = 10.0) -> socket.socket:
    """A connection to the control socket or to TCP."""
    if isinstance(where, Path):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(str(where))
        except OSError:
            sock.close()
            raise
        return sock
    return socket.create_connection(where, timeout_s)


def ask(
    where: Path | tuple[str, int],
    target: str,
    method: str = "GET",
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request on a connection of its own."""
    host = "localhost" if isinstance(where, Path) else f"{where[0]}:{where[1]}"
    connection = http.client.HTTPConnection(host, timeout=10)
    connection.sock = dial(where)
    try:
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have answered before it had all of it
            connection.request(method, target, body, headers or {})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def say(where: Path | tuple[str, int], data: bytes) -> bytes:
    """Send bytes, and everything that comes back until the server closes."""
    with dial(where) as sock:
        sock.sendall(data)
        return read_all(sock)


def read_all(sock: socket.socket) -> bytes:
    """Until the other side closes or cuts the connection."""
    received = bytearray()
    try:
        while chunk := sock.recv(65536):
            received += chunk
    except ConnectionError:
        pass
    return bytes(received)


def open_fds() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))
