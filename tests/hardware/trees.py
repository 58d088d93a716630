"""Trees of /sys, /proc, /etc and /var as the kernels of each Jetson module show them, in plain files.

The real folders lie below sys/devices and are linked from sys/bus and sys/class, as they are on a device.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

Channels = Sequence[tuple[str, int, int]]
"""Label, mV and mA of each channel of a chip."""


class HandClock:
    """Time that moves only by hand."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def monotonic_ns(self) -> int:
        return self.now_ns

    def utc(self) -> datetime:
        return datetime.now(timezone.utc)

    def forward(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


@dataclass(frozen=True)
class Board:
    """What one module shows. `iio`: the power monitor's driver of JetPack 4. `watts`: the module power it means."""

    compatible: Sequence[str]
    model: str
    memory_kib: int
    chips: Mapping[str, Channels]
    watts: float
    zones_c: Mapping[str, float]
    gpu: tuple[str, str | None] = ("17000000.gpu", "gpu")
    iio: bool = False
    ina238_uw: int | None = None
    modes: Mapping[int, str] = field(default_factory=lambda: {0: "MAXN", 1: "10W", 2: "15W", 3: "25W"})
    mode: int = 2


def _orin(skus: str, mode_suffix: str = "") -> Sequence[str]:
    return (f"nvidia,p3768-0000+{skus}{mode_suffix}", f"nvidia,{skus}", "nvidia,tegra234")


ORIN_ZONES = {"cpu": 47.9, "gpu": 45.9, "cv0": 45.8, "cv1": 46.4, "cv2": 45.7, "soc0": 47.0, "soc1": 48.9, "soc2": 46.1}
NANO_CHIP = {"1-0040": (("VDD_IN", 4968, 936), ("VDD_CPU_GPU_CV", 4968, 112), ("VDD_SOC", 4968, 296))}
NX_CHIP = {"1-0040": (("VDD_IN", 4984, 1064), ("VDD_CPU_GPU_CV", 4984, 152), ("VDD_SOC", 4984, 288))}
AGX_CHIPS = {
    "1-0040": (("VDD_GPU_SOC", 19504, 120), ("VDD_CPU_CV", 19504, 20), ("VIN_SYS_5V0", 5032, 800)),
    "1-0041": (("NC", 0, 0), ("VDDQ_VDD2_1V8AO", 5032, 60), ("NC", 0, 0)),
}
AGX_WATTS = 19.504 * 0.12 + 19.504 * 0.02 + 5.032 * 0.8
AGX_ZONES = {**ORIN_ZONES, "tj": 48.9, "tboard": 32.0, "tdiode": 33.0}

BOARDS: dict[str, Board] = {
    "agx-orin-64gb": Board(
        ("nvidia,p3737-0000+p3701-0005", "nvidia,p3701-0005", "nvidia,tegra234"),
        "NVIDIA Jetson AGX Orin Developer Kit",
        64_349_000,
        AGX_CHIPS,
        AGX_WATTS,
        AGX_ZONES,
        modes={0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_50W"},
    ),
    # the developer kit's part number stands for either memory; JetPack 5 names
    "agx-orin-32gb": Board(
        ("nvidia,p3737-0000+p3701-0000", "nvidia,tegra234", "nvidia,tegra23x"),
        "Jetson AGX Orin",
        31_344_000,
        AGX_CHIPS,
        AGX_WATTS,
        AGX_ZONES,
        gpu=("17000000.ga10b", "ga10b"),
        modes={0: "MAXN", 1: "MODE_15W", 2: "MODE_30W", 3: "MODE_40W"},
    ),
    "orin-nx-16gb": Board(
        _orin("p3767-0000"), "NVIDIA Jetson Orin NX", 15_892_000, NX_CHIP, 4.984 * 1.064, {**ORIN_ZONES, "tj": 48.9}
    ),
    "orin-nx-8gb": Board(
        _orin("p3767-0001"), "NVIDIA Jetson Orin NX", 7_802_000, NX_CHIP, 4.984 * 1.064, {**ORIN_ZONES, "tj": 48.9}
    ),
    "orin-nano-8gb": Board(
        _orin("p3767-0005", "-super"),
        "NVIDIA Jetson Orin Nano Engineering Reference Developer Kit Super",
        7_802_000,
        NANO_CHIP,
        4.968 * 0.936,
        {**ORIN_ZONES, "tj": 50.2},
        modes={0: "15W", 1: "25W", 2: "MAXN_SUPER"},
        mode=1,
    ),
    "orin-nano-4gb": Board(
        _orin("p3767-0004"),
        "NVIDIA Jetson Orin Nano",
        3_600_000,
        NANO_CHIP,
        4.968 * 0.936,
        {**ORIN_ZONES, "tj": 50.2},
        modes={0: "10W", 1: "7W_AI", 2: "7W_CPU"},
        mode=0,
    ),
    "agx-xavier": Board(
        ("nvidia,p2972-0000", "nvidia,galen", "nvidia,jetson-xavier", "nvidia,tegra194"),
        "Jetson-AGX",
        32_692_000,
        {
            "1-0040": (("GPU", 19296, 16), ("CPU", 19296, 32), ("SOC", 19296, 48)),
            "1-0041": (("CV", 19296, 8), ("VDDRQ", 19296, 40), ("SYS5V", 5024, 296)),
        },
        19.296 * 0.144 + 5.024 * 0.296,
        {"cpu": 37.5, "gpu": 37.0, "aux": 36.0, "ao": 37.4, "tboard": 37.0, "tdiode": 40.0},
        gpu=("17000000.gv11b", "gv11b"),
    ),
    "xavier-nx": Board(
        ("nvidia,p3509-0000+p3668-0000", "nvidia,p3668-0000", "nvidia,tegra194"),
        "NVIDIA Jetson Xavier NX Developer Kit",
        7_900_000,
        {"7-0040": (("VDD_IN", 4976, 800), ("VDD_CPU_GPU_CV", 4976, 104), ("VDD_SOC", 4976, 208))},
        4.976 * 0.8,
        {"cpu": 37.5, "gpu": 37.0, "aux": 36.0, "ao": 37.4},
        gpu=("17000000.gv11b", "gv11b"),
    ),
    "tx2": Board(
        ("nvidia,quill", "nvidia,p2597-0000+p3310-1000", "nvidia,tegra186"),
        "quill",
        8_048_000,
        {
            "0-0040": (("VDD_SYS_GPU", 19184, 8), ("VDD_SYS_SOC", 19184, 40), ("VDD_4V0_WIFI", 4824, 0)),
            "0-0041": (("VDD_IN", 19152, 280), ("VDD_SYS_CPU", 19152, 96), ("VDD_SYS_DDR", 4824, 256)),
        },
        19.152 * 0.28,
        {"mcpu": 42.5, "bcpu": 42.5, "gpu": 39.5, "pll": 42.5, "tboard": 38.0, "tdiode": 39.25, "pmic": 100.0},
        gpu=("17000000.gp10b", "gp10b"),
        iio=True,
    ),
    "nano": Board(
        ("nvidia,p3449-0000-b00+p3448-0000-b00", "nvidia,jetson-nano", "nvidia,tegra210"),
        "NVIDIA Jetson Nano Developer Kit",
        4_059_000,
        {"6-0040": (("POM_5V_IN", 5016, 352), ("POM_5V_GPU", 5016, 0), ("POM_5V_CPU", 5016, 72))},
        5.016 * 0.352,
        {"cpu": 40.0, "gpu": 40.5, "ao": 45.0, "pll": 37.0, "pmic": 100.0},
        gpu=("57000000.gpu", "gpu"),
        iio=True,
        modes={0: "MAXN", 1: "5W"},
        mode=0,
    ),
    "thor": Board(
        ("nvidia,p4071-0000+p3834-0008", "nvidia,p3834-0008", "nvidia,tegra264"),
        "NVIDIA Jetson AGX Thor Developer Kit",
        128_790_000,
        {"2-0040": (("VDD_GPU", 19600, 320), ("VDD_CPU_SOC_MSS", 19600, 340), ("VIN_SYS_5V0", 5016, 1300))},
        28.906,
        {"tj": 51.2, "cpu": 49.8, "gpu": 51.2, "soc012": 50.6, "soc345": 49.9},
        gpu=("gpu-gpc-0", None),
        ina238_uw=28_906_000,
        modes={0: "MAXN", 1: "120W"},
        mode=1,
    ),
}

GPU_STEPS_HZ = (*range(306_000_000, 1_173_000_000, 102_000_000), 1_173_000_000)

COOLING = ("pwm-fan", "cpufreq-cpu0", "devfreq-17000000.gpu", "cpu-throttle-alert", "hot-surface-alert")


class Tree:
    """A tree of one board below `root`, and the ways to change it while somebody reads it."""

    def __init__(self, root: Path, board: Board) -> None:
        self.root = root
        self.board = board
        self._hwmon = 0
        self._channels: dict[str, tuple[Path, str, str]] = {}
        self.write("proc/device-tree/compatible", "\0".join(board.compatible) + "\0")
        self.write("proc/device-tree/model", board.model + "\0")
        self.write("proc/meminfo", f"MemTotal:       {board.memory_kib} kB\nMemFree:          10000 kB\n")
        self.write("var/lib/nvpmodel/status", f"pmode:{board.mode:04d}")
        modes = "".join(f"< POWER_MODEL ID={n} NAME={name} >\nGPU MAX_FREQ 1\n\n" for n, name in board.modes.items())
        self.write("etc/nvpmodel.conf", f"# comment\n{modes}< PM_CONFIG DEFAULT={board.mode} >\n")
        self.hwmon("pwmfan", {"pwm1": "102"}, "pwm-fan")
        for address, channels in board.chips.items():
            self._chip(address, channels)
        if board.ina238_uw is not None:
            files = {"power1_input": board.ina238_uw, "in1_input": 20016, "curr1_input": 1444, "temp1_input": 40000}
            self.i2c("2-0044", "ina238", files)
        for name, celsius in board.zones_c.items():
            self.zone(name, celsius)
        for n, name in enumerate(COOLING):
            self.write(f"sys/class/thermal/cooling_device{n}/type", f"{name}\n")
            self.write(f"sys/class/thermal/cooling_device{n}/cur_state", f"{2 if name == 'pwm-fan' else 0}\n")
        self.hwmon("soctherm_oc", {f"oc{n}_event_cnt": n * 10 for n in (1, 2, 3)}, "soctherm-oc-event")
        self._gpu(*board.gpu)

    def write(self, path: str | Path, value: object) -> Path:
        """Write a file below the root, in place where it is there."""
        file = self.root / path
        try:
            file.write_text(f"{value}")
        except FileNotFoundError:
            file.parent.mkdir(parents=True)
            file.write_text(f"{value}")
        return file

    def hwmon(self, name: str, files: Mapping[str, object], device: str) -> Path:
        """A hwmon device of a platform device; the next number is its own."""
        folder = self._numbered(f"sys/devices/platform/{device}", name)
        for file, value in files.items():
            self.write(folder / file, f"{value}\n")
        return folder

    def i2c(self, address: str, name: str, files: Mapping[str, object]) -> Path:
        """A chip on the I2C bus; returns its hwmon folder."""
        folder = self._numbered(f"sys/devices/platform/i2c/{address}", name)
        self.write(f"sys/devices/platform/i2c/{address}/name", f"{name}\n")
        self._link(f"sys/bus/i2c/devices/{address}", self.root / f"sys/devices/platform/i2c/{address}")
        for file, value in files.items():
            self.write(folder / file, f"{value}\n")
        return folder

    def renumber(self, address: str, number: int) -> None:
        """The driver is bound anew: the same chip, other files, another hwmon number."""
        old = next((self.root / f"sys/devices/platform/i2c/{address}/hwmon").iterdir())
        new = old.with_name(f"hwmon{number}")
        shutil.copytree(old, new)
        shutil.rmtree(old)
        (self.root / "sys/class/hwmon" / old.name).unlink()
        self._link(f"sys/class/hwmon/{new.name}", new)
        moved = {label: (new, mv, ma) for label, (folder, mv, ma) in self._channels.items() if folder == old}
        self._channels.update(moved)

    def rail(self, label: str, mv: object, ma: object) -> None:
        """Set voltage and current of a rail."""
        folder, mv_file, ma_file = self._channels[label]
        self.write(folder / mv_file, f"{mv}\n")
        self.write(folder / ma_file, f"{ma}\n")

    def rail_file(self, label: str, *, current: bool = False) -> Path:
        """The file of a rail's voltage, or of its current."""
        folder, mv_file, ma_file = self._channels[label]
        return folder / (ma_file if current else mv_file)

    def zone(self, name: str, celsius: float) -> None:
        """Set a zone's temperature; a new one comes with the trip points of Orin."""
        number = list(self.board.zones_c).index(name)
        folder = f"sys/class/thermal/thermal_zone{number}"
        if not (self.root / folder).is_dir():
            self.write(f"{folder}/type", f"{name}-thermal\n")
            for n, (kind, trip_c) in enumerate((("passive", 99.0), ("hot", 100.0), ("critical", 104.5))):
                self.trip(name, n, kind, trip_c)
        self.write(f"{folder}/temp", f"{round(celsius * 1000)}\n")

    def trip(self, zone: str, number: int, kind: str, celsius: float, bound_to: str | None = None) -> None:
        """Set a trip point, and the cooling device that it is bound to."""
        folder = self.zone_folder(zone)
        self.write(folder / f"trip_point_{number}_type", f"{kind}\n")
        self.write(folder / f"trip_point_{number}_temp", f"{round(celsius * 1000)}\n")
        if bound_to is not None:
            self.write(folder / f"cdev{number}_trip_point", f"{number}\n")
            (folder / f"cdev{number}").symlink_to(f"../cooling_device{COOLING.index(bound_to)}")

    def zone_folder(self, name: str) -> Path:
        """The folder of a zone."""
        return self.root / f"sys/class/thermal/thermal_zone{list(self.board.zones_c).index(name)}"

    def cooling(self, name: str, state: int) -> None:
        """Set the state of a cooling device."""
        self.write(f"sys/class/thermal/cooling_device{COOLING.index(name)}/cur_state", f"{state}\n")

    def over_current(self, name: str, count: int) -> None:
        """Set an over-current counter, `oc1` to `oc3`."""
        folder = next((self.root / "sys/devices/platform/soctherm-oc-event/hwmon").iterdir())
        self.write(folder / f"{name}_event_cnt", f"{count}\n")

    def gpu_folder(self) -> Path:
        """The GPU's devfreq folder."""
        return self.root / "sys/class/devfreq" / self.board.gpu[0]

    def _chip(self, address: str, channels: Channels) -> None:
        if self.board.iio:
            chip = f"sys/devices/platform/i2c/{address}"
            folder = self.root / chip / "iio:device0"
            self.write(f"{chip}/name", "ina3221x\n")
            self._link(f"sys/bus/i2c/devices/{address}", self.root / chip)
            for n, (label, _, _) in enumerate(channels):
                self.write(folder / f"rail_name_{n}", f"{label}\n")
                self._channels[label] = (folder, f"in_voltage{n}_input", f"in_current{n}_input")
        else:
            folder = self.i2c(address, "ina3221", {"in7_label": "sum of shunt voltages", "curr4_input": 1368})
            for n, (label, _, _) in enumerate(channels, 1):
                self.write(folder / f"in{n}_label", f"{label}\n")
                self.write(folder / f"in{n}_enable", "1\n")
                self.write(folder / f"in{n + 3}_input", "5320\n")
                self._channels[label] = (folder, f"in{n}_input", f"curr{n}_input")
        for label, mv, ma in channels:
            self.rail(label, mv, ma)

    def _gpu(self, device: str, node: str | None) -> None:
        folder = f"sys/devices/platform/{device}"
        devfreq = f"{folder}/devfreq/{device}"
        self.write(f"{devfreq}/cur_freq", "612000000\n")
        self.write(f"{devfreq}/min_freq", "306000000\n")
        self.write(f"{devfreq}/max_freq", "1173000000\n")
        self.write(f"{devfreq}/available_frequencies", " ".join(str(step) for step in GPU_STEPS_HZ) + "\n")
        self._link(f"{devfreq}/device", self.root / folder)
        if node is not None:
            self.write(f"{folder}/load", "437\n")
            self.write(f"{folder}/of_node/name", f"{node}\0")
        self._link(f"sys/class/devfreq/{device}", self.root / devfreq)
        # another device with a clock, which comes first in the list
        self.write("sys/class/devfreq/15340000.vic/cur_freq", "729600000\n")
        self.write("sys/class/devfreq/15340000.vic/device/of_node/name", "vic\0")

    def _numbered(self, device: str, name: str) -> Path:
        folder = self.root / device / "hwmon" / f"hwmon{self._hwmon}"
        self.write(folder / "name", f"{name}\n")
        self._link(f"sys/class/hwmon/hwmon{self._hwmon}", folder)
        self._hwmon += 1
        return folder

    def _link(self, path: str, target: Path) -> None:
        link = self.root / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(target, link.parent))


def build(root: Path, name: str) -> Tree:
    """The tree of the module of this name."""
    return Tree(root, BOARDS[name])
