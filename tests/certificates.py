"""Certificates for tests, made by the `openssl` command: good ones, and those a device has to refuse."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

_CONFIG = """
[ca]
default_ca = here
[here]
database = {folder}/index.txt
rand_serial = yes
unique_subject = no
new_certs_dir = {folder}
default_md = sha256
policy = policy
email_in_dn = no
[policy]
commonName = supplied
"""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, both PEM."""

    cert_file: Path
    key_file: Path


class Authority:
    """Who signs. `ca_file` is its own certificate. Raises RuntimeError where `openssl` is not installed."""

    def __init__(self, folder: Path, name: str = "test CA") -> None:
        if shutil.which("openssl") is None:
            raise RuntimeError("openssl is not installed: apt-get install openssl")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._config = folder / "ca.cnf"
        self._config.write_text(_CONFIG.format(folder=folder), encoding="ascii")
        (folder / "index.txt").touch()
        self.ca_file, self._key_file = folder / "ca.pem", folder / "ca.key"
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self._key_file, "-out", self.ca_file, "-days", "30",
            "-subj", f"/CN={name}", "-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign",
        )  # fmt: skip

    def issue(
        self,
        name: str,
        *alternative_names: str,
        subject: str | None = None,
        starts: timedelta = timedelta(days=-1),
        ends: timedelta = timedelta(days=30),
    ) -> Certificate:
        """A certificate for `DNS:...` and `IP:...`, in files called `name`, which is its common name but for `subject`.
        `starts` and `ends` count from now."""
        made = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.ext"
        _openssl(
            "req", "-new", *_NEW_KEY, "-keyout", made.key_file, "-out", request, "-subj", _subject(subject or name)
        )
        names = f"subjectAltName={','.join(alternative_names)}\n" if alternative_names else ""
        extensions.write_text(f"basicConstraints=CA:FALSE\n{names}", encoding="ascii")
        _openssl(
            "ca", "-batch", "-notext", "-config", self._config, "-cert", self.ca_file, "-keyfile", self._key_file,
            "-in", request, "-out", made.cert_file, "-extfile", extensions,
            "-startdate", _date(starts), "-enddate", _date(ends),
        )  # fmt: skip
        return made


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _subject(name: str) -> str:
    return "/CN=" + re.sub(r"([/+\\])", r"\\\1", name)


def _date(offset: timedelta) -> str:
    return f"{datetime.now(timezone.utc) + offset:%Y%m%d%H%M%SZ}"


def _openssl(*arguments: str | Path) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"openssl {arguments[0]}: {done.stderr}"
