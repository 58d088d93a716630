"""The checks of `device-check` that run an engine on the GPU; in a process of their own (device_check_child)."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_runtime.app.device_check_bench import (
    RUNS,
    Bench,
    Work,
    copied,
    deviation,
    deviations,
    fill,
    least,
    median_ms,
    running,
)
from edge_runtime.app.device_check_letterbox import letterbox
from edge_runtime.app.device_check_report import CheckFailed, CheckSkipped, Found
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import probe
from edge_runtime.engine.protocol import Engine
from edge_runtime.engine.tensorrt.plan import read_sidecar

MiB = 1024 * 1024
LANES = 3
THREAD_RUNS = 20
TOLERANCE = {"fp32": 0.01, "fp16": 0.02}
"""How far an answer may be from ONNX Runtime's, as a share of the largest; where the bundle says nothing."""
_OTHER_TOLERANCE = 0.1
SAME = 1e-3
"""The same for two runs by TensorRT, which may add in another order."""
LEAST_RELOADS = 20
"""Fewer say nothing about memory: the first ones fill caches."""
LEAK_BYTES = 32 * MiB
"""What may be missing after all reloads; MemAvailable may fall by twice as much, since others take memory too."""
_TICK_S = 0.001
_REST_S = 0.3
Numbers = dict[str, Any]


# --- loads


def load(bench: Bench) -> Found:
    """An engine is loaded, warmed up, run and closed."""
    started = time.perf_counter()
    with bench.loaded() as engine:
        took_s = time.perf_counter() - started
        with running(engine) as run:
            run_ms = median_ms(run)
        numbers = {
            "load_s": took_s,
            "steps_s": engine.timings_s,
            "run_ms": run_ms,
            "remarks": engine.remarks,
            "batches": list(engine.allowed_batches),
            "plan_bytes": bench.plan.stat().st_size,
        }
    remarks = f"; {'; '.join(engine.remarks)}" if engine.remarks else ""
    return Found(f"loaded and warm in {took_s:.2f} s, a run takes {run_ms:.2f} ms{remarks}", numbers)


def parity(bench: Bench) -> Found:
    """TensorRT answers as ONNX Runtime does, on the golden pictures."""
    table = bench.bundle.variant(bench.variant)
    tolerance = table.golden.tolerance if table.golden is not None else TOLERANCE.get(table.precision, _OTHER_TOLERANCE)
    numbers: Numbers = {"tolerance": tolerance}
    words = []
    with bench.loaded() as engine:
        golden = probe(engine, engine.open_lane(), bench.bundle, bench.variant, bench.read_image)
        numbers["golden"] = {"pictures": golden.pictures, "deviations": dict(golden.deviations)}
        words.append(str(golden))
        if bench.variant not in bench.bundle.variants_for("onnxruntime"):
            words.append("the bundle has no file for ONNX Runtime to compare with directly")
            return Found("; ".join(words), numbers)
        other = load_engine(bench.bundle, bench.variant)
        try:
            found = _compare(bench, engine, other)
        finally:
            other.close()
    numbers["deviations"] = found
    worst = max(found.values())
    told = f"{worst:.2g} of an output's range from ONNX Runtime, {tolerance:.2g} allowed"
    if not worst <= tolerance and engine.info.output.layout not in _ROWS:
        raise CheckFailed(told, numbers, remedy="this engine computes something else: send this report")
    return Found("; ".join([*words, told]), numbers)


_ROWS = ("yolov10", "rtdetr-topk", "efficientnms")
"""Rows of detections change places; the golden check compares what the decoder makes of them."""


def reloads(bench: Bench) -> Found:
    """Engines come and go, and memory stays as it is."""
    device, system, own = [], [], []
    for _ in range(bench.reloads):
        with bench.loaded() as engine, running(engine) as run:
            run()
        device.append(bench.gpu.free_bytes())
        system.append(bench.available_bytes())
        own.append(bench.resident_bytes())
    lost = {
        "device": _grown([-each for each in device]),
        "system": _grown([None if each is None else -each for each in system]),
        "process": _grown(own),
    }
    numbers: Numbers = {
        "reloads": bench.reloads,
        "lost_bytes": lost,
        "device_free_bytes": _ends(device),
        "available_bytes": _ends(system),
        "resident_bytes": _ends(own),
    }
    told = ", ".join(f"{name} {'unknown' if each is None else f'{each / MiB:.1f}'}" for name, each in lost.items())
    if bench.reloads < LEAST_RELOADS:
        return Found(f"{bench.reloads} reloads went well; too few to say what memory does ({told} MiB more)", numbers)
    limits = {"device": LEAK_BYTES, "system": 2 * LEAK_BYTES, "process": LEAK_BYTES}
    if over := [name for name, each in lost.items() if each is not None and each > limits[name]]:
        remedy = "close what else runs on this device, and try again; if it stays so, send this report"
        raise CheckFailed(f"memory grew over {bench.reloads} reloads, MiB: {told} ({', '.join(over)})", numbers,
                          remedy=remedy)  # fmt: skip
    return Found(f"{bench.reloads} reloads, memory stays; MiB more: {told}", numbers)


def stall(bench: Bench) -> Found:
    """How long Python's other threads stand still while a plan is deserialised: a measurement, without a limit."""
    longest_s = [0.0]
    end = threading.Event()

    def tick() -> None:
        before_s = time.perf_counter()
        while not end.wait(_TICK_S):
            now_s = time.perf_counter()
            longest_s[0] = max(longest_s[0], now_s - before_s - _TICK_S)
            before_s = now_s

    ticking = threading.Thread(target=tick, name="device-check-ticks")
    ticking.start()
    try:
        end.wait(_REST_S)
        rest_s, longest_s[0] = longest_s[0], 0.0
        with bench.loaded() as engine:
            load_s = longest_s[0]
            steps_s = engine.timings_s
    finally:
        end.set()
        ticking.join()
    numbers = {"rest_gap_ms": rest_s * 1e3, "load_gap_ms": load_s * 1e3, "steps_s": steps_s}
    told = f"the longest gap of another thread was {load_s * 1e3:.1f} ms during a load, {rest_s * 1e3:.1f} ms at rest"
    return Found(f"{told}; deserialising took {steps_s.get('deserialize', 0.0) * 1e3:.1f} ms", numbers)


# --- runs


def threads(bench: Bench) -> Found:
    """Lanes on threads of their own answer at once as they do alone."""
    with bench.loaded() as engine:
        works = [Work(engine, seed) for seed in range(LANES)]
        try:
            alone_s = sum(each.alone(THREAD_RUNS) for each in works) / LANES
            started = time.perf_counter()
            beside = [
                threading.Thread(target=each.again, args=(THREAD_RUNS,), name=f"device-check-{each.seed}")
                for each in works
            ]
            for thread in beside:
                thread.start()
            for thread in beside:
                thread.join()
            together_s = time.perf_counter() - started
        finally:
            for each in works:
                each.close()
    for each in works:
        if each.error is not None:
            raise each.error
    worst = max(each.worst for each in works)
    alone_rate, together_rate = THREAD_RUNS / alone_s, LANES * THREAD_RUNS / together_s
    numbers = {
        "lanes": LANES,
        "runs_per_s_one_lane": alone_rate,
        "runs_per_s_all_lanes": together_rate,
        "deviation": worst,
    }
    if not worst <= SAME:
        raise CheckFailed(f"lanes disturb each other: answers differ by {worst:.2g} of their range", numbers)
    return Found(f"{LANES} lanes at once: {together_rate:.1f} runs/s, one alone: {alone_rate:.1f}", numbers)


def graphs(bench: Bench) -> Found:
    """CUDA graphs are captured, and answer as plain runs do. Wants the door that can capture."""
    if not bench.gpu.owner.cuda.graphs:
        raise CheckSkipped("graphs are captured through cuda.bindings only, and this is PyCUDA")
    if read_sidecar(bench.plan).dla_core is not None:
        raise CheckSkipped("a plan for a DLA is not captured")
    answers, times_ms = [], []
    for wanted in (False, True):
        with bench.loaded(graphs=wanted) as engine, running(engine) as run:
            answers.append(copied(run()))
            times_ms.append(median_ms(run))
            answers[-1] = copied(run())
            captured = engine.captured
    worst = deviation(answers[1], answers[0])
    numbers = {"run_ms": times_ms[0], "run_by_graph_ms": times_ms[1], "captured": captured, "deviation": worst}
    if not captured:
        raise CheckFailed("no graph was captured: see the log", numbers)
    if not worst <= SAME:
        raise CheckFailed(f"a graph answers otherwise: by {worst:.2g} of the range", numbers)
    return Found(f"a run takes {times_ms[0]:.2f} ms, by a graph {times_ms[1]:.2f} ms", numbers)


def dla(bench: Bench) -> Found:
    """The plan for a DLA runs, and answers as it should. Wants such a plan."""
    found = parity(bench)
    with bench.loaded() as engine, running(engine) as run:
        run_ms = median_ms(run)
    core = read_sidecar(bench.plan).dla_core
    return Found(f"core {core}: a run takes {run_ms:.2f} ms; {found.words}", {"run_ms": run_ms, **found.numbers})


def shares(bench: Bench) -> Found:
    """What part of a run is copied, launched and computed."""
    owner, stopwatch = bench.gpu.owner, bench.stopwatch
    found = []
    walls_ms = []
    with bench.loaded(graphs=False) as engine, running(engine) as run:
        run()
        owner.call(stopwatch.arm)
        try:
            for _ in range(RUNS):
                started = time.perf_counter()
                run()
                walls_ms.append((time.perf_counter() - started) * 1e3)
                found.append(owner.call(stopwatch.shares))
        finally:
            owner.call(stopwatch.disarm)
    known = [each for each in found if each is not None]
    if not known:
        raise CheckFailed("the timers have seen no whole run")
    parts = {
        name: statistics.median(getattr(each, name) for each in known)
        for name in ("copy_in_ms", "launch_ms", "execute_ms", "copy_out_ms")
    }
    wall_ms = statistics.median(walls_ms)
    inside = parts["copy_in_ms"] + parts["execute_ms"] + parts["copy_out_ms"]
    numbers = {**parts, "wall_ms": wall_ms, "outside_ms": max(0.0, wall_ms - inside)}
    told = ", ".join(f"{name.removesuffix('_ms').replace('_', ' ')} {each:.3f}" for name, each in parts.items())
    return Found(f"ms of a run of {wall_ms:.3f}: {told}; outside of the stream {numbers['outside_ms']:.3f}", numbers)


def buffers(bench: Bench) -> Found:
    """Whether input that the GPU reads in place is faster than input that is copied."""
    answers, times_ms = [], []
    for wanted in (False, True):
        with bench.loaded(mapped=wanted) as engine, running(engine) as run:
            if wanted and not engine.mapped:
                raise CheckSkipped("this GPU has memory of its own: reading in place is for those that share it")
            answers.append(copied(run()))
            times_ms.append(median_ms(run))
    worst = deviation(answers[1], answers[0])
    numbers = {"run_copied_ms": times_ms[0], "run_mapped_ms": times_ms[1], "deviation": worst}
    if not worst <= SAME:
        raise CheckFailed(f"mapped input is answered otherwise: by {worst:.2g} of the range", numbers)
    faster = "mapped" if times_ms[1] < times_ms[0] else "copied"
    told = f"a run takes {times_ms[0]:.2f} ms with copied input, {times_ms[1]:.2f} ms with mapped input"
    return Found(f"{told}: {faster} is faster", {**numbers, "faster": faster})


CHECKS: Mapping[str, Callable[[Bench], Found]] = {
    "load": load,
    "parity": parity,
    "reloads": reloads,
    "stall": stall,
    "threads": threads,
    "shares": shares,
    "buffers": buffers,
    "letterbox": letterbox,
    "graphs": graphs,
    "dla": dla,
}


# --- what they share


def _compare(bench: Bench, engine: Engine, other: Engine) -> dict[str, float]:
    """Per output the largest deviation of `engine` from `other` over the golden pictures, or over noise."""
    pictures: Sequence[Path | int] = bench.bundle.golden_inputs(bench.variant) or (0, 1)
    worst: dict[str, float] = {}
    counts = [least(each) for each in (engine, other)]
    buffers = [each.allocate(count) for each, count in zip((engine, other), counts, strict=True)]
    lanes = [each.open_lane() for each in (engine, other)]
    try:
        for picture in pictures:
            place = buffers[0].array[0]
            if isinstance(picture, int):
                fill(place, picture)
            else:
                bench.read_image(picture).write_into(place, engine.info.input)
            for buffer in buffers:
                buffer.array[:] = place
            for lane, buffer, count in zip(lanes, buffers, counts, strict=True):
                lane.submit(buffer, count)
            answers = [{name: each[0] for name, each in lane.collect().items()} for lane in lanes]
            for name, each in deviations(*answers).items():
                worst[name] = max(worst.get(name, 0.0), each)
    finally:
        for owner, buffer in zip((engine, other), buffers, strict=True):
            owner.release(buffer)
    return worst


def _grown(values: Sequence[int | None]) -> int | None:
    """By how much the last fifth lies above the one after the first tenth, by their medians; None where unknown."""
    known = [each for each in values if each is not None]
    if len(known) < len(values) or not known:
        return None
    skipped, fifth = len(known) // 10, max(1, len(known) // 5)
    return round(statistics.median(known[-fifth:]) - statistics.median(known[skipped : skipped + fifth]))


def _ends(values: Sequence[int | None]) -> dict[str, int | None]:
    return {"first": values[0], "last": values[-1]} if values else {}
