"""What the broker is shown to believe us, and what we want to see to believe it: password, certificates, TLS."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from edge_runtime.errors import MqttError
from edge_runtime.mqtt.settings import BrokerSettings
from edge_runtime.secret_file import secret_file

log = logging.getLogger(__name__)

# What MQTT can carry.
_MAX_PASSWORD_BYTES = 65535


def read_password(path: Path) -> str:
    """The only line of `path`, which may be `credential:NAME`.

    Raises OSError, with the file's name, where it cannot be read, and MqttError where it holds no password.
    """
    with secret_file(path).open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        raw = file.read(_MAX_PASSWORD_BYTES + 3)
    try:
        # Windows' editors put a mark in front that nobody sees, and that no broker takes
        password = raw.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        password = None
    # out here, where the bytes are not part of an error's context
    if password is None or len(raw) > _MAX_PASSWORD_BYTES or "\n" in password or "\0" in password:
        raise _unusable("mqtt.password_file", path, "holds no password", "put the password, as UTF-8, on its only line")
    if not password:
        raise _unusable("mqtt.password_file", path, "is empty", "put the password on its only line")
    _warn_of_readers(path, mode)
    return password


def tls_context(settings: BrokerSettings, failed: Callable[[ssl.SSLError], None]) -> ssl.SSLContext:
    """TLS 1.2 or later with the host's name checked, by the settings' files as they are now.

    `failed` is called with what ends TLS after the handshake, on the thread that reads. Raises OSError, with the
    file's name, where one cannot be read, and MqttError where one does not hold what it should.
    """
    context = _context(settings.ca_file)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = _socket_class(failed)
    if settings.cert_file is not None:
        _load_own(context, settings.cert_file, settings.key_file)
    return context


def _socket_class(failed: Callable[[ssl.SSLError], None]) -> type[ssl.SSLSocket]:
    class Socket(ssl.SSLSocket):
        """Makes good what paho leaves out: it does not close a socket whose handshake failed, and forgets why one
        failed later. With TLS 1.3 a broker refuses our certificate only then."""

        def do_handshake(self, block: bool = False) -> None:
            try:
                super().do_handshake(block)
            except BaseException:
                self.close()
                raise

        def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
            try:
                return super().recv(buflen, flags)
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                failed(error)
                raise

    return Socket


def _context(ca_file: Path | None) -> ssl.SSLContext:
    # check_hostname stays on: paho's own check is gone from Python 3.12 (P26)
    if ca_file is None:
        return ssl.create_default_context()
    _readable(ca_file)
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except ssl.SSLError:
        remedy = "it takes the certificate of who signed the broker's, as PEM"
        raise _unusable("mqtt.ca_file", ca_file, "holds no certificate", remedy) from None


def _load_own(context: ssl.SSLContext, cert_file: Path, key_path: Path | None) -> None:
    key_file = cert_file if key_path is None else secret_file(key_path)
    _readable(cert_file)
    _warn_of_readers(cert_file if key_path is None else key_path, _readable(key_file))
    encrypted = False

    def refuse() -> bytes:
        # without this, OpenSSL would ask for the pass phrase on the terminal and wait there for ever
        nonlocal encrypted
        encrypted = True
        return b""

    try:
        context.load_cert_chain(cert_file, key_file, password=refuse)
    except (ssl.SSLError, ValueError) as error:
        mismatch = getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
        raise _own_fault(cert_file, key_path, encrypted=encrypted, mismatch=mismatch) from None


def _own_fault(cert_file: Path, key_path: Path | None, *, encrypted: bool, mismatch: bool) -> MqttError:
    key = "mqtt.cert_file" if key_path is None else "mqtt.key_file"
    path = key_path or cert_file
    if encrypted:
        remedy = "openssl pkey -in KEY -out PLAIN takes the pass phrase off; the file's mode guards it"
        return _unusable(key, path, "is a key with a pass phrase, which nobody is there to type", remedy)
    if mismatch:
        return _unusable(key, path, f"is not the key of {cert_file}", "certificate and key are made together")
    if not _has_certificate(cert_file):
        return _unusable("mqtt.cert_file", cert_file, "holds no certificate", "it takes this device's, as PEM")
    return _unusable(key, path, "holds no private key", "it takes the key of cert_file, as PEM")


def _has_certificate(path: Path) -> bool:
    try:
        ssl.PEM_cert_to_DER_cert(_first_certificate(path.read_text(encoding="ascii", errors="replace")))
    except ValueError:
        return False
    return True


def _first_certificate(text: str) -> str:
    _, start, rest = text.partition(ssl.PEM_HEADER)
    body, end, _ = rest.partition(ssl.PEM_FOOTER)
    return start + body + end


def _readable(path: Path) -> int:
    """Its mode. OpenSSL's own errors do not name the file."""
    with path.open("rb") as file:
        return stat.S_IMODE(os.fstat(file.fileno()).st_mode)


def _warn_of_readers(path: Path, mode: int) -> None:
    if mode & 0o004:
        _warn_once(path)


@lru_cache(maxsize=16)
def _warn_once(path: Path) -> None:
    """Files are read for every connection; this is said once."""
    log.warning("mqtt: every user of this machine can read the secret in %s: chmod 640 %s", path, path)


def _unusable(key: str, path: Path, what: str, remedy: str) -> MqttError:
    return MqttError(f"{path} {what}", code="mqtt_files", where=key, remedy=remedy, retryable=True)
