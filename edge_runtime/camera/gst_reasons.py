"""GStreamer's errors in an operator's words, the same as for the other backend. Pure but for `unreachable`."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import REFUSED
from edge_runtime.source_url import redact_text

_RESOURCE, _STREAM = "gst-resource-error-quark", "gst-stream-error-quark"
# Codes of GstResourceError and GstStreamError (gst/gsterror.h).
_CONNECT_S = 2.0
_NOT_AUTHORIZED = 16
_NOT_UNDERSTOOD = (4, 5, 6)


class Reason(NamedTuple):
    """`text` may still hold an address."""

    text: str
    code: str | None = None
    remedy: str | None = None


_REFUSED = Reason(
    "user or password refused: 401 Unauthorized",
    REFUSED,
    "check them in its url; in a password write %40 for @, %2F for /, %3A for :, %23 for #, %25 for %",
)
_CAUSES = (
    (r"unauthorized|not authorized|\b401\b|authenticat", _REFUSED),
    (
        r"forbidden|\b403\b",
        Reason("this user may not see it: 403 Forbidden", REFUSED, "give the user the right to the live picture"),
    ),
    (
        r"\b404\b|not found",
        Reason("nothing at this path: 404 Not Found", None, "check the path in its url with the camera's manual"),
    ),
    (r"connection refused", Reason("cannot open: Connection refused", None, "check host and port; it may be starting")),
    (
        r"certificate|\btls\b|handshake",
        Reason("no TLS connection", None, "is its certificate for this host, in time, and signed by one in ca_file?"),
    ),
    (
        r"resolv|name or service|no such host",
        Reason("its host name cannot be resolved", None, "check the name, or write an address"),
    ),
    (r"no route to host|unreachable", Reason("cannot open: No route to host", None, "check the network between")),
    (r"reset by peer|connection reset|broken pipe", Reason("reading failed: Connection reset by peer")),
    (r"timed out|timeout", Reason("")),
    (r"busy", Reason("cannot open: busy", None, "another program has it open")),
    (r"permission", Reason("cannot open: Permission denied", None, "put the service's user into the group video")),
)


_MADE_UP = re.compile(
    r"concealing|no frame|error while decoding|[Cc]ould not find ref|Error parsing NAL|Missing reference"
    r"|decode_slice_header error|Invalid NAL|does not exist|out of range|unavailable"
    # H.265, which has no word of its own for what it goes on decoding
    r"|Invalid number of merging|outside the valid range|Zero refs|Invalid collocated|offset_len|No ref lists"
)


def tells_of_damage(text: str, *, error: bool, intra_only: bool) -> bool:
    """Whether a line of a libav decoder's log means that a part of a picture was made up.

    It has other errors: streams of some encoders give one with every picture, and are shown well by everybody.
    """
    return error if intra_only else _MADE_UP.search(text) is not None


def reason_for(domain: str, code: int, message: str, debug: str, options: CameraOptions) -> Reason:
    """What an error of the bus means; `domain` and `code` are those of its GError."""
    if domain == _RESOURCE and code == _NOT_AUTHORIZED:
        return _REFUSED
    detail = _detail(debug)
    for pattern, reason in _CAUSES:
        if re.search(pattern, f"{message} {detail}", re.IGNORECASE):
            return reason if reason.text else Reason(f"no answer within {options.open_s:g} s")
    if domain == _STREAM and code in _NOT_UNDERSTOOD:
        return Reason(f"its format is not understood: {_tidy(message)}")
    return Reason(f"reading failed: {_tidy(message)}" + (f" ({detail})" if detail else ""))


def reason_of_all(errors: Sequence[tuple[str, int, str, str]], options: CameraOptions) -> Reason:
    """What all that came at once means: (domain, code, message, debug text) each, at least one."""
    # The element behind the one that failed only says that its data ended.
    telling = [error for error in errors if not error[2].startswith("Internal data")] or errors
    reason = reason_for(*telling[0], options)
    if reason.code is None and reason.remedy is None and options.url.lower().startswith(("rtsp", "http")):
        return unreachable(options) or reason
    return reason


def unreachable(options: CameraOptions) -> Reason | None:
    """Why a host cannot be connected to, None where it can: GStreamer has one word for all of these.

    Resolves and connects, within 2 s if the resolver is as quick. After a failure only.
    """
    parts = urlsplit(split_account(options.url)[0])
    port = parts.port or {"rtsp": 554, "rtsps": 322, "https": 443}.get(parts.scheme.lower(), 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S):
            return None
    except socket.gaierror as error:
        text = f"its host name cannot be resolved: {error.strerror}"
        return Reason(text, None, "check the name, or write an address")
    except TimeoutError:
        return Reason(f"no answer within {options.open_s:g} s")
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        return Reason(f"cannot open: {why}", None, "check host and port; it may be starting")


def _tidy(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _detail(debug: str) -> str:
    """The last line of a debug text, without the source file, function and element that it begins with."""
    lines = [line.strip() for line in debug.splitlines() if line.strip()]
    if not lines or re.match(r"\S+\.c\w*\(\d+\):", lines[-1]):
        return ""
    return _tidy(lines[-1])


def split_account(url: str) -> tuple[str, str | None, str | None]:
    """(the URL without its account, user, password), the latter two percent-decoded, None where it has none."""
    scheme, separator, rest = url.partition("://")
    # As for redact_url: all up to the last @ before the path is the account.
    authority = re.match(r"[^/?#]*", rest)
    end = authority.end() if authority else 0
    account, at, host = rest[:end].rpartition("@")
    if not at:
        return url, None, None
    user, _, password = account.partition(":")
    return f"{scheme}{separator}{host}{rest[end:]}", unquote(user), unquote(password)


def hide(text: str, secrets: Sequence[str]) -> str:
    """`text` without accounts of URLs, and without any of `secrets`."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return redact_text(text)


def position(own: str, message: str, parses: Callable[[str], bool]) -> int:
    """Where in an operator's pipeline the fault that `message` (GStreamer's) tells of begins, counted from 1.

    GStreamer gives no position: it is where the word in quotes stands, or behind the last part that parses.
    """
    if (quoted := re.search(r"\"([^\"]+)\"", message)) and (at := own.find(quoted[1])) >= 0:
        return at + 1
    end = 0
    for bang in [match.start() for match in re.finditer("!", own)]:
        if not own[:bang].strip() or not parses(own[:bang]):
            break
        end = bang + 1
    return end + len(own[end:]) - len(own[end:].lstrip()) + 1
