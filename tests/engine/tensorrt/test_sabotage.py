"""The suite sees what it is there to see: the backend, made wrong in one place, does not pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor
from edge_runtime.engine.tensorrt.cuda import HostMemory
from edge_runtime.engine.tensorrt.lane import GpuLane
from edge_runtime.engine.tensorrt.owner import GpuOwner
from edge_runtime.engine.tensorrt.pycuda_door import PyCudaDoor
from edge_runtime.engine.tensorrt.runtime import TensorRtEngine
from tests.engine.graphs import classifier
from tests.engine.tensorrt.rigs import KINDS, Kind
from tests.engine.tensorrt.test_faults import Life, faults

PYCUDA = next(kind for kind in KINDS if kind.name == "trt10-pycuda")
BINDINGS = next(kind for kind in KINDS if kind.name == "trt11-bindings")

Patch = Callable[[pytest.MonkeyPatch], None]


def does_not_wait(patch: pytest.MonkeyPatch) -> None:
    for door in (PyCudaDoor, CudaBindingsDoor):
        patch.setattr(door, "query", lambda *_: True)


def drops_the_engine_first(patch: pytest.MonkeyPatch) -> None:
    close = TensorRtEngine._close

    def wrong(self: Any) -> None:
        self._engine = None
        close(self)

    patch.setattr(TensorRtEngine, "_close", wrong)


def copies_from_a_temporary(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostMemory, "part", lambda host, start, nbytes: host.array[start : start + nbytes].copy())


def looks_at_no_answer_of_a_run(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, mark: int) -> None:
        self._context.execute_async_v3(self._stream.handle)

    patch.setattr(GpuLane, "_execute", wrong)


def binds_no_output(patch: pytest.MonkeyPatch) -> None:
    address = GpuLane._address

    def wrong(self: Any, name: str, *others: Any) -> None:
        if name != "y":
            address(self, name, *others)

    patch.setattr(GpuLane, "_address", wrong)


def sets_its_state_once(patch: pytest.MonkeyPatch) -> None:
    set_state = GpuLane._set

    def wrong(self: Any, count: int, address: int, mark: int) -> None:
        if self._state is None:
            set_state(self, count, address, mark)
        self._state = (count, address)

    patch.setattr(GpuLane, "_set", wrong)


def keeps_old_graphs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuLane, "_forget", lambda lane: setattr(lane, "_state", None))


def runs_where_it_is_called(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuOwner, "call", lambda _, job: job())


def frees_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuLane, "free", lambda _: None)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (PYCUDA, does_not_wait),
        (BINDINGS, does_not_wait),
        (PYCUDA, drops_the_engine_first),
        (PYCUDA, copies_from_a_temporary),
        (PYCUDA, looks_at_no_answer_of_a_run),
        (PYCUDA, binds_no_output),
        (BINDINGS, sets_its_state_once),
        (BINDINGS, keeps_old_graphs),
        (PYCUDA, runs_where_it_is_called),
        (BINDINGS, frees_nothing),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else value.__name__,
)
def test_a_wrong_backend_is_seen(kind: Kind, wrong: Patch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    life = Life(kind, tmp_path, classifier())
    told_wrong = "IExecutionContext.execute_async_v3"
    life.rig.machine.inject(told_wrong, "refused", after=5)
    life.live()
    found = faults(life, told_wrong)
    if wrong in (binds_no_output, runs_where_it_is_called):
        assert life.answers == 0  # it does not even load
        assert life.errors
    else:
        assert found
