"""`edge-runtime bench ...` (scripts/benchmark): parsing and printing."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.cli import bench_cameras, bench_governor, bench_input, bench_surge, bench_telemetry
from edge_runtime.cli.numbers import count, positive
from edge_runtime.errors import EXIT_DONE, CameraError, NotThereError, UsageError

if TYPE_CHECKING:
    from edge_runtime.bench.cache import CacheBench, CacheRow
    from edge_runtime.bench.overhead import OverheadResult
    from edge_runtime.bench.pipeline import PipelineResult
    from edge_runtime.bench.reload import Load, ReloadBench

_PIPELINE = """In one run, in turn: (a) the engine alone on all lanes, (b) the whole pipeline at full pace on a clip,
(c) the same stages one after the other in one thread. Ratios of one run are what counts; absolute rates are this
machine's, now."""
_OVERHEAD = """Process CPU per completed frame of everything but pixels and inference: cameras at real-time pace
through capture, claim, lanes, tickets, ledger and windows, with an engine that answers at once."""
_RELOAD = """Models take turns under running cameras, as `edge-runtime reload` does it: proof, load, exchange, watch;
then the same cameras for as long undisturbed. What counts are the differences between the two runs."""

_CACHE = """Clips, a still scene, the same with a sensor's noise, and noise alone, frame by frame in one thread: how
many runs `cache = "exact"` and `cache = "scene"` save, and how many of the detections that every frame has when each is
inferred are still there. Only the times depend on the machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `bench` its sub-commands."""
    commands = parser.add_subparsers(dest="bench_command", required=True, metavar="COMMAND")
    pipeline = commands.add_parser(
        "pipeline", help="how much of the engine's capacity the pipeline reaches", description=_PIPELINE
    )
    pipeline.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: %(default)s")
    pipeline.add_argument("--variant", default="auto", help="default: the bundle's first")
    pipeline.add_argument("--heavy", action="store_true", help="a model with YOLOv8n's weight in place of a bundle")
    pipeline.add_argument("--clip", type=Path, metavar="FILE", help="default: the bundled clip")
    pipeline.add_argument("--lanes", type=count, metavar="N", help="default: one per core")
    pipeline.add_argument(
        "--seconds", type=positive, default=4.0, metavar="S", help="of each part of a repeat (%(default)s)"
    )
    _add_common(pipeline)
    overhead = commands.add_parser("overhead", help="what the framework itself costs", description=_OVERHEAD)
    overhead.add_argument("--cameras", type=count, nargs="+", default=[1, 16, 32], metavar="N", help="default: 1 16 32")
    overhead.add_argument("--fps", type=positive, default=10.0, help="of each camera (%(default)s)")
    overhead.add_argument("--lanes", type=count, metavar="N", help="default: one per core")
    overhead.add_argument("--seconds", type=positive, default=10.0, metavar="S", help="of each repeat (%(default)s)")
    _add_common(overhead)
    reload = commands.add_parser("reload", help="what a change of models costs the cameras", description=_RELOAD)
    reload.add_argument(
        "--bundle",
        action="append",
        metavar="DIR[@VARIANT]",
        help="again for each model that takes part (default: the bundled one in two sizes)",
    )
    reload.add_argument("--reloads", type=count, default=200, metavar="N", help="default: %(default)s")
    reload.add_argument(
        "--prove-each", action="store_true", help="as if every model were new (default: each is proved once)"
    )
    reload.add_argument("--cameras", type=count, default=2, metavar="N", help="default: %(default)s")
    reload.add_argument("--fps", type=positive, default=15.0, help="of each camera (%(default)s)")
    reload.add_argument("--clip", type=Path, metavar="FILE", help="what the cameras show (default: synthetic pictures)")
    reload.add_argument("--lanes", type=count, metavar="N", help="default: one per core")
    reload.add_argument("--json", action="store_true", help="print one JSON document")
    cache = commands.add_parser("cache", help="what the caches save and lose", description=_CACHE)
    cache.add_argument("--bundle", default="bundled:centernet", metavar="DIR", help="default: %(default)s")
    cache.add_argument("--variant", help="default: fp32-416 of the bundled model, else the bundle's first")
    cache.add_argument(
        "--clip", type=Path, action="append", metavar="FILE", help="again for each (default: the bundled clip)"
    )
    cache.add_argument("--frames", type=count, default=200, metavar="N", help="of each still scene (%(default)s)")
    cache.add_argument(
        "--max-age", type=positive, default=10.0, metavar="S", help="cache_max_age_s of `scene` (%(default)s)"
    )
    cache.add_argument("--json", action="store_true", help="print one JSON document")
    bench_governor.add_arguments(
        commands.add_parser("governor", help="how well a budget is held, on simulated modules")
    )
    bench_input.add_arguments(commands.add_parser("input", help="what a frame costs by the format a model takes"))
    bench_cameras.add_arguments(commands.add_parser("cameras", help="what a camera costs: CPU and memory"))
    bench_surge.add_arguments(commands.add_parser("surge", help="how a latency is held while frames come in a surge"))
    bench_telemetry.add_arguments(
        commands.add_parser("telemetry", help="what a failing broker does to the frames, and what reports cost")
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=count, default=5, metavar="N", help="medians are over these (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the parsed benchmark; returns the exit code. Raises EdgeError."""
    if args.bench_command == "pipeline":
        result = _measure_pipeline(args)
        print(json.dumps(result.as_dict(), indent=2) if args.json else _pipeline_table(result))
        return EXIT_DONE
    if args.bench_command == "reload":
        reloaded = _measure_reload(args)
        print(json.dumps(reloaded.as_dict(), indent=2) if args.json else _reload_table(reloaded))
        return EXIT_DONE
    if args.bench_command == "cache":
        cached = _measure_cache(args)
        print(json.dumps(cached.as_dict(), indent=2) if args.json else _cache_table(cached))
        return EXIT_DONE
    if args.bench_command == "governor":
        return bench_governor.run(args)
    if args.bench_command == "input":
        return bench_input.run(args)
    if args.bench_command == "cameras":
        return bench_cameras.run(args)
    if args.bench_command == "surge":
        return bench_surge.run(args)
    if args.bench_command == "telemetry":
        return bench_telemetry.run(args)
    from edge_runtime.app.models import cores
    from edge_runtime.bench.overhead import measure_overhead

    results = [
        measure_overhead(
            cameras=cameras, fps=args.fps, lanes=args.lanes or cores(), seconds=args.seconds, repeats=args.repeats
        )
        for cameras in args.cameras
    ]
    print(json.dumps([each.as_dict() for each in results], indent=2) if args.json else _overhead_table(results))
    return EXIT_DONE


def _measure_pipeline(args: argparse.Namespace) -> PipelineResult:
    from edge_runtime.app.models import cores, open_bundle
    from edge_runtime.bench.pipeline import measure_pipeline
    from edge_runtime.bundled import bundled_media

    clip = args.clip or bundled_media("vtest")
    _check_clip(clip)
    with tempfile.TemporaryDirectory(prefix="edge-runtime-bench-") as folder:
        source = str(_heavy_bundle(Path(folder))) if args.heavy else args.bundle
        return measure_pipeline(
            open_bundle(source),
            args.variant,
            clip,
            lanes=args.lanes or cores(),
            seconds=args.seconds,
            repeats=args.repeats,
        )


def _check_clip(clip: Path) -> None:
    from edge_runtime.camera.media import probe

    try:
        probe(f"file:{clip.resolve()}")
    except CameraError as error:
        raise UsageError(error.message, code=error.code, where=str(clip), remedy="give a video file") from error


def _measure_cache(args: argparse.Namespace) -> CacheBench:
    from edge_runtime.app.models import open_bundle
    from edge_runtime.bench.cache import measure_cache
    from edge_runtime.bundled import bundled_media

    clips = args.clip or [bundled_media("vtest")]
    for clip in clips:
        _check_clip(clip)
    variant = args.variant or ("fp32-416" if args.bundle == "bundled:centernet" else "auto")

    def progress(scene: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{scene:40}", end="", file=sys.stderr, flush=True)

    bundle = open_bundle(args.bundle)
    return measure_cache(bundle, variant, clips, frames=args.frames, max_age_s=args.max_age, progress=progress)


def _measure_reload(args: argparse.Namespace) -> ReloadBench:
    from edge_runtime.app.models import open_bundle
    from edge_runtime.bench.reload import measure_reload

    bundles = []
    for word in args.bundle or ["bundled:centernet@fp32-320", "bundled:centernet@fp32-416"]:
        source, _, variant = word.partition("@")
        bundle = open_bundle(source)
        bundles.append((bundle, bundle.variant(variant or "auto").name))
    if len(bundles) < 2:
        raise UsageError("one model cannot take turns", where="--bundle", remedy="name at least two, or none at all")

    def progress(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done} of {of} reloads", end="" if done < of else "\n", file=sys.stderr, flush=True)

    return measure_reload(
        bundles,
        reloads=args.reloads,
        cameras=args.cameras,
        fps=args.fps,
        lanes=args.lanes or "auto",
        url=None if args.clip is None else f"file:{args.clip.resolve()}",
        prove_each=args.prove_each,
        progress=progress,
    )


def _heavy_bundle(folder: Path) -> Path:
    try:
        from edge_runtime.prepare.heavy import CLASSES, build_heavy_model
        from edge_runtime.prepare.importer import import_model
    except ImportError as error:
        raise NotThereError(
            f"--heavy needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    model, labels = folder / "heavy.onnx", folder / "labels.txt"
    build_heavy_model(model)
    labels.write_text("\n".join(f"class {index}" for index in range(CLASSES)), encoding="utf-8")
    return import_model(model, folder / "heavy", labels=labels, layout="centernet", licence="Apache-2.0").bundle.root


def _pipeline_table(result: PipelineResult) -> str:
    total = sum(result.stages_ms.values())
    stages = "  ".join(f"{stage} {value:.2f}" for stage, value in result.stages_ms.items())
    return "\n".join(
        [
            f"{result.bundle} {result.variant} on {result.clip}, {result.lanes} lanes, {len(result.repeats)} repeats",
            f"  a  engine only   {result.engine_fps:8.1f} fps",
            f"  b  pipeline      {result.pipeline_fps:8.1f} fps   b/a {result.pipeline_to_engine:.3f}",
            f"  c  one thread    {result.sequential_fps:8.1f} fps   b/c {result.pipeline_to_sequential:.3f}",
            f"  CPU ms a frame: {stages}  sum {total:.2f}  framework {result.framework_ms:.2f}",
            f"  peak RSS {result.peak_rss_mb:.0f} MB",
        ]
    )


def _cache_table(result: CacheBench) -> str:
    def share(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    def row(each: CacheRow) -> str:
        return (
            f"  {each.scene:32} {each.cache:6} {each.frames:6d} {each.saved * 100:7.1f} {each.bypassed * 100:9.1f} "
            f"{each.detections:11d} {share(each.recall, 4):>7} {share(each.recall_given, 4):>9} "
            f"{share(each.repeated, 4):>9} {share(each.look_us, 0):>8}"
        )

    return "\n".join(
        [
            f"{result.bundle} {result.variant}, a run {result.infer_ms:.1f} ms, at most {result.max_age_s:g} s old",
            f"  {'scene':32} cache  frames saved % bypassed % detections  recall  of given  repeated  look us",
            *map(row, result.rows),
        ]
    )


def _overhead_table(results: list[OverheadResult]) -> str:
    rows = ["cameras   fps   completed   CPU us a frame   of it bare hand-off   (all repeats)"]
    for each in results:
        values = ", ".join(f"{value:.0f}" for value in each.cpu_us)
        rows.append(
            f"{each.cameras:7d} {each.fps:5.1f} {each.completed:11d}   {each.cpu_us_median:14.1f}   "
            f"{each.handoff_us_median:19.1f}   ({values})"
        )
    return "\n".join(rows)


def _reload_table(result: ReloadBench) -> str:
    def load(name: str, each: Load) -> str:
        return (
            f"  {name:12} {each.captured:8d} {each.completed:9d} {each.stale:6d} {each.dropped:8d} {each.failed:7d} "
            f"{each.longest_gap_ms:12.0f} ms"
        )

    return "\n".join(
        [
            f"{' and '.join(result.models)} in turn, {result.reloads} reloads ({result.refused} refused) under "
            f"{result.cameras} cameras at {result.fps:g} fps, onnxruntime {result.onnxruntime}",
            "               captured completed  stale  dropped  failed    longest gap",
            load("reloading", result.disturbed),
            load("undisturbed", result.undisturbed),
            f"  exchange      median {result.exchange_ms[0]:.3f} ms, worst {result.exchange_ms[1]:.3f} ms",
            f"  whole reload  median {result.took_s[0]:.2f} s, worst {result.took_s[1]:.2f} s; of it the proof "
            f"{result.proof_s[0]:.2f} s",
            f"  batches with two engines: {result.mixed_batches}; results out of order: {result.out_of_order}",
            f"  memory {result.rss_early_mb:.1f} MB around reload 20, {result.rss_late_mb:.1f} MB at the end; "
            f"threads {result.threads[0]} and {result.threads[1]}, descriptors {result.descriptors[0]} and "
            f"{result.descriptors[1]}",
        ]
    )
