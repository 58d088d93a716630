"""Window reports as a device of N cameras writes them, no two alike."""

from __future__ import annotations

import random
from collections.abc import Callable

from edge_runtime.records.window import (
    BudgetWindow,
    CameraWindow,
    DecodeWindow,
    EnergyWindow,
    FrameCounts,
    GovernorWindow,
    Latency,
    ModelWindow,
    OperatingPointWindow,
    SourceCounts,
    ThermalWindow,
    WindowReport,
)

BUCKETS_MS = (5, 10, 20, 30, 40, 50, 75, 100, 150, 200, 300, 500, 1000, 2000, None)
ENGINE = "sha256:5d41402abc4b2a76b9719d911017c5925d41402abc4b2a76b9719d911017c592"


def window_maker(cameras: int, number: int) -> Callable[[int], bytes]:
    """What makes the `number`-th window of a device with that many cameras."""
    report = window(cameras, number)
    return lambda seq: report.model_copy(update={"seq": seq}).to_json()


def window(cameras: int, number: int) -> WindowReport:
    dice = random.Random(number)
    minute, second = divmod(number * 10, 60)
    t_utc = f"2026-03-01T{minute // 60 % 24:02d}:{minute % 60:02d}:{second:02d}.{dice.randrange(1000):03d}Z"
    names = [f"camera-{index}" for index in range(cameras)]
    return WindowReport(
        device="gate-07",
        boot="0f0c5b4e-3a52-4d4d-9f0e-8f5a3c1f7f11",
        session="9f86d081884c7d65",
        seq=0,
        uptime_s=round(number * 10 + dice.random(), 3),
        clock_synced=True,
        t_start_utc=t_utc,
        t_end_utc=t_utc,
        t_utc=t_utc,
        duration_s=round(10 + dice.random() / 100, 3),
        frames=_frames(dice, 150 * cameras),
        fps=round(14.5 * cameras + dice.random(), 3),
        latency_ms=_latency(dice),
        cameras=[
            CameraWindow(
                name=name,
                model="detector",
                state="up",
                reason=None,
                since_s=round(number * 10 + dice.random(), 3),
                frames=_frames(dice, 150),
                source=SourceCounts(
                    decoded=150 + dice.randrange(3), skipped_rate=0, skipped_codec=0, corrupt=0, pre_key=0, duplicate=0
                ),
                decode=DecodeWindow(cpu_s=round(dice.random(), 3), saved_cpu_s=0.0, opened=1, backend="av"),
                fps=round(14.5 + dice.random(), 3),
                latency_ms=_latency(dice),
            )
            for name in names
        ],
        models=[
            ModelWindow(
                name="detector",
                engine=ENGINE,
                variant="int8-416",
                backend="tensorrt",
                frames=_frames(dice, 150 * cameras),
                batch_mean=round(1 + dice.random(), 3),
                latency_ms=_latency(dice),
                inference_ms=_latency(dice),
            )
        ],
        energy=EnergyWindow(
            source="ina3221",
            rails=["VDD_IN"],
            joules=round(120 + dice.random(), 3),
            net_joules=round(70 + dice.random(), 3),
            mean_w=round(12 + dice.random(), 3),
            peak_w=round(13 + dice.random(), 3),
            samples=100,
            rate_hz=10.0,
            quantum_w=0.04,
            idle_w=4.74,
            mode="15W",
            reasons={},
        ),
        fps_per_watt=round(1.2 + dice.random() / 10, 3),
        fps_per_watt_reason=None,
        mixed=False,
        thermal=ThermalWindow(
            tj_c=round(61 + dice.random(), 2),
            zones={name: round(58 + 3 * dice.random(), 2) for name in ("cpu", "gpu", "soc0", "soc1", "tj")},
            throttling=False,
            source="sysfs",
            over_current={"oc1": 0, "oc2": 0, "oc3": 0},
            reasons={},
        ),
        operating_point=OperatingPointWindow(
            variants={"detector": "int8-416"}, fps=dict.fromkeys(names, 15.0), batch={"detector": 4}
        ),
        governor=GovernorWindow(state="holding", because="everything that is wanted fits into the budgets"),
        budget=BudgetWindow(power_w=15.0, temperature_c=85.0, latency_p99_ms=80.0, violated_s=0.0),
    )


def _frames(dice: random.Random, captured: int) -> FrameCounts:
    stale = dice.randrange(3)
    return FrameCounts(
        carried_in=1,
        captured=captured,
        completed=captured - stale,
        cached=0,
        stale=stale,
        dropped={},
        failed=0,
        in_flight=1,
    )


def _latency(dice: random.Random) -> Latency:
    return Latency(
        p50=round(30 + 5 * dice.random(), 3),
        p99=round(40 + 20 * dice.random(), 3),
        buckets=[(bound, dice.randrange(80) if bound in (20, 30, 40, 50) else 0) for bound in BUCKETS_MS],
    )
