"""Plans on disk, by all that they depend on: each whole and verified under its key, or not there.

`<root>/<key>/plan` and `<root>/<key>/plan.json` (its sidecar), `<root>/timing/` (what TensorRT measured of kernels),
`<root>/lock` (held by whoever builds).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.durable import REAL, Files, SaveFile
from edge_runtime.engine.store import RESERVE_BYTES
from edge_runtime.engine.store_disk import StoreDisk
from edge_runtime.engine.tensorrt.plan import PlanKey, Sidecar, parse_sidecar, read_sidecar, sidecar_path, verify
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EngineError

log = logging.getLogger(__name__)

PLAN = "plan"
BROUGHT = "brought"
_KEY = re.compile(r"[0-9a-f]{64}")
_LOCK = "lock"
_TIMING = "timing"
FRESH_S = 24 * 3600.0
"""A plan that was built by hand waits so long for a daemon that wants it."""
_LOCK_LOOK_S = 0.5
_MOST_S, _MOST_BYTES = 24 * 3600.0, 2**40
"""No build took so much: who says so is damaged, and must not decide what the next one may have."""
_SOFT = ("driver", "L4T", "batches of")
"""What may be different in a plan that still runs; it is built anew all the same."""


@dataclass(frozen=True, slots=True)
class Change:
    """One part of what a plan depends on that is another one now."""

    what: str
    built: str
    here: str

    def __str__(self) -> str:
        if self.what == "the file":
            return self.built
        return f"built with {self.what} {self.built}, here is {self.here}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of the store."""

    path: Path
    sidecar: Sidecar

    @property
    def key(self) -> str:
        """The name of its folder."""
        return self.path.parent.name

    @property
    def brought(self) -> bool:
        """Whether it came with a bundle, and was not built here."""
        return (self.path.parent / BROUGHT).exists()


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the store has for a key. `plan`: one that runs here, verified, or None. `changed`: what is different from
    what the key says; with a plan that it should be built anew for, without one why that which is there does not fit.
    `nearest`: the sidecar of that."""

    plan: Plan | None
    changed: tuple[Change, ...] = ()
    nearest: Sidecar | None = None

    @property
    def fits(self) -> bool:
        """Whether the plan is just what was asked for."""
        return self.plan is not None and not self.changed

    @property
    def told(self) -> str:
        """Why there is nothing that fits, in words."""
        if self.changed:
            return "; ".join(map(str, self.changed))
        return "none was built for it yet" if self.plan is None else "it is there"


class PlanStore:
    """The folder `root`. Several processes may read it; who changes it holds the lock (`building`).

    `reserve_bytes` stay free on the disk. Methods raise EdgeError (code "store_write_failed", "store_full",
    "store_unreadable").
    """

    def __init__(
        self,
        root: Path,
        *,
        files: Files = REAL,
        reserve_bytes: int = RESERVE_BYTES,
        statvfs: Callable[[Path], os.statvfs_result] = os.statvfs,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.root = root
        self._disk = StoreDisk(root, files, reserve_bytes, statvfs)
        self._now = now

    # --- looking

    def find(self, key: PlanKey) -> Lookup:
        """The plan for a key, verified, or why there is none. Of several that fit, the one that was asked for last."""
        usable: list[tuple[int, float, Plan, tuple[Change, ...]]] = []
        nearest: tuple[int, float, tuple[Change, ...], Sidecar] | None = None
        for plan, made in self._plans():
            if plan.sidecar.onnx_sha256 != key.onnx_sha256 or _size(plan.sidecar) != key.size:
                continue
            changed = _changes(plan.sidecar, key)
            hard = tuple(each for each in changed if each.what not in _SOFT)
            if not hard:
                damage = self._damage(plan, key.here)
                if damage is None:
                    usable.append((-len(changed), made, plan, changed))
                    continue
                hard = changed = (damage,)
            place = (-len(hard), made, changed, plan.sidecar)
            nearest = place if nearest is None or place[:2] > nearest[:2] else nearest
        if usable:
            _, _, plan, changed = max(usable, key=lambda each: each[:2])
            return Lookup(plan, changed, plan.sidecar)
        return Lookup(None) if nearest is None else Lookup(None, nearest[2], nearest[3])

    def last_build(self, onnx_sha256: str, size: tuple[int, int]) -> tuple[float | None, int | None]:
        """(seconds, bytes of memory at the peak) of the last build of this model at this size, for any device that
        this one has been; None where nobody knows."""
        found = [
            (made, plan.sidecar.options.get("build_s"), plan.sidecar.options.get("peak_bytes"))
            for plan, made in self._plans()
            if plan.sidecar.onnx_sha256 == onnx_sha256 and _size(plan.sidecar) == size
        ]
        if not found:
            return None, None
        _, seconds, peak = max(found, key=lambda each: each[0])
        return (
            float(seconds) if isinstance(seconds, (int, float)) and 0 < seconds < _MOST_S else None,
            peak if isinstance(peak, int) and 0 < peak < _MOST_BYTES else None,
        )

    def timing_cache(self, here: Here) -> Path:
        """The file of the timing cache for this TensorRT and this GPU."""
        return self.root / _TIMING / f"{here.tensorrt}-{here.compute_capability}.cache"

    def _plans(self) -> Iterator[tuple[Plan, float]]:
        """Every plan with a sidecar that can be read, and when it was made or asked for, wall time in s."""
        for folder in self._disk.entries():
            if not _KEY.fullmatch(folder.name):
                continue
            path = folder / PLAN
            try:
                yield Plan(path, read_sidecar(path)), folder.stat().st_mtime
            except (EngineError, OSError) as error:
                log.warning("a plan of the store is passed over: %s", error)

    def _damage(self, plan: Plan, here: Here) -> Change | None:
        try:
            verify(plan.path.read_bytes(), plan.sidecar, here, str(plan.path))
        except OSError as error:
            return Change("the file", f"its file cannot be read: {error.strerror}", "")
        except EngineError as error:
            log.error("%s", error)
            return Change("the file", error.message, "")
        return None

    # --- changing

    @contextmanager
    def building(self, cancel: threading.Event | None = None, *, wait: bool = False) -> Iterator[None]:
        """Hold the store's lock: one build at a time, whoever asks. The kernel lets go of it however the process ends.

        `wait` for whoever holds it, until `cancel` is set. Raises EngineError (code "busy", retryable; "cancelled").
        """
        with self._disk.changing():
            self._make_root()
            descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            while not self._locked(descriptor):
                if cancel is not None and cancel.is_set():
                    raise EngineError("it was cancelled", code="cancelled", where=str(self.root), retryable=True)
                if not wait:
                    raise EngineError(
                        "another build is under way on this device",
                        code="busy",
                        where=str(self.root),
                        remedy="wait for it to end: two at once would only take longer and need twice the memory",
                        retryable=True,
                    )
                (cancel or threading.Event()).wait(_LOCK_LOOK_S)
            yield
        finally:
            os.close(descriptor)

    def check_space(self, size_bytes: int) -> None:
        """Whether there is room for so much more beside the reserve. Raises EdgeError (code "store_full")."""
        with self._disk.changing():
            self._make_root()
            self._disk.check_space(size_bytes)

    @contextmanager
    def aside(self) -> Iterator[Path]:
        """An empty folder in which a plan may be made, for `place`; at the end what is left of it is gone."""
        with self._disk.changing(), self._disk.folder() as folder:
            yield folder

    def place(self, aside: Path, key: PlanKey) -> Plan:
        """Give a folder with `plan` and its sidecar, both on disk, the name of its key; what had it is gone.

        Raises EngineError where it is not what the key says: see plan.verify; "plan_mismatch".
        """
        path = aside / PLAN
        sidecar = read_sidecar(path)
        verify(path.read_bytes(), sidecar, key.here, str(path))
        if wrong := _differences(sidecar, key):
            message = f"the plan is not the one that was asked for: {wrong}"
            raise EngineError(message, code="plan_mismatch", where=str(path), remedy="build it again")
        place = self.root / key.digest
        with self._disk.changing():
            self._disk.seal(aside)
            self._disk.put_in_place(aside, place)
        return Plan(place / PLAN, sidecar)

    def put(self, plan: bytes, sidecar: bytes, key: PlanKey, check: Callable[[Path], object]) -> Plan:
        """Take in a plan that was built elsewhere for a device just like this one; `check` proves its file first, and
        may raise. Raises as `place`."""
        wanted = parse_sidecar(sidecar, "the plan's sidecar")
        if wrong := _differences(wanted, key):
            message = f"the plan does not fit exactly: {wrong}"
            raise EngineError(message, code="plan_mismatch", where="the plan's sidecar", remedy="build it here")
        verify(plan, wanted, key.here, "the plan")
        with self.aside() as folder:
            self._disk.check_space(len(plan) + len(sidecar))
            written = ((folder / PLAN, plan), (sidecar_path(folder / PLAN), sidecar), (folder / BROUGHT, b""))
            for path, data in written:
                with SaveFile(path, mode=0o444, files=self._disk.files) as stream:
                    stream.write(data)
            check(folder / PLAN)
            return self.place(folder, key)

    def touch(self, plan: Plan) -> None:
        """Note that it was asked for just now: of several that fit, it is the one that runs."""
        now = self._now()
        with contextlib.suppress(OSError):  # the older one runs then, which does no harm
            os.utime(plan.path.parent, (now, now))

    def collect(self, needed: Collection[str], models: Collection[str]) -> tuple[str, ...]:
        """Remove plans that nobody needs any more; returns their keys. Whoever calls this holds the lock.

        Kept are the keys in `needed`; of each model (sha256 of its ONNX) in `models` and each size of it, the newest
        of the others as well: the one that worked before, for a device that goes back to what it was; and what was
        built within FRESH_S. Timing caches go with the last plan of their TensorRT.
        """
        plans = sorted(self._plans(), key=lambda each: -each[1])
        kept, before = set(needed), set()
        for plan, made in plans:
            model = (plan.sidecar.onnx_sha256, _size(plan.sidecar))
            if plan.key in needed:
                continue
            if self._now() - made < FRESH_S:
                kept.add(plan.key)
            elif model[0] in models and model not in before:
                before.add(model)
                kept.add(plan.key)
        readable = {plan.key for plan, _ in plans}
        with self._disk.changing():
            gone = [each for each in self._disk.entries() if _KEY.fullmatch(each.name) and each.name not in kept]
            aside = [self._disk.set_aside(each) for each in gone]
            if aside:
                self._disk.files.sync_folder(self.root)
            for each in aside:
                self._disk.drop(each)
            versions = {plan.sidecar.tensorrt for plan, _ in plans if plan.key in kept & readable}
            self._drop_caches(versions)
        return tuple(each.name for each in gone)

    def sweep(self) -> tuple[str, ...]:
        """Remove what a killed build left; returns its names. Nothing while somebody builds. For the start.

        What cannot be removed is logged, and waits for the next start.
        """
        if not self.root.is_dir():
            return ()
        try:
            with self.building(), self._disk.changing():
                timing = self.root / _TIMING
                left: list[Path] = [*self._disk.leftovers(), *(timing.glob(".*") if timing.is_dir() else ())]
                for each in left:
                    self._disk.drop(each)  # one that cannot be removed keeps none of the others
                return tuple(each.name for each in left if not os.path.lexists(each))
        except EngineError as error:
            if error.code != "busy":
                raise
            return ()

    def _drop_caches(self, versions: Collection[str]) -> None:
        folder = self.root / _TIMING
        if not versions or not folder.is_dir():
            return
        for each in folder.iterdir():
            if each.name.rpartition("-")[0] not in versions:
                self._disk.files.unlink(each)

    def _locked(self, descriptor: int) -> bool:
        with self._disk.changing():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True

    def _make_root(self) -> None:
        if not self.root.is_dir():
            with contextlib.suppress(FileExistsError):
                self._disk.files.mkdir(self.root, 0o755)
            self._disk.files.sync_folder(self.root.parent)


def _size(sidecar: Sidecar) -> tuple[int, int]:
    width, height = sidecar.options.get("width"), sidecar.options.get("height")
    return (width if isinstance(width, int) else 0, height if isinstance(height, int) else 0)


def _changes(sidecar: Sidecar, key: PlanKey) -> tuple[Change, ...]:
    """What is different; the model and its size are the same."""
    here = key.here
    found = [
        Change(what, built, now)
        for what, built, now in (
            ("TensorRT", sidecar.tensorrt, here.tensorrt),
            ("compute capability", sidecar.compute_capability, here.compute_capability),
            ("device", sidecar.device, here.device),
            ("driver", f"for CUDA {sidecar.driver}", f"for CUDA {here.driver}"),
            ("L4T", sidecar.l4t or "none", here.l4t or "none"),
        )
        if built != now
    ]
    any_core = "dla_core" not in key.options
    fixed = sidecar.options.get("static_batch") is True or (any_core and sidecar.dla_core is not None)
    if not fixed and not set(key.batches) <= set(sidecar.batches):
        found.append(Change("batches of", _batches(sidecar.batches), _batches(key.batches)))
    if not any_core and sidecar.dla_core != key.options["dla_core"]:
        found.append(Change("DLA core", _core(sidecar.dla_core), _core(key.options["dla_core"])))
    return tuple(found)


def _differences(sidecar: Sidecar, key: PlanKey) -> str:
    """Why a plan cannot have this key, in words; empty where it can."""
    if sidecar.onnx_sha256 != key.onnx_sha256 or _size(sidecar) != key.size:
        return "it is of another model, or for another size of picture"
    return "; ".join(map(str, _changes(sidecar, key)))


def _batches(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _core(core: object) -> str:
    return "none" if core is None else str(core)
