"""A recorded accuracy changes one line of bundle.toml and nothing else, or nothing at all."""

from __future__ import annotations

import difflib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.manifest import AccuracyTable
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare import record
from edge_runtime.prepare.record import check_recordable, record_accuracy
from tests.engine.graphs import classifier, write_bundle

ACCURACY = AccuracyTable(
    metric="top1",
    value=0.875,
    data="set",
    data_sha256="0f" * 32,
    images=8,
    scaler="swscale-bilinear",
    backend="onnxruntime",
)
LINE = (
    'accuracy = {metric = "top1", value = 0.875, data = "set", data_sha256 = "' + "0f" * 32 + '", images = 8, '
    'scaler = "swscale-bilinear", backend = "onnxruntime"}\n'
)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """Two variants, with comments in every place."""
    root = write_bundle(tmp_path / "tiny", classifier(shape=("batch", 3, "h", "w")))
    text = (root / "bundle.toml").read_text()
    head, table, variant = text.partition("[[variant]]\n")
    second = variant.replace('"fp32"', '"second"', 1)
    text = f"# ours\n{head}{table}{variant.rstrip()} # the large one\n\n{table}# the small one\n{second}\n# end\n"
    (root / "bundle.toml").write_text(text)
    return load_bundle(root)


def changed(before: str, after: str) -> list[str]:
    lines = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=0)
    return [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]


def text_of(bundle: Bundle) -> str:
    return (bundle.root / "bundle.toml").read_text()


@pytest.mark.parametrize("variant", ["fp32", "second", "auto"])
def test_one_line_is_added(bundle: Bundle, variant: str) -> None:
    before = text_of(bundle)
    recorded = record_accuracy(bundle, variant, ACCURACY)
    assert changed(before, text_of(recorded)) == ["+" + LINE]
    name = "fp32" if variant == "auto" else variant
    assert recorded.variant(name).accuracy == ACCURACY
    assert [each.accuracy for each in recorded.manifest.variant].count(None) == 1
    assert recorded.digest == load_bundle(bundle.root).digest != bundle.digest
    assert recorded.engine_digest(name, "onnxruntime") != bundle.engine_digest(name, "onnxruntime")
    load_engine(recorded, name).close()


def test_a_later_one_takes_its_place(bundle: Bundle) -> None:
    record_accuracy(bundle, "fp32", ACCURACY)
    file = bundle.root / "bundle.toml"
    file.write_text(file.read_text().replace(LINE, LINE.rstrip() + " # measured\n"))
    first = load_bundle(bundle.root)
    before = text_of(first)
    later = AccuracyTable(metric="mAP", value=0.5, data="other", images=9, backend="tensorrt")
    second = record_accuracy(first, "fp32", later)
    assert second.variant("fp32").accuracy == later
    assert changed(before, text_of(second)) == [
        f"-{LINE.rstrip()} # measured\n",
        '+accuracy = {metric = "mAP", value = 0.5, data = "other", images = 9, backend = "tensorrt"} # measured\n',
    ]


def test_an_accuracy_that_is_a_table_stays_one(bundle: Bundle) -> None:
    file = bundle.root / "bundle.toml"
    table = (
        '[variant.accuracy]\nmetric = "top1" # by hand\nvalue = 0.5\ndata = "x"\nimages = 1\nbackend = "onnxruntime"\n'
    )
    file.write_text(file.read_text().replace("\n# end\n", f"\n{table}# end\n"))
    recorded = record_accuracy(load_bundle(bundle.root), "second", ACCURACY)
    assert recorded.variant("second").accuracy == ACCURACY
    assert 'metric = "top1" # by hand\n' in text_of(recorded)
    assert text_of(recorded).count("# end\n") == 1


def test_variants_in_one_array(bundle: Bundle) -> None:
    file = bundle.root / "bundle.toml"
    head = file.read_text().partition("[[variant]]\n")[0]
    sha256 = bundle.manifest.variant[0].files.onnxruntime
    assert sha256 is not None
    files = f'{{onnxruntime = {{path = "model.onnx", sha256 = "{sha256.sha256}"}}}}'
    entry = f'{{name = "fp32", precision = "fp32", size = [32, 32], files = {files}}}'
    file.write_text(f"variant = [ # all\n  {entry}, # the one\n]\n{head}")
    recorded = record_accuracy(load_bundle(bundle.root), "fp32", ACCURACY)
    assert recorded.variant("fp32").accuracy == ACCURACY
    assert "# the one\n" in text_of(recorded)


@settings(max_examples=25, deadline=None)
@given(
    st.floats(0, 1),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=20),
    st.one_of(st.none(), st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)),
)
def test_what_is_read_is_what_was_recorded(
    tmp_path_factory: pytest.TempPathFactory, value: float, data: str, scaler: str | None
) -> None:
    root = write_bundle(tmp_path_factory.mktemp("bundle"), classifier())
    accuracy = AccuracyTable(metric="mAP", value=value, data=data, images=1, scaler=scaler, backend="onnxruntime")
    assert record_accuracy(load_bundle(root), "auto", accuracy).manifest.variant[0].accuracy == accuracy


def test_marks_and_rights_of_the_file_stay(bundle: Bundle) -> None:
    file = bundle.root / "bundle.toml"
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    file.chmod(0o640)
    recorded = record_accuracy(load_bundle(bundle.root), "auto", ACCURACY)
    assert file.read_bytes().startswith(b"\xef\xbb\xbf# ours")
    assert file.stat().st_mode & 0o777 == 0o640
    assert [path.name for path in recorded.root.iterdir() if path.name.startswith(".")] == []


def test_a_bundle_that_changed_meanwhile_is_left_alone(bundle: Bundle) -> None:
    file = bundle.root / "bundle.toml"
    file.write_text(file.read_text() + "# edited\n")
    before = text_of(bundle)
    with pytest.raises(BundleError, match="has changed since it was measured"):
        record_accuracy(bundle, "auto", ACCURACY)
    assert text_of(bundle) == before


def test_a_result_that_does_not_load_is_taken_back(bundle: Bundle) -> None:
    before = text_of(bundle)
    (bundle.root / "model.onnx").write_bytes(b"not the model")
    with pytest.raises(BundleError, match="is not the file that bundle"):
        record_accuracy(bundle, "auto", ACCURACY)
    assert text_of(bundle) == before


def test_an_unknown_variant(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match="there is no variant 'third'"):
        record_accuracy(bundle, "third", ACCURACY)


def test_a_disk_that_refuses(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = text_of(bundle)
    monkeypatch.setattr(record, "write_atomic", full)
    with pytest.raises(EdgeError, match="No space left on device") as caught:
        record_accuracy(bundle, "auto", ACCURACY)
    assert caught.value.code == "write_failed"
    assert text_of(bundle) == before


def test_an_installed_bundle_is_refused(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_INSTALLED", bundle.root.parent)
    with pytest.raises(UsageError, match="belongs to the installed package") as caught:
        check_recordable(bundle)
    assert "copy the bundle" in str(caught.value)


def test_a_bundle_in_a_store_is_refused(bundle: Bundle) -> None:
    root = bundle.root.rename(bundle.root.with_name(bundle.digest.removeprefix("sha256:")))
    with pytest.raises(UsageError, match="belongs to a store"):
        record_accuracy(load_bundle(root), "auto", ACCURACY)


def test_a_folder_that_may_not_be_written_is_refused(bundle: Bundle) -> None:
    # not below tmp_path, which is root's alone where root runs the tests
    with tempfile.TemporaryDirectory() as folder:
        root = Path(shutil.copytree(bundle.root, Path(folder) / "tiny"))
        Path(folder).chmod(0o755)
        root.chmod(0o555)
        user = os.geteuid()
        if user == 0:  # root may write everywhere: be somebody else for a moment
            os.seteuid(65534)
        try:
            with pytest.raises(UsageError, match="the folder cannot be written") as caught:
                record_accuracy(load_bundle(root), "auto", ACCURACY)
        finally:
            os.seteuid(user)
            root.chmod(0o755)
    assert caught.value.code == "bundle_read_only"
