"""What an ONNX file says of itself, and what is refused by that, by the device and by memory before a build begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_runtime.engine.tensorrt import preflight
from edge_runtime.engine.tensorrt.onnxfile import OnnxFile, read_onnx
from edge_runtime.engine.tensorrt.preflight import (
    BASE_BYTES,
    LEAST_WORKSPACE_BYTES,
    MODEL_TIMES,
    MOST_WORKSPACE_BYTES,
    RESERVE_BYTES,
    MiB,
    batches_of,
    check_dla,
    check_file,
    check_memory,
    estimate,
)
from edge_runtime.errors import BundleError, RefusedError
from edge_runtime.records.spec import InputSpec
from tests.conftest import ROOT
from tests.engine.graphs import SIDE, classifier, graph, node

SPEC = InputSpec(width=SIDE, height=SIDE, color="RGB", resize="stretch")
GB = 1024 * MiB


def read(data: bytes) -> OnnxFile:
    return read_onnx(data, "model.onnx")


def refused(file: OnnxFile, spec: InputSpec = SPEC) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        check_file(file, spec, "model.onnx")
    assert caught.value.where == "model.onnx"
    assert caught.value.remedy
    return caught.value


@pytest.mark.parametrize("size", [-1, 0])
def test_a_free_axis_that_an_exporter_writes_as_a_number(size: int) -> None:
    model = onnx.load_from_string(classifier())
    dim = model.graph.input[0].type.tensor_type.shape.dim[0]
    dim.Clear()
    dim.dim_value = size
    assert read(model.SerializeToString()).inputs[0].shape == ("", 3, SIDE, SIDE)


def quantised() -> bytes:
    scale = {"scale": np.float32(0.1), "zero": numpy_helper.from_array(np.int8(0), "zero")}
    nodes = [
        node("QuantizeLinear", ["x", "scale", "zero"], ["q"]),
        node("DequantizeLinear", ["q", "scale", "zero"], ["d"]),
        node("ReduceMean", ["d"], ["y"], axes=[2, 3], keepdims=0),
    ]
    return graph(nodes, initializers=scale)


def code_of(data: bytes) -> str | None:
    try:
        read(data)
    except BundleError as error:
        return error.code
    return None


# --- the file


def test_it_says_what_onnx_itself_says() -> None:
    path = next(ROOT.joinpath("engines", "centernet").glob("*.onnx"))
    file, model = read_onnx(path.read_bytes(), str(path)), onnx.load(path)
    weights = {each.name for each in model.graph.initializer}
    assert [each.name for each in file.inputs] == [each.name for each in model.graph.input if each.name not in weights]
    assert [(each.operator, each.name, each.domain) for each in file.nodes] == [
        (each.op_type, each.name, each.domain) for each in model.graph.node
    ]
    assert dict(file.opsets) == {each.domain: each.version for each in model.opset_import}
    assert file.external == []


def test_axes_are_sizes_or_names() -> None:
    (picture,) = read(classifier(shape=("batch", 3, SIDE, "width"))).inputs
    assert picture.shape == ("batch", 3, SIDE, "width")
    assert picture.told == f"x [batch, 3, {SIDE}, width]"
    (picture,) = read(classifier(shape=(None, 3, SIDE, SIDE))).inputs
    assert picture.shape == ("", 3, SIDE, SIDE)


def test_weights_are_no_inputs_and_graphs_inside_are_looked_at() -> None:
    weight = helper.make_tensor_value_info("w", TensorProto.FLOAT, [1])
    inner = helper.make_graph(
        [node("Strange", ["x"], ["inner"], name="deep")], "inner", [], [helper.make_tensor_value_info("inner", 1, [1])]
    )
    choice = helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
    data = graph([choice], initializers={"w": [1.5]}, more_inputs=[weight])
    file = read(data)
    assert [each.name for each in file.inputs] == ["x"]
    assert ("Strange", "deep") in [(each.operator, each.name) for each in file.nodes]


def test_external_weights_are_seen_wherever_they_are(tmp_path: Path) -> None:
    value = numpy_helper.from_array(np.ones(4, np.float32), "heavy")
    external = TensorProto()
    external.CopyFrom(value)
    external.ClearField("raw_data")
    external.data_location = TensorProto.EXTERNAL
    external.external_data.add(key="location", value="weights.bin")
    assert read(graph([node("Relu", ["x"], ["y"])], initializers={"heavy": external})).external == ["heavy"]
    constant = node("Constant", [], ["c"], value=external)
    file = read(graph([constant, node("Relu", ["x"], ["y"])]))
    assert file.external == ["heavy"]
    assert refused(file).code == "model_external_data"


@pytest.mark.parametrize("data", [b"", b"ptrt....", b"\x89PNG", b"\x3a\x05ab", b"\xff" * 40, b"\x08\x07"])
def test_what_is_no_onnx_is_refused(data: bytes) -> None:
    with pytest.raises(BundleError) as caught:
        read(data)
    assert caught.value.code == "model_invalid"


def test_no_cut_of_a_file_does_anything_but_read_or_refuse() -> None:
    whole = quantised()
    codes = {code_of(whole[:end]) for end in range(len(whole))}
    assert codes | {None} == {None, "model_invalid"}


# --- its axes


def test_what_can_be_built_passes() -> None:
    check_file(read(classifier()), SPEC, "model.onnx")
    check_file(read(classifier(shape=("n", 3, "h", "w"))), SPEC, "model.onnx")
    check_file(read(classifier(shape=(4, 3, SIDE, SIDE))), SPEC, "model.onnx")


def test_a_free_axis_that_nobody_has_a_size_for_is_named() -> None:
    more = helper.make_tensor_value_info("sizes", TensorProto.INT64, ["batch", 2])
    error = refused(read(classifier(more_inputs=[more])))
    assert error.code == "dynamic_axes"
    assert "input 'sizes', axis 0 ('batch')" in error.message
    unknown = helper.make_tensor_value_info("any", TensorProto.FLOAT, None)
    assert "input 'any', all of them" in refused(read(classifier(more_inputs=[unknown]))).message


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"shape": ("b", 3, SIDE, 64)}, "axis 3 is 64, and not 32"),
        ({"shape": ("b", 1, SIDE, SIDE)}, "axis 1 is 1, and not 3"),
        ({"kind": TensorProto.FLOAT16}, "of float16"),
        ({"more_inputs": [helper.make_tensor_value_info("z", TensorProto.FLOAT, [1])]}, "has 2 inputs"),
        ({"shape": (3, SIDE, SIDE)}, "has 1 inputs"),
    ],
)
def test_what_does_not_fit_the_bundle_is_refused_in_words(options: dict[str, Any], told: str) -> None:
    error = refused(read(classifier(**options)))
    assert error.code == "input_mismatch"
    assert told in error.message
    assert "one float32 input [batch, 3, 32, 32] is needed" in error.message


def test_batches_are_the_files_own_where_it_is_fixed_and_one_on_a_dla() -> None:
    assert batches_of(read(classifier()), 4, None) == (1, 2, 3, 4)
    assert batches_of(read(classifier()), 4, 0) == (4,)
    assert batches_of(read(classifier(shape=(2, 3, SIDE, SIDE))), 4, None) == (2,)


# --- DLA


@pytest.mark.parametrize("version", ["10.8.0", "10.16.2", "11.0.0", "11.4.0", "11.4.0.106"])
def test_a_version_without_dla_is_named(version: str) -> None:
    with pytest.raises(RefusedError, match=f"TensorRT {version} has no DLA") as caught:
        check_dla(read(classifier()), "fp16", version, "m")
    assert caught.value.code == "dla_unsupported"


@pytest.mark.parametrize("version", ["10.3.0", "10.7.0", "11.4.1", "11.5.0", "12.0.0"])
def test_a_version_with_dla_takes_fp16_alone(version: str) -> None:
    check_dla(read(classifier()), "fp16", version, "m")
    with pytest.raises(RefusedError, match="implicit scales"):
        check_dla(read(quantised()), "int8", version, "m")
    with pytest.raises(RefusedError, match="this variant is fp32"):
        check_dla(read(classifier()), "fp32", version, "m")


# --- memory


def test_scratch_memory_is_a_share_of_what_is_left_within_bounds() -> None:
    model = 10 * MiB
    base = BASE_BYTES + MODEL_TIMES * model
    left = 1000 * MiB
    assert estimate(model, base + RESERVE_BYTES + left).workspace_bytes == left // 2
    assert estimate(model, 64 * GB).workspace_bytes == MOST_WORKSPACE_BYTES
    assert estimate(model, 0).workspace_bytes == LEAST_WORKSPACE_BYTES
    assert estimate(model, 64 * GB, workspace_bytes=5 * MiB).workspace_bytes == 5 * MiB


def test_what_the_last_build_took_counts_more_than_the_estimate() -> None:
    known = estimate(10 * MiB, 8 * GB, peak_bytes=333 * MiB)
    assert known.base_bytes == 333 * MiB
    assert "as the last build of it did" in known.told
    assert "an estimate" in estimate(10 * MiB, 8 * GB).told


def test_too_little_memory_is_refused_with_the_numbers() -> None:
    wanted = estimate(100 * MiB, 900 * MiB)
    with pytest.raises(RefusedError) as caught:
        check_memory(wanted, 900 * MiB, "m")
    error = caught.value
    assert (error.code, error.retryable) == ("build_memory", True)
    for number in (wanted.base_bytes, wanted.workspace_bytes, RESERVE_BYTES, 900 * MiB):
        assert f"{number / MiB:.0f} MiB" in error.message
    check_memory(wanted, wanted.total_bytes + RESERVE_BYTES, "m")
    check_memory(wanted, None, "m")


def test_versions_are_compared_as_numbers() -> None:
    assert preflight.version_of("11.4.0.106") == (11, 4, 0)
    assert preflight.version_of("10.10.0") > preflight.version_of("10.3.0")
