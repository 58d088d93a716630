"""The Jetson's own files as a sensor source: rails, temperatures, GPU, fan, over-current, power mode; without root."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clock import Clock, SystemClock
from edge_runtime.hardware.modules import MODULES, Module, Recognition, Unknown, module_power, recognise
from edge_runtime.hardware.nvpmodel import ModeRead, read_mode
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.sysfs_board import BoardReader
from edge_runtime.hardware.sysfs_power import FROZEN_S, RailReader
from edge_runtime.hardware.sysfs_thermal import HeatReader
from edge_runtime.records.power import DeviceReading

FIND_S = 10.0
"""How often devices, trip points and the power mode are looked for again."""
FIND_AGAIN_S = 1.0
"""The same, for FIND_S from when a file has gone on."""

_GPU_NAMES = tuple(dict.fromkeys(name for module in MODULES for name in module.gpu_names))


@dataclass(frozen=True, slots=True)
class SysfsReport:
    """What was found, what of it is used, and why: each line for a person to read."""

    module: Module | Unknown
    recognised_by: str
    chips: tuple[str, ...]
    rails: tuple[str, ...]
    unused: tuple[str, ...]
    zones: tuple[str, ...]
    tj: str
    gpu: str
    fan: str
    mode: str

    def lines(self) -> list[str]:
        """The report for a terminal."""
        title = self.module.title if isinstance(self.module, Module) else "unknown"
        return [
            f"module: {title} ({self.recognised_by})",
            f"power monitors: {', '.join(self.chips) or 'none'}",
            *(f"rail: {text}" for text in self.rails),
            *(f"not used: {text}" for text in self.unused),
            *(f"zone: {text}" for text in self.zones),
            f"tj: {self.tj}",
            f"gpu: {self.gpu}",
            f"fan: {self.fan}",
            f"power mode: {self.mode}",
        ]


class SysfsSource:
    """`SensorSource` on the files below `root`, read by one thread.

    A file that has gone (a driver that was bound anew, another hwmon number) is looked for again within the same
    reading. `frozen_s`: after how long exactly the same raw values of all channels are no measurement, s.
    """

    name = "ina3221"
    period_s = 0.1

    def __init__(self, root: Path = Path("/"), *, clock: Clock | None = None, frozen_s: float = FROZEN_S) -> None:
        self._root = root
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._found_ns: int | None = None
        self._lost_ns: int | None = None
        self._recognition: Recognition = recognise(root)
        self._mode: ModeRead = read_mode(root)
        self._power = RailReader(root, frozen_s=frozen_s)
        self._heat = HeatReader(root)
        self._board = BoardReader(root)

    @property
    def module(self) -> Module | Unknown:
        """The module, as it was recognised."""
        return self._recognition.module

    @property
    def rails(self) -> tuple[str, ...]:
        """The rails that module power is made of; empty for a module that is not known."""
        return self.module.rails if isinstance(self.module, Module) else ()

    @property
    def quantum_w(self) -> float | None:
        """The step of a power reading, W."""
        return self.module.quantum_w if isinstance(self.module, Module) else None

    def read(self) -> DeviceReading:
        """Everything that can be read now. Raises SensorError where there is no power, temperature or GPU at all."""
        with self._lock:
            if self._closed.is_set():
                raise SensorError("closed", where="sysfs")
            reading = self._read()
        if self._closed.is_set():
            self.close()
        if not (reading.rails_w or reading.zones_c or reading.gpu_load is not None or reading.gpu_hz is not None):
            raise SensorError(
                "; ".join(f"{what}: {reading.reasons[what]}" for what in ("power", "tj", "gpu")),
                where=str(self._root / "sys"),
                remedy="on a Jetson: is /sys mounted here, and readable for this user?",
                retryable=True,
            )
        return reading

    def describe(self) -> SysfsReport:
        """What is there and what is used of it, with the values of one reading.

        Over-current triggers up to here are not in the next reading.
        """
        with self._lock:
            self._find()
            power, heat = self._power.read(self._clock.monotonic_ns()), self._heat.read()
            board = self._board.read()
        used = [name for name in power.rails_w if name in self.rails]
        rails = [f"{name} {power.rails_w[name]:.3f} W, part of module power" for name in used]
        rails += [f"{name} {watts:.3f} W, not added" for name, watts in power.rails_w.items() if name not in used]
        unused = [f"{name}: {why}" for name, why in (power.reasons | self._power.dropped | self._heat.dropped).items()]
        unused += [
            f"{place}: {name} is neither a power monitor, a fan nor over-current"
            for place, name in self._board.hwmon.items()
            if not name.startswith(("ina", "pwmfan", "soctherm_oc"))
        ]
        zones = []
        for zone in self._heat.zones:
            value = f"{heat.zones_c[zone.name]:.1f} degC" if zone.name in heat.zones_c else "unavailable"
            why = heat.reasons.get(f"zone {zone.name}")
            trips = ", ".join(f"{trip.kind} {trip.temp_c:g}" for trip in zone.trips) or "none"
            zones.append(f"{zone.name} {value}{f' ({why})' if why else ''}; trip points: {trips}")
        gpu = board.reasons.get("gpu", "")
        if self._board.gpu is not None:
            most = "" if self._board.gpu_max_hz is None else f", up to {self._board.gpu_max_hz / 1e6:.0f} MHz"
            gpu = f"{self._board.gpu} ({self._board.gpu_why}){most}{f'; {gpu}' if gpu else ''}"
        return SysfsReport(
            module=self.module,
            recognised_by=self._recognition.because,
            chips=tuple(self._power.chips),
            rails=tuple(rails),
            unused=tuple(unused),
            zones=tuple(zones),
            tj=heat.reasons["tj"] if heat.tj_c is None else f"{heat.tj_c:.1f} degC, zone {heat.tj_from}",
            gpu=gpu,
            fan=board.reasons["fan"] if board.fan is None else f"pwmfan at {board.fan:.0%}",
            mode=self._mode_text(),
        )

    def close(self) -> None:
        """Let go of all files, at once or as soon as a reading that runs has ended. Idempotent."""
        self._closed.set()
        if self._lock.acquire(blocking=False):
            try:
                for part in (self._power, self._heat, self._board):
                    part.close()
            finally:
                self._lock.release()

    def _find(self) -> None:
        if isinstance(self.module, Unknown):
            self._recognition = recognise(self._root)
        self._power.find(self.module)
        self._heat.find()
        self._board.find(self.module.gpu_names if isinstance(self.module, Module) else _GPU_NAMES)
        self._mode = read_mode(self._root)
        self._found_ns = self._clock.monotonic_ns()

    def _is_due(self) -> bool:
        """Whether it is time to look for devices again: often for a while after one has gone."""
        if self._found_ns is None:
            return True
        now_ns = self._clock.monotonic_ns()
        is_missing = self._lost_ns is not None and now_ns - self._lost_ns < FIND_S * 1e9
        return now_ns - self._found_ns >= (FIND_AGAIN_S if is_missing else FIND_S) * 1e9

    def _read(self) -> DeviceReading:
        if self._is_due():
            self._find()
        now_ns = self._clock.monotonic_ns()
        power, heat, board = self._power.read(now_ns), self._heat.read(), self._board.read()
        if power.lost or heat.lost or board.lost:
            self._lost_ns = now_ns
            if self._is_due():
                self._find()
                counted = board.over_current
                power, heat, board = self._power.read(now_ns), self._heat.read(), self._board.read()
                for name, count in counted.items():
                    board.over_current[name] = count + board.over_current.get(name, 0)
        reasons = {f"rail {name}": why for name, why in power.reasons.items()} | heat.reasons | board.reasons
        watts, why = module_power(self.module, power.rails_w)
        if not self._power.channels:
            why = "no power monitor on the I2C bus"
        why = power.frozen or why
        if why is not None:
            reasons["power"] = why
        if self._mode.reason is not None:
            reasons["mode"] = self._mode.reason
        return DeviceReading(
            t_ns=now_ns,
            watts=watts,
            rails_w=power.rails_w,
            tj_c=heat.tj_c,
            zones_c=heat.zones_c,
            gpu_load=board.gpu_load,
            gpu_hz=board.gpu_hz,
            # an over-current input slows the clocks down by itself, for as long as it lasts
            throttling=True if any(board.over_current.values()) else heat.throttling,
            over_current=board.over_current,
            fan=board.fan,
            mode=self._mode.name,
            reasons=reasons,
        )

    def _mode_text(self) -> str:
        mode = self._mode
        if mode.name is None or mode.number is None:
            return f"unknown: {mode.reason}"
        declared = self.module.power_mode(mode.number, mode.name) if isinstance(self.module, Module) else None
        text = f"{mode.name}{', the default' if mode.number == mode.default else ''}"
        if declared is None:
            return text
        cpu = "uncapped" if declared.cpu_mhz is None else f"{declared.cpu_mhz:g} MHz"
        gpu = "uncapped" if declared.gpu_mhz is None else f"{declared.gpu_mhz:g} MHz"
        return f"{text}: {declared.cpu_cores} CPU cores, {cpu}, GPU {gpu}"
