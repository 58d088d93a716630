"""A copy of a bundle that carries the plans which were built here, each signed for devices just like this one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_runtime.app.brought import brought_plans, is_for, statement_of
from edge_runtime.app.building import Made, Need
from edge_runtime.durable import write_atomic
from edge_runtime.engine.archive import manifest_files
from edge_runtime.engine.bundle import MANIFEST_NAME, Bundle, load_bundle
from edge_runtime.engine.manifest import PlanTable
from edge_runtime.engine.manifest_values import FileTable
from edge_runtime.engine.signing import PlanKeys, SigningKey
from edge_runtime.engine.tensorrt.plan import parse_sidecar, sidecar_path, verify
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import BundleError, EdgeError, EngineError, RefusedError
from edge_runtime.prepare.bundle_draft import written_aside
from edge_runtime.prepare.manifest_text import manifest_text

FOLDER = "plans"
"""Where plans lie in the bundle."""


def write_plan_bundle(
    source: Bundle, made: Sequence[tuple[Need, Made]], here: Here, key: SigningKey, out_dir: Path
) -> Bundle:
    """Make the bundle `out_dir` of `source` and of these plans of it, replacing one that is there.

    Plans that `source` carries stay, with their signatures; one of the same model for the same device, batches and
    core gives way. One that is there byte for byte gets one more signature.

    Raises RefusedError (code "plan_brought") for a plan that was not built here: a signature says that it was.
    Raises BundleError for a source that changes meanwhile, EngineError for a plan that is gone or no longer what was
    built, EdgeError (code "write_failed") when the disk refuses; then nothing is left.
    """
    for need, each in made:
        if each.plan.brought:
            raise RefusedError(
                f"the plan of {need.variant} came with a bundle, and what is signed is built here",
                code="plan_brought",
                where=str(each.plan.path.parent),
                remedy="build it into a store of its own: --store DIR",
            )
    with written_aside(out_dir) as aside:
        bundle = _write(source, made, here, key, aside)
    return replace(bundle, root=out_dir)


def _write(source: Bundle, made: Sequence[tuple[Need, Made]], here: Here, key: SigningKey, folder: Path) -> Bundle:
    plans = {variant.name: list(variant.files.tensorrt_plan) for variant in source.manifest.variant}
    written: set[str] = set()
    for need, each in made:
        written |= _add(plans[need.variant], need, each, here, key, folder)
    files = dict(source.manifest.files or {})
    listed = {entry.path for tables in plans.values() for table in tables for entry in (table, table.sidecar)}
    replaced = written | (_plan_files(source) - listed)
    files = {name: sha256 for name, sha256 in files.items() if name not in replaced}
    for name in map(str, manifest_files(source)[1:]):
        if name in replaced:
            continue
        data = (source.root / name).read_bytes()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / name, data)
        if name not in files and name not in listed and name not in _models(source):
            files[name] = hashlib.sha256(data).hexdigest()
    manifest = source.manifest.model_dump(exclude_none=True, exclude_unset=True)
    for variant in manifest["variant"]:
        _list(variant["files"], plans[variant["name"]])
    text = manifest_text(
        manifest["bundle"], manifest["input"], manifest["output"], manifest["variant"], dict(sorted(files.items()))
    )
    write_atomic(folder / MANIFEST_NAME, text.encode())
    bundle = load_bundle(folder)
    _check(bundle, made, here, key)
    return bundle


def _add(tables: list[PlanTable], need: Need, made: Made, here: Here, key: SigningKey, folder: Path) -> set[str]:
    """Sign a plan of the store, and list it; returns the paths of what was written for that."""
    path = made.plan.path
    try:
        plan, sidecar = path.read_bytes(), sidecar_path(path).read_bytes()
    except OSError as error:
        message = f"the plan that was built cannot be read: {error.strerror}"
        raise EngineError(
            message, code="plan_missing", where=str(path), remedy="run this again", retryable=True
        ) from None
    verify(plan, parse_sidecar(sidecar, str(sidecar_path(path))), here, str(path))
    # by all that it depends on: another driver's, core's or batch's lies beside it
    name = f"{FOLDER}/{need.variant}-{made.plan.key[:16]}.plan"
    table = PlanTable(
        path=name,
        sha256=hashlib.sha256(plan).hexdigest(),
        sidecar=FileTable(path=f"{name}.json", sha256=hashlib.sha256(sidecar).hexdigest()),
        tensorrt=here.tensorrt,
        compute_capability=here.compute_capability,
        device=here.device,
    )
    signature = key.sign(statement_of(table, need.onnx_sha256))
    for place, old in enumerate(tables):
        if (old.sha256, old.sidecar.sha256) == (table.sha256, table.sidecar.sha256) and is_for(old, here):
            others = tuple(each for each in old.signature if each.key != key.id)
            tables[place] = old.model_copy(update={"signature": (*others, signature)})
            return set()
    tables[:] = [old for old in tables if old.path != name]
    tables.append(table.model_copy(update={"signature": (signature,)}))
    (folder / FOLDER).mkdir(exist_ok=True)
    write_atomic(folder / table.path, plan)
    write_atomic(folder / table.sidecar.path, sidecar)
    return {table.path, table.sidecar.path}


def _plan_files(source: Bundle) -> set[str]:
    return {
        entry.path
        for variant in source.manifest.variant
        for table in variant.files.tensorrt_plan
        for entry in (table, table.sidecar)
    }


def _models(source: Bundle) -> set[str]:
    found = (
        each for variant in source.manifest.variant for each in (variant.files.onnxruntime, variant.files.tensorrt)
    )
    return {each.path for each in found if each is not None}


def _list(files: dict[str, Any], plans: Sequence[PlanTable]) -> None:
    files.pop("tensorrt_plan", None)
    if plans:
        files["tensorrt_plan"] = [plan.model_dump(exclude_unset=True) for plan in plans]


def _check(bundle: Bundle, made: Sequence[tuple[Need, Made]], here: Here, key: SigningKey) -> None:
    """What a device like this one will do with the bundle, done with what was written."""
    keys = PlanKeys([key.public])
    for need, each in made:
        refused: list[EdgeError] = []
        found = brought_plans(bundle, need.variant, here, keys, refused.append)
        if not any(hashlib.sha256(one.plan).hexdigest() == each.plan.sidecar.plan_sha256 for one in found):
            raise BundleError(
                f"the plan of {need.variant} cannot be read back: {'; '.join(error.message for error in refused)}",
                where=str(bundle.root / MANIFEST_NAME),
                remedy="nothing was left behind; try again",
            )
