"""`edge-runtime prepare evaluate` and `prepare compare`: arguments, progress and printing."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from edge_runtime.cli.numbers import count, resamples, share, whole
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED, NotThereError

if TYPE_CHECKING:
    from edge_runtime.app.evaluate import Compared, Evaluated
    from edge_runtime.prepare.comparison import Comparison

_TERMINAL_INTERVAL_S = 0.1
_LOG_INTERVAL_S = 10.0
_LOSS_ROUNDING = 1e-9

_EVALUATE = """Run a model over labelled pictures, through the reader, scaler, preprocessing and decoding that the
daemon uses, and say how right it is: COCO's mAP for a detector, top-1 for a classifier."""
_COMPARE = """Run two models over the same labelled pictures and say what B gains or loses against A, overall, by
class and by size, with an interval. Exit code 3 where B loses more than --max-loss."""
_DATASET = "a COCO json or a folder with one; a folder with YOLO's images and labels; for a classifier a folder with \
labels.txt (FILE CLASS a line) or with a folder per class"


def add_evaluate(parser: argparse.ArgumentParser) -> None:
    """Give `prepare evaluate` its arguments."""
    parser.description = _EVALUATE
    parser.add_argument("bundle", metavar="BUNDLE", help="a bundle's folder, or bundled:NAME")
    _add_common(parser)
    parser.add_argument("--variant", default="auto", metavar="V|all", help="default: the bundle's first")
    parser.add_argument("--per-class", action="store_true", help="also print each class")
    parser.add_argument(
        "--record", action="store_true", help="write the accuracy into the bundle, which changes its digest"
    )


def add_compare(parser: argparse.ArgumentParser) -> None:
    """Give `prepare compare` its arguments."""
    parser.description = _COMPARE
    for name, what in (("A", "the model to compare against"), ("B", "the model in question")):
        parser.add_argument(name.lower(), metavar=f"BUNDLE_{name}[@VARIANT]", help=what)
    _add_common(parser)
    parser.add_argument("--max-loss", type=share, metavar="0-1", help="how much of the metric B may lose")
    parser.add_argument("--seed", type=whole, default=0, help="of what is drawn (%(default)s)")
    parser.add_argument("--resamples", type=resamples, default=1000, metavar="N", help="of the interval (%(default)s)")


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", type=Path, help=_DATASET)
    parser.add_argument(
        "--score-threshold", type=share, default=0.01, metavar="0-1", help="detections above it count (%(default)s)"
    )
    parser.add_argument("--images", type=count, metavar="N", help="only N pictures, drawn at random, always the same")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run_evaluate(args: argparse.Namespace) -> int:
    """Run `prepare evaluate`; returns the exit code. Raises EdgeError."""
    app = _app()
    documents: list[dict[str, Any]] = []
    notes: tuple[str, ...] = ()
    with progress_on(sys.stderr) as progress:
        for done in app.evaluate_bundle(
            args.bundle,
            args.dataset,
            variant=args.variant,
            score_threshold=args.score_threshold,
            images=args.images,
            record=args.record,
            progress=progress.show,
        ):
            progress.clear()
            documents.append(_document(done))
            if args.json:
                continue
            if not notes:
                notes = done.notes
                for note in notes:
                    print(f"note: {note}", file=sys.stderr)
            print("\n".join(_table(documents[-1], per_class=args.per_class)), flush=True)
    if args.json:
        several = {"metric": documents[0]["metric"], "variants": documents}
        print(json.dumps(several if args.variant == app.ALL else documents[0], indent=2))
    return EXIT_DONE


def run_compare(args: argparse.Namespace) -> int:
    """Run `prepare compare`; returns the exit code: 3 where B loses more than --max-loss. Raises EdgeError."""
    app = _app()
    with progress_on(sys.stderr) as progress:
        compared: Compared = app.compare_bundles(
            _target(args.a),
            _target(args.b),
            args.dataset,
            score_threshold=args.score_threshold,
            images=args.images,
            seed=args.seed,
            resamples=args.resamples,
            progress=progress.show,
        )
    comparison: Comparison = compared.comparison
    gate = None if args.max_loss is None else _gate(comparison, args.max_loss)
    if args.json:
        print(json.dumps({**comparison.to_json(), "notes": list(compared.notes), "gate": gate}, indent=2))
    else:
        for note in compared.notes:
            print(f"note: {note}", file=sys.stderr)
        print(comparison.table())
        if gate is not None:
            print(gate["verdict"])
    return EXIT_DONE if gate is None or gate["passed"] else EXIT_REFUSED


def _gate(comparison: Comparison, max_loss: float) -> dict[str, Any]:
    """Whether B may take A's place. The difference itself decides; the interval says how far to trust it."""
    loss, low, high = comparison.a - comparison.b, comparison.low, comparison.high
    passed = loss <= max_loss + _LOSS_ROUNDING
    change = f"rises by {-loss:.4f}" if loss < 0 else f"falls by {loss:.4f}"
    verdict = f"{'passed' if passed else 'refused'}: {comparison.metric} {change}, and it may fall by {max_loss:g}"
    wide = low is None or high is None or high - low > max_loss
    if low is None or high is None:
        verdict += "; there are too few pictures for an interval"
    elif wide:
        verdict += f"; the interval, {high - low:.4f}, is wider than that: other pictures may say otherwise"
    return {"max_loss": max_loss, "loss": loss, "passed": passed, "interval_wider_than_limit": wide, "verdict": verdict}


def _app() -> ModuleType:
    try:
        from edge_runtime.app import evaluate
    except ImportError as error:
        raise NotThereError(
            f"`prepare` needs {error.name}", code="not_installed", remedy="pip install 'edge-runtime[prepare]'"
        ) from None
    return evaluate


def _target(text: str) -> tuple[str, str]:
    """Bundle and variant of `BUNDLE[@VARIANT]`."""
    bundle, at, variant = text.rpartition("@")
    return (text, "auto") if not at or Path(text).exists() else (bundle, variant)


def _document(done: Evaluated) -> dict[str, Any]:
    recorded = None if done.recorded is None else {"bundle": str(done.recorded.root), "digest": done.recorded.digest}
    return {**done.evaluation.as_dict(), "notes": list(done.notes), "recorded": recorded}


def _table(document: dict[str, Any], *, per_class: bool) -> list[str]:
    """What a person reads."""
    rows = [(document["metric"], _figure(document["value"]))]
    if document["metric"] == "mAP":
        rows += [("AP50", _figure(document["ap50"])), ("AP75", _figure(document["ap75"]))]
        rows += [(f"AP {size}", _figure(document[f"ap_{size}"])) for size in ("small", "medium", "large")]
    else:
        rows.append(("top5", _figure(document["top5"])))
    boxes = f", {document['boxes']} boxes" if "boxes" in document else ""
    times = document["inference_ms"]
    rows += [
        ("inference", f"{times['mean']:.1f} ms a picture (p50 {times['p50']:.1f}, p99 {times['p99']:.1f})"),
        ("data", f"{document['data']} ({document['data_kind']}), {document['images']} pictures{boxes}"),
        ("data sha256", document["data_sha256"]),
        ("scaler", document["scaler"]),
        ("backend", document["backend"]),
        ("engine", document["engine"]),
    ]
    if document["metric"] == "mAP":
        rows.insert(-5, ("score above", f"{document['score_threshold']:g}"))
    if document["recorded"] is not None:
        rows.append(("recorded", f"the bundle's digest is now {document['recorded']['digest']}"))
    lines = [f"{document['bundle']} {document['variant']}"]
    lines += _columns(rows)
    if per_class:
        lines += _columns([(name, _figure(value)) for name, value in document["per_class"].items()])
    return lines


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


class Progress:
    """One line that is rewritten on a terminal; elsewhere a line now and then."""

    def __init__(self, stream: TextIO, now_s: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._now_s = now_s
        self._shown_s = now_s()
        self._drawn = False
        self._begun: tuple[str, float] = ("", 0.0)

    def show(self, what: str, done: int, of: int, unit: str = "pictures") -> None:
        """Called for every picture (or other `unit`), `of` 0 where their number is not known; writes only when it is
        time."""
        now_s = self._now_s()
        if what != self._begun[0]:
            self._begun = (what, now_s)
        if now_s - self._shown_s < (_TERMINAL_INTERVAL_S if self._terminal else _LOG_INTERVAL_S):
            return
        self._shown_s = now_s
        left_s = (now_s - self._begun[1]) / max(done, 1) * (of - done)
        text = f"{what}: {done} of {of} {unit}, {left_s:.0f} s left" if of else f"{what}: {done} {unit}"
        self._stream.write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")
        self._stream.flush()
        self._drawn = self._terminal

    def clear(self) -> None:
        """Leave the line empty for what is printed next."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False


@contextmanager
def progress_on(stream: TextIO) -> Iterator[Progress]:
    """Progress on a stream, whose line is left empty at the end."""
    progress = Progress(stream)
    try:
        yield progress
    finally:
        progress.clear()
