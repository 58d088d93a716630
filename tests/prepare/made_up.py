"""Made-up labelled pictures and predictions, and COCO's own figures for them."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from edge_runtime.prepare.samples import Boxes, Dataset, Predictions, Sample
from edge_runtime.records.frames import Classification, Detections, Output


def boxes(rows: ArrayLike, class_ids: ArrayLike, *, crowd: ArrayLike | None = None) -> Boxes:
    """Truth from rows of x1 y1 x2 y2; the area is the box's own."""
    corners = np.asarray(rows, np.float32).reshape(-1, 4)
    sides = corners[:, 2:] - corners[:, :2]
    return Boxes(
        corners,
        np.asarray(class_ids, np.int32),
        np.zeros(len(corners), np.bool_) if crowd is None else np.asarray(crowd, np.bool_),
        sides.prod(axis=1),
    )


def detections(rows: ArrayLike, scores: ArrayLike, class_ids: ArrayLike) -> Detections:
    """Best score first, whatever the order given."""
    values = np.asarray(scores, np.float32)
    order = np.argsort(-values, kind="stable")
    return Detections(
        np.asarray(rows, np.float32).reshape(-1, 4)[order], values[order], np.asarray(class_ids, np.int32)[order]
    )


def classification(class_ids: ArrayLike, scores: ArrayLike) -> Classification:
    return Classification(np.asarray(scores, np.float32), np.asarray(class_ids, np.int32))


def dataset(truths: Sequence[Boxes | int], labels: Sequence[str] = ("red", "green", "blue")) -> Dataset:
    samples = tuple(Sample(f"{i:03d}.jpg", Path(f"{i:03d}.jpg"), truth) for i, truth in enumerate(truths))
    return Dataset(Path("made-up"), "made-up", tuple(labels), samples, "0" * 64)


def predictions(outputs: Sequence[Output], *, variant: str = "fp32-416", score_threshold: float = 0.01) -> Predictions:
    return Predictions(
        bundle="made-up",
        digest="1" * 64,
        engine="2" * 64,
        variant=variant,
        backend="onnxruntime",
        scaler="swscale",
        score_threshold=score_threshold,
        outputs=tuple(outputs),
        inference_ms=(1.0,) * len(outputs),
    )


def coco_val128(assets: Path) -> Dataset:
    content = json.loads((assets / "eval/coco_val128/instances_val128.json").read_text())
    categories = sorted(content["categories"], key=lambda category: int(category["id"]))
    place = {category["id"]: i for i, category in enumerate(categories)}
    truths = []
    for image in content["images"]:
        rows = [row for row in content["annotations"] if row["image_id"] == image["id"]]
        corners = np.array([row["bbox"] for row in rows], np.float32).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        truths.append(
            Boxes(
                corners,
                np.array([place[row["category_id"]] for row in rows], np.int32),
                np.array([row["iscrowd"] for row in rows], np.bool_),
                np.array([row["area"] for row in rows], np.float32),
            )
        )
    return dataset(truths, [category["name"] for category in categories])


def perturbed(
    data: Dataset, seed: int, *, jitter: float = 0.15, miss: float = 0.2, false: float = 3.0, steps: int | None = None
) -> list[Detections]:
    """Predictions made of the truth: sides moved by `jitter` of the box's own, a share `miss` left out, `false` wrong
    boxes a picture on the average. Scores are rounded to `steps` steps, as an 8-bit output's are, so that many tie.
    """
    rng = np.random.default_rng(seed)
    found = []
    for sample in data.samples:
        truth = sample.truth
        assert isinstance(truth, Boxes)
        kept = rng.random(len(truth.boxes)) >= miss
        sides = np.tile(truth.boxes[kept, 2:] - truth.boxes[kept, :2], 2)
        near = truth.boxes[kept] + (rng.standard_normal(sides.shape) * jitter * sides).astype(np.float32)
        wrong = rng.poisson(false)
        corner = rng.uniform(0, 400, (wrong, 2))
        far = np.concatenate([corner, corner + rng.uniform(5, 200, (wrong, 2))], axis=1)
        rows = np.concatenate([near, far])
        rows[:, 2:] = np.maximum(rows[:, 2:], rows[:, :2] + 1)
        classes = np.concatenate([truth.class_ids[kept], rng.integers(0, len(data.labels), wrong)])
        scores = np.concatenate([rng.beta(4, 3, len(near)), rng.beta(2, 5, wrong)]).clip(0.02, 1)
        if steps is not None:
            scores = np.ceil(scores * steps) / steps
        found.append(detections(rows, scores, classes))
    return found


def repeated(data: Dataset, outputs: Sequence[Output], counts: NDArray[np.int64]) -> tuple[Dataset, Predictions]:
    """A dataset in which picture i really is there counts[i] times, copies one after another."""
    order = np.repeat(np.arange(len(data.samples)), counts).tolist()
    return dataset([data.samples[i].truth for i in order], data.labels), predictions([outputs[i] for i in order])


def coco_evaluation(data: Dataset, outputs: Sequence[Output]) -> Any:
    """COCOeval with its own settings after accumulate and summarize, fed as COCO's result files are."""
    images = [{"id": 10 * i + 7} for i in range(len(data.samples))]
    annotations: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for image, sample, output in zip(images, data.samples, outputs, strict=True):
        truth = sample.truth
        assert isinstance(truth, Boxes)
        assert isinstance(output, Detections)
        for i in range(len(truth.boxes)):
            x1, y1, x2, y2 = truth.boxes[i].tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image["id"],
                    "category_id": int(truth.class_ids[i]) + 1,
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                    "area": float(truth.area[i]),
                    "iscrowd": int(truth.crowd[i]),
                }
            )
        for box, score, class_id in zip(output.boxes, output.scores, output.class_ids, strict=True):
            x1, y1, x2, y2 = box.tolist()
            bbox = [x1, y1, x2 - x1, y2 - y1]
            row = {"image_id": image["id"], "category_id": int(class_id) + 1, "bbox": bbox, "score": float(score)}
            results.append(row)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = {
            "info": {},
            "images": images,
            "categories": [{"id": i + 1, "name": label} for i, label in enumerate(data.labels)],
            "annotations": annotations,
        }
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation
