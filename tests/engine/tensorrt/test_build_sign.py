"""`build --new-key`, `--sign` and `--into` as a user runs them, and what another device makes of the bundle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from edge_runtime.cli.main import run
from edge_runtime.engine.archive import manifest_files, require_listed
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.manifest import PlanTable
from tests.engine.tensorrt.fake_process import FakeDevice
from tests.engine.tensorrt.test_build import Command, build, device, make_bundle

__all__ = ["build", "device"]


def new_key(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(["build", "--new-key", str(path)]) == 0
    return capsys.readouterr().out.strip()


def plans_of(root: Path) -> tuple[PlanTable, ...]:
    return load_bundle(root).variant("fp32").files.tensorrt_plan


class Other:
    """Another device of the same kind, with a configuration."""

    def __init__(self, folder: Path, *keys: str) -> None:
        folder.mkdir()
        self.folder = folder
        text = f"""
[device]
store = "store"
hardware = "none"
[[camera]]
name = "gate"
url = "bundled:vtest"
[[model]]
name = "m"
bundle = "bundled:centernet"
max_batch = 2
[engine]
plan_keys = {json.dumps(keys)}
"""
        (folder / "edge.toml").write_text(text)

    def how(self, bundle: Path, capsys: pytest.CaptureFixture[str]) -> str:
        """How it came to its plan."""
        code = run(["build", str(bundle), "--config", str(self.folder / "edge.toml"), "--json"])
        found = capsys.readouterr()
        assert code == 0, found.err
        document: dict[str, Any] = json.loads(found.out)
        return str(document["engines"][0]["how"])


@pytest.mark.full
def test_a_bundle_that_was_signed_here_is_used_there(
    tmp_path: Path, device: FakeDevice, build: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    public = new_key(tmp_path / "key.pem", capsys)
    source, out = make_bundle(tmp_path / "bundle"), tmp_path / "signed"
    (source / "NOTES").write_text("no file of the bundle")
    arguments = ("--max-batch", 2, "--into", out, "--sign", tmp_path / "key.pem")
    assert build(source, *arguments, "--json") == 0, build.err
    told = build.document["bundle"]
    before, after = load_bundle(source), require_listed(load_bundle(out))
    assert (told["path"], told["digest"], told["public_key"]) == (str(out), after.digest, public)
    assert after.digest != before.digest
    # all else is what it was
    (table,) = plans_of(out)
    assert [each.key for each in table.signature] == [told["key"]]
    assert {str(each) for each in manifest_files(after)} == {
        *(str(each) for each in manifest_files(before)),
        table.path,
        table.sidecar.path,
    }
    (variant,) = after.manifest.variant
    without = variant.model_copy(update={"files": variant.files.model_copy(update={"tensorrt_plan": ()})})
    assert after.manifest.model_copy(update={"variant": (without,)}) == before.manifest
    assert sorted(tmp_path.glob(".*")) == []
    # without a build on the other device
    builds = device.builds()
    assert Other(tmp_path / "knows", public).how(out, capsys) == "brought"
    assert device.builds() == builds
    # what is there is never lost by accident
    digest = after.digest
    assert build(source, *arguments) == 2
    assert "--overwrite" in build.err
    assert load_bundle(out).digest == digest


@pytest.mark.full
def test_who_does_not_know_the_key_builds(
    tmp_path: Path, device: FakeDevice, build: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    new_key(tmp_path / "key.pem", capsys)
    stranger = new_key(tmp_path / "stranger.pem", capsys)
    out = tmp_path / "signed"
    assert build(make_bundle(tmp_path / "bundle"), "--into", out, "--sign", tmp_path / "key.pem") == 0
    assert "signed with the key" in build.out
    assert Other(tmp_path / "a").how(out, capsys) == "built"
    assert Other(tmp_path / "b", stranger).how(out, capsys) == "built"


@pytest.mark.full
def test_plans_of_several_devices_come_together(
    tmp_path: Path, device: FakeDevice, build: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    public = new_key(tmp_path / "key.pem", capsys)
    out, sign = tmp_path / "signed", ("--max-batch", 2, "--sign", tmp_path / "key.pem", "--into")
    assert build(make_bundle(tmp_path / "bundle"), *sign, out) == 0
    (first,) = plans_of(out)
    device.become("10.7.0")
    # into the very bundle that it comes from
    assert build(out, *sign, out, "--overwrite") == 0, build.err
    assert "TensorRT 10.3.0" in build.out
    assert "TensorRT 10.7.0" in build.out
    kept, second = plans_of(out)
    assert (kept, second.tensorrt) == (first, "10.7.0")
    assert Other(tmp_path / "newer", public).how(out, capsys) == "brought"
    device.become()
    assert Other(tmp_path / "older", public).how(out, capsys) == "brought"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "no BUNDLE was given"),
        (("BUNDLE", "--into", "OUT"), "--into and --sign go together"),
        (("BUNDLE", "--sign", "KEY"), "--into and --sign go together"),
        (("BUNDLE", "--overwrite"), "there is none"),
        (("BUNDLE", "--new-key", "NEW"), "makes a key and builds nothing"),
        (("BUNDLE", "--into", "OUT", "--sign", "KEY", "--trust-plans"), "is built here"),
        (("BUNDLE", "--into", "OUT", "--sign", "NEW"), "cannot be read"),
        (("BUNDLE", "--into", "OUT/deep/down", "--sign", "KEY"), "there is no such folder"),
        (("BUNDLE", "--into", "NOBUNDLE", "--sign", "KEY"), "exists and is no bundle"),
        (("--new-key", "KEY"), "never written over"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_begun(
    tmp_path: Path, build: Command, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], told: str
) -> None:
    new_key(tmp_path / "KEY", capsys)
    key = (tmp_path / "KEY").read_bytes()
    make_bundle(tmp_path / "BUNDLE")
    (tmp_path / "NOBUNDLE").mkdir()
    (tmp_path / "NOBUNDLE" / "precious").touch()
    paths = [each if each.startswith("--") else tmp_path / each for each in arguments]
    assert build(*paths) == 2
    assert told in build.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["BUNDLE", "KEY", "NOBUNDLE"]
    assert (tmp_path / "KEY").read_bytes() == key


def test_a_new_key_as_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["build", "--new-key", str(tmp_path / "key.pem"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["public_key"].startswith("ed25519:")
    assert set(document) == {"key", "public_key", "file"}


@pytest.mark.full
def test_a_plan_of_the_store_that_was_damaged_is_not_signed(
    tmp_path: Path, device: FakeDevice, build: Command, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    """Between being looked up and being signed."""
    new_key(tmp_path / "key.pem", capsys)
    from edge_runtime.app import plan_bundle

    real = plan_bundle.write_plan_bundle

    def spoilt(*arguments: Any) -> Any:
        (plan,) = build.plans()
        plan.chmod(0o644)
        plan.write_bytes(plan.read_bytes()[:-1])
        return real(*arguments)

    monkeypatch.setattr(plan_bundle, "write_plan_bundle", spoilt)
    source = make_bundle(tmp_path / "bundle")
    assert build(source, "--into", tmp_path / "out", "--sign", tmp_path / "key.pem") == 1
    assert "is not the one that its sidecar is of" in build.err
    assert not (tmp_path / "out").exists()
    assert sorted(tmp_path.glob(".*")) == []
