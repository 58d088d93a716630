"""What a model says of labelled pictures, by the very code that runs in the field, and how right that is."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.manifest import AccuracyTable
from edge_runtime.engine.probe import ReadImage
from edge_runtime.engine.protocol import Engine
from edge_runtime.errors import CameraError, UsageError
from edge_runtime.prepare.annotations import match_classes
from edge_runtime.prepare.datasets import OnProgress, unreadable_picture
from edge_runtime.prepare.metrics import AveragePrecision, TopK, average_precision, top_k
from edge_runtime.prepare.parallel import in_parallel
from edge_runtime.prepare.samples import Dataset, Predictions, Sample
from edge_runtime.records.frames import Decoder, Output, Transform
from edge_runtime.vision.decode import build_decoder

__all__ = ["COCO_DETECTIONS", "COCO_SCORE", "Evaluation", "class_order", "measure", "predict"]

COCO_SCORE = 0.01
"""Score above which detections are measured: the precision at low scores counts too."""
COCO_DETECTIONS = 100
"""Detections of a picture that are measured, best first: COCO's own bound."""


def predict(
    engine: Engine,
    bundle: Bundle,
    dataset: Dataset,
    read_image: ReadImage,
    *,
    scaler: str,
    score_threshold: float = COCO_SCORE,
    classes: NDArray[np.int32] | None = None,
    lanes: int = 1,
    progress: OnProgress = lambda *_: None,
) -> Predictions:
    """Run the engine over every picture of the dataset, in its order.

    Pictures come through `read_image` and put themselves into the lane's buffer; the engine's own decoder reads
    the outputs, with the bundle's `nms_iou` but `score_threshold` (0-1) and `COCO_DETECTIONS` in place of its
    thresholds. `lanes` threads, each with a lane, a buffer and one batch of pictures of its own at a time.
    `classes` ([model's classes] int32): each class as an index into the dataset's labels, see `class_order`.
    `progress` is called with the number of pictures done, and of all; on KeyboardInterrupt the lanes end after
    their current batch.

    Raises UsageError for a picture that cannot be decoded (code "picture_unreadable") or is of another size
    than its annotations are for ("dataset_invalid"), EngineError where a run fails.
    """
    info = engine.info
    output = replace(info.output, score_threshold=score_threshold, max_detections=COCO_DETECTIONS)
    decoder = build_decoder(output, info.input, info.output_shapes)
    samples = dataset.samples
    batch = engine.allowed_batches[0] if engine.allowed_batches else 1
    batches = -(-len(samples) // batch)
    workers = [_LaneWorker(engine, decoder, samples, batch, read_image) for _ in range(min(lanes, batches))]
    try:
        done = in_parallel(
            workers,
            batches,
            name="evaluate",
            progress=lambda count: progress(min(count * batch, len(samples)), len(samples)),
        )
    finally:
        for worker in workers:
            worker.close()
    results = [result for results in done for result in results]
    outputs = [found for found, _ in results]
    if classes is not None:
        outputs = [replace(found, class_ids=classes[found.class_ids]) for found in outputs]
    return Predictions(
        bundle=bundle.name,
        digest=bundle.digest,
        engine=info.digest,
        variant=info.variant,
        backend=info.backend,
        scaler=scaler,
        score_threshold=score_threshold,
        outputs=tuple(outputs),
        inference_ms=tuple(inference_ms for _, inference_ms in results),
    )


class _LaneWorker:
    """A lane with its buffer; called with the number of a batch."""

    def __init__(
        self, engine: Engine, decoder: Decoder, samples: Sequence[Sample], batch: int, read_image: ReadImage
    ) -> None:
        self._engine = engine
        self._decoder = decoder
        self._samples = samples
        self._batch = batch
        self._read_image = read_image
        self._lane = engine.open_lane()
        self._buffer = engine.allocate(batch)

    def __call__(self, number: int) -> list[tuple[Output, float]]:
        """Output and inference time (ms, the picture's share of its batch) of each picture of the batch."""
        samples = self._samples[number * self._batch : (number + 1) * self._batch]
        transforms = [self._write(place, sample) for place, sample in enumerate(samples)]
        started = time.perf_counter()
        # A model of a fixed batch runs the places that the last batch leaves over with what they held before.
        self._lane.submit(self._buffer, self._batch)
        outputs = self._lane.collect()
        inference_ms = (time.perf_counter() - started) * 1e3 / len(samples)
        return [(self._decoder(outputs, place, each), inference_ms) for place, each in enumerate(transforms)]

    def _write(self, place: int, sample: Sample) -> Transform:
        try:
            pixels = self._read_image(sample.path)
            size = (pixels.width, pixels.height)
            if sample.size not in (None, size):
                raise UsageError(
                    f"is {size[0]}x{size[1]} px, and its boxes are for {sample.size[0]}x{sample.size[1]}",
                    code="dataset_invalid",
                    where=str(sample.path),
                    remedy="use the pictures that were annotated: resized or turned ones need other boxes",
                )
            return pixels.write_into(self._buffer.array[place], self._engine.info.input)
        except (CameraError, OSError) as error:
            raise unreadable_picture(sample.path, error) from None

    def close(self) -> None:
        self._engine.release(self._buffer)


def class_order(labels: Sequence[str], dataset: Dataset) -> tuple[NDArray[np.int32] | None, tuple[str, ...]]:
    """What `predict` needs for a model with these labels on a dataset that was opened for another model, and notes.

    None where both number their classes alike. Raises UsageError (code "classes_differ") where they are not the
    same classes.
    """
    if tuple(labels) == dataset.labels:
        return None, ()
    if len(labels) != len(dataset.labels):
        raise UsageError(
            f"one model has {len(dataset.labels)} labels and the other {len(labels)}",
            code="classes_differ",
            remedy="compare models of the same classes",
        )
    places, notes = match_classes(dict(enumerate(labels)), range(len(labels)), dataset.labels, "the second model")
    return np.array([places[number] for number in range(len(labels))], np.int32), tuple(notes)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A measured accuracy, and on what and how it was measured."""

    dataset: Dataset
    predictions: Predictions
    accuracy: AveragePrecision | TopK
    metric: str
    value: float

    def table(self) -> AccuracyTable:
        """As a bundle.toml records it."""
        return AccuracyTable(
            metric="mAP" if isinstance(self.accuracy, AveragePrecision) else "top1",
            value=round(self.value, 4),
            data=self.dataset.name,
            data_sha256=self.dataset.sha256,
            images=len(self.dataset.samples),
            scaler=self.predictions.scaler,
            backend="tensorrt" if self.predictions.backend == "tensorrt" else "onnxruntime",
        )

    def as_dict(self) -> dict[str, Any]:
        """As a JSON document."""
        said = self.predictions
        p50, p99 = np.percentile(said.inference_ms, (50, 99)).tolist()
        figures: Mapping[str, Any] = asdict(self.accuracy)
        return {
            "metric": self.metric,
            "value": self.value,
            **{name: value for name, value in figures.items() if name not in ("mean_ap", "top1")},
            "data": self.dataset.name,
            "data_kind": self.dataset.kind,
            "data_sha256": self.dataset.sha256,
            "images": len(self.dataset.samples),
            "bundle": said.bundle,
            "digest": said.digest,
            "engine": said.engine,
            "variant": said.variant,
            "backend": said.backend,
            "scaler": said.scaler,
            "score_threshold": said.score_threshold,
            "inference_ms": {"mean": float(np.mean(said.inference_ms)), "p50": p50, "p99": p99},
        }


def measure(dataset: Dataset, predictions: Predictions) -> Evaluation:
    """The accuracy of these predictions: mAP where the dataset has boxes, else top-1.

    Raises UsageError (code "dataset_invalid") where there is no box to be found in these pictures.
    """
    if isinstance(dataset.samples[0].truth, int):
        found = top_k(dataset, predictions)
        return Evaluation(dataset, predictions, found, "top1", found.top1)
    precision = average_precision(dataset, predictions)
    if precision.mean_ap is None:
        raise UsageError(
            f"none of these {len(dataset.samples)} pictures has a box to be found",
            code="dataset_invalid",
            where=str(dataset.root),
            remedy="evaluate on more pictures",
        )
    return Evaluation(dataset, predictions, precision, "mAP", precision.mean_ap)
