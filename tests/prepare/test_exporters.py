"""What the exporters' files say is taken, with its source; what strangers write there is never run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto

from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare.answers import parse_value, told
from edge_runtime.prepare.exporters import read_literal, read_stated
from edge_runtime.prepare.importer import ImportResult, import_model
from edge_runtime.prepare.onnx_file import OnnxFile, read_onnx
from edge_runtime.prepare.suggest import Question
from tests.engine.graphs import classifier, graph, node
from tests.prepare.exports import CELLS, INT64, ULTRALYTICS, YOLOV8, YOLOX, answers, tagged, with_input


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    path = tmp_path / "labels.txt"
    path.write_text("person\nbicycle\ncar\n")
    return path


def written(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "m.onnx"
    path.write_bytes(data)
    return path


def read(tmp_path: Path, data: bytes) -> OnnxFile:
    return read_onnx(written(tmp_path, data))


def sources(result: ImportResult) -> dict[str, tuple[Any, str | None]]:
    return {one.key: (one.value, one.source) for one in result.settings}


def test_ultralytics_says_everything(tmp_path: Path) -> None:
    result = import_model(written(tmp_path, tagged(answers(YOLOV8, dynamic=True), ULTRALYTICS)), tmp_path / "out")
    assert sources(result) == {
        "size": (((64, 64),), "stated"),
        "layout": ("yolov8", "stated"),
        "color": ("RGB", "usual"),
        "resize": ("letterbox-center", "usual"),
        "pad": (114, "usual"),
        "scale": (1 / 255, "usual"),
        "mean": ((0.0, 0.0, 0.0), "usual"),
        "std": ((1.0, 1.0, 1.0), "usual"),
        "labels": ("3 names", "stated"),
    }
    assert result.bundle.labels == ("person", "bicycle", "traffic light (it's red)")
    assert result.bundle.manifest.bundle.licence.startswith("AGPL-3.0")
    notes = "\n".join(result.notes)
    assert "stated (the metadata is Ultralytics's" in notes
    assert "scale = 1/255" in notes


@pytest.mark.parametrize(
    ("change", "shape", "layout", "resize"),
    [
        ({"args": "{'nms': True}"}, (300, 6), "yolov10", "letterbox-center"),
        ({"end2end": "True", "description": "Ultralytics YOLO26n model"}, (300, 6), "yolov10", "letterbox-center"),
        ({"description": "Ultralytics YOLOv10n model"}, (300, 6), "yolov10", "letterbox-center"),
        ({"description": "Ultralytics rtdetr-l model"}, (300, 7), "rtdetr", "stretch"),
        ({"description": "Ultralytics YOLO11n model"}, (7, CELLS), "yolov8", "letterbox-center"),
    ],
)
def test_ultralytics_other_networks(
    tmp_path: Path, change: dict[str, str], shape: tuple[int, ...], layout: str, resize: str
) -> None:
    model = tagged(answers({"output0": np.zeros(shape, np.float32)}), {**ULTRALYTICS, **change})
    table = import_model(written(tmp_path, model), tmp_path / "out").bundle.manifest
    assert (table.output.layout, table.input.resize, table.input.scale) == (layout, resize, 1 / 255)


def test_ultralytics_classifiers_lose_their_softmax(tmp_path: Path) -> None:
    mean = node("ReduceMean", ["x"], ["m"], axes=[2, 3], keepdims=0)
    model = graph([mean, node("Softmax", ["m"], ["y"], axis=1)])
    result = import_model(
        written(tmp_path, tagged(model, {**ULTRALYTICS, "task": "classify", "imgsz": "[32, 32]"})), tmp_path / "out"
    )
    assert sources(result)["layout"] == ("classify", "stated")
    assert sources(result)["scale"] == (1 / 255, "usual")
    assert result.bundle.manifest.input.resize == "crop"
    kept = read_onnx(tmp_path / "out" / "model.onnx")
    assert kept.operators == {"ReduceMean"}
    assert any("softmax" in note for note in result.notes)


def test_yolov5_and_names_are_hints_only(tmp_path: Path, labels: Path) -> None:
    model = tagged(
        answers({"output": np.zeros((CELLS * 3, 8), np.float32)}), {"stride": "32", "names": "['a','b','c']"}
    )
    path = written(tmp_path, model)
    with pytest.raises(UsageError, match=r"YOLOv5's export\.py") as caught:
        import_model(path, tmp_path / "out")
    assert caught.value.code == "settings_open"
    assert "--layout yolov5 --color RGB --resize letterbox-center --pad 114 --scale 1/255" in str(caught.value.remedy)
    assert import_model(path, tmp_path / "out", accept=True).bundle.labels == ("a", "b", "c")
    path = written(tmp_path, tagged(answers(YOLOX)))
    with pytest.raises(UsageError, match=r"YOLOX's export_onnx\.py"):
        import_model(path, tmp_path / "x", labels=labels)
    result = import_model(path, tmp_path / "x", labels=labels, layout="yolox")
    assert sources(result)["color"] == ("BGR", "usual")
    assert any("0.1.0" in note for note in result.notes)


def test_what_has_no_convention_must_be_said(tmp_path: Path, labels: Path) -> None:
    path = written(tmp_path, classifier())
    with pytest.raises(UsageError, match="mean: no suggestion") as caught:
        import_model(path, tmp_path / "out", labels=labels, accept=True)
    assert "--mean ... --std ..." in str(caught.value.remedy)
    assert "--yes" not in str(caught.value.remedy)
    result = import_model(
        path, tmp_path / "out", labels=labels, layout="classify", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    assert sources(result)["scale"] == (1 / 255, "usual")


def test_questions(tmp_path: Path, labels: Path) -> None:
    asked: list[Question] = []
    replies = {"size": ["48y", "64"], "color": ["blue", "BGR"], "scale": ["x", "1/255"], "mean": ["0 0", "0 0 0"]}

    def ask(question: Question) -> str:
        asked.append(question)
        return replies[question.key].pop(0) if question.key in replies else ""

    path = written(tmp_path, tagged(answers(YOLOX, dynamic=True)))
    result = import_model(path, tmp_path / "out", labels=labels, ask=ask)
    table = result.bundle.manifest
    assert (table.input.color, table.input.scale, table.input.resize) == ("BGR", 1 / 255, "letterbox-topleft")
    assert sources(result)["layout"] == ("yolox", "usual")
    assert sources(result)["scale"] == (1 / 255, "given")
    first = [question for question in asked if question.problem is None]
    assert [question.key for question in first] == ["size", "layout", "color", "resize", "pad", "scale", "mean", "std"]
    assert [question.problem for question in asked if question.key == "color"] == [None, "'blue' is none of RGB, BGR"]
    assert next(question.default for question in asked if question.key == "std") == "1 1 1"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (with_input(answers(YOLOX), "orig_target_sizes", INT64, (1, 2)), "RT-DETR's exporter"),
        (with_input(answers(YOLOX), "im_shape", TensorProto.FLOAT, (1, 2)), "PaddleDetection"),
        (graph([node("EfficientNMS_TRT", ["x"], ["y"])]), "EfficientNMS_TRT, a TensorRT plugin"),
        (graph([node("Cast", ["x"], ["y"], to=1)], kind=TensorProto.UINT8), "uint8 pixels"),
        (graph([node("Cast", ["x"], ["y"], to=1)], kind=TensorProto.FLOAT16), "float16 input"),
        (graph([node("Identity", ["x"], ["y"])], shape=("batch", 32, 32, 3)), "inputs-as-nchw"),
        (tagged(answers(YOLOV8), {**ULTRALYTICS, "task": "pose"}), "the task 'pose'"),
    ],
)
def test_what_no_setting_could_read(tmp_path: Path, labels: Path, data: bytes, words: str) -> None:
    with pytest.raises(BundleError) as caught:
        import_model(written(tmp_path, data), tmp_path / "out", labels=labels, accept=True)
    assert words in str(caught.value)
    assert caught.value.remedy
    assert not (tmp_path / "out").exists()


def test_given_labels_win_and_must_agree_in_number(tmp_path: Path, labels: Path) -> None:
    path = written(tmp_path, tagged(answers(YOLOV8), ULTRALYTICS))
    result = import_model(path, tmp_path / "out", labels=labels)
    assert result.bundle.labels == ("person", "bicycle", "car")
    assert any("class 2 is 'car'" in note for note in result.notes)
    labels.write_text("person\nbicycle\n")
    with pytest.raises(BundleError) as caught:
        import_model(path, tmp_path / "two", labels=labels)
    assert caught.value.code == "labels_contradict"
    with pytest.raises(UsageError, match="--labels FILE"):
        import_model(written(tmp_path, answers(YOLOX)), tmp_path / "two")


HOSTILE = [
    "__import__('os').system('touch hacked')",
    "{0: 'a', 2: 'b'}",
    "{0: 1}",
    "{'a': 'b'}",
    "{[]: 1}",
    "{}",
    "",
    "None",
    "7",
    "'person'",
    "[" * 100_000,
    "[" * 5000 + "]" * 5000,
    "-" * 100_000 + "1",
    "1" + "+1" * 100_000,
    "a" + ".a" * 100_000,
    "f" + "()" * 100_000,
    "1" + "[0]" * 100_000,
    "'" * 200_001,
    "'\\" * 100_000,
    "9" * 10_000,
    "['" + "a" * 300_000 + "']",
    "lambda: 0",
    "[x for x in 'ab']",
    "{0: 'a', 1: 'b'",
    "\0",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_metadata_is_ignored_with_a_note(tmp_path: Path, text: str) -> None:
    stated = read_stated(read(tmp_path, tagged(answers(YOLOV8), {**ULTRALYTICS, "names": text, "imgsz": text})), "m")
    assert stated.labels is None
    assert stated.exporter == "Ultralytics"
    assert any("names were ignored" in note for note in stated.notes)
    if text != "7":
        assert stated.size is None
        assert all(len(note) < 300 and note.isprintable() for note in stated.notes)


def test_labels_are_one_printable_line(tmp_path: Path) -> None:
    names = repr({0: "a\nb", 1: "\x1b[31mred", 2: ""})
    stated = read_stated(read(tmp_path, tagged(answers(YOLOV8), {**ULTRALYTICS, "names": names})), "m")
    assert stated.labels == ("a b", "[31mred", "2")


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.integers(0, 99) | st.text(max_size=5), inner),
    max_leaves=12,
)


@given(LITERALS)
def test_literals_are_read_back(value: Any) -> None:
    assert read_literal(repr(value)) == value


@given(st.text(alphabet="[]{}()'\"\\,:-+.1aN \n", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        value = read_literal(text)
    except ValueError:
        return
    assert isinstance(value, bool | int | float | str | list | tuple | dict | set | None)


@given(st.floats(1e-6, 1e6))
def test_a_value_shown_is_typed_back(value: float) -> None:
    assert parse_value("scale", told(value)) == value
    assert parse_value("mean", told((value, 0.0, 1 / 255))) == (value, 0.0, 1 / 255)


def test_a_picture_that_is_none(tmp_path: Path, labels: Path) -> None:
    path = written(tmp_path, answers(YOLOX))
    for image in (labels, tmp_path / "nowhere.png"):
        with pytest.raises(EdgeError) as caught:
            import_model(
                path,
                tmp_path / "out",
                labels=labels,
                layout="yolox",
                images=[image],
                read_image=lambda name: (_ for _ in ()).throw(OSError(2, f"no {name}")),
            )
        assert caught.value.code == "image_unreadable"
        assert caught.value.where == str(image)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["labels.txt", "m.onnx"]
