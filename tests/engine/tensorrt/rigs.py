"""Every backend behind one way to load a model: ONNX Runtime, and TensorRT on each fake of its libraries."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.engine import onnxrt
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.protocol import Engine
from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor
from edge_runtime.engine.tensorrt.cuda import Cuda
from edge_runtime.engine.tensorrt.letterbox import NAME
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.plan import PlanTensor, Sidecar, describe
from edge_runtime.engine.tensorrt.probe import Here, look
from edge_runtime.engine.tensorrt.pycuda_door import PyCudaDoor
from edge_runtime.engine.tensorrt.runtime import load_plan
from edge_runtime.engine.tensorrt.scaler import Scaler
from tests.engine.graphs import write_bundle
from tests.engine.tensorrt import kernel_cpu
from tests.engine.tensorrt.fake_bindings import make_driver
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_nvrtc import FakeNvrtc
from tests.engine.tensorrt.fake_plan import make_plan
from tests.engine.tensorrt.fake_pycuda import make_pycuda
from tests.engine.tensorrt.fake_tensorrt import make_tensorrt
from tests.engine.tensorrt.fake_trt_types import ONNX_TYPES

BATCHES = tuple(range(1, 11))


@dataclass(frozen=True)
class Kind:
    """Which libraries, and how the backend uses them."""

    name: str
    version: str = ""
    door: str = ""
    mapped: bool = False
    graphs: bool = True


KINDS = (
    Kind("onnxruntime"),
    Kind("trt10-pycuda", "10.3.0", "pycuda"),
    Kind("trt10-pycuda-mapped", "10.3.0", "pycuda", mapped=True),
    Kind("trt11-bindings", "11.4.1", "bindings"),
    Kind("trt11-bindings-plain", "11.4.1", "bindings", graphs=False),
)
TENSORRT = KINDS[1:]
USUAL = ("onnxruntime", "trt10-pycuda", "trt11-bindings")
"""The kinds that are tested usually; the others differ in one way of handing over memory, or of running."""


@dataclass
class Rig:
    """One backend, and for TensorRT its machine, owner and library."""

    kind: Kind
    root: Path
    machine: Machine = field(default_factory=Machine)
    fatal: list[str] = field(default_factory=list)
    owner: GpuOwner | None = None
    trt: Any = None
    here: Here | None = None
    loaded: int = 0
    scales: bool = False
    """Whether the kernel for whole pictures is there."""
    scaler: Scaler | None = None

    @property
    def is_tensorrt(self) -> bool:
        return self.kind.door != ""

    def door(self) -> Cuda:
        if self.kind.door == "pycuda":
            return PyCudaDoor(make_pycuda(self.machine))
        return CudaBindingsDoor(make_driver(self.machine))

    def start(self) -> None:
        """Start the owner's thread. Raises EngineError."""
        if self.is_tensorrt:
            self.trt = make_tensorrt(self.machine, self.kind.version)
            door = self.door()
            self.owner = GpuOwner(door, self.fatal.append)
            self.owner.start()
            self.here = self.owner.call(lambda: look(self.trt, door, self.root))
            if self.scales:
                self.machine.kernels.setdefault(NAME, kernel_cpu.on_machine)
                self.scaler = Scaler(self.owner, self.here, self.root / "kernels", load=lambda _: FakeNvrtc())

    def stop(self) -> None:
        """End it: nothing may be left."""
        if self.owner is not None:
            assert self.owner.stop(10.0) == []

    def bundle(self, model: bytes, **options: Any) -> Bundle:
        self.loaded += 1
        file = {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}
        variant = {"files": {"onnxruntime": file, "tensorrt": file}, **options.pop("variant", {})}
        folder = self.root / f"bundle-{self.loaded}"
        return load_bundle(write_bundle(folder, model, variant=variant, **options))

    def load(self, model: bytes, *, batches: Sequence[int] = BATCHES, **options: Any) -> Engine:
        """An engine of a bundle made of this model. Raises as the loaders do."""
        return self.load_bundle(self.bundle(model, **options), batches=batches)

    def load_bundle(
        self, bundle: Bundle, variant: str = "auto", *, batches: Sequence[int] = BATCHES, changed: Any = None
    ) -> Engine:
        """`changed`: what is made of (plan, sidecar) before they are loaded."""
        if not self.is_tensorrt:
            return onnxrt.load_engine(bundle, variant)
        name = bundle.variant(variant, "onnxruntime").name
        model = bundle.read_artefact(name, "onnxruntime")
        plan, sidecar = self.build(model, bundle.input_spec(name).shape, batches)
        if changed is not None:
            plan, sidecar = changed(plan, sidecar)
        assert self.owner is not None
        assert self.here is not None
        kernel = None if self.scaler is None else self.scaler.kernel_for(bundle.input_spec(name), "gpu", name)
        return load_plan(
            self.owner,
            self.trt,
            bundle,
            name,
            plan,
            sidecar,
            here=self.here,
            where=f"{name}.plan",
            prefer_mapped=self.kind.mapped,
            graphs=self.kind.graphs,
            kernel=kernel,
        )

    def build(self, model: bytes, picture: tuple[int, ...], batches: Sequence[int]) -> tuple[bytes, Sidecar]:
        """A plan as it would be built here, and its sidecar."""
        assert self.here is not None
        session = onnxrt.open_session(model, "model.onnx")
        dynamic = {
            each.name: ((batches[0], *picture), (batches[0], *picture), (batches[-1], *picture))
            for each in session.get_inputs()
            if not all(isinstance(side, int) for side in each.shape)
        }
        profiles = [dynamic] if dynamic else []
        plan = make_plan(model, version=self.kind.version, capability=self.machine.capability, profiles=profiles)
        sides: list[tuple[Any, Any]] = [("input", each) for each in session.get_inputs()] + [
            ("output", each) for each in session.get_outputs()
        ]
        tensors = tuple(
            PlanTensor(
                name=each.name,
                mode=mode,
                dtype=ONNX_TYPES[each.type],
                shape=tuple(side if isinstance(side, int) else -1 for side in each.shape),
            )
            for mode, each in sides
        )
        digest = hashlib.sha256(model).hexdigest()
        sidecar = describe(plan, self.here, onnx_sha256=digest, tensors=tensors, batches=tuple(batches), options={})
        return plan, sidecar


def fill(array: np.ndarray[Any, Any], seed: int, count: int) -> np.ndarray[Any, Any]:
    """Random pictures in the first places, poison in the others; returns each place's means by channel."""
    array[:] = np.nan
    array[:count] = np.random.default_rng(seed).uniform(0, 255, array[:count].shape)
    return np.asarray(array[:count].astype(np.float64).mean(axis=(2, 3)))
