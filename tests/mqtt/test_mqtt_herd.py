"""O8: a fleet that loses its broker comes back spread out, nobody in the first instant. Whole links, one process."""

from __future__ import annotations

import bisect
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import Backoff, BrokerSettings, Presence, Timing
from tests.mosquitto import Mosquitto, wait_until

BINS = 10


@contextmanager
def fleet(broker: Mosquitto, count: int, timing: Timing) -> Iterator[list[MqttLink]]:
    links = [
        MqttLink(
            BrokerSettings(broker.host, broker.port, f"device-{number}", "5"),
            presence=Presence(f"edge/v1/device-{number}/presence", b"on", b"off"),
            timing=timing,
        )
        for number in range(count)
    ]
    for link in links:
        link.start()
    try:
        wait_until(lambda: all(link.status().connected for link in links), 60, "every client's first connect")
        yield links
    finally:
        closing = [threading.Thread(target=link.close, args=(5.0,)) for link in links]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def back_after_s(links: list[MqttLink], broker: Mosquitto, outage_s: float) -> tuple[list[float], float]:
    """When, after the broker was killed, each client was connected again; and when the broker was."""
    t_kill_ns = time.monotonic_ns()
    broker.kill()
    wait_until(lambda: time.monotonic_ns() - t_kill_ns >= outage_s * 1e9, outage_s + 10)
    broker.start()
    t_there_s = (time.monotonic_ns() - t_kill_ns) / 1e9
    wait_until(lambda: all(link.status().reconnects and link.status().connected for link in links), 90, "all are back")
    return sorted((link.status().since_ns - t_kill_ns) / 1e9 for link in links), t_there_s


def expected_s(timing: Timing, outage_s: float, clients: int = 20_000) -> list[float]:
    """The same by arithmetic: who finds nobody there waits again."""
    instants = []
    for _ in range(clients):
        backoff, t_s = Backoff(timing), 0.0
        while t_s <= outage_s:
            t_s += backoff.next_delay_s()
        instants.append(t_s)
    return sorted(instants)


def distance(seen: list[float], expected: list[float]) -> float:
    """Kolmogorov-Smirnov: the largest difference between the two distributions; 0.5 and more if all come at once."""
    return max(
        abs((place + 0.5) / len(seen) - bisect.bisect(expected, t_s) / len(expected)) for place, t_s in enumerate(seen)
    )


def histogram(seen: list[float], start_s: float, end_s: float) -> list[int]:
    width_s = (end_s - start_s) / BINS
    bins = [0] * (BINS + 1)
    for t_s in seen:
        bins[min(BINS, int((t_s - start_s) / width_s))] += 1
    return bins


@pytest.mark.parametrize(
    ("clients", "timing", "most_in_a_tenth", "allowed"),
    [
        (40, Timing(), 0.4, 0.35),
        # so long that what 900 threads need of a small machine does not blur it
        pytest.param(300, Timing(retry_first_s=5.0), 0.2, 0.3, marks=pytest.mark.full),
    ],
)
def test_o8_broker_that_restarts_at_once(
    tmp_path: Path, clients: int, timing: Timing, most_in_a_tenth: float, allowed: float
) -> None:
    """Everybody loses it in the same instant; the first retry is already spread over all of its time."""
    with Mosquitto(tmp_path) as broker, fleet(broker, clients, timing) as links:
        seen, there_s = back_after_s(links, broker, 0.0)
    expected = expected_s(timing, there_s)
    assert seen[0] >= timing.retry_first_s / 10, "in the first instant"
    bins = histogram(seen, 0.0, expected[int(len(expected) * 0.99)])
    assert max(bins) <= most_in_a_tenth * clients, bins
    assert distance(seen, expected) < allowed, bins


@pytest.mark.full
def test_o8_broker_that_is_away_for_a_while(tmp_path: Path) -> None:
    """300 clients as they are shipped, 5 s: by now each waits up to 8 s."""
    timing = Timing()
    with Mosquitto(tmp_path) as broker, fleet(broker, 300, timing) as links:
        seen, there_s = back_after_s(links, broker, 5.0)
    bins = histogram(seen, there_s, there_s + 8.0)
    assert sum(there_s <= t_s < there_s + 0.1 for t_s in seen) <= 0.05 * 300, "in the first instant"
    assert max(bins[:BINS]) <= 0.35 * 300, bins
    assert distance(seen, expected_s(timing, there_s)) < 0.25, bins
