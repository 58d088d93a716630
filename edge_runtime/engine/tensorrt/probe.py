"""What this device is to TensorRT: is there a driver, is there a TensorRT, and which of each?"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_runtime.engine.tensorrt.api import CudaLibrary, TensorRt
from edge_runtime.engine.tensorrt.cuda import Cuda
from edge_runtime.errors import EngineError

NO_DEVICE = frozenset({"tensorrt_missing", "tensorrt_old", "no_gpu_driver", "cuda_missing"})
"""Codes of the errors that say: TensorRT cannot be used on this machine."""
_LIBRARY = "libcuda.so.1"
_OLDEST_MAJOR = 10
_REASONS = {
    100: "it finds no GPU",
    803: "the driver's library and its kernel module are of different versions",
    804: "this CUDA is too new for the driver",
    999: "it does not say why; on a Jetson, is this user in the groups video and render?",
}
_RELEASE = re.compile(r"R(\d+)\s*\(release\),\s*REVISION:\s*([\d.]+)")


@dataclass(frozen=True, slots=True)
class Here:
    """The device as a plan depends on it. `compute_capability` and `driver` (the CUDA version that the driver supports)
    as "8.7"; `device` is the board's model, else the GPU's name; `l4t` is None where this is no Jetson."""

    tensorrt: str
    compute_capability: str
    device: str
    driver: str
    l4t: str | None = None


def require_driver(load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Prove that the CUDA driver answers. To be called before any TensorRT object is made: without a driver, those of
    TensorRT 11 crash the process.

    Raises EngineError (code "no_gpu_driver").
    """
    remedy = (
        "on a Jetson, look at this user's groups, and in a container at its runtime: docs/jetson.md; where there is no "
        'NVIDIA GPU, use backend = "onnxruntime"'
    )
    try:
        library: CudaLibrary = load(_LIBRARY)
        number = int(library.cuInit(0))
    except (OSError, AttributeError) as error:
        message = f"there is no NVIDIA driver: {error}"
        raise EngineError(message, code="no_gpu_driver", where=_LIBRARY, remedy=remedy) from None
    if number:
        reason = _REASONS.get(number, "see NVIDIA's list of CUresult")
        message = f"the NVIDIA driver does not start: CUDA error {number}: {reason}"
        raise EngineError(message, code="no_gpu_driver", where=_LIBRARY, remedy=remedy)


def import_tensorrt(load: Callable[[str], Any] = importlib.import_module) -> TensorRt:
    """The module `tensorrt`. Raises EngineError (code "tensorrt_missing" or "tensorrt_old")."""
    try:
        trt: TensorRt = load("tensorrt")
    except Exception as error:  # noqa: BLE001  its libraries raise errors of their own kinds
        raise EngineError(
            f"TensorRT cannot be imported: {error}",
            code="tensorrt_missing",
            where="tensorrt",
            remedy="on a Jetson it comes from JetPack's apt packages and is seen through a venv made with "
            "--system-site-packages, never from PyPI, whose builds know no Jetson: docs/jetson.md has the packages",
        ) from None
    version = str(trt.__version__)
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) < _OLDEST_MAJOR:
        raise EngineError(
            f"TensorRT {version} is too old: {_OLDEST_MAJOR}.0 is the oldest that is used",
            code="tensorrt_old",
            where="tensorrt",
            remedy="JetPack 6 brings 10.3",
        )
    return trt


def look(trt: TensorRt, cuda: Cuda, root: Path = Path("/")) -> Here:
    """What this device is. On the owner's thread, with the door started; files are read below `root`.

    Raises CudaError.
    """
    major, minor = cuda.compute_capability()
    driver = cuda.driver_version()
    return Here(
        tensorrt=str(trt.__version__),
        compute_capability=f"{major}.{minor}",
        device=_board(root) or cuda.device_name(),
        driver=f"{driver // 1000}.{driver % 1000 // 10}",
        l4t=_l4t(root),
    )


def _board(root: Path) -> str | None:
    text = _read(root / "proc/device-tree/model")
    return None if text is None else text.rstrip("\0 \n") or None


def _l4t(root: Path) -> str | None:
    """ "36.4.3" of "# R36 (release), REVISION: 4.3, ..." """
    found = _RELEASE.search(_read(root / "etc/nv_tegra_release") or "")
    return None if found is None else f"{found[1]}.{found[2]}"


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return None
