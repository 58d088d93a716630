"""The store of plans: found by all that they depend on, whole at every instant, cleared of what nobody needs."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.durable import REAL, Files, write_atomic
from edge_runtime.engine.tensorrt.plan import PlanKey, PlanTensor, Sidecar, describe, read_sidecar, sidecar_path, verify
from edge_runtime.engine.tensorrt.plans import FRESH_S, PLAN, Plan, PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EdgeError, EngineError
from tests.crash import CrashDisk, lay_out
from tests.engine.stores import FailingFiles, refused

HERE = Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano", "12.6", "36.4.3")
ONNX = "a" * 64
TENSORS = (
    PlanTensor(name="x", mode="input", dtype="FLOAT", shape=(-1, 3, 32, 32)),
    PlanTensor(name="y", mode="output", dtype="FLOAT", shape=(-1, 3)),
)
DAY_S = 24 * 3600.0


def key_of(here: Here = HERE, *, onnx: str = ONNX, most: int = 4, any_core: bool = False, **more: Any) -> PlanKey:
    options = {} if any_core else {"dla_core": more.pop("dla_core", None)}
    return PlanKey(onnx, "fp32", more.pop("size", (32, 32)), tuple(range(1, most + 1)), here, options)


def sidecar_of(plan: bytes, key: PlanKey, **options: Any) -> Sidecar:
    told = {"width": key.size[0], "height": key.size[1], "dla_core": key.options.get("dla_core"), **options}
    return describe(plan, key.here, onnx_sha256=key.onnx_sha256, tensors=TENSORS, batches=key.batches, options=told)


def add(store: PlanStore, key: PlanKey, content: bytes = b"", files: Files = REAL, **options: Any) -> Plan:
    """What a build does: plan first, sidecar last, then the name."""
    plan = b"ptrt" + content
    with store.aside() as folder:
        write_atomic(folder / PLAN, plan, files=files)
        write_atomic(sidecar_path(folder / PLAN), sidecar_of(plan, key, **options).to_json(), files=files)
        return store.place(folder, key)


def passes(path: Path) -> None:
    """The check of a plan that is right."""
    assert path.exists()


class Clock:
    def __init__(self) -> None:
        self.now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> PlanStore:
    return PlanStore(tmp_path / "plans", now=clock)


def aged(store: PlanStore, plan: Plan, clock: Clock, age_s: float) -> Plan:
    clock.now_s -= age_s
    store.touch(plan)
    clock.now_s += age_s
    return plan


# --- finding


def test_a_plan_is_found_by_what_it_depends_on(store: PlanStore) -> None:
    assert store.find(key_of()).told == "none was built for it yet"
    made = add(store, key_of())
    found = store.find(key_of())
    assert (found.plan, found.fits) == (made, True)
    assert made.key == key_of().digest
    assert store.find(key_of(onnx="b" * 64)).plan is None
    assert store.find(key_of(size=(64, 32))).plan is None


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("tensorrt", "10.7.0", "built with TensorRT 10.3.0, here is 10.7.0"),
        ("compute_capability", "7.2", "built with compute capability 8.7, here is 7.2"),
        ("device", "Thor", "built with device NVIDIA Jetson Orin Nano, here is Thor"),
    ],
)
def test_what_cannot_run_here_any_more_is_told_from_what_to_what(
    store: PlanStore, part: str, value: str, told: str
) -> None:
    add(store, key_of())
    found = store.find(key_of(replace(HERE, **{part: value})))
    assert (found.plan, found.told) == (None, told)
    assert found.nearest is not None


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        ("driver", "12.8", "built with driver for CUDA 12.6, here is for CUDA 12.8"),
        ("l4t", "36.5.0", "built with L4T 36.4.3, here is 36.5.0"),
        ("l4t", None, "built with L4T 36.4.3, here is none"),
    ],
)
def test_what_still_runs_is_given_with_what_changed(store: PlanStore, part: str, value: str | None, told: str) -> None:
    made = add(store, key_of())
    changed: dict[str, Any] = {part: value}
    found = store.find(key_of(replace(HERE, **changed)))
    assert (found.plan, found.fits, found.told) == (made, False, told)


def test_larger_batches_will_do_and_smaller_ones_do_meanwhile(store: PlanStore) -> None:
    made = add(store, key_of(most=4))
    assert store.find(key_of(most=2)).fits
    found = store.find(key_of(most=8))
    assert (found.plan, found.told) == (made, "built with batches of 1 to 4, here is 1 to 8")
    static = add(store, key_of(onnx="b" * 64, most=1), static_batch=True)
    assert store.find(key_of(onnx="b" * 64, most=8)).plan == static
    assert store.find(key_of(onnx="b" * 64, most=8)).fits


def test_a_plan_for_another_core_is_for_whoever_takes_any(store: PlanStore, clock: Clock) -> None:
    on_dla = PlanKey(ONNX, "fp32", (32, 32), (1,), HERE, {"dla_core": 0})
    dla = aged(store, add(store, on_dla), clock, 10)
    assert store.find(key_of()).plan is None
    assert store.find(key_of(any_core=True)).plan == dla
    assert store.find(key_of(any_core=True)).fits
    gpu = add(store, key_of())
    store.touch(gpu)
    assert store.find(key_of(any_core=True)).plan == gpu  # what was asked for last
    clock.now_s += 10
    store.touch(dla)
    assert store.find(key_of(any_core=True)).plan == dla


def test_of_several_the_one_that_fits_comes_first(store: PlanStore, clock: Clock) -> None:
    exact = aged(store, add(store, key_of()), clock, 100)
    store.touch(add(store, key_of(replace(HERE, driver="12.4"))))
    assert store.find(key_of()).plan == exact


@pytest.mark.parametrize("damage", [b"", b"ptrt other", b"x" * 9])
def test_a_damaged_plan_is_none_and_is_replaced(store: PlanStore, damage: bytes) -> None:
    made = add(store, key_of(), b"right")
    made.path.chmod(0o644)
    made.path.write_bytes(damage)
    found = store.find(key_of())
    assert found.plan is None
    assert "damaged" in found.told
    add(store, key_of(), b"right")
    assert store.find(key_of()).fits


@pytest.mark.parametrize("content", [b"", b"{}", b"not JSON"])
def test_a_plan_without_a_sidecar_is_passed_over(store: PlanStore, content: bytes) -> None:
    made = add(store, key_of())
    sidecar_path(made.path).chmod(0o644)
    sidecar_path(made.path).write_bytes(content)
    assert store.find(key_of()).plan is None
    sidecar_path(made.path).chmod(0o644)
    made.path.parent.chmod(0o755)
    sidecar_path(made.path).unlink()
    assert store.find(key_of()).told == "none was built for it yet"


def test_the_last_build_says_how_long_the_next_may_take(store: PlanStore, clock: Clock) -> None:
    assert store.last_build(ONNX, (32, 32)) == (None, None)
    aged(store, add(store, key_of(replace(HERE, tensorrt="10.0.1")), build_s=99.0, peak_bytes=9), clock, 5)
    store.touch(add(store, key_of(), build_s=12.5, peak_bytes=10))
    assert store.last_build(ONNX, (32, 32)) == (12.5, 10)
    assert store.last_build(ONNX, (64, 64)) == (None, None)


# --- placing


def test_what_is_not_what_was_asked_for_does_not_get_the_name(store: PlanStore) -> None:
    other = key_of(replace(HERE, tensorrt="10.7.0"))
    with store.aside() as folder:
        write_atomic(folder / PLAN, b"ptrt")
        write_atomic(sidecar_path(folder / PLAN), sidecar_of(b"ptrt", other).to_json())
        assert refused(lambda: store.place(folder, key_of())).code == "plan_mismatch"
    assert store.find(key_of()).plan is None
    assert [each.name for each in store.root.iterdir()] == []


def test_a_plan_from_elsewhere_has_to_fit_exactly_and_to_pass_the_check(store: PlanStore) -> None:
    plan = b"ptrt brought"
    seen: list[Path] = []
    sidecar = sidecar_of(plan, key_of())
    placed = store.put(plan, sidecar.to_json(), key_of(), seen.append)
    assert placed.path.read_bytes() == plan
    assert seen[0].name == PLAN
    newer = key_of(replace(HERE, driver="13.0"))
    assert refused(lambda: store.put(plan, sidecar.to_json(), newer, seen.append)).code == "plan_mismatch"
    assert refused(lambda: store.put(plan + b"!", sidecar.to_json(), key_of(), seen.append)).code == "plan_damaged"
    assert refused(lambda: store.put(plan, b"{", key_of(), seen.append)).code == "plan_sidecar"

    def fail(path: Path) -> None:
        raise EngineError("the golden check failed", code="golden_mismatch")

    other = key_of(onnx="c" * 64)
    brought = sidecar_of(plan, other).to_json()
    assert refused(lambda: store.put(plan, brought, other, fail)).code == "golden_mismatch"
    assert store.find(other).plan is None
    assert len(seen) == 1


def test_room_is_kept_for_others(tmp_path: Path) -> None:
    def statvfs(path: Path) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1000, 1000, 1000, 0, 0, 0, 0, 255))

    store = PlanStore(tmp_path / "plans", reserve_bytes=1_000_000, statvfs=statvfs)
    store.check_space(3_000_000)
    error = refused(lambda: store.check_space(4_000_000))
    assert (error.code, error.retryable) == ("store_full", True)


def test_a_disk_that_fails_at_any_change_leaves_a_whole_plan_or_none(tmp_path: Path) -> None:
    for at in range(1, 40):
        store = PlanStore(tmp_path / str(at), files=FailingFiles(at, errno.EIO), reserve_bytes=0)
        plan = b"ptrt" + bytes(at)
        failed: EdgeError | None = None
        try:
            store.put(plan, sidecar_of(plan, key_of()).to_json(), key_of(), passes)
        except EdgeError as error:
            failed = error
        found = PlanStore(tmp_path / str(at)).find(key_of())
        if failed is None:
            assert found.fits
            assert at > 5
            return
        assert (failed.code, found.plan) == ("store_write_failed", None)
    pytest.fail("it never succeeded")


# --- the lock


def test_one_build_at_a_time(store: PlanStore) -> None:
    other = PlanStore(store.root)
    with store.building():
        error = refused(lambda: other.building().__enter__())
        assert (error.code, error.retryable) == ("busy", True)
        cancel = threading.Event()
        cancel.set()
        assert refused(lambda: other.building(cancel, wait=True).__enter__()).code == "cancelled"
        assert other.sweep() == ()
    with other.building():
        pass


def test_who_waits_gets_its_turn(store: PlanStore) -> None:
    turns: list[str] = []
    held = threading.Event()

    def second() -> None:
        assert held.wait(5)
        with PlanStore(store.root).building(threading.Event(), wait=True):
            turns.append("second")

    with ThreadPoolExecutor(1) as pool:
        with store.building():
            waiting = pool.submit(second)
            held.set()
            turns.append("first")
        waiting.result(10)
    assert turns == ["first", "second"]


# --- clearing up


def test_what_is_needed_stays_and_the_one_before_it(store: PlanStore, clock: Clock) -> None:
    now = aged(store, add(store, key_of()), clock, 3 * DAY_S)
    before = aged(store, add(store, key_of(replace(HERE, tensorrt="10.0.1"))), clock, 4 * DAY_S)
    oldest = aged(store, add(store, key_of(replace(HERE, tensorrt="8.6.1"))), clock, 5 * DAY_S)
    foreign = aged(store, add(store, key_of(onnx="b" * 64)), clock, 3 * DAY_S)
    fresh = aged(store, add(store, key_of(onnx="c" * 64)), clock, FRESH_S / 2)
    for version in ("10.3.0", "10.0.1", "8.6.1"):
        cache = store.timing_cache(replace(HERE, tensorrt=version))
        cache.parent.mkdir(exist_ok=True)
        cache.write_bytes(b"")
    assert set(store.collect({now.key}, {ONNX})) == {oldest.key, foreign.key}
    assert {each.name for each in store.root.iterdir() if len(each.name) == 64} == {now.key, before.key, fresh.key}
    assert sorted(each.name for each in (store.root / "timing").iterdir()) == ["10.0.1-8.7.cache", "10.3.0-8.7.cache"]


def test_what_a_kill_left_is_swept(store: PlanStore) -> None:
    assert store.sweep() == ()
    with store.aside() as folder:
        write_atomic(folder / PLAN, b"ptrt")
        left = folder.rename(store.root / ".new-killed")
    assert store.sweep() == (left.name,)
    assert not left.exists()


# --- the power goes


def survivors(disk: CrashDisk, tmp_path: Path, keys: list[PlanKey], *, from_on: int) -> set[frozenset[int]]:
    """Which of the keys' plans are found, over every state that a power cut may leave; each found is whole."""
    seen = set()
    for number, (begun, tree) in enumerate(disk.states(at_most=12, seed=5)):
        if begun < from_on:
            continue
        root = tmp_path / f"after-{number}"
        lay_out(tree, root)
        store = PlanStore(root / "plans")
        found = set()
        for index, key in enumerate(keys):
            lookup = store.find(key)
            if lookup.plan is not None:
                verify(lookup.plan.path.read_bytes(), read_sidecar(lookup.plan.path), key.here, "the plan")
                found.add(index)
        seen.add(frozenset(found))
        store.sweep()
        assert list(root.glob("plans/.*")) == []
        assert add(store, keys[-1]).path.exists()  # and the next build works
    return seen


@pytest.mark.parametrize("brought", [False, True])
def test_whenever_the_power_goes_a_plan_is_whole_or_not_there(tmp_path: Path, brought: bool) -> None:
    root = tmp_path / "store"
    root.mkdir()
    disk = CrashDisk(root)
    store = PlanStore(root / "plans", files=disk, reserve_bytes=0)
    if brought:
        plan = b"ptrt" + bytes(40)
        store.put(plan, sidecar_of(plan, key_of()).to_json(), key_of(), passes)
    else:
        add(store, key_of(), bytes(40), files=disk)
    done = len(disk.trace)
    assert survivors(disk, tmp_path, [key_of()], from_on=0) == {frozenset(), frozenset({0})}
    (tmp_path / "done").mkdir()
    assert survivors(disk, tmp_path / "done", [key_of()], from_on=done) == {frozenset({0})}


def test_while_a_new_one_takes_over_one_of_them_is_always_there(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    old, new = key_of(replace(HERE, driver="12.4")), key_of()
    add(PlanStore(root / "plans"), old, b"old")
    disk = CrashDisk(root)
    store = PlanStore(root / "plans", files=disk, reserve_bytes=0, now=lambda: 1e12)
    made = add(store, new, b"new", files=disk)
    store.collect({made.key}, set())
    seen = survivors(disk, tmp_path, [old, new], from_on=0)
    assert frozenset() not in seen
    assert frozenset({0, 1}) in seen  # either will do for both keys, and both are whole
