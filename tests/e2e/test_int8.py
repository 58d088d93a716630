"""What `prepare quantize` writes is a bundle like any other: the daemon takes its INT8 variant, and it is measured."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

from edge_runtime.app.evaluate import read_image
from edge_runtime.app.quantizing import quantize
from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import Bundle
from edge_runtime.errors import EXIT_DONE
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.quant_check import check_symmetric
from tests.e2e.daemon import DaemonProcess, write_config
from tests.prepare.labelled import LABELS
from tests.prepare.naive_search import NaiveSearch
from tests.prepare.test_half import colors_model, noisy

SYNTHETIC = 'name = "gate"\nurl = "synthetic:?width=64&height=64&fps=20"'


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    root = tmp_path_factory.mktemp("int8")
    street = [noisy(root / f"street/{index:02d}.png", index) for index in range(16)]
    for index in range(12):
        noisy(root / "colors" / LABELS[index % 3] / f"{index}.png", 3000 + index)
    (root / "m.onnx").write_bytes(colors_model())
    (root / "labels.txt").write_text("\n".join(LABELS))
    import_model(
        root / "m.onnx", root / "float", labels=root / "labels.txt", layout="classify", sizes=[(32, 32)],
        pictures=street[:2], read_image=read_image, scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), accept=True,
    )  # fmt: skip
    result = quantize(
        str(root / "float"), root / "out", calibrate=[str(root / "street")], evaluate=root / "colors", accept="point",
        max_loss=0.5, search=NaiveSearch(), resamples=100, progress=lambda *_: None,
    )  # fmt: skip
    assert result.bundle is not None
    return result.bundle


def test_evaluate_finds_the_accuracy_that_the_bundle_states(int8: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    colors = int8.root.parent / "colors"
    assert run(["prepare", "evaluate", str(int8.root), str(colors), "--variant", "int8-32", "--json"]) == EXIT_DONE
    told = json.loads(capsys.readouterr().out)
    stated = int8.variant("int8-32").accuracy
    assert stated is not None
    assert f'"value": {stated.value}' in json.dumps(told)


def test_tensorrt_s_artefact_is_one_that_it_takes(int8: Bundle) -> None:
    model = onnx.load_model_from_string(int8.read_artefact("int8-trt-32", "tensorrt"))
    onnx.checker.check_model(model, full_check=True)
    assert check_symmetric(model) == []
    assert next(each.version for each in model.opset_import if each.domain == "") >= 13
    before = onnx.load_model_from_string(int8.read_artefact("fp32-32", "onnxruntime"))
    for side in ("input", "output"):
        assert [each.name for each in getattr(model.graph, side)] == [each.name for each in getattr(before.graph, side)]


@pytest.mark.parametrize("variant", ["auto", "int8-32"])
@pytest.mark.full
def test_the_daemon_takes_it(int8: Bundle, tmp_path: Path, variant: str) -> None:
    model = f'name = "detector"\nbundle = "{int8.root}"\nvariant = "{variant}"'
    with DaemonProcess(write_config(tmp_path, camera=SYNTHETIC, model=model)) as daemon:
        daemon.wait_for("window 2:")
        assert "int8-32" in daemon.log
        assert daemon.stop()[0] == EXIT_DONE


@pytest.mark.full
@pytest.mark.assets
def test_a_real_model_s_int8_variant_is_run_and_measured(
    assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of nanodet in INT8, whatever that loses."""
    data = assets / "eval/coco_val128"
    import_model(
        assets / "models/nanodet_m_320.onnx", tmp_path / "float", labels=assets / "models/coco_80_names.txt",
        layout="nanodet", pictures=sorted((data / "images").iterdir())[:1], read_image=read_image, accept=True,
    )  # fmt: skip
    pictures = sorted((assets / "calib/coco_train128").rglob("*.jpg"))[:24]
    bundle = quantize(
        str(tmp_path / "float"), tmp_path / "out", calibrate=[str(each) for each in pictures], evaluate=None,
        accept="point", max_loss=1.0, search=NaiveSearch(), resamples=100, progress=lambda *_: None,
    ).bundle  # fmt: skip
    assert bundle is not None
    assert bundle.variants == ("int8-320", "fp32-320", "int8-trt-320")
    assert check_symmetric(onnx.load_model_from_string(bundle.read_artefact("int8-trt-320", "tensorrt"))) == []
    assert run(["prepare", "evaluate", str(bundle.root), str(data), "--variant", "int8-320", "--json"]) == EXIT_DONE
    assert "int8-320" in capsys.readouterr().out
    model = f'name = "detector"\nbundle = "{bundle.root}"\nvariant = "auto"'
    with DaemonProcess(write_config(tmp_path, camera=SYNTHETIC, model=model)) as daemon:
        daemon.wait_for("window 2:", 60.0)
        assert "int8-320" in daemon.log
        assert daemon.stop()[0] == EXIT_DONE
