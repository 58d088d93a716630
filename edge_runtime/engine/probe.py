"""The golden check: does an engine answer the bundle's own pictures as the model did when the bundle was made?

What a bundle's golden npz holds (made by `record_golden`, read by `probe`; n pictures, sorted by name):

    pictures            [n] text         file names of the pictures
    input               [n, k] float32   sampled values of the preprocessed input, bytes too where it is of bytes
    index/<output>      [n, k] int64     flat positions of samples in the output for a batch of one: its largest
                                         magnitudes, and others spread evenly
    value/<output>      [n, k] float32   the values there
    shape/<output>      [d] int64        the output's shape for a batch of one
    threshold           [1] float64      the score threshold that the detections were made with
    boxes/<i> scores/<i> class_ids/<i>   what the decoder made of picture i (boxes only for detectors)

Whole outputs would be tens of MB (a heat map of 80 classes); samples find a wrong model, a wrong order of
channels or axes, and a wrong precision as well. The pictures are PNGs of the model's own input size, so that
no scaler stands between them and the input: preprocessing them only converts.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.protocol import Engine, InputBuffer, Lane
from edge_runtime.errors import BundleError, RefusedError
from edge_runtime.records.frames import Decoder, Detections, InputArray, Output, Pixels, Transform
from edge_runtime.vision.decode import build_decoder

ReadImage = Callable[[Path], Pixels]
"""Opens a picture file. Injected: the engine room does not know the camera room."""

_SAMPLES = 2048
_INPUT_TOLERANCE = 0.02
_ROWS = ("yolov10", "rtdetr-topk", "efficientnms")
"""Layouts whose outputs are rows of detections: two of like score change places from one processor to the next, and
rows beyond the last detection hold anything. What the decoder makes of them is compared, and nothing else."""
_SAME_BOX_IOU = 0.85
_LOOSE_SHARE = 0.01
"""Share of an output's samples that may deviate by more where numbers are coarser than float32's: a heat map that keeps
its peaks only gives a peak to one neighbour or the other by the last bit (0.5 % of the samples of the bundled one)."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """A passed golden check.

    `pictures`: how many were run, 0 where the bundle has none. `deviations`: per output (and "input") the largest
    difference as a share of the golden output's largest magnitude, but for one sample in a hundred where numbers are
    coarser than float32's; `max_deviation` the largest of the outputs'. `detections`: how many golden detections were
    found again.
    """

    pictures: int
    tolerance: float
    max_deviation: float
    deviations: Mapping[str, float] = field(default_factory=dict)
    detections: int = 0

    def __str__(self) -> str:
        if self.pictures == 0:
            return "no golden pictures in this bundle: not checked"
        return (
            f"{self.pictures} golden pictures, largest deviation {self.max_deviation:.2g} of {self.tolerance:.2g} "
            f"allowed, {self.detections} detections as expected"
        )


def probe(engine: Engine, lane: Lane, bundle: Bundle, variant: str, read_image: ReadImage) -> ProbeReport:
    """Run the golden pictures of the variant on a lane of the engine and compare with the golden outputs.

    Raises RefusedError with the numbers where the answers differ by more than the bundle's tolerance (code
    "golden_mismatch") or are not finite (code "non_finite"); BundleError (code "golden_invalid") where the golden
    files themselves cannot be used; EngineError where a run fails.
    """
    table = bundle.variant(variant)
    raw = bundle.read_golden_outputs(table.name)
    if table.golden is None or raw is None:
        return ProbeReport(0, 0.0, 0.0)
    where = str(bundle.root / table.golden.outputs)
    golden = _read_npz(raw, where)
    pictures = bundle.golden_inputs(table.name)
    named = [str(name) for name in golden.get("pictures", ())]
    if [path.name for path in pictures] != named:
        raise _unusable(where, f"it is for the pictures {named}, and the bundle has {[p.name for p in pictures]}")
    tolerance = table.golden.tolerance
    deviations: dict[str, float] = {}
    # TensorRT computes float32 layers in TF32 where the GPU has it, which is as coarse as FP16.
    exact = table.precision == "fp32" and engine.info.backend == "onnxruntime"
    share = 0.0 if exact else _LOOSE_SHARE
    found = 0
    runner = _Runner(engine, lane)
    try:
        for place, path in enumerate(pictures):
            outputs, result, picture = runner.run(path, read_image)
            check_finite(outputs, f"the golden picture {path.name}", str(bundle.root))
            _compare_input(golden, place, picture, path, deviations, where)
            if engine.info.output.layout not in _ROWS:
                _compare_outputs(golden, place, outputs, path, tolerance, share, deviations, where)
            found += _compare_result(golden, place, result, path, tolerance, engine.info.output.score_threshold, where)
    finally:
        runner.close()
    worst = max((value for name, value in deviations.items() if name != "input"), default=0.0)
    return ProbeReport(len(pictures), tolerance, worst, deviations, found)


def check_finite(outputs: Mapping[str, NDArray[Any]], picture: str, where: str) -> None:
    """Outputs (name -> any shape) of `picture` ("the white picture") hold no NaN and nothing infinite.

    Raises RefusedError (code "non_finite").
    """
    for name, output in outputs.items():
        if output.dtype.kind == "f" and not (finite := np.isfinite(output)).all():
            raise RefusedError(
                f"answers {picture} with {output.size - int(finite.sum())} of {output.size} values of {name!r} not "
                "finite (NaN or infinite)",
                code="non_finite",
                where=where,
                remedy="the weights are damaged, or overflow in this precision: export it again, or use fp32",
            )


def record_golden(engine: Engine, lane: Lane, pictures: Sequence[Path], read_image: ReadImage) -> bytes:
    """The npz for these pictures, from an engine that is known to be right. Raises EngineError."""
    arrays: dict[str, NDArray[Any]] = {}
    inputs: list[NDArray[np.float32]] = []
    positions: dict[str, list[NDArray[np.int64]]] = {name: [] for name in engine.info.output_shapes}
    values: dict[str, list[NDArray[np.float32]]] = {name: [] for name in engine.info.output_shapes}
    runner = _Runner(engine, lane)
    ordered = sorted(pictures)
    try:
        for place, path in enumerate(ordered):
            outputs, result, picture = runner.run(path, read_image)
            inputs.append(_spread(picture))
            for name, output in outputs.items():
                index = _positions(output)
                positions[name].append(index)
                values[name].append(output.reshape(-1)[index].astype(np.float32))
            if isinstance(result, Detections):
                arrays[f"boxes/{place}"] = result.boxes
            arrays[f"scores/{place}"], arrays[f"class_ids/{place}"] = result.scores, result.class_ids
    finally:
        runner.close()
    arrays["pictures"] = np.array([path.name for path in ordered])
    arrays["input"] = np.stack(inputs)
    arrays["threshold"] = np.array([engine.info.output.score_threshold])
    for name, shape in engine.info.output_shapes.items():
        arrays[f"index/{name}"], arrays[f"value/{name}"] = np.stack(positions[name]), np.stack(values[name])
        arrays[f"shape/{name}"] = np.array(shape, np.int64)
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()


class _Runner:
    """Runs single pictures on a lane, in a batch of the smallest size that the engine can run."""

    def __init__(self, engine: Engine, lane: Lane) -> None:
        self._engine = engine
        self._lane = lane
        allowed = engine.allowed_batches
        self._count = allowed[0] if allowed else 1
        self._decoder: Decoder = build_decoder(engine.info.output, engine.info.input, engine.info.output_shapes)
        self._buffer: InputBuffer = engine.allocate(self._count)

    def run(self, path: Path, read_image: ReadImage) -> tuple[dict[str, NDArray[Any]], Output, InputArray]:
        """Outputs [...] without the batch axis, the decoded result, and the input of a picture."""
        array = self._buffer.array
        transform: Transform = read_image(path).write_into(array[0], self._engine.info.input)
        array[1:] = array[0]
        self._lane.submit(self._buffer, self._count)
        outputs = dict(self._lane.collect())
        return {name: value[0] for name, value in outputs.items()}, self._decoder(outputs, 0, transform), array[0]

    def close(self) -> None:
        self._engine.release(self._buffer)


def _positions(output: NDArray[Any]) -> NDArray[np.int64]:
    flat = np.abs(output.reshape(-1))
    if flat.size <= _SAMPLES:
        return np.arange(flat.size, dtype=np.int64)
    half = _SAMPLES // 2
    largest = np.argpartition(flat, flat.size - half)[-half:]
    spread = np.linspace(0, flat.size - 1, _SAMPLES - half).astype(np.int64)
    return np.sort(np.concatenate((largest.astype(np.int64), spread)))


def _spread(picture: InputArray) -> NDArray[np.float32]:
    """Values of an input spread over all of it; their number is odd, so that they fall on every column."""
    where = np.linspace(0, picture.size - 1, _SAMPLES - 1).astype(np.int64)
    return np.ascontiguousarray(picture.reshape(-1)[where], np.float32)


def _read_npz(raw: bytes, where: str) -> dict[str, NDArray[Any]]:
    try:
        with np.load(io.BytesIO(raw), allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (ValueError, OSError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise _unusable(where, f"it cannot be read: {error}") from None


def _unusable(where: str, reason: str) -> BundleError:
    return BundleError(
        f"the golden outputs cannot be used: {reason}",
        code="golden_invalid",
        where=where,
        remedy="make the bundle again with `edge-runtime prepare import --golden`",
    )


def _entry(golden: Mapping[str, NDArray[Any]], name: str, where: str) -> NDArray[Any]:
    if name not in golden:
        raise _unusable(where, f"it has no {name!r}")
    return golden[name]


def _mismatch(path: Path, reason: str) -> RefusedError:
    return RefusedError(
        f"golden check failed: {reason}",
        code="golden_mismatch",
        where=str(path),
        remedy="this engine does not compute what its bundle promises: keep the one before, and build or fetch it anew",
    )


def _deviation(found: NDArray[Any], golden: NDArray[Any], share: float = 0.0) -> float:
    """The largest difference, but for the largest of this share of all values, as a share of the golden values' largest
    magnitude; infinite for NaN."""
    scale = float(np.abs(golden).max(initial=0.0)) or 1.0
    difference = np.abs(found.astype(np.float64) - golden)
    if not np.isfinite(difference).all():
        return float("inf")
    return float(np.quantile(difference, 1 - share, method="higher")) / scale if difference.size else 0.0


def _compare_input(
    golden: Mapping[str, NDArray[Any]],
    place: int,
    picture: InputArray,
    path: Path,
    deviations: dict[str, float],
    where: str,
) -> None:
    expected = _entry(golden, "input", where)[place]
    found = _spread(picture)
    if expected.shape != found.shape:
        raise _unusable(where, f"it is for an input of another size than {list(picture.shape)}")
    deviation = _deviation(found, expected)
    deviations["input"] = max(deviations.get("input", 0.0), deviation)
    if deviation > _INPUT_TOLERANCE:
        raise _mismatch(
            path,
            f"the preprocessed picture itself deviates by {deviation:.3g} (allowed {_INPUT_TOLERANCE}): "
            "colour order, scale, mean, std or the picture's reader changed, not the model",
        )


def _compare_outputs(
    golden: Mapping[str, NDArray[Any]],
    place: int,
    outputs: Mapping[str, NDArray[Any]],
    path: Path,
    tolerance: float,
    share: float,
    deviations: dict[str, float],
    where: str,
) -> None:
    for name, output in outputs.items():
        shape = tuple(int(side) for side in _entry(golden, f"shape/{name}", where)[1:])
        if shape != output.shape:
            raise _mismatch(path, f"output {name!r} is {list(output.shape)}, expected {list(shape)}")
        index = _entry(golden, f"index/{name}", where)[place]
        if index.size and not 0 <= int(index.min()) <= int(index.max()) < output.size:
            raise _unusable(where, f"positions of {name!r} lie outside of the output")
        deviation = _deviation(output.reshape(-1)[index], _entry(golden, f"value/{name}", where)[place], share)
        deviations[name] = max(deviations.get(name, 0.0), deviation)
        if deviation > tolerance:
            raise _mismatch(
                path, f"output {name!r} deviates by {deviation:.3g} of its range, and {tolerance:.3g} is allowed"
            )


def _compare_result(
    golden: Mapping[str, NDArray[Any]],
    place: int,
    result: Output,
    path: Path,
    tolerance: float,
    threshold: float,
    where: str,
) -> int:
    """How many golden detections were found again: those that the tolerance cannot push below the threshold."""
    scores = _entry(golden, f"scores/{place}", where)
    classes = _entry(golden, f"class_ids/{place}", where)
    if not isinstance(result, Detections):
        if scores.size and (not len(result) or abs(float(result.scores[0]) - float(scores[0])) > tolerance):
            raise _mismatch(path, f"best class {result.class_ids[:1]} {result.scores[:1]}, expected {scores[0]:.3f}")
        return int(scores.size > 0)
    boxes = _entry(golden, f"boxes/{place}", where)
    sure = max(threshold, float(_entry(golden, "threshold", where)[0])) + tolerance
    for these, others, what in (
        ((boxes, scores, classes), (result.boxes, result.scores, result.class_ids), "is missing"),
        ((result.boxes, result.scores, result.class_ids), (boxes, scores, classes), "was not expected"),
    ):
        for box, score, class_id in zip(*these, strict=True):
            near = (others[2] == class_id) & (np.abs(others[1] - score) <= tolerance)
            if score > sure and not (near & (_iou(box, others[0]) >= _SAME_BOX_IOU)).any():
                at = ", ".join(f"{side:.0f}" for side in box)
                raise _mismatch(path, f"a detection {what}: class {class_id} with {score:.3f} at ({at})")
    return int((scores > sure).sum())


def _iou(box: NDArray[Any], boxes: NDArray[Any]) -> NDArray[np.float64]:
    """[n] intersection over union of one box and n boxes, x1 y1 x2 y2."""
    low, high = np.maximum(box[:2], boxes[:, :2]), np.minimum(box[2:], boxes[:, 2:])
    both = np.clip(high - low, 0, None).prod(axis=1, dtype=np.float64)
    area = float((box[2] - box[0]) * (box[3] - box[1]))
    union = area + (boxes[:, 2:] - boxes[:, :2]).prod(axis=1, dtype=np.float64) - both
    result: NDArray[np.float64] = both / np.maximum(union, 1e-9)
    return result
