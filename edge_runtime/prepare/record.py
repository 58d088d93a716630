"""A measured accuracy, written into the bundle it was measured of."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Table

from edge_runtime.durable import write_atomic
from edge_runtime.engine.bundle import MANIFEST_NAME, Bundle, load_bundle
from edge_runtime.engine.manifest import AccuracyTable, parse_manifest
from edge_runtime.errors import BundleError, EdgeError, UsageError

__all__ = ["check_recordable", "record_accuracy"]

_INSTALLED = Path(__file__).resolve().parents[1] / "_bundled"


def check_recordable(bundle: Bundle) -> None:
    """Refuse what `record_accuracy` would refuse, before anything is measured.

    Raises UsageError (code "bundle_read_only").
    """
    root = bundle.root.resolve()
    if root.is_relative_to(_INSTALLED):
        reason = "belongs to the installed package, whose files are not changed"
    elif bundle.digest == f"sha256:{root.name}":
        reason = "belongs to a store, which keeps every bundle under its digest"
    elif not os.access(root, os.W_OK, effective_ids=True):
        reason = "the folder cannot be written"
    else:
        return
    raise UsageError(
        reason, code="bundle_read_only", where=str(root), remedy="copy the bundle and record into the copy"
    )


def record_accuracy(bundle: Bundle, variant: str, accuracy: AccuracyTable) -> Bundle:
    """Write `accuracy` into that variant of the bundle's manifest, in place of an earlier one.

    Comments, order and everything else of bundle.toml stay as they are; it is exchanged in one step, and
    only for a text that is proved to say the same but for this accuracy. The new bundle is loaded and returned:
    its digest, and so that of every engine of it, is another one.

    Raises UsageError (code "bundle_read_only"), BundleError for an unknown variant or where the bundle on disk is
    no longer the one that was loaded, EdgeError (code "write_failed") when the disk refuses.
    """
    check_recordable(bundle)
    name = bundle.variant(variant).name
    file = (bundle.root / MANIFEST_NAME).resolve()
    try:
        old = file.read_bytes()
        mode = stat.S_IMODE(file.stat().st_mode)
        if f"sha256:{hashlib.sha256(old).hexdigest()}" != bundle.digest:
            raise BundleError(
                "has changed since it was measured",
                code="digest_mismatch",
                where=str(file),
                remedy="evaluate it again: the accuracy is that of the bundle before",
            )
        new = _changed(old, bundle, name, accuracy, str(file))
        write_atomic(file, new, mode=mode)
        try:
            return load_bundle(bundle.root)
        except BaseException:
            write_atomic(file, old, mode=mode)
            raise
    except OSError as error:
        raise EdgeError(
            f"the accuracy could not be recorded: {error.strerror or error}",
            code="write_failed",
            where=str(file),
            remedy="check free space and rights; the bundle is as it was",
        ) from error


def _changed(old: bytes, bundle: Bundle, name: str, accuracy: AccuracyTable, where: str) -> bytes:
    """The manifest's text with the accuracy in it. Raises BundleError where it would not say just that."""
    values = accuracy.model_dump(exclude_none=True)
    marked = old.startswith(b"\xef\xbb\xbf")
    try:
        document = tomlkit.parse(old.decode("utf-8-sig"))
        variants: list[MutableMapping[str, Any]] = document["variant"]
        (entry,) = (variant for variant in variants if variant["name"] == name)
        table = entry.get("accuracy")
        if not isinstance(table, Table):  # absent, or inline: a new line in its place
            entry["accuracy"] = table = tomlkit.inline_table()
        for key in [key for key in table if key not in values]:
            del table[key]
        table.update(values)
        text = tomlkit.dumps(document)
    except TOMLKitError as error:
        raise BundleError(f"cannot be rewritten: {error}", code="manifest_invalid", where=where) from None
    manifest, _ = parse_manifest(text, where)
    wanted = bundle.manifest.model_copy(
        update={
            "variant": tuple(
                each.model_copy(update={"accuracy": accuracy}) if each.name == name else each
                for each in bundle.manifest.variant
            )
        }
    )
    if manifest != wanted:
        raise BundleError(
            "cannot be rewritten without changing more than the accuracy",
            code="manifest_invalid",
            where=where,
            remedy=f"write the variant's `accuracy` by hand: {values}",
        )
    return text.encode("utf-8-sig" if marked else "utf-8")
