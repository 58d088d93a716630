"""The fakes are as bad as the real ones: every abuse of them is seen. What they let pass would prove nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.engine.graphs import SIDE, classifier, data_dependent
from tests.engine.tensorrt.fake_bindings import make_driver
from tests.engine.tensorrt.fake_machine import Machine
from tests.engine.tensorrt.fake_parts import ILLEGAL_ADDRESS, Segfault
from tests.engine.tensorrt.fake_plan import batches, make_plan
from tests.engine.tensorrt.fake_pycuda import make_pycuda
from tests.engine.tensorrt.fake_tensorrt import make_tensorrt

PICTURE = (3, SIDE, SIDE)
PROFILE = batches("x", PICTURE, (1, 2, 4))


class Use:
    """TensorRT used by hand on this thread, rightly but for what a test does wrong."""

    def __init__(self, version: str = "10.3.0", model: bytes | None = None, seed: int = 1) -> None:
        self.machine = Machine(seed=seed)
        self.trt, self.cuda = make_tensorrt(self.machine, version), make_pycuda(self.machine)
        self.said: list[str] = []
        self.cuda.init()
        self.gpu = self.cuda.Device(0).retain_primary_context()
        self.gpu.push()
        self.logger = self._logger()
        self.runtime = self.trt.Runtime(self.logger)
        plan = make_plan(model or classifier(), version=version, profiles=PROFILE)
        self.engine = self.runtime.deserialize_cuda_engine(plan)
        self.context = self.engine.create_execution_context()
        self.stream = self.cuda.Stream()
        self.input = self.cuda.mem_alloc(4 * int(np.prod(PICTURE)) * 4)
        self.output = self.cuda.mem_alloc(4096)
        self.source = self.cuda.pagelocked_empty((4, *PICTURE), np.float32)
        self.result = self.cuda.pagelocked_empty((4, 3), np.float32)

    def _logger(self) -> Any:
        said = self.said

        class Logger(self.trt.ILogger):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()

            def log(self, severity: Any, msg: str) -> None:
                said.append(msg)

        return Logger()

    def bind(self, count: int = 2) -> None:
        assert self.context.set_input_shape("x", (count, *PICTURE))
        assert self.context.infer_shapes() == []
        assert self.context.set_tensor_address("x", int(self.input))
        assert self.context.set_tensor_address("y", int(self.output))

    def enqueue(self) -> bool:
        self.cuda.memcpy_htod_async(self.input, self.source[:2], self.stream)
        ran: bool = self.context.execute_async_v3(self.stream.handle)
        self.cuda.memcpy_dtoh_async(self.result[:2], self.output, self.stream)
        return ran

    def end(self) -> None:
        self.context = None
        self.engine = None
        self.runtime = None
        self.stream = None
        for memory in (self.input, self.output, self.source.base, self.result.base):
            memory.free()
        self.gpu.pop()
        self.gpu.detach()


def test_right_use_is_no_violation() -> None:
    for version in ("10.3.0", "11.4.1"):
        use = Use(version)
        use.bind()
        use.source[:] = 3.0
        assert use.enqueue()
        assert np.isnan(use.result[:2]).all()  # nothing happens before somebody waits
        use.stream.synchronize()
        assert (use.result[:2] == 3.0).all()
        use.end()
        use.machine.check_empty()


def overwritten(use: Use) -> None:
    use.bind()
    use.source[:] = 3.0
    use.enqueue()
    use.source[:] = 5.0
    use.stream.synchronize()
    assert (use.result[:2] == 5.0).all()
    use.machine.violated("seen as a wrong answer")


def freed_input(use: Use) -> None:
    use.bind()
    use.input.free()
    assert use.context.execute_async_v3(use.stream.handle)
    with pytest.raises(Segfault, match="was freed"):
        use.stream.synchronize()


def temporary(use: Use) -> None:
    use.bind()
    use.cuda.memcpy_htod_async(use.input, np.ones((2, *PICTURE), np.float32), use.stream)


def written_after_free(use: Use) -> None:
    kept = use.cuda.pagelocked_empty(16, np.float32)
    kept.base.free()
    kept[3] = 1.0
    with pytest.raises(AssertionError, match="written after it was freed"):
        use.machine.check()


def other_thread(use: Use) -> None:
    use.bind()
    thread = threading.Thread(target=use.context.infer_shapes)
    thread.start()
    thread.join()


def freed_on_another_thread(use: Use) -> None:
    memory = use.cuda.mem_alloc(64)
    thread = threading.Thread(target=memory.free)
    thread.start()
    thread.join()
    assert use.machine.live()["device"] == 3


def left_to_the_collector(use: Use) -> None:
    use.cuda.mem_alloc(64)


def engine_before_context(use: Use) -> None:
    use.engine = None


def runtime_before_engine(use: Use) -> None:
    use.runtime = None


def context_while_it_runs(use: Use) -> None:
    use.bind()
    use.enqueue()
    use.context = None


def context_after_engine(use: Use) -> None:
    use.engine = None
    with pytest.raises(Segfault):
        use.context.infer_shapes()


def logger_gone(use: Use) -> None:
    use.logger = None
    with pytest.raises(Segfault):
        use.runtime.deserialize_cuda_engine(b"nothing of a plan")


def freed_twice(use: Use) -> None:
    driver = make_driver(use.machine)
    _, address = driver.cuMemAlloc(64)
    assert driver.cuMemFree(address)[0] == driver.CUresult.CUDA_SUCCESS
    assert driver.cuMemFree(address)[0] == driver.CUresult.CUDA_ERROR_INVALID_VALUE


def default_stream(use: Use) -> None:
    use.bind()
    use.cuda.memcpy_htod_async(use.input, use.source)


def overrun(use: Use) -> None:
    use.context.set_input_shape("x", (4, *PICTURE))
    small = use.cuda.mem_alloc(64)
    use.context.set_tensor_address("x", int(small))
    use.context.set_tensor_address("y", int(use.output))
    use.context.execute_async_v3(use.stream.handle)
    with pytest.raises(Segfault):
        use.stream.synchronize()
    assert use.machine.sticky == ILLEGAL_ADDRESS


def misaligned(use: Use) -> None:
    use.context.set_tensor_address("x", int(use.input) + 4)


def host_code(use: Use) -> None:
    use.runtime.engine_host_code_allowed = True


def thread_ends_with_a_context(use: Use) -> None:
    thread = threading.Thread(target=use.gpu.push)
    thread.start()
    thread.join()
    with pytest.raises(AssertionError, match="ended with a context on its stack"):
        use.machine.check()


ABUSES = (
    overwritten,
    freed_input,
    temporary,
    written_after_free,
    other_thread,
    freed_on_another_thread,
    left_to_the_collector,
    engine_before_context,
    runtime_before_engine,
    context_while_it_runs,
    context_after_engine,
    logger_gone,
    freed_twice,
    default_stream,
    overrun,
    misaligned,
    host_code,
    thread_ends_with_a_context,
)


@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.__name__)
def test_abuse_is_seen(abuse: Callable[[Use], None]) -> None:
    use = Use()
    abuse(use)
    assert use.machine.violations
    use.machine.sticky = use.machine.sticky or ILLEGAL_ADDRESS  # what is left is of no interest


def test_what_is_not_set_is_false_and_said() -> None:
    use = Use()
    assert use.context.infer_shapes() == ["x"]
    assert not use.context.execute_async_v3(use.stream.handle)
    assert not use.context.set_input_shape("x", (9, *PICTURE))
    assert not use.context.set_input_shape("z", (1, *PICTURE))
    assert not use.context.set_tensor_address("z", 0)
    assert use.context.set_input_shape("x", (1, *PICTURE))
    assert not use.context.execute_async_v3(use.stream.handle)
    words = " ".join(use.said)
    for word in ("Not all shapes are specified", "not in the range of the profile", "invalid tensor name: z"):
        assert word in words
    assert "Address is not set for tensor" in words
    assert use.runtime.deserialize_cuda_engine(b"no plan at all") is None
    assert "Magic tag" in use.said[-1]
    use.end()
    use.machine.check_empty()


def test_orders_differ() -> None:
    orders = set()
    for seed in range(12):
        use = Use(seed=seed)
        orders.add(tuple(use.engine.get_tensor_name(index) for index in range(use.engine.num_io_tensors)))
        use.end()
    assert orders == {("x", "y"), ("y", "x")}


def test_dims_and_types() -> None:
    use = Use()
    shape = use.engine.get_tensor_shape("x")
    assert tuple(shape) == (-1, *PICTURE)
    assert shape == (-1, *PICTURE)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        _ = shape == use.engine.get_tensor_shape("x")
    with pytest.raises(TypeError, match="Could not resolve"):
        use.trt.nptype(use.trt.DataType.BF16)
    assert use.trt.DataType.FLOAT != 0
    assert int(use.trt.DataType.FLOAT) == 0
    use.end()
    use.machine.check_empty()


def test_base_classes_have_to_be_called() -> None:
    trt = make_tensorrt(Machine())

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            pass

    with pytest.raises(TypeError, match="must be called when overriding __init__"):
        Logger()


def test_a_sticky_error_fails_everything_after_it() -> None:
    use = Use()
    use.bind()
    use.machine.inject("device:execute", ILLEGAL_ADDRESS)
    use.enqueue()
    with pytest.raises(use.cuda.LogicError, match="an illegal memory access was encountered"):
        use.stream.synchronize()
    for call in (lambda: use.cuda.mem_alloc(64), use.cuda.Stream, use.cuda.mem_get_info, use.gpu.pop):
        with pytest.raises(use.cuda.LogicError, match="illegal memory access"):
            call()
    assert not use.context.execute_async_v3(use.stream.handle)
    assert use.engine.create_execution_context() is None
    assert make_driver(use.machine).cuMemAlloc(1)[0] == ILLEGAL_ADDRESS


def test_no_driver() -> None:
    for version, broken in (("10.3.0", TypeError), ("11.4.1", Segfault)):
        machine = Machine(driver_present=False)
        trt = make_tensorrt(machine, version)

        class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
            pass

        logger = Logger()
        with pytest.raises(broken):
            trt.Runtime(logger).deserialize_cuda_engine(b"")
        assert bool(machine.violations) == (version == "11.4.1")
        cuda = make_pycuda(machine)
        with pytest.raises(cuda.RuntimeError, match="no CUDA-capable device"):
            cuda.init()


def test_an_output_that_the_data_decides_needs_an_allocator() -> None:
    use = Use(model=data_dependent())
    use.bind()
    assert list(use.context.get_tensor_shape("y"))[1] == -1
    assert not use.enqueue()
    assert "no output allocator" in use.said[-1]
    use.stream.synchronize()
    use.end()
    use.machine.check_empty()


def test_a_graph_reads_what_is_there_when_it_is_launched() -> None:
    use = Use("11.4.1")
    driver = make_driver(use.machine)
    use.bind()
    use.source[:] = 2.0
    use.enqueue()
    use.stream.synchronize()
    handle = use.stream.handle
    assert driver.cuStreamBeginCapture(handle, 2)[0] == 0
    assert use.context.execute_async_v3(handle)
    _, graph = driver.cuStreamEndCapture(handle)
    _, ready = driver.cuGraphInstantiate(graph, 0)
    driver.cuGraphDestroy(graph)
    use.source[:] = 7.0
    use.cuda.memcpy_htod_async(use.input, use.source[:2], use.stream)
    assert driver.cuGraphLaunch(ready, handle)[0] == 0
    use.cuda.memcpy_dtoh_async(use.result[:2], use.output, use.stream)
    use.stream.synchronize()
    assert (use.result[:2] == 7.0).all()
    driver.cuGraphLaunch(ready, handle)
    use.context = None  # a graph keeps nothing alive
    with pytest.raises(Segfault):
        use.stream.synchronize()
    assert use.machine.violations


def test_what_cannot_be_captured_spoils_the_capture() -> None:
    use = Use("11.4.1")
    driver = make_driver(use.machine)
    use.bind()
    handle = use.stream.handle
    driver.cuStreamBeginCapture(handle, 2)
    assert not use.context.execute_async_v3(handle)  # never run with these shapes
    assert driver.cuStreamEndCapture(handle)[0] == driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED
    use.end()
    use.machine.check_empty()
