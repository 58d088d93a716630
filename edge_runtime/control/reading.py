"""What a sender wrote, and why it is refused: pure functions. Every refusal of code `invalid` names its place."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from pydantic import ValidationError

from edge_runtime.errors import EdgeError
from edge_runtime.records.commands import CommandError
from edge_runtime.source_url import redact_text

MAX_BYTES = 64 * 1024
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_WANTED = 'send {"id": ..., "expires_utc": ..., "args": {...}}'


class Refusal(Exception):
    """A command is refused, with the error to answer."""

    def __init__(
        self, code: str, message: str, *, where: str | None = None, remedy: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.error = CommandError(
            code=code,
            message=_clean(message),
            where=_clean_or_none(where),
            remedy=_clean_or_none(remedy),
            retryable=retryable,
        )


def document_of(payload: bytes | Mapping[str, object]) -> Mapping[str, object]:
    """The JSON object of a payload. Raises Refusal."""
    if isinstance(payload, Mapping):
        return payload
    if len(payload) > MAX_BYTES:
        text = f"{len(payload)} bytes are more than the {MAX_BYTES} that a command may have"
        raise Refusal("invalid", text, where="payload", remedy="send less")
    try:
        document = json.loads(payload.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        what = f"it is not JSON: {error}" if payload else "it is empty, and no command (a topic is cleared like this)"
        raise Refusal("invalid", what, where="payload", remedy=_WANTED) from error
    if not isinstance(document, dict):
        raise Refusal("invalid", "it is not a JSON object", where="payload", remedy=_WANTED)
    return document


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def id_of(document: Mapping[str, object]) -> str | None:
    """The id, if it is one that can be answered to."""
    found = document.get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def fingerprint_of(name: str, document: Mapping[str, object]) -> bytes:
    """The same for the same wish, whatever the order of its keys."""
    text = json.dumps([name, document], sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def validated(model: type[Any], document: Mapping[str, object], prefix: str) -> Any:
    """The document as `model` has it; `prefix` goes before the names of its fields. Raises Refusal."""
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        parts = [str(part) or '""' for part in first["loc"]]
        # without parts it is about all of it: keys that need each other, a key that is no text
        where = prefix + ".".join(parts) if parts else prefix.rstrip(".") or "payload"
        message = str(first["msg"]).removeprefix("Value error, ")
        known = ", ".join(field.alias or name for name, field in model.model_fields.items()) or "nothing"
        remedy = f"it takes: {known}" if first["type"] == "extra_forbidden" else None
        raise Refusal("invalid", f"{where}: {message}", where=where, remedy=remedy) from error


def edge_error(error: EdgeError) -> CommandError:
    """One of our errors, as a reply has it."""
    return CommandError(
        code=error.code,
        message=_clean(error.message),
        where=_clean_or_none(error.where),
        remedy=_clean_or_none(error.remedy),
        retryable=error.retryable,
    )


def internal_error(error: Exception) -> CommandError:
    """A fault of ours, as a reply has it: without an address that may be in it."""
    return CommandError(
        code="internal",
        message=_clean(f"{type(error).__name__}: {redact_text(str(error))}"),
        where=None,
        remedy="see the log of the daemon",
        retryable=False,
    )


def _clean(text: str) -> str:
    """Text as UTF-8 can carry it (JSON may have said \\ud800), and not without end."""
    return text.encode(errors="replace").decode()[:1000]


def _clean_or_none(text: str | None) -> str | None:
    return None if text is None else _clean(text)
