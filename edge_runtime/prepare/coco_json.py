"""Annotations in COCO's json: images, annotations with boxes [x, y, width, height] in px, categories."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from edge_runtime.prepare.annotations import Entry, Faults, Listing, invalid, match_classes
from edge_runtime.prepare.samples import Boxes

__all__ = ["read_coco"]

_OVER_PX = 1.0
"""By how much a box may lie over the picture's edge before it is counted: COCO's own lie over it by roundings."""


@dataclass(slots=True)
class _Image:
    name: str
    size: tuple[int, int]
    key: str
    annotations: list[Mapping[str, Any]] = field(default_factory=list)


def read_coco(file: Path, root: Path, labels: Sequence[str]) -> Listing:
    """The pictures of a COCO json with their boxes.

    Categories become the model's classes by name, whatever their ids (see `match_classes`). Pictures are looked
    for beside the file, in `images/`, and in a folder of the split's name (`val2017` for
    `instances_val2017.json`), there and one folder up. Boxes and `area` are taken as they are, also where
    they lie a little over the edge, so that figures can be compared with published ones; boxes without area
    are left out and counted in a note. Raises UsageError.
    """
    document = _load(file)
    faults = Faults()
    images = _images(document["images"], file, faults)
    faults.refuse()
    names = _categories(document["categories"], file, faults)
    faults.refuse()
    empty = over = 0
    seen: set[Any] = set()
    used: set[int] = set()
    for index, annotation in enumerate(document["annotations"]):
        key = f"annotations[{index}]"
        box = _box(annotation, images, names, key, seen, file, faults)
        if box is None:
            continue
        image = images[annotation["image_id"]]
        if box[2] == 0 or box[3] == 0:
            empty += 1
            continue
        beyond = max(-box[0], -box[1], box[0] + box[2] - image.size[0], box[1] + box[3] - image.size[1])
        over += beyond > _OVER_PX
        used.add(annotation["category_id"])
        image.annotations.append(annotation)
    faults.refuse()
    if not used:
        raise invalid(file, "annotates no box at all", "name the json of the boxes (instances_....json)")
    classes, notes = match_classes(names, used, labels, file)
    bare = sum(not image.annotations for image in images.values())
    for count, what in (
        (bare, "pictures have no box: whatever is found there is wrong"),
        (empty, "boxes have no area and are left out"),
        (over, f"boxes lie over the edge of their picture by more than {_OVER_PX:g} px and are taken as they are"),
    ):
        if count:
            notes.append(f"{count} {what}")
    folder = _picture_folder(file, images)
    entries = []
    for image in images.values():
        path = folder / image.name
        if not path.is_file():
            faults.add(file, f"its picture {image.name!r} is not in {folder}", key=image.key)
        entries.append(Entry(image.name, path, _canonical(image, names), _boxes(image, classes), image.size))
    faults.refuse()
    return Listing(root, "coco", entries, notes)


def _load(file: Path) -> dict[str, Any]:
    try:
        document = json.loads(file.read_bytes())
    except json.JSONDecodeError as error:
        raise invalid(Path(f"{file}:{error.lineno}"), f"is no JSON: {error.msg}", "export it again") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise invalid(file, f"is no JSON: {error}", "export it again") from None
    except OSError as error:
        raise invalid(file, f"cannot be read: {error.strerror}", "check name and rights") from None
    tables = ("images", "annotations", "categories")
    if not isinstance(document, dict) or not all(isinstance(document.get(table), list) for table in tables):
        raise invalid(
            file,
            "is no COCO file: it needs the lists images, annotations and categories",
            "name the json of the boxes (instances_....json), or for YOLO labels the folder `labels`",
        )
    return document


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _images(rows: list[Any], file: Path, faults: Faults) -> dict[int, _Image]:
    images: dict[int, _Image] = {}
    names: set[str] = set()
    for index, row in enumerate(rows):
        key = f"images[{index}]"
        row = row if isinstance(row, dict) else {}
        number, name, width, height = (row.get(word) for word in ("id", "file_name", "width", "height"))
        if not _whole(number) or not isinstance(name, str) or not name:
            faults.add(file, "needs a whole number `id` and a `file_name`", key=key)
        elif not _whole(width) or not _whole(height) or width < 1 or height < 1:
            faults.add(file, f"needs `width` and `height` in px, and they are {width!r} and {height!r}", key=key)
        elif number in images or name in names:
            faults.add(file, f"id {number} or file_name {name!r} occurs twice", key=key)
        else:
            images[number] = _Image(name, (width, height), key)
            names.add(name)
    if not rows:
        faults.add(file, "names no picture", key="images")
    return images


def _categories(rows: list[Any], file: Path, faults: Faults) -> dict[int, str]:
    names: dict[int, str] = {}
    for index, row in enumerate(rows):
        number, name = (row.get("id"), row.get("name")) if isinstance(row, dict) else (None, None)
        if not _whole(number) or not isinstance(name, str):
            faults.add(file, "needs a whole number `id` and a `name`", key=f"categories[{index}]")
        elif number in names:
            faults.add(file, f"id {number} occurs twice", key=f"categories[{index}]")
        else:
            names[number] = name
    return names


def _box(
    row: Any,
    images: Mapping[int, _Image],
    names: Mapping[int, str],
    key: str,
    seen: set[Any],
    file: Path,
    faults: Faults,
) -> list[float] | None:
    """The box of an annotation, x y width height in px; None where a fault was added."""
    row = row if isinstance(row, dict) else {}
    number, image_id, category_id = row.get("id"), row.get("image_id"), row.get("category_id")
    if number is not None:
        key = f"{key} (id {number})"
        if not _whole(number) or number in seen:
            faults.add(file, f"the id {number!r} is no whole number or occurs twice", key=key)
            return None
        seen.add(number)
    if not _whole(image_id) or image_id not in images:
        faults.add(file, f"there is no picture with the id {image_id!r}", key=key, remedy="images lacks it")
        return None
    if not _whole(category_id) or category_id not in names:
        faults.add(file, f"there is no category with the id {category_id!r}", key=key, remedy="categories lacks it")
        return None
    box, area, crowd = row.get("bbox"), row.get("area", 0.0), row.get("iscrowd", 0)
    numbers = [*box, area] if isinstance(box, list) else []
    if len(numbers) != 5 or not all(_number(value) for value in numbers) or min(numbers[2:]) < 0:
        faults.add(file, f"bbox {box!r}, area {area!r}: wanted are x, y, width, height in px and px^2", key=key)
        return None
    if crowd not in (0, 1):
        faults.add(file, f"iscrowd is {crowd!r}, not 0 or 1", key=key)
        return None
    assert isinstance(box, list)
    width, height = images[image_id].size
    if box[0] >= width or box[1] >= height or box[0] + box[2] < 0 or box[1] + box[3] < 0:
        faults.add(file, f"bbox {box} lies outside of its picture of {width}x{height} px", key=key)
        return None
    return [float(value) for value in box]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _boxes(image: _Image, classes: Mapping[int, int]) -> Boxes:
    rows = image.annotations
    boxes = np.array([row["bbox"] for row in rows], np.float64).reshape(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    return Boxes(
        boxes=boxes.astype(np.float32),
        class_ids=np.array([classes[row["category_id"]] for row in rows], np.int32),
        crowd=np.array([row.get("iscrowd", 0) for row in rows], np.bool_),
        area=np.array([_area(row) for row in rows], np.float32),
    )


def _area(row: Mapping[str, Any]) -> float:
    return float(row.get("area", row["bbox"][2] * row["bbox"][3]))


def _canonical(image: _Image, names: Mapping[int, str]) -> bytes:
    """The picture's annotations as one text, whatever the ids and the layout of the file."""
    rows = [
        [names[row["category_id"]], [float(side) for side in row["bbox"]], _area(row), int(row.get("iscrowd", 0))]
        for row in image.annotations
    ]
    return json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode()


def _picture_folder(file: Path, images: Mapping[int, _Image]) -> Path:
    """The folder that most of the first pictures are in. Raises UsageError where none has any."""
    split = file.stem.removeprefix("instances_")
    names = [image.name for image in list(images.values())[:50]]
    found: dict[Path, int] = defaultdict(int)
    for base in (file.parent, file.parent.parent):
        for folder in (base, base / "images", base / split, base / "images" / split):
            found[folder] = sum((folder / name).is_file() for name in names)
    best = max(found, key=lambda folder: found[folder])  # the first of equals
    if not found[best]:
        places = ", ".join(str(folder) for folder in found)
        raise invalid(file, f"no picture such as {names[0]!r} was found in {places}", "put the pictures into images/")
    return best
