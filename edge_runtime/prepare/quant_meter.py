"""What every tensor of a float model holds on real pictures, seen one picture after the other.

Tensors are outputs of the model here. They are counted (quant_histogram.py) and dropped before the next picture comes,
so that memory is that of all tensors of one picture, whatever the number of pictures. What was counted can be saved and
taken up again.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edge_runtime.durable import write_atomic
from edge_runtime.engine.onnxrt import open_session
from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare.quant import Method, TensorRange
from edge_runtime.prepare.quant_histogram import BINS, Histogram
from edge_runtime.prepare.quant_ranges import PERCENTILE, range_of
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

__all__ = ["ActivationMeter"]

_FORMAT = 1


class ActivationMeter:
    """Histograms of a model's float32 tensors over the pictures it was shown."""

    def __init__(self, model: Any, tensors: Sequence[str], where: str) -> None:
        """`model`: an onnx.ModelProto with one input; `tensors`: names of float32 tensors in it, its input or computed
        (`quant_graph.activations`). `where` names its file.

        Raises BundleError where ONNX Runtime does not run the model with them as outputs.
        """
        made: Any = onnx.ModelProto()
        made.CopyFrom(model)
        self._where = where
        self._histograms = {name: Histogram() for name in tensors}
        inputs = {value.name for value in made.graph.input}
        answers = [value.name for value in made.graph.output]
        self._computed = [name for name in self._histograms if name not in inputs]
        wanted = [name for name in self._computed if name not in answers]
        made.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in wanted)
        named = "\0".join((str(_FORMAT), str(BINS), *self._histograms)).encode()
        self._digest = hashlib.sha256(model.SerializeToString(deterministic=True) + named).hexdigest()
        self._session = open_session(made.SerializeToString(), where)
        (self._input,) = self._session.get_inputs()
        self._answers = [name for name in answers if name not in self._histograms]
        self._specs: set[str] = set()
        self.pictures = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that are counted."""
        return tuple(self._histograms)

    def show(self, pictures: Iterable[Pixels], spec: InputSpec) -> None:
        """Run the model on every picture, each of which may be gone when the next one comes.

        `spec` is the input of one of the model's variants. Raises CameraError for a picture that cannot be read,
        BundleError (code "non_finite") where the model computes NaN or infinity. A picture at which it raises is not
        counted.
        """
        side = self._input.shape[0]
        batch = np.zeros((side if isinstance(side, int) and side > 0 else 1, *spec.shape), spec.dtype)
        for picture in pictures:
            picture.write_into(batch[0], spec)
            batch[1:] = batch[0]
            self._count(batch)
            self._specs.add(repr(spec))
            self.pictures += 1

    def _count(self, batch: Any) -> None:
        results = self._session.run([*self._answers, *self._computed], {self._input.name: batch})
        seen = dict(zip((*self._answers, *self._computed), results, strict=True))
        del results
        if self._input.name in self._histograms:
            seen[self._input.name] = batch
        for name, values in seen.items():
            if (
                values.dtype.kind == "f"
                and values.size
                and not (np.isfinite(values.min()) and np.isfinite(values.max()))
            ):
                raise BundleError(
                    f"computes values that are not finite for picture {self.pictures + 1} of the calibration ({name})",
                    code="non_finite",
                    where=self._where,
                    remedy="the model overflows in float32 already, or its weights are damaged: export it again",
                )
        for name, histogram in self._histograms.items():
            histogram.add(seen.pop(name))

    def histogram(self, tensor: str) -> Histogram:
        """What was counted of a tensor. Raises KeyError."""
        return self._histograms[tensor]

    def ranges(self, method: Method, *, symmetric: bool, percentile: float = PERCENTILE) -> dict[str, TensorRange]:
        """Tensor -> its range by a method; see `quant_ranges.range_of`. Raises UsageError (code "too_few_pictures")
        before any picture was shown."""
        if not self.pictures:
            raise UsageError("no picture was shown, and ranges are seen on them", code="too_few_pictures")
        return {
            name: range_of(histogram, method, symmetric=symmetric, percentile=percentile)
            for name, histogram in self._histograms.items()
        }

    def save(self, path: Path, names: Sequence[str]) -> None:
        """Write what was counted, whole or not at all. `names`: of the pictures shown, in order; what tells them apart
        from others (a sha256) belongs into them. The same state gives the same bytes.

        Raises EdgeError (code "write_failed"), ValueError where `names` are not as many as pictures.
        """
        if len(names) != self.pictures:
            raise ValueError(f"{len(names)} names for {self.pictures} pictures")
        held = list(self._histograms.values())
        stream = io.BytesIO()
        np.savez_compressed(
            stream,
            model=np.frombuffer(self._digest.encode(), np.uint8),
            names=np.frombuffer(_digest_of(names).encode(), np.uint8),
            specs=np.frombuffer("\n".join(sorted(self._specs)).encode(), np.uint8),
            pictures=np.int64(self.pictures),
            counts=np.stack([each.counts for each in held]) if held else np.zeros((0, BINS), np.int64),
            places=np.array([(each.first, each.exponent) for each in held], np.int64).reshape(-1, 2),
            ends=np.array([(each.low, each.high) for each in held], np.float64).reshape(-1, 2),
        )
        try:
            write_atomic(path, stream.getvalue())
        except OSError as error:
            raise EdgeError(
                f"cannot be written: {error.strerror}", code="write_failed", where=str(path), remedy="make room"
            ) from None

    def restore(self, path: Path, names: Sequence[str], specs: Sequence[InputSpec] = ()) -> int:
        """Take up what `save` wrote, in the place of what was counted, and say of how many pictures it is: the first
        ones of `names`, which need not be shown again.

        `specs`: the inputs that pictures are shown at; a size or a mean that was another gave other values. Left out,
        that is not looked at.

        Raises UsageError (code "state_unlike") where it is of another model, of other tensors, of other pictures or
        other inputs; (code "state_damaged") where it cannot be read.
        """
        try:
            with np.load(io.BytesIO(path.read_bytes()), allow_pickle=False) as stored:
                model, shown, listed = (bytes(stored[key]).decode() for key in ("model", "names", "specs"))
                inputs = set(listed.splitlines())
                pictures = int(stored["pictures"])
                held = list(_histograms(stored["counts"], stored["places"], stored["ends"]))
        except Exception as error:  # noqa: BLE001  zip, zlib, numpy and the disk have no common base
            reason = " ".join(str(error).split())[:200]
            raise UsageError(
                f"cannot be read: {reason}",
                code="state_damaged",
                where=str(path),
                remedy="remove it, and all pictures are seen again",
            ) from None
        what = None
        if model != self._digest or len(held) != len(self._histograms):
            what = "another model"
        elif not 0 <= pictures <= len(names) or shown != _digest_of(names[:pictures]):
            what = "other pictures"
        elif specs and inputs and inputs != {repr(each) for each in specs}:
            what = "pictures made ready in another way"
        if what is not None:
            raise UsageError(
                f"holds what was seen of {what}",
                code="state_unlike",
                where=str(path),
                remedy="remove it, and all pictures are seen again",
            )
        self._histograms = dict(zip(self._histograms, held, strict=True))
        self._specs = inputs
        self.pictures = pictures
        return pictures


def _digest_of(names: Sequence[str]) -> str:
    return hashlib.sha256("".join(f"{name}\0" for name in names).encode()).hexdigest()


def _histograms(counts: Any, places: Any, ends: Any) -> Iterator[Histogram]:
    """Raises ValueError for what `save` does not write."""
    whole = counts.ndim == 2 and counts.shape[1] == BINS and np.isfinite(ends).all() and (counts >= 0).all()
    if not whole or not ((ends[:, 0] <= 0) & (ends[:, 1] >= 0)).all():
        raise ValueError("no counts of tensors")
    for row, (first, exponent), (low, high) in zip(counts, places, ends, strict=True):
        yield Histogram(np.array(row, np.int64), int(first), int(exponent), float(low), float(high))
