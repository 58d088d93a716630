"""The fakes in processes of their own: a folder for PYTHONPATH in which `tensorrt` and `pycuda.driver` are the fakes.

What the device is, and what goes wrong on it, is said in a file that every such process reads when it begins; what was
violated there is added to another, which has to stay empty.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.conftest import ROOT

PLACE = "FAKE_GPU"
"""The environment's variable with the folder."""
_START = "from tests.engine.tensorrt.fake_process import install\ninstall()\n"
_GATE_S = 60.0


class FakeDevice:
    """The folder, from the test's side."""

    def __init__(self, folder: Path, **device: Any) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(_START)
        self.become(**device)

    def become(self, version: str = "10.3.0", **device: Any) -> None:
        """Another one, for what starts from now on. `machine`: what Machine takes; `faults`: rows of (call, value,
        after, times); `gate`: builds wait for a file of that name in the folder; `crash`: a signal that ends a build;
        `dla_cores`, `gpu_only`: see Machine; `bindings`: whether there is cuda.bindings as well."""
        (self.folder / "device.json").write_text(json.dumps({"version": version, **device}))

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to have it."""
        path = os.pathsep.join([str(self.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {"PYTHONPATH": path, PLACE: str(self.folder)}

    def builds(self) -> int:
        """How many builds have begun."""
        log = self.folder / "builds.txt"
        return len(log.read_text().splitlines()) if log.exists() else 0

    def misses(self) -> list[int]:
        """For each build, how many entries its timing cache had when it began."""
        log = self.folder / "builds.txt"
        return [int(line) for line in log.read_text().splitlines()] if log.exists() else []

    def check(self) -> None:
        """Fails the test when anything was violated in any of the processes."""
        log = self.folder / "violations.txt"
        assert not log.exists(), log.read_text()


def install() -> None:
    """Put the fakes in the place of the libraries, in this process. Imports nothing heavy before they are wanted."""
    folder = Path(os.environ[PLACE])
    sys.meta_path.insert(0, _Finder(folder))
    real = ctypes.CDLL

    class Driver:
        def cuInit(self, flags: int) -> int:  # noqa: N802
            return int(_device(folder).get("cu_init", 0))

    def load(name: Any, *arguments: Any, **keywords: Any) -> Any:
        if name == "libnvrtc.so.12":
            return _nvrtc()
        if name != "libcuda.so.1":
            return real(name, *arguments, **keywords)
        if _device(folder).get("no_driver"):
            raise OSError("libcuda.so.1: cannot open shared object file: No such file or directory")
        return Driver()

    ctypes.CDLL = load  # type: ignore[assignment,misc]


def _device(folder: Path) -> dict[str, Any]:
    device: dict[str, Any] = json.loads((folder / "device.json").read_text())
    return device


_NAMES = ("tensorrt", "pycuda", "pycuda.driver", "cuda", "cuda.bindings", "cuda.bindings.driver")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the fakes under the libraries' names; both are of one machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._modules: dict[str, Any] | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "tensorrt" and _device(self._folder).get("no_tensorrt"):
            return None
        if fullname.startswith("cuda") and not _device(self._folder).get("bindings"):
            return None
        if fullname in _NAMES:
            packages = ("pycuda", "cuda", "cuda.bindings")
            return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname in packages)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        if self._modules is None:
            self._modules = _make(self._folder)
        return self._modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        pass


def _nvrtc() -> Any:
    from tests.engine.tensorrt.fake_nvrtc import FakeNvrtc

    return FakeNvrtc()


def _make(folder: Path) -> dict[str, Any]:
    from edge_runtime.engine.tensorrt.letterbox import NAME
    from tests.engine.tensorrt import kernel_cpu
    from tests.engine.tensorrt.fake_bindings import make_driver
    from tests.engine.tensorrt.fake_machine import Machine
    from tests.engine.tensorrt.fake_pycuda import make_pycuda
    from tests.engine.tensorrt.fake_tensorrt import make_tensorrt

    device = _device(folder)
    options: dict[str, Any] = dict(device.get("machine", {}))
    if "capability" in options:
        options["capability"] = tuple(options["capability"])
    machine = Machine(**options)
    machine.dla_cores = device.get("dla_cores", 0)
    machine.gpu_only = frozenset(device.get("gpu_only", ()))
    for call, value, after, times in device.get("faults", ()):
        machine.inject(call, value, after=after, times=times)
    trt = make_tensorrt(machine, device["version"])
    _watch_builds(trt, folder, device)

    machine.violations = _Told(folder)
    machine.kernels[NAME] = kernel_cpu.on_machine
    packages = {name: ModuleType(name) for name in ("pycuda", "cuda", "cuda.bindings")}
    doors = {"pycuda.driver": make_pycuda(machine), "cuda.bindings.driver": make_driver(machine)}
    return {"tensorrt": trt, **packages, **doors}


class _Told(list[str]):
    """Violations, each written down at once: these processes end by _exit."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def append(self, what: str) -> None:
        with (self._folder / "violations.txt").open("a") as stream:
            stream.write(f"{os.getpid()} {' '.join(sys.argv)[:80]}: {what}\n")


def _watch_builds(trt: Any, folder: Path, device: dict[str, Any]) -> None:
    real = trt.Builder.build_serialized_network

    def build_serialized_network(self: Any, network: Any, config: Any) -> Any:
        with (folder / "builds.txt").open("a") as stream:
            stream.write(f"{len(config._cache._known) if config._cache is not None else -1}\n")
        if (crash := device.get("crash")) is not None:
            os.kill(os.getpid(), crash)
        gate, end = device.get("gate"), time.monotonic() + _GATE_S
        while gate is not None and not (folder / gate).exists() and time.monotonic() < end:
            time.sleep(0.01)
        return real(self, network, config)

    trt.Builder.build_serialized_network = build_serialized_network
