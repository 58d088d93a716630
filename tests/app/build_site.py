"""A plan maker on a disk of the test's choice: all of it is the real one but TensorRT, which gives the same bytes each
time, and the proof, which looks at the plan and says what the test wants."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.app import building
from edge_runtime.app.building import Made, Need, PlanMaker
from edge_runtime.app.proof import Proof
from edge_runtime.durable import REAL, Files
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.tensorrt.build import BuildFacts
from edge_runtime.engine.tensorrt.build_child import save, save_cache
from edge_runtime.engine.tensorrt.plan import PlanTensor, Sidecar, describe, read_sidecar, verify
from edge_runtime.engine.tensorrt.plans import BROUGHT, PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import EdgeError, RefusedError
from tests.engine.graphs import classifier, write_bundle

HERE = Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano", "12.6", "36.4.3")
BEFORE = replace(HERE, driver="12.4")
"""A driver ago: what was built for it still runs."""
LONG_AGO = replace(HERE, tensorrt="8.6.1")
PLAN = b"ptrt" + bytes(range(200))
CACHE = b"measured" * 8
MOST = 2
_TENSORS = (
    PlanTensor(name="x", mode="input", dtype="FLOAT", shape=(-1, 3, 32, 32)),
    PlanTensor(name="y", mode="output", dtype="FLOAT", shape=(-1, 3)),
)
_PROOF = Proof(
    engine="e",
    variant="fp32",
    load_s=0.1,
    inference_ms=1.0,
    slowest_ms=1.0,
    cpu_ms=1.0,
    batches=None,
    memory_bytes=1,
    peak_bytes=1,
    golden="as promised",
    took_s=0.1,
)


def need_of(folder: Path) -> Need:
    """A plan of a small network, in a bundle in `folder`."""
    model = classifier()
    file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
    root = write_bundle(folder, model, variant={"files": {"onnxruntime": file, "tensorrt": file}})
    return Need(load_bundle(root), "fp32", MOST)


def sidecar_of(need: Need, here: Here = HERE, plan: bytes = PLAN) -> Sidecar:
    told = {"width": 32, "height": 32, "dla_core": None, "build_s": 1.0, "peak_bytes": 1 << 20}
    batches = tuple(range(1, MOST + 1))
    return describe(plan, here, onnx_sha256=need.onnx_sha256, tensors=_TENSORS, batches=batches, options=told)


def facts_of(notes: tuple[str, ...] = ()) -> BuildFacts:
    return BuildFacts(HERE, len(PLAN), None, 1.0, 3, (), notes, 1.0)


def facts_line(**more: Any) -> dict[str, Any]:
    """The last line of a build's process."""
    found = asdict(facts_of()) | {"stage": "done", "here": asdict(HERE)} | more
    return {name: value for name, value in found.items() if name != "took_s"}


@dataclass
class Site:
    """A store in `root`/plans and who makes plans there. `wrong`: the plan does not compute what it should."""

    need: Need
    root: Path
    files: Files = REAL
    wrong: bool = False
    proofs: int = 0
    builds: int = 0
    on_proved: Callable[[], None] = lambda: None
    now_s: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.store = PlanStore(self.root / "plans", files=self.files, reserve_bytes=0, now=lambda: self.now_s)
        self.maker = PlanMaker(self.store, prove=self.prove, free_bytes=lambda: None)

    def put(self, here: Here) -> None:
        """A plan that was made earlier, and what TensorRT measured then."""
        self.store.put(PLAN, sidecar_of(self.need, here).to_json(), self.need.key(here), Path.exists)
        save_cache(self.store.timing_cache(here), CACHE, self.files)

    def make(self, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Made:
        with monkeypatch.context() as patch:
            patch.setattr(building, "build_plan", self.build)
            return self.maker.make(self.need, HERE, **options)

    def build(self, *_: object, plan: Path, cache: Path, **options: object) -> BuildFacts:
        """What the process of a build does on the disk."""
        self.builds += 1
        save(plan, PLAN, sidecar_of(self.need), self.files)
        note = save_cache(cache, CACHE, self.files)
        return facts_of(() if note is None else (note,))

    def prove(self, *_: object, plan: Path, **options: object) -> Proof:
        self.proofs += 1
        sidecar = read_sidecar(plan)
        verify(plan.read_bytes(), sidecar, HERE, str(plan))
        if self.wrong:
            raise RefusedError("the golden check failed", code="golden_mismatch", where=str(plan), remedy="none")
        self.on_proved()
        return _PROOF


def start_anew(need: Need, root: Path, files: Files, *, damaged: Collection[str] = ()) -> Site:
    """The next start on a disk that works: clears up, and fails where something half-made is left. Keys that were
    `damaged` before may be so still."""
    site = Site(need, root, files)
    site.store.sweep()
    check_whole(site, damaged)
    return site


def check_whole(site: Site, damaged: Collection[str] = ()) -> None:
    """Every plan is whole and under its key, and there is nothing else."""
    keys = {site.need.key(here).digest: here for here in (HERE, BEFORE, LONG_AGO)}
    if not site.store.root.is_dir():
        return
    for each in site.store.root.iterdir():
        if each.name == "timing":
            assert {file.suffix for file in each.iterdir()} <= {".cache"}, list(each.iterdir())
        elif each.name != "lock":
            assert each.name in keys, f"{each.name} is left"
            if each.name not in damaged:
                names = {file.name for file in each.iterdir()} - {BROUGHT}
                assert names == {"plan", "plan.json"}, "half a plan is left"
                found = site.store.find(site.need.key(keys[each.name])).plan
                assert found is not None, "a torn plan is left"
                assert found.path.parent == each


def check_told(error: EdgeError) -> None:
    """A plain word, a place and a remedy."""
    assert error.code
    assert error.where
    assert error.remedy
    assert len(error.message) > 10
    assert "Traceback" not in str(error)


def refused_by(site: Site, monkeypatch: pytest.MonkeyPatch, **options: Any) -> EdgeError | None:
    """The error of a build; None: it was made. Anything but an error of ours fails: it would end the daemon."""
    try:
        site.make(monkeypatch, **options)
    except EdgeError as error:
        check_told(error)
        return error
    return None
