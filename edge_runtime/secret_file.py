"""Files that hold a secret, and where to find those that systemd hands over."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

CREDENTIAL = "credential:"
CREDENTIAL_NAME = re.compile(r"credential:[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}")
_FOLDER = "CREDENTIALS_DIRECTORY"
"""Set by systemd for a unit that has LoadCredential= or SetCredentialEncrypted=; systemd.exec(5)."""


def is_credential(path: Path) -> bool:
    """Whether a configured path is `credential:NAME`."""
    return str(path).startswith(CREDENTIAL)


def secret_file(path: Path) -> Path:
    """The file to read for a configured path, which may be `credential:NAME`.

    Raises FileNotFoundError where this process was handed no credentials; whether the file is there is for whoever
    opens it.
    """
    if not is_credential(path):
        return path
    text = str(path)
    folder = os.environ.get(_FOLDER)
    if not folder:
        raise FileNotFoundError(errno.ENOENT, "systemd handed no credentials over (LoadCredential=)", text)
    return Path(folder) / text.removeprefix(CREDENTIAL)
