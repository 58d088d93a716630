"""A throw-away Debian host with a real systemd, and the product installed in it.

What is slow and the same for every run (Debian, the wheels the product needs) is made once and kept outside the
repository; every run works on a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path

import pytest

# By name, so that type checking for 3.10 does not need tomli installed.
tomllib = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")

ROOT = Path(__file__).resolve().parents[2]
TOOL = Path(os.environ.get("EDGE_RUNTIME_SYSTEMD_HOST") or ROOT.parent / "shared" / "tools" / "systemd-host")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-runtime-tests"
PREFIX = Path("opt/edge-runtime")
_RECIPE = "1"
"""Count it up when `_make_base` makes something else."""


class Host:
    """A booted host. `cursor` says where in the journal a test begins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._pid: str | None = None
        self._cursor = ""

    def boot(self) -> None:
        done = subprocess.run([TOOL, "boot", self.root], capture_output=True, text=True, timeout=60)
        if done.returncode:
            pytest.skip(f"no host with a systemd can be booted here: {done.stderr.strip()}")
        self._pid = done.stdout.strip()

    def power_off(self) -> None:
        if self._pid is not None:
            subprocess.run([TOOL, "stop", self._pid], check=True)
            # its last mount goes with its last process
            while Path(f"/proc/{self._pid}").exists():
                time.sleep(0.02)

    def try_run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside, whatever it returns."""
        assert self._pid is not None
        return subprocess.run(
            [TOOL, "in", self._pid, self.root, *command],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    def run(self, *command: str, timeout_s: float = 60) -> str:
        """Run a command inside; what it wrote to standard output."""
        done = self.try_run(*command, timeout_s=timeout_s)
        assert done.returncode == 0, f"{command}: {done.returncode}: {done.stdout}{done.stderr}\n{self.journal()}"
        return done.stdout

    def write(self, path: str, text: str) -> None:
        """Put a file into its file system; not below /run or /tmp, which are mounted over."""
        target = self.root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def mark(self) -> None:
        """From here on is what `journal` shows."""
        self.run("journalctl", "--sync")
        self._cursor = self.run("journalctl", "-n", "0", "--show-cursor").split("-- cursor: ")[1].strip()

    def journal(self) -> str:
        """The service's lines since `mark`, systemd's own about it among them."""
        return self.try_run("journalctl", "-u", "edge-runtime", "-o", "cat", f"--after-cursor={self._cursor}").stdout

    def show(self, name: str) -> str:
        """A property of the service."""
        return self.run("systemctl", "show", "edge-runtime", "-P", name).strip()

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = 30) -> None:
        """Until `condition` is true; on failure with the journal. Slower than `wait_until`: a look is a process."""
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"{what} did not come within {timeout_s:g} s; journal:\n{self.journal()}"
            time.sleep(0.05)

    def wait_for(self, text: str, timeout_s: float = 30) -> None:
        """Until the service's journal has `text`."""
        self.wait(lambda: text in self.journal(), repr(text), timeout_s)


@contextmanager
def made_host(folder: Path) -> Iterator[Host]:
    """A host with the product in `folder`, not booted yet. Skips where this machine cannot have one."""
    with _locked():
        base = _base()
        with _copy_of(base, folder) as root:
            _install_product(root, folder)
            yield Host(root)


@contextmanager
def _locked() -> Iterator[None]:
    """All hosts share one tree of control groups: one at a time. Skips where this machine cannot have one."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _require()
        yield


def make_base_meanwhile() -> None:
    """Make what hosts start from, where it is not there yet, in a process that belongs to nobody and takes only
    what time the tests leave (they wait most of it). Whether it succeeds is for the one who needs it to see."""
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # nobody may wait for the end of our output
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    with suppress(pytest.skip.Exception), _locked():
        _base()
    os._exit(0)


def _require() -> None:
    if not TOOL.is_file():
        pytest.skip("no tool that boots a host with a systemd (EDGE_RUNTIME_SYSTEMD_HOST names it)")
    if os.geteuid() != 0:
        pytest.skip("booting a host with a systemd takes root")
    if shutil.which("debootstrap") is None:
        # here only: nobody's own machine gets packages without being asked
        apt = shutil.which("apt-get")
        install = "apt-get update -qq && apt-get install -y -qq --no-install-recommends debootstrap"
        if apt is None or subprocess.run(["sh", "-c", install], capture_output=True).returncode:
            pytest.skip("no debootstrap, and apt-get cannot install it")


def _dependencies() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [str(dependency) for dependency in project["dependencies"]]


def _base() -> Path:
    """Debian with a systemd, a Python and what the product needs; made where it is not there yet."""
    recipe = "\n".join([_RECIPE, platform.machine(), *_dependencies()])
    base = CACHE / f"host-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not base.is_dir():
        for old in CACHE.glob("host-*"):
            shutil.rmtree(old)
        partial = CACHE / f"host-partial-{os.getpid()}"
        _make_base(partial)
        partial.rename(base)
    return base


def _make_base(root: Path) -> None:
    made = subprocess.run([TOOL, "make", root], capture_output=True, text=True, timeout=400)
    if made.returncode:
        shutil.rmtree(root, ignore_errors=True)
        pytest.skip(f"debootstrap failed: {(made.stderr + made.stdout)[-300:]}")
    shutil.rmtree(root / "var/cache/apt/archives", ignore_errors=True)
    subprocess.run(["chroot", root, "python3", "-m", "venv", "--without-pip", f"/{PREFIX}"], check=True)
    _pip_install(root, _dependencies())


def _pip_install(root: Path, what: Sequence[str | Path], *options: str) -> None:
    """Install into the host's virtual environment from outside: it has no network, and need not have our Python."""
    packages = next((root / PREFIX / "lib").glob("python3.*")) / "site-packages"
    version = packages.parent.name.removeprefix("python")
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--root-user-action=ignore",
    ]
    command += ["--target", packages, "--python-version", version, "--only-binary=:all:", *options, *what]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def _copy_of(base: Path, folder: Path) -> Iterator[Path]:
    """A root file system that starts as `base` and may be written to: layered over it, else copied."""
    root, upper, work = folder / "root", folder / "upper", folder / "work"
    for path in (root, upper, work):
        path.mkdir()
    options = f"lowerdir={base},upperdir={upper},workdir={work}"
    mounted = subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], capture_output=True)
    try:
        if mounted.returncode:
            subprocess.run(["cp", "-a", f"{base}/.", root], check=True)
        yield root
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", root], check=True)
        for path in (root, upper, work):
            shutil.rmtree(path, ignore_errors=True)


def _install_product(root: Path, folder: Path) -> None:
    """The wheel, its command, and what stands in systemd/, as an administrator would."""
    build: list[str | Path] = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "dist"]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    _pip_install(root, list((folder / "dist").glob("*.whl")), "--no-deps")
    command = root / PREFIX / "bin/edge-runtime"
    # what pip would have made, had it been run inside
    code = f"#!/{PREFIX}/bin/python\nimport sys\nfrom edge_runtime.__main__ import main\n\nsys.exit(main())\n"
    command.write_text(code, encoding="ascii")
    command.chmod(0o755)
    for source, target in {
        "edge-runtime.service": "etc/systemd/system/edge-runtime.service",
        "edge-runtime.sysusers": "usr/lib/sysusers.d/edge-runtime.conf",
        "edge-runtime.tmpfiles": "usr/lib/tmpfiles.d/edge-runtime.conf",
    }.items():
        (root / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / "systemd" / source, root / target)
    subprocess.run(["chroot", root, "systemd-sysusers"], check=True, capture_output=True)


if __name__ == "__main__":
    make_base_meanwhile()
