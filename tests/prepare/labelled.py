"""Small labelled pictures in every form that is read, and the bundles to run over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.camera.av import decode_image
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels

LABELS = ("red", "green", "blue")
Row = tuple[int, float, float, float, float]
"""Class, then x, y, width and height in px."""


def read_image(path: Path) -> Pixels:
    return decode_image(path.read_bytes())


def picture(path: Path, color: Sequence[int] = (90, 90, 90), width: int = 40, height: int = 30) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode_png(np.full((height, width, 3), color, np.uint8)))
    return path


def coco_document(
    pictures: Mapping[str, Sequence[Row]], names: Mapping[int, str] | None = None, size: tuple[int, int] = (40, 30)
) -> dict[str, Any]:
    """As COCO writes it; `names`: category ids and names, in place of 0, 1, 2 for LABELS."""
    names = dict(enumerate(LABELS)) if names is None else names
    annotations: list[dict[str, Any]] = []
    for image_id, rows in enumerate(pictures.values(), start=100):
        for category_id, x, y, width, height in rows:
            box = {"bbox": [x, y, width, height], "area": width * height, "iscrowd": 0}
            annotations.append({"id": len(annotations) + 1, "image_id": image_id, "category_id": category_id, **box})
    return {
        "images": [
            {"id": image_id, "file_name": name, "width": size[0], "height": size[1]}
            for image_id, name in enumerate(pictures, start=100)
        ],
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names.items()],
    }


def write_coco(root: Path, document: Mapping[str, Any], folder: str = "images") -> Path:
    """The json, with its pictures in `folder`."""
    for image in document["images"]:
        picture(root / folder / image["file_name"], width=image["width"], height=image["height"])
    path = root / "instances_val.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def write_yolo(root: Path, pictures: Mapping[str, str], size: tuple[int, int] = (40, 30)) -> Path:
    """Label texts by the pictures' names."""
    (root / "labels").mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        picture(root / "images" / name, width=size[0], height=size[1])
        (root / "labels" / name).with_suffix(".txt").write_text(text)
    return root
