"""GPU load and clock, fan, and over-current counters, each found by its name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from edge_runtime.hardware.sysfs_files import SysfsFile, UnreadableError, folders, read_number, read_text

_MAX_HZ = 10_000_000_000
_MAX_PWM = 255


@dataclass(slots=True)
class BoardRead:
    """`gpu_load` 0-1, `gpu_hz` Hz, `fan` 0-1 of full speed; `over_current` triggers since the reading before."""

    gpu_load: float | None = None
    gpu_hz: float | None = None
    fan: float | None = None
    over_current: dict[str, int] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    lost: bool = False


class BoardReader:
    """What is neither a rail nor a thermal zone.

    GPU: the devfreq device whose device-tree node (`device/of_node/name`), or whose own name, is one of the module's;
    its address differs by release. `device/load` is permille. Fan: hwmon `pwmfan`, `pwm1` 0-255. Over-current:
    hwmon `soctherm_oc`, `oc1_event_cnt` (under-voltage), `oc2_...` (average), `oc3_...` (instantaneous), which count
    since the boot.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._files: dict[str, SysfsFile] = {}
        self._counts: dict[str, int] = {}
        self.gpu: str | None = None
        self.gpu_max_hz: int | None = None
        self.gpu_why: str = ""
        self.hwmon: dict[str, str] = {}

    def find(self, gpu_names: Iterable[str]) -> None:
        """Look for the devices again; files that are where they were stay open."""
        wanted: dict[str, Path] = {}
        self.gpu, self.gpu_max_hz = None, None
        for folder in folders(self._root / "sys/class/devfreq"):
            if (why := gpu_by(folder, tuple(gpu_names))) is not None:
                self.gpu, self.gpu_why = folder.name, why
                wanted["gpu load"] = folder / "device/load"
                wanted["gpu clock"] = folder / "cur_freq"
                try:
                    self.gpu_max_hz = read_number(folder / "max_freq", 0, _MAX_HZ)
                except UnreadableError:
                    self.gpu_max_hz = None
                break
        self.hwmon = {}
        for folder in folders(self._root / "sys/class/hwmon", "hwmon"):
            try:
                name = read_text(folder / "name")
            except UnreadableError as error:
                self.hwmon[folder.name] = f"its name cannot be read: {error.reason}"
                continue
            self.hwmon[folder.name] = name
            if name == "pwmfan":
                wanted.setdefault("fan", folder / "pwm1")
            elif name == "soctherm_oc":
                for file in folders(folder, "oc"):
                    if file.name.endswith("_event_cnt"):
                        wanted.setdefault(file.name.removesuffix("_event_cnt"), file)
        self._open(wanted)

    def read(self) -> BoardRead:
        """Everything that can be read now."""
        found = BoardRead()
        load = self._number("gpu load", 1000, found, "gpu", "no GPU among the devfreq devices")
        hertz = self._number("gpu clock", _MAX_HZ, found, "gpu", "no GPU among the devfreq devices")
        pwm = self._number("fan", _MAX_PWM, found, "fan", "no hwmon device pwmfan")
        found.gpu_load = None if load is None else load / 1000
        found.gpu_hz = None if hertz is None else float(hertz)
        found.fan = None if pwm is None else pwm / _MAX_PWM
        for name in self._files:
            if name.startswith("oc"):
                count = self._number(name, 2**32, found, f"over_current {name}", "")
                before = self._counts.get(name)
                # a counter that went back started anew: how often it triggered in between is not known
                if count is not None and before is not None and count >= before:
                    found.over_current[name] = count - before
                if count is not None:
                    self._counts[name] = count
        return found

    def close(self) -> None:
        """Let go of all files."""
        self._open({})

    def _open(self, wanted: dict[str, Path]) -> None:
        before, self._files = self._files, {}
        for name, path in wanted.items():
            file = before.get(name)
            if file is not None and file.path == path:
                self._files[name] = before.pop(name)
            else:
                self._files[name] = SysfsFile(path)
        for file in before.values():
            file.close()

    def _number(self, name: str, most: int, found: BoardRead, key: str, absent: str) -> int | None:
        file = self._files.get(name)
        if file is None:
            found.reasons[key] = absent
            return None
        try:
            return file.number(0, most)
        except UnreadableError as error:
            found.reasons[key] = f"{name.removeprefix('gpu ')}: {error.reason}"
            found.lost |= error.lost
            return None


def gpu_by(folder: Path, names: tuple[str, ...]) -> str | None:
    """By which of its names a devfreq device is the GPU; None where it is another one."""
    try:
        node = read_text(folder / "device/of_node/name")
    except UnreadableError:
        node = ""
    if node in names:
        return f"its device-tree node is {node}"
    # 17000000.ga10b on JetPack 5; gpu-gpc-0 on a Thor, which has no node
    own = folder.name.rpartition(".")[2]
    return f"its devfreq name is {folder.name}" if own in names else None
