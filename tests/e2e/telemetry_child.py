"""The daemon's messaging in a process that is meant to be killed. Arguments: a configuration, the first and the last
number, windows a second, bytes of padding a window.

Every window says its own running number (`uptime_s`), and so does every fiftieth one's event (`data.number`). Standard
output: `put N T`, all numbers up to N were put before T (monotonic, s); `left ROWS DROPPED`, rows that the broker does
not have and rows that were evicted. Standard input's end means: stop cleanly.
"""

from __future__ import annotations

import base64
import random
import sys
import threading
import time
from functools import partial
from pathlib import Path

from edge_runtime.app import messaging
from edge_runtime.app.identity import make_identity
from edge_runtime.clock import SystemClock
from edge_runtime.config import load_config
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import Timing
from edge_runtime.records.window import FrameCounts, Latency, WindowReport

EVENT_EVERY = 50
_REPORT_S = 0.02


def window(seed: int, padding: int) -> WindowReport:
    """A report of no camera. The padding cannot be compressed by more than a quarter."""
    filler = base64.b64encode(random.Random(seed).randbytes(padding * 3 // 4)).decode()
    identity = make_identity("battery")
    return WindowReport(
        device=identity.device,
        boot=identity.boot,
        session=identity.session,
        seq=0,
        clock_synced=True,
        uptime_s=0.0,
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
        energy_reason=filler or "nothing measures it",
        fps_per_watt=None,
        fps_per_watt_reason=None,
        mixed=False,
        thermal=None,
        operating_point=None,
        governor=None,
        budget=None,
    )


def main() -> None:
    config = load_config(Path(sys.argv[1]))
    first, last, rate_hz, padding = int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    # the broker is away for moments here, not for hours
    timing = Timing(retry_first_s=0.1, retry_cap_s=0.5)
    vars(messaging)["MqttLink"] = partial(MqttLink, timing=timing)
    sender = messaging.Messaging(config, make_identity("battery"), SystemClock())
    config.device.store.mkdir(parents=True, exist_ok=True)
    sender.start(config.device.store)
    ending = threading.Event()

    def await_end() -> None:
        sys.stdin.read()
        ending.set()

    threading.Thread(target=await_end, daemon=True).start()

    def tell_left() -> None:
        lanes = spool.lanes if (spool := sender.spool_now()) is not None else []
        print("left", sum(lane.queued for lane in lanes), sum(lane.dropped for lane in lanes), flush=True)

    template = window(first, padding)
    assert sender.events is not None
    t_start_s = t_told_s = time.monotonic()
    for number in range(first, last + 1):
        sender.window(template.model_copy(update={"uptime_s": float(number)}), lambda _: None)
        if number % EVENT_EVERY == 0:
            sender.events.emit("camera", "one more", number=number)
        now_s = time.monotonic()
        if now_s - t_told_s >= _REPORT_S or number == last:
            print("put", number, now_s, flush=True)
            tell_left()
            t_told_s = now_s
        due_s = t_start_s + (number - first) / rate_hz
        if due_s > now_s:
            time.sleep(due_s - now_s)
    while not ending.wait(0.05):
        tell_left()
    sender.stop(lambda most: most)


if __name__ == "__main__":
    main()
