"""Who may do what: tokens, hosts and origins. Pure functions, but for the reading of the token's file."""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.config_values import is_loopback
from edge_runtime.errors import EdgeError, UsageError
from edge_runtime.secret_file import secret_file

log = logging.getLogger(__name__)

MIN_TOKEN = 16
MAX_TOKEN = 512
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750, b64token
_LISTEN = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):(?P<port>[0-9]{1,5})")
_HOST = re.compile(r"(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?")
_MAKE_ONE = "put a token into a file of its own (openssl rand -hex 32) and set [web] token_file to it"


def parse_listen(listen: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` as host and port (0-65535). Raises UsageError."""
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match["port"]) > 65535:
        raise UsageError(
            "is no address to listen on", code="web_listen", where=listen, remedy='write it as "127.0.0.1:8080"'
        )
    return match["host"].strip("[]"), int(match["port"])


def check_listen(listen: str, token: str | None) -> None:
    """Raises UsageError for an address that other machines reach without a token, and for a useless token."""
    host, _ = parse_listen(listen)
    if token is not None:
        check_token(token, "token")
    elif not is_loopback(host):
        raise UsageError(
            f"[web] listen = {listen!r} is open to other machines, and there is no token",
            code="web_token_missing",
            where="web.token_file",
            remedy=f"{_MAKE_ONE}, or listen on 127.0.0.1",
        )


def check_token(token: str, where: str) -> None:
    """Raises UsageError unless it is 16-512 of the characters that a bearer token may have."""
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not _TOKEN.fullmatch(token):
        raise UsageError(
            f"a token is {MIN_TOKEN} to {MAX_TOKEN} of A-Z a-z 0-9 . _ ~ + / = -",
            code="web_token",
            where=where,
            remedy=_MAKE_ONE,
        )


def read_token(path: Path) -> str:
    """The token in `path`, its only line. Raises UsageError where there is none."""
    try:
        with secret_file(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read(MAX_TOKEN + 3).decode("ascii", "replace").strip()
    except OSError as error:
        raise UsageError(
            f"the token cannot be read: {error.strerror}", code="web_token", where=str(path), remedy=_MAKE_ONE
        ) from error
    check_token(text, str(path))
    if mode & 0o004:
        log.warning("every user of this machine can read the token in %s: chmod 640 %s", path, path)
    return text


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one listener.

    `trusted`: the control socket, whose file mode decides who gets in. `open_to_others`: TCP beyond the loopback.
    `names` are names, in lower case, under which this machine may be addressed besides localhost and IP addresses.
    """

    trusted: bool = False
    token: str | None = None
    open_to_others: bool = False
    names: frozenset[str] = frozenset()

    def check(self, method: str, path: str, headers: Mapping[str, str]) -> None:
        """Raises DeniedError for a request that may not be served. `headers` have names in lower case."""
        if self.trusted:
            return
        self._check_host(headers)
        _check_origin(method, headers)
        changes = method not in ("GET", "HEAD", "OPTIONS")
        if changes or (self.open_to_others and path != "/healthz"):
            self._check_token(headers)

    def _check_host(self, headers: Mapping[str, str]) -> None:
        """A page of another site whose name leads to us (DNS rebinding) addresses us by that name."""
        host = headers.get("host")
        if host is None:  # HTTP/1.0, so no browser
            return
        match = _HOST.fullmatch(host)
        name = match["host"].strip("[]").lower().rstrip(".") if match else ""
        if name and (name == "localhost" or name in self.names or _is_address(name)):
            return
        raise DeniedError(
            403, "host_refused", "this name is not one of this device's", "use its IP address, or add it to [web] names"
        )

    def _check_token(self, headers: Mapping[str, str]) -> None:
        if self.token is None:
            raise DeniedError(403, "no_token", "without a token nothing can be changed over TCP", _NO_TOKEN)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self.token.encode())
        if scheme.lower() != "bearer" or not same:
            raise DeniedError(401, "unauthorized", "this needs the token", 'send "Authorization: Bearer TOKEN"')


_NO_TOKEN = "use the control socket, or set [web] token_file"  # noqa: S105 - a sentence


class DeniedError(EdgeError):
    """A request that may not be served, with its HTTP status."""

    def __init__(self, status: int, code: str, message: str, remedy: str) -> None:
        super().__init__(message, code=code, remedy=remedy)
        self.status = status


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Nothing is served to another site's page. Only browsers send these headers, and pages cannot forge them."""
    origin = headers.get("origin")
    if origin is not None and re.sub(r"^https?://", "", origin) != headers.get("host"):
        raise DeniedError(403, "origin_refused", "another site's page may not ask", "open this device's own page")
    site = headers.get("sec-fetch-site", "none")
    if site in ("same-origin", "none"):
        return
    # a link on another site may open us, as a page of its own
    opened = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if not opened or headers.get("sec-fetch-dest") != "document":
        raise DeniedError(403, "origin_refused", "another site's page may not ask", "open this device's own page")
