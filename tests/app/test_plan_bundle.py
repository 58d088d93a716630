"""A bundle that carries signed plans: all else in it stays as it is, and there never is half of one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from edge_runtime.app import plan_bundle
from edge_runtime.app.building import Made, Need
from edge_runtime.app.plan_bundle import write_plan_bundle
from edge_runtime.durable import write_atomic
from edge_runtime.engine.archive import manifest_files, require_listed
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.manifest import PlanTable
from edge_runtime.engine.signing import SigningKey
from edge_runtime.engine.tensorrt.plan import sidecar_path
from edge_runtime.engine.tensorrt.plans import PLAN as PLAN_NAME
from edge_runtime.engine.tensorrt.plans import PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from tests.app.test_brought import HERE, KEY, STRANGER, Box, Parcel, write_with
from tests.engine.graphs import classifier, write_bundle
from tests.engine.stores import refused

THOR = replace(HERE, device='NVIDIA "Thor" \u00fc', compute_capability="11.0")
PLAN = Parcel(batches=8)


class Bench:
    """A device with plans in its store."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.number = 0

    def made(self, bundle: Bundle, parcel: Parcel = PLAN) -> list[tuple[Need, Made]]:
        self.number += 1
        store = PlanStore(self.folder / f"store-{self.number}")
        need = Need(bundle, "fp32", parcel.batches)
        with store.aside() as folder:
            write_atomic(folder / PLAN_NAME, parcel.plan)
            write_atomic(sidecar_path(folder / PLAN_NAME), parcel.sidecar)
            plan = store.place(folder, need.key(parcel.here))
        return [(need, Made(plan, "built"))]

    def write(
        self, source: Path, out: str, parcel: Parcel = PLAN, key: SigningKey = KEY, here: Here | None = None
    ) -> Bundle:
        bundle = load_bundle(source)
        return write_plan_bundle(bundle, self.made(bundle, parcel), here or parcel.here, key, self.folder / out)


def plans_of(bundle: Bundle) -> tuple[PlanTable, ...]:
    return bundle.variant("fp32").files.tensorrt_plan


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_with(tmp_path / "source")


def test_it_carries_the_plan_and_all_else_is_what_it_was(tmp_path: Path, bench: Bench, source: Path) -> None:
    (source / "NOTES").write_text("no file of the bundle")
    written = bench.write(source, "out")
    before, after = load_bundle(source), require_listed(load_bundle(tmp_path / "out"))
    assert written == after
    (table,) = plans_of(after)
    assert [each.key for each in table.signature] == [KEY.id]
    assert {*manifest_files(after)} == {*manifest_files(before), Path(table.path), Path(table.sidecar.path)}
    (variant,) = after.manifest.variant
    without = variant.model_copy(update={"files": variant.files.model_copy(update={"tensorrt_plan": ()})})
    assert after.manifest.model_copy(update={"variant": (without,)}) == before.manifest
    assert after.digest != before.digest
    assert sorted(tmp_path.glob(".*")) == []
    # and a device uses it
    made = Box(tmp_path / "box", KEY).make(after)
    assert (made.how, made.plan.path.read_bytes()) == ("brought", PLAN.plan)


def test_a_bundle_that_lists_no_files_lists_them_all_then(tmp_path: Path, bench: Bench) -> None:
    from tests.app.test_brought import ONNX

    file = {"path": "model.onnx", "sha256": ONNX}
    source = write_bundle(tmp_path / "old", classifier(), variant={"files": {"tensorrt": file}})
    text = (source / "bundle.toml").read_text()
    table = text[text.index("[files]") : text.index("[[variant]]")]
    (source / "bundle.toml").write_text(text.replace(table, ""))
    assert load_bundle(source).manifest.files is None
    require_listed(bench.write(source, "out"))


def test_plans_for_other_devices_stay_with_their_signatures(tmp_path: Path, bench: Bench, source: Path) -> None:
    thor = replace(PLAN, here=THOR)
    bench.write(source, "one", thor, STRANGER)
    both = bench.write(tmp_path / "one", "one")  # into the very bundle that it comes from
    first, second = plans_of(both)
    assert (first.device, [each.key for each in first.signature]) == (THOR.device, [STRANGER.id])
    assert (second.device, [each.key for each in second.signature]) == (HERE.device, [KEY.id])
    assert both.read_sidecar(first) == thor.sidecar


def test_another_driver_has_its_own(tmp_path: Path, bench: Bench, source: Path) -> None:
    bench.write(source, "one")
    later = replace(PLAN, here=replace(HERE, driver="12.8"), plan=b"ptrt under another driver")
    assert len(plans_of(bench.write(tmp_path / "one", "two", later))) == 2


def test_the_same_again_with_another_key_is_one_more_signature(tmp_path: Path, bench: Bench, source: Path) -> None:
    bench.write(source, "one")
    (table,) = plans_of(bench.write(tmp_path / "one", "two", key=STRANGER))
    assert [each.key for each in table.signature] == [KEY.id, STRANGER.id]
    (again,) = plans_of(bench.write(tmp_path / "two", "three", key=KEY))
    assert [each.key for each in again.signature] == [STRANGER.id, KEY.id]
    for number, key in enumerate((KEY, STRANGER)):
        assert Box(tmp_path / f"box-{number}", key).make(tmp_path / "three").how == "brought"


def test_one_that_was_built_anew_takes_the_place_of_the_old(tmp_path: Path, bench: Bench, source: Path) -> None:
    bench.write(source, "one", key=STRANGER)
    anew = replace(PLAN, plan=b"ptrt built anew")
    bundle = bench.write(tmp_path / "one", "two", anew)
    (table,) = plans_of(bundle)
    assert bundle.read_plan(table) == anew.plan
    assert [each.key for each in table.signature] == [KEY.id]
    assert len(list((tmp_path / "two" / "plans").iterdir())) == 2


def test_a_plan_for_another_device_is_not_signed_for_this_one(tmp_path: Path, bench: Bench, source: Path) -> None:
    error = refused(lambda: bench.write(source, "out", here=THOR))
    assert error.code == "plan_mismatch"
    assert not (tmp_path / "out").exists()


def test_a_plan_that_came_with_a_bundle_is_not_signed(tmp_path: Path, bench: Bench, source: Path) -> None:
    bundle = load_bundle(source)
    need, made = bench.made(bundle)[0]
    assert not made.plan.brought
    store = PlanStore(tmp_path / "trusting")
    plan = store.put(PLAN.plan, PLAN.sidecar, need.key(HERE), Path.exists)
    for found in (plan, store.find(need.key(HERE)).plan):
        assert found is not None
        signing = partial(write_plan_bundle, bundle, [(need, Made(found, "there"))], HERE, KEY, tmp_path / "out")
        error = refused(signing)
        assert (error.code, error.where) == ("plan_brought", str(plan.path.parent))
    assert not (tmp_path / "out").exists()


def test_a_plan_that_was_damaged_is_not_signed(tmp_path: Path, bench: Bench, source: Path) -> None:
    bundle = load_bundle(source)
    made = bench.made(bundle)
    path = made[0][1].plan.path
    path.chmod(0o644)
    path.write_bytes(PLAN.plan[:-1])
    assert refused(lambda: write_plan_bundle(bundle, made, HERE, KEY, tmp_path / "out")).code == "plan_damaged"
    path.unlink()
    gone = refused(lambda: write_plan_bundle(bundle, made, HERE, KEY, tmp_path / "out"))
    assert (gone.code, gone.where) == ("plan_missing", str(path))
    assert not (tmp_path / "out").exists()


def test_a_source_that_changed_meanwhile(tmp_path: Path, bench: Bench, source: Path) -> None:
    bundle = load_bundle(source)
    (source / "labels.txt").write_text("others\n")
    error = refused(lambda: write_plan_bundle(bundle, bench.made(bundle), HERE, KEY, tmp_path / "out"))
    assert (error.code, error.where) == ("digest_mismatch", str(tmp_path / "out" / "labels.txt"))
    assert sorted(tmp_path.glob(".*")) == []


def test_a_disk_that_fails_leaves_the_old_one(
    tmp_path: Path, bench: Bench, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = bench.write(source, "out").digest

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(plan_bundle, "write_atomic", full)
    error = refused(lambda: bench.write(source, "out", replace(PLAN, plan=b"ptrt anew")))
    assert (error.code, "No space left" in error.message) == ("write_failed", True)
    assert load_bundle(tmp_path / "out").digest == before
    assert sorted(tmp_path.glob(".*")) == []


def test_a_plan_that_files_lists_as_well_gives_way_there_too(tmp_path: Path, bench: Bench, source: Path) -> None:
    (table,) = plans_of(bench.write(source, "one"))
    manifest = tmp_path / "one" / "bundle.toml"
    manifest.write_text(manifest.read_text().replace("[files]\n", f'[files]\n"{table.path}" = "{table.sha256}"\n'))
    anew = bench.write(tmp_path / "one", "two", replace(PLAN, plan=b"ptrt built anew"))
    assert table.path not in (anew.manifest.files or {})
