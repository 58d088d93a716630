"""Bundles on disk by digest: what goes in, what is refused, and what a power cut at any instant leaves."""

from __future__ import annotations

import errno
import io
import itertools
import os
import stat
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.durable import RealFiles
from edge_runtime.engine import archive, upload
from edge_runtime.engine.archive import bundle_bytes, manifest_files, tar_bundle
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.store import BundleStore
from edge_runtime.errors import BundleError, EdgeError
from tests.conftest import ROOT
from tests.crash import CrashDisk
from tests.engine.graphs import classifier, write_bundle
from tests.engine.stores import FailingFiles, by_upload, contents, nothing_aside, refused, tar_of, with_golden

MODEL = classifier()
Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes the bundle of a name outside the store; each name gives another digest."""

    def make(name: str, **tables: Any) -> Path:
        return write_bundle(tmp_path / "made" / name, MODEL, bundle={"name": name}, **tables)

    return make


@pytest.fixture
def store(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "bundles")


def test_a_bundle_goes_in_whole_and_read_only(store: BundleStore, made: Made) -> None:
    source = with_golden(made("a"))
    bundle = store.add(source)
    names = ["bundle.toml", "golden/deep/a.png", "golden/deep/b.png", "golden/fp32.npz", "labels.txt", "model.onnx"]
    assert [str(name) for name in manifest_files(bundle)] == names
    assert bundle.root == store.root / bundle.digest.removeprefix("sha256:")
    assert sorted(str(each.relative_to(bundle.root)) for each in bundle.root.rglob("*") if each.is_file()) == names
    for each in (bundle.root, *bundle.root.rglob("*")):
        assert stat.S_IMODE(each.stat().st_mode) == (0o555 if each.is_dir() else 0o444), each
    assert store.open(bundle.digest) == bundle
    assert bundle.digest == load_bundle(source).digest
    assert store.digests() == (bundle.digest,)
    assert store.size_bytes() == bundle_bytes(bundle) == sum((source / name).stat().st_size for name in names)
    assert nothing_aside(store)


def test_one_that_is_there_is_not_written_again(tmp_path: Path, made: Made) -> None:
    (tmp_path / "disk").mkdir()
    disk = CrashDisk(tmp_path / "disk")
    store = BundleStore(tmp_path / "disk" / "bundles", files=disk)
    first = store.add(made("a"))
    done = len(disk.trace)
    assert store.add(tmp_path / "made" / "a") == first
    assert store.add(first.root) == first
    assert len(disk.trace) == done


@pytest.mark.parametrize("damage", ["byte", "file", "manifest", "links"])
def test_one_that_is_damaged_is_refused_and_replaced(store: BundleStore, made: Made, damage: str) -> None:
    bundle = store.add(made("a"))
    bundle.root.chmod(0o755)
    for each in bundle.root.iterdir():
        each.chmod(0o644)
    if damage == "byte":
        (bundle.root / "labels.txt").write_bytes(b"red\ngreen\nbluE\n")
    elif damage == "file":
        (bundle.root / "model.onnx").unlink()
    elif damage == "manifest":
        with (bundle.root / "bundle.toml").open("a") as stream:
            stream.write("# no longer the same\n")
    else:
        (bundle.root / "model.onnx").unlink()
        bundle.root.rename(store.root / "elsewhere")
        bundle.root.symlink_to("nowhere")
    error = refused(lambda: store.open(bundle.digest))
    assert isinstance(error, BundleError)
    assert error.code == "digest_mismatch"
    assert "reload" in (error.remedy or "")
    assert store.add(made("a")) == bundle
    assert store.open(bundle.digest).read_artefact("fp32", "onnxruntime") == MODEL
    assert nothing_aside(store)


@pytest.mark.parametrize("digest", ["sha256:" + "0" * 64, "0" * 64, "sha256:../../etc", "", "sha256:" + "٠" * 64])
def test_what_is_not_in_the_store(store: BundleStore, made: Made, digest: str) -> None:
    assert refused(lambda: store.open(digest)).code == "not_in_store"
    there = store.add(made("a")).digest
    error = refused(lambda: store.open(digest))
    assert error.code == "not_in_store"
    assert there in (error.remedy or "")


def test_what_is_no_bundle_leaves_nothing_behind(store: BundleStore, made: Made, tmp_path: Path) -> None:
    assert refused(lambda: store.add(tmp_path / "nowhere")).code == "bundle_missing"
    broken = made("a")
    (broken / "model.onnx").write_bytes(MODEL[:-1])
    assert refused(lambda: store.add(broken)).code == "digest_mismatch"
    unlisted = made("b", files={})
    manifest = unlisted / "bundle.toml"
    manifest.write_text(manifest.read_text().replace("[files]\n", ""))
    assert load_bundle(unlisted)  # good enough where it lies; but its digest says nothing of the labels
    error = refused(lambda: store.add(unlisted))
    assert (error.code, "labels.txt" in error.message) == ("manifest_invalid", True)
    assert not store.root.exists()
    assert store.digests() == ()


def test_a_bundle_that_changes_while_it_is_copied_is_refused(tmp_path: Path, made: Made) -> None:
    source = made("a")

    class Meddling(RealFiles):
        def mkdir(self, path: Path, mode: int) -> None:
            super().mkdir(path, mode)
            if path.name.startswith("."):
                (source / "model.onnx").write_bytes(b"x" + MODEL)

    store = BundleStore(tmp_path / "bundles", files=Meddling())
    error = refused(lambda: store.add(source))
    assert (error.code, error.where) == ("digest_mismatch", "model.onnx")
    assert not list(store.root.iterdir())


def test_the_reserve_is_kept(tmp_path: Path, made: Made) -> None:
    free_bytes = 1000

    def statvfs(path: Path) -> os.statvfs_result:
        return os.statvfs_result((1, 1, free_bytes, free_bytes, free_bytes, 0, 0, 0, 0, 255))

    store = BundleStore(tmp_path / "bundles", reserve_bytes=1001, statvfs=statvfs)
    for call in (lambda: store.add(made("a")), store.open_upload):
        error = refused(call)
        assert (error.code, error.retryable, error.exit_code) == ("store_full", True, 1)
        assert "0.0 MB free" in error.message
    free_bytes = 1001 + len(MODEL) - 1
    assert refused(lambda: store.add(made("a"))).code == "store_full"
    tar = b"".join(tar_bundle(load_bundle(made("a"))))
    with store.open_upload() as coming:
        assert refused(lambda: coming.write(tar)).code == "store_full"
    assert not list(store.root.iterdir())
    free_bytes = 1_000_000
    store.add(made("a"))


@pytest.mark.parametrize("put_in", [BundleStore.add, by_upload])
def test_a_disk_that_fails_at_any_change_leaves_nothing_behind(
    tmp_path: Path, made: Made, put_in: Callable[[BundleStore, Path], Bundle]
) -> None:
    source = with_golden(made("a"))
    for at, code in zip(itertools.count(1), itertools.cycle((errno.ENOSPC, errno.EROFS, errno.EIO)), strict=False):
        store = BundleStore(tmp_path / f"bundles-{at}", files=FailingFiles(at, code))
        try:
            bundle = put_in(store, source)
        except EdgeError as error:
            caught = error
        else:
            assert store.open(bundle.digest) == bundle
            if nothing_aside(store):
                break
            # only the cleaning failed: that waits for the next start
            assert BundleStore(store.root).sweep()
            assert nothing_aside(store)
            continue
        assert caught.code == "store_write_failed"
        assert caught.retryable == (code == errno.ENOSPC)
        assert store.digests() == ()
        assert nothing_aside(store)
        assert put_in(store, source)  # and afterwards it is as if nothing had been
    assert at > 20


def test_collect_keeps_what_is_to_be_kept(store: BundleStore, made: Made) -> None:
    a, b, c = (store.add(made(name)).digest for name in "abc")
    (store.root / "README").write_text("not ours")
    assert store.collect([b, "sha256:" + "0" * 64]) == tuple(sorted([a, c]))
    assert store.digests() == (b,)
    assert store.open(b)
    assert store.collect([b]) == ()
    assert store.sweep() == ()
    assert sorted(each.name for each in store.root.iterdir()) == sorted(["README", b.removeprefix("sha256:")])
    assert store.collect([]) == (b,)


def test_sweep_leaves_an_upload_that_is_coming_in(store: BundleStore, made: Made) -> None:
    with store.open_upload() as coming:
        coming.write(b"".join(tar_bundle(load_bundle(made("a")))))
        assert BundleStore(store.root).sweep() != ()  # another process would take it for a leftover
        assert nothing_aside(store)
    with store.open_upload() as coming:
        coming.write(b"".join(tar_bundle(load_bundle(made("a")))))
        assert store.sweep() == ()
        assert coming.finish()


def test_changes_from_many_threads(store: BundleStore, made: Made) -> None:
    """Adds of the same and of others, uploads and collects at once; a reader always finds the one that is kept."""
    kept = store.add(made("kept")).digest
    sources = [made(name) for name in "ab"]
    go, stop = threading.Barrier(6), threading.Event()
    failures: list[BaseException] = []

    def worker(body: Callable[[], object]) -> None:
        go.wait()
        try:
            for _ in range(12):
                body()
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    def read() -> None:
        go.wait()
        try:
            while not stop.is_set():
                store.open(kept)
                store.size_bytes()
        except EdgeError as error:
            failures.append(error)

    bodies: list[Callable[[], object]] = [
        lambda: store.add(sources[0]),
        lambda: store.add(sources[0]),
        lambda: by_upload(store, sources[1]),
        lambda: by_upload(store, sources[1]),
        lambda: store.collect([kept]),
    ]
    threads = [threading.Thread(target=worker, args=(body,)) for body in bodies]
    reader = threading.Thread(target=read)
    for thread in (*threads, reader):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    reader.join()
    assert failures == []
    assert nothing_aside(store)
    for digest in store.digests():
        assert store.open(digest)


# --- uploads


def test_a_tar_gives_back_the_bundle(store: BundleStore, made: Made) -> None:
    source = with_golden(made("a"))
    bundle = load_bundle(source)
    pieces = list(tar_bundle(bundle))
    assert b"".join(pieces) == b"".join(tar_bundle(bundle))
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        assert [(each.name, each.mtime, each.uid, each.mode) for each in tar] == [
            (str(name), 0, 0, 0o644) for name in manifest_files(bundle)
        ]
    with store.open_upload() as coming:
        for piece in pieces:
            coming.write(piece)
        stored = coming.finish()
        assert coming.new
        coming.abort()
        assert refused(lambda: coming.write(b"x")).code == "upload_ended"
    assert stored == store.open(bundle.digest)
    with store.open_upload() as coming:
        coming.write(b"".join(pieces))
        assert coming.finish() == stored
        assert not coming.new
    assert nothing_aside(store)


def test_the_demo_bundle_goes_through_a_tar(store: BundleStore) -> None:
    bundle = load_bundle(ROOT / "engines" / "centernet")
    assert max(len(piece) for piece in tar_bundle(bundle)) <= archive.CHUNK_BYTES
    assert by_upload(store, bundle.root).digest == bundle.digest


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = kind, target
    return entry


def send(store: BundleStore, tar: bytes) -> Bundle:
    with store.open_upload() as coming:
        coming.write(tar)
        return coming.finish()


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tars_of_others_are_read(store: BundleStore, made: Made, form: int) -> None:
    source = made("a")
    more: list[tuple[tarfile.TarInfo | str, bytes]] = [
        (special(".", tarfile.DIRTYPE), b""),
        (special("./golden", tarfile.DIRTYPE), b""),
        ("./" + "long/" * 20 + "name", b"not listed"),
        ("README", b"not listed"),
    ]
    bundle = send(store, tar_of(*more, *contents(source), form=form))
    assert bundle.digest == load_bundle(source).digest
    assert sorted(each.name for each in bundle.root.rglob("*")) == ["bundle.toml", "labels.txt", "model.onnx"]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (special("x", tarfile.SYMTYPE, "/etc/passwd"), "link"),
        (special("golden", tarfile.SYMTYPE, ".."), "link"),
        (special("x", tarfile.LNKTYPE, "model.onnx"), "link"),
        (special("x", tarfile.CHRTYPE), "device"),
        (special("x", tarfile.FIFOTYPE), "no plain file"),
        ("/etc/cron.d/x", "absolute"),
        ("../x", "leads out"),
        ("a/../../x", "leads out"),
        ("a\\b", "character"),
        ("model.onnx", "stands twice"),
        ("./model.onnx", "stands twice"),
        ("model.onnx/x", "a file and a folder"),
        ("x" * 256, "longer"),
        ("x/" * 600 + "x", "longer"),
        ("x\udcff", "cannot be read"),
    ],
)
def test_what_no_bundle_has_is_refused(
    store: BundleStore, made: Made, tmp_path: Path, entry: tarfile.TarInfo | str, words: str
) -> None:
    form = tarfile.GNU_FORMAT if isinstance(entry, str) and "\udcff" in entry else tarfile.PAX_FORMAT
    error = refused(lambda: send(store, tar_of(*contents(made("a")), (entry, b""), form=form)))
    assert isinstance(error, BundleError)
    assert error.code == "upload_invalid"
    assert words in error.message
    assert store.digests() == ()
    assert nothing_aside(store)
    assert not (tmp_path / "x").exists()


def test_a_tar_that_is_none(store: BundleStore, made: Made) -> None:
    whole = tar_of(*contents(made("a")))
    for data, code in [
        (b"", "upload_invalid"),
        (b"hello", "upload_invalid"),
        (b"\x1f\x8b" + bytes(600), "upload_invalid"),
        (whole[:700], "upload_invalid"),
        (whole[: 2 * 512 + 100], "file_missing"),
        (tar_of(*contents(made("a"))[1:]), "bundle_missing"),
        (tar_of(*contents(made("a"))[:-1]), "file_missing"),
    ]:
        error = refused(lambda data=data: send(store, data))  # type: ignore[misc]
        assert (error.code, type(error)) == (code, BundleError), data[:40]
        assert ".new-" not in str(error)
        assert nothing_aside(store)
    # an empty one: which of the two depends on the Python
    assert refused(lambda: send(store, bytes(10240))).code in ("bundle_missing", "upload_invalid")


def test_headers_that_claim_too_much_cost_nothing(
    store: BundleStore, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(made("a"))
    huge = tarfile.TarInfo("model.onnx")
    huge.size = 2**50
    pax = special("x", tarfile.XHDTYPE)
    pax.size = 2**32
    nested = special("x", tarfile.XHDTYPE)
    nested.size = 512
    chain = (nested.tobuf() + b"9 a=bcde\n".ljust(512, b"\0")) * 3000
    many = tarfile.TarInfo("y")
    many.pax_headers = {f"k{number}": "v" for number in range(200)}
    shared = many.create_pax_global_header(many.pax_headers)
    for data in (huge.tobuf(), pax.tobuf() + bytes(1024), chain, shared + tar_of(*whole)):
        assert refused(lambda data=data: send(store, data)).code == "upload_invalid"  # type: ignore[misc]
    monkeypatch.setattr(archive, "MAX_MEMBERS", 3)
    assert send(store, tar_of(*whole))
    assert refused(lambda: send(store, tar_of(*whole, ("x", b"")))).code == "upload_invalid"
    monkeypatch.setattr(upload, "MAX_UPLOAD_BYTES", 100)
    assert refused(lambda: send(store, bytes(101))).code == "upload_too_large"
    assert nothing_aside(store)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_tar_with_flipped_bytes_is_the_bundle_or_refused(store: BundleStore, made: Made, data: st.DataObject) -> None:
    tar = bytearray(tar_of(*contents(made("a"))))
    digest = load_bundle(made("a")).digest
    places = st.one_of(*(st.integers(512 * block, 512 * block + 511) for block in range(7)))
    for place in data.draw(st.lists(places, min_size=1, max_size=4)):
        tar[place] = data.draw(st.integers(0, 255))
    try:
        assert send(store, bytes(tar)).digest == digest
    except BundleError:
        pass
    assert nothing_aside(store)
    store.collect([])
