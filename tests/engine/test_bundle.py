"""A bundle that is missing something, changed, or reaches out of its folder is refused in plain words."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.errors import BundleError
from tests.conftest import ROOT
from tests.engine.graphs import classifier, write_bundle

MODEL = classifier()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_bundle(tmp_path / "tiny", MODEL)


def refused(root: Path) -> BundleError:
    with pytest.raises(BundleError) as caught:
        load_bundle(root)
    return caught.value


def edit(root: Path, old: str, new: str) -> None:
    text = (root / "bundle.toml").read_text()
    assert old in text
    (root / "bundle.toml").write_text(text.replace(old, new, 1))


def test_a_whole_bundle(root: Path) -> None:
    bundle = load_bundle(root)

    assert bundle.digest == f"sha256:{hashlib.sha256((root / 'bundle.toml').read_bytes()).hexdigest()}"
    assert bundle.labels == ("red", "green", "blue")
    assert bundle.variant("auto").name == "fp32"
    spec = bundle.input_spec("fp32")
    assert (spec.width, spec.height, spec.color, spec.resize) == (32, 32, "RGB", "stretch")
    assert bundle.output_spec().labels == bundle.labels
    assert bundle.read_artefact("fp32", "onnxruntime") == MODEL
    assert load_bundle(root / "bundle.toml").digest == bundle.digest


def test_engine_digest_names_bundle_variant_backend_and_artefact(root: Path, tmp_path: Path) -> None:
    bundle = load_bundle(root)
    digest = bundle.engine_digest("auto", "onnxruntime")
    assert digest == bundle.engine_digest("fp32", "onnxruntime")
    assert digest.startswith("sha256:")
    assert len(digest) == 71
    other = load_bundle(write_bundle(tmp_path / "b", MODEL, input={"pad": 7}))
    assert other.engine_digest("fp32", "onnxruntime") != digest


def test_unknown_variant_and_backend(root: Path) -> None:
    bundle = load_bundle(root)
    with pytest.raises(BundleError, match=r"no variant 'int8'.*fp32"):
        bundle.variant("int8")
    for name in ("auto", "fp32"):
        with pytest.raises(BundleError, match="tensorrt") as caught:
            bundle.artefact(name, "tensorrt")
        assert caught.value.code == "no_artefact"


def test_missing(tmp_path: Path) -> None:
    assert refused(tmp_path / "nowhere").code == "bundle_missing"
    (tmp_path / "empty").mkdir()
    assert "no bundle.toml" in str(refused(tmp_path / "empty"))
    (tmp_path / "file").write_text("x")
    assert "is a file" in str(refused(tmp_path / "file"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('color = "RGB"', 'color = "RGB"\npadd = 3', "input.padd: there is no such key (did you mean 'pad'?)"),
        (
            'color = "RGB"',
            'colour = "RGB"',
            "bundle.toml:9: input.colour: there is no such key (did you mean 'color'?)",
        ),
        ('color = "RGB"', "", "input.color: is missing"),
        ('color = "RGB"', 'color = "rgb"', "'rgb' is not one of the known words (did you mean 'RGB'?"),
        ('layout = "classify"', 'layout = "yolov7"', "output.layout: 'yolov7' is not one of the known words"),
        ('layout = "classify"', 'layout = "yolov7"', '"yolov5" reads it'),
        ('layout = "classify"', 'layout = "yolo11"', '"yolov8" reads it'),
        ('layout = "classify"', 'layout = "yolov12"', '"yolov8" reads it'),
        ('layout = "classify"', 'layout = "yolo26"', '"yolov10" reads its end-to-end output'),
        ('layout = "classify"', "layout = [{}]", "is not one of the known words"),
        ('layout = "classify"', 'layout = "rt-detr"', "did you mean 'rtdetr'"),
        ('layout = "classify"', 'layout = "yolo"', "output.layout: 'yolo' is not one of the known words"),
        ('resize = "stretch"', 'resize = "letterbox"', "did you mean 'letterbox-"),
        (
            "size = [32, 32]",
            'size = [32, 31]\npixel = "nv12"',
            "variant[1].size: is 32x31, and nv12 has one colour for",
        ),
        ("size = [32, 32]", 'size = [32, 32]\npixel = "rgb24"', "prepare fuse` makes a model that takes one of them"),
        ("size = [32, 32]", 'size = [32, 32]\npixel = "i420"', 'it reads "nv12"'),
        ("size = [32, 32]", 'size = [32, 32]\npixel = "nv21"', "did you mean 'nv12'"),
        ('color = "RGB"', 'color = "RGB"\nlayout = "NHWC"', "'NHWC' is not built yet in this version"),
        ("size = [32, 32]", "size = [32, 0]", "variant[1].size[2]"),
        ("size = [32, 32]", "size = 32", "variant[1].size"),
        ('name = "fp32"', 'name = "auto"', "no name for a variant"),
        ('name = "tiny"', 'name = "../tiny"', "is not a name"),
        ('task = "classify"', 'task = "detect"', "does not go with"),
        ('path = "model.onnx"', 'path = "/etc/passwd"', "is an absolute path"),
        ('path = "model.onnx"', 'path = "../model.onnx"', "leads out of the bundle's folder"),
        ('labels = "labels.txt"', 'labels = "../../labels.txt"', "leads out"),
        ('sha256 = "', 'sha256 = "zz', "is not 64 hex digits"),
        ("[input]", "[input", "not TOML"),
        (
            "files.onnxruntime",
            "files.onnxruntim",
            "files.onnxruntim: there is no such key (did you mean 'onnxruntime'?)",
        ),
        ("[[variant]]", "[variant]", "variant"),
        ('color = "RGB"', 'color = "RGB"\nshort_side = 64', 'short_side: only goes with resize = "crop"'),
        ('color = "RGB"', 'color = "RGB"\nstd = [1.0, 0.0, 1.0]', "input.std[2]"),
        ('color = "RGB"', 'color = "RGB"\nscale = nan', "input.scale"),
    ],
)
def test_manifest_faults_are_named(root: Path, old: str, new: str, words: str) -> None:
    edit(root, old, new)
    error = refused(root)
    assert error.code == "manifest_invalid"
    assert words in str(error)
    assert "bundle.toml" in str(error)


def test_every_problem_at_once(root: Path) -> None:
    edit(root, 'color = "RGB"', 'colour = "RGB"')
    edit(root, 'task = "classify"', "task = 7")
    text = str(refused(root))
    assert "input.colour" in text
    assert "input.color" in text
    assert "bundle.task" in text


def test_a_flipped_bit_or_a_cut_file_is_refused_before_anything_loads_it(root: Path) -> None:
    path = root / "model.onnx"
    flipped = bytearray(MODEL)
    flipped[len(MODEL) // 2] ^= 1
    for damaged in (bytes(flipped), MODEL[:-1], MODEL + b"\0"):
        path.write_bytes(damaged)
        error = refused(root)
        assert error.code == "digest_mismatch"
        assert error.where == str(path)
        assert "half-copied" in error.message


def test_an_artefact_exchanged_after_the_check_is_not_loaded(root: Path) -> None:
    bundle = load_bundle(root)
    (root / "model.onnx").write_bytes(MODEL[:-1] + b"x")
    with pytest.raises(BundleError) as caught:
        load_engine(bundle)
    assert caught.value.code == "digest_mismatch"


def test_missing_empty_and_odd_files(root: Path) -> None:
    path = root / "model.onnx"
    path.write_bytes(b"")
    assert refused(root).code == "file_empty"
    path.unlink()
    assert refused(root).code == "file_missing"
    os.mkfifo(path)  # nothing may wait for a writer
    assert "no plain file" in str(refused(root))
    path.unlink()
    path.mkdir()
    assert "model.onnx" in str(refused(root))


def test_symlinks_stay_inside(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "model.onnx"
    (root / "model.onnx").rename(outside)
    (root / "model.onnx").symlink_to(outside)
    error = refused(root)
    assert error.code == "path_escape"
    (root / "model.onnx").unlink()
    (root / "weights.bin").write_bytes(MODEL)
    (root / "model.onnx").symlink_to("weights.bin")
    load_bundle(root)
    (tmp_path / "link").symlink_to(root)
    load_bundle(tmp_path / "link")


def test_labels(root: Path, tmp_path: Path) -> None:
    (root / "labels.txt").write_text("red\ngreen\npink\n")
    assert refused(root).code == "digest_mismatch"  # listed under [files]
    for content, words in ((b"red\n\nblue\n", "labels.txt:2"), (b"r\xff\n", "not UTF-8"), (b"\n", "names no class")):
        folder = write_bundle(tmp_path / "labels", MODEL, files={})
        (folder / "bundle.toml").write_text((folder / "bundle.toml").read_text().replace("[files]\n", ""))
        (folder / "labels.txt").write_bytes(content)
        error = refused(folder)
        assert error.code == "labels_invalid"
        assert words in str(error)


def test_a_files_table_is_whole(root: Path) -> None:
    edit(root, '"labels.txt" = ', '"x" = ')
    assert refused(root).code == "file_missing"
    (root / "x").write_bytes((root / "labels.txt").read_bytes())
    assert "'labels.txt' is used by the bundle but not listed" in str(refused(root))


def test_golden_files_exist(root: Path, tmp_path: Path) -> None:
    golden = {"inputs": "golden/*.png", "outputs": "golden/fp32.npz", "tolerance": 0.02}
    folder = write_bundle(tmp_path / "golden", MODEL, variant={"golden": golden})
    assert "no picture matches" in str(refused(folder))
    (folder / "golden").mkdir()
    (folder / "golden" / "a.png").write_bytes(b"x")
    assert "'golden/a.png' is used by the bundle but not listed" in str(refused(folder))
    (folder / "bundle.toml").write_text((folder / "bundle.toml").read_text().replace("[files]\n", "[files]\n#", 1))
    (folder / "bundle.toml").write_text((folder / "bundle.toml").read_text().replace("[files]", ""))
    assert refused(folder).where == str(folder / "golden" / "fp32.npz")


def shipped() -> Bundle:
    return load_bundle(ROOT / "engines" / "centernet")


def test_the_shipped_bundle() -> None:
    bundle = shipped()
    assert bundle.variants == ("fp32-512", "fp32-416", "fp32-320")
    assert bundle.variant().name == "fp32-512"
    assert len(bundle.labels) == 80
    assert "MIT" in bundle.manifest.bundle.licence
    size = sum(path.stat().st_size for path in (bundle.root / "golden").rglob("*") if path.is_file())
    assert size < 1_000_000
