"""`prepare quantize` from end to end on real models: calibrated on one set of pictures, judged on another.

How fast INT8 is, is the processor's matter, and so is whether ONNX Runtime's artefact is worth writing. What is written
has to be right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest

from edge_runtime.app.evaluate import read_image
from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import load_bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import probe
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.quant_check import check_symmetric
from tests.e2e.daemon import DaemonProcess, write_config

MODELS: Mapping[str, tuple[str, str, float, dict[str, Any]]] = {
    "nanodet_m_320": ("coco_80_names.txt", "coco_val128", 0.2693 / 0.2712, {"layout": "nanodet"}),
    "efficientnet_lite0": (
        "imagenet_1000_names.json",
        "imagenet_100",
        0.99,
        {
            "layout": "classify", "color": "RGB", "resize": "crop", "scale": 1.0, "mean": (127.0,) * 3,
            "std": (128.0,) * 3, "short_side": 256, "sizes": [(224, 224)],
        },
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", MODELS)
def test_a_real_model(name: str, assets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels, data, _, options = MODELS[name]
    golden = sorted((assets / "eval/coco_val128/images").iterdir())[:2]
    import_model(
        assets / "models" / f"{name}.onnx", tmp_path / "float", labels=assets / "models" / labels, accept=True,
        pictures=golden, read_image=read_image, **options,
    )  # fmt: skip
    out = tmp_path / "out"
    code = run([
        "prepare", "quantize", str(tmp_path / "float"), str(out), "--calibrate", str(assets / "calib/coco_train128"),
        "--evaluate", str(assets / "eval" / data), "--accept", "point", "--json",
    ])  # fmt: skip
    document = json.loads(capsys.readouterr().out)
    outcomes = {each["family"]: each["outcome"] for each in document["artefacts"]}
    assert code == (EXIT_REFUSED if "refused" in outcomes.values() else EXIT_DONE)
    assert document["calibration"]["pictures"] == 128
    for artefact in document["artefacts"]:
        gate = artefact["gate"]
        if artefact["outcome"] == "accepted":
            assert gate["loss"] <= 0.01 + 1e-9
        if artefact["family"] == "onnxruntime":
            # other processors choose otherwise, and on none may what is chosen lose much
            assert gate is None or gate["candidate"] >= MODELS[name][2] * 0.98 * gate["float_value"]
    accepted = [each["name"] for each in document["artefacts"] if each["outcome"] == "accepted"]
    assert accepted
    bundle = load_bundle(out)
    for variant in accepted:
        table = bundle.variant(variant)
        assert table.prepared is not None
        assert table.prepared.gate.accept == "point"
        if table.files.tensorrt is not None:
            model = onnx.load_model_from_string(bundle.read_artefact(variant, "tensorrt"))
            assert check_symmetric(model) == []
        else:
            engine = load_engine(bundle, variant)
            report = probe(engine, engine.open_lane(), bundle, variant, read_image)
            engine.close()
            assert report.pictures == 2
    here = bundle.variants_for("onnxruntime")[0]
    config = write_config(tmp_path, model=f'name = "detector"\nbundle = "{out}"\nvariant = "auto"')
    with DaemonProcess(config) as daemon:
        daemon.wait_for("window 2:", 60.0)
        assert here in daemon.log
        assert daemon.stop()[0] == EXIT_DONE
    page = (out / "report/quantize.html").read_text()
    assert all(each in page for each in accepted)
