"""bundle.toml written: one deterministic text for one manifest, since its hash is the bundle's digest."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["manifest_text"]

_LATER = ("golden", "accuracy", "prepared")


def manifest_text(
    bundle: Mapping[str, Any],
    input: Mapping[str, Any],  # noqa: A002  the table's own name
    output: Mapping[str, Any],
    variants: Sequence[Mapping[str, Any]],
    files: Mapping[str, str],
) -> str:
    """The text of a bundle.toml. Keys keep their order; values of None are left out.

    `files` is path -> sha256 of everything that no variant lists. In a variant, nested mappings become inline
    tables, but for `files`, which gets one dotted key per backend.
    """
    lines: list[str] = []
    for name, table in (("bundle", bundle), ("input", input), ("output", output), ("files", files)):
        lines += [f"[{name}]", *_pairs(table), ""]
    for variant in variants:
        artefacts = {f"files.{backend}": file for backend, file in variant["files"].items()}
        plain = {key: value for key, value in variant.items() if key not in ("files", *_LATER)}
        later = {key: variant.get(key) for key in _LATER}
        lines.append("[[variant]]")
        lines += [*_pairs(plain), *(f"{key} = {_value(file)}" for key, file in artefacts.items()), *_pairs(later), ""]
    return "\n".join(lines)


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(_pairs(value))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    # JSON's strings are TOML's, but for the one control character that JSON leaves as it is.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
