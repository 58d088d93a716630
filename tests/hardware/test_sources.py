"""Sources on their own threads: switching, and that one that blocks, raises or lies is nobody else's trouble."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edge_runtime.hardware.feed import FROZEN_S, Candidate, Feed, sane
from edge_runtime.hardware.modules import identify
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sources import Sensors, make_sensors
from edge_runtime.hardware.sysfs import SysfsSource
from edge_runtime.hardware.tegrastats import TegrastatsSource
from edge_runtime.records.power import DeviceReading, SensorSwitch, ThermalReading, Unavailable
from edge_runtime.threads import ThreadGroup
from tests.awaiting import wait_until
from tests.hardware.fake_source import FakeSource
from tests.hardware.trees import build


class Ticking:
    """Sensors, looked at ten times a second as the sampler does, and the switches that were told."""

    def __init__(self, *candidates: Candidate) -> None:
        self.switches: list[SensorSwitch] = []
        self.sensors = Sensors(candidates, on_switch=self.switches.append)
        self.slowest_s = 0.0

    def tick(self) -> None:
        start_s = time.monotonic()
        self.sensors.tick()
        self.slowest_s = max(self.slowest_s, time.monotonic() - start_s)

    def until(self, condition: Callable[[], object], what: str = "it") -> None:
        """Tick until it is so."""

        def look() -> object:
            self.tick()
            return condition()

        wait_until(look, 5.0, what)

    def until_from(self, name: str) -> None:
        """Tick until power comes from this source."""
        self.until(lambda: self.power_from() == name, f"power from {name}")

    def power_from(self) -> str | None:
        return next((state.name for state in self.sensors.states() if "power" in state.used_for), None)

    def temperature(self) -> ThermalReading:
        found = self.sensors.temperature()
        assert isinstance(found, ThermalReading), found
        return found

    def power(self) -> DeviceReading:
        found = self.sensors.power()
        assert isinstance(found, DeviceReading), found
        return found


@contextlib.contextmanager
def running(*sources: FakeSource | Candidate) -> Iterator[Ticking]:
    ticking = Ticking(*(source.candidate() if isinstance(source, FakeSource) else source for source in sources))
    ticking.sensors.start()
    ticking.tick()
    try:
        yield ticking
    finally:
        for source in sources:
            if isinstance(source, FakeSource):
                source.gate.set()
        assert ticking.sensors.stop(2.0) == []


def test_the_best_source_is_read_and_the_others_are_left_alone() -> None:
    best, other = FakeSource("ina3221"), FakeSource("jtop")
    with running(best, other) as ticking:
        wait_until(lambda: best.reads > 10)
        ticking.tick()
        assert ticking.power().watts == 5.0
        assert ticking.temperature().source == "ina3221"
        assert (other.made, other.reads) == (0, 0)
        assert ticking.switches == []
    assert best.closed == 1


def test_a_lost_source_is_replaced_with_one_event_and_no_reading_is_missing_between_them() -> None:
    best, other = FakeSource("ina3221"), FakeSource("tegrastats")
    other.watts = 6.0
    with running(best, other) as ticking:
        best.error = OSError(5, "Input/output error")
        start_s = time.monotonic()
        ticking.until_from("tegrastats")
        assert 0.9 < time.monotonic() - start_s < 2.0
        (switch,) = ticking.switches
        assert (switch.what, switch.before, switch.after) == ("power and temperature", "ina3221", "tegrastats")
        assert "Input/output error" in switch.reason
        assert ticking.power().watts == 6.0
        # what the new source read before the old one was given up is there to fill the hole
        assert len(ticking.sensors.power_since(int((start_s + 0.2) * 1e9))) > 20


def test_a_read_that_blocks_delays_nothing_and_when_it_ends_counts_as_a_fault() -> None:
    best, other = FakeSource("ina3221"), FakeSource("tegrastats")
    with running(best, other) as ticking:
        best.gate.clear()
        start_s = time.monotonic()
        ticking.until_from("tegrastats")
        assert time.monotonic() - start_s < 2.0
        assert ticking.slowest_s < 0.1
        assert "no good reading for 1." in ticking.switches[0].reason
        assert best.blocked
        best.gate.set()
        seen = best.reads
        wait_until(lambda: best.reads > seen + 5)
        ticking.tick()
        assert ticking.power_from() == "tegrastats"


class ClosesItself(FakeSource):
    """Whose read ends when it is closed, as a socket's does."""

    def close(self) -> None:
        super().close()
        self.gate.set()


@pytest.mark.parametrize(("source", "stuck"), [(ClosesItself(), []), (FakeSource(), ["sensor-ina3221"])])
def test_a_stop_ends_a_read_that_blocks_by_closing_it_and_names_one_that_does_not_end(
    source: FakeSource, stuck: list[str]
) -> None:
    sensors = Sensors([source.candidate()])
    sensors.start()
    source.gate.clear()
    wait_until(lambda: source.blocked)
    start_s = time.monotonic()
    assert sensors.stop(0.6) == stuck
    assert time.monotonic() - start_s < 1.0
    source.gate.set()
    assert sensors.stop(2.0) == []


def test_a_source_that_is_no_longer_needed_is_closed_and_opened_again_when_it_is() -> None:
    source = FakeSource("tegrastats")
    feed, threads = Feed(source.candidate()), ThreadGroup()
    threads.spawn("sensor-tegrastats", feed.run)
    for times in (1, 2):
        feed.want(True)
        seen = source.reads
        wait_until(lambda seen=seen: source.reads > seen + 3)  # type: ignore[misc]
        assert feed.standing("power", time.monotonic_ns()).reason is None
        feed.want(False)
        wait_until(lambda times=times: source.closed == times)  # type: ignore[misc]
        assert feed.standing("power", time.monotonic_ns()).reason == "not read: there is no need of it"
    assert source.made == 2
    feed.end()
    assert threads.join(2.0) == []


def test_a_source_that_is_opened_while_the_stop_comes_is_closed_again() -> None:
    source, opening = FakeSource("jtop"), threading.Event()

    def make() -> FakeSource:
        opening.wait()
        return source

    sensors = Sensors([Candidate("jtop", make)])
    sensors.start()
    assert sensors.stop(0.1) == ["sensor-jtop"]
    opening.set()
    assert sensors.stop(2.0) == []
    assert (source.reads, source.closed) == (0, 1)


def test_a_sensor_that_fails_every_third_read_switches_nothing_and_has_a_value_all_the_time() -> None:
    best, other = FakeSource("ina3221"), FakeSource("tegrastats")
    best.fails = lambda number: number % 3 == 0
    with running(best, other) as ticking:
        ticking.until(lambda: isinstance(ticking.sensors.power(), DeviceReading))
        seen = best.reads

        def has_power() -> bool:
            assert ticking.power().watts == 5.0
            return best.reads > seen + 75

        ticking.until(has_power)
        assert ticking.switches == []
        assert ticking.power_from() == "ina3221"


@pytest.mark.parametrize("error", [SensorError("gone"), ValueError("nonsense"), EOFError(), RuntimeError("bug")])
def test_whatever_a_source_raises_is_its_own_fault_and_is_told(error: Exception) -> None:
    best, other = FakeSource("jtop"), FakeSource("tegrastats")
    best.error = error
    with running(best, other) as ticking:
        ticking.until_from("tegrastats")
        assert ticking.power().watts == 5.0
        reason = ticking.sensors.states()[0].reasons["power"]
        assert reason == (str(error) or type(error).__name__)


def test_a_source_that_cannot_be_opened_is_tried_again_and_taken_when_it_is_there() -> None:
    source = FakeSource("jtop")
    there = threading.Event()

    def make() -> FakeSource:
        if not there.is_set():
            raise SensorError("no service", where="/run/jtop.sock")
        return source

    with running(Candidate("jtop", make, steady=True)) as ticking:
        found = ticking.sensors.power()
        assert found == Unavailable("jtop: /run/jtop.sock: no service")
        there.set()
        ticking.until_from("jtop")
        assert ticking.switches == []  # the first choice is no switch


def test_watts_that_cannot_be_are_no_watts_and_the_next_source_is_taken() -> None:
    best, other = FakeSource("ina3221"), FakeSource("tegrastats")
    with running(best, other) as ticking:
        best.watts = 1e9
        ticking.until_from("tegrastats")
        assert "1e+09 W cannot be" in ticking.switches[0].reason
        assert ticking.switches[0].what == "power"
        # its temperature is as good as before
        assert ticking.temperature().source == "ina3221"


@pytest.mark.parametrize("watts", [1e9, -1.0, 0.0, float("nan"), float("inf")])
def test_watts_that_cannot_be_are_taken_out_of_a_reading_with_the_reason(watts: float) -> None:
    reading = sane(DeviceReading(1, watts=watts, tj_c=50.0))
    assert (reading.watts, reading.tj_c) == (None, 50.0)
    assert reading.reasons == {"power": f"{watts:g} W cannot be"}


def test_power_and_temperature_come_from_different_sources_where_one_lacks_one() -> None:
    best, other = FakeSource("ina3221"), FakeSource("tegrastats")
    best.tj_c, best.reasons = None, {"tj": "no zone on the die can be read"}
    other.tj_c = 61.0
    with running(best, other) as ticking:
        ticking.until(lambda: isinstance(ticking.sensors.temperature(), ThermalReading))
        assert ticking.power_from() == "ina3221"
        assert (ticking.temperature().source, ticking.temperature().tj_c) == ("tegrastats", 61.0)
        assert ticking.sensors.states()[0].reasons["temperature"] == "no zone on the die can be read"


def test_without_any_good_source_every_one_says_why() -> None:
    best, other = FakeSource("ina3221"), FakeSource("jtop")
    best.error, other.error = SensorError("no chip"), SensorError("no service")
    with running(best, other) as ticking:
        ticking.until(lambda: other.reads > 0)
        wait_until(lambda: "no service" in str(ticking.sensors.power()))
        assert ticking.sensors.power() == Unavailable("ina3221: no chip; jtop: no service")
        assert ticking.sensors.temperature() == Unavailable("ina3221: no chip; jtop: no service")
        assert ticking.sensors.patience_s() == 0.0


def test_a_reading_that_is_repeated_is_none() -> None:
    best, other = FakeSource("jtop"), FakeSource("tegrastats")
    with running(best, other) as ticking:
        now_ns = time.monotonic_ns()
        best.clock = lambda: now_ns
        ticking.until_from("tegrastats")
        assert "it repeats an old reading" in ticking.switches[0].reason


def test_watts_that_never_move_are_frozen_unless_they_may() -> None:
    frozen, steady = FakeSource("tegrastats"), FakeSource("simulated")
    for source in (frozen, steady):
        t_ns = [time.monotonic_ns() - int((FROZEN_S + 60) * 1e9)]

        def clock(t_ns: list[int] = t_ns) -> int:
            t_ns[0] += 2_000_000_000  # as if it were read every two seconds
            return t_ns[0]

        source.clock = clock
    with running(frozen.candidate(steady=False), steady.candidate()) as ticking:
        wait_until(lambda: "frozen" in str(ticking.sensors.states()[0].reasons["power"]))
        ticking.until(lambda: steady.reads > 60)
        assert "frozen" not in str(ticking.sensors.states()[1].reasons["power"])


def test_over_current_is_summed_up() -> None:
    source = FakeSource()
    with running(source) as ticking:
        source.over_current = {"oc1": 2}
        seen = source.reads
        wait_until(lambda: source.reads > seen + 3)
        source.over_current = {}
        assert ticking.temperature().over_current["oc1"] >= 6


def test_a_sane_reading_is_left_as_it_is() -> None:
    reading = DeviceReading(1, watts=5.0, tj_c=50.0, zones_c={"tj": 50.0})
    assert sane(reading) is reading
    assert sane(DeviceReading(1, tj_c=-256.0)) == DeviceReading(1, reasons={"tj": "-256 degC cannot be"})


def test_hardware_is_chosen_by_its_word(tmp_path: Path) -> None:
    assert make_sensors("none", tmp_path) == Unavailable('hardware = "none"')
    auto = make_sensors("auto", tmp_path)
    assert isinstance(auto, Unavailable)
    assert auto.reason.startswith("no sensors: no device tree")
    forced = make_sensors("jetson", tmp_path)
    assert isinstance(forced, Sensors)
    assert [state.name for state in forced.states()] == ["ina3221", "jtop", "tegrastats"]


def test_a_jetson_without_any_sensor_is_not_fatal_and_says_why_for_each_source(tmp_path: Path) -> None:
    sensors = make_sensors("jetson", tmp_path)
    assert isinstance(sensors, Sensors)
    sensors.start()
    try:
        sensors.tick()
        found = sensors.power()
        assert isinstance(found, Unavailable)
        assert found.reason.startswith("ina3221: ")
        assert "no GPU" in found.reason or "gpu" in found.reason
    finally:
        assert sensors.stop(2.0) == []


TEGRASTATS = """
import sys, time
for number in range(10_000):
    print(f"RAM 1/7620MB GR3D_FREQ 0% tj@50.2C VDD_IN {6000 + number}mW/6000mW", flush=True)
    time.sleep(0.1)
"""


def test_the_kernels_own_files_go_and_tegrastats_takes_over_and_gives_back(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nano-8gb")
    module = identify(tmp_path)
    command = (sys.executable, "-c", TEGRASTATS)
    chip = tmp_path / "sys/bus/i2c/devices/1-0040"
    with running(
        Candidate("ina3221", lambda: SysfsSource(tmp_path)),
        Candidate("tegrastats", lambda: TegrastatsSource(module, command)),
    ) as ticking:
        assert ticking.power().watts == pytest.approx(tree.board.watts)
        target = chip.readlink()
        chip.unlink()
        tree.rail_file("VDD_IN").unlink()
        ticking.until_from("tegrastats")
        assert 6.0 <= (ticking.power().watts or 0) < 7.0
        assert "VDD_IN is missing" in ticking.switches[0].reason
        # the temperature is still the kernel's
        assert [switch.what for switch in ticking.switches] == ["power"]
        assert ticking.temperature().source == "ina3221"
        chip.symlink_to(target)
        tree.rail("VDD_IN", 4968, 936)
        ticking.until(lambda: ticking.sensors.states()[0].reasons["power"] is None)
        assert ticking.power_from() == "tegrastats"  # not before it has been good for a while
