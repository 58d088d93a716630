"""What this device is; and plain words where it is none, before a TensorRT object could crash the process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor
from edge_runtime.engine.tensorrt.cuda import Cuda, open_cuda, sticky_in
from edge_runtime.engine.tensorrt.probe import Here, import_tensorrt, look, require_driver
from edge_runtime.engine.tensorrt.pycuda_door import PyCudaDoor
from edge_runtime.errors import EngineError


class Door:
    def compute_capability(self) -> tuple[int, int]:
        return (8, 7)

    def driver_version(self) -> int:
        return 12060

    def device_name(self) -> str:
        return "Orin"


def test_a_jetson(tmp_path: Path) -> None:
    (tmp_path / "proc/device-tree").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "proc/device-tree/model").write_bytes(b"NVIDIA Jetson Orin Nano Developer Kit\0")
    (tmp_path / "etc/nv_tegra_release").write_text("# R36 (release), REVISION: 4.3, GCID: 38968081, BOARD: generic\n")
    found = look(SimpleNamespace(__version__="10.3.0"), cast(Cuda, Door()), tmp_path)
    assert found == Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano Developer Kit", "12.6", "36.4.3")


def test_another_machine_with_a_gpu(tmp_path: Path) -> None:
    found = look(SimpleNamespace(__version__="11.4.1.2"), cast(Cuda, Door()), tmp_path)
    assert found == Here("11.4.1.2", "8.7", "Orin", "12.6", None)


def refused(call: Any, *arguments: Any) -> EngineError:
    with pytest.raises(EngineError) as caught:
        call(*arguments)
    assert caught.value.remedy
    assert caught.value.where
    return caught.value


class Driver:
    """libcuda, as ctypes loads it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[object] = []

    def load(self, name: str) -> Driver:
        self.calls.append(name)
        return self

    def cuInit(self, flags: int) -> int:  # noqa: N802
        self.calls.append(flags)
        return self.number


def test_no_driver() -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    error = refused(require_driver, missing)
    assert error.code == "no_gpu_driver"
    assert "libcuda.so.1" in error.message


@pytest.mark.parametrize(("number", "words"), [(100, "no GPU"), (999, "999"), (804, "too new"), (7, "CUDA error 7")])
def test_a_driver_that_does_not_start(number: int, words: str) -> None:
    error = refused(require_driver, Driver(number).load)
    assert error.code == "no_gpu_driver"
    assert words in error.message


def test_a_driver_that_starts() -> None:
    driver = Driver(0)
    require_driver(driver.load)
    assert driver.calls == ["libcuda.so.1", 0]


def importer(**modules: Any) -> Any:
    def load(name: str) -> Any:
        found = modules.get(name.replace(".", "_"))
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}")
        if isinstance(found, Exception):
            raise found
        return found

    return load


def test_tensorrt_is_there() -> None:
    trt = SimpleNamespace(__version__="10.3.0")
    assert import_tensorrt(importer(tensorrt=trt)) is trt


def test_no_tensorrt_and_where_it_comes_from() -> None:
    error = refused(import_tensorrt, importer())
    assert error.code == "tensorrt_missing"
    assert error.remedy is not None
    assert "--system-site-packages" in error.remedy
    damaged = refused(import_tensorrt, importer(tensorrt=OSError("libnvinfer.so.10: cannot open shared object file")))
    assert "libnvinfer.so.10" in damaged.message


@pytest.mark.parametrize("version", ["8.6.1", "9.1.0", "?"])
def test_a_tensorrt_that_is_too_old(version: str) -> None:
    error = refused(import_tensorrt, importer(tensorrt=SimpleNamespace(__version__=version)))
    assert error.code == "tensorrt_old"
    assert version in error.message


def test_pycuda_first_then_the_bindings_old_and_new() -> None:
    both = importer(pycuda_driver=SimpleNamespace(), cuda_bindings_driver=SimpleNamespace())
    assert isinstance(open_cuda(load=both), PyCudaDoor)
    assert isinstance(open_cuda("cuda.bindings", load=both), CudaBindingsDoor)
    assert isinstance(open_cuda(load=importer(cuda_bindings_driver=SimpleNamespace())), CudaBindingsDoor)
    assert isinstance(open_cuda(load=importer(cuda_cuda=SimpleNamespace())), CudaBindingsDoor)
    broken = importer(pycuda_driver=ImportError("libcuda.so.1"), cuda_cuda=SimpleNamespace())
    assert isinstance(open_cuda(load=broken), CudaBindingsDoor)


@pytest.mark.parametrize("prefer", [None, "pycuda", "cuda.bindings"])
def test_no_cuda_says_what_was_tried_and_what_to_do(prefer: str | None) -> None:
    with pytest.raises(EngineError) as caught:
        open_cuda(prefer, load=importer())
    error = caught.value
    assert error.code == "cuda_missing"
    assert ("pycuda.driver" in error.message) == (prefer != "cuda.bindings")
    assert ("cuda.bindings.driver" in error.message) == (prefer != "pycuda")
    assert error.remedy is not None
    assert "docs/jetson.md" in error.remedy


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("cuEventQuery failed: an illegal memory access was encountered", 700),
        ("Error Code 1: Cuda Runtime (unspecified launch failure)", 719),
        ("cuMemAlloc failed: out of memory", None),
        ("cuStreamCreate failed: invalid argument", None),
    ],
)
def test_sticky_errors_are_known_by_their_words(text: str, number: int | None) -> None:
    assert sticky_in(text) == number
