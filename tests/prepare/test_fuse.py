"""`prepare fuse`: the graph with preprocessing inside, the bundle around it, and what is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from edge_runtime.app.evaluate import compare_bundles
from edge_runtime.cli.main import run
from edge_runtime.engine.bundle import Bundle, load_bundle
from edge_runtime.engine.onnxrt import load_engine, open_session
from edge_runtime.engine.probe import probe
from edge_runtime.errors import EXIT_DONE, EXIT_REFUSED, EXIT_USAGE, BundleError, RefusedError, UsageError
from edge_runtime.prepare import fuse_graph as graph_room
from edge_runtime.prepare.fuse import fuse_bundle
from edge_runtime.prepare.fuse_graph import fuse_graph
from edge_runtime.prepare.importer import import_model
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.spec import InputSpec, Pixel
from edge_runtime.vision.pixels import normalised, to_colours
from tests.conftest import ROOT
from tests.engine.graphs import SIDE, classifier, graph, node, write_bundle
from tests.prepare.exports import pictures, read_image

PIXELS: list[Pixel] = ["bgr24", "rgba", "nv12"]
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


def convolution(*, pads: Sequence[int] = (1, 1, 1, 1), bias: bool = True, twice: bool = False, **more: Any) -> bytes:
    """[b, 3, 32, 32] -> [b, 5]: a convolution of random weights, and its mean; `twice`: another one beside it."""
    rng = np.random.default_rng(4)
    weights: dict[str, Any] = {"w": rng.normal(0, 1, (5, 3, 3, 3)), "b": rng.normal(0, 1, 5)}
    inputs = ["x", "w", "b"] if bias else ["x", "w"]
    nodes = [node("Conv", inputs, ["c"], pads=list(pads), strides=[2, 2])]
    if twice:
        weights["v"] = rng.normal(0, 1, (5, 3, 1, 1))
        nodes += [node("Conv", ["x", "v"], ["d"], strides=[2, 2]), node("Add", ["c", "d"], ["e"])]
    # a square keeps apart what sums would not
    last = nodes[-1].output[0]
    nodes += [node("Mul", [last, last], ["s"]), node("ReduceMean", ["s"], ["y"], axes=[2, 3], keepdims=0)]
    return graph(nodes, outputs=[("y", ("batch", 5))], initializers=weights, **more)


def half_weights() -> bytes:
    """Weights kept as halves and cast where they are used."""
    made = onnx.load_model_from_string(convolution())
    for tensor in made.graph.initializer:
        if tensor.name == "w":
            values = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(values, "w_half"))
    made.graph.node.insert(0, onnx.helper.make_node("Cast", ["w_half"], ["w"], to=TensorProto.FLOAT))
    data: bytes = made.SerializeToString()
    return data


def sliced() -> bytes:
    """The picture goes into a slice, as YOLOX has it."""
    nodes = [
        node("Slice", ["x", "from", "to", "axis", "step"], ["s"]),
        node("ReduceMean", ["s"], ["y"], axes=[2, 3], keepdims=0),
    ]
    return graph(nodes, initializers={"from": [0], "to": [SIDE], "axis": [2], "step": [2]})


GRAPHS: Mapping[str, bytes] = {
    "no convolution": classifier(),
    "padded": convolution(),
    "not padded": convolution(pads=(0, 0, 0, 0)),
    "not padded, no bias": convolution(pads=(0, 0, 0, 0), bias=False),
    "padded, no bias": convolution(bias=False),
    "two convolutions": convolution(twice=True),
    "fixed batch": convolution(shape=(2, 3, SIDE, SIDE)),
    "free sides": convolution(shape=("batch", 3, "height", "width")),
    "opset 11": convolution(opset=11, ir=6),
    "halves": half_weights(),
    "sliced": sliced(),
}
FOLDED = {"padded", "not padded", "not padded, no bias", "padded, no bias", "two convolutions", "halves"}


def spec_of(pixel: Pixel, color: str = "RGB", *, plain: bool = False) -> InputSpec:
    if plain:
        return InputSpec(SIDE, SIDE, color=color, pixel=pixel)  # type: ignore[arg-type]
    return InputSpec(SIDE, SIDE, color=color, scale=0.9, mean=MEAN, std=STD, pixel=pixel)  # type: ignore[arg-type]


def says(model: bytes, batch: Any) -> Any:
    session = open_session(model, "model")
    (output,) = session.run(None, {session.get_inputs()[0].name: batch})
    return output


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("pixel", PIXELS)
@pytest.mark.parametrize("color", ["RGB", "BGR"])
def test_the_graph_computes_what_normalised_says(name: str, pixel: Pixel, color: str) -> None:
    for plain in (False, True):
        spec = spec_of(pixel, color, plain=plain)
        model = fuse_graph(GRAPHS[name], spec, "model")
        places = np.random.default_rng(6).integers(0, 256, (2, *spec.shape), np.uint8)
        wanted = says(GRAPHS[name], np.stack([normalised(place, spec) for place in places]))
        found = says(model, places)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * np.abs(wanted).max())


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("pixel", PIXELS)
def test_bytes_are_cast_at_once_and_shapes_are_plain(name: str, pixel: Pixel) -> None:
    """TensorRT does nothing else with uint8, and wants every axis but the batch's fixed."""
    spec = spec_of(pixel)
    made = onnx.load_model_from_string(fuse_graph(GRAPHS[name], spec, "model"))
    (picture,) = made.graph.input
    tensor = picture.type.tensor_type
    assert tensor.elem_type == TensorProto.UINT8
    assert [dim.dim_value for dim in tensor.shape.dim[1:]] == list(spec.shape)
    batch = tensor.shape.dim[0]
    assert batch.dim_value == 2 if name == "fixed batch" else batch.dim_param == "batch"
    assert [each.op_type for each in made.graph.node if picture.name in each.input] == ["Cast"]
    onnx.checker.check_model(made, full_check=True)
    names = [each.op_type for each in made.graph.node]
    if name in FOLDED:
        assert "Gather" not in names
        assert "fused/gain" not in {tensor.name for tensor in made.graph.initializer}
        shifted = any(each.name == "fused/shifted" for each in made.graph.node)
        assert shifted == ("not padded" not in name)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (convolution(opset=10, ir=5), "is of opset 10, and 11 or later"),
        (fuse_graph(classifier(), InputSpec(SIDE, SIDE, pixel="rgba"), "x"), "takes UINT8 with 4 axes"),
        (fuse_graph(classifier(), InputSpec(SIDE, SIDE, pixel="nv12"), "x"), "takes UINT8 with 3 axes"),
        (
            classifier(more_inputs=[onnx.helper.make_tensor_value_info("size", TensorProto.FLOAT, [2])]),
            "has 2 inputs",
        ),
    ],
)
def test_graphs_that_cannot_be_fused(model: bytes, words: str) -> None:
    with pytest.raises(BundleError, match=words) as caught:
        fuse_graph(model, InputSpec(SIDE, SIDE, pixel="bgr24"), "some.onnx")
    assert (caught.value.code, caught.value.where) == ("fuse_refused", "some.onnx")
    assert caught.value.remedy


# --- the bundle


@pytest.fixture
def source(tmp_path: Path) -> Bundle:
    (tmp_path / "m.onnx").write_bytes(convolution(shape=("batch", 3, "height", "width")))
    (tmp_path / "words.txt").write_text("red\ngreen\nblue\ngrey\nbrown\n")
    return import_model(
        tmp_path / "m.onnx",
        tmp_path / "plain",
        labels=tmp_path / "words.txt",
        layout="classify",
        sizes=[(64, 48), (32, 32)],
        color="RGB",
        resize="crop",
        scale=1 / 255,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
        licence="of the test",
        pictures=pictures(tmp_path / "golden", 3),
        read_image=read_image,
        accept=True,
    ).bundle


@pytest.mark.parametrize("pixel", PIXELS)
def test_a_bundle_of_fused_variants(source: Bundle, tmp_path: Path, pixel: Pixel) -> None:
    result = fuse_bundle(source, tmp_path / "out", pixel=pixel, read_image=read_image)
    bundle = load_bundle(tmp_path / "out")
    assert result.bundle.digest == bundle.digest
    assert bundle.variants == (f"fp32-64x48-{pixel}", f"fp32-32-{pixel}")
    assert bundle.labels == source.labels
    assert bundle.manifest.bundle == source.manifest.bundle
    assert (bundle.manifest.input, bundle.manifest.output) == (source.manifest.input, source.manifest.output)
    listed = set(bundle.manifest.files or {}) | {
        bundle.artefact(name, "onnxruntime").path.name for name in bundle.variants
    }
    there = {path.relative_to(bundle.root).as_posix() for path in bundle.root.rglob("*") if path.is_file()}
    assert listed == there - {"bundle.toml"}
    for name, parity in result.parity.items():
        assert parity.pictures == 3
        assert 0 < parity.deviation < parity.allowed
        assert any(name in note and "allowed" in note for note in result.notes)
        table = bundle.variant(name)
        assert table.accuracy is None
        assert table.files.tensorrt == table.files.onnxruntime
        assert [path.name[:3] for path in bundle.golden_inputs(name)] == ["01-", "02-", "03-"]
        engine = load_engine(bundle, name)
        assert engine.info.input.pixel == pixel
        assert engine.allowed_batches is None
        assert probe(engine, engine.open_lane(), bundle, name, read_image).pictures == 3
        engine.close()


def test_kept_variants_are_as_they_were(source: Bundle, tmp_path: Path) -> None:
    bundle = fuse_bundle(
        source, tmp_path / "out", pixel="rgba", variants=["fp32-32"], keep=True, read_image=read_image
    ).bundle
    assert bundle.variants == ("fp32-32-rgba", "fp32-64x48", "fp32-32")
    for name in source.variants:
        assert bundle.variant(name) == source.variant(name)
        assert bundle.read_golden_outputs(name) == source.read_golden_outputs(name)
        engine = load_engine(bundle, name)
        assert probe(engine, engine.open_lane(), bundle, name, read_image).pictures == 3
        engine.close()
    again = fuse_bundle(bundle, tmp_path / "more", pixel="nv12", keep=True, read_image=read_image).bundle
    assert again.variants == ("fp32-64x48-nv12", "fp32-32-nv12", "fp32-32-rgba", "fp32-64x48", "fp32-32")


def test_an_artefact_of_each_backend_is_fused(source: Bundle, tmp_path: Path) -> None:
    other = convolution(bias=False, shape=("batch", 3, 32, 32))
    (source.root / "trt.onnx").write_bytes(other)
    manifest = source.root / "bundle.toml"
    text = manifest.read_text()
    last = text.rindex("files.tensorrt")
    entry = f'files.tensorrt = {{path = "trt.onnx", sha256 = "{hashlib.sha256(other).hexdigest()}"}}'
    manifest.write_text(text[:last] + entry + text[text.index("\n", last) :])
    bundle = fuse_bundle(
        load_bundle(source.root), tmp_path / "out", pixel="bgr24", variants=["fp32-32"], read_image=read_image
    ).bundle
    spec = bundle.input_spec()
    place = np.random.default_rng(1).integers(0, 256, spec.shape, np.uint8)
    for backend, plain in (("onnxruntime", source.read_artefact("fp32-32", "onnxruntime")), ("tensorrt", other)):
        found = says(bundle.read_artefact("auto", backend), place[None])  # type: ignore[arg-type]
        np.testing.assert_allclose(found, says(plain, normalised(place, spec)[None]), rtol=1e-4)


@pytest.mark.parametrize("pixel", PIXELS)
def test_a_graph_that_computes_something_else_is_refused(
    source: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixel: Pixel
) -> None:
    """Channels the wrong way round: the model runs, and says something else."""
    swapped = {"bgr24": {"RGB": (0, 1, 2)}, "rgba": {"RGB": (2, 1, 0)}}
    matrix, shift = to_colours("BGR")
    monkeypatch.setattr(graph_room, "ORDER", swapped)
    monkeypatch.setattr(graph_room, "to_colours", lambda _: (matrix, shift))
    colours = tmp_path / "colours"
    coloured = pictures(colours, 1)
    picture = np.zeros((48, 64, 3), np.uint8)
    picture[:] = (230, 120, 20)
    coloured[0].write_bytes(encode_png(picture))
    with pytest.raises(RefusedError, match="does not say what the model says") as caught:
        fuse_bundle(source, tmp_path / "out", pixel=pixel, pictures=coloured, read_image=read_image)
    assert (caught.value.code, caught.value.exit_code) == ("parity", EXIT_REFUSED)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_fused_is_said(source: Bundle, tmp_path: Path) -> None:
    fused = fuse_bundle(source, tmp_path / "out", pixel="bgr24", read_image=read_image).bundle

    def refused(kind: type[UsageError | BundleError], words: str, bundle: Bundle, **more: Any) -> None:
        with pytest.raises(kind, match=words) as caught:
            fuse_bundle(bundle, tmp_path / "new", **{"pixel": "nv12", "read_image": read_image, **more})
        assert caught.value.remedy
        assert not (tmp_path / "new").exists()

    refused(BundleError, "has no float32 variant", fused)
    refused(UsageError, "take.? already|float32 is what", source, pixel="float32")
    both = fuse_bundle(source, tmp_path / "both", pixel="bgr24", keep=True, read_image=read_image).bundle
    refused(UsageError, "takes bgr24 already", both, variants=["fp32-32-bgr24"])
    refused(BundleError, "no variant 'int8'", source, variants=["int8"])
    with pytest.raises(UsageError, match="is a bundle already"):
        fuse_bundle(source, tmp_path / "out", pixel="bgr24", read_image=read_image)
    odd = write_bundle(tmp_path / "odd", classifier(shape=("batch", 3, 31, 32)), size=(32, 31))
    refused(UsageError, "32x31, and nv12 has one colour for 2 x 2", load_bundle(odd))
    bare = load_bundle(write_bundle(tmp_path / "bare", classifier()))
    refused(UsageError, "no golden pictures", bare)
    shown = pictures(tmp_path / "shown", 2)
    made = fuse_bundle(bare, tmp_path / "given", pixel="nv12", pictures=shown, read_image=read_image).bundle
    assert len(made.golden_inputs("auto")) == 2


def test_the_command(source: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["prepare", "fuse", str(source.root), str(tmp_path / "out"), "--pixel", "nv12"]
    assert run([*arguments, "--variant", "fp32-32", "--json"]) == EXIT_DONE
    document = json.loads(capsys.readouterr().out)
    assert document["digest"] == load_bundle(tmp_path / "out").digest
    assert document["parity"]["fp32-32-nv12"]["deviation"] < 1e-3
    assert run(arguments) == EXIT_USAGE
    assert "is a bundle already" in capsys.readouterr().err
    assert run([*arguments, "--overwrite"]) == EXIT_DONE
    captured = capsys.readouterr()
    assert "variants fp32-64x48-nv12, fp32-32-nv12" in captured.out
    assert "on the same pixels" in captured.err


def test_the_bundled_detector(tmp_path: Path) -> None:
    """Its heat map gives peaks to one neighbour or the other by the last bit: that is no difference."""
    source = load_bundle(ROOT / "engines/centernet")
    result = fuse_bundle(source, tmp_path / "out", pixel="bgr24", variants=["fp32-320"], read_image=read_image)
    (parity,) = result.parity.values()
    assert parity.sure > 0
    assert parity.lost == 0


@pytest.mark.full
@pytest.mark.assets
@pytest.mark.timeout(600)
@pytest.mark.parametrize("pixel", PIXELS)
def test_accuracy_is_that_of_the_model_within_noise(assets: Path, tmp_path: Path, pixel: Pixel) -> None:
    source = ROOT / "engines/centernet"
    fuse_bundle(load_bundle(source), tmp_path / "out", pixel=pixel, variants=["fp32-320"], read_image=read_image)
    compared = compare_bundles(
        (str(source), "fp32-320"),
        (str(tmp_path / "out"), f"fp32-320-{pixel}"),
        assets / "eval/coco_val128",
        images=64,
        progress=lambda *_: None,
    ).comparison
    assert abs(compared.overall.b - compared.overall.a) < (0.005 if pixel != "nv12" else 0.03)
