"""`edge-runtime build`: TensorRT engines of a bundle for this device. Parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli import build_sign
from edge_runtime.cli.control import STORE_SOCKET, clean
from edge_runtime.cli.numbers import count
from edge_runtime.errors import EXIT_DONE, EdgeError, EngineError, NotThereError, UsageError

if TYPE_CHECKING:
    from edge_runtime.app.building import Made, Need, PlanMaker
    from edge_runtime.config import Config
    from edge_runtime.engine.bundle import Bundle
    from edge_runtime.engine.tensorrt.build import Progress
    from edge_runtime.engine.tensorrt.probe import Here

MiB = 1024 * 1024
_REFRESH_S = 0.2
_WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `build` its options."""
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help="a bundle's folder, or bundled:NAME")
    parser.add_argument("--variant", default="all", metavar="V", help="one of its variants, or all (the default)")
    where = parser.add_mutually_exclusive_group()
    help_config = "build into this configuration's store, as its models need (default: the daemon's)"
    where.add_argument("-c", "--config", type=Path, metavar="CONFIG", help=help_config)
    where.add_argument("--store", type=Path, metavar="DIR", help="build into this store")
    parser.add_argument(
        "--max-batch", type=count, metavar="N", help="most pictures in one run (default: the configuration's, else 8)"
    )
    parser.add_argument("--workspace-mb", type=count, metavar="N", help="most scratch memory that the engine may use")
    parser.add_argument(
        "--dla", type=int, nargs="?", const=0, metavar="CORE", help="for a DLA core (default: 0), not for the GPU"
    )
    parser.add_argument(
        "--trust-plans",
        action="store_true",
        help="take plans that lie in BUNDLE, whoever signed them: they are native code, and run as you",
    )
    build_sign.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document; progress as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Build and print. Raises EdgeError."""
    if args.new_key is not None:
        return build_sign.make_key(args)
    if args.bundle is None:
        raise UsageError("no BUNDLE was given", remedy="edge-runtime build BUNDLE")
    from edge_runtime.app.building import PLANS, PlanMaker
    from edge_runtime.app.models import open_bundle
    from edge_runtime.app.proof import prove
    from edge_runtime.engine.tensorrt.build import look_at_device
    from edge_runtime.engine.tensorrt.plans import PlanStore
    from edge_runtime.engine.tensorrt.probe import NO_DEVICE
    from edge_runtime.hardware.memory import available_bytes

    if args.dla is not None and args.dla < 0:
        raise UsageError(f"--dla {args.dla} is no core", where="--dla", remedy="cores are numbered from 0")
    key = build_sign.read_key(args)
    config, store = _store(args)
    bundle = open_bundle(args.bundle)
    needs = _needs(args, bundle, config)
    # what is signed is built here
    keys = () if config is None or key is not None else config.engine.plan_keys
    maker = PlanMaker(PlanStore(store / PLANS), prove=prove, free_bytes=available_bytes, nice=0, plan_keys=keys)
    for need in needs:  # what can be built nowhere is said before anything is asked of the device
        maker.check(need)
    try:
        here = look_at_device()
    except EngineError as error:
        if error.code not in NO_DEVICE:
            raise
        raise _no_device(args, needs, error) from None
    _make(store)
    document: dict[str, Any] = {"device": asdict(here), "store": str(store), "engines": []}
    all_made = []
    for need in needs:
        made = _build(args, maker, need, here)
        all_made.append((need, made))
        document["engines"].append(_facts(need, made))
        if not args.json:
            print(_line(need, made))
    if key is not None:
        document["bundle"] = build_sign.write(args, bundle, all_made, here, key)
    if args.json:
        print(json.dumps(document, indent=2))
    return EXIT_DONE


def _store(args: argparse.Namespace) -> tuple[Config | None, Path]:
    from edge_runtime.cli.main import DEFAULT_CONFIG
    from edge_runtime.config import load_config

    if args.store is not None:
        return None, args.store.resolve()
    if args.config is None and not DEFAULT_CONFIG.is_file():
        return None, STORE_SOCKET.parent
    config = load_config(args.config or DEFAULT_CONFIG)
    return config, config.device.store


def _make(store: Path) -> None:
    try:
        store.mkdir(mode=0o750, parents=True, exist_ok=True)
    except OSError as error:
        raise EdgeError(
            f"the store cannot be written: {error.strerror}",
            code="store_write_failed",
            where=str(store),
            remedy="run this as the daemon's user (sudo -u edge-runtime ...), or name one with --store",
        ) from None


def _needs(args: argparse.Namespace, bundle: Bundle, config: Config | None) -> list[Need]:
    """What is to be built, as the models of the configuration would ask for it. Raises BundleError."""
    from edge_runtime.app.building import AUTO_BATCH, Need

    most = args.max_batch
    if most is None:
        batches = [each.max_batch for each in config.models] if config is not None else []
        fixed = [each for each in batches if isinstance(each, int)]
        most = max(fixed) if fixed and len(fixed) == len(batches) else max([AUTO_BATCH, *fixed])
    if args.dla is not None and args.max_batch is None:
        most = 1  # a DLA runs one size of batch only
    if args.variant == "all":
        names = bundle.variants_for("tensorrt") or (bundle.variant("auto", "tensorrt").name,)
    else:
        names = (bundle.variant(args.variant, "tensorrt").name,)
    return [Need(bundle, name, most, args.dla) for name in names]


def _no_device(args: argparse.Namespace, needs: list[Need], error: EngineError) -> NotThereError:
    """What would be done on a device, told; the error then says why it is not."""
    would = [
        {
            "variant": need.variant,
            "onnx": need.bundle.artefact(need.variant, "tensorrt").path.name,
            "precision": need.bundle.variant(need.variant).precision,
            "size": list(need.bundle.variant(need.variant).size),
            "max_batch": need.max_batch,
            "dla_core": need.dla_core,
        }
        for need in needs
    ]
    if args.json:
        print(json.dumps({"device": None, "engines": [], "would_build": would, "error": error.as_payload()}, indent=2))
    else:
        for each in would:
            on = "the GPU" if each["dla_core"] is None else f"DLA core {each['dla_core']}"
            print(
                f"would build {each['variant']}: {each['onnx']} ({each['precision']}) for {on}, batches up to "
                f"{each['max_batch']}"
            )
    return NotThereError(error.message, code=error.code, where=error.where, remedy=error.remedy)


def _build(args: argparse.Namespace, maker: PlanMaker, need: Need, here: Here) -> Made:
    shown = _Shown(need.variant, as_json=args.json)
    try:
        return maker.make(
            need,
            here,
            workspace_bytes=None if args.workspace_mb is None else args.workspace_mb * MiB,
            trust_plans=args.trust_plans,
            on_progress=shown,
        )
    finally:
        shown.end()


class _Shown:
    """Progress on standard error: a line that is written over on a terminal, JSON lines with --json."""

    def __init__(self, variant: str, *, as_json: bool) -> None:
        self._variant = variant
        self._json = as_json
        self._terminal = not as_json and sys.stderr.isatty()
        self._told_s = 0.0
        self._phase = ""

    def __call__(self, progress: Progress) -> None:
        if self._json:
            print(json.dumps({"variant": self._variant, **asdict(progress)}), file=sys.stderr, flush=True)
            return
        now_s = time.monotonic()
        if not self._terminal:
            step = progress.phase.partition(":")[0]
            if step != self._phase:
                print(f"{self._variant}: {step} ...", file=sys.stderr, flush=True)
            self._phase = step
        elif progress.phase != self._phase or now_s - self._told_s >= _REFRESH_S:
            self._told_s, self._phase = now_s, progress.phase
            print(f"\r{told(self._variant, progress):{_WIDTH}.{_WIDTH}}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._terminal:
            print(f"\r{'':{_WIDTH}}\r", end="", file=sys.stderr, flush=True)


def told(variant: str, progress: Progress) -> str:
    """A build's progress in one line."""
    percent = "" if progress.percent is None else f" {progress.percent:.0f} %"
    expected = "unknown" if progress.expected_s is None else f"{progress.expected_s:.0f} s"
    return f"{variant}: {clean(progress.phase)}{percent}, {progress.elapsed_s:.0f} s of {expected}"


def _facts(need: Need, made: Made) -> dict[str, Any]:
    sidecar, facts, proof = made.plan.sidecar, made.facts, made.proof
    return {
        "variant": need.variant,
        "how": made.how,
        "plan": str(made.plan.path),
        "plan_sha256": sidecar.plan_sha256,
        "onnx_sha256": sidecar.onnx_sha256,
        "bytes": sidecar.plan_bytes,
        "batches": list(sidecar.batches),
        "dla_core": sidecar.dla_core,
        "build_s": None if facts is None else round(facts.build_s, 3),
        "peak_bytes": None if facts is None else facts.peak_bytes,
        "layers": None if facts is None else facts.layers,
        "on_gpu": [] if facts is None else list(facts.on_gpu),
        "notes": [] if facts is None else list(facts.notes),
        "inference_ms": None if proof is None else round(proof.inference_ms, 3),
        "golden": None if proof is None else proof.golden,
    }


def _line(need: Need, made: Made) -> str:
    from edge_runtime.engine.tensorrt.network import named

    sidecar, facts, proof = made.plan.sidecar, made.facts, made.proof
    first, last = sidecar.batches[0], sidecar.batches[-1]
    size = f"{sidecar.plan_bytes / 1e6:.1f} MB, batches of {first if first == last else f'{first} to {last}'}"
    if facts is None or proof is None:
        what = "is there already" if made.how == "there" else "came with the bundle, and is right"
        return f"{need.variant}: {what} ({size}): {made.plan.path}"
    lines = [
        f"{need.variant}: built in {facts.build_s:.1f} s ({size}), {proof.inference_ms:.2f} ms a run; {proof.golden}",
        f"  {made.plan.path}",
    ]
    if facts.on_gpu:
        lines.append(f"  {len(facts.on_gpu)} of {facts.layers} layers are not for the DLA: {named(facts.on_gpu)}")
    return "\n".join([*lines, *(f"  note: {clean(note)}" for note in facts.notes)])
