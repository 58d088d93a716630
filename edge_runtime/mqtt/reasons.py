"""Why there is no session with the broker, in words for the operator."""

from __future__ import annotations

import re
import socket
import ssl
from datetime import datetime, timezone

from edge_runtime.errors import EdgeError
from edge_runtime.mqtt.settings import BrokerSettings

# X509_V_ERR_..., x509_vfy.h
_NOT_YET_VALID = 9
_EXPIRED = 10
_UNKNOWN_SIGNER = (2, 18, 19, 20, 21)
_OTHER_NAME = (62, 64)

_NO_TLS = (
    "WRONG_VERSION_NUMBER",
    "PACKET_LENGTH_TOO_LONG",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "UNEXPECTED_MESSAGE",
)
_OLD_TLS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "NO_PROTOCOLS_AVAILABLE")
# What a broker says of our certificate: SSLV3_ALERT_CERTIFICATE_EXPIRED, TLSV1_ALERT_UNKNOWN_CA, ...
_OWN_REFUSED = re.compile(r"ALERT_(?:(?:BAD|UNSUPPORTED)_CERTIFICATE|CERTIFICATE_\w+|UNKNOWN_CA|ACCESS_DENIED)$")
_BROKEN_OFF = "SSLV3_ALERT_HANDSHAKE_FAILURE"
_OWN_WANTED = "TLSV13_ALERT_CERTIFICATE_REQUIRED"


def describe(error: Exception, settings: BrokerSettings) -> str:
    """Why no session came about: what is wrong and what to do, without secrets."""
    if isinstance(error, EdgeError):
        return str(error)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"refused: {_of_certificate(error, settings)}"
    if isinstance(error, ssl.SSLError):
        return f"refused: {_of_tls(error, settings)}"
    if isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN:
        return f"unreachable: no name server answers for {settings.host}: is the network up? ({error.strerror})"
    if isinstance(error, socket.gaierror):
        return f"unreachable: the name {settings.host} is not known ({error.strerror})"
    if isinstance(error, TimeoutError):
        return "unreachable: timed out" + (" before TLS was agreed on" if _in_handshake(error) else "")
    if isinstance(error, OSError) and error.filename is not None:
        return f"cannot read {error.filename}: {error.strerror}"
    if isinstance(error, OSError):
        words = f"unreachable: {(error.strerror or str(error)).lower()}"
        return words + (f"; {_may_be_without_tls(settings)}" if settings.tls and _cut_off(error) else "")
    return f"failed: {type(error).__name__}: {error}"


def without_answer(settings: BrokerSettings) -> str:
    """The broker closed the connection in place of a CONNACK."""
    words = "refused: the broker closed the connection without an answer"
    return words if settings.tls else f"{words}; is port {settings.port} one for TLS? (mqtt.ca_file or tls = true)"


def _of_certificate(error: ssl.SSLCertVerificationError, settings: BrokerSettings) -> str:
    now = f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC"
    signers = f"mqtt.ca_file = {settings.ca_file}" if settings.ca_file else "the system's certificates"
    if error.verify_code == _NOT_YET_VALID:
        return (
            f"the broker's certificate is not yet valid: by this device's clock it is {now}; "
            "if that is wrong, set the clock (NTP)"
        )
    if error.verify_code == _EXPIRED:
        return (
            f"the broker's certificate has expired: by this device's clock it is {now}; "
            "renew the certificate, or set the clock if that is wrong"
        )
    if error.verify_code in _UNKNOWN_SIGNER:
        return (
            f"the broker's certificate is signed by nobody in {signers} ({error.verify_message}); "
            "mqtt.ca_file has to hold the certificate of who signed it"
        )
    if error.verify_code in _OTHER_NAME:
        return (
            f"the broker's certificate is not for {settings.host}; put a name that it is for into mqtt.host, "
            "or have it made for this one (subjectAltName)"
        )
    return f"the broker's certificate is not valid: {error.verify_message}"


def _of_tls(error: ssl.SSLError, settings: BrokerSettings) -> str:
    reason = error.reason or ""
    if reason in _NO_TLS:
        return f"{settings.where} does not speak TLS: is that the port for it? (usually 8883)"
    if reason in _OLD_TLS:
        return "the broker speaks no TLS 1.2 or later, and older ones are not safe: update the broker"
    if reason == _BROKEN_OFF and settings.cert_file is None:
        # with TLS 1.2 this is all that a broker says for want of a certificate
        return "the broker broke off TLS: it may want a certificate of this device (mqtt.cert_file and mqtt.key_file)"
    if reason == _OWN_WANTED or (_OWN_REFUSED.search(reason) and settings.cert_file is None):
        return "the broker wants a certificate of this device: set mqtt.cert_file and mqtt.key_file"
    if _OWN_REFUSED.search(reason):
        said = re.sub(r"\bca\b", "CA", reason.partition("ALERT_")[2].replace("_", " ").lower())
        return f"the broker does not take the certificate in mqtt.cert_file = {settings.cert_file} ({said})"
    if isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)) or "EOF" in reason:
        return f"the broker closed the connection in place of TLS; {_may_be_without_tls(settings)}"
    return f"TLS failed: {(reason or str(error)).replace('_', ' ').lower()}"


def _may_be_without_tls(settings: BrokerSettings) -> str:
    own = "" if settings.cert_file else ", or does it want a certificate of this device (mqtt.cert_file)?"
    return f"is port {settings.port} one for TLS{own or '?'}"


def _cut_off(error: OSError) -> bool:
    return isinstance(error, (ConnectionResetError, BrokenPipeError, ConnectionAbortedError))


def _in_handshake(error: TimeoutError) -> bool:
    return "handshake" in str(error)
