"""`prepare quantize`: what is done with what the search found, from calibration pictures to the bundle and its page."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_runtime.app import quantizing
from edge_runtime.app.evaluate import read_image
from edge_runtime.app.quantizing import camera_pictures, default_out_dir, default_work, quantize
from edge_runtime.app.work_folder import work_in
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.manifest import AccuracyTable, parse_manifest
from edge_runtime.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    EXIT_USAGE,
    BundleError,
    CameraError,
    EdgeError,
    RefusedError,
    UsageError,
)
from edge_runtime.prepare import report
from edge_runtime.prepare.fuse import fuse_bundle
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.quantize import int8_name
from edge_runtime.prepare.quantize_records import QuantizeResult, Searched
from edge_runtime.prepare.record import record_accuracy
from edge_runtime.source_url import redact_url
from tests.prepare.labelled import LABELS
from tests.prepare.naive_search import NaiveSearch
from tests.prepare.test_half import bundle_of, colors_model, noisy

PICTURES = 40


@pytest.fixture(scope="module")
def street(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("calibration") / "street"
    for index in range(PICTURES):
        noisy(root / f"{index:02d}.png", index)
    return root


@pytest.fixture(scope="module")
def colors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled pictures, others than those."""
    root = tmp_path_factory.mktemp("labelled") / "colors"
    for index in range(120):
        noisy(root / LABELS[index % 3] / f"{index:03d}.png", 3000 + index)
    return root


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, street: Path) -> Path:
    """A float bundle with golden pictures."""
    root = tmp_path_factory.mktemp("float")
    (root / "m.onnx").write_bytes(colors_model())
    (root / "labels.txt").write_text("\n".join(LABELS))
    import_model(
        root / "m.onnx", root / "tiny", labels=root / "labels.txt", layout="classify", sizes=[(32, 32)],
        pictures=[street / "00.png", street / "01.png"], read_image=read_image, scale=1.0, mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0), accept=True,
    )  # fmt: skip
    return root / "tiny"


@pytest.fixture(autouse=True, scope="module")
def drawn_once() -> Iterator[None]:
    """The plots are real ones, and the same ones are not drawn again for every test."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("pareto_plot", "sensitivity_plot"):
            patch.setattr(report, name, cache(getattr(report, name)))
        yield


def quantized(
    source: Path, out_dir: Path, street: Path | str, colors: Path | None = None, **options: Any
) -> QuantizeResult:
    return quantize(
        str(source),
        out_dir,
        calibrate=[str(street)],
        evaluate=colors,
        progress=lambda *_: None,
        **{"resamples": 200, "search": NaiveSearch(), "max_loss": 0.05, **options},
    )


@pytest.fixture(scope="module")
def done(tiny: Path, street: Path, colors: Path, tmp_path_factory: pytest.TempPathFactory) -> QuantizeResult:
    return quantized(tiny, tmp_path_factory.mktemp("made") / "out", street, colors)


def test_a_bundle_with_int8_for_both_backends(done: QuantizeResult, tiny: Path, street: Path) -> None:
    assert done.bundle is not None
    assert done.code is None
    bundle = load_bundle(done.bundle.root)
    assert bundle == done.bundle
    assert bundle.variants == ("int8-32", "fp32-32", "int8-trt-32")
    assert bundle.variants_for("onnxruntime") == ("int8-32", "fp32-32")
    assert bundle.variants_for("tensorrt") == ("fp32-32", "int8-trt-32")
    assert bundle.variant("fp32-32") == load_bundle(tiny).variant("fp32-32")
    for name in ("int8-32", "int8-trt-32"):
        made = bundle.variant(name)
        assert (made.precision, made.size) == ("int8", (32, 32))
        assert made.golden is not None
        assert made.golden.outputs == f"golden/{name}.npz"
        assert made.accuracy is not None
        prepared = made.prepared
        assert prepared is not None
        assert (prepared.of, prepared.method, prepared.calibration_images) == ("fp32-32", "minmax", PICTURES)
        assert prepared.gate.basis == "labels"
        assert prepared.gate.value == pytest.approx(made.accuracy.value, abs=1e-4)
        assert prepared.gate.loss_high is not None
        assert prepared.gate.loss_high <= 0.05
        assert (prepared.gate.pictures, prepared.gate.accept) == (120, "bound")
    speeds = [bundle.variant(name).prepared for name in ("int8-32", "int8-trt-32")]
    assert speeds[0] is not None
    assert speeds[0].speed is not None
    assert (speeds[0].speed.ratio, speeds[0].speed.low, speeds[0].speed.high) == (2.0, 1.8, 2.2)
    assert speeds[1] is not None
    assert speeds[1].speed is None
    assert any("40 pictures only: 500 to 1000" in note for note in done.notes)
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in street.iterdir()]
    told = hashlib.sha256("".join(f"{each}\n" for each in sorted(digests)).encode()).hexdigest()
    assert done.calibration.sha256 == told == speeds[0].calibration_sha256
    assert not done.calibration.unlike
    assert not default_work(bundle.root).exists()


def test_the_bundle_s_digest_stands_for_the_page(done: QuantizeResult) -> None:
    assert done.bundle is not None
    prepared = done.bundle.variant("int8-32").prepared
    assert prepared is not None
    assert prepared.report is not None
    assert done.report == done.bundle.root / prepared.report.path
    assert (done.bundle.manifest.files or {})[prepared.report.path] == prepared.report.sha256
    page = done.report.read_text()
    assert "src=" not in page
    assert not re.search(r'href="http|url\(http|<script', page)
    assert "loud &lt;b&gt;" in page
    assert "loud <b>" not in page


@pytest.mark.full
def test_the_same_inputs_give_the_same_bundle(
    done: QuantizeResult, tiny: Path, street: Path, colors: Path, tmp_path: Path
) -> None:
    assert done.bundle is not None
    again = quantized(tiny, tmp_path / "again", street, colors)
    assert again.bundle is not None
    assert again.bundle.digest == done.bundle.digest


def test_what_is_prepared_outlives_other_preparations(done: QuantizeResult, tmp_path: Path, street: Path) -> None:
    """Recording an accuracy, and what keeps variants as they are."""
    assert done.bundle is not None
    fused = fuse_bundle(
        done.bundle, tmp_path / "fused", pixel="bgr24", variants=["fp32-32"], keep=True, read_image=read_image
    ).bundle
    assert fused.variant("int8-32").prepared == done.bundle.variant("int8-32").prepared
    accuracy = AccuracyTable(metric="top1", value=0.5, data="x", images=3, backend="onnxruntime")
    recorded = record_accuracy(fused, "int8-32", accuracy)
    assert recorded.variant("int8-32").prepared == done.bundle.variant("int8-32").prepared
    assert recorded.variant("int8-32").accuracy == accuracy
    assert (recorded.root / "report/quantize.html").read_bytes() == done.report.read_bytes()


def test_a_manifest_whose_report_is_not_listed_is_refused(done: QuantizeResult) -> None:
    assert done.bundle is not None
    text = (done.bundle.root / "bundle.toml").read_text()
    unlisted = re.sub(r'^"report/quantize.html" = .*\n', "", text, flags=re.MULTILINE)
    assert unlisted != text
    with pytest.raises(BundleError, match="not listed under"):
        parse_manifest(unlisted, "bundle.toml")
    with pytest.raises(BundleError, match="'likes' is not one of the known words"):
        parse_manifest(text.replace('basis = "labels"', 'basis = "likes"'), "bundle.toml")


def test_float_is_better_here_and_the_device_gets_its_artefact(tiny: Path, street: Path, tmp_path: Path) -> None:
    """Without labels, every fourth picture judges; ten are no data for a bound."""
    search = NaiveSearch(speed=None)
    result = quantized(tiny, tmp_path / "out", street, search=search, accept="point")
    assert [each.outcome for each in result.artefacts] == ["nothing to gain", "accepted"]
    assert result.bundle is not None
    assert result.bundle.variants == ("fp32-32", "int8-trt-32")
    assert result.code is None
    prepared = result.bundle.variant("int8-trt-32").prepared
    assert prepared is not None
    assert (prepared.gate.basis, prepared.gate.accept, prepared.gate.loss_high) == ("agreement", "point", None)
    assert search.seen == [("onnxruntime", 30), ("tensorrt", 30)]
    alone = quantized(tiny, tmp_path / "no", street, search=search, accept="point", families=("onnxruntime",))
    assert (alone.bundle, alone.code) == (None, "nothing_to_gain")
    assert not (tmp_path / "no").exists()
    assert alone.report == tmp_path / "no.quantize.html"
    assert "nothing: keep float" in alone.report.read_text()


def test_a_candidate_that_loses_is_refused_with_numbers(street: Path, colors: Path, tmp_path: Path) -> None:
    """Beside 3000 INT8 has steps of 12, and what is compared differs by less than one: ONNX Runtime's family has the
    outputs in INT8 too."""
    bundle_of(tmp_path / "tiny", colors_model(offset=3000.0))
    result = quantized(tmp_path / "tiny", tmp_path / "out", street, colors)
    (refused,) = result.refused
    assert refused.gate is not None
    assert (refused.name, refused.gate.verdict, result.code) == ("int8", "loses too much", "loses_too_much")
    assert refused.gate.loss > 0.3
    assert "worst layers: loud" in refused.told()
    assert result.bundle is not None
    assert result.bundle.variants == ("fp32", "int8-trt")


@pytest.mark.full
def test_with_all_refused_there_is_a_page_and_no_bundle(street: Path, colors: Path, tmp_path: Path) -> None:
    bundle_of(tmp_path / "tiny", colors_model(offset=3000.0))
    alone = quantized(tmp_path / "tiny", tmp_path / "no", street, colors, families=("onnxruntime",))
    assert (alone.bundle, alone.code) == (None, "loses_too_much")
    assert "loses too much" in alone.report.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["no.quantize.html", "tiny"]


@pytest.mark.full
def test_too_few_pictures_are_no_proof(tiny: Path, street: Path, tmp_path: Path) -> None:
    result = quantized(tiny, tmp_path / "out", street)
    assert (result.bundle, result.code) == (None, "not_enough_data")
    assert "32 are the least" in result.refused[0].told()


def test_what_was_calibrated_with_does_not_judge(tiny: Path, colors: Path, tmp_path: Path) -> None:
    search = NaiveSearch()
    with pytest.raises(UsageError, match="40 of its 120 pictures were calibrated with"):
        quantized(tiny, tmp_path / "out", colors / "red", colors, search=search)
    assert not search.seen


@pytest.mark.full
def test_dark_pictures_look_unlike(tiny: Path, colors: Path, tmp_path: Path) -> None:
    from edge_runtime.prepare.png import encode_png

    (tmp_path / "night").mkdir()
    for index in range(PICTURES):
        dark = np.random.default_rng(index).integers(0, 25, (24, 24, 3)).astype(np.uint8)
        (tmp_path / "night" / f"{index}.png").write_bytes(encode_png(dark))
    result = quantized(tiny, tmp_path / "out", tmp_path / "night", colors, max_loss=1.0)
    assert "brightness" in {each.feature for each in result.calibration.unlike}
    assert any("look unlike those" in note for note in result.notes)


def test_an_interrupted_run_goes_on(
    tiny: Path, street: Path, colors: Path, tmp_path: Path, done: QuantizeResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, out, street, colors, search=NaiveSearch(interrupt=True))
    assert (default_work(out) / "fp32-32/seen.npz").is_file()
    with pytest.raises(UsageError, match="work of another run"):
        quantized(tiny, out, street / "00.png", colors)
    (street / "more.png").write_bytes(b"")
    with pytest.raises(UsageError, match="work of another run"):
        quantized(tiny, out, street, colors)
    (street / "more.png").unlink()
    before = (street / "00.png").read_bytes()
    (street / "00.png").write_bytes(before[:-1])
    with pytest.raises(UsageError, match="has changed since the calibration began"):
        quantized(tiny, out, street, colors)
    (street / "00.png").write_bytes(before)
    shown = []
    from edge_runtime.prepare.quant_meter import ActivationMeter

    monkeypatch.setattr(ActivationMeter, "show", lambda *_: shown.append(1))
    result = quantized(tiny, out, street, colors)
    assert not shown
    assert result.bundle is not None
    assert done.bundle is not None
    assert result.bundle.digest == done.bundle.digest
    assert not default_work(out).exists()


def test_a_work_folder_with_anything_else_in_it_is_left_alone(tiny: Path, street: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="is no work folder"):
        quantized(tiny, tmp_path / "out", street, work=tmp_path / "mine")
    assert (tmp_path / "mine/letter.txt").read_text() == "dear"
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, tmp_path / "out", street, search=NaiveSearch(interrupt=True), work=tmp_path / "own")
    assert (tmp_path / "own/fp32-32/seen.npz").is_file()


def test_what_cannot_be_quantised(tiny: Path, street: Path, done: QuantizeResult, tmp_path: Path) -> None:
    assert done.bundle is not None
    with pytest.raises(UsageError, match="has a variant 'int8-32' already"):
        quantized(done.bundle.root, tmp_path / "out", street)
    with pytest.raises(UsageError, match="is int8 already"):
        quantized(done.bundle.root, tmp_path / "out", street, variants=["int8-32"])
    with pytest.raises(CameraError, match="nope: is not known"):
        quantized(tiny, tmp_path / "out", "nope:0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no pictures"):
        quantized(tiny, tmp_path / "out", tmp_path / "empty")
    with pytest.raises(UsageError, match="does not exist"):
        quantized(tiny, tmp_path / "out", tmp_path / "nowhere")
    with pytest.raises(UsageError, match="1 pictures are too few"):
        quantized(tiny, tmp_path / "out", street / "00.png")
    with pytest.raises(UsageError, match="is no name of a new folder"):
        quantized(tiny, tmp_path / "..", street)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(UsageError, match="exists and is no bundle"):
        quantized(tiny, tmp_path / "mine", street)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "mine"]


def test_a_damaged_picture_is_named(tiny: Path, street: Path, tmp_path: Path) -> None:
    (tmp_path / "some").mkdir()
    for index in range(8):
        (tmp_path / f"some/{index}.png").write_bytes((street / f"{index:02d}.png").read_bytes())
    (tmp_path / "some/1.png").write_bytes((street / "01.png").read_bytes()[:60])
    with pytest.raises(UsageError) as caught:
        quantized(tiny, tmp_path / "out", tmp_path / "some")
    assert (caught.value.code, caught.value.where) == ("picture_unreadable", str(tmp_path / "some/1.png"))
    assert not default_work(tmp_path / "out").exists()


@pytest.mark.full
def test_grey_pictures_are_pictures(tiny: Path, tmp_path: Path) -> None:
    import cv2

    (tmp_path / "grey").mkdir()
    rng = np.random.default_rng(0)
    for index in range(8):
        assert cv2.imwrite(str(tmp_path / f"grey/{index}.png"), rng.integers(0, 255, (24, 24)).astype(np.uint8))
    result = quantized(tiny, tmp_path / "out", tmp_path / "grey", accept="point", max_loss=1.0)
    assert result.calibration.images == 6
    assert result.bundle is not None


@pytest.mark.full
def test_two_variants_of_one_name_are_not_made(street: Path, tmp_path: Path) -> None:
    root = bundle_of(tmp_path / "two", colors_model()).root
    text = (root / "bundle.toml").read_text()
    table = text[text.index("[[variant]]") :].partition("\n\n")[0]
    search = NaiveSearch()
    assert 'name = "fp32"' in text
    one = text.replace('name = "fp32"', 'name = "fp32-32"')
    (root / "bundle.toml").write_text(one + "\n" + table.replace('name = "fp32"', 'name = "32"'))
    with pytest.raises(UsageError, match="two variants would be made as 'int8-32'"):
        quantized(root, tmp_path / "out", street, search=search)
    assert not search.seen
    result = quantized(root, tmp_path / "out", street, accept="point", variants=["32", "32"])
    assert result.bundle is not None
    assert result.bundle.variants == ("fp32-32", "int8-32", "32", "int8-trt-32")


def test_what_the_search_may_lose_is_asked_for_apart(tiny: Path, street: Path, tmp_path: Path) -> None:
    search = NaiveSearch(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, tmp_path / "a", street, search=search)
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, tmp_path / "b", street, search=search, search_loss=0.2, seed=5)
    assert search.asked == [(0.05, 0), (0.2, 5)]


def test_what_tensorrt_would_not_take_is_not_judged(tiny: Path, street: Path, tmp_path: Path) -> None:
    @dataclass
    class Wrong(NaiveSearch):
        """ONNX Runtime's artefact in the place of TensorRT's."""

        def __call__(self, model: Any, meter: Any, **options: Any) -> Searched:
            return super().__call__(model, meter, **{**options, "family": "onnxruntime"})

    with pytest.raises(RefusedError, match="TensorRT would not take it") as caught:
        quantized(tiny, tmp_path / "out", street, search=Wrong(), accept="point", families=("tensorrt",))
    assert (caught.value.code, caught.value.where) == ("not_symmetric", "int8-trt-32")
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_said_and_the_same_command_goes_on(
    tiny: Path, street: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(EdgeError, match="No space left on device") as caught:
            quantized(tiny, tmp_path / "out", street, accept="point")
    assert caught.value.code == "write_failed"
    assert default_work(tmp_path / "out").is_dir()
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, tmp_path / "out", street, search=NaiveSearch(interrupt=True))


def test_a_folder_is_worked_in_by_one_run(tmp_path: Path) -> None:
    with work_in(tmp_path / "work", "a"):
        with pytest.raises(UsageError, match="another run works in it"), work_in(tmp_path / "work", "a"):
            pass
        with pytest.raises(UsageError, match="holds the work of another run"), work_in(tmp_path / "work", "b"):
            pass
    with work_in(tmp_path / "work", "a"):
        pass
    (tmp_path / "work/run.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be used"), work_in(tmp_path / "work", "a"):
        pass
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/lock").touch()
    with work_in(tmp_path / "begun", "a"):
        assert (tmp_path / "begun/run.json").is_file()


@pytest.mark.full
def test_frames_of_a_clip_are_kept_as_files(tiny: Path, tmp_path: Path) -> None:
    search = NaiveSearch(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        quantized(tiny, tmp_path / "out", "bundled:vtest", every=100, search=search)
    frames = sorted((default_work(tmp_path / "out") / "pictures").glob("*.png"))
    assert len(frames) == 8
    assert search.seen == [("onnxruntime", 6)]


class _Camera(BaseHTTPRequestHandler):
    """MJPEG over HTTP, as cameras send it, until nobody listens."""

    frames: Sequence[bytes] = ()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        try:
            for index in range(10_000):
                data = self.frames[index % len(self.frames)]
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(data)}\r\n\r\n"
                self.wfile.write(head.encode() + data + b"\r\n")
        except OSError:
            pass

    def log_message(self, *args: Any) -> None:
        pass


def test_a_camera_is_bounded_and_its_password_stays_out(street: Path) -> None:
    _Camera.frames = [_jpeg(street / f"{index:02d}.png") for index in range(4)]
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Camera)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://user:secret@127.0.0.1:{server.server_port}/stream"
        found = list(quantizing._pictures([url], None, 1, 200.0, 5, None))
        assert [picture.name.rpartition("#")[2] for picture in found] == ["0", "1", "2", "3", "4"]
        assert not any("secret" in picture.name for picture in found)
        assert found[0].read().width == 24
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    with pytest.raises(CameraError) as caught:
        list(camera_pictures(open_camera(CameraOptions(name="a", url=url)), redact_url(url), open_s=0.2))
    assert "secret" not in str(caught.value)


def test_cameras_of_a_configuration_by_name(tiny: Path, street: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        '[[model]]\nname = "m"\nbundle = "bundled:centernet"\n'
        '[[camera]]\nname = "door"\nurl = "synthetic:?width=64&height=64"\nmodel = "m"\n'
    )
    search = NaiveSearch(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        quantize(
            str(tiny), tmp_path / "out", calibrate=["door", str(street)], evaluate=None, config=config, frames=8,
            fps=200.0, search=search, progress=lambda *_: None,
        )  # fmt: skip
    assert search.seen == [("onnxruntime", (8 + PICTURES) * 3 // 4)]
    assert len(list((default_work(tmp_path / "out") / "pictures").glob("*.png"))) == 8
    with pytest.raises(UsageError, match="is no file, and no camera of") as caught:
        quantized(tiny, tmp_path / "no", "window", config=config)
    assert caught.value.remedy == "cameras are door"


def _jpeg(path: Path) -> bytes:
    import cv2

    _, data = cv2.imencode(".jpg", cv2.imread(str(path)))
    return bytes(data)


def test_where_it_goes(tmp_path: Path) -> None:
    assert default_out_dir("bundled:centernet") == Path("centernet-int8")
    assert default_out_dir(str(tmp_path / "b")) == tmp_path / "b-int8"
    assert default_out_dir(str(tmp_path / "b/bundle.toml")) == tmp_path / "b-int8"
    assert [int8_name(name, "tensorrt") for name in ("fp32", "fp32-416")] == ["int8-trt", "int8-trt-416"]
    assert [int8_name(name, "onnxruntime") for name in ("fp32-416", "large")] == ["int8-416", "int8-large"]


def command(*arguments: object) -> int:
    return run(["prepare", "quantize", *map(str, arguments)])


def test_the_command(
    tiny: Path, street: Path, colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    real = quantizing.quantize
    search = NaiveSearch()
    monkeypatch.setattr(quantizing, "quantize", lambda *a, **k: real(*a, **k, search=search))
    usual = (tiny, tmp_path / "out", "--calibrate", street, "--resamples", "200", "--max-loss", "0.05")
    assert command(*usual, "--evaluate", colors, "--json") == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert document["variants"] == ["int8-32", "fp32-32", "int8-trt-32"]
    assert [each["outcome"] for each in document["artefacts"]] == ["accepted", "accepted"]
    assert document["artefacts"][0]["gate"]["passed"] is True
    assert document["calibration"]["pictures"] == PICTURES
    assert command(*usual, "--evaluate", colors) == EXIT_USAGE
    assert "is a bundle already" in capsys.readouterr().err
    assert command(*usual, "--overwrite") == EXIT_REFUSED
    told = capsys.readouterr()
    assert "not enough data" in told.out
    assert "everything: loss" in told.out
    assert "report: " in told.out
    assert "judge by about 32 pictures (128 of --calibrate, of which every fourth judges)" in told.err
    assert "--accept point" in told.err
    assert load_bundle(tmp_path / "out").variants == ("int8-32", "fp32-32", "int8-trt-32")
    assert command(*usual, "--overwrite", "--json", "--family", "tensorrt") == EXIT_REFUSED
    refused = json.loads(capsys.readouterr().out)
    assert (refused["bundle"], refused["code"]) == (None, "not_enough_data")
    assert [each["name"] for each in refused["artefacts"]] == ["int8-trt-32"]
    search.interrupt = True
    monkeypatch.setattr("sys.argv", ["edge-runtime", "prepare", "quantize", "tiny"])
    assert command(*usual, "--overwrite") == EXIT_INTERRUPTED
    assert "this goes on: edge-runtime prepare quantize tiny" in capsys.readouterr().err
    assert default_work(tmp_path / "out").is_dir()


_CHILD = """
import signal, sys
from functools import partial
from pathlib import Path
from threading import Event
from edge_runtime.app import quantizing
from edge_runtime.cli.main import run
from tests.prepare.naive_search import NaiveSearch

# a test run that was put into the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

class Slow(NaiveSearch):
    def __call__(self, *a, **k):
        print("searching", flush=True)
        Event().wait()

search = Slow() if sys.argv[1] == "slow" else NaiveSearch()
del sys.argv[1]
quantizing.quantize = partial(quantizing.quantize, search=search)
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.full
def test_ctrl_c_ends_the_process_with_130_and_the_same_command_goes_on(
    tiny: Path, street: Path, tmp_path: Path
) -> None:
    arguments = ["prepare", "quantize", str(tiny), str(tmp_path / "out"), "--calibrate", str(street)]
    arguments += ["--accept", "point", "--max-loss", "0.5", "--json"]
    program = [sys.executable, "-c", _CHILD]
    with subprocess.Popen([*program, "slow", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"searching\n"
            child.send_signal(signal.SIGINT)
            _, told = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == EXIT_INTERRUPTED
    assert b"Traceback" not in told
    again = told.decode().rpartition("this goes on: ")[2].split()
    assert again == ["edge-runtime", *arguments]
    assert (default_work(tmp_path / "out") / "fp32-32/seen.npz").is_file()
    done = subprocess.run([*program, "through", *arguments], capture_output=True, check=False, timeout=60)
    assert done.returncode == EXIT_DONE, done.stderr.decode()
    assert json.loads(done.stdout)["variants"] == ["int8-32", "fp32-32", "int8-trt-32"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
