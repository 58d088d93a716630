"""A machine with a GPU that is not there: one memory model under the fakes of PyCUDA, cuda.bindings and TensorRT.

It is as unforgiving as the real one, and remembers what the real one would punish later, or elsewhere, or not at
all: `violations` has to be empty at the end of every test.

- device memory is an address space of its own, full of NaN until written, and full of NaN again when freed;
- nothing that is put on a stream happens before somebody waits for it, and other streams run in between, so that
  what was freed or overwritten meanwhile shows;
- a call on a thread that has no context current, and whatever is destroyed there, is a violation;
- a sticky error fails every later call.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.engine.tensorrt.fake_parts import (
    ALIGNMENT,
    CAPTURE_INVALIDATED,
    CAPTURE_UNSUPPORTED,
    CUBIN,
    DEVICE_BASE,
    ILLEGAL_ADDRESS,
    INVALID_CONTEXT,
    INVALID_HANDLE,
    INVALID_IMAGE,
    INVALID_VALUE,
    MAPPED_BASE,
    NO_DEVICE,
    NOT_FOUND,
    NOT_READY,
    OUT_OF_MEMORY,
    PAGE,
    POISON,
    STICKY,
    SUCCESS,
    Block,
    CudaFault,
    Event,
    Graph,
    Segfault,
    Stream,
)

Kernel = Callable[["Machine", Sequence[Any], tuple[int, ...], tuple[int, ...]], None]
"""(machine, arguments, grid, block)"""


@dataclass
class _Fault:
    value: Any
    after: int
    times: int


class Machine:
    """The GPU, its driver and its memory. `seed` decides orders and delays."""

    def __init__(
        self,
        *,
        seed: int = 1,
        capability: tuple[int, int] = (8, 7),
        integrated: bool = True,
        driver_version: int = 12060,
        name: str = "Orin",
        total_bytes: int = 8 * 2**30,
        driver_present: bool = True,
    ) -> None:
        self.random = random.Random(seed)
        self.capability, self.integrated, self.name = capability, integrated, name
        self.driver_version, self.driver_present = driver_version, driver_present
        self.total_bytes = total_bytes
        self.lock = threading.RLock()
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        """How often each call was made, by its name: every place where a fault can be injected."""
        self.sticky = SUCCESS
        self.blocks: dict[int, Block] = {}
        self.hidden_bytes = 0
        """What TensorRT's own objects hold on the device."""
        self.objects: Counter[str] = Counter()
        """TensorRT's objects that are alive, by class."""
        self.retained = 0
        self.dla_cores = 0
        self.gpu_only: frozenset[str] = frozenset()
        """Operators that no DLA takes."""
        self.kernels: dict[str, Kernel] = {}
        """What each kernel does, by its name."""
        self._faults: dict[str, list[_Fault]] = {}
        self._stacks: dict[threading.Thread, list[int]] = {}
        self._streams: dict[int, Stream] = {}
        self._events: dict[int, Event] = {}
        self._kernels: dict[int, str] = {}
        self._graphs: dict[int, Graph] = {}
        self._buried: list[Block] = []
        self._next = DEVICE_BASE
        self._next_mapped = MAPPED_BASE
        self._handles = 0x100

    # --- what tests say and ask

    def inject(self, call: str, value: Any, *, after: int = 0, times: int = 1) -> None:
        """Let a call give `value` (of a driver call: its error code) instead of working, after so many that work."""
        self._faults.setdefault(call, []).append(_Fault(value, after, times))

    def fault(self, call: str) -> Any:
        """Note the call. Returns what was injected for it, or None."""
        with self.lock:
            self.calls[call] += 1
            for fault in self._faults.get(call, ()):
                if fault.after > 0:
                    fault.after -= 1
                elif fault.times > 0:
                    fault.times -= 1
                    return fault.value
        return None

    def violated(self, what: str) -> None:
        self.violations.append(f"{what} [thread {threading.current_thread().name}]")

    def segfault(self, what: str) -> Segfault:
        self.violated(f"segmentation fault: {what}")
        return Segfault(what)

    def live(self) -> dict[str, int]:
        """What is held now: nothing of it may be left when everything is closed."""
        held = {
            "device": sum(block.kind == "device" for block in self.blocks.values()),
            "host": sum(block.kind == "host" for block in self.blocks.values()),
            "streams": len(self._streams),
            "events": len(self._events),
            "graphs": len(self._graphs),
            "modules": len(self._kernels),
            "contexts": self.retained,
        }
        return {name: count for name, count in {**held, **self.objects}.items() if count}

    def used_bytes(self) -> int:
        return self.hidden_bytes + sum(block.data.nbytes for block in self.blocks.values())

    def check(self) -> None:
        """Fails the test when anything was violated up to now."""
        for thread, stack in self._stacks.items():
            if stack and not thread.is_alive():
                self.violations.append(f"aborted: thread {thread.name} ended with a context on its stack")
                stack.clear()
        for block in self._buried:
            if not (block.data == POISON).all():
                self.violations.append(f"memory at {block.address:#x} was written after it was freed")
                block.data.fill(POISON)
        assert not self.violations, "\n".join(self.violations)

    def check_empty(self) -> None:
        """As `check`, and nothing may be held any more."""
        self.check()
        assert not self.live()

    # --- the driver: contexts

    def enter(self, call: str, *, context: bool = True) -> None:
        """The way into every driver call. Raises CudaFault."""
        fault = self.fault(call)
        if not self.driver_present:
            raise CudaFault(call, NO_DEVICE)
        if self.sticky:
            raise CudaFault(call, self.sticky)
        if fault is not None:
            if fault in STICKY:
                self.sticky = fault
            raise CudaFault(call, fault)
        if context and not self.current():
            self.violated(f"{call} on a thread without a context")
            raise CudaFault(call, INVALID_CONTEXT)

    def current(self) -> bool:
        return bool(self._stacks.get(threading.current_thread()))

    def retain(self) -> None:
        self.retained += 1

    def release(self) -> None:
        if self.retained < 1:
            self.violated("the primary context was released more often than it was retained")
            return
        self.retained -= 1
        if (
            self.retained == 0
            and not self.sticky
            and (left := {k: n for k, n in self.live().items() if k != "contexts"})
        ):
            self.violated(f"the context is gone and these were left in it: {left}")

    def push(self) -> None:
        self._stacks.setdefault(threading.current_thread(), []).append(1)

    def pop(self, call: str) -> None:
        if not self.current():
            raise CudaFault(call, INVALID_CONTEXT)
        self._stacks[threading.current_thread()].pop()

    def gone(self, what: str) -> bool:
        """Something is destroyed now, by whoever dropped it. False: it leaks, as this is no thread for it."""
        if self.sticky:
            return True
        if not self.current():
            self.violated(f"{what} was destroyed on a thread without a context: it leaks for good")
            return False
        return True

    # --- memory

    def allocate(self, call: str, nbytes: int) -> Block:
        if nbytes <= 0:
            raise CudaFault(call, INVALID_VALUE)
        if self._capturing():
            self._spoil()
            raise CudaFault(call, CAPTURE_UNSUPPORTED)
        if self.used_bytes() + nbytes > self.total_bytes:
            raise CudaFault(call, OUT_OF_MEMORY)
        block = Block(self._next, np.full(nbytes, POISON, np.uint8), "device")
        self._next += (nbytes + 2 * ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT  # a gap behind each: overruns are seen
        self.blocks[block.address] = block
        return block

    def allocate_host(self, call: str, nbytes: int, mapped: bool) -> Block:
        if nbytes <= 0:
            raise CudaFault(call, INVALID_VALUE)
        raw = np.empty(nbytes + PAGE, np.uint8)
        start = -raw.ctypes.data % PAGE
        data = raw[start : start + nbytes]
        data.fill(POISON)
        block = Block(data.ctypes.data, data, "host")
        if mapped:
            block.mapped = self._next_mapped
            self._next_mapped += (nbytes + 2 * PAGE) // PAGE * PAGE
        self.blocks[block.address] = block
        return block

    def free(self, call: str, address: int, kind: str) -> None:
        block = self.blocks.get(address)
        if block is None or block.kind != kind:
            self.violated(f"{call} of {address:#x}, which is not there: freed twice?")
            raise CudaFault(call, INVALID_VALUE)
        # As the driver does: what runs still uses it, so it waits.
        for stream in list(self._streams.values()):
            self.drain(stream)
        del self.blocks[address]
        block.freed = True
        block.data.fill(POISON)
        self._buried.append(block)

    def memory(self, address: int, nbytes: int, *, what: str, host: bool = False) -> NDArray[np.uint8]:
        """The bytes at an address, now. Raises Segfault where the device may not touch them."""
        for block in [*self.blocks.values(), *self._buried]:
            start = block.address if (block.kind == "host") == host else block.mapped
            if start is None or not start <= address < start + block.data.nbytes:
                continue
            if block.freed:
                raise self._illegal(f"{what}: {address:#x} was freed")
            if address + nbytes > start + block.data.nbytes:
                raise self._illegal(f"{what}: {nbytes} bytes at {address:#x}, and only {block.data.nbytes} are there")
            return block.data[address - start : address - start + nbytes]
        raise self._illegal(f"{what}: nothing is at {address:#x}")

    def pinned(self, address: int, nbytes: int) -> bool:
        return any(
            block.kind == "host" and block.address <= address and address + nbytes <= block.address + block.data.nbytes
            for block in self.blocks.values()
        )

    def _illegal(self, what: str) -> Segfault:
        self.sticky = ILLEGAL_ADDRESS
        return self.segfault(what)

    def copy_in(self, device: int, host: int, nbytes: int, stream: Stream) -> None:
        if not self.pinned(host, nbytes):
            self.violated(f"an asynchronous copy of {nbytes} bytes from memory that is not page-locked")

        def run() -> None:
            target = self.memory(device, nbytes, what="copy to the device")
            target[:] = self.memory(host, nbytes, what="copy to the device", host=True)

        self.put(stream, "copy_in", run)

    def copy_out(self, host: int, device: int, nbytes: int, stream: Stream) -> None:
        if not self.pinned(host, nbytes):
            self.violated(f"an asynchronous copy of {nbytes} bytes to memory that is not page-locked")

        def run() -> None:
            target = self.memory(host, nbytes, what="copy from the device", host=True)
            target[:] = self.memory(device, nbytes, what="copy from the device")

        self.put(stream, "copy_out", run)

    # --- streams, events, graphs

    def _handle(self) -> int:
        self._handles += 0x10
        return self._handles

    def stream(self) -> Stream:
        made = Stream(self._handle())
        self._streams[made.handle] = made
        return made

    def find_stream(self, call: str, handle: int) -> Stream:
        found = self._streams.get(handle)
        if found is None:
            self.violated(f"{call} with a stream that is not there ({handle:#x}): destroyed, or the default one")
            raise CudaFault(call, INVALID_HANDLE)
        return found

    def destroy_stream(self, stream: Stream) -> None:
        self.drain(stream)
        stream.alive = False
        self._streams.pop(stream.handle, None)

    def put(self, stream: Stream, what: str, run: Callable[[], None]) -> None:
        if stream.capturing is not None:
            stream.capturing.append((what, run))
        else:
            stream.queue.append((what, run))

    def drain(self, stream: Stream, until: Event | None = None) -> None:
        """Let a stream run; the others run a little, too."""
        others = [other for other in self._streams.values() if other is not stream and other.queue]
        for other in self.random.sample(others, self.random.randint(0, len(others))):
            self._step(other)
        while stream.queue and not (until is not None and until.done):
            self._step(stream)

    def _step(self, stream: Stream) -> None:
        what, run = stream.queue.popleft()
        fault = self.fault(f"device:{what}")
        if fault is not None:
            self.sticky = fault
        if self.sticky:
            stream.queue.clear()
            return
        run()

    def event(self, *, timed: bool = False) -> Event:
        made = Event(self._handle(), timed=timed)
        self._events[made.handle] = made
        return made

    def find_event(self, call: str, handle: int) -> Event:
        found = self._events.get(handle)
        if found is None:
            self.violated(f"{call} with an event that is not there ({handle:#x})")
            raise CudaFault(call, INVALID_HANDLE)
        return found

    def destroy_event(self, event: Event) -> None:
        event.alive = False
        self._events.pop(event.handle, None)

    def record(self, event: Event, stream: Stream) -> None:
        event.recorded, event.done, event.lag = stream, False, self.random.randint(0, 2)
        event.records += 1
        record = event.records

        def run() -> None:
            event.done = event.done or event.records == record  # only the last record counts
            event.at_ms = time.perf_counter() * 1e3

        self.put(stream, "event", run)

    def query(self, event: Event, call: str) -> bool:
        if event.recorded is None or event.done:
            return True
        if self._capturing():
            self._spoil()
            raise CudaFault(call, CAPTURE_UNSUPPORTED)
        event.lag -= 1
        if event.lag >= 0:
            return False
        self.wait(event, call)
        return True

    def wait(self, event: Event, call: str) -> None:
        if event.recorded is not None and not event.done:
            self.drain(event.recorded, event)
            self.raise_sticky(call)

    def elapsed_ms(self, start: Event, end: Event, call: str) -> float:
        if not (start.timed and end.timed and start.records and end.records):
            raise CudaFault(call, INVALID_HANDLE)
        if not (start.done and end.done):
            raise CudaFault(call, NOT_READY)
        return end.at_ms - start.at_ms

    # --- kernels

    def load_module(self, image: bytes, call: str) -> int:
        if not image.startswith(CUBIN):
            raise CudaFault(call, INVALID_IMAGE)
        handle = self._handle()
        self._kernels[handle] = image.removeprefix(CUBIN).decode()
        return handle

    def find_kernel(self, module: int, name: str, call: str) -> str:
        if self._kernels.get(module) != name:
            raise CudaFault(call, NOT_FOUND)
        return name

    def unload_module(self, module: int) -> None:
        if self._kernels.pop(module, None) is None:
            self.violated("a module was unloaded twice")

    def run_kernel(
        self,
        module: int,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: Sequence[Any],
        stream: Stream,
    ) -> None:
        kernel = self.kernels[name]

        def run() -> None:
            if self._kernels.get(module) != name:
                raise self._illegal(f"the kernel {name} runs, and its module was unloaded")
            kernel(self, values, grid, block)

        self.put(stream, "kernel", run)

    def raise_sticky(self, call: str) -> None:
        if self.sticky:
            raise CudaFault(call, self.sticky)

    def begin_capture(self, stream: Stream, call: str) -> None:
        if stream.capturing is not None:
            raise CudaFault(call, INVALID_VALUE)
        stream.capturing, stream.spoilt = [], False

    def end_capture(self, stream: Stream, call: str) -> Graph:
        operations, stream.capturing = stream.capturing, None
        if operations is None:
            raise CudaFault(call, INVALID_VALUE)
        if stream.spoilt:
            raise CudaFault(call, CAPTURE_INVALIDATED)
        graph = Graph(self._handle(), operations)
        self._graphs[graph.handle] = graph
        return graph

    def find_graph(self, call: str, handle: int) -> Graph:
        found = self._graphs.get(handle)
        if found is None:
            self.violated(f"{call} with a graph that is not there ({handle:#x})")
            raise CudaFault(call, INVALID_HANDLE)
        return found

    def instantiate(self, graph: Graph) -> Graph:
        made = Graph(self._handle(), graph.operations, executable=True)
        self._graphs[made.handle] = made
        return made

    def launch(self, graph: Graph, stream: Stream) -> None:
        for what, run in graph.operations:
            self.put(stream, what, run)

    def destroy_graph(self, graph: Graph) -> None:
        graph.alive = False
        self._graphs.pop(graph.handle, None)

    def _capturing(self) -> bool:
        return any(stream.capturing is not None for stream in self._streams.values())

    def _spoil(self) -> None:
        for stream in self._streams.values():
            stream.spoilt = stream.spoilt or stream.capturing is not None
