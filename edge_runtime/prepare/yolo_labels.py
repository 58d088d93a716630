"""YOLO labels: a text file per picture, a line per box: `class cx cy w h`, in shares of the picture's sides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from edge_runtime.camera.media import list_images
from edge_runtime.prepare.annotations import Entry, Faults, Listing, RelativeBoxes, invalid, match_classes

__all__ = ["find_yolo", "read_yolo"]

CLASS_NAMES = "classes.txt"
_OVER = 0.01
"""By how much of the picture a box may lie over its edge before it is counted."""


def find_yolo(path: Path) -> tuple[Path, Path] | None:
    """The folders of pictures and of labels that `path` means, or None where it has no such pair.

    `path` is the folder that holds `images` and `labels`, or one of the two or below them (`images/val`): then
    the other is found by the other word, as Ultralytics does.
    """
    if (path / "images").is_dir() and (path / "labels").is_dir():
        return path / "images", path / "labels"
    parts = path.absolute().parts
    for here, there in (("images", "labels"), ("labels", "images")):
        if here not in parts:
            continue
        last = len(parts) - 1 - parts[::-1].index(here)
        other = Path(*parts[:last], there, *parts[last + 1 :])
        if path.is_dir() and other.is_dir():
            return (path, other) if here == "images" else (other, path)
    return None


def read_yolo(images: Path, folder: Path, root: Path, labels: Sequence[str]) -> Listing:
    """The pictures in `images` with their boxes in `folder`.

    A picture without a label file has no box, as Ultralytics reads it; a label file without a picture is a
    fault. Classes are indices of the model's labels; where `classes.txt` (a name a line) lies beside the label
    files or in the folder above, they go by those names. Equal lines count once. Raises UsageError.
    """
    faults = Faults()
    try:
        found = list_images(images)
        files = {path.stem: path for path in sorted(folder.glob("*.txt")) if path.name != CLASS_NAMES}
    except OSError as error:
        raise invalid(images, f"cannot be listed: {error.strerror}", "check the rights") from None
    if not found:
        nested = sorted(path.name for path in images.iterdir() if path.is_dir())
        remedy = f"name one of its folders: {', '.join(nested)}" if nested else "put .jpg, .png, .bmp or .webp there"
        raise invalid(images, "holds no picture", remedy)
    pictures = {path.stem: path for path in found}
    for path in found:
        if pictures[path.stem] != path:
            faults.add(path, f"has the same label file as {pictures[path.stem].name}", remedy="rename one of them")
    for stem, path in files.items():
        if stem not in pictures:
            faults.add(path, f"there is no picture {stem}.* in {images}", remedy="add it, or remove the labels")
    names = _class_names(folder)
    count = len(labels) if names is None else len(names)
    boxes: dict[str, RelativeBoxes] = {}
    raw: dict[str, bytes] = {}
    empty = over = repeated = 0
    for stem, path in files.items():
        rows: dict[tuple[float, ...], None] = {}
        raw[stem], lines = _lines(path, faults)
        for number, line in enumerate(lines, start=1):
            row = _row(line, count, path, number, faults)
            if row is None:
                continue
            _, cx, cy, width, height = row
            empty += width == 0 or height == 0
            repeated += row in rows
            if width == 0 or height == 0 or row in rows:
                continue
            rows[row] = None
            over += max(width / 2 - cx, height / 2 - cy, cx + width / 2 - 1, cy + height / 2 - 1) > _OVER
        boxes[stem] = _relative(list(rows))
    faults.refuse()
    used = {int(number) for each in boxes.values() for number in each.class_ids}
    if not used:
        raise invalid(folder, "annotates no box at all", "name the folder with the label files of these pictures")
    notes: list[str] = []
    if names is not None:
        classes, notes = match_classes(dict(enumerate(names)), used, labels, folder)
        boxes = {stem: _renumbered(each, classes) for stem, each in boxes.items()}
    bare = sum(not (stem in boxes and len(boxes[stem].class_ids)) for stem in pictures)
    for number, what in (
        (bare, "pictures have no box: whatever is found there is wrong"),
        (empty, "boxes have no area and are left out"),
        (repeated, "boxes stand twice in their file and count once"),
        (over, f"boxes lie over the edge of their picture by more than {_OVER:.0%} and are taken as they are"),
    ):
        if number:
            notes.append(f"{number} {what}")
    nothing = _relative([])
    entries = [Entry(path.name, path, raw.get(path.stem, b""), boxes.get(path.stem, nothing)) for path in found]
    return Listing(root, "yolo", entries, notes)


def _lines(path: Path, faults: Faults) -> tuple[bytes, list[str]]:
    try:
        data = path.read_bytes()
        return data, data.decode("utf-8-sig").splitlines()
    except OSError as error:
        faults.add(path, f"cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        faults.add(path, "is no text")
    return b"", []


def _class_names(folder: Path) -> list[str] | None:
    for path in (folder / CLASS_NAMES, folder.parent / CLASS_NAMES):
        if path.is_file():
            faults = Faults()
            _, lines = _lines(path, faults)
            faults.refuse()
            return [line.strip() for line in lines if line.strip()]
    return None


def _row(line: str, classes: int, path: Path, number: int, faults: Faults) -> tuple[float, ...] | None:
    """(class, cx, cy, width, height) of a line; None for an empty line and where a fault was added."""
    words = line.split()
    if not words:
        return None
    if len(words) != 5:
        hint = "these are outlines or predictions, not boxes" if len(words) > 5 else None
        faults.add(path, f"has {len(words)} values, and a box is `class cx cy w h`", line=number, remedy=hint)
        return None
    if not words[0].isdecimal() or int(words[0]) >= classes:
        remedy = f"classes are 0 to {classes - 1}"
        faults.add(path, f"there is no class {words[0]!r}", line=number, remedy=remedy)
        return None
    try:
        sides = [float(word) for word in words[1:]]
    except ValueError:
        sides = [math.nan]
    if not all(0.0 <= side <= 1.0 for side in sides):
        remedy = "they are shares of the picture's width and height, 0 to 1"
        faults.add(path, f"{' '.join(words[1:])} are no centre and size of a box", line=number, remedy=remedy)
        return None
    return (int(words[0]), *sides)


def _relative(rows: Sequence[tuple[float, ...]]) -> RelativeBoxes:
    table = np.array(rows, np.float64).reshape(-1, 5)
    half = table[:, 3:] / 2
    boxes = np.concatenate((table[:, 1:3] - half, table[:, 1:3] + half), axis=1)
    return RelativeBoxes(boxes, table[:, 0].astype(np.int32))


def _renumbered(boxes: RelativeBoxes, classes: dict[int, int]) -> RelativeBoxes:
    return RelativeBoxes(boxes.boxes, np.array([classes[int(number)] for number in boxes.class_ids], np.int32))
