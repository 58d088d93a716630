"""`edge-runtime reload`: another bundle for a running model. Uploads it, waits for the outcome, explains it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.cli.control import add_daemon_arguments, checked_reply, clean, execute, find_daemon, request_found
from edge_runtime.errors import EXIT_DONE, UsageError

if TYPE_CHECKING:
    from edge_runtime.engine.bundle import Bundle

OUTCOME_S = 600.0
"""Longer than loading, proving and watching may take together."""
_USAGE = frozenset({"unknown_model", "unknown_variant", "no_artefact", "not_in_store", "invalid", "unknown_command"})
_FAILED = frozenset(
    {
        "busy",
        "cancelled",
        "in_progress",
        "internal",
        "proof_failed",
        "stopping",
        "store_unreadable",
        "store_write_failed",
    }
)
"""Codes of errors that are no judgement of the model: all others are a refusal."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `reload` its options."""
    add_daemon_arguments(parser)
    parser.add_argument("model", metavar="MODEL", help="a configured model's name")
    parser.add_argument(
        "bundle", metavar="BUNDLE", nargs="?", help="a bundle's folder, or the sha256:... of one that was sent before"
    )
    parser.add_argument("--variant", default=None, metavar="V", help="one of its variants (default: the first)")
    parser.add_argument("--reset", action="store_true", help="go back to what the configuration says")
    parser.add_argument(
        "--allow-pause", action="store_true", help="stop the old engine first where memory has no room for both"
    )
    parser.add_argument("--allow-slow", action="store_true", help="take a model that cannot keep up with its cameras")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Reload and print the outcome. Raises EdgeError where the model runs what it ran before."""
    if args.reset == (args.bundle is not None):
        raise UsageError("name a BUNDLE or pass --reset", where="reload", remedy="edge-runtime reload MODEL BUNDLE")
    wanted: dict[str, Any] = {
        "model": args.model,
        "allow_pause": args.allow_pause,
        "allow_slow": args.allow_slow,
    }
    bundle = None
    if args.reset:
        wanted["reset"] = True
    else:
        wanted["variant"] = args.variant or "auto"
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", args.bundle):
            bundle = _read_bundle(args.bundle, wanted["variant"])
    place, report = find_daemon(args)
    _check_model(args.model, report)
    if bundle is not None:
        wanted["bundle"] = _upload(place, bundle, quiet=args.json)
    elif not args.reset:
        wanted["bundle"] = args.bundle
    try:
        result = execute(place, "reload", wanted, usage=_USAGE, failed=_FAILED, timeout_s=OUTCOME_S)
    except KeyboardInterrupt:
        print("edge-runtime: the daemon goes on with it; see `edge-runtime status`", file=sys.stderr)
        raise
    print(json.dumps(result, indent=2) if args.json else describe(result))
    return EXIT_DONE


def describe(result: dict[str, Any]) -> str:
    """The outcome for a person. Read leniently: the daemon may be older or newer than we are."""
    name, engine = clean(result.get("model")), clean(result.get("engine"))[:19]
    what = "runs" if result.get("changed") else "ran already"
    lines = [f"model {name}: {clean(result.get('variant'))} of {clean(result.get('bundle'))[:19]} {what} ({engine})"]
    proof = result.get("proof")
    if isinstance(proof, dict):
        lines.append(
            f"  proved in {_number(proof.get('took_s'), 1)} s: {_number(proof.get('inference_ms'), 1)} ms a picture, "
            f"{_number(proof.get('memory_mb'), 0)} MB; {clean(proof.get('golden'))}"
        )
    if result.get("exchange_ms") is not None:
        lost = result.get("lost")
        counts = [f"{count} {clean(word)}" for word, count in lost.items() if count] if isinstance(lost, dict) else []
        lines.append(
            f"  exchanged in {_number(result.get('exchange_ms'), 2)} ms; longest gap between results "
            f"{_number(result.get('gap_ms'), 0)} ms; frames lost meanwhile: {', '.join(counts) or 'none'}"
        )
    if result.get("pause_ms") is not None:
        lines.append(f"  the model was stopped for {_number(result.get('pause_ms'), 0)} ms to make room in memory")
    lines += [f"  note: {clean(note)}" for note in result.get("notes") or []]
    return "\n".join(lines)


def _number(value: object, digits: int) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def _read_bundle(path: str, variant: str) -> Bundle:
    """Looked at here first: what is wrong with it can be said before anything is sent."""
    from edge_runtime.bundled import SCHEME, bundled_engine
    from edge_runtime.engine.archive import require_listed
    from edge_runtime.engine.bundle import load_bundle

    bundle = load_bundle(bundled_engine(path.removeprefix(SCHEME)) if path.startswith(SCHEME) else Path(path))
    bundle.variant(variant)
    return require_listed(bundle)


def _check_model(name: str, report: dict[str, Any]) -> None:
    names = [str(each.get("name")) for each in report.get("models") or [] if isinstance(each, dict)]
    if name not in names:
        raise UsageError(
            f"there is no model {name!r}",
            code="unknown_model",
            where="MODEL",
            remedy=f"the daemon has {', '.join(names) or 'none'}",
        )


def _upload(place: Path, bundle: Bundle, *, quiet: bool) -> str:
    from edge_runtime.engine.archive import tar_bundle

    if not quiet:
        print(f"sending {bundle.name} {bundle.digest[:19]} ...", file=sys.stderr)
    status, body = request_found(place, "PUT", "/api/bundles", tar_bundle(bundle), timeout_s=OUTCOME_S)
    return str(checked_reply(place, status, body)["digest"])
