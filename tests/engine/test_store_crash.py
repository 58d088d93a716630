"""The power goes at any instant of a reload: there is exactly one model to load, and it is the right one."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import pytest

from edge_runtime.durable import Files, remove_tree
from edge_runtime.engine.archive import tar_bundle
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.choices import Choices
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.store import BundleStore
from edge_runtime.errors import BundleError
from tests.crash import CrashDisk, Key, Tree, frozen, lay_out
from tests.engine.graphs import classifier, write_bundle
from tests.engine.stores import by_upload, choice, contents, nothing_aside, tar_of, with_golden

MODEL = classifier()


@dataclass
class Device:
    """The daemon's folder on a disk that records, the bundles outside it, and what has been promised so far."""

    disk: CrashDisk
    root: Path
    sources: dict[str, Path]
    promises: list[tuple[int, frozenset[str]]] = field(default_factory=list)
    """(from this many operations on, names of which one has to run)."""

    def __post_init__(self) -> None:
        self.store = BundleStore(self.root / "bundles", files=self.disk, reserve_bytes=0)
        self.choices = Choices(self.root / "choices.json", files=self.disk)

    def promise(self, *names: str) -> None:
        self.promises.append((len(self.disk.trace), frozenset(names)))

    def put_in(self, name: str, *, by: str = "add") -> Bundle:
        return self.store.add(self.sources[name]) if by == "add" else by_upload(self.store, self.sources[name])

    def choose(self, name: str, old: str, bundle: Bundle) -> None:
        self.promise(old, name)
        self.choices.save(choice("m", bundle))
        self.promise(name)

    def reload(self, name: str, old: str, *, by: str = "add") -> None:
        """What a local reload does: put in, choose, take away the others."""
        bundle = self.put_in(name, by=by)
        self.choose(name, old, bundle)
        self.store.collect([bundle.digest])

    def reset(self, old: str) -> None:
        self.promise(old, "configured")
        self.choices.remove("m")
        self.promise("configured")
        self.store.collect([])


def first_reload(device: Device) -> None:
    device.promise("configured")
    device.reload("a", "configured")


def second_reload(device: Device) -> None:
    device.promise("a")
    device.reload("b", "a")


def upload_reload(device: Device) -> None:
    device.promise("a")
    device.reload("c", "a", by="upload")


def aborted_upload(device: Device) -> None:
    device.promise("a")
    pieces = list(tar_bundle(load_bundle(device.sources["c"])))
    with device.store.open_upload() as coming:
        for piece in pieces[: len(pieces) // 2]:
            coming.write(piece)
    with device.store.open_upload() as coming:
        coming.write(tar_of(*contents(device.sources["c"])[:-1]))
        with suppress(BundleError):
            coming.finish()


def two_reloads(device: Device) -> None:
    device.promise("a")
    device.reload("b", "a")
    device.reload("c", "b")


def reset(device: Device) -> None:
    device.promise("a")
    device.reset("a")


def damaged_replaced(device: Device) -> None:
    (place,) = (device.root / "bundles").iterdir()
    device.promise("configured", "a")
    device.put_in("a")
    assert place.is_dir()
    device.promise("a")


def damage(root: Path) -> None:
    (place,) = (root / "bundles").iterdir()
    (place / "labels.txt").chmod(0o644)
    (place / "labels.txt").write_bytes(b"torn")


class Boot:
    """The next start on a disk as it was left: which bundle runs, and whether work goes on."""

    def __init__(self, sources: dict[str, Path], *, damaged_before: bool) -> None:
        self._sources = sources
        self._names = {load_bundle(path).digest: name for name, path in sources.items()}
        self._damaged_before = damaged_before
        self._loaded: set[str] = set()

    def run(self, root: Path, files: Files) -> str:
        """The name of the one bundle that the rule gives: the one chosen if it is whole, else the configured one."""
        choices = Choices(root / "choices.json", files=files)
        store = BundleStore(root / "bundles", files=files, reserve_bytes=0)
        chosen = choices.load().get("m")
        assert choices.trouble is None
        whole = {digest: bundle for digest in store.digests() if (bundle := self._open(store, digest)) is not None}
        if chosen is None:
            self._infer(load_bundle(self._sources["configured"]))
            return "configured"
        if chosen.bundle not in whole:
            assert self._damaged_before, "the chosen bundle is not whole"
            return "configured"
        self._infer(whole[chosen.bundle])
        return self._names[chosen.bundle]

    def _open(self, store: BundleStore, digest: str) -> Bundle | None:
        """None for half a bundle under a digest's name: there is none that was not there before."""
        try:
            return store.open(digest)
        except BundleError:
            assert self._damaged_before
            return None

    def work_on(self, root: Path, files: Files) -> None:
        """What a start and the next reload do."""
        store = BundleStore(root / "bundles", files=files, reserve_bytes=0)
        store.sweep()
        assert nothing_aside(store)
        for name in ("b", "next"):
            assert store.add(self._sources[name]).digest in store.digests()

    def _infer(self, bundle: Bundle) -> None:
        """Once for each: what is loaded is proved by its digest."""
        if bundle.digest in self._loaded:
            return
        self._loaded.add(bundle.digest)
        engine = load_engine(bundle)
        try:
            lane, buffer = engine.open_lane(), engine.allocate(1)
            buffer.array.fill(0)
            lane.submit(buffer, 1)
            assert lane.collect()
            engine.release(buffer)
        finally:
            engine.close()


@dataclass
class Count:
    operations: int = 0
    states: int = 0
    distinct: int = 0
    cut_twice: int = 0


def cut_power(
    tmp_path: Path,
    scenario: Callable[[Device], None],
    *,
    at_most: int,
    boots: int | None,
    works: int,
    kind: type[CrashDisk] = CrashDisk,
    seed: int = 6,
) -> Count:
    """Every state that `at_most` allows is made; `boots` of the distinct ones are started from (None: all), and of
    these every `works`-th also works on, with the power cut again on the way."""
    sources = {
        name: write_bundle(tmp_path / "made" / name, MODEL, bundle={"name": name})
        for name in ("configured", "a", "b", "c", "next")
    }
    with_golden(sources["b"])  # folders in the folder
    root = tmp_path / "device"
    root.mkdir()
    if scenario is not first_reload:
        before = Device(CrashDisk(root), root, sources)
        before.reload("a", "configured")
    if scenario is damaged_replaced:
        damage(root)
    device = Device(kind(root), root, sources)
    scenario(device)
    boot = Boot(sources, damaged_before=scenario is damaged_replaced)
    count = Count(operations=len(device.disk.trace))
    allowed: dict[Key, frozenset[str]] = {}
    trees: dict[Key, Tree] = {}
    for begun, tree in device.disk.states(at_most=at_most, seed=seed):
        count.states += 1
        key = frozen(tree)
        trees[key] = tree
        promised = next(names for since, names in reversed(device.promises) if since <= begun)
        allowed[key] = allowed.get(key, promised) & promised
    count.distinct = len(trees)
    keys = list(trees)
    if boots is not None and len(keys) > boots:
        keys = random.Random(seed).sample(keys, boots)
    for number, key in enumerate(keys):
        running = start(
            boot, trees[key], tmp_path / f"boot-{number}", work=number % works == 0, seed=number, count=count
        )
        assert running in allowed[key], trees[key]
    return count


def start(boot: Boot, tree: Tree, root: Path, *, work: bool, seed: int, count: Count) -> str:
    lay_out(tree, root)
    disk = CrashDisk(root)
    running = boot.run(root, disk)
    if work:
        disk = CrashDisk(root)
        boot.work_on(root, disk)
        assert boot.run(root, disk) == running
        # and the power goes again, on the way: the same runs
        again = list({frozen(each): each for _, each in disk.states(at_most=8, seed=seed)}.values())
        for number, each in enumerate(random.Random(seed).sample(again, 3)):
            place = root.with_name(f"{root.name}-{number}")
            lay_out(each, place)
            assert boot.run(place, CrashDisk(place)) == running
            remove_tree(place)
            count.cut_twice += 1
    remove_tree(root)
    return running


SCENARIOS = [first_reload, second_reload, upload_reload, aborted_upload, two_reloads, reset, damaged_replaced]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_a_power_cut_leaves_one_model_to_load(tmp_path: Path, scenario: Callable[[Device], None]) -> None:
    count = cut_power(tmp_path, scenario, at_most=64, boots=40, works=20)
    assert count.distinct > 12
    assert count.cut_twice >= 3


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.__name__)
def test_every_power_cut_leaves_one_model_to_load(tmp_path: Path, scenario: Callable[[Device], None]) -> None:
    count = cut_power(tmp_path, scenario, at_most=100_000, boots=None, works=4)
    print(f"{scenario.__name__}: {count}")


class Unsynced(CrashDisk):
    """Takes the word for the deed, and so does what is written over it."""

    def sync(self, stream: IO[bytes]) -> None:
        stream.flush()


class UnsyncedFolders(CrashDisk):
    def sync_folder(self, path: Path) -> None:
        pass


@pytest.mark.parametrize("disk", [Unsynced, UnsyncedFolders])
def test_a_forgotten_sync_is_found(tmp_path: Path, disk: type[CrashDisk]) -> None:
    with pytest.raises(AssertionError):
        cut_power(tmp_path, second_reload, at_most=64, boots=60, works=60, kind=disk)
