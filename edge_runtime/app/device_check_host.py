"""The checks of `device-check` that need no GPU: versions, sensors, GStreamer, memory."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from edge_runtime.app.device_check_report import CheckFailed, CheckSkipped, Found
from edge_runtime.camera.gst_pipelines import HARDWARE_ELEMENTS, PACKAGES
from edge_runtime.engine.tensorrt.preflight import RESERVE_BYTES, MiB, estimate
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.hardware.memory import available_bytes
from edge_runtime.hardware.modules import Module, identify
from edge_runtime.hardware.nvpmodel import read_mode
from edge_runtime.hardware.survey import survey
from edge_runtime.records.sensors import SensorReport

_ROOT = Path("/")
_ELEMENTS = (*HARDWARE_ELEMENTS, "nvarguscamerasrc")
_APT = ("nvidia-jetpack", "nvidia-l4t-core", "tensorrt", "python3-libnvinfer", "libnvinfer10", "libnvinfer11")
_PYTHON = ("pycuda", "cuda-bindings", "cuda-python", "numpy", "onnxruntime", "av", "jetson-stats")
_APT_S = 10.0


@dataclass(frozen=True, slots=True)
class Host:
    """Where these checks look; others than the device's own in tests. `find_element`: whether GStreamer has one.

    `model_bytes`: of the ONNX file that engines are built from.
    """

    here: Here
    model_bytes: int
    root: Path = _ROOT
    survey: Callable[[], SensorReport] = survey
    find_element: Callable[[str], bool] | None = None
    available_bytes: Callable[[], int | None] = available_bytes


def versions(host: Host) -> Found:
    """What is installed, and what the device is."""
    module, mode = identify(host.root), read_mode(host.root)
    numbers: dict[str, Any] = {
        "tensorrt": host.here.tensorrt,
        "cuda_driver": host.here.driver,
        "compute_capability": host.here.compute_capability,
        "device": host.here.device,
        "l4t": host.here.l4t,
        "module": module.title if isinstance(module, Module) else None,
        "power_mode": mode.name,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "libraries": {name: found for name in _PYTHON if (found := _version(name)) is not None},
        "packages": _packages(),
    }
    told = f"TensorRT {host.here.tensorrt}, driver for CUDA {host.here.driver}, L4T {host.here.l4t or 'none'}"
    return Found(f"{told}; {numbers['module'] or host.here.device}, mode {mode.name or 'unknown'}", numbers)


def sensors(host: Host) -> Found:
    """Whether the module's power and temperature can be read."""
    report = host.survey()
    numbers = report.model_dump(mode="json", by_alias=True)
    if report.module is None and host.here.l4t is None:
        raise CheckSkipped(f"this is no Jetson: {report.module_reason}")
    reasons = [
        f"no {what}: {reason}"
        for what, source, reason in (
            ("power", report.power_source, report.power_reason),
            ("temperature", report.temperature_source, report.temperature_reason),
        )
        if source is None
    ]
    if report.module is None:
        reasons.append(f"the module is not known: {report.module_reason}")
    if reasons:
        raise CheckFailed("; ".join(reasons), numbers, remedy="edge-runtime status --sensors says more")
    by_name = {source.name: source for source in report.sources}
    watts, tj_c = by_name[str(report.power_source)].watts, by_name[str(report.temperature_source)].tj_c
    return Found(f"{watts} W from {report.power_source}, Tj {tj_c} degC from {report.temperature_source}", numbers)


def gstreamer(host: Host) -> Found:
    """Whether the hardware's decoder, converter and CSI cameras can be reached."""
    if host.here.l4t is None:
        raise CheckSkipped("this is no Jetson: its decoder is another one")
    find = _find_element if host.find_element is None else host.find_element
    found = {name: find(name) for name in _ELEMENTS}
    if missing := [name for name, there in found.items() if not there]:
        packages = sorted({PACKAGES[name] for name in missing})
        raise CheckFailed(
            f"GStreamer has no {', '.join(missing)}", {"elements": found}, remedy=f"install {', '.join(packages)}"
        )
    return Found(f"{', '.join(_ELEMENTS)} are there", {"elements": found})


def memory(host: Host) -> Found:
    """Whether there is enough for a build, which takes more than a run does."""
    free = host.available_bytes()
    if free is None:
        raise CheckFailed("nothing tells how much memory is free (/proc/meminfo)")
    wanted = estimate(host.model_bytes, free)
    numbers = {"available_bytes": free, "build_bytes": wanted.total_bytes, "reserve_bytes": RESERVE_BYTES}
    told = f"{free / MiB:.0f} MiB are free, and a build takes {wanted.told}"
    if free < wanted.total_bytes + RESERVE_BYTES:
        raise CheckFailed(told, numbers, remedy="stop what else runs here (the desktop, a daemon)")
    return Found(told, numbers)


CHECKS: Mapping[str, Callable[[Host], Found]] = {
    "versions": versions,
    "sensors": sensors,
    "gstreamer": gstreamer,
    "memory": memory,
}


def _find_element(name: str) -> bool:
    from edge_runtime.camera.gstreamer import load

    return load().Gst.ElementFactory.find(name) is not None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _packages() -> dict[str, str]:
    """Of Debian's packages those that are installed, with their versions."""
    command = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n", *_APT]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_APT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    rows = [line.split() for line in answer.stdout.splitlines()]
    return {row[1]: row[2] for row in rows if len(row) == 3 and row[0] == "installed"}
