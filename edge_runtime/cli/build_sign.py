"""`edge-runtime build --sign` and `--new-key`: plans for devices just like this one. Parsing and printing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_runtime.errors import EXIT_DONE, UsageError

if TYPE_CHECKING:
    from edge_runtime.app.building import Made, Need
    from edge_runtime.engine.bundle import Bundle
    from edge_runtime.engine.signing import SigningKey
    from edge_runtime.engine.tensorrt.probe import Here

_EXAMPLE = "edge-runtime build BUNDLE --into OUT_DIR --sign KEY.pem"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `build` its options for signed plans."""
    parser.add_argument(
        "--into", type=Path, metavar="OUT_DIR", help="write a copy of BUNDLE that carries these plans; with --sign"
    )
    parser.add_argument("--sign", type=Path, metavar="KEY", help="sign them with this private key; with --into")
    parser.add_argument("--overwrite", action="store_true", help="replace a bundle that is OUT_DIR")
    parser.add_argument(
        "--new-key", type=Path, metavar="KEY", help="make a private key in a new file, print its public one, and end"
    )


def make_key(args: argparse.Namespace) -> int:
    """`--new-key`: make it and print the public one. Raises UsageError."""
    from edge_runtime.engine import signing

    if args.bundle is not None or args.sign is not None or args.into is not None:
        raise UsageError("makes a key and builds nothing", where="--new-key", remedy="give it without BUNDLE")
    key = signing.make_key(args.new_key)
    if args.json:
        print(json.dumps({"key": key.id, "public_key": key.public, "file": str(args.new_key)}, indent=2))
    else:
        print(key.public)
    return EXIT_DONE


def read_key(args: argparse.Namespace) -> SigningKey | None:
    """The key of `--sign`, with all that would stand in the way said before anything is built. Raises UsageError."""
    if args.sign is None and args.into is None:
        if args.overwrite:
            raise UsageError("replaces OUT_DIR, and there is none", where="--overwrite", remedy=_EXAMPLE)
        return None
    if args.sign is None or args.into is None:
        missing = "--sign" if args.sign is None else "--into"
        raise UsageError("--into and --sign go together", where=missing, remedy=_EXAMPLE)
    if args.trust_plans:
        message = "what is signed is built here, and not taken from somebody else's bundle"
        raise UsageError(message, where="--trust-plans", remedy="leave it out")
    from edge_runtime.engine import signing
    from edge_runtime.prepare.bundle_draft import check_target

    args.into = args.into.absolute()
    check_target(args.into, args.overwrite)
    return signing.read_key(args.sign)


def write(
    args: argparse.Namespace, bundle: Bundle, made: Sequence[tuple[Need, Made]], here: Here, key: SigningKey
) -> dict[str, Any]:
    """Write OUT_DIR, and print what it is unless that is for the document that is returned. Raises EdgeError."""
    from edge_runtime.app.plan_bundle import write_plan_bundle

    out = write_plan_bundle(bundle, made, here, key, args.into)
    plans = [
        {
            "variant": variant.name,
            "tensorrt": plan.tensorrt,
            "compute_capability": plan.compute_capability,
            "device": plan.device,
            "signed_by": [each.key for each in plan.signature],
        }
        for variant in out.manifest.variant
        for plan in variant.files.tensorrt_plan
    ]
    if not args.json:
        print(f"{out.root}: {out.digest}, signed with the key {key.id}; it carries plans for")
        for each in plans:
            print(f"  {each['variant']}: {each['device']}, TensorRT {each['tensorrt']}")
    return {"path": str(out.root), "digest": out.digest, "key": key.id, "public_key": key.public, "plans": plans}
