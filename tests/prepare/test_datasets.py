"""Labelled pictures are opened as they are meant, or refused with file and line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_runtime.errors import UsageError
from edge_runtime.prepare.annotations import match_classes
from edge_runtime.prepare.datasets import open_dataset
from edge_runtime.prepare.samples import Boxes, Dataset
from edge_runtime.records.spec import Task
from tests.prepare.labelled import LABELS, coco_document, picture, read_image, write_coco, write_yolo

TWO = {"b.png": [(0, 4.0, 5.0, 10.0, 20.0)], "a.png": [(1, 0.0, 0.0, 40.0, 30.0), (2, 1.5, 2.5, 3.0, 4.0)]}


def open_it(
    path: Path, labels: tuple[str, ...] = LABELS, task: Task = "detect", **options: Any
) -> tuple[Dataset, tuple[str, ...]]:
    return open_dataset(path, labels, task, read_image=read_image, **options)


def truth(dataset: Dataset, index: int) -> Boxes:
    boxes = dataset.samples[index].truth
    assert isinstance(boxes, Boxes)
    return boxes


def refusal(path: Path, labels: tuple[str, ...] = LABELS, task: Task = "detect") -> UsageError:
    with pytest.raises(UsageError) as caught:
        open_it(path, labels, task)
    return caught.value


@pytest.mark.parametrize("folder", ["", "images", "val", "../images", "../val"])
@pytest.mark.parametrize("whole_folder", [False, True])
def test_coco_pictures_are_found_by_name_in_the_usual_folders(tmp_path: Path, folder: str, whole_folder: bool) -> None:
    root = tmp_path / "data" / "annotations"
    file = write_coco(root, coco_document(TWO), folder)
    dataset, notes = open_it(root if whole_folder else file)
    assert notes == ()
    assert [sample.name for sample in dataset.samples] == ["a.png", "b.png"]
    assert [sample.size for sample in dataset.samples] == [(40, 30)] * 2
    assert all(sample.path.is_file() for sample in dataset.samples)
    first = truth(dataset, 0)
    assert first.boxes.tolist() == [[0, 0, 40, 30], [1.5, 2.5, 4.5, 6.5]]
    assert first.class_ids.tolist() == [1, 2]
    assert first.area.tolist() == [1200, 12]
    assert not first.crowd.any()
    assert [array.dtype for array in (first.boxes, first.class_ids, first.crowd, first.area)] == [
        np.float32, np.int32, np.bool_, np.float32
    ]  # fmt: skip


def test_coco_crowds_and_areas_are_the_file_s(tmp_path: Path) -> None:
    document = coco_document(TWO)
    document["annotations"][0] |= {"iscrowd": 1, "area": 7.5}
    del document["annotations"][1]["area"], document["annotations"][1]["iscrowd"]
    dataset, _ = open_it(write_coco(tmp_path, document))
    assert (truth(dataset, 1).crowd.tolist(), truth(dataset, 1).area.tolist()) == ([True], [7.5])
    assert (truth(dataset, 0).crowd.tolist(), truth(dataset, 0).area.tolist()) == ([False, False], [1200, 12])


def test_ids_with_gaps_go_by_name(tmp_path: Path) -> None:
    names = {90: "Red", 13: "green ", 44: "blue", 1: "never used"}
    document = coco_document({"a.png": [(90, 1, 1, 5, 5), (44, 2, 2, 5, 5), (13, 3, 3, 5, 5)]}, names)
    dataset, notes = open_it(write_coco(tmp_path, document))
    assert truth(dataset, 0).class_ids.tolist() == [0, 2, 1]
    assert dataset.labels == LABELS
    assert notes == ()


def test_other_names_go_by_order_and_are_told(tmp_path: Path) -> None:
    document = coco_document({"a.png": [(7, 1, 1, 5, 5), (2, 2, 2, 5, 5)]}, {7: "azure", 2: "red", 5: "green"})
    dataset, notes = open_it(write_coco(tmp_path, document))
    assert truth(dataset, 0).class_ids.tolist() == [2, 0]
    assert notes == ("classes are taken in order of their ids; 1 of 3 names differ: azure is blue",)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({1: "red", 2: "azure"}, "no label for: azure; and they are 2 for 3 labels"),
        ({1: "green", 2: "red", 3: "azure"}, "no label for: azure; in order of their ids they do not fit"),
        ({1: "red", 2: "red", 3: "blue", 4: "x"}, "a name that occurs twice"),
    ],
)
def test_other_classes_are_refused(tmp_path: Path, names: dict[int, str], words: str) -> None:
    rows = [(number, 1.0, 1.0, 5.0, 5.0) for number in names if names[number] != "x"]
    error = refusal(write_coco(tmp_path, coco_document({"a.png": rows}, names)))
    assert error.code == "classes_differ"
    assert words in str(error)


def test_labels_without_data_are_told(tmp_path: Path) -> None:
    file = write_coco(tmp_path, coco_document({"a.png": [(4, 1, 1, 5, 5)]}, {4: "green"}))
    dataset, notes = open_it(file)
    assert truth(dataset, 0).class_ids.tolist() == [1]
    assert notes == ("2 of 3 labels do not occur in the data: red, blue",)


@given(
    st.lists(st.text(st.characters(categories=("L", "N")), min_size=1), min_size=1, unique_by=str.casefold), st.data()
)
def test_the_order_of_ids_means_nothing_where_names_are_known(labels: list[str], data: st.DataObject) -> None:
    names = dict(enumerate(data.draw(st.permutations(labels))))
    used = data.draw(st.sets(st.sampled_from(sorted(names)), min_size=1))
    places, _ = match_classes(names, used, labels, "data")
    assert {names[number]: labels[place] for number, place in places.items()} == {name: name for name in labels}


def test_what_is_harmless_in_coco_is_counted(tmp_path: Path) -> None:
    rows = [(0, -0.4, 0.0, 40.6, 30.0), (0, 30.0, 5.0, 15.0, 5.0), (1, 3.0, 3.0, 0.0, 4.0)]
    dataset, notes = open_it(write_coco(tmp_path, coco_document({"a.png": rows, "b.png": []})))
    assert truth(dataset, 0).boxes == pytest.approx(np.array([[-0.4, 0, 40.2, 30], [30, 5, 45, 10]]))
    assert truth(dataset, 1).boxes.shape == (0, 4)
    assert notes == (
        "1 pictures have no box: whatever is found there is wrong",
        "1 boxes have no area and are left out",
        "1 boxes lie over the edge of their picture by more than 1 px and are taken as they are",
    )


def _set(table: str, index: int, **values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: document[table][index].update(values)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: d.pop("categories"), "is no COCO file"),
        (lambda d: d.update(annotations=[]), "annotates no box at all"),
        (lambda d: d.update(images=[]), "images: names no picture"),
        (_set("images", 1, id=100), "images[1]: id 100 or file_name 'a.png' occurs twice"),
        (_set("images", 1, file_name="b.png"), "images[1]: id 101 or file_name 'b.png' occurs twice"),
        (_set("images", 0, width="40"), "images[0]: needs `width` and `height` in px, and they are '40' and 30"),
        (_set("images", 0, id=None), "images[0]: needs a whole number `id`"),
        (_set("images", 0, file_name="gone.png"), "images[0]: its picture 'gone.png' is not in"),
        (_set("categories", 1, id=0), "categories[1]: id 0 occurs twice"),
        (_set("categories", 1, name=5), "categories[1]: needs a whole number `id` and a `name`"),
        (_set("annotations", 1, id=1), "annotations[1] (id 1): the id 1 is no whole number or occurs twice"),
        (_set("annotations", 1, image_id=7), "annotations[1] (id 2): there is no picture with the id 7"),
        (_set("annotations", 1, category_id=7), "annotations[1] (id 2): there is no category with the id 7"),
        (_set("annotations", 2, bbox=[1, 2, 3]), "annotations[2] (id 3): bbox [1, 2, 3]"),
        (_set("annotations", 2, bbox=[1, 2, -3, 4]), "annotations[2] (id 3): bbox [1, 2, -3, 4]"),
        (_set("annotations", 2, bbox=[1, 2, float("nan"), 4]), "bbox [1, 2, nan, 4]"),
        (_set("annotations", 2, bbox=[1, 2, True, 4]), "bbox [1, 2, True, 4]"),
        (_set("annotations", 2, area="big"), "area 'big'"),
        (_set("annotations", 2, bbox=[40, 2, 3, 4]), "lies outside of its picture of 40x30 px"),
        (_set("annotations", 2, iscrowd=2), "iscrowd is 2"),
    ],
)
def test_faults_of_a_coco_file(tmp_path: Path, spoil: Callable[[dict[str, Any]], None], words: str) -> None:
    document = coco_document(TWO)
    file = write_coco(tmp_path, document)
    spoil(document)
    file.write_text(json.dumps(document))
    error = refusal(file)
    assert error.exit_code == 2
    assert str(file) in str(error)
    assert words in str(error)


def test_many_faults_are_told_at_once(tmp_path: Path) -> None:
    document = coco_document({"a.png": [(9, 1, 1, 5, 5)] * 14})
    lines = str(refusal(write_coco(tmp_path, document))).splitlines()
    assert len(lines) == 11
    assert "annotations[9] (id 10)" in lines[9]
    assert lines[10] == "and 4 more of such faults"


@pytest.mark.parametrize(
    ("content", "words"), [(b'{"images": [\n,]}', "bad.json:2: is no JSON"), (b"\xff\xfe\x00", "is no JSON")]
)
def test_what_is_no_json(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    assert words in str(refusal(tmp_path / "bad.json"))


def test_a_folder_with_two_jsons_is_not_guessed_at(tmp_path: Path) -> None:
    file = write_coco(tmp_path, coco_document(TWO))
    (tmp_path / "captions_val.json").write_text("{}")
    assert str(file) in str(refusal(tmp_path))


def test_pictures_that_are_nowhere(tmp_path: Path) -> None:
    file = tmp_path / "instances_val.json"
    file.write_text(json.dumps(coco_document(TWO)))
    assert "no picture such as 'b.png' was found in" in str(refusal(file))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 2), *[st.floats(0.01, 0.99)] * 4), min_size=1, max_size=5, unique=True),
)
def test_yolo_and_coco_say_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    width: int,
    height: int,
    rows: list[tuple[int, float, float, float, float]],
) -> None:
    root = tmp_path_factory.mktemp("data")
    text = "".join(f"{number} {cx!r} {cy!r} {w!r} {h!r}\n" for number, cx, cy, w, h in rows)
    pixels = [
        (number, (cx - w / 2) * width, (cy - h / 2) * height, w * width, h * height) for number, cx, cy, w, h in rows
    ]
    yolo, _ = open_it(write_yolo(root, {"a.png": text}, (width, height)))
    coco, _ = open_it(write_coco(root, coco_document({"a.png": pixels}, size=(width, height))))
    assert (yolo.kind, coco.kind) == ("yolo", "coco")
    assert truth(yolo, 0).boxes == pytest.approx(truth(coco, 0).boxes, abs=1e-4)
    assert truth(yolo, 0).area == pytest.approx(truth(coco, 0).area, rel=1e-3, abs=1e-3)
    assert truth(yolo, 0).class_ids.tolist() == truth(coco, 0).class_ids.tolist()
    assert yolo.samples[0].size == coco.samples[0].size == (width, height)


def test_what_is_harmless_in_yolo_is_counted(tmp_path: Path) -> None:
    root = write_yolo(tmp_path, {"a.png": "0 .5 .5 .2 .2\n\n0 .5 .5 .2 .2\n1 .5 .5 0 .2\n2 .9 .5 .3 .2\n", "b.png": ""})
    picture(root / "images" / "c.png")
    dataset, notes = open_it(root)
    assert [len(truth(dataset, index).class_ids) for index in range(3)] == [2, 0, 0]
    assert notes == (
        "2 pictures have no box: whatever is found there is wrong",
        "1 boxes have no area and are left out",
        "1 boxes stand twice in their file and count once",
        "1 boxes lie over the edge of their picture by more than 1% and are taken as they are",
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("0 .5 .5 .1", "has 4 values"),
        ("0 .1 .1 .2 .2 .3 .3", "outlines or predictions"),
        ("3 .5 .5 .1 .1", "there is no class '3' (classes are 0 to 2)"),
        ("-1 .5 .5 .1 .1", "there is no class '-1'"),
        ("red .5 .5 .1 .1", "there is no class 'red'"),
        ("0 .5 x .1 .1", "are no centre and size of a box"),
        ("0 .5 nan .1 .1", "are no centre and size of a box"),
        ("0 320 .5 .1 .1", "shares of the picture's width and height"),
        ("0 .5 .5 -.1 .1", "are no centre and size of a box"),
    ],
)
def test_faults_of_yolo_labels(tmp_path: Path, line: str, words: str) -> None:
    root = write_yolo(tmp_path, {"a.png": f"0 .5 .5 .2 .2\n{line}\n"})
    assert f"{root / 'labels' / 'a.txt'}:2: " in str(error := refusal(root))
    assert words in str(error)


def test_yolo_files_without_their_other_half(tmp_path: Path) -> None:
    root = write_yolo(tmp_path, {"a.png": "0 .5 .5 .2 .2"})
    (root / "labels" / "z.txt").write_text("")
    assert "there is no picture z.*" in str(refusal(root))
    (root / "labels" / "z.txt").unlink()
    (root / "labels" / "a.txt").write_text("")
    assert "annotates no box at all" in str(refusal(root))
    picture(root / "images" / "a.bmp")
    assert "has the same label file as" in str(refusal(root))
    (root / "labels" / "a.txt").write_bytes(b"\xff\xfe")
    assert "is no text" in str(refusal(root))


def test_yolo_folders_are_found_by_either_word(tmp_path: Path) -> None:
    for folder in ("images/val", "labels/val"):
        (tmp_path / folder).mkdir(parents=True)
    picture(tmp_path / "images" / "val" / "a.png")
    (tmp_path / "labels" / "val" / "a.txt").write_text("0 .5 .5 .2 .2")
    for folder in ("images/val", "labels/val"):
        dataset, _ = open_it(tmp_path / folder)
        assert [sample.name for sample in dataset.samples] == ["a.png"]
    assert "name one of its folders: val" in str(refusal(tmp_path))


def test_a_json_goes_before_labels_beside_it(tmp_path: Path) -> None:
    write_coco(tmp_path, coco_document(TWO))
    write_yolo(tmp_path, {"a.png": "0 .5 .5 .2 .2"})
    dataset, notes = open_it(tmp_path)
    assert dataset.kind == "coco"
    assert notes[-1] == f"instances_val.json is used, not the YOLO labels: for these, name {tmp_path / 'labels'}"
    dataset, _ = open_it(tmp_path / "labels")
    assert (dataset.kind, dataset.name) == ("yolo", tmp_path.name)


@pytest.mark.parametrize("place", ["labels", "."])
def test_yolo_classes_by_name(tmp_path: Path, place: str) -> None:
    root = write_yolo(tmp_path, {"a.png": "0 .5 .5 .2 .2\n2 .5 .5 .4 .2"})
    (root / place / "classes.txt").write_text("blue\ngreen\nred\n")
    dataset, _ = open_it(root)
    assert truth(dataset, 0).class_ids.tolist() == [2, 0]


def test_class_folders(tmp_path: Path) -> None:
    for name in ("BLUE/x.png", "0/y.png", "0/a.png"):
        picture(tmp_path / name)
    (tmp_path / "green").mkdir()
    dataset, notes = open_it(tmp_path, task="classify")
    assert [(sample.name, sample.truth) for sample in dataset.samples] == [
        ("0/a.png", 0), ("0/y.png", 0), ("BLUE/x.png", 2)
    ]  # fmt: skip
    assert (dataset.kind, notes) == ("folders", ("1 folders hold no picture",))


def test_a_word_that_is_label_and_number(tmp_path: Path) -> None:
    picture(tmp_path / "1" / "a.png")
    dataset, notes = open_it(tmp_path, ("1", "7", "3"), "classify")
    assert dataset.samples[0].truth == 0
    assert notes == ("'1' is taken as the label, not as the class of that number",)


def test_a_list_of_classes(tmp_path: Path) -> None:
    for name in ("b.png", "a a.png", "unlisted.png"):
        picture(tmp_path / name)
    (tmp_path / "labels.txt").write_text("\ufeffb.png  Red\n\na a.png\tdark blue\n")
    dataset, notes = open_it(tmp_path, ("red", "dark blue"), "classify")
    assert [(sample.name, sample.truth) for sample in dataset.samples] == [("a a.png", 1), ("b.png", 0)]
    assert notes == ("1 pictures have no line in labels.txt and are left out",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("a.png", "is not `FILE CLASS`"),
        ("gone.png red", "there is no picture 'gone.png'"),
        ("a.png red", "'a.png' has a line already"),
        ("b.png pink", "there is no class 'pink' among the model's 4 labels"),
        ("b.png 4", "there is no class '4'"),
        ("b.png crane", "the label 'crane' stands for the classes 1, 3: write a number"),
    ],
)
def test_faults_of_a_list_of_classes(tmp_path: Path, line: str, words: str) -> None:
    picture(tmp_path / "a.png")
    picture(tmp_path / "b.png")
    (tmp_path / "labels.txt").write_text(f"a.png 0\n{line}\n")
    error = str(refusal(tmp_path, ("red", "crane", "blue", "crane"), "classify"))
    assert f"{tmp_path / 'labels.txt'}:2: " in error
    assert words in error


def test_faults_of_class_folders(tmp_path: Path) -> None:
    assert "labels no picture at all" in str(refusal(tmp_path, task="classify"))
    picture(tmp_path / "red" / "a.png")
    picture(tmp_path / "0" / "a.png")
    picture(tmp_path / "n01440764" / "a.png")
    text = str(refusal(tmp_path, task="classify"))
    assert "is the same class as 0" in text
    assert "there is no class 'n01440764'" in text
    loose = tmp_path / "0"
    assert "holds 1 pictures without a class" in str(refusal(loose, task="classify"))


def test_a_dataset_of_the_other_kind(tmp_path: Path) -> None:
    file = write_coco(tmp_path, coco_document(TWO))
    assert "the model is a classifier" in str(refusal(file, task="classify"))
    assert "does not exist" in str(refusal(tmp_path / "nowhere"))
    assert "is no COCO json" in str(refusal(tmp_path / "images" / "a.png"))
    classes = tmp_path / "classes"
    picture(classes / "red" / "a.png")
    assert "the model is a detector" in str(refusal(classes))


def test_a_damaged_picture_is_named(tmp_path: Path) -> None:
    root = write_yolo(tmp_path, {"a.png": "0 .5 .5 .2 .2", "b.png": "0 .5 .5 .2 .2"})
    path = root / "images" / "b.png"
    path.write_bytes(path.read_bytes()[:40])
    error = refusal(root)
    assert (error.code, error.where) == ("picture_unreadable", str(path))


def test_a_sample_is_always_the_same(tmp_path: Path) -> None:
    for index in range(30):
        picture(tmp_path / "red" / f"{index:02}.png", (index, 0, 0))
    whole, _ = open_it(tmp_path, task="classify")
    drawn, notes = open_it(tmp_path, task="classify", images=7, workers=3)
    assert drawn == open_it(tmp_path, task="classify", images=7)[0]
    assert drawn != open_it(tmp_path, task="classify", images=7, seed=1)[0]
    assert len(drawn.samples) == 7
    assert [sample for sample in whole.samples if sample in drawn.samples] == list(drawn.samples)
    assert notes == ("a sample of 7 of 30 pictures, drawn with seed 0",)
    assert open_it(tmp_path, task="classify", images=30)[0] == whole


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_the_hash_is_as_documented(tmp_path: Path) -> None:
    texts = {"b.png": "0 .5 .5 .2 .2\n", "a.png": ""}
    root = write_yolo(tmp_path / "yolo", texts)
    lines = [
        f"{name}\0{_sha256((root / 'images' / name).read_bytes())}\0{_sha256(texts[name].encode())}\n"
        for name in sorted(texts)
    ]
    assert open_it(root)[0].sha256 == _sha256("".join(lines).encode())
    file = write_coco(tmp_path / "coco", coco_document({"a.png": [(0, 1, 2, 3, 4)]}))
    picture_hash = _sha256((file.parent / "images" / "a.png").read_bytes())
    annotation = _sha256(b'[["red",[1.0,2.0,3.0,4.0],12.0,0]]')
    assert open_it(file)[0].sha256 == _sha256(f"a.png\0{picture_hash}\0{annotation}\n".encode())


def test_the_hash_is_of_the_data_and_nothing_else(tmp_path: Path) -> None:
    document = coco_document(TWO)
    file = write_coco(tmp_path, document)
    before = open_it(file)[0].sha256
    for table in ("images", "categories"):
        document[table].reverse()
    file.write_text(json.dumps(document | {"info": {"year": 2030}}, indent=4))
    assert open_it(file, ("blue", "red", "green"), workers=2)[0].sha256 == before
    hashes = {before}
    document["annotations"][0]["bbox"][0] += 0.5
    file.write_text(json.dumps(document))
    hashes.add(open_it(file)[0].sha256)
    picture(tmp_path / "images" / "a.png", (91, 90, 90))
    hashes.add(open_it(file)[0].sha256)
    assert len(hashes) == 3
