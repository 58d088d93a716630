"""`prepare evaluate` and `prepare compare`: bundles, engines, the camera room's reader and the measures, wired up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.app.models import cores, open_bundle
from edge_runtime.bundled import SCHEME
from edge_runtime.camera.av import decode_image
from edge_runtime.camera.av_pixels import SCALER
from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.errors import UsageError
from edge_runtime.prepare.compare import compare
from edge_runtime.prepare.comparison import Comparison
from edge_runtime.prepare.datasets import open_dataset
from edge_runtime.prepare.evaluate import COCO_SCORE, Evaluation, class_order, measure, predict
from edge_runtime.prepare.record import check_recordable, record_accuracy
from edge_runtime.prepare.samples import Dataset, Predictions
from edge_runtime.records.frames import Pixels

__all__ = ["Compared", "Evaluated", "compare_bundles", "evaluate_bundle", "open_labelled"]

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how many pictures are done, and of how many."""
ALL = "all"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A variant's accuracy; `recorded`: the bundle after it was written into it, None where it was not."""

    evaluation: Evaluation
    notes: tuple[str, ...]
    recorded: Bundle | None


@dataclass(frozen=True, slots=True)
class Compared:
    """Two variants on the same pictures."""

    comparison: Comparison
    dataset: Dataset
    notes: tuple[str, ...]


def read_image(path: Path) -> Pixels:
    """The picture in a file, as a folder camera reads it. Raises CameraError or OSError."""
    return decode_image(path.read_bytes())


def evaluate_bundle(
    source: str,
    data: Path,
    *,
    variant: str = "auto",
    score_threshold: float = COCO_SCORE,
    images: int | None = None,
    record: bool = False,
    progress: Progress,
) -> Iterator[Evaluated]:
    """Measure a variant of a bundle (`all`: each that runs here), one after the other, each yielded when done.

    `source`: a bundle's folder, or `bundled:NAME`. With `record` each accuracy is written into the bundle
    before it is yielded. Raises EdgeError.
    """
    bundle = open_bundle(source)
    if variant == ALL and not bundle.variants_for("onnxruntime"):
        bundle.variant("auto", "onnxruntime")  # says that there is none, and what there is
    names = bundle.variants_for("onnxruntime") if variant == ALL else (bundle.variant(variant, "onnxruntime").name,)
    if record:
        if source.startswith(SCHEME):
            raise UsageError(
                "what comes with the product is not written to",
                where=source,
                remedy="copy the bundle into a folder of your own and name that",
            )
        check_recordable(bundle)
    dataset, notes = open_labelled(bundle, data, progress, images=images, seed=0)
    measured = bundle
    for name in names:
        evaluation = measure(dataset, _predict(bundle, name, dataset, score_threshold, None, progress))
        if record:
            measured = record_accuracy(measured, name, evaluation.table())
        yield Evaluated(evaluation, notes, measured if record else None)


def compare_bundles(
    a: tuple[str, str],
    b: tuple[str, str],
    data: Path,
    *,
    score_threshold: float = COCO_SCORE,
    images: int | None = None,
    seed: int = 0,
    resamples: int = 1000,
    progress: Progress,
) -> Compared:
    """Run two (bundle, variant) over the same pictures and compare, b against a. Raises EdgeError."""
    first, second = open_bundle(a[0]), open_bundle(b[0])
    names = [bundle.variant(name, "onnxruntime").name for bundle, (_, name) in ((first, a), (second, b))]
    tasks = [bundle.manifest.bundle.task for bundle in (first, second)]
    if tasks[0] != tasks[1]:
        raise UsageError(f"one model's task is {tasks[0]} and the other's is {tasks[1]}", code="tasks_differ")
    dataset, notes = open_labelled(first, data, progress, images=images, seed=seed)
    order, more = class_order(second.labels, dataset)
    said_a = _predict(first, names[0], dataset, score_threshold, None, progress)
    said_b = _predict(second, names[1], dataset, score_threshold, order, progress)
    return Compared(compare(dataset, said_a, said_b, seed=seed, resamples=resamples), dataset, (*notes, *more))


def open_labelled(
    bundle: Bundle, data: Path, progress: Progress, *, images: int | None = None, seed: int = 0
) -> tuple[Dataset, tuple[str, ...]]:
    """The labelled pictures of `data`, for the bundle's task and classes: all, or `images` of them that `seed` draws;
    and in words what is to be known of them. Raises UsageError."""
    return open_dataset(
        data,
        bundle.labels,
        bundle.manifest.bundle.task,
        read_image=read_image,
        images=images,
        seed=seed,
        workers=cores(),
        progress=partial(progress, "reading"),
    )


def _predict(
    bundle: Bundle,
    variant: str,
    dataset: Dataset,
    score_threshold: float,
    classes: NDArray[np.int32] | None,
    progress: Progress,
) -> Predictions:
    engine = load_engine(bundle, variant)
    try:
        return predict(
            engine,
            bundle,
            dataset,
            read_image,
            scaler=SCALER,
            score_threshold=score_threshold,
            classes=classes,
            lanes=cores(),
            progress=partial(progress, f"{bundle.name} {variant}"),
        )
    finally:
        engine.close()
