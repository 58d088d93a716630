"""`edge-runtime demo`: everything embedded, nothing to set up."""

from __future__ import annotations

import json
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np

from edge_runtime.app.budget import describe as describe_budget
from edge_runtime.app.daemon import Daemon, Observers
from edge_runtime.camera.media import probe
from edge_runtime.config import Config, parse_config
from edge_runtime.errors import CameraError, UsageError
from edge_runtime.records.frames import FrameResult
from edge_runtime.records.window import WindowReport
from edge_runtime.telemetry.topics import Topics
from edge_runtime.telemetry.windows import describe

DEFAULT_PORT = 1883
WINDOW_S = 2.0
DEVICE = "demo"
BUDGET_W = 5.0
"""A little less than what the bundled model takes on the bundled clip at the simulated module's highest clock."""
SURE = 0.4
"""The lines name what was found with at least this score."""

Say = Callable[[str], None]


def run_demo(*, seconds: float, port: int | None, clip: Path | None, bundle: Path | None, say: Say) -> int:
    """Run the bundled model over the bundled clip for `seconds`; `say` gets each line for the user.

    Returns the exit code. Raises UsageError or BundleError where `clip`, `bundle` or `port` cannot be used.
    """
    if clip is not None:
        try:
            probe(f"file:{clip.resolve()}")
        except CameraError as error:
            remedy = error.remedy or "give a video file or a folder of pictures"
            raise UsageError(error.message, code=error.code, where=str(clip), remedy=remedy) from error
    chosen = _choose_port(port, say)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-demo-") as store:
        config = _demo_config(Path(store), chosen, clip, bundle)
        tally = _Tally()
        daemon = Daemon(config, Observers(window=tally.window, result=tally.result))

        def end(_: int, __: FrameType | None) -> None:
            daemon.request_stop()

        before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            started = time.monotonic()
            daemon.start()
            _introduce(daemon, config, chosen, say)
            topics = Topics(DEVICE)
            link = daemon.messaging.link
            assert link is not None
            # the lines below have been to the broker and back: what a subscriber would see
            link.subscribe(
                topics.window,
                lambda message: say(_line(WindowReport.model_validate_json(message.payload), tally)),
            )
            daemon.wait(seconds - (time.monotonic() - started))
        finally:
            daemon.stop()
            for number, handler in before.items():
                signal.signal(number, handler)
    say("")
    for line in tally.table():
        say(line)
    return 0 if daemon.fatal is None else 1


def _choose_port(wanted: int | None, say: Say) -> int:
    """The port asked for, or the default one, or where that is taken a free one. Raises UsageError."""
    if wanted is not None:
        if not _is_free(wanted):
            raise UsageError(
                "something else listens on this port",
                code="mqtt_listen",
                where=f"127.0.0.1:{wanted}",
                remedy="leave --port out to get a free one",
            )
        return wanted
    if _is_free(DEFAULT_PORT):
        return DEFAULT_PORT
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
    say(f"Port {DEFAULT_PORT} is taken; the demo's broker uses {port}.")
    return port


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return True
    except OSError:
        return False


def _demo_config(store: Path, port: int, clip: Path | None, bundle: Path | None) -> Config:
    """The demo is an ordinary configuration, so that it shows what an ordinary one does."""
    url = "bundled:vtest" if clip is None else f"file:{clip.resolve()}"
    model = "bundled:centernet" if bundle is None else str(bundle.resolve())
    text = f"""
[device]
id = "{DEVICE}"
hardware = "sim:orin-nano-8gb"
store = {json.dumps(str(store))}
[[camera]]
name = "gate"
url = {json.dumps(url)}
[[model]]
name = "detector"
bundle = {json.dumps(model)}
variant = {json.dumps("fp32-416" if bundle is None else "auto")}
{'ladder = ["fp32-320"]' if bundle is None else ""}
[budget]
power_w = {BUDGET_W}
temperature_c = 85.0
latency_p99_ms = 80.0
[mqtt]
broker = "embedded"
port = {port}
results = true
[telemetry]
window_s = {WINDOW_S}
"""
    return parse_config(text, "demo", store)


def _introduce(daemon: Daemon, config: Config, port: int, say: Say) -> None:
    resident = daemon.pipeline.models[config.models[0].name].desk.resident()
    assert resident is not None
    variants = ", ".join(each.name for each in daemon.keeper.site_models()[0].variants)
    say(f"Model {config.models[0].bundle}: {variants} on {resident.info.backend}")
    say(f"Camera {config.cameras[0].source.shown}. Power is simulated: {config.device.hardware}.")
    say(f"Budget {describe_budget(daemon.budget.current())}: the governor begins with little and finds out what fits.")
    say(f"Reports are on MQTT at 127.0.0.1:{port}. In another terminal, try:")
    say(f"    mosquitto_sub -h 127.0.0.1 -p {port} -t 'edge/v1/{DEVICE}/#' -v")
    say(f"One line per window of {WINDOW_S:.0f} s, as it comes back from the broker:")


def _line(report: WindowReport, tally: _Tally) -> str:
    found = ", ".join(f"{count} {label}" for label, count in tally.newest.most_common(4))
    return f"{describe(report)}; sees {found or 'nothing'}"


class _Tally:
    """What the whole demo brought, summed over its windows."""

    def __init__(self) -> None:
        self.windows: list[WindowReport] = []
        self.latencies_ms: list[float] = []
        self.newest: Counter[str] = Counter()

    def window(self, report: WindowReport) -> None:
        self.windows.append(report)

    def result(self, result: FrameResult) -> None:
        self.latencies_ms.append((result.timings.t_result_ns - result.t_capture_ns) / 1e6)
        output = result.output
        sure = output.class_ids[output.scores >= SURE].tolist()
        self.newest = Counter(result.labels[class_id] for class_id in sure)

    def table(self) -> list[str]:
        """The table at the end."""
        frames = [window.frames for window in self.windows]
        dropped: Counter[str] = Counter()
        for counts in frames:
            dropped.update(counts.dropped)
        completed = sum(counts.completed for counts in frames)
        rows: list[tuple[str, str]] = [
            ("captured", str(sum(counts.captured for counts in frames))),
            ("completed", str(completed)),
            ("cached", str(sum(counts.cached for counts in frames))),
            ("stale", str(sum(counts.stale for counts in frames))),
            ("dropped", ", ".join(f"{count} {reason}" for reason, count in dropped.items()) or "0"),
            ("failed", str(sum(counts.failed for counts in frames))),
            ("in flight", str(frames[-1].in_flight if frames else 0)),
        ]
        duration_s = sum(window.duration_s for window in self.windows)
        rows.append(("FPS", f"{completed / duration_s:.2f}" if duration_s else "-"))
        if self.latencies_ms:
            p50, p99 = np.percentile(self.latencies_ms, (50, 99))
            rows.append(("latency p50 / p99", f"{p50:.1f} / {p99:.1f} ms"))
        measured = [window for window in self.windows if window.energy is not None]
        joules = sum(window.energy.joules for window in measured if window.energy is not None)
        if joules > 0:
            mean_w = joules / sum(window.duration_s for window in measured)
            rows.append(("power (simulated)", f"{mean_w:.2f} W"))
            frames_measured = sum(window.frames.completed for window in measured)
            rows.append(("FPS/W (simulated)", f"{frames_measured / joules:.2f}"))
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {value}" for name, value in rows]
