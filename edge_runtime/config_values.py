"""Checks of single configuration values, and how values and what would be right are put into words."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import json
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from edge_runtime.errors import UsageError
from edge_runtime.secret_file import CREDENTIAL, CREDENTIAL_NAME
from edge_runtime.source_url import CameraSource, parse_source, redact_url

BUNDLED_BUNDLES = ("centernet",)
"""Model bundles that come with the package."""


@dataclass(frozen=True, slots=True)
class Right:
    """What would be right for a key, in words (also its type in the reference); `default` where words say it best."""

    words: str
    default: str | None = None


TOPIC_PREFIX = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")

NAME = Right("up to 64 of A-Z a-z 0-9 . _ - with a letter or digit first")
FILE = Right("the path of a file, in quotes; relative ones count from this file's folder")
SECRET = Right('the path of a file, in quotes, or "credential:NAME" for one that systemd hands over')
SWITCH = Right("true or false")
PUBLIC_KEY = Right('a public key, as "ed25519:..."; `edge-runtime build --new-key KEY.pem` prints one')

_KEY_TYPE = "ed25519:"
_KEY_BYTES = 32
_FIELD = 2**255 - 19
_ORDER_8 = int.from_bytes(bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little")
_WEAK = frozenset({0, 1, _FIELD - 1, _ORDER_8, _FIELD - _ORDER_8})
"""The points whose order divides 8, by their y: under such a key anybody can sign, and zeros are one of them."""


def wrong(message: str, remedy: str | None = None) -> PydanticCustomError:
    """The error for a validator to raise, worded for the operator; without a remedy the key's `Right` stands in."""
    return PydanticCustomError("edge", "{message}", {"message": message, "remedy": remedy})


def kind_of(value: object) -> str:
    """What a value is, in the operator's words."""
    for types, words in (
        (bool, "true or false"),
        ((int, float), "a number"),
        (str, "text"),
        ((list, tuple), "a list"),
        (dict, "a table"),
    ):
        if isinstance(value, types):
            return words
    return "a date or time"


def render(value: object) -> str:
    """A value as it stands in a file, short, on one line and without credentials."""
    if isinstance(value, str):
        text = json.dumps(redact_url(value), ensure_ascii=not value.isprintable())
        return text if len(text) <= 80 else f'{text[:76]}..."'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**18:  # one of 5000 digits cannot even be printed
        return "a huge number"
    if isinstance(value, (list, tuple)):
        items = ["[...]" if isinstance(item, (list, tuple)) else render(item) for item in value[:4]]
        return f"[{', '.join(items + ['...'] * (len(value) > 4))}]"
    if isinstance(value, dict):
        return "{...}"
    return re.sub(r"^datetime\.", "", str(value))


def default_device_id(machine_id: Path = Path("/etc/machine-id"), hostname: str | None = None) -> str:
    """`edge-` and the first 12 hex digits of the machine id; without one, `edge-` and the host's name."""
    try:
        text = machine_id.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        text = ""
    if re.fullmatch(r"[0-9a-f]{32}", text):
        return f"edge-{text[:12]}"
    host = re.sub(r"[^A-Za-z0-9._-]+", "-", socket.gethostname() if hostname is None else hostname)
    return f"edge-{host[:48].strip('.-_') or 'device'}"


def check_name(value: object) -> str:
    if not isinstance(value, str):
        raise wrong(f"{render(value)} is not text")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", value):
        usable = re.sub(r"[^A-Za-z0-9._-]+", "-", value).lstrip("._-")[:64].rstrip("-")
        if redact_url(value) != value:  # an address in the wrong place: no name with its password in it
            usable = ""
        message = f"{render(value)} cannot stand in a topic and a file name"
        raise wrong(message, f"{NAME.words}; for example {render(usable)}" if usable else None)
    return value


def check_names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        return (check_name(value),)
    names = tuple(check_name(item) for item in value)
    if not names:
        raise wrong("[] names no model", "name a model, or leave the key out if there is only one")
    if len(set(names)) < len(names):
        raise wrong(f"{render(value)} names a model twice", "name each model once")
    return names


def check_variants(value: object) -> tuple[str, ...]:
    names = tuple(check_name(item) for item in (value if isinstance(value, list) else [value]))
    if "auto" in names:
        raise wrong('"auto" is no variant to keep loaded', "name the bundle's variants")
    if len(set(names)) < len(names):
        raise wrong(f"{render(value)} names a variant twice", "name each variant once")
    return names


def _base(info: ValidationInfo) -> Path:
    return (info.context or {}).get("base") or Path.cwd()


def check_path(value: object, info: ValidationInfo) -> Path:
    if not isinstance(value, str):
        raise wrong(f"{render(value)} is not text")
    if not value or not value.isprintable():
        raise wrong(f"{render(value)} is no path")
    if value.startswith("~"):
        raise wrong(f"{render(value)} starts with ~, which a service has no use for", "write the path in full")
    return _base(info) / value


def check_secret(value: object, info: ValidationInfo) -> Path:
    """A path, or `credential:NAME`, which `secret_file` finds when it is read. What is neither is not shown: people
    write the secret itself there."""
    if not isinstance(value, str):
        raise wrong("what stands there is not text")
    if value.startswith(CREDENTIAL):
        if not CREDENTIAL_NAME.fullmatch(value):
            raise wrong("what follows credential: is no name", 'write "credential:" and its name in LoadCredential=')
        return Path(value)
    if not value or not value.isprintable():
        raise wrong("what stands there is no path")
    return check_path(value, info)


def public_key_bytes(text: str) -> bytes:
    """The 32 bytes of a public key that is written as "ed25519:BASE64".

    Raises UsageError for what is none; its message does not show the text, which may be the private one.
    """
    kind, colon, encoded = text.partition(":")
    if "-----BEGIN" in text:
        message = "a PEM stands there, and a public key is one line that begins with ed25519:"
        raise UsageError(message, code="public_key", remedy=PUBLIC_KEY.words)
    if kind + colon != _KEY_TYPE:
        message = "what stands there does not begin with ed25519:, the only kind of key that is known"
        raise UsageError(message, code="public_key", remedy=PUBLIC_KEY.words)
    raw = exact_base64(encoded)
    if raw is None:
        raise UsageError("what follows ed25519: is not base64", code="public_key", remedy=PUBLIC_KEY.words)
    if len(raw) != _KEY_BYTES:
        message = f"{len(raw)} bytes follow ed25519:, and a public key has {_KEY_BYTES}"
        raise UsageError(message, code="public_key", remedy=PUBLIC_KEY.words)
    if (int.from_bytes(raw, "little") & (2**255 - 1)) % _FIELD in _WEAK:
        message = "the key is one under which anybody can sign"
        raise UsageError(message, code="public_key", remedy=f"no placeholder, but {PUBLIC_KEY.words}")
    return raw


def exact_base64(text: str) -> bytes | None:
    """What the text says in base64, or None where it is not the one text that says so."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if base64.b64encode(raw).decode() == text else None  # of the last character not every bit counts


def check_public_key(value: object) -> str:
    if not isinstance(value, str):
        raise wrong(f"what stands there is {kind_of(value)}, not text")
    try:
        public_key_bytes(value)
    except UsageError as error:
        raise wrong(error.message, error.remedy) from None
    return value


def check_public_keys(value: object) -> object:
    """A list of keys as the tuple that the strict field wants."""
    if not isinstance(value, list):
        raise wrong(f"what stands there is {kind_of(value)}, not a list", 'write plan_keys = ["ed25519:..."]')
    if any(value.count(each) > 1 for each in value if isinstance(each, str)):
        raise wrong("it names a key twice", "name each key once")
    return tuple(value)


def check_topic_prefix(value: str | None) -> str | None:
    """Levels of a topic without wildcards, and without a slash at either end."""
    if value is not None and not TOPIC_PREFIX.fullmatch(value):
        raise wrong(f"{render(value)} is no topic prefix", 'usually "homeassistant"')
    return value


def check_bundle(value: object, info: ValidationInfo) -> Path | str:
    if isinstance(value, str) and value.startswith("bundled:"):
        if value.removeprefix("bundled:") not in BUNDLED_BUNDLES:
            raise wrong(f"{render(value)} does not come with this version", f"bundled:{BUNDLED_BUNDLES[0]} does")
        return value
    return check_path(value, info)


def check_source(value: object, info: ValidationInfo) -> CameraSource:
    if not isinstance(value, str):
        raise wrong(f"{render(value)} is not text")
    try:
        return parse_source(value, _base(info))
    except UsageError as error:
        raise wrong(error.message, error.remedy) from None


def auto_or_count(most: int) -> PlainValidator:
    def check(value: object) -> Literal["auto"] | int:
        if value == "auto":
            return "auto"
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong(f'{render(value)} is neither "auto" nor a whole number')
        if not 1 <= value <= most:
            raise wrong(f"{render(value)} is out of range")
        return value

    return PlainValidator(check)


def check_host(value: str) -> str:
    if "://" in value or "/" in value:
        raise wrong(f"{render(value)} is an address with more than a host", "only the host; the port goes to port")
    if re.fullmatch(r"[^:]*:\d+|\[.*\](:\d+)?", value):
        raise wrong(f"{render(value)} is a host and more", "only the host; the port goes to port, brackets go")
    if not re.fullmatch(r"[A-Za-z0-9._:%-]{1,253}", value):
        raise wrong(f"{render(value)} is no host")
    return value


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`: an address of the loopback, or the name localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:  # a name: where it leads may change
        return False


def check_listen(value: str) -> str:
    match = re.fullmatch(r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.%]+\]):([0-9]{1,5})", value)
    if match is None or int(match[2]) > 65535:
        raise wrong(f"{render(value)} is no address to listen on")
    return value


def check_repository(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise wrong(f"{render(value)} is no web address")
    return value


def check_tables(value: object, info: ValidationInfo) -> object:
    """An array of tables as the tuple that the strict field wants."""
    if isinstance(value, list):
        return tuple(value)
    key = "camera" if info.field_name == "cameras" else "model"
    if isinstance(value, dict):
        raise wrong("is written as a single table", f"write [[{key}]], with two brackets, once for each {key}")
    raise wrong(f"{render(value)} stands where tables belong", f"write [[{key}]] once for each {key}")
