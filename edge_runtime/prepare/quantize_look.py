"""What models say of the held-out pictures, and in what those are unlike the calibration pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.onnxrt import load_engine
from edge_runtime.engine.probe import ReadImage
from edge_runtime.prepare.calibration import CalibrationPicture
from edge_runtime.prepare.calibration_set import FEATURES, Difference, differences, features_of
from edge_runtime.prepare.evaluate import predict
from edge_runtime.prepare.quantize_records import Progress
from edge_runtime.prepare.samples import Dataset, Predictions, Sample
from edge_runtime.records.frames import Detections, Pixels

__all__ = ["Look"]

_COMPARED = 200
"""Calibration pictures at most of which is counted how much is found."""


class Look:
    """The one look at the held-out pictures: float once for each variant, and every chosen candidate.

    `lanes`: threads that run a model; `scaler`: what the pictures are scaled by, for the record.
    """

    def __init__(
        self, source: Bundle, data: Dataset, read_image: ReadImage, scaler: str, lanes: int, progress: Progress
    ) -> None:
        self._source = source
        self.data = data
        self._read_image = read_image
        self._scaler = scaler
        self._lanes = lanes
        self._progress = progress
        self._float: dict[str, Predictions] = {}
        self._features: dict[str, NDArray[np.float64]] = {}

    def of_float(self, variant: str) -> Predictions:
        if variant not in self._float:
            self._float[variant] = self.say(self._source, variant)
        return self._float[variant]

    def say(
        self, bundle: Bundle, variant: str, data: Dataset | None = None, read: ReadImage | None = None
    ) -> Predictions:
        def show(done: int, of: int) -> None:
            self._progress(f"judging {variant}", done, of)

        engine = load_engine(bundle, variant)
        try:
            return predict(
                engine, bundle, data or self.data, read or self._seen, scaler=self._scaler, lanes=self._lanes,
                progress=show,
            )  # fmt: skip
        finally:
            engine.close()

    def _seen(self, path: Path) -> Pixels:
        pixels = self._read_image(path)
        if str(path) not in self._features:
            self._features[str(path)] = features_of(pixels)
        return pixels

    def unlike(self, shown: Sequence[CalibrationPicture], features: NDArray[np.float64]) -> tuple[Difference, ...]:
        """In what the calibration pictures are unlike the held-out ones, by looks and by how much the float model finds
        in them. Nothing where no candidate came so far that these were looked at."""
        if not self._float:
            return ()
        others = np.stack([self._features[path] for path in sorted(self._features)])
        looks = differences(features, others, compared=len(FEATURES) + 1)
        variant, said = next(iter(self._float.items()))
        step = -(-len(shown) // _COMPARED)
        some = {Path(each.name): each for each in shown[::step]}
        truth = self.data.samples[0].truth
        calibration = Dataset(
            Path("calibration"), "calibration", self.data.labels,
            tuple(Sample(str(path), path, truth) for path in some), "0" * 64,
        )  # fmt: skip
        found = self.say(self._source, variant, calibration, lambda path: some[path].read())
        threshold = self._source.output_spec().score_threshold
        counts = [_found(each, threshold)[:, None] for each in (found, said)]
        name = "detections a picture" if self._source.manifest.bundle.task == "detect" else "score of the best class"
        return (*looks, *differences(counts[0], counts[1], (name,), compared=len(FEATURES) + 1))


def _found(said: Predictions, threshold: float) -> NDArray[np.float64]:
    """[pictures]: detections above the threshold, or the best score."""
    return np.array([
        float((each.scores > threshold).sum()) if isinstance(each, Detections) else float(each.scores[:1].sum())
        for each in said.outputs
    ])  # fmt: skip
