"""Who vouches for a plan that comes with a bundle: statements, signed with ed25519. The door to `cryptography`.

`cryptography` is imported where a key is used: it takes 8 MB, and most processes have none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.config_values import exact_base64, public_key_bytes
from edge_runtime.durable import REAL
from edge_runtime.engine.manifest import SignatureTable
from edge_runtime.errors import RefusedError, UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["PlanKeys", "SigningKey", "Statement", "key_id", "make_key", "read_key"]

SCHEMA = "edge.plan-signature/1"
_SIGNATURE_BYTES = 64
_MAX_PEM_BYTES = 64 * 1024
_MAKE_ONE = "make one: edge-runtime build --new-key KEY.pem"
_SIGN = "edge-runtime build BUNDLE --into OUT_DIR --sign KEY.pem signs"


@dataclass(frozen=True, slots=True)
class Statement:
    """What a signature says: this plan with this sidecar was built of this ONNX, for exactly this.

    The hashes are sha256 of whole files, 64 hex digits; `device` is the module.
    """

    plan_sha256: str
    sidecar_sha256: str
    onnx_sha256: str
    tensorrt: str
    compute_capability: str
    device: str

    def to_json(self) -> bytes:
        """The bytes that are signed: one text for one statement, and no other kind of statement has the same."""
        whole = {"schema": SCHEMA, **asdict(self)}
        return json.dumps(whole, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def key_id(public: bytes) -> str:
    """The first 16 hex digits of the sha256 of a public key's 32 bytes: it finds a key, and proves nothing."""
    return hashlib.sha256(public).hexdigest()[:16]


class PlanKeys:
    """The public keys ("ed25519:BASE64") of those whose plans are used. Raises UsageError for what is no key."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self._keys = {key_id(raw): raw for raw in map(public_key_bytes, keys)}

    def __bool__(self) -> bool:
        return bool(self._keys)

    def check(self, statement: Statement, signatures: Sequence[SignatureTable], where: str) -> str:
        """The id of a key that has signed just this. `where` names the plan in messages.

        Raises RefusedError: code "plan_keys_missing", "plan_unsigned", "plan_key_unknown" where none of the signatures
        is by one of these keys, "plan_signature" where one is and none of those is right.
        """
        if not self._keys:
            remedy = "name the key that has signed it in [engine] plan_keys"
            raise _refused("plan_keys_missing", "nobody is trusted to sign plans", where, remedy)
        if not signatures:
            raise _refused("plan_unsigned", "the plan is not signed", where, f"{_SIGN} plans")
        ours = [each for each in signatures if each.key in self._keys]
        if not ours:
            names, known = (", ".join(each) for each in ([one.key for one in signatures], self._keys))
            message = f"the plan is signed with the key {names}, and trusted is {known}"
            raise _refused("plan_key_unknown", message, where, "if it is to be trusted, add it to [engine] plan_keys")
        reasons = [_fault(self._keys[each.key], statement.to_json(), each.value) for each in ours]
        for signature, reason in zip(ours, reasons, strict=True):
            if reason is None:
                return signature.key
        raise _refused("plan_signature", f"the signature by {ours[0].key} {reasons[0]}", where, f"{_SIGN} anew")


def _fault(public: bytes, signed: bytes, value: str) -> str | None:
    """What is wrong with a signature, or None."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    raw = exact_base64(value)
    if raw is None:
        return "is not base64"
    if len(raw) != _SIGNATURE_BYTES:
        return f"has {len(raw)} bytes, and one of ed25519 has {_SIGNATURE_BYTES}"
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(raw, signed)
    except InvalidSignature:
        return "is not of this plan, sidecar and ONNX for this TensorRT, GPU and module"
    except UnsupportedAlgorithm:
        return "cannot be checked: the OpenSSL of this machine has no ed25519"
    return None


class SigningKey:
    """A private key. `id` and `public` ("ed25519:BASE64") are for everybody."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes_raw()
        self.id = key_id(raw)
        self.public = f"ed25519:{base64.b64encode(raw).decode()}"

    def sign(self, statement: Statement) -> SignatureTable:
        """The signature for the manifest."""
        return SignatureTable(key=self.id, value=base64.b64encode(self._key.sign(statement.to_json())).decode())


def read_key(path: Path) -> SigningKey:
    """The private key in a PEM file (PKCS8, not encrypted) that its owner alone may read.

    Raises UsageError (code "signing_key").
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        # Not blocking: a FIFO in place of a file must not hang.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise _unusable(path, "is no plain file", _MAKE_ONE)
            if status.st_mode & 0o077:
                message = "others than its owner may read or write it, and whoever has it can run code on every device"
                raise _unusable(path, message, f"chmod 600 {path}; if somebody may have read it, {_MAKE_ONE}")
            data = stream.read(_MAX_PEM_BYTES + 1)
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}", _MAKE_ONE) from None
    key: object
    try:
        key = load_pem_private_key(data, password=None)
    except TypeError:
        key, reason = None, "is encrypted, and no password is asked for"
    except (ValueError, UnsupportedAlgorithm):
        key, reason = None, "holds no private key as PEM"
    else:
        reason = f"is another kind of key ({type(key).__name__.lstrip('_')}), and only ed25519 is known"
    # out here, where the key is not part of an error's context
    if not isinstance(key, Ed25519PrivateKey):
        raise _unusable(path, reason, _MAKE_ONE)
    return SigningKey(key)


def make_key(path: Path) -> SigningKey:
    """A new private key in the new file `path`, PEM (PKCS8), for its owner alone.

    Raises UsageError (code "signing_key") where the name is taken or the file cannot be written; then none is left.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    key = Ed25519PrivateKey.generate()
    data = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        stream = REAL.create(path, 0o600)
        try:
            with stream:
                stream.write(data)
                REAL.sync(stream)
            REAL.sync_folder(path.parent)
        except OSError:
            path.unlink()
            raise
    except FileExistsError:
        raise _unusable(path, "is there already, and a key is never written over", "name a new file") from None
    except OSError as error:
        raise _unusable(path, f"cannot be written: {error.strerror}", "name a file in a folder of yours") from None
    return SigningKey(key)


def _refused(code: str, message: str, where: str, remedy: str) -> RefusedError:
    return RefusedError(message, code=code, where=where, remedy=remedy)


def _unusable(path: Path, message: str, remedy: str) -> UsageError:
    return UsageError(message, code="signing_key", where=str(path), remedy=remedy)
