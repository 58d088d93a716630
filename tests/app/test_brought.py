"""Plans that come with a bundle, as the daemon takes them: by a known key, for this very device, or not at all."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.app.brought import brought_plans
from edge_runtime.app.building import Made, Need, PlanMaker
from edge_runtime.app.proof import Proof
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.manifest import PlanTable, SignatureTable
from edge_runtime.engine.manifest_values import FileTable
from edge_runtime.engine.signing import PlanKeys, SigningKey, Statement
from edge_runtime.engine.tensorrt.plan import PlanTensor, describe
from edge_runtime.engine.tensorrt.plans import PlanStore
from edge_runtime.engine.tensorrt.probe import Here
from edge_runtime.errors import BundleError, EdgeError, EngineError
from tests.engine.graphs import classifier, write_bundle
from tests.engine.stores import refused

HERE = Here("10.3.0", "8.7", "NVIDIA Jetson Orin Nano", "12.6", "36.4.3")
KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
STRANGER = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
MODEL = classifier()
ONNX = hashlib.sha256(MODEL).hexdigest()
TENSORS = (
    PlanTensor(name="x", mode="input", dtype="FLOAT", shape=(-1, 3, 32, 32)),
    PlanTensor(name="y", mode="output", dtype="FLOAT", shape=(-1, 3)),
)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Parcel:
    """A plan with all that belongs to it; whoever attacks changes some of it and puts the sums right."""

    plan: bytes = b"ptrt native code"
    here: Here = HERE
    onnx: str = ONNX
    side: int = 32
    batches: int = 2
    signers: tuple[SigningKey, ...] = (KEY,)
    name: str = "orin.plan"
    told: dict[str, str] = field(default_factory=dict)

    @property
    def sidecar(self) -> bytes:
        return describe(
            self.plan,
            self.here,
            onnx_sha256=self.onnx,
            tensors=TENSORS,
            batches=tuple(range(1, self.batches + 1)),
            options={"width": self.side, "height": self.side, "dla_core": None},
        ).to_json()

    @property
    def signatures(self) -> list[SignatureTable]:
        here = self.here
        of = Statement(
            sha(self.plan), sha(self.sidecar), self.onnx, here.tensorrt, here.compute_capability, here.device
        )
        return [key.sign(of) for key in self.signers]

    def entry(self, *, sidecar: bytes | None = None) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "path": self.name,
            "sha256": sha(self.plan),
            "sidecar": {"path": f"{self.name}.json", "sha256": sha(self.sidecar if sidecar is None else sidecar)},
            "tensorrt": self.here.tensorrt,
            "compute_capability": self.here.compute_capability,
            "device": self.here.device,
            **self.told,
        }
        if self.signers:
            entry["signature"] = [each.model_dump() for each in self.signatures]
        return entry

    def write(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        (root / self.name).write_bytes(self.plan)
        (root / f"{self.name}.json").write_bytes(self.sidecar)


def write_with(root: Path, *entries: dict[str, Any], size: tuple[int, int] = (32, 32)) -> Path:
    file = {"path": "model.onnx", "sha256": ONNX}
    files: dict[str, Any] = {"onnxruntime": file, "tensorrt": file}
    if entries:
        files["tensorrt_plan"] = list(entries)
    return write_bundle(root, MODEL, size=size, variant={"files": files})


class Box:
    """A device's daemon as far as it gets plans. It has too little memory to build any: then code is build_memory."""

    def __init__(self, folder: Path, *keys: SigningKey) -> None:
        folder.mkdir(exist_ok=True)
        self.store = PlanStore(folder / "store")
        self.proved: list[bytes] = []
        self.on_proof: Callable[[], None] = lambda: None
        self.maker = PlanMaker(
            self.store, prove=self._prove, free_bytes=lambda: 1 << 20, plan_keys=[key.public for key in keys]
        )

    def _prove(self, bundle: Bundle, variant: str, *, plan: Path, **rest: object) -> Proof:
        self.proved.append(plan.read_bytes())
        self.on_proof()
        return cast(Proof, None)

    def make(self, bundle: Bundle | Path, **options: Any) -> Made:
        found = bundle if isinstance(bundle, Bundle) else load_bundle(bundle)
        return self.maker.make(Need(found, "fp32", 2), HERE, **options)

    def builds_instead(self, bundle: Bundle | Path, **options: Any) -> bool:
        """Whether no plan of the bundle was used, nor so much as given to the process that proves one."""
        return refused(lambda: self.make(bundle, **options)).code == "build_memory" and not self.proved


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path, KEY)


def bundle_with(folder: Path, parcel: Parcel | None = None, **options: Any) -> Path:
    parcel = parcel or Parcel()
    parcel.write(folder / "bundle")
    return write_with(folder / "bundle", parcel.entry(), **options)


# --- what is used


def test_a_plan_by_a_known_key_is_used_and_proved(tmp_path: Path, box: Box, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    made = box.make(bundle_with(tmp_path))
    assert made.how == "brought"
    assert made.plan.path.read_bytes() == Parcel().plan
    assert box.proved == [Parcel().plan]
    assert f"signed with the key {KEY.id}, and is right" in caplog.text
    assert box.make(tmp_path / "bundle").how == "there"


def test_after_a_rotation_either_key_will_do(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, Parcel(signers=(KEY, STRANGER)))
    for number, key in enumerate((KEY, STRANGER)):
        assert Box(tmp_path / str(number), key).make(bundle).how == "brought"


def test_the_one_for_this_device_is_found_among_others(tmp_path: Path, box: Box) -> None:
    others = [
        Parcel(name="thor.plan", here=replace(HERE, device="Thor", compute_capability="11.0")),
        Parcel(name="older.plan", here=replace(HERE, tensorrt="10.0.1")),
        Parcel(name="driver.plan", here=replace(HERE, driver="12.4"), plan=b"ptrt of another driver"),
        Parcel(name="mine.plan"),
    ]
    for each in others:
        each.write(tmp_path / "bundle")
    made = box.make(write_with(tmp_path / "bundle", *(each.entry() for each in others)))
    assert (made.how, box.proved) == ("brought", [Parcel().plan])


def test_who_trusts_a_bundle_needs_no_signature(tmp_path: Path) -> None:
    bundle = bundle_with(tmp_path, Parcel(signers=()))
    assert Box(tmp_path / "a").make(bundle, trust_plans=True).how == "brought"
    assert Box(tmp_path / "b", KEY).builds_instead(bundle)


# --- what is not


def test_without_a_configured_key_none_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert Box(tmp_path).builds_instead(bundle_with(tmp_path))
    (record,) = [each for each in caplog.records if "is not used" in each.message]
    assert record.levelno == logging.INFO
    assert "nobody is trusted to sign plans" in record.message
    assert "[engine] plan_keys" in record.message


@pytest.mark.parametrize(
    ("parcel", "reason"),
    [
        (Parcel(signers=()), "the plan is not signed"),
        (Parcel(signers=(STRANGER,)), f"signed with the key {STRANGER.id}, and trusted is {KEY.id}"),
        (Parcel(onnx="d" * 64), "is not of this plan, sidecar and ONNX"),
        # rightly signed, and not what is wanted
        (Parcel(batches=1), "built with batches of 1, here is 1 to 2"),
        (Parcel(here=replace(HERE, driver="12.4")), "built with driver for CUDA 12.4"),
        (Parcel(here=replace(HERE, l4t="36.5.0")), "built with L4T 36.5.0"),
        (Parcel(side=64), "for another size of picture"),
        (Parcel(plan=b"MZ no plan"), "no TensorRT plan"),
        (
            Parcel(here=replace(HERE, device="Thor")),
            "there are plans for Thor with TensorRT 10.3.0, and this is NVIDIA",
        ),
    ],
)
def test_the_reason_is_logged_once_and_it_is_built(
    tmp_path: Path, box: Box, caplog: pytest.LogCaptureFixture, parcel: Parcel, reason: str
) -> None:
    caplog.set_level(logging.INFO)
    bundle = bundle_with(tmp_path, parcel)
    assert box.builds_instead(bundle)
    assert box.builds_instead(bundle)
    (record,) = [each for each in caplog.records if "is not used" in each.message]
    assert reason in record.message
    assert record.message.startswith("tiny fp32: a plan of the bundle is not used, one is built: ")


def test_one_that_computes_something_else_is_not_used(
    tmp_path: Path, box: Box, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong() -> None:
        raise EngineError("the golden check failed", code="golden_mismatch")

    box.on_proof = wrong
    assert refused(lambda: box.make(bundle_with(tmp_path))).code == "build_memory"
    assert "the golden check failed" in caplog.text
    assert list(box.store.root.glob("[!lt.]*")) == []


def test_a_cancelled_proof_builds_nothing(tmp_path: Path, box: Box) -> None:
    def cancelled() -> None:
        raise EngineError("it was cancelled", code="cancelled")

    box.on_proof = cancelled
    assert refused(lambda: box.make(bundle_with(tmp_path), cancel=threading.Event())).code == "cancelled"


# --- attacks


def test_a_plan_for_another_module_that_was_moved(tmp_path: Path, box: Box) -> None:
    """Rightly signed for a Thor; the manifest says that it is for this device."""
    thor = Parcel(here=replace(HERE, device="Thor"), told={"device": HERE.device})
    assert box.builds_instead(bundle_with(tmp_path, thor))


def test_the_sidecar_of_another_module_was_put_right_as_well(tmp_path: Path, box: Box) -> None:
    thor = Parcel(here=replace(HERE, device="Thor"))
    moved = {**Parcel().entry(), "signature": thor.entry()["signature"]}
    Parcel().write(tmp_path / "bundle")
    assert box.builds_instead(write_with(tmp_path / "bundle", moved))


def test_the_signature_of_another_plan(tmp_path: Path, box: Box) -> None:
    evil = Parcel(plan=b"ptrt other native code")
    evil.write(tmp_path / "bundle")
    entry = {**evil.entry(), "signature": Parcel().entry()["signature"]}
    assert box.builds_instead(write_with(tmp_path / "bundle", entry))


def test_a_replaced_sidecar(tmp_path: Path, box: Box) -> None:
    parcel = Parcel()
    parcel.write(tmp_path / "bundle")
    other = Parcel(batches=4).sidecar
    (tmp_path / "bundle" / "orin.plan.json").write_bytes(other)
    assert box.builds_instead(write_with(tmp_path / "bundle", parcel.entry(sidecar=other)))


def test_a_plan_that_leads_out_of_the_bundle(tmp_path: Path, box: Box) -> None:
    bundle = load_bundle(bundle_with(tmp_path))
    plan = bundle.root / "orin.plan"
    plan.rename(tmp_path / "elsewhere.plan")
    plan.symlink_to(tmp_path / "elsewhere.plan")
    assert box.builds_instead(bundle)  # the link came after it was loaded
    with pytest.raises(BundleError) as caught:
        load_bundle(bundle.root)
    assert caught.value.code == "path_escape"


def test_a_huge_plan_is_not_read(tmp_path: Path, box: Box, caplog: pytest.LogCaptureFixture) -> None:
    """Larger than what was signed: refused by its size, as it would not fit into memory."""
    bundle = load_bundle(bundle_with(tmp_path))
    with (bundle.root / "orin.plan").open("r+b") as stream:
        stream.truncate(1 << 40)
    assert box.builds_instead(bundle)
    assert "is 1099511627776 bytes, and more than 16 are not read" in caplog.text


def test_of_an_unsigned_plan_no_byte_is_read(tmp_path: Path, box: Box, caplog: pytest.LogCaptureFixture) -> None:
    bundle = load_bundle(bundle_with(tmp_path, Parcel(signers=(STRANGER,))))
    (bundle.root / "orin.plan").unlink()
    (bundle.root / "orin.plan.json").unlink()
    assert box.builds_instead(bundle)
    assert "trusted is" in caplog.text
    assert "it is not there" not in caplog.text


def test_a_plan_exchanged_after_it_was_checked(tmp_path: Path, box: Box) -> None:
    """What is proved and kept is what was checked, whatever lies in the bundle by then."""
    bundle = load_bundle(bundle_with(tmp_path))
    evil = Parcel(plan=b"ptrt other native code")
    box.on_proof = lambda: evil.write(bundle.root)
    made = box.make(bundle)
    assert made.plan.path.read_bytes() == Parcel().plan
    assert made.plan.sidecar.plan_sha256 == sha(Parcel().plan)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return load_bundle(bundle_with(tmp_path_factory.mktemp("bundle")))


def flipped(data: bytes, place: int, bits: int) -> bytes:
    return data[:place] + bytes([data[place] ^ bits]) + data[place + 1 :]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data(), bits=st.integers(1, 255), honest=st.booleans())
@pytest.mark.parametrize("part", ["plan", "sidecar"])
def test_any_other_byte_of_plan_or_sidecar_is_refused(
    bundle: Bundle, part: str, data: st.DataObject, bits: int, honest: bool
) -> None:
    """`honest`: the manifest still lists the old sum; else whoever changed the file put that right."""
    parcel = Parcel()
    files = {"plan": parcel.plan, "sidecar": parcel.sidecar}
    files[part] = flipped(files[part], data.draw(st.integers(0, len(files[part]) - 1)), bits)
    (bundle.root / "orin.plan").write_bytes(files["plan"])
    (bundle.root / "orin.plan.json").write_bytes(files["sidecar"])
    (table,) = bundle.variant("fp32").files.tensorrt_plan
    if not honest:
        sidecar = FileTable(path=table.sidecar.path, sha256=sha(files["sidecar"]))
        table = table.model_copy(update={"sha256": sha(files["plan"]), "sidecar": sidecar})
    errors: list[EdgeError] = []
    assert list(brought_plans(_listing(bundle, table), "fp32", HERE, PlanKeys([KEY.public]), errors.append)) == []
    assert [each.code for each in errors] == ["digest_mismatch" if honest else "plan_signature"]


def _listing(bundle: Bundle, table: PlanTable) -> Bundle:
    (variant,) = bundle.manifest.variant
    files = variant.files.model_copy(update={"tensorrt_plan": (table,)})
    changed = bundle.manifest.model_copy(update={"variant": (variant.model_copy(update={"files": files}),)})
    return replace(bundle, manifest=changed)
