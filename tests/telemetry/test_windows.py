"""Window reports: their fields, their identity, what they say when there is no sensor, and the loop that cuts them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from edge_runtime.records.activity import CacheCounters, Counters, EngineCounters, LedgerCut, Samples, StreamCut
from edge_runtime.records.cameras import REMOVED, CameraEffort, CameraStatus, CameraView, SourceCounters
from edge_runtime.records.governing import Budget, Decision, Operating, OperatingPoint
from edge_runtime.records.identity import Identity
from edge_runtime.records.power import Energy, Exceeded, ThermalReading, Unavailable
from edge_runtime.records.window import CacheCounts, WindowReport
from edge_runtime.telemetry.operating import ModelView, operating_point
from edge_runtime.telemetry.windows import WindowBuilder, WindowLoop, WindowSources, describe
from tests.awaiting import wait_until

S = 1_000_000_000
IDENTITY = Identity("gate-07", "boot", "session", "0", 0)


ENERGY = Energy(
    source="ina3221",
    rails=("VDD_IN",),
    joules=121.4,
    net_joules=74.0,
    mean_w=12.14,
    peak_w=13.0,
    samples=100,
    rate_hz=10.0,
    quantum_w=0.04,
    idle_w=4.74,
    mode="15W",
)


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 5 * S

    def monotonic_ns(self) -> int:
        return self.now_ns

    def utc(self) -> datetime:
        return datetime.fromtimestamp(1_700_000_000 + self.now_ns / 1e9, timezone.utc)


class Device:
    """Everything a window is made from, to be set by a test."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.next_cut = LedgerCut([], {})
        self.source = SourceCounters()
        self.effort = CameraEffort()
        self.serial = 1
        self.gone: list[CameraView] = []
        self.status = CameraStatus("up", None, 0)
        self.model = ModelView("detector", "sha256:one", "fp32-416", "onnxruntime", 1, None)
        self.power: Energy | Unavailable = ENERGY
        self.heat: ThermalReading | Unavailable = ThermalReading(0, 61.5, {"tj": 61.5}, "ina3221", throttling=False)
        self.spans: list[tuple[int, int]] = []
        self.operating = Operating(Budget())
        self.exceeded: Exceeded | Unavailable = Exceeded(0.0)
        self.limits_w: list[float] = []

    def builder(self) -> WindowBuilder:
        return WindowBuilder(
            IDENTITY,
            WindowSources(
                cut=lambda: self.next_cut,
                cameras=lambda: [
                    *self.gone,
                    CameraView("gate", ("detector",), self.status, self.source, self.effort, self.serial),
                ],
                models=lambda: [self.model],
                energy=self._energy,
                thermal=lambda: self.heat,
                clock_synced=lambda: True,
                fps_wanted=lambda: {"gate": 15.0},
                operating=lambda: self.operating,
                seconds_above=self._seconds_above,
            ),
            self.clock,
        )

    def _energy(self, start_ns: int, end_ns: int) -> Energy | Unavailable:
        self.spans.append((start_ns, end_ns))
        return self.power

    def _seconds_above(self, start_ns: int, end_ns: int, watts: float) -> Exceeded | Unavailable:
        assert (start_ns, end_ns) == self.spans[-1]
        self.limits_w.append(watts)
        return self.exceeded


def samples(*values_ms: float) -> Samples:
    found = Samples()
    for value in values_ms:
        found.add(int(value * 1e6))
    return found


def a_cut(completed: int = 148) -> LedgerCut:
    counters = Counters(carried_in=1, captured=completed + 2, completed=completed, stale=2, in_flight=1)
    latency = samples(*([31.0] * (completed - 4)), *([44.0] * 4))
    engine = EngineCounters("fp32-416", "onnxruntime")
    engine.counters, engine.latency, engine.batches, engine.places = counters, latency, 80, 144
    engine.inference.add(14_000_000)
    return LedgerCut([StreamCut("gate", "detector", counters, latency, {})], {("detector", "sha256:one"): engine})


def test_a_window_tells_what_the_cache_was_asked_and_rates_only_what_was_inferred() -> None:
    device = Device()
    builder = device.builder()
    device.next_cut = a_cut(100)
    (engine,) = device.next_cut.engines.values()
    for counters in (engine.counters, device.next_cut.streams[0].counters):
        counters.captured, counters.cached = 142, 40
    engine.cache = CacheCounters(lookups=45, hits=40, misses=5, bypassed=95)
    device.clock.now_ns += 10 * S
    report = builder.build()
    assert report.models[0].cache == CacheCounts(lookups=45, hits=40, misses=5, bypassed=95)
    assert (report.frames.completed, report.frames.cached, report.fps) == (100, 40, 10.0)
    assert report.fps_per_watt == pytest.approx(100 / 121.4, abs=1e-3)
    assert "40 cached" in describe(report)


def test_a_window_has_the_fields_of_the_contract() -> None:
    device = Device()
    builder = device.builder()
    device.next_cut = a_cut()
    device.clock.now_ns += 10 * S
    report = json.loads(builder.build().to_json())
    assert set(report) == {
        "schema", "device", "boot", "session", "seq", "uptime_s", "clock_synced", "t_start_utc", "t_end_utc", "t_utc",
        "duration_s", "frames", "fps", "latency_ms", "cameras", "models", "energy", "energy_reason",
        "fps_per_watt", "fps_per_watt_reason", "mixed", "thermal", "thermal_reason", "operating_point", "governor",
        "budget",
    }  # fmt: skip
    assert report["schema"] == "edge.window/1"
    assert report["frames"] == {
        "carried_in": 1, "captured": 150, "completed": 148, "cached": 0, "stale": 2, "dropped": {}, "failed": 0,
        "in_flight": 1,
    }  # fmt: skip
    assert report["fps"] == 14.8
    assert report["t_start_utc"].endswith("Z")
    assert report["latency_ms"]["p50"] == 31.0
    assert report["latency_ms"]["p99"] == 44.0
    assert [40, 144] in report["latency_ms"]["buckets"]
    assert sum(count for _, count in report["latency_ms"]["buckets"]) == 148
    assert report["energy"] == {
        "source": "ina3221", "rails": ["VDD_IN"], "joules": 121.4, "net_joules": 74.0, "mean_w": 12.14, "peak_w": 13.0,
        "samples": 100, "rate_hz": 10.0, "quantum_w": 0.04, "idle_w": 4.74, "mode": "15W", "reasons": {},
    }  # fmt: skip
    assert (report["energy_reason"], report["thermal_reason"]) == (None, None)
    assert report["fps_per_watt"] == pytest.approx(148 / 121.4, abs=1e-3)
    assert report["fps_per_watt_reason"] is None
    assert report["models"][0]["cache"] is None
    assert report["thermal"] == {
        "tj_c": 61.5, "zones": {"tj": 61.5}, "throttling": False, "source": "ina3221", "over_current": {},
        "reasons": {},
    }  # fmt: skip
    camera, model = report["cameras"][0], report["models"][0]
    assert (camera["name"], camera["model"], camera["state"], camera["fps"]) == ("gate", "detector", "up", 14.8)
    assert (model["engine"], model["variant"], model["batch_mean"]) == ("sha256:one", "fp32-416", 1.8)
    assert report["operating_point"] == {
        "variants": {"detector": "fp32-416"},
        "fps": {"gate": 15.0},
        "batch": {"detector": 1},
        "limits": {},
        "batch_timeout_ms": {},
        "gpu_hz": None,
    }
    assert report["governor"] == {"state": "off", "because": "no budget is set", "changes": 0, "estimates": {}}
    assert report["budget"] == {
        "power_w": None, "temperature_c": None, "latency_p99_ms": None, "violated_s": None,
        "reason": "no power budget is set",
    }  # fmt: skip
    assert device.spans == [(5 * S, 15 * S)]


def test_a_window_says_how_the_device_is_governed() -> None:
    device = Device()
    device.operating = Operating(Budget(15.0, 85.0, 80.0), changes=3)
    builder = device.builder()
    point = OperatingPoint({"detector": "fp32-320"}, {"gate": 7.5}, {"detector": 1}, {"detector": 5.0}, 612e6)
    decision = Decision(point, "derating", "15 W are taken", {"gate": "power", "gone": "power"}, True)
    device.operating = Operating(Budget(15.0, 85.0, 80.0), decision, changes=5, estimates={"watts gate": 2.5})
    device.exceeded = Exceeded(1.25, 2.0, "a hole of 0.8 s in the readings")
    report = builder.build()
    assert report.operating_point is not None
    assert report.governor is not None
    assert report.budget is not None
    # what runs, and not what was decided
    assert report.operating_point.variants == {"detector": "fp32-416"}
    assert report.operating_point.fps == {"gate": 7.5}
    assert report.operating_point.limits == {"gate": "power"}
    assert (report.operating_point.batch_timeout_ms, report.operating_point.gpu_hz) == ({"detector": 5.0}, 612e6)
    assert (report.governor.state, report.governor.changes) == ("derating", 2)
    assert report.governor.estimates == {"watts gate": 2.5}
    assert device.limits_w == [pytest.approx(15.45)]
    assert report.budget.violated_s == 1.25
    assert report.budget.reason == "not known for 2.0 s of the window: a hole of 0.8 s in the readings"
    assert (report.budget.temperature_c, report.budget.latency_p99_ms) == (85.0, 80.0)
    assert "derating: 15 W are taken; above the power budget for 1.2 s" in describe(report)
    # the next one counts anew
    device.exceeded = Unavailable("no sensor")
    report = builder.build()
    assert report.governor is not None
    assert report.budget is not None
    assert report.governor.changes == 0
    assert (report.budget.violated_s, report.budget.reason) == (None, "no sensor")


def test_a_budget_that_changed_in_the_window_was_not_the_one_to_hold() -> None:
    device = Device()
    device.operating = Operating(Budget(15.0))
    builder = device.builder()
    device.operating = Operating(Budget(10.0))
    report = builder.build()
    assert report.budget is not None
    assert (report.budget.power_w, report.budget.violated_s) == (10.0, None)
    assert report.budget.reason == "the power budget changed in the window"
    report = builder.build()
    assert report.budget is not None
    assert (report.budget.violated_s, report.budget.reason) == (0.0, None)
    assert device.limits_w == [pytest.approx(10.3)]


def test_a_camera_that_wants_what_its_source_has_shows_the_cap_alone() -> None:
    point = OperatingPoint({}, {"gate": 4.0, "yard": None}, {"detector": 8}, {})
    operating = Operating(Budget(15.0), Decision(point, "holding", "", {}, False))
    view = ModelView("detector", "sha256:one", "fp32-416", "onnxruntime", 4, None)
    down = ModelView("faces", None, "", "", 0, "no file")
    found = operating_point(operating, [view, down], {"gate": None, "yard": None, "door": 2.0})
    assert found.fps == {"gate": 4.0, "yard": None, "door": 2.0}
    # never more than the engine can, and nothing of a model that is down
    assert found.batch == {"detector": 4}


def test_without_a_sensor_energy_is_null_and_the_reason_says_why() -> None:
    device = Device()
    builder = device.builder()
    device.power, device.heat = Unavailable("no power sensor"), Unavailable("none")
    device.next_cut = a_cut()
    device.clock.now_ns += 10 * S
    report = builder.build()
    assert (report.energy, report.fps_per_watt, report.fps_per_watt_reason) == (None, None, "no power sensor")
    assert (report.energy_reason, report.thermal, report.thermal_reason) == ("no power sensor", None, "none")
    assert "no watts: no power sensor" in describe(report)


@pytest.mark.parametrize(
    ("joules", "reason"),
    [
        (1e-6, "1e-06 J is no energy to divide by"),
        (1.4e-3, "105714 frames per joule cannot be: the readings are wrong, or in another unit"),
    ],
)
def test_an_efficiency_that_cannot_be_is_null_with_the_reason(joules: float, reason: str) -> None:
    device = Device()
    builder = device.builder()
    device.power = replace(ENERGY, joules=joules)
    device.next_cut = a_cut()
    device.clock.now_ns += 10 * S
    report = builder.build()
    assert (report.fps_per_watt, report.fps_per_watt_reason) == (None, reason)
    assert report.energy is not None


def test_what_is_not_known_is_null_with_its_reason_beside_it() -> None:
    device = Device()
    builder = device.builder()
    why = "the power mode is not known, and idle power differs between modes"
    device.power = replace(ENERGY, net_joules=None, idle_w=None, reasons={"net_joules": why, "idle_w": why})
    device.heat = ThermalReading(0, 61.5, {}, "tegrastats", reasons={"zone gpu": "power-gated"})
    device.next_cut = a_cut()
    device.clock.now_ns += 10 * S
    report = builder.build()
    assert report.energy is not None
    assert report.thermal is not None
    assert (report.energy.net_joules, report.energy.reasons["net_joules"]) == (None, why)
    assert (report.thermal.throttling, report.thermal.reasons) == (None, {"zone gpu": "power-gated"})


def test_source_counters_are_the_windows_own() -> None:
    device = Device()
    builder = device.builder()
    device.next_cut = a_cut()
    device.clock.now_ns += S
    device.source = SourceCounters(decoded=100, skipped_rate=40)
    assert builder.build().cameras[0].source.decoded == 100
    device.clock.now_ns += S
    device.source = SourceCounters(decoded=130, skipped_rate=55, corrupt=2)
    source = builder.build().cameras[0].source
    assert (source.decoded, source.skipped_rate, source.corrupt) == (30, 15, 2)


def test_a_model_that_is_down_takes_its_cameras_down_with_the_reason() -> None:
    device = Device()
    builder = device.builder()
    device.model = ModelView("detector", None, "", "", 0, "bad digest")
    device.next_cut = LedgerCut([StreamCut("gate", "detector", Counters(), Samples(), {})], {})
    device.clock.now_ns += S
    report = builder.build()
    assert (report.cameras[0].state, report.cameras[0].reason) == ("down", "model detector: bad digest")
    assert report.latency_ms.p50 is None
    assert report.operating_point is not None
    assert report.operating_point.variants == {}


def test_two_engines_in_a_window_are_two_entries_and_mixed() -> None:
    device = Device()
    builder = device.builder()
    cut = a_cut()
    new = EngineCounters()
    new.batches = new.places = 1
    cut.engines["detector", "sha256:two"] = new
    device.next_cut = cut
    device.clock.now_ns += S
    builder_report = builder.build()
    assert builder_report.mixed
    assert [model.engine for model in builder_report.models] == ["sha256:one", "sha256:two"]


def test_failures_are_logged_with_their_reasons(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    builder = device.builder()
    device.next_cut = LedgerCut(
        [StreamCut("gate", "detector", Counters(captured=3, failed=3), Samples(), {"timeout": 2, "engine": 1})], {}
    )
    device.clock.now_ns += S
    builder.build()
    assert "camera gate on model detector: frames failed: 2 timeout, 1 engine" in caplog.text


def run_loop(consume: Callable[[WindowReport], None], window_s: float) -> WindowLoop:
    device = Device()
    device.next_cut = a_cut()
    from edge_runtime.clock import SystemClock

    device.clock = SystemClock()  # type: ignore[assignment]
    loop = WindowLoop(device.builder(), consume, window_s)
    loop.start()
    return loop


def test_windows_are_cut_by_time_alone_and_adjoin() -> None:
    reports: list[WindowReport] = []
    loop = run_loop(reports.append, 0.05)
    wait_until(lambda: len(reports) >= 10)
    assert loop.stop() == []
    assert [report.seq for report in reports] == list(range(len(reports)))
    assert sum(report.duration_s for report in reports[:-1]) == pytest.approx(0.05 * (len(reports) - 1), rel=0.1)


def test_a_consumer_that_fails_or_blocks_loses_no_time_to_later_windows(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()
    reports: list[WindowReport] = []

    def consume(report: WindowReport) -> None:
        reports.append(report)
        if report.seq == 0:
            raise OSError("disk full")
        if report.seq == 1:
            gate.wait(0.3)

    loop = run_loop(consume, 0.05)
    wait_until(lambda: len(reports) >= 5)
    assert loop.stop() == []
    assert "a window report failed" in caplog.text
    # one long window took the time of those that could not be cut
    assert reports[2].duration_s == pytest.approx(0.3, abs=0.1)
    assert reports[3].duration_s <= 0.06


def stream(camera: str = "gate", **counts: int) -> StreamCut:
    found = Counters()
    for name, count in counts.items():
        setattr(found, name, count)
    return StreamCut(camera, "detector", found, samples(*([30.0] * found.completed)), {"late": 1})


def test_a_window_says_since_when_and_what_decoding_cost() -> None:
    device = Device()
    builder = device.builder()
    device.next_cut = LedgerCut([stream(captured=1, completed=1)], {})
    device.clock.now_ns = 10 * S
    device.status = CameraStatus("stalled", "no data for 5 s", 7_500_000_000)
    (camera,) = builder.build().cameras
    assert (camera.since_s, camera.decode) == (2.5, None)
    device.effort = CameraEffort(3 * S, S // 2, 2, "pyav")
    (camera,) = builder.build().cameras
    assert camera.decode is not None
    assert camera.decode.model_dump() == {"cpu_s": 3.0, "saved_cpu_s": 0.5, "opened": 2, "backend": "pyav"}
    # only what is new; an estimate that was corrected downwards is no negative saving
    device.effort = CameraEffort(3 * S + S // 4, S // 4, 2, "pyav")
    (camera,) = builder.build().cameras
    assert camera.decode is not None
    assert camera.decode.model_dump() == {"cpu_s": 0.25, "saved_cpu_s": 0.0, "opened": 0, "backend": "pyav"}
    # nobody knows since when a model is down
    device.model = replace(device.model, engine=None, down_reason="damaged")
    (camera,) = builder.build().cameras
    assert (camera.state, camera.since_s) == ("down", None)


def test_one_that_was_removed_and_one_of_its_name_are_one_entry_and_add_up() -> None:
    device = Device()
    builder = device.builder()
    device.source, device.effort = SourceCounters(decoded=100, skipped_rate=40), CameraEffort(2 * S, 0, 1, "pyav")
    device.next_cut = LedgerCut([stream(captured=60, completed=58, in_flight=2)], {})
    builder.build()
    # 10 more of the old one, then a new one of the same name, that counts from 0
    gone = CameraView(
        "gate", ("detector",), CameraStatus("stopped", REMOVED, 6 * S), SourceCounters(decoded=110, skipped_rate=44),
        CameraEffort(3 * S, 0, 1, "pyav"), 1,
    )  # fmt: skip
    device.gone, device.serial = [gone], 2
    device.source, device.effort = SourceCounters(decoded=7, corrupt=1), CameraEffort(S, 0, 1, "gstreamer")
    old = stream(carried_in=2, captured=6, completed=7, in_flight=1)
    new = stream(captured=7, completed=4, stale=2, in_flight=1)
    device.next_cut = LedgerCut([old, stream("yard"), new], {})
    gate, yard = builder.build().cameras
    assert (gate.name, gate.state, gate.frames.captured, gate.frames.completed) == ("gate", "up", 13, 11)
    assert (gate.frames.carried_in, gate.frames.in_flight, gate.frames.stale) == (2, 2, 2)
    assert sum(count for _, count in gate.latency_ms.buckets) == 11
    assert (gate.source.decoded, gate.source.skipped_rate, gate.source.corrupt) == (17, 4, 1)
    assert gate.decode is not None
    assert (gate.decode.cpu_s, gate.decode.opened, gate.decode.backend) == (2.0, 1, "gstreamer")
    # one that nobody has a camera for any more
    assert (yard.name, yard.state, yard.reason, yard.since_s) == ("yard", "stopped", "removed", None)
    # and on with the new one alone
    device.gone, device.source = [], SourceCounters(decoded=9, corrupt=1)
    device.next_cut = LedgerCut([stream(carried_in=1, captured=2, completed=3)], {})
    (gate,) = builder.build().cameras
    assert (gate.source.decoded, gate.source.corrupt) == (2, 0)


def test_a_camera_that_was_removed_is_no_trouble_of_a_window() -> None:
    device = Device()
    device.next_cut = LedgerCut([stream("yard", captured=1, completed=1)], {})
    assert "cameras:" not in describe(device.builder().build())
