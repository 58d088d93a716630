"""The disk fails at every change that a build makes of it, the power goes at any instant, and what lies there is
damaged: afterwards there is a whole plan or none, and the next build works."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from edge_runtime.app.building import Need, PlanMaker
from edge_runtime.durable import Files, RealFiles, write_atomic
from edge_runtime.engine.store_disk import StoreDisk
from edge_runtime.engine.tensorrt import plans
from edge_runtime.engine.tensorrt.plans import PlanStore
from edge_runtime.errors import EdgeError
from tests.app.build_site import (
    BEFORE,
    CACHE,
    HERE,
    LONG_AGO,
    PLAN,
    Site,
    check_told,
    check_whole,
    need_of,
    refused_by,
    sidecar_of,
    start_anew,
)
from tests.crash import CrashDisk, Key, Tree, frozen, lay_out

ONCE = (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES)
WEEK_S = 7 * 24 * 3600.0
GROWING = ("create", "write", "mkdir", "sync")


class FaultyDisk(RealFiles):
    """The real disk, unsynced to be quick, whose change number `at` fails, and all after it where it `lasts`. A full
    disk refuses only what grows."""

    def __init__(self, at: int, code: int, *, lasts: bool = False) -> None:
        self.at, self._code, self._lasts = at, code, lasts
        self.changes = 0
        self.failed: list[tuple[str, Path]] = []

    def change(self, kind: str, path: Path) -> None:
        self.changes += 1
        if self.changes != self.at and not (self._lasts and self.changes > self.at > 0):
            return
        if self._code == errno.ENOSPC and kind not in GROWING:
            return
        self.failed.append((kind, path))
        raise OSError(self._code, os.strerror(self._code), str(path))

    def create(self, path: Path, mode: int) -> IO[bytes]:
        self.change("create", path)
        return io.BufferedWriter(_Stream(self, path, mode))

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()
        self.change("sync", Path(str(stream.name)))

    def sync_folder(self, path: Path) -> None:
        self.change("sync", path)

    def rename(self, old: Path, new: Path) -> None:
        self.change("rename", new)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self.change("unlink", path)
        super().unlink(path)

    def mkdir(self, path: Path, mode: int) -> None:
        self.change("mkdir", path)
        super().mkdir(path, mode)

    def rmdir(self, path: Path) -> None:
        self.change("rmdir", path)
        super().rmdir(path)

    def chmod(self, path: Path, mode: int) -> None:
        self.change("chmod", path)
        super().chmod(path, mode)


class _Stream(io.FileIO):
    """Half of what is written arrives, where the write fails."""

    def __init__(self, disk: FaultyDisk, path: Path, mode: int) -> None:
        super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))
        self._disk = disk

    def write(self, data: Any, /) -> int:
        try:
            self._disk.change("write", Path(str(self.name)))
        except OSError:
            super().write(bytes(data)[: len(data) // 2])
            raise
        return super().write(data)


# --- what goes on when it happens

Scenario = Callable[[Site, pytest.MonkeyPatch], None]


def build(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.make(monkeypatch)


def take_in(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that came with a bundle."""
    key = site.need.key(HERE)
    with site.store.building():
        site.store.put(PLAN, sidecar_of(site.need).to_json(), key, lambda path: site.prove(plan=path))


def build_and_collect(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made = site.make(monkeypatch)
    with site.store.building():
        site.store.collect({made.plan.key}, set())


def sweep(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.store.sweep()


def nothing(site: Site) -> None:
    pass


def built_before(site: Site) -> None:
    site.put(BEFORE)
    site.put(LONG_AGO)


def damaged_before(site: Site) -> None:
    site.put(HERE)
    place = site.store.root / site.need.key(HERE).digest
    (place / "plan").chmod(0o644)
    (place / "plan").write_bytes(b"torn")


def killed_before(site: Site) -> None:
    """What a SIGKILL leaves in the midst of saving a plan, of removing one, and of keeping the timing cache."""
    site.put(BEFORE)
    for name in (".new-1", ".old-2"):
        (site.store.root / name).mkdir()
        (site.store.root / name / ".plan.1.new").write_bytes(PLAN[:9])
    cache = site.store.timing_cache(HERE)
    cache.with_name(f".{cache.name}.1.new").write_bytes(CACHE[:9])


SCENARIOS: dict[str, tuple[Callable[[Site], None], Scenario]] = {
    "the first build": (nothing, build),
    "a build after an update": (built_before, build),
    "a build over a damaged plan": (damaged_before, build),
    "a plan of a bundle": (built_before, take_in),
    "clearing up": (built_before, build_and_collect),
    "the start after a kill": (killed_before, sweep),
}

USUAL = ("a build after an update", "clearing up")


@pytest.fixture
def need(tmp_path: Path) -> Need:
    return need_of(tmp_path / "bundle")


def prepared(need: Need, root: Path, name: str) -> list[str]:
    """Bring the store to where the scenario begins; the keys that are damaged."""
    root.mkdir(parents=True)
    SCENARIOS[name][0](Site(need, root, FaultyDisk(0, 0)))
    return [need.key(HERE).digest] if SCENARIOS[name][0] is damaged_before else []


def go_on(need: Need, root: Path, damaged: list[str], had: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the daemon has then, the next start, and the next build."""
    if had:
        assert PlanStore(root / "plans").find(need.key(HERE)).plan is not None, "what it had is gone"
    site = start_anew(need, root, FaultyDisk(0, 0), damaged=damaged)
    assert refused_by(site, monkeypatch) is None
    assert site.store.find(need.key(HERE)).fits
    check_whole(site)


# --- a change of the disk fails


def fail_at(need: Need, root: Path, name: str, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch) -> bool:
    """One fault; False where there are not so many changes."""
    damaged = prepared(need, root, name)
    had = SCENARIOS[name][0] is built_before
    site = Site(need, root, disk, now_s=time.time() + WEEK_S)
    failed: EdgeError | None = None
    try:
        SCENARIOS[name][1](site, monkeypatch)
    except EdgeError as error:
        check_told(error)
        failed = error
    place = f"{name}, {disk.failed[:1]}"
    assert failed is None or disk.failed, place
    if failed is not None:
        assert failed.code == "store_write_failed", place
        others = [path for _, path in disk.failed if "timing" not in path.parts]
        there = PlanStore(root / "plans").find(need.key(HERE)).fits
        assert others or there, f"{place}: a plan is lost for the timing cache"
    elif SCENARIOS[name][1] is not sweep:
        assert PlanStore(root / "plans").find(need.key(HERE)).fits, place
    go_on(need, root, damaged, had, monkeypatch)
    return bool(disk.failed) or disk.changes >= disk.at


def fail_everywhere(need: Need, root: Path, name: str, monkeypatch: pytest.MonkeyPatch, *, every: int) -> int:
    modes = [(code, False) for code in ONCE] + [(code, True) for code in (errno.ENOSPC, errno.EROFS, errno.EIO)]
    done = 0
    for number, (code, lasts) in enumerate(modes):
        at = 1 + number % every
        while fail_at(need, root / f"{number}-{at}", name, FaultyDisk(at, code, lasts=lasts), monkeypatch):
            shutil.rmtree(root / f"{number}-{at}")
            at += every
            done += 1
    return done


@pytest.mark.parametrize("name", USUAL)
def test_a_disk_that_fails(need: Need, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_everywhere(need, tmp_path, name, monkeypatch, every=17) >= 7


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_disk_that_fails_anywhere(need: Need, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fail_everywhere(need, tmp_path, name, monkeypatch, every=1) >= 49


# --- the power goes, or a SIGKILL comes


def cut_power(
    need: Need,
    tmp_path: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    at_most: int,
    works: int = 10,
    kind: type[CrashDisk] = CrashDisk,
) -> int:
    """Every prefix of what a scenario does to the disk, with what was not synced there, lost or torn."""
    root = tmp_path / "device"
    damaged = prepared(need, root, name)
    had = SCENARIOS[name][0] is built_before
    disk = kind(root)
    proved = [0]
    site = Site(need, root, disk, now_s=time.time() + WEEK_S)
    site.on_proved = lambda: proved.append(len(disk.trace))
    SCENARIOS[name][1](site, monkeypatch)
    done = len(disk.trace) if SCENARIOS[name][1] is not sweep else None
    seen: dict[tuple[Key, bool, bool], Tree] = {}
    for begun, tree in disk.states(at_most=at_most, seed=11):
        seen[frozen(tree), begun < proved[-1], done is not None and begun >= done] = tree
    for number, ((_, early, late), tree) in enumerate(seen.items()):
        place = tmp_path / f"cut-{number}"
        lay_out(tree, place)
        found = PlanStore(place / "plans").find(need.key(HERE))
        assert not (early and found.fits), "a plan that nobody has proved"
        assert found.fits or not late, "a plan that was promised is gone"
        if number % works == 0:
            go_on(need, place, damaged, had, monkeypatch)
        else:
            assert found.plan is not None or not had, "what it had is gone"
            start_anew(need, place, FaultyDisk(0, 0), damaged=damaged)
        shutil.rmtree(place)
    return len(seen)


@pytest.mark.parametrize("name", USUAL)
def test_the_power_goes(need: Need, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_power(need, tmp_path, name, monkeypatch, at_most=2, works=20) > 10


@pytest.mark.full
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_power_goes_at_any_instant(need: Need, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cut_power(need, tmp_path, name, monkeypatch, at_most=400, works=3) > 15


def test_a_plan_that_is_wrong_leaves_nothing(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_nothing_wrong(need, tmp_path, monkeypatch)


def leave_nothing_wrong(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need, tmp_path, FaultyDisk(0, 0), wrong=True)
    error = refused_by(site, monkeypatch)
    assert error is not None
    assert error.code == "golden_mismatch"
    assert site.store.find(need.key(HERE)).plan is None
    check_whole(site)


# --- who gets it wrong is found out


class Unsynced(CrashDisk):
    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()


class UnsyncedFolders(CrashDisk):
    def sync_folder(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("kind", [Unsynced, UnsyncedFolders])
def test_a_missing_sync_is_found(
    need: Need, tmp_path: Path, kind: type[CrashDisk], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError):
        cut_power(need, tmp_path, "the first build", monkeypatch, at_most=6, kind=kind)


def name_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is given before the proof."""
    real, prove = PlanStore.place, PlanMaker._proved
    proof: list[Any] = []

    def place(self: PlanStore, aside: Path, key: Any) -> Any:
        made = real(self, aside, key)
        maker, need, cancel = proof.pop()
        prove(maker, need, cancel, made.path)
        return made

    def later(self: PlanMaker, need: Need, cancel: Any, plan: Path) -> Any:
        proof.append((self, need, cancel))
        return Site.prove(Site(need, plan.parent), plan=plan)

    monkeypatch.setattr(PlanStore, "place", place)
    monkeypatch.setattr(PlanMaker, "_proved", later)


def remove_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan is taken apart while it still has its name."""
    monkeypatch.setattr(StoreDisk, "set_aside", lambda _, place: place)


def drop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreDisk, "drop", lambda *_: None)


def sweep_the_root_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_TIMING", "elsewhere")
    monkeypatch.setattr(PlanStore, "timing_cache", lambda store, _: store.root / "timing" / "1-8.7.cache")


@pytest.mark.parametrize(
    ("plant", "name"),
    [
        (name_first, "the first build"),
        (remove_in_place, "clearing up"),
        (drop_nothing, "the start after a kill"),
        (sweep_the_root_only, "the start after a kill"),
    ],
)
def test_a_wrong_order_is_found(
    need: Need, tmp_path: Path, plant: Callable[[pytest.MonkeyPatch], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        cut_power(need, tmp_path, name, monkeypatch, at_most=12)


def test_a_name_before_the_proof_is_found_by_a_plan_that_is_wrong(
    need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name_first(monkeypatch)
    with pytest.raises(AssertionError):
        leave_nothing_wrong(need, tmp_path, monkeypatch)


def test_a_cache_that_costs_a_plan_is_found(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def strict(path: Path, data: bytes, files: Files) -> None:
        with StoreDisk(path.parent, files, 0, os.statvfs).changing():
            files.mkdir(path.parent, 0o755)
            write_atomic(path, data, files=files)

    monkeypatch.setattr("tests.app.build_site.save_cache", strict)
    with pytest.raises(AssertionError, match="lost for the timing cache"):
        fail_everywhere(need, tmp_path, "the first build", monkeypatch, every=1)


# --- what lies there is damaged

DIGITS = b'"build_s": 1.0'


def _sidecar(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        path = place / "plan.json"
        path.chmod(0o644)
        path.write_bytes(change(path.read_bytes()))

    return apply


def _folder_for(name: str) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        (place / name).unlink()
        (place / name).mkdir()

    return apply


def _file_for_the_key(place: Path) -> None:
    shutil.rmtree(place)
    place.write_bytes(b"?")


def _in_timing(write: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(place: Path) -> None:
        (place / "plan").unlink()  # so that there is something to build
        write(place.parent / "timing")

    return apply


def _file_for_timing(timing: Path) -> None:
    shutil.rmtree(timing)
    timing.write_bytes(b"?")


def _folder_for_the_cache(timing: Path) -> None:
    (cache,) = timing.iterdir()
    cache.unlink()
    cache.mkdir()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "no plan": lambda place: (place / "plan").unlink(),
    "no sidecar": lambda place: (place / "plan.json").unlink(),
    "a folder for the plan": _folder_for("plan"),
    "a folder for the sidecar": _folder_for("plan.json"),
    "a torn sidecar": _sidecar(lambda data: data[: len(data) // 2]),
    "zeros for a sidecar": _sidecar(lambda data: bytes(len(data))),
    "a sidecar without an end": _sidecar(lambda _: b"[" * 100_000),
    "a number without an end": _sidecar(lambda data: data.replace(DIGITS, b'"build_s": 1' + b"0" * 400)),
    "a time that is none": _sidecar(lambda data: data.replace(DIGITS, b'"build_s": NaN')),
    "memory that nobody has": _sidecar(lambda data: data.replace(b"1048576", b"9" * 30)),
    "a file for its folder": _file_for_the_key,
    "garbage for the timing cache": _in_timing(lambda timing: next(timing.iterdir()).write_bytes(os.urandom(64))),
    "a folder for the timing cache": _in_timing(_folder_for_the_cache),
    "a file for its folder of timing caches": _in_timing(_file_for_timing),
    "a time of 2200": lambda place: os.utime(place, (7.3e9, 7.3e9)),
    "a time of 1970": lambda place: os.utime(place, (0, 0)),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_costs_a_build_at_most(need: Need, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need, tmp_path, FaultyDisk(0, 0))
    site.put(HERE)
    place = site.store.root / need.key(HERE).digest
    place.chmod(0o755)
    DAMAGES[name](place)
    site.store.sweep()
    site.store.find(need.key(BEFORE))
    seconds, peak_bytes = site.store.last_build(need.onnx_sha256, (32, 32))
    assert seconds in (None, 1.0)
    assert peak_bytes in (None, 1 << 20)
    assert refused_by(site, monkeypatch) is None
    assert site.store.find(need.key(HERE)).fits
    with site.store.building():
        site.store.collect({need.key(HERE).digest}, set())
    if "timing" not in name:
        start_anew(need, tmp_path, FaultyDisk(0, 0))


# --- the lock


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOLCK])
def test_a_lock_that_cannot_be_had(need: Need, tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need, tmp_path, FaultyDisk(0, 0))
    with monkeypatch.context() as patch:

        def flock(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        patch.setattr(fcntl, "flock", flock)
        error = refused_by(site, monkeypatch)
    assert error is not None
    assert error.code == "store_write_failed"
    assert refused_by(site, monkeypatch) is None


def test_a_folder_for_the_lock(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need, tmp_path)
    (tmp_path / "plans" / "lock").mkdir(parents=True)
    error = refused_by(site, monkeypatch)
    assert error is not None
    assert error.code == "store_write_failed"


_HOLD = """
import fcntl, sys
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_process_that_died_is_free(need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(need, tmp_path)
    (tmp_path / "plans").mkdir()
    line = [sys.executable, "-I", "-S", "-c", _HOLD, str(tmp_path / "plans" / "lock")]
    with subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        error = refused_by(site, monkeypatch)
        assert error is not None
        assert (error.code, error.retryable, site.builds) == ("busy", True, 0)
        holder.kill()
        holder.wait(10)
        assert refused_by(site, monkeypatch) is None


def test_a_plan_that_changes_after_its_proof_gets_no_name(
    need: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(need, tmp_path, FaultyDisk(0, 0))

    def tear() -> None:
        (plan,) = site.store.root.glob(".new-*/plan")
        plan.chmod(0o644)
        plan.write_bytes(PLAN[:-1] + b"!")

    site.on_proved = tear
    error = refused_by(site, monkeypatch)
    assert error is not None
    assert error.code == "plan_damaged"
    check_whole(site)
