"""The process in which engine.tensorrt.build has a plan built: a builder that crashes, hangs or leaks ends with it.

`python -m edge_runtime.engine.tensorrt.build_child ORDER`, where ORDER is a JSON object with `parent` and `nice` (see
children.settle) and `task`:

"look": say what this device is.
"build": `root`, `digest`, `variant` name what to build; `batches`, `best`, `workspace_bytes`, `dram_bytes`, `dla_core`
    and `level` how (see network.Settings); `cache` is the file of the timing cache, `plan` the plan's file to be.

On standard output comes a JSON object a line, with `stage`: "looking", "verifying", "parsing", "building" (with `phase`
and `percent`), "reading back", "saving". The last line has `here` (what this device is), and of a build `plan_bytes`,
`peak_bytes` (of this process), `build_s`, `layers`, `on_gpu` and `notes`; or `kind` and `error`: the class and payload
of an EdgeError.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_runtime.children import Report, settle
from edge_runtime.durable import REAL, Files, write_atomic
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.tensorrt.api import TensorRt
from edge_runtime.engine.tensorrt.cuda import open_cuda
from edge_runtime.engine.tensorrt.log import capture
from edge_runtime.engine.tensorrt.network import Built, Network, Settings
from edge_runtime.engine.tensorrt.onnxfile import read_onnx
from edge_runtime.engine.tensorrt.owner import without_frames
from edge_runtime.engine.tensorrt.plan import PlanTensor, Sidecar, describe, sidecar_path
from edge_runtime.engine.tensorrt.preflight import FREE_MEMORY
from edge_runtime.engine.tensorrt.probe import Here, import_tensorrt, look, require_driver
from edge_runtime.engine.tensorrt.tensors import check_input, read_batches, read_tensors
from edge_runtime.errors import BundleError, EdgeError, EngineError, RefusedError

_TELL_S = 0.2
"""Progress is told so often at most: TensorRT has thousands of steps."""


def main() -> None:
    """Carry out the order in sys.argv[1]. Ends the process by itself: a library's own end can hang or crash."""
    order = json.loads(sys.argv[1])
    settle(order["nice"], order["parent"])
    report = Report()
    try:
        _work(order, report)
    except EdgeError as error:
        kind = RefusedError if isinstance(error, RefusedError) else type(error)
        report.line(report.stage, {"kind": kind.__name__, "error": error.as_payload()})
    except MemoryError:
        lack = RefusedError(
            f"there was not enough memory to build it ({report.stage})",
            code="build_memory",
            where=order.get("root"),
            remedy=FREE_MEMORY,
            retryable=True,
        )
        report.line(report.stage, {"kind": "RefusedError", "error": lack.as_payload()})
    except OSError as error:
        failed = EngineError(
            f"the build met an error of the system ({report.stage}): {error}",
            code="build_failed",
            where=order.get("root"),
            remedy="look at the disk (df, dmesg), then try again",
            retryable=True,
        )
        report.line(report.stage, {"kind": "EngineError", "error": failed.as_payload()})
    except Exception as error:  # noqa: BLE001  told to who asks, with the traceback in its log
        traceback.print_exc()
        failed = EngineError(
            f"the build itself failed ({report.stage}): {error!r}", code="build_failed", remedy="report this as a fault"
        )
        report.line(report.stage, {"kind": "EngineError", "error": failed.as_payload()})
    os._exit(0)


def _work(order: Mapping[str, Any], report: Report) -> None:
    report.line("looking")
    trt = import_tensorrt()
    require_driver()
    cuda = open_cuda()
    cuda.start()
    try:
        here = look(trt, cuda)
        if order["task"] == "look":
            report.line("done", {"here": asdict(here)})
            return
        try:
            facts = _build(order, report, trt, here)
        except BaseException as error:
            # its frames hold objects of TensorRT's, which have to go before the context does
            without_frames(error)
            raise
        report.line("done", {"here": asdict(here), **facts})
    finally:
        cuda.stop()


def _build(order: Mapping[str, Any], report: Report, trt: TensorRt, here: Here) -> dict[str, object]:
    report.line("verifying")
    bundle = load_bundle(Path(order["root"]))
    if bundle.digest != order["digest"]:
        raise BundleError(
            f"is another bundle than the one that was verified: {bundle.digest[:19]}, and not {order['digest'][:19]}",
            code="digest_mismatch",
            where=order["root"],
            remedy="somebody changed it meanwhile: try again when that is done",
            retryable=True,
        )
    name = bundle.variant(order["variant"], "tensorrt").name
    artefact, spec = bundle.artefact(name, "tensorrt"), bundle.input_spec(name)
    onnx = bundle.read_artefact(name, "tensorrt")
    where = str(artefact.path)
    report.line("parsing")
    file = read_onnx(onnx, where)
    settings = Settings(
        batches=tuple(order["batches"]),
        best=order["best"],
        workspace_bytes=order["workspace_bytes"],
        dram_bytes=order["dram_bytes"],
        dla_core=order["dla_core"],
        level=order["level"],
    )
    told_s = 0.0

    def progress(phase: str, share: float) -> None:
        nonlocal told_s
        now_s = time.monotonic()
        if now_s - told_s >= _TELL_S or share >= 1.0:
            told_s = now_s
            report.line("building", {"phase": phase, "percent": round(100 * share, 1)})

    started = time.monotonic()
    logger, lines = capture(trt)
    cache_file = Path(order["cache"])
    built = Network(trt, logger, lines, where).build(onnx, file, spec, settings, _read_cache(cache_file), progress)
    build_s = time.monotonic() - started
    peak_bytes = _peak_bytes()
    report.line("reading back")
    tensors = _read_back(trt, built, bundle, name, settings, where)
    report.line("saving")
    plan = Path(order["plan"])
    options: dict[str, str | int | float | bool | None] = {
        "width": spec.width,
        "height": spec.height,
        "pixel": spec.pixel,
        "variant": name,
        "max_batch": order["max_batch"],
        "static_batch": all(isinstance(each.shape and each.shape[0], int) for each in file.inputs),
        "level": settings.level,
        "dla_core": settings.dla_core,
        "workspace_bytes": settings.workspace_bytes,
        "build_s": round(build_s, 3),
        "peak_bytes": peak_bytes,
    }
    sidecar = describe(
        built.plan,
        here,
        onnx_sha256=artefact.sha256,
        tensors=tensors,
        batches=settings.batches,
        options=options,
    )
    save(plan, built.plan, sidecar)
    notes = list(built.notes)
    if built.cache is not None and (note := save_cache(cache_file, built.cache)) is not None:
        notes.append(note)
    return {
        "plan_bytes": len(built.plan),
        "peak_bytes": peak_bytes,
        "build_s": build_s,
        "layers": built.layers,
        "on_gpu": list(built.on_gpu),
        "notes": notes,
    }


def _read_back(
    trt: TensorRt, built: Built, bundle: Bundle, name: str, settings: Settings, where: str
) -> tuple[PlanTensor, ...]:
    """What the plan's inputs and outputs really are: it is deserialised once, here, before anybody counts on it."""
    logger, lines = capture(trt)
    mark = lines.mark()
    runtime = trt.Runtime(logger)
    if settings.dla_core is not None:
        runtime.DLA_core = settings.dla_core
    engine = runtime.deserialize_cuda_engine(built.plan)
    if engine is None:
        message = f"TensorRT does not take the plan that it has just built: {lines.tail(mark)}"
        raise EngineError(message, code="plan_refused", where=where, remedy="report this as a fault")
    try:
        spec = bundle.input_spec(name)
        tensors = read_tensors(trt, engine, where)
        check_input(tensors.input, spec, where)
        read_batches(engine, tensors.input, spec, settings.batches, where)
        return tuple(
            PlanTensor(
                name=each.name, mode="input" if each is tensors.input else "output", dtype=each.word, shape=each.shape
            )
            for each in (tensors.input, *tensors.outputs.values())
        )
    finally:
        del engine
        del runtime


def _read_cache(path: Path) -> bytes:
    """The timing cache of before; nothing where there is none, or it is damaged. It begins with its own sha256."""
    try:
        digest, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return b""
    return data if hashlib.sha256(data).hexdigest().encode() == digest else b""


def save(path: Path, plan: bytes, sidecar: Sidecar, files: Files = REAL) -> None:
    """Write a plan and its sidecar beside it: where there is a sidecar, all of the plan is on disk.

    Raises EngineError (code "store_write_failed").
    """
    try:
        write_atomic(path, plan, mode=0o444, files=files)
        write_atomic(sidecar_path(path), sidecar.to_json(), mode=0o444, files=files)
    except OSError as error:
        raise EngineError(
            f"the plan cannot be written: {error.strerror or error}",
            code="store_write_failed",
            where=str(path),
            remedy="look at the disk (df, dmesg), and at owner and rights of the store",
            retryable=True,
        ) from error


def save_cache(path: Path, data: bytes, files: Files = REAL) -> str | None:
    """Keep the timing cache in the place of that of before. Where that fails, why, in words: a plan that took minutes
    to build is not lost for it."""
    try:
        with contextlib.suppress(FileExistsError):
            files.mkdir(path.parent, 0o755)
        write_atomic(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data, files=files)
    except OSError as error:
        return f"what TensorRT measured cannot be kept, and is measured again: {path}: {error.strerror or error}"
    return None


def _peak_bytes() -> int | None:
    try:
        found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1]) * 1024


if __name__ == "__main__":
    main()
