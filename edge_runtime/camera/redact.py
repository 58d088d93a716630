"""Credentials out of addresses, before they reach a log, a state or an error."""

from __future__ import annotations

import re

_USERINFO = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)[^\s'\"]*@")
_QUERY = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"?]*\?)[^\s'\"]*")


def redact_url(text: str) -> str:
    """`text`, a URL or a message that contains some, with user, password and query replaced by `***`.

    Everything up to the last `@` goes: cameras have passwords with `/`, `@` and `:` in them, unescaped.
    """
    text = _USERINFO.sub(r"\g<scheme>***@", text)
    return _QUERY.sub(r"\g<head>***", text)
