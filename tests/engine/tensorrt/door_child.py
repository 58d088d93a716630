"""Every call of the door over cuda.bindings, once, with the real bindings and stub_driver.c: a program of its own.

It prints a JSON object: what the calls gave, and the errors of those that the stub lets fail.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

from edge_runtime.engine.tensorrt.bindings_door import CudaBindingsDoor
from edge_runtime.engine.tensorrt.cuda import CudaError


def failed(call: Callable[[], Any]) -> list[Any]:
    try:
        call()
    except CudaError as error:
        return [error.code, error.call, error.number, error.text]
    return []


def main() -> None:
    door = CudaBindingsDoor(importlib.import_module("cuda.bindings.driver"))
    door.start()
    found: dict[str, Any] = {
        "device": [door.device_name(), door.compute_capability(), door.driver_version(), door.integrated()],
        "memory": door.memory(),
    }
    stream, event, timers = door.stream(), door.event(), [door.timer(), door.timer()]
    door.record(event, stream)
    found["events"] = [stream.handle, door.query(event), door.query(timers[0]), door.elapsed_ms(*timers)]
    memory, host, plain = door.allocate(4096), door.host(5000, mapped=True), door.host(10)
    found["host"] = [host.device_address == host.address, plain.device_address, bool(host.array.any())]
    host.array[64] = 5
    door.copy_in(memory.address, host, 100, stream)
    door.copy_in(memory.address, host, 100, stream, 64)
    door.copy_out(host, memory.address, 80, stream)
    found["copied"] = int(host.array[0])
    door.begin_capture(stream)
    graph = door.end_capture(stream)
    door.launch(graph, stream)
    door.free_graph(graph)
    kernel = door.load_kernel(b"IMAGE", "letterbox")
    door.run_kernel(kernel, (2, 3), (16, 8), stream, "Pif", (memory.address, -5, 0.5))
    door.free_kernel(kernel)
    found["no kernel"] = failed(lambda: door.load_kernel(b"IMAGE", "another"))
    door.free(memory)
    for page in (host, plain):
        door.free_host(page)
    for each in (event, *timers):
        door.free_event(each)
    found["sticky"] = failed(lambda: door.synchronise(stream))
    found["after"] = failed(lambda: door.free_stream(stream))
    door.stop()
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
