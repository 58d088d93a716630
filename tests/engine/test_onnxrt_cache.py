"""Optimised models on disk: found again by the same library, CPU and model only, and never worse than none."""

from __future__ import annotations

import hashlib
import os
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from edge_runtime.app.proof import prove
from edge_runtime.engine import onnxrt, onnxrt_cache
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine, open_session
from edge_runtime.engine.onnxrt_cache import SessionCache, cpu_identity
from edge_runtime.errors import BundleError
from tests.conftest import ROOT
from tests.engine.graphs import CLASSES, SIDE, classifier, graph, node, write_bundle

LIBRARY = onnxrt._library()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def layered() -> bytes:
    """Convolutions with what an optimiser folds and fuses between them."""
    rng = np.random.default_rng(8)
    nodes = [
        node("Conv", ["x", "a"], ["c1"], pads=[1, 1, 1, 1]),
        node("Relu", ["c1"], ["r1"]),
        node("Conv", ["r1", "b"], ["c2"], pads=[1, 1, 1, 1]),
        node("Sigmoid", ["c2"], ["s2"]),
        node("Mul", ["c2", "s2"], ["m2"]),
        node("Conv", ["m2", "c"], ["c3"]),
        node("ReduceMean", ["c3"], ["y"], axes=[2, 3], keepdims=0),
    ]
    shapes = {"a": (16, 3, 3, 3), "b": (16, 16, 3, 3), "c": (CLASSES, 16, 1, 1)}
    return graph(nodes, initializers={name: rng.normal(0, 0.3, shape) for name, shape in shapes.items()})


def says(session: Any, batch: Any) -> Any:
    (output,) = session.run(None, {session.get_inputs()[0].name: batch})
    return output


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What sessions were made of: "plain", "written", "optimised"."""
    found: list[str] = []
    session = onnxrt._session

    def noted(model: bytes, options: Any, where: str) -> Any:
        plain = options.graph_optimization_level != ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        found.append(("written" if options.optimized_model_filepath else "plain") if plain else "optimised")
        return session(model, options, where)

    monkeypatch.setattr(onnxrt, "_session", noted)
    return found


def test_it_is_made_once_and_answers_to_the_bit(tmp_path: Path, built: list[str]) -> None:
    model = layered()
    batch = np.random.default_rng(1).normal(0, 50, (2, 3, SIDE, SIDE)).astype(np.float32)
    wanted = says(open_session(model, "m"), batch)
    for expected in (["plain", "written", "optimised"], ["plain", "written", "optimised", "optimised"]):
        session = open_session(model, "m", SessionCache(tmp_path / "s"))
        np.testing.assert_array_equal(says(session, batch), wanted)
        assert built == expected
    (kept,) = (tmp_path / "s").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("change", ["cpu", "library", "model"])
def test_another_cpu_library_or_model_does_not_find_it(tmp_path: Path, change: str) -> None:
    model = layered()
    cache = SessionCache(tmp_path, cpu="one")
    assert cache.keep(sha256(model), len(model), LIBRARY, lambda path: path.write_bytes(b"it")) == b"it"
    assert cache.find(sha256(model), LIBRARY) == b"it"
    other = SessionCache(tmp_path, cpu="other") if change == "cpu" else cache
    library = "onnxruntime 0.1" if change == "library" else LIBRARY
    assert other.find(sha256(classifier() if change == "model" else model), library) is None


def _cut(data: bytes) -> bytes:
    return data[:-9]


def _flipped(data: bytes) -> bytes:
    place = len(data) - 40
    return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


@pytest.mark.parametrize("damage", [_cut, _flipped, lambda _: b"", lambda _: b"something else\n" * 90])
def test_a_damaged_file_is_made_anew(tmp_path: Path, built: list[str], damage: Any) -> None:
    model = layered()
    open_session(model, "m", SessionCache(tmp_path))
    (kept,) = tmp_path.iterdir()
    kept.chmod(0o600)
    kept.write_bytes(damage(kept.read_bytes()))
    built.clear()
    batch = np.ones((1, 3, SIDE, SIDE), np.float32)
    np.testing.assert_array_equal(
        says(open_session(model, "m", SessionCache(tmp_path)), batch), says(open_session(model, "m"), batch)
    )
    assert built == ["written", "optimised", "plain"]
    assert SessionCache(tmp_path).find(sha256(model), LIBRARY) is not None


def test_a_whole_file_that_the_library_refuses_is_dropped(tmp_path: Path, built: list[str]) -> None:
    model = layered()
    cache = SessionCache(tmp_path)
    cache.keep(sha256(model), len(model), LIBRARY, lambda path: path.write_bytes(b"\x08\x08 no model"))
    session = open_session(model, "m", cache)
    assert built == ["optimised", "plain"]
    assert list(tmp_path.iterdir()) == []
    assert says(session, np.ones((1, 3, SIDE, SIDE), np.float32)).shape == (1, CLASSES)


def test_a_model_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="does not have"):
        open_session(graph([node("Nonesuch", ["x"], ["y"])]), "m", SessionCache(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_nothing_only_costs_time(tmp_path: Path, built: list[str], caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    session = open_session(classifier(), "m", SessionCache(tmp_path / "file"))
    assert says(session, np.ones((1, 3, SIDE, SIDE), np.float32)).shape == (1, CLASSES)
    open_session(classifier(), "m", SessionCache(tmp_path / "full", reserve_bytes=2**62))
    assert built == ["plain", "plain"]
    assert list((tmp_path / "full").iterdir()) == []


def test_a_disk_that_fills_up_while_the_library_writes_is_no_fault_of_the_model(
    tmp_path: Path, built: list[str]
) -> None:
    """The library says only that it cannot, as of a model that is wrong."""
    rng = np.random.default_rng(1)
    nodes = [node("Conv", ["x", "w"], ["c"]), node("ReduceMean", ["c"], ["y"], axes=[2, 3], keepdims=0)]
    model = graph(nodes, initializers={"w": rng.normal(0, 0.3, (CLASSES, 3, 30, 30))})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores the signal: writes fail as on a full disk
    try:
        session = open_session(model, "m", SessionCache(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert built == ["written", "plain"]
    assert list(tmp_path.iterdir()) == []
    assert says(session, np.ones((1, 3, SIDE, SIDE), np.float32)).shape == (1, CLASSES)


@pytest.mark.parametrize("case", ["owner", "writable", "link", "folder", "folder link", "device"])
def test_nothing_is_taken_from_where_others_may_write(tmp_path: Path, case: str, caplog: Any) -> None:
    cache = SessionCache(tmp_path / "s", cpu="one")
    cache.keep("a", 1, LIBRARY, lambda path: path.write_bytes(b"it"))
    (kept,) = (tmp_path / "s").iterdir()
    if case == "owner":
        if os.geteuid():
            pytest.skip("only root gives files away")
        os.chown(kept, 12345, -1)
    elif case == "writable":
        kept.chmod(0o662)
    elif case == "link":
        kept.rename(tmp_path / "elsewhere")
        kept.symlink_to(tmp_path / "elsewhere")
    elif case == "folder":
        (tmp_path / "s").chmod(0o770)
    elif case == "folder link":
        (tmp_path / "s").rename(tmp_path / "t")
        (tmp_path / "s").symlink_to(tmp_path / "t")
    else:
        kept.unlink()
        os.mkfifo(kept, 0o600)  # must not be waited for
    assert cache.find("a", LIBRARY) is None
    made = cache.keep("a", 1, LIBRARY, lambda path: path.write_bytes(b"ours"))
    assert made == (None if case.startswith("folder") else b"ours")
    assert cache.find("a", LIBRARY) == made
    if case.startswith("folder") or case in ("owner", "writable", "device"):
        assert "others to write" in caplog.text


def test_other_settings_do_not_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = onnxrt._library()
    assert ort.__version__ in before
    assert ort.get_build_info() in before
    monkeypatch.setattr(onnxrt, "_ENTRIES", {**onnxrt._ENTRIES, "session.set_denormal_as_zero": "1"})
    other = onnxrt._library()
    assert other != before
    monkeypatch.setattr(onnxrt, "_SETTINGS", {**onnxrt._SETTINGS, "enable_mem_pattern": True})
    assert onnxrt._library() not in (before, other)
    assert onnxrt._options().enable_mem_pattern is True


def test_a_known_digest_is_not_computed_again(
    tmp_path: Path, built: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = load_bundle(write_bundle(tmp_path / "b", layered()))
    load_engine(bundle, cache=SessionCache(tmp_path / "s")).close()

    class NoHash:
        @staticmethod
        def sha256(_: bytes) -> Any:
            raise AssertionError("hashed twice")

    monkeypatch.setattr(onnxrt, "hashlib", NoHash)
    load_engine(bundle, cache=SessionCache(tmp_path / "s")).close()
    assert built == ["written", "optimised", "optimised"]


def test_an_unknown_cpu_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu_identity(tmp_path / "none") is None
    monkeypatch.setattr(onnxrt_cache, "cpu_identity", lambda: None)
    open_session(classifier(), "m", SessionCache(tmp_path / "s"))
    assert not (tmp_path / "s").exists()


def test_what_a_cpu_is(tmp_path: Path) -> None:
    """Not its clock or its number: those change from boot to boot."""
    path = tmp_path / "cpuinfo"
    arm = (
        "processor\t: {n}\nBogoMIPS\t: {n}2.5\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU part\t: 0x{part}\n\n"
    )
    path.write_text(arm.format(n=0, part="d42") + arm.format(n=1, part="d42"))
    first = cpu_identity(path)
    assert first is not None
    path.write_text(arm.format(n=3, part="d42"))
    assert cpu_identity(path) == first
    path.write_text(arm.format(n=0, part="d42") + arm.format(n=1, part="d0b"))
    assert cpu_identity(path) != first
    assert cpu_identity() is not None


def test_few_files_are_kept_those_used_last(tmp_path: Path) -> None:
    cache = SessionCache(tmp_path, cpu="one", most=3, most_bytes=1000)

    def keep(name: str, size: int = 50) -> None:
        cache.keep(name, 1, "library", lambda path: path.write_bytes(name.encode() * size))

    for age, name in enumerate("abc"):
        keep(name)
        for path in tmp_path.iterdir():  # a day and more ago, so that a use is noted
            if path.stat().st_mtime > time.time() - 60:
                os.utime(path, (time.time() - 200_000 + age, time.time() - 200_000 + age))
    assert cache.find("a", "library") is not None
    left = tmp_path / ".dead.new"
    left.write_bytes(b"x")
    os.utime(left, (1, 1))
    keep("d")
    assert {name for name in ("a", "b", "c", "d") if cache.find(name, "library")} == {"a", "c", "d"}
    assert not left.exists()
    keep("e", 450)
    keep("f", 450)
    assert {name for name in ("a", "c", "d", "e", "f") if cache.find(name, "library")} == {"f"}
    keep("g", 2000)
    assert cache.find("g", "library") is None


def test_what_the_proof_ran_is_what_is_loaded(tmp_path: Path, built: list[str]) -> None:
    bundle = load_bundle(write_bundle(tmp_path / "b", layered()))
    prove(bundle, "fp32", sessions=tmp_path / "s", lanes=1, places=1, nice=0)
    assert len(list((tmp_path / "s").iterdir())) == 1
    engine = load_engine(bundle, cache=SessionCache(tmp_path / "s"))
    assert built == ["optimised"]
    engine.close()


@pytest.mark.full
@pytest.mark.parametrize("variant", ["fp32-512", "fp32-416", "fp32-320"])
def test_the_bundled_model_to_the_bit(tmp_path: Path, variant: str) -> None:
    bundle = load_bundle(ROOT / "engines/centernet")
    spec = bundle.input_spec(variant)
    batch = np.random.default_rng(2).uniform(0, 255, (1, *spec.shape)).astype(np.float32)
    model = bundle.read_artefact(variant, "onnxruntime")
    sessions = [open_session(model, "m"), open_session(model, "m", SessionCache(tmp_path))]
    for one, other in zip(*(each.run(None, {"images": batch}) for each in sessions), strict=True):
        np.testing.assert_array_equal(one, other)
