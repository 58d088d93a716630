"""Labelled pictures on disk, opened in the model's own classes: COCO json, YOLO labels, labelled folders."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import CameraError, UsageError
from edge_runtime.prepare.annotations import Entry, Listing, RelativeBoxes, invalid
from edge_runtime.prepare.class_folders import read_classes
from edge_runtime.prepare.coco_json import read_coco
from edge_runtime.prepare.parallel import in_parallel
from edge_runtime.prepare.samples import Dataset, Sample
from edge_runtime.prepare.yolo_labels import find_yolo, read_yolo
from edge_runtime.records.spec import Task

__all__ = ["OnProgress", "open_dataset", "unreadable_picture"]

OnProgress = Callable[[int, int], None]
"""Called with how many are done, and of how many."""


def open_dataset(
    path: Path,
    labels: Sequence[str],
    task: Task,
    *,
    read_image: ReadImage,
    images: int | None = None,
    seed: int = 0,
    workers: int = 1,
    progress: OnProgress = lambda *_: None,
) -> tuple[Dataset, tuple[str, ...]]:
    """The labelled pictures at `path`, by name, and notes in plain words on what was assumed or left out.

    For "detect", `path` is a COCO json, a folder that holds exactly one (in it or in `annotations/`), or a folder
    with `images` and `labels` in YOLO's form (or that `labels` folder itself, where a json lies beside it). For
    "classify" it is a folder with `labels.txt` or with a folder per class. `labels`: the model's.

    `images`: only that many, drawn at random by `seed`. `workers`: threads that read the pictures. YOLO labels
    are shares of the picture's sides, so their pictures are decoded here once, through `read_image`; the sizes
    that a COCO file states go into the samples, for whoever decodes the picture to compare.

    `sha256` is that of one line per picture, by name: name, NUL, sha256 of the picture's file, NUL, sha256 of its
    annotation, newline (hashes as 64 hex digits). The annotation is, in UTF-8: for YOLO the label file (nothing,
    where there is none); for a classifier the word for the class; for COCO a compact JSON list of [category
    name, [x, y, width, height], area, iscrowd] in the file's order.

    Raises UsageError (code "dataset_invalid", "classes_differ" or "picture_unreadable") with file and line.
    """
    try:
        listing = _read(path, labels, task)
    except OSError as error:
        raise invalid(path, f"cannot be read: {error.strerror or error}", "check name and rights") from None
    entries = sorted(listing.entries, key=lambda entry: entry.name)
    notes = list(listing.notes)
    if images is not None and images < len(entries):
        notes.append(f"a sample of {images} of {len(entries)} pictures, drawn with seed {seed}")
        entries = [entries[index] for index in sorted(random.Random(seed).sample(range(len(entries)), images))]
    finished = in_parallel(
        [lambda index: _finish(entries[index], read_image)] * workers,
        len(entries),
        name="dataset",
        progress=lambda done: progress(done, len(entries)),
    )
    digest = hashlib.sha256()
    for entry, (_, picture) in zip(entries, finished, strict=True):
        annotation = hashlib.sha256(entry.annotation).hexdigest()
        digest.update(f"{entry.name}\0{picture}\0{annotation}\n".encode())
    samples = tuple(sample for sample, _ in finished)
    return Dataset(listing.root, listing.kind, tuple(labels), samples, digest.hexdigest()), tuple(notes)


def _finish(entry: Entry, read_image: ReadImage) -> tuple[Sample, str]:
    """The sample, and the sha256 of its picture's file."""
    try:
        digest = hashlib.sha256(entry.path.read_bytes()).hexdigest()
        if not isinstance(entry.truth, RelativeBoxes):
            return Sample(entry.name, entry.path, entry.truth, entry.size), digest
        pixels = read_image(entry.path)
    except (CameraError, OSError) as error:
        raise unreadable_picture(entry.path, error) from None
    size = (pixels.width, pixels.height)
    return Sample(entry.name, entry.path, entry.truth.scaled(*size), size), digest


def unreadable_picture(path: Path, error: CameraError | OSError) -> UsageError:
    """A picture that ends an evaluation: an accuracy over fewer pictures than stated would be untrue."""
    reason = error.message if isinstance(error, CameraError) else f"cannot be read: {error.strerror}"
    return UsageError(
        reason,
        code="picture_unreadable",
        where=str(path),
        remedy="put a whole one in its place, or take it and its annotation out of the data",
    )


def _read(path: Path, labels: Sequence[str], task: Task) -> Listing:
    if not path.exists():
        raise invalid(path, "does not exist", "name a COCO json, or a folder of labelled pictures")
    if task == "classify":
        if not path.is_dir():
            raise invalid(
                path, "the model is a classifier, and this is no folder", "name one with labels.txt, or one per class"
            )
        return read_classes(path, labels)
    if path.is_file():
        if path.suffix.lower() != ".json":
            raise invalid(path, "is no COCO json and no folder", _DETECTION)
        return read_coco(path, path, labels)
    found = [file for folder in (path, path / "annotations") for file in sorted(folder.glob("*.json"))]
    yolo = find_yolo(path)
    if len(found) > 1:
        raise invalid(path, f"holds {len(found)} json files", f"name one: {', '.join(str(file) for file in found)}")
    if found:
        listing = read_coco(found[0], path, labels)
        if yolo is None:
            return listing
        note = f"{found[0].name} is used, not the YOLO labels: for these, name {yolo[1]}"
        return Listing(listing.root, listing.kind, listing.entries, [*listing.notes, note])
    if yolo is not None:
        return read_yolo(*yolo, path.absolute().parent if path.name in ("images", "labels") else path, labels)
    raise invalid(path, "the model is a detector, and here are no annotated boxes", _DETECTION)


_DETECTION = "name a COCO json, or a folder with one, or one that holds `images` and `labels` in YOLO's form"
