"""Which power mode nvpmodel has set, without root and without running it: from its own two files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.hardware.sysfs_files import UnreadableError, read_text

STATUS = "var/lib/nvpmodel/status"
CONFIG = "etc/nvpmodel.conf"

_CONFIG_BYTES = 512 * 1024
_SET = re.compile(r"^\s*pmode:\s*([0-9]{1,4})\b", re.MULTILINE)
_MODE = re.compile(r"^\s*<\s*POWER_MODEL\s+ID\s*=\s*([0-9]{1,4})\s+NAME\s*=\s*([\w.+-]{1,40})\s*>", re.MULTILINE)
_DEFAULT = re.compile(r"^\s*<\s*PM_CONFIG\s+DEFAULT\s*=\s*([0-9]{1,4})\s*>", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ModeRead:
    """The mode's number and name as this device's nvpmodel.conf has them; `name` is None where `reason` says why.

    `default`: the number of the mode after a fresh installation; None where the file names none that it defines.
    """

    number: int | None
    name: str | None
    default: int | None
    reason: str | None


def read_mode(root: Path) -> ModeRead:
    """The mode that was set last. A number alone is no mode: it means another one on each module and release.

    `/var/lib/nvpmodel/status` holds `pmode:0002`, sometimes with warnings of nvpmodel around it;
    `/etc/nvpmodel.conf` names the modes: `< POWER_MODEL ID=2 NAME=15W >`, `< PM_CONFIG DEFAULT=2 >`.
    """
    names: dict[int, str] = {}
    default = None
    trouble = None
    try:
        config = read_text(root / CONFIG, _CONFIG_BYTES)
    except UnreadableError as error:
        trouble = f"/{CONFIG}: {error.reason}"
    else:
        names = {int(number): name for number, name in _MODE.findall(config)}
        found = _DEFAULT.search(config)
        default = int(found[1]) if found is not None and int(found[1]) in names else None
    try:
        status = read_text(root / STATUS, 4096)
    except UnreadableError as error:
        return ModeRead(None, None, default, f"/{STATUS}: {error.reason}")
    numbers = _SET.findall(status)
    if not numbers:
        return ModeRead(None, None, default, f"/{STATUS} names no mode")
    number = int(numbers[-1])
    if number not in names:
        why = trouble or f"/{CONFIG} has no mode of this number"
        return ModeRead(number, None, default, f"nvpmodel is set to number {number}, but {why}")
    return ModeRead(number, names[number], default, None)
