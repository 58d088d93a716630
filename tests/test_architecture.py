"""The import contracts hold, and they bite; modules import without the libraries of the device."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

LINT = "from importlinter.cli import lint_imports_command as main; main()"

PLANTED = {
    "a lower floor imports a higher one": ("records/planted.py", "import edge_runtime.engine", "point down only"),
    "a room imports its neighbour": ("camera/planted.py", "import edge_runtime.engine", "point down only"),
    "a module without a floor": ("helpers.py", "", "not listed as layers"),
    "a simulator at run time": ("cli/planted.py", "import edge_runtime.sim", "Simulators"),
    "a simulator below app": ("pipeline/planted.py", "import edge_runtime.sim", "point down only"),
    "onnxruntime beside its door": ("pipeline/planted.py", "import onnxruntime", "onnxruntime"),
    "av beside its door": ("camera/planted.py", "import av.container", "av"),
    "a lazy import beside the door": ("web/__init__.py", "def f() -> None:\n    import paho.mqtt.client", "paho"),
    "tensorrt beside its door": ("hardware/planted.py", "import tensorrt", "tensorrt"),
    "cuda beside its door": ("engine/planted.py", "from cuda.bindings import runtime", "tensorrt, pycuda, cuda"),
    "gi beside its door": ("camera/planted.py", "from gi.repository import Gst", "gi"),
    "jtop beside its door": ("hardware/planted.py", "import jtop", "jtop"),
    "amqtt beside its door": ("mqtt/planted.py", "import amqtt.broker", "amqtt"),
    "tuf beside its door": ("control/__init__.py", "from tuf.ngclient import Updater", "tuf"),
    "cryptography beside its door": ("web/__init__.py", "from cryptography import x509", "cryptography"),
    "onnx beside its door": ("engine/planted.py", "import onnx", "onnx, onnxslim"),
    "matplotlib beside its door": ("engine/planted.py", "import matplotlib.figure", "jinja2, matplotlib"),
    "jinja2 beside its door": ("web/__init__.py", "import jinja2", "jinja2, matplotlib"),
    "tomlkit beside its door": ("engine/planted.py", "import tomlkit", "tomlkit"),
    "cv2 beside its door": ("camera/planted.py", "import cv2", "cv2"),
    "xxhash beside its door": ("pipeline/planted.py", "import xxhash", "xxhash"),
}

OPTIONAL = [
    "amqtt",
    "cuda",
    "gi",
    "jinja2",
    "jtop",
    "matplotlib",
    "onnx",
    "onnxslim",
    "pycocotools",
    "pycuda",
    "securesystemslib",
    "tensorrt",
    "tomlkit",
    "tuf",
]
"""Libraries that an extra or the device brings."""

DOORS = [
    "app.capturing",
    "app.evaluate",
    "app.halving",
    "app.quantizing",
    "camera.gstreamer",
    "engine.tensorrt",
    "fleet",
    "hardware.jtop",
    "mqtt.embedded",
    "prepare",
]
"""The modules and folders that may need them."""

IMPORT_ALL = f"""
import importlib, pkgutil, sys
import edge_runtime

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL!r}:
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Absent())
doors = tuple(f"edge_runtime.{{door}}." for door in {DOORS!r})

def walk(package):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if (module.name + ".").startswith(doors) or module.name.endswith(".__main__"):
            continue
        loaded = importlib.import_module(module.name)
        if module.ispkg:
            walk(loaded)

walk(edge_runtime)
print("cv2" in sys.modules)
"""


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", LINT, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package that may be spoilt."""
    ignored = shutil.ignore_patterns("__pycache__", "_bundled")
    shutil.copytree(ROOT / "edge_runtime", tmp_path / "edge_runtime", ignore=ignored)
    shutil.copy(ROOT / ".importlinter", tmp_path)
    return tmp_path / "edge_runtime"


def test_contracts_hold_on_the_package() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("case", PLANTED)
def test_contract_bites(case: str, package: Path) -> None:
    path, code, contract = PLANTED[case]
    planted = package / path
    planted.parent.mkdir(exist_ok=True)
    planted.parent.joinpath("__init__.py").touch()
    planted.write_text(code + "\n")

    done = lint(package.parent)

    assert done.returncode == 1, done.stdout + done.stderr
    assert contract in done.stdout.partition("Broken contracts")[2]


def test_every_module_but_the_doors_imports_without_optional_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n", "cv2 is loaded by an import; it is to be imported where it draws"
