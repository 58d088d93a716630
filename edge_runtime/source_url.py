"""Where frames come from: a camera's `url`, checked and resolved, and shown without its credentials."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from edge_runtime.errors import UsageError

SourceKind = Literal["file", "bundled", "http", "synthetic", "rtsp", "v4l2", "csi", "gst"]

BUNDLED_MEDIA = ("vtest",)
"""Clips that come with the package."""

_KINDS: dict[str, SourceKind] = {
    "file": "file",
    "bundled": "bundled",
    "http": "http",
    "https": "http",
    "synthetic": "synthetic",
    "rtsp": "rtsp",
    "rtsps": "rtsp",
    "v4l2": "v4l2",
    "csi": "csi",
    "gst": "gst",
}
_FORMS = "rtsp://..., http://..., file:PATH, v4l2:/dev/video0, csi:0, gst:PIPELINE, synthetic: or bundled:vtest"

# Files, where an @ belongs to the name.
_LOCAL = re.compile(r"(?i)file:(?!//[^/])|/(?!/)|\.")
_SECRET = re.compile(r"(?i)((?:pass|pw|psw|cred|token|secret|key|auth|user|usr|login|sig)[\w.-]*=)[^&]*")

# Inside a message an address ends at white space, or at a quote that ends something: a password may hold one.
_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)\S*@")
_QUERY = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s?]*\?)(?:[^\s'\"]|['\"](?![\s'\",.:;)\]}]|$))*")


@dataclass(frozen=True, slots=True, repr=False)
class CameraSource:
    """A checked source. What `location` is depends on `kind`:

    `file` an absolute path of a video, a picture or a folder of pictures; `bundled` the clip's name; `http` and
    `rtsp` the whole URL with its credentials (show it only through `shown`); `v4l2` the device's path; `csi` the
    sensor's number; `gst` the elements of a GStreamer pipeline up to its decoded pictures; `synthetic` what stands
    after the colon, perhaps nothing.
    """

    kind: SourceKind
    location: str

    @property
    def url(self) -> str:
        """The source as a URL that parses to this very source again. May hold credentials."""
        return self.location if self.kind in ("http", "rtsp") else f"{self.kind}:{self.location}"

    @property
    def shown(self) -> str:
        """The source for logs, messages and status: without credentials."""
        return redact_url(self.url)

    @property
    def is_recording(self) -> bool:
        """Whether it can be played at any pace and from its start again: a file, a folder, a bundled clip."""
        return self.kind in ("file", "bundled")

    def __repr__(self) -> str:
        return f"CameraSource(kind={self.kind!r}, location={redact_url(self.location)!r})"


def redact_url(url: str) -> str:
    """The same URL with `***` for its user, its password and any query value that may be a secret.

    It would rather hide too much: a password may hold any of `/?#@`, so everything up to the last `@` goes, and it
    takes addresses that are wrong, since those are what error messages show. Never raises.
    """
    if _LOCAL.match(url):
        return url
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    # Without a scheme a lone @ is a file name's; user:password@ is not.
    if "@" in rest and (separator or ":" in rest.rpartition("@")[0]):
        rest = "***@" + rest.rpartition("@")[2]
    if "@" in scheme or "=" in scheme:
        scheme = "***"
    return _SECRET.sub(r"\1***", scheme + separator + rest)


def redact_text(text: str) -> str:
    """A message, perhaps a foreign library's, with `***` for user, password and query of any URL in it."""
    return _QUERY.sub(r"\g<head>***", _USERINFO.sub(r"\g<scheme>***@", text))


def parse_source(url: str, base: Path) -> CameraSource:
    """Check a camera's URL or plain path; relative paths count from `base`, which is absolute.

    Raises UsageError with a remedy, without the URL's credentials.
    """
    if not url:
        raise UsageError("the address is empty", remedy=f"write one of {_FORMS}")
    if not url.isprintable() or url != url.strip():
        raise UsageError("the address has a tab, line break or space that does not belong", remedy="remove it")
    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):(.*)", url)
    if match is None:
        _refuse_half_an_address(url)
        return CameraSource("file", _file_path(url, base))
    scheme, rest = match[1].lower(), match[2]
    kind = _KINDS.get(scheme)
    if kind is None:
        raise _unknown_scheme(url, scheme)
    if kind in ("http", "rtsp"):
        _check_network(url, scheme, rest)
        return CameraSource(kind, url)
    if kind == "file":
        if rest.startswith("//"):  # file:///a%20b is a URL in full; file:PATH is taken as it is
            host, slash, path = rest[2:].partition("/")
            if host not in ("", "localhost") or not slash:
                raise UsageError(
                    f'"{_hidden(url)}" names a host, a file is on this machine',
                    remedy="write file:PATH or file:///PATH",
                )
            rest = unquote(slash + path)
        return CameraSource(kind, _file_path(rest, base))
    if kind == "bundled" and rest not in BUNDLED_MEDIA:
        raise UsageError(f'there is no bundled clip "{_hidden(rest)}"', remedy=f"bundled:{BUNDLED_MEDIA[0]} is one")
    if kind == "v4l2" and not re.fullmatch(r"/[^\s]+", rest):
        raise UsageError(f'"{_hidden(url)}" names no device', remedy="write the device's path: v4l2:/dev/video0")
    if kind == "csi" and not re.fullmatch(r"[0-9]{1,2}", rest):
        raise UsageError(f'"{_hidden(url)}" names no sensor', remedy="write the sensor's number: csi:0")
    if kind == "gst" and not rest.strip():
        raise UsageError(f'"{_hidden(url)}" names no elements', remedy="write them: gst:v4l2src ! jpegdec")
    return CameraSource(kind, rest)


def _refuse_half_an_address(url: str) -> None:
    """A network address that lost its head would otherwise be taken for a file."""
    scheme = re.match(r"(?i)(https?|rtsps?)[/\\]", url)
    if scheme is not None:
        raise UsageError(f'":" is missing in "{_hidden(url)}"', remedy=f"write {scheme[1].lower()}://HOST/...")
    if re.match(r"\d{1,3}(\.\d{1,3}){3}([:/]|$)", url) or url.startswith(("//", "[")):
        raise UsageError(f'"{_hidden(url)}" has no scheme', remedy="write rtsp:// or http:// in front of it")


def _hidden(url: str) -> str:
    """Like redact_url, for an address without a scheme's colon, where even a lone `user@` may be a secret."""
    return "***@" + redact_url(url.rpartition("@")[2]) if "@" in url else redact_url(url)


def _unknown_scheme(url: str, scheme: str) -> UsageError:
    near = get_close_matches(scheme, _KINDS, n=1)
    remedy = f"did you mean {near[0]}:? Known are {_FORMS}" if near else f"write one of {_FORMS}"
    # In "admin:secret@10.0.0.9" what looks like a scheme is a user.
    return UsageError(f'"{_hidden(url)}" is no address this program knows', remedy=remedy)


def _check_network(url: str, scheme: str, rest: str) -> None:
    shown, remedy = redact_url(url), f"write {scheme}://HOST[:PORT]/PATH"
    if not rest.startswith("//"):
        raise UsageError(f'"{_hidden(url)}" lacks the // after {scheme}:', remedy=remedy)
    if " " in url:
        raise UsageError(f'"{shown}" has a space in it', remedy="write %20 for a space")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        # An @ too many also ends up here: user:pass/word@host reads as a port that is no number.
        raise UsageError(
            f'"{shown}" has a host or port that is none',
            remedy=f"{remedy}; in a password write %40 for @, %2F for /, %3A for :, %23 for #, %3F for ?",
        ) from None
    if not host:
        raise UsageError(f'"{shown}" names no host', remedy=remedy)
    if port == 0:
        raise UsageError(f'"{shown}" has port 0', remedy=remedy)


def _file_path(path: str, base: Path) -> str:
    if not path:
        raise UsageError("the address names no file", remedy="write file:PATH")
    if path.startswith("~"):
        raise UsageError(f'"{path}" starts with ~, which a service has no use for', remedy="write the path in full")
    if "\0" in path:
        raise UsageError("the path has a NUL character in it", remedy="remove it")
    return str(base / path)
