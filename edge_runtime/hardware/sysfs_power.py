"""Power monitors on the I2C bus, read through hwmon (or, on JetPack 4, through iio).

INA3221: `in[123]_input` mV, `curr[123]_input` mA, `in[123]_label`; `in[456]` are shunt voltages and in7 and curr4 sums
of channels, so none of those is a rail. INA238 and its like: `power1_input` in uW. The hwmon number changes from boot
to boot: chips are found by name, rails by label.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.hardware.modules import Module, Unknown
from edge_runtime.hardware.sysfs_files import SysfsFile, UnreadableError, folders, read_number, read_text

MAX_RAIL_W = 200.0
MAX_RAIL_MA = 10_000
MAX_RAIL_MV = 32_000
"""More than any rail of a module carries; the bus range of an INA3221 ends at 32.76 V."""

OFFSET_STEPS = 2
"""How many steps of current below zero still are zero: the shunt offset of an INA3221 is up to 80 uV, two steps. A
gated rail reads some tens of mA less than nothing; anything beyond that cannot be."""

FROZEN_S = 30.0
FROZEN_READINGS = 50
"""Exactly the same raw values of all channels for this long, and in at least so many readings, are no measurement any
more. A quiet board does repeat itself, since a step is 8 or 20 mA: but then at least one of three or more channels,
voltage or current, moves by a step within some seconds."""

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0


@dataclass(slots=True)
class Channel:
    """One rail of one chip. `files`: voltage (mV) and current (mA), or power alone (uW)."""

    label: str
    chip: str
    files: tuple[SysfsFile, ...]
    raw: tuple[int, ...] | None = None
    failures: int = 0
    retry_ns: int = 0
    reason: str = ""

    def measure(self, low_ma: int) -> tuple[int, ...]:
        """The raw values. Raises UnreadableError."""
        if len(self.files) == 1:
            return (self.files[0].number(0, int(MAX_RAIL_W * 1e6)),)
        volts, amps = self.files
        return volts.number(0, MAX_RAIL_MV), amps.number(low_ma, MAX_RAIL_MA)

    def fail(self, reason: str, now_ns: int) -> None:
        """Leave the channel alone for a while: twice as long with each failure, but at once after the first."""
        wait_s = min(_FIRST_RETRY_S * 2**self.failures, _LAST_RETRY_S) if self.failures else 0.0
        self.failures = min(self.failures + 1, 16)
        self.retry_ns = now_ns + int(wait_s * 1e9)
        self.reason = reason


@dataclass(slots=True)
class RailsRead:
    """Rails in W by label; why others are missing, by label; whether a file has gone and chips have to be found."""

    rails_w: dict[str, float] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    frozen: str | None = None
    lost: bool = False


class RailReader:
    """Every rail that the power monitors below `root` have."""

    def __init__(self, root: Path, *, frozen_s: float = FROZEN_S) -> None:
        self._root = root
        self._frozen_ns = int(frozen_s * 1e9)
        self._low_ma = 0
        self._moved_ns: int | None = None
        self._repeats = 0
        self.channels: dict[str, Channel] = {}
        self.dropped: dict[str, str] = {}

    @property
    def chips(self) -> list[str]:
        """The power monitors in use, as `BUS-ADDRESS NAME`."""
        return list(dict.fromkeys(channel.chip for channel in self.channels.values()))

    def find(self, module: Module | Unknown) -> None:
        """Look for chips and rails; channels that are where they were stay open. `dropped` says what is not used."""
        unlabelled = {} if isinstance(module, Unknown) else dict(module.unlabelled)
        self._low_ma = 0 if isinstance(module, Unknown) else -OFFSET_STEPS * module.current_step_ma
        self.dropped = {}
        known, self.channels = self.channels, {}
        for chip, name, folder in self._monitors():
            for where, label, paths in _channels(folder, name, unlabelled, self.dropped, chip):
                if label in self.channels:
                    self.dropped[where] = f"{label} is measured by {self.channels[label].chip} already"
                    continue
                before = known.get(label)
                if before is not None and tuple(file.path for file in before.files) == paths:
                    self.channels[label] = known.pop(label)
                else:
                    self.channels[label] = Channel(label, f"{chip} {name}", tuple(SysfsFile(path) for path in paths))
        for channel in known.values():
            _close(channel)

    def read(self, now_ns: int) -> RailsRead:
        """Every rail that can be read now."""
        found = RailsRead()
        moved = False
        for label, channel in self.channels.items():
            if now_ns < channel.retry_ns:
                found.reasons[label] = channel.reason
                continue
            try:
                raw = channel.measure(self._low_ma)
                watts = _watts(raw)
            except UnreadableError as error:
                channel.fail(error.reason, now_ns)
                found.reasons[label] = error.reason
                found.lost |= error.lost
                continue
            channel.failures = 0
            moved |= raw != channel.raw
            channel.raw = raw
            found.rails_w[label] = watts
        self._watch(moved, found, now_ns)
        return found

    def close(self) -> None:
        """Let go of all files."""
        for channel in self.channels.values():
            _close(channel)

    def _watch(self, moved: bool, found: RailsRead, now_ns: int) -> None:
        if moved or self._moved_ns is None or not found.rails_w:
            self._moved_ns, self._repeats = now_ns, 0
            return
        self._repeats += 1
        still_ns = now_ns - self._moved_ns
        if still_ns >= self._frozen_ns and self._repeats >= FROZEN_READINGS:
            found.frozen = f"frozen: all channels have read exactly the same for {still_ns / 1e9:.0f} s"
            found.rails_w = {}

    def _monitors(self) -> Iterator[tuple[str, str, Path]]:
        """Bus address, chip name and the folder with its channels, of each power monitor."""
        for device in folders(self._root / "sys/bus/i2c/devices"):
            places = [*folders(device / "hwmon", "hwmon"), *folders(device, "iio:device")]
            if not places:
                continue
            try:
                name = read_text(device / "name")
            except UnreadableError as error:
                self.dropped[device.name] = f"its name cannot be read: {error.reason}"
                continue
            if not name.startswith("ina"):
                self.dropped[device.name] = f"{name} is no power monitor"
                continue
            yield device.name, name, places[0]


def _channels(
    folder: Path, name: str, unlabelled: dict[str, str], dropped: dict[str, str], chip: str
) -> Iterator[tuple[str, str, tuple[Path, ...]]]:
    """Where, label and files of each channel; those without a rail go to `dropped`."""
    if folder.name.startswith("iio"):
        for n in "012":
            yield from _labelled(folder, f"{chip} rail {n}", f"rail_name_{n}", _iio(folder, n), dropped)
    elif name.startswith("ina3221"):
        for n in "123":
            where = f"{chip} channel {n}"
            if _is_disabled(folder / f"in{n}_enable"):
                dropped[where] = "disabled"
                continue
            paths = (folder / f"in{n}_input", folder / f"curr{n}_input")
            yield from _labelled(folder, where, f"in{n}_label", paths, dropped)
    else:
        power = (folder / "power1_input",)
        for file in ("power1_label", "in1_label", "label"):
            found = list(_labelled(folder, chip, file, power, {}))
            if found:
                yield from found
                return
        if name in unlabelled:
            yield chip, unlabelled[name], power
        else:
            dropped[chip] = f"{name} has no label, and which rail it measures is not declared"


def _iio(folder: Path, n: str) -> tuple[Path, ...]:
    return folder / f"in_voltage{n}_input", folder / f"in_current{n}_input"


def _labelled(
    folder: Path, where: str, label_file: str, paths: tuple[Path, ...], dropped: dict[str, str]
) -> Iterator[tuple[str, str, tuple[Path, ...]]]:
    try:
        label = read_text(folder / label_file)
    except UnreadableError as error:
        dropped[where] = f"no label: {error.reason}"
        return
    if label in ("", "NC", "N/A") or not label.isprintable():
        dropped[where] = f"not connected: its label is {label!r}"
    else:
        yield where, label, paths


def _is_disabled(file: Path) -> bool:
    """Kernels without the file enable every channel."""
    try:
        return read_number(file, 0, 1) == 0
    except UnreadableError:
        return False


def _watts(raw: tuple[int, ...]) -> float:
    """mV x mA / 10^6 = W, uW / 10^6 = W. Raises UnreadableError where no rail carries that much."""
    watts = raw[0] / 1e6 if len(raw) == 1 else raw[0] * max(raw[1], 0) / 1e6
    if watts > MAX_RAIL_W:
        raise UnreadableError(f"{watts:.0f} W cannot be: more than {MAX_RAIL_W:.0f} W")
    return watts


def _close(channel: Channel) -> None:
    for file in channel.files:
        file.close()
