"""Signatures of plans: what one is of, who may have made it, and every way in which it can be wrong."""

from __future__ import annotations

import base64
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.config_values import exact_base64, public_key_bytes
from edge_runtime.engine.manifest import SignatureTable
from edge_runtime.engine.signing import PlanKeys, SigningKey, Statement, key_id, make_key, read_key
from edge_runtime.errors import RefusedError, UsageError
from tests.engine.stores import refused

STATEMENT = Statement("a" * 64, "b" * 64, "c" * 64, "10.3.0", "8.7", "NVIDIA Jetson Orin Nano")
KEY = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))))
KEYS = PlanKeys([KEY.public])
SIGNATURE = KEY.sign(STATEMENT)


def told(keys: PlanKeys, *signatures: SignatureTable, statement: Statement = STATEMENT) -> str:
    """The code that it is refused with."""
    error = refused(lambda: keys.check(statement, signatures, "orin.plan"))
    assert isinstance(error, RefusedError)
    assert error.where == "orin.plan"
    return error.code


def test_the_statement_is_one_text() -> None:
    assert STATEMENT.to_json() == (
        b'{"compute_capability":"8.7","device":"NVIDIA Jetson Orin Nano","onnx_sha256":"' + b"c" * 64 + b'",'
        b'"plan_sha256":"' + b"a" * 64 + b'","schema":"edge.plan-signature/1",'
        b'"sidecar_sha256":"' + b"b" * 64 + b'","tensorrt":"10.3.0"}'
    )


def test_a_known_key_vouches_and_nobody_else() -> None:
    assert KEYS.check(STATEMENT, [SIGNATURE], "orin.plan") == KEY.id
    assert told(PlanKeys(), SIGNATURE) == "plan_keys_missing"
    assert told(KEYS) == "plan_unsigned"
    assert told(PlanKeys([OTHER.public]), SIGNATURE) == "plan_key_unknown"


def test_with_two_keys_either_will_do() -> None:
    theirs = OTHER.sign(STATEMENT)
    both = PlanKeys([KEY.public, OTHER.public])
    assert both.check(STATEMENT, [theirs], "") == OTHER.id
    assert KEYS.check(STATEMENT, [theirs, SIGNATURE], "") == KEY.id
    spoilt = SIGNATURE.model_copy(update={"value": theirs.value})
    assert both.check(STATEMENT, [spoilt, theirs], "") == OTHER.id
    assert told(KEYS, spoilt, theirs) == "plan_signature"


def test_the_id_alone_proves_nothing() -> None:
    """A signature of somebody else's under the name of a key that is known."""
    assert told(KEYS, OTHER.sign(STATEMENT).model_copy(update={"key": KEY.id})) == "plan_signature"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (SIGNATURE.value[:-8], "has 60 bytes, and one of ed25519 has 64"),
        (SIGNATURE.value[:-1], "is not base64"),
        (f" {SIGNATURE.value}", "is not base64"),
        ("ssh-rsa", "is not base64"),
        (base64.b64encode(bytes(256)).decode(), "has 256 bytes"),  # as long as one of RSA
        (base64.b64encode(bytes(64)).decode(), "is not of this plan"),
    ],
)
def test_what_is_no_signature_is_told(value: str, reason: str) -> None:
    signature = SIGNATURE.model_copy(update={"value": value})
    assert reason in refused(lambda: KEYS.check(STATEMENT, [signature], "")).message


@given(st.sampled_from(sorted(asdict(STATEMENT))), st.data())
def test_any_other_character_of_the_statement_is_refused(part: str, data: st.DataObject) -> None:
    text = asdict(STATEMENT)[part]
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters().filter(lambda each: each != text[place]))
    changed = replace(STATEMENT, **{part: text[:place] + other + text[place + 1 :]})
    assert changed.to_json() != STATEMENT.to_json()
    assert told(KEYS, SIGNATURE, statement=changed) == "plan_signature"


@given(st.integers(0, len(SIGNATURE.value) - 1), st.characters())
def test_any_other_character_of_the_signature_is_refused(place: int, other: str) -> None:
    value = SIGNATURE.value
    if value[place] == other:
        return
    assert told(KEYS, SIGNATURE.model_copy(update={"value": value[:place] + other + value[place + 1 :]})) == (
        "plan_signature"
    )


@given(st.dictionaries(st.sampled_from(sorted(asdict(STATEMENT))), st.text(max_size=20)), st.text(max_size=20))
def test_two_statements_are_never_one_text(parts: dict[str, str], device: str) -> None:
    one, other = replace(STATEMENT, **parts), replace(STATEMENT, device=device)
    assert (one == other) == (one.to_json() == other.to_json())


# --- public keys


def test_a_public_key_is_one_line() -> None:
    assert key_id(public_key_bytes(KEY.public)) == KEY.id
    assert KEY.public.startswith("ed25519:")


PEM = KEY._key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
WEAK = [bytes(32), bytes([1]) + bytes(31), bytes(31) + b"\x80", b"\xec" + b"\xff" * 30 + b"\x7f"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PEM, "a PEM stands there"),
        ("rsa:AAAA", "the only kind of key that is known"),
        (KEY.public.removeprefix("ed25519:"), "does not begin with ed25519:"),
        (KEY.public.upper(), "does not begin with ed25519:"),
        (KEY.public[:-1], "is not base64"),
        (KEY.public[:-2] + "9=", "is not base64"),  # decodes to the same bytes
        (f"ed25519:{base64.b64encode(bytes(48)).decode()}", "48 bytes follow"),
        *((f"ed25519:{base64.b64encode(raw).decode()}", "anybody can sign") for raw in WEAK),
    ],
)
def test_what_is_no_public_key_is_refused_and_not_shown(text: str, reason: str) -> None:
    with pytest.raises(UsageError) as caught:
        PlanKeys([text])
    assert reason in caught.value.message
    assert text not in str(caught.value)


def test_under_a_weak_key_anybody_could_have_signed() -> None:
    """Why they are refused: the library alone takes this."""
    identity = bytes([1]) + bytes(31)
    ed25519.Ed25519PublicKey.from_public_bytes(identity).verify(identity + bytes(32), STATEMENT.to_json())


@given(st.binary(max_size=70))
def test_base64_is_read_in_one_way_only(raw: bytes) -> None:
    text = base64.b64encode(raw).decode()
    assert exact_base64(text) == raw
    for other in (text + "=", text[:-1], text + "\n", "\u0100" + text):
        found = exact_base64(other)
        assert found is None or base64.b64encode(found).decode() == other


# --- private keys


def test_a_new_key_is_its_owners_alone_and_signs(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    made = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    read = read_key(path)
    assert (read.id, read.public) == (made.id, made.public)
    assert PlanKeys([made.public]).check(STATEMENT, [read.sign(STATEMENT)], "") == made.id
    before = path.read_bytes()
    assert "never written over" in refused(lambda: make_key(path)).message
    assert path.read_bytes() == before
    assert make_key(tmp_path / "second.pem").id != made.id


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "key.pem").symlink_to(tmp_path / "elsewhere")
    assert refused(lambda: make_key(tmp_path / "key.pem")).code == "signing_key"
    assert not (tmp_path / "elsewhere").exists()
    assert "cannot be written" in refused(lambda: make_key(tmp_path / "nowhere" / "key.pem")).message


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660])
def test_one_that_others_reach_is_refused(tmp_path: Path, mode: int) -> None:
    make_key(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(mode)
    assert "chmod 600" in str(refused(lambda: read_key(tmp_path / "key.pem")).remedy)


def _pem(key: ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey, password: bytes | None = None) -> bytes:
    encryption = NoEncryption() if password is None else BestAvailableEncryption(password)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_pem(ec.generate_private_key(ec.SECP256R1())), "another kind of key (ECPrivateKey)"),
        (_pem(KEY._key, b"secret"), "is encrypted"),
        (PEM.encode(), "holds no private key"),
        (_pem(KEY._key)[:-40], "holds no private key"),
        (b"", "holds no private key"),
        (b"\xff" * 100, "holds no private key"),
    ],
)
def test_what_is_no_private_key_is_told_and_not_shown(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "key.pem"
    path.write_bytes(data)
    path.chmod(0o600)
    error = refused(lambda: read_key(path))
    assert (error.code, error.where) == ("signing_key", str(path))
    assert reason in error.message
    assert "BEGIN" not in str(error)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    assert "cannot be read" in refused(lambda: read_key(tmp_path / "nowhere.pem")).message
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "no plain file" in refused(lambda: read_key(tmp_path / "fifo")).message
