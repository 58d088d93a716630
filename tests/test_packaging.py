"""What is published: sdist, wheel from that sdist, and the demo from an installed wheel without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.timeout(600)

MIB = 1024 * 1024


def run(command: list[str | Path], *, cwd: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, f"{command} -> {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_sdist_holds_what_builds_and_tests_it(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "NOTICE", "CHANGELOG.md", ".importlinter",
        "engines/centernet/bundle.toml", "media/vtest.mp4", "scripts/test", "scripts/lib/venv.sh",
        "constraints/jetpack6.txt", "tests/conftest.py", "edge_runtime/__init__.py",
    } <= names  # fmt: skip
    assert not [name for name in names if name.startswith((".venv", ".cache", "edge_runtime/_bundled"))]


def test_wheel_holds_the_package_and_the_demo_only(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    carried = {name.removeprefix("edge_runtime/_bundled/") for name in names if "/_bundled/" in name}
    checkout = {str(path.relative_to(ROOT)) for path in (ROOT / "engines" / "centernet").rglob("*") if path.is_file()}

    assert wheel.name.endswith("-py3-none-any.whl")
    assert carried == checkout | {"media/vtest.mp4"}
    assert "edge_runtime/py.typed" in names
    assert {name.partition("/")[0].rpartition(".")[2] for name in names} == {"edge_runtime", "dist-info"}
    assert not [name for name in names if "__pycache__" in name]
    assert [name for name in names if name.endswith(".dist-info/licenses/NOTICE")]


def test_wheel_size(wheel: Path) -> None:
    assert 5 * MIB < wheel.stat().st_size < 10 * MIB


@pytest.mark.full
def test_demo_runs_from_an_installed_wheel_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    pip: list[str | Path] = [programs / "python", "-m", "pip", "install", "-qq", "--no-input"]
    run([*pip, "--disable-pip-version-check", f"edge-runtime[demo] @ {wheel.as_uri()}"], cwd=tmp_path)

    done = run([programs / "edge-runtime", "demo", "--seconds", "4"], cwd=Path("/"), timeout_s=90)

    assert "window" in done.stdout
    table = done.stdout[done.stdout.rindex("window") :]
    assert "FPS/W" in table
    assert "simulated" in table
