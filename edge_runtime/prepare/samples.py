"""Labelled pictures, and what a model said of them: what datasets, evaluation and comparison exchange."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.records.frames import Float32Array, Output

__all__ = ["Boxes", "Dataset", "Predictions", "Sample"]


@dataclass(frozen=True, slots=True)
class Boxes:
    """What is to be found in a picture.

    boxes: [n, 4] float32, x1 y1 x2 y2 in source px along edges; class_ids: [n] int32, index into
    `Dataset.labels`; crowd: [n] bool (COCO's iscrowd); area: [n] float32, px^2 (COCO's `area`, that of the
    segment; for YOLO labels the box's own).
    """

    boxes: Float32Array
    class_ids: NDArray[np.int32]
    crowd: NDArray[np.bool_]
    area: Float32Array


@dataclass(frozen=True, slots=True)
class Sample:
    """A labelled picture: `truth` is its boxes, or for a classifier its class (index into `Dataset.labels`).

    `size`: (width, height) px of the picture that the boxes are for; None where the annotations do not say.
    """

    name: str
    path: Path
    truth: Boxes | int
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Dataset:
    """Labelled pictures in a fixed order, by name.

    `labels`: the class names of the dataset's own class ids, in the order of the model's classes (a dataset
    that numbers or names its classes otherwise is mapped when it is opened). `sha256` (64 hex digits): over
    annotations and pictures, so that two results are of the same data or visibly not.
    """

    root: Path
    kind: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]
    sha256: str

    @property
    def name(self) -> str:
        return self.root.name


@dataclass(frozen=True, slots=True)
class Predictions:
    """What one variant of a bundle said of a dataset's pictures: `outputs[i]` belongs to `samples[i]`.

    Detections have every score above `score_threshold` (0-1). `inference_ms`: per picture, the engine's run.
    """

    bundle: str
    digest: str
    engine: str
    variant: str
    backend: str
    scaler: str
    score_threshold: float
    outputs: tuple[Output, ...]
    inference_ms: tuple[float, ...]
