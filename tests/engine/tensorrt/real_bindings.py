"""The real Python bindings of TensorRT and CUDA, without a GPU, a driver or their libraries: names and signatures.

The wheels are fetched once into a cache of this user's. TensorRT's extension module is linked to three libraries; of
them it needs but ten functions to be imported, which stubs have: see STUB. No object can be made with those.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

VERSIONS = ("10.3.0", "11.4.0.106")
"""TensorRT's: the oldest and the newest that the product is for."""
BETWEEN = ("10.13.3.9", "10.16.1.11")
"""Those of JetPack 7.0 and 7.2."""
CUDA_BINDINGS = {(3, 10): "12.9.4", (3, 11): "13.5.0", (3, 12): "13.5.0"}
PATHFINDER = "1.4.3"
NVRTC = "12.6.85"

STUB = """
#define STUB(name) void *name(void) { return 0; }
STUB(createInferBuilder_INTERNAL)
STUB(createInferRefitter_INTERNAL)
STUB(createInferRuntime_INTERNAL)
STUB(createNvOnnxParser_INTERNAL)
STUB(createNvOnnxParserRefitter_INTERNAL)
STUB(getBuilderPluginRegistry)
STUB(getPluginRegistry)
STUB(initLibNvInferPlugins)
int getNvOnnxParserVersion(void) { return 0; }
int getInferLibVersion(void) { return 0; }
"""

_DUMP_TENSORRT = r"""
import json, sys
import tensorrt_bindings as trt

def member(owner, name, value):
    if isinstance(value, property):
        doc = getattr(value.fget, "__doc__", None) or ""
        return {"kind": "property", "doc": doc, "settable": value.fset is not None}
    if name in getattr(owner, "__members__", {}):
        return {"kind": "member", "value": int(value)}
    if callable(value) and not isinstance(value, type):
        return {"kind": "method", "doc": getattr(value, "__doc__", None) or ""}
    return {"kind": "value", "doc": type(value).__qualname__}

def describe(kind):
    special = ("__init__", "__len__", "__getitem__", "__setitem__", "__eq__")
    return {
        "doc": kind.__doc__ or "",
        "enum": hasattr(kind, "__members__"),
        "members": {n: member(kind, n, v) for n, v in vars(kind).items() if not n.startswith("_") or n in special},
        "classes": {n: describe(v) for n, v in vars(kind).items() if isinstance(v, type) and not n.startswith("_")},
    }

classes, values, functions = {}, {}, {}
for name in dir(trt):
    value = getattr(trt, name)
    if isinstance(value, type):
        classes[name] = describe(value)
    elif not name.startswith("__") and type(value).__name__ != "module":
        values[name] = type(value).__name__
        if callable(value):
            functions[name] = value.__doc__ or ""
json.dump({"version": trt.__version__, "classes": classes, "values": values, "functions": functions}, sys.stdout)
"""

_DUMP_CUDA = r"""
import enum, inspect, json, sys
import cuda.bindings.driver as driver
import cuda.bindings.nvrtc as nvrtc

functions, enums, classes, constants = {}, {}, [], {}
for name in dir(driver):
    value = getattr(driver, name)
    if isinstance(value, type) and issubclass(value, int) and hasattr(value, "__members__"):
        enums[name] = {each: int(getattr(value, each)) for each in value.__members__}
    elif isinstance(value, type):
        classes.append(name)
    elif isinstance(value, int):
        constants[name] = value
    elif callable(value) and name.startswith("cu"):
        functions[name] = list(inspect.signature(value).parameters)
compiler = [name for name in dir(nvrtc) if name.startswith("nvrtc") and callable(getattr(nvrtc, name))]
# A sticky error's own words: "To continue using CUDA, the process must be terminated and relaunched."
told = {each: " ".join((getattr(driver.CUresult, each).__doc__ or "").split()) for each in driver.CUresult.__members__}
sticky = [int(getattr(driver.CUresult, each)) for each, words in told.items() if "must be terminated" in words]
found = {"functions": functions, "enums": enums, "classes": classes, "constants": constants, "nvrtc": compiler}
found["sticky"] = sticky
json.dump(found, sys.stdout)
"""


class Unavailable(Exception):
    """Why the real bindings cannot be had here."""


_failed: dict[Path, str] = {}


def cache() -> Path:
    """Where they are kept, for this interpreter."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"
    return Path(home) / "edge-runtime-tests" / "bindings" / tag


def tensorrt(version: str) -> dict[str, Any]:
    """Every public class, member and signature of TensorRT's bindings. Raises Unavailable."""
    folder = _unpacked("tensorrt-cu12-bindings", version)
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        _compile(folder / f"lib{name}.so.{version.partition('.')[0]}")
    return _dump(folder, _DUMP_TENSORRT, [folder])


def cuda_driver() -> dict[str, Any]:
    """The functions, enumerations and classes of `cuda.bindings.driver`. Raises Unavailable."""
    paths = cuda_paths()
    return _dump(paths[0], _DUMP_CUDA, paths)


def cuda_paths() -> list[Path]:
    """The folders of `cuda.bindings`: parts of the one package `cuda`, which has no __init__. Raises Unavailable."""
    bindings = _unpacked("cuda-bindings", CUDA_BINDINGS[sys.version_info[:2]])
    return [bindings, _unpacked("cuda-pathfinder", PATHFINDER)]


def stub_driver() -> Path:
    """The folder of a driver's library made of stub_driver.c. Raises Unavailable."""
    source = Path(__file__).with_name("stub_driver.c").read_text()
    folder = cache() / f"driver-{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    _compile(folder / "libcuda.so.1", source)
    return folder


def nvrtc() -> Any:
    """The real NVRTC of JetPack 6's CUDA, which compiles for a GPU that is not here: what `ctypes.CDLL` gives.

    Raises Unavailable.
    """
    folder = _unpacked("nvidia-cuda-nvrtc-cu12", NVRTC) / "nvidia" / "cuda_nvrtc" / "lib"
    ctypes.CDLL(str(folder / f"libnvrtc-builtins.so.{NVRTC.rpartition('.')[0]}"), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(folder / "libnvrtc.so.12"))


def libraries(version: str) -> bytes:
    """The extension module's own bytes: the names of the methods that it looks for in Python are in it."""
    return (_unpacked("tensorrt-cu12-bindings", version) / "tensorrt_bindings" / "tensorrt.so").read_bytes()


def _dump(folder: Path, program: str, paths: list[Path]) -> dict[str, Any]:
    kept = folder / f"dump-{hashlib.sha256(program.encode()).hexdigest()[:12]}.json"
    if not kept.is_file():
        text = ":".join(map(str, paths))
        environment = os.environ | {"PYTHONPATH": text, "LD_LIBRARY_PATH": str(folder)}
        answer = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100
        )
        if answer.returncode:
            raise Unavailable(f"{folder.name} cannot be imported: {answer.stderr.strip()[-400:]}")
        _place(kept, answer.stdout.encode())
    content: dict[str, Any] = json.loads(kept.read_bytes())
    return content


def _unpacked(package: str, version: str) -> Path:
    folder = cache() / f"{package}-{version}"
    if folder.is_dir():
        return folder
    if folder in _failed:  # once is enough: without a network each try takes long
        raise Unavailable(_failed[folder])
    cache().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache()) as place:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--disable-pip-version-check", "-q", "-d", place, f"{package}=={version}"]
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=100)
        except subprocess.TimeoutExpired:
            _failed[folder] = f"{package} {version} does not download in 100 s"
            raise Unavailable(_failed[folder]) from None
        if answer.returncode:
            _failed[folder] = f"{package} {version} cannot be downloaded: {answer.stderr.strip()[-400:]}"
            raise Unavailable(_failed[folder])
        (wheel,) = Path(place).glob("*.whl")
        fresh = Path(place) / "unpacked"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(fresh)
        if not folder.is_dir():
            shutil.move(fresh, folder)
    return folder


def _compile(library: Path, source: str = STUB) -> None:
    if library.is_file():
        return
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("there is no C compiler (cc)")
    with tempfile.TemporaryDirectory(dir=library.parent) as place:
        fresh = Path(place) / library.name
        command = [compiler, "-shared", "-fPIC", "-x", "c", f"-Wl,-soname,{library.name}", "-o", str(fresh), "-"]
        answer = subprocess.run(command, input=source, capture_output=True, text=True, timeout=100)
        if answer.returncode:
            raise Unavailable(f"{library.name} cannot be compiled: {answer.stderr.strip()[-400:]}")
        fresh.replace(library)


def _place(path: Path, content: bytes) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as fresh:
        fresh.write(content)
    Path(fresh.name).replace(path)
