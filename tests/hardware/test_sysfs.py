"""The sysfs source on the trees of all modules: the right watts and degrees, and every known fault of the files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from edge_runtime.hardware.protocol import SensorError, SensorSource
from edge_runtime.hardware.sysfs import SysfsSource
from edge_runtime.records.power import DeviceReading
from tests.hardware.trees import BOARDS, Tree, build


def reading(tree: Tree) -> DeviceReading:
    source = SysfsSource(tree.root)
    try:
        return source.read()
    finally:
        source.close()


def described(tree: Tree) -> str:
    source = SysfsSource(tree.root)
    try:
        return "\n".join(source.describe().lines())
    finally:
        source.close()


@pytest.mark.parametrize("name", list(BOARDS))
def test_every_module_with_the_right_values(tmp_path: Path, name: str) -> None:
    tree = build(tmp_path, name)
    source: SensorSource = SysfsSource(tmp_path)
    try:
        read = source.read()
    finally:
        source.close()
    assert read.watts == pytest.approx(tree.board.watts, rel=1e-9)
    labels = {label for channels in tree.board.chips.values() for label, _, _ in channels} - {"NC"}
    assert set(read.rails_w) == labels | ({"VIN"} if name == "thor" else set())
    assert set(source.rails) <= set(read.rails_w)
    assert read.zones_c == pytest.approx(tree.board.zones_c)
    junctions = {zone: c for zone, c in tree.board.zones_c.items() if zone not in ("tboard", "tdiode", "pmic")}
    assert read.tj_c == pytest.approx(junctions.get("tj", max(junctions.values())))
    assert read.gpu_hz == 612e6
    assert read.gpu_load == (None if name == "thor" else 0.437)
    assert read.fan == pytest.approx(0.4)
    assert read.mode == tree.board.modes[tree.board.mode]
    assert read.throttling is False
    assert read.over_current == {}
    assert set(read.reasons) == ({"gpu"} if name == "thor" else set())
    assert abs(read.t_ns - time.monotonic_ns()) < 10e9


@dataclass(frozen=True)
class Fault:
    """A fault as it was seen on devices: what the files look like, and what has to come of it."""

    board: str
    files: Callable[[Tree], object]
    watts: float | str | None = "as before"
    why: str = ""
    key: str = "power"
    absent_zone: str | None = None
    absent_rail: str | None = None


def _nx(label: str, mv: object, ma: object) -> Callable[[Tree], object]:
    return lambda tree: tree.rail(label, mv, ma)


def _eio(path: Path) -> None:
    """From now on reading the file fails with EIO, as reading /proc/self/mem at 0 does."""
    path.unlink()
    path.symlink_to("/proc/self/mem")


def _replaced(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _gone(tree: Tree, label: str) -> None:
    folder = tree.rail_file(label).parent
    for file in folder.glob("*[1-9]_*"):
        file.unlink()


FAULTS: dict[str, Fault] = {
    "an idle GPU reads -256": Fault(
        "agx-orin-64gb",
        lambda tree: tree.write(tree.zone_folder("gpu") / "temp", "-256000\n"),
        key="zone gpu",
        why="-256 degC cannot be",
        absent_zone="gpu",
    ),
    "all rails of an AGX, or one of them": Fault(
        "agx-orin-64gb", lambda tree: tree.rail("VDDQ_VDD2_1V8AO", 5032, 4000)
    ),
    "POM_5V_IN and what it holds": Fault("nano", lambda tree: tree.rail("POM_5V_GPU", 5016, 300)),
    "1-0041 with an NC label and a failing in3_input": Fault(
        "agx-orin-64gb", lambda tree: _eio(tree.rail_file("VDDQ_VDD2_1V8AO").parent / "in3_input")
    ),
    "1-0041 with a failing channel": Fault(
        "agx-orin-64gb",
        lambda tree: _eio(tree.rail_file("VDDQ_VDD2_1V8AO")),
        key="rail VDDQ_VDD2_1V8AO",
        why="EIO",
        absent_rail="VDDQ_VDD2_1V8AO",
    ),
    "a channel that is disabled": Fault(
        "agx-orin-64gb",
        lambda tree: tree.write(tree.rail_file("VDDQ_VDD2_1V8AO").parent / "in2_enable", "0\n"),
        absent_rail="VDDQ_VDD2_1V8AO",
    ),
    "a channel without a label": Fault(
        "agx-orin-64gb",
        lambda tree: (tree.rail_file("VDDQ_VDD2_1V8AO").parent / "in2_label").unlink(),
        absent_rail="VDDQ_VDD2_1V8AO",
    ),
    "an empty channel": Fault("orin-nx-16gb", _nx("VDD_SOC", "", ""), key="rail VDD_SOC", why="empty"),
    "a channel N/A": Fault("orin-nx-16gb", _nx("VDD_SOC", "N/A", "N/A"), key="rail VDD_SOC", why="'N/A' instead"),
    "a declared rail that fails": Fault(
        "orin-nx-16gb", lambda tree: _eio(tree.rail_file("VDD_IN", current=True)), None, "VDD_IN is missing"
    ),
    "no VDD_IN at all": Fault("orin-nx-16gb", lambda tree: _gone(tree, "VDD_IN"), None, "no power monitor"),
    "a UCSI supply among the hwmon devices": Fault(
        "agx-orin-64gb",
        lambda tree: tree.hwmon("ucsi_source_psy_1_00081", {"in0_input": 5000, "curr1_input": 3000}, "ucsi"),
    ),
    "a foreign chip on the bus": Fault(
        "orin-nx-16gb", lambda tree: tree.i2c("7-0048", "tmp102", {"in1_input": 1, "in1_label": "VDD_IN"})
    ),
    "an INA238 of nobody's": Fault(
        "orin-nx-16gb", lambda tree: tree.i2c("7-0044", "ina238", {"power1_input": 99_000_000})
    ),
    "another INA3221 with the same label": Fault(
        "orin-nx-16gb",
        lambda tree: tree.i2c("7-0041", "ina3221", {"in1_label": "VDD_IN", "in1_input": 12000, "curr1_input": 9000}),
    ),
    "power from an INA238 in uW": Fault("thor", lambda tree: tree.rail("VDD_GPU", 19600, 900), 28.906),
    "a negative current": Fault("orin-nx-16gb", _nx("VDD_IN", 4984, -400), None, "VDD_IN is missing"),
    "more current than a rail carries": Fault("orin-nx-16gb", _nx("VDD_IN", 4984, 10_001), None, "VDD_IN is missing"),
    "more voltage than the chip can measure": Fault("orin-nx-16gb", _nx("VDD_IN", 40_000, 100), None, "is missing"),
    "more power than a rail carries": Fault("orin-nx-16gb", _nx("VDD_IN", 30_000, 9_000), None, "VDD_IN is missing"),
    "a billion": Fault("orin-nx-16gb", _nx("VDD_IN", 4984, 10**9), None, "VDD_IN is missing"),
    "not a number": Fault("orin-nx-16gb", _nx("VDD_IN", 4984, "nan"), None, "VDD_IN is missing"),
    "no power at all on the input rail": Fault("orin-nx-16gb", _nx("VDD_IN", 0, 0), None, "cannot be"),
    "a directory in the place of a file": Fault(
        "orin-nx-16gb",
        lambda tree: _replaced(tree.rail_file("VDD_SOC"), Path.mkdir),
        key="rail VDD_SOC",
        why="not a regular file",
    ),
    "a FIFO in the place of a file": Fault(
        "orin-nx-16gb",
        lambda tree: _replaced(tree.rail_file("VDD_SOC"), os.mkfifo),
        key="rail VDD_SOC",
        why="not a regular file",
    ),
    "a huge file": Fault(
        "orin-nx-16gb",
        lambda tree: os.truncate(tree.rail_file("VDD_SOC"), 1 << 40),
        key="rail VDD_SOC",
        why="longer than",
    ),
    "nvpmodel has set no mode": Fault(
        "orin-nx-16gb", lambda tree: (tree.root / "var/lib/nvpmodel/status").unlink(), key="mode", why="ENOENT"
    ),
    "nvpmodel warns instead": Fault(
        "orin-nx-16gb",
        lambda tree: tree.write("var/lib/nvpmodel/status", "NVPM WARN: fan mode is not set!\n"),
        key="mode",
        why="names no mode",
    ),
    "a mode that nvpmodel.conf does not have": Fault(
        "orin-nx-16gb", lambda tree: tree.write("var/lib/nvpmodel/status", "pmode:0009"), key="mode", why="number 9"
    ),
    "no nvpmodel.conf": Fault(
        "orin-nx-16gb", lambda tree: (tree.root / "etc/nvpmodel.conf").unlink(), key="mode", why="ENOENT"
    ),
    "a fan that is not there": Fault(
        "orin-nx-16gb",
        lambda tree: (tree.root / "sys/class/hwmon/hwmon0/name").write_text("x"),
        key="fan",
        why="pwmfan",
    ),
    "a GPU whose load is not there": Fault(
        "orin-nx-16gb", lambda tree: (tree.gpu_folder() / "device/load").unlink(), key="gpu", why="load: "
    ),
    "a GPU load of more than all": Fault(
        "orin-nx-16gb",
        lambda tree: tree.write(tree.gpu_folder() / "device/load", "1001"),
        key="gpu",
        why="1001 cannot be",
    ),
}


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_known_fault(tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    tree = build(tmp_path, fault.board)
    fault.files(tree)
    read = reading(tree)
    expected = tree.board.watts if fault.watts == "as before" else fault.watts
    assert read.watts == (None if expected is None else pytest.approx(expected))
    assert fault.why in read.reasons.get(fault.key, ""), read.reasons
    assert fault.absent_zone not in read.zones_c
    assert fault.absent_rail not in read.rails_w
    assert read.tj_c is not None


def test_a_gated_rail_may_read_a_step_or_two_below_zero(tmp_path: Path) -> None:
    """A Thor's idle GPU does, by the shunt's offset: it is zero, and no fault."""
    tree = build(tmp_path, "agx-orin-64gb")
    tree.rail("VDD_CPU_CV", 19504, -20)
    read = reading(tree)
    assert read.rails_w["VDD_CPU_CV"] == 0.0
    assert read.watts == pytest.approx(19.504 * 0.12 + 5.032 * 0.8)
    tree.rail("VDD_CPU_CV", 19504, -60)
    assert reading(tree).watts is None


def test_tj_is_never_taken_from_the_board_or_from_a_constant(tmp_path: Path) -> None:
    tree = build(tmp_path, "agx-orin-64gb")
    for zone in tree.board.zones_c:
        tree.zone(zone, 60.0 if zone in ("tboard", "tdiode") else 40.0)
    tree.write(tree.zone_folder("tj") / "temp", "")
    tree.zone("soc1", 41.5)
    assert reading(tree).tj_c == 41.5
    for zone in tree.board.zones_c:
        if zone not in ("tboard", "tdiode"):
            tree.write(tree.zone_folder(zone) / "temp", "-256000\n")
    read = reading(tree)
    assert read.tj_c is None
    assert read.reasons["tj"] == "no junction zone can be read"
    assert set(read.zones_c) == {"tboard", "tdiode"}


@pytest.mark.parametrize(("celsius", "slows"), [(98.9, False), (99.0, True)])
def test_a_passive_trip_point_that_is_reached_is_throttling(tmp_path: Path, celsius: float, slows: bool) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.zone("cpu", celsius)
    assert reading(tree).throttling is slows


def test_trip_points_are_read_not_known(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.zone("cpu", 96.0)
    tree.trip("cpu", 0, "passive", 95.0)
    assert reading(tree).throttling is True


def test_the_surface_alert_of_an_orin_is_not_throttling(tmp_path: Path) -> None:
    """Its passive trip point at 70 degC is bound to the alert alone; the one at 99 degC slows the processors."""
    tree = build(tmp_path, "orin-nx-16gb")
    tree.trip("cpu", 0, "passive", 99.0, bound_to="cpufreq-cpu0")
    tree.trip("cpu", 3, "passive", 70.0, bound_to="hot-surface-alert")
    tree.zone("cpu", 75.0)
    tree.cooling("hot-surface-alert", 1)
    assert reading(tree).throttling is False
    tree.zone("cpu", 99.5)
    assert reading(tree).throttling is True


@pytest.mark.parametrize("device", ["cpufreq-cpu0", "devfreq-17000000.gpu", "cpu-throttle-alert"])
def test_a_cooling_device_that_slows_a_processor_is_throttling(tmp_path: Path, device: str) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.cooling(device, 1)
    assert reading(tree).throttling is True


def test_a_hot_board_sensor_is_not_throttling(tmp_path: Path) -> None:
    tree = build(tmp_path, "tx2")
    tree.zone("pmic", 120.0)
    assert reading(tree).throttling is False


def test_where_nothing_tells_throttling_is_unknown(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    for file in (tmp_path / "sys/class/thermal").rglob("*"):
        if file.name.startswith(("trip_point", "cur_state")):
            file.unlink()
    read = reading(tree)
    assert read.throttling is None
    assert "throttling" in read.reasons


def test_over_current_is_counted_since_the_reading_before_each_input_apart(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    source = SysfsSource(tmp_path)
    try:
        assert source.read().over_current == {}
        assert source.read().over_current == {"oc1": 0, "oc2": 0, "oc3": 0}
        tree.over_current("oc1", 13)
        read = source.read()
        assert read.over_current == {"oc1": 3, "oc2": 0, "oc3": 0}
        assert read.throttling is True
        read = source.read()
        assert read.over_current == {"oc1": 0, "oc2": 0, "oc3": 0}
        assert read.throttling is False
        # the driver was bound anew and counts from nothing: what happened in between is not known
        tree.over_current("oc3", 2)
        assert source.read().over_current == {"oc1": 0, "oc2": 0}
        tree.over_current("oc3", 5)
        assert source.read().over_current == {"oc1": 0, "oc2": 0, "oc3": 3}
    finally:
        source.close()


@pytest.mark.parametrize(
    ("status", "config", "mode"),
    [
        ("pmode:0002\n", "< POWER_MODEL ID=2 NAME=15W >\n< PM_CONFIG DEFAULT=2 >\n", "15W"),
        ("pmode:0002 fmode:quiet", "<POWER_MODEL ID=2 NAME=MODE_30W>\n", "MODE_30W"),
        # an unknown default says nothing about the mode that is set
        ("pmode:0001", "< POWER_MODEL ID=1 NAME=10W >\n< PM_CONFIG DEFAULT=99 >\n", "10W"),
        ("NVPM WARN: no fan\npmode:0001\n", "# < POWER_MODEL ID=1 NAME=OLD >\n< POWER_MODEL ID=1 NAME=10W >", "10W"),
    ],
)
def test_the_power_mode_as_nvpmodel_wrote_it(tmp_path: Path, status: str, config: str, mode: str) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.write("var/lib/nvpmodel/status", status)
    tree.write("etc/nvpmodel.conf", config)
    assert reading(tree).mode == mode


@pytest.mark.parametrize("name", ["17000000.gpu", "gpu.0"])
def test_the_gpu_is_found_by_its_node_whatever_its_path_is(tmp_path: Path, name: str) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.gpu_folder().rename(tmp_path / "sys/class/devfreq" / name)
    assert reading(tree).gpu_load == 0.437


def test_an_unknown_module_has_temperatures_and_rails_but_no_power(tmp_path: Path) -> None:
    tree = build(tmp_path, "orin-nx-16gb")
    tree.write("proc/device-tree/compatible", "vendor,board\0nvidia,tegra999\0")
    tree.write("proc/device-tree/model", "Board\0")
    source = SysfsSource(tmp_path)
    try:
        read = source.read()
        assert (source.rails, source.quantum_w) == ((), None)
    finally:
        source.close()
    assert read.watts is None
    assert "'Board' is no Jetson module" in read.reasons["power"]
    assert read.rails_w["VDD_IN"] == pytest.approx(4.984 * 1.064)
    assert read.tj_c == 48.9
    assert read.gpu_load == 0.437


def test_a_machine_with_no_sensors_says_so(tmp_path: Path) -> None:
    source = SysfsSource(tmp_path)
    try:
        with pytest.raises(SensorError, match="no power monitor on the I2C bus; tj: no thermal zones; gpu: no GPU"):
            source.read()
        assert "module: unknown (no device tree" in "\n".join(source.describe().lines())
    finally:
        source.close()


def test_the_report_says_what_is_used_and_why(tmp_path: Path) -> None:
    tree = build(tmp_path, "agx-orin-32gb")
    tree.hwmon("ucsi_source_psy_1_00081", {"in0_input": 5000}, "ucsi")
    tree.i2c("7-0048", "tmp102", {})
    tree.write(tree.zone_folder("gpu") / "temp", "-256000\n")
    text = described(tree)
    for line in (
        "module: Jetson AGX Orin 32GB (compatible 'nvidia,p3737-0000+p3701-0000' and MemTotal 29.9 GiB)",
        "power monitors: 1-0040 ina3221, 1-0041 ina3221",
        "rail: VIN_SYS_5V0 4.026 W, part of module power",
        "rail: VDDQ_VDD2_1V8AO 0.302 W, not added",
        "not used: 1-0041 channel 1: not connected: its label is 'NC'",
        "not used: 7-0048: tmp102 is no power monitor",
        "ucsi_source_psy_1_00081 is neither a power monitor, a fan nor over-current",
        "zone: gpu unavailable (-256 degC cannot be: disconnected or power-gated); trip points: passive 99",
        "tj: 48.9 degC, zone tj",
        "gpu: 17000000.ga10b (its device-tree node is ga10b), up to 1173 MHz",
        "fan: pwmfan at 40%",
        "power mode: MODE_30W, the default: 8 CPU cores, 1728 MHz, GPU 612 MHz",
    ):
        assert line in text, text


@pytest.mark.parametrize("name", ["agx-orin-64gb", "orin-nx-16gb"])
def test_reading_costs_at_most_half_a_percent_of_a_core_at_10_hz(tmp_path: Path, name: str) -> None:
    """On plain files: without what the drivers take. The search for devices every 10 s is counted in."""
    build(tmp_path, name)
    source = SysfsSource(tmp_path)
    try:
        source.read()
        costs_s = []
        for _ in range(5):
            start_s = time.process_time()
            for _ in range(100):
                source.read()
            costs_s.append((time.process_time() - start_s) / 100)
        start_s = time.process_time()
        source.describe()
        search_s = time.process_time() - start_s
    finally:
        source.close()
    assert min(costs_s) * 10 + search_s / 10 < 0.005
