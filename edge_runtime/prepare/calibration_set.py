"""The pictures of a calibration as a set: kept over an interruption, called by one hash, and compared with others.

Two sets of pictures are compared by a few numbers of each picture (how bright, how colourful, how much is found in it),
one after the other by the two-sample Kolmogorov-Smirnov test: D, the largest distance between the two distributions,
sees another level as well as another spread, assumes no shape, and is itself the size of the effect (0: alike, 1: they
do not overlap). A number counts as unlike where both

- chance is ruled out: p, by the limit distribution with Stephens' correction for small sets (M. A. Stephens, J. Royal
  Statistical Society B 32, 1970), is below `LEVEL` divided by how many numbers are compared (Bonferroni). So of a
  thousand pairs of sets drawn from the same pictures about one at most is called unlike;
- it is large enough to matter: D of `EFFECT` or more, as with thousands of pictures any trifle is beyond chance.

Neighbouring frames of a clip depend on each other, and p comes out too small for them. That is wanted: they are unlike
whatever the field will show, and are to be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_runtime.durable import write_atomic
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import UsageError
from edge_runtime.prepare.calibration import CalibrationPicture
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

__all__ = [
    "FEATURES",
    "FEW_PICTURES",
    "WANTED_PICTURES",
    "Difference",
    "calibration_digest",
    "differences",
    "features_of",
    "gather",
]

FEW_PICTURES = 100
WANTED_PICTURES = (500, 1000)
FEATURES = ("brightness", "contrast", "saturation", "warmth", "detail")
"""What `features_of` measures, in px levels (0-255): the mean and the spread of the luma, the mean distance between
the largest and the smallest colour, of red and blue, and the mean step from one point to the next."""
LEVEL = 1e-3
EFFECT = 0.35
_SIDE = 64
_TERMS = 100
_INDEX = "pictures.json"


@dataclass(frozen=True, slots=True)
class Difference:
    """A number in which two sets of pictures are unlike: `distance` is D (0-1), `probability` that of chance; the
    medians of both sets."""

    feature: str
    distance: float
    probability: float
    median: float
    other_median: float

    def __str__(self) -> str:
        return (
            f"{self.feature} (median {self.median:.3g} against {self.other_median:.3g}, distance {self.distance:.2f})"
        )


def features_of(pixels: Pixels) -> NDArray[np.float64]:
    """[len(FEATURES)] float64 of a picture, seen at 64 x 64 px: what size it has makes no difference."""
    spec = InputSpec(
        width=_SIDE, height=_SIDE, color="RGB", resize="stretch", pad=0, scale=1.0,
        mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), short_side=None, pixel="float32",
    )  # fmt: skip
    place = np.empty(spec.shape, np.float32)
    pixels.write_into(place, spec)
    # BT.601
    luma = np.tensordot(np.array([0.299, 0.587, 0.114]), place.astype(np.float64), axes=1)
    detail = (np.abs(np.diff(luma, axis=0)).mean() + np.abs(np.diff(luma, axis=1)).mean()) / 2
    saturation = (place.max(axis=0) - place.min(axis=0)).mean()
    warmth = (place[0] - place[2]).mean()
    return np.array([luma.mean(), luma.std(), saturation, warmth, detail], np.float64)


def differences(
    one: NDArray[np.float64],
    other: NDArray[np.float64],
    names: Sequence[str] = FEATURES,
    *,
    compared: int = len(FEATURES),
) -> tuple[Difference, ...]:
    """In which of the numbers two sets of pictures are unlike, the most unlike first.

    one, other: [pictures, len(names)]; `compared`: in how many numbers they are compared in all. An empty set is like
    any other.
    """
    found = []
    for index, name in enumerate(names):
        if not len(one) or not len(other):
            continue
        a, b = one[:, index], other[:, index]
        distance, probability = _kolmogorov_smirnov(a, b)
        if probability < LEVEL / compared and distance >= EFFECT:
            found.append(Difference(name, distance, probability, float(np.median(a)), float(np.median(b))))
    return tuple(sorted(found, key=lambda each: -each.distance))


def _kolmogorov_smirnov(a: NDArray[Any], b: NDArray[Any]) -> tuple[float, float]:
    """D and p of two samples, each not empty."""
    a, b = np.sort(a), np.sort(b)
    every = np.concatenate([a, b])
    shares = [np.searchsorted(each, every, side="right") / each.size for each in (a, b)]
    distance = float(np.abs(shares[0] - shares[1]).max())
    root = np.sqrt(a.size * b.size / (a.size + b.size))
    scaled = (root + 0.12 + 0.11 / root) * distance
    if scaled < 0.2:  # the series converges slowly there, to 1 within 1e-12
        return distance, 1.0
    terms = np.arange(1, _TERMS + 1)
    total = 2 * np.sum((-1.0) ** (terms - 1) * np.exp(-2 * (terms * scaled) ** 2))
    return distance, float(np.clip(total, 0.0, 1.0))


def calibration_digest(digests: Iterable[str]) -> str:
    """64 hex digits over the pictures' own sha256 (64 hex digits each), in whatever order they come."""
    return hashlib.sha256("".join(f"{each}\n" for each in sorted(digests)).encode()).hexdigest()


def gather(
    pictures: Iterable[CalibrationPicture], folder: Path, *, key: str, read_image: ReadImage
) -> Iterator[CalibrationPicture]:
    """The pictures one after the other, each with a file behind it, so that it can be read again and none is held.

    Frames of clips and cameras are written into `folder` as PNG, and have the sha256 of that. When all came once, later
    calls with the same `key` (what they were taken of) give the same ones without asking `pictures` again: a camera
    would show something else.

    Raises UsageError (code "calibration_changed") for a file that is no longer what it was then, and OSError.
    """
    index = folder / _INDEX
    if (known := _read_index(index, key)) is not None:
        for name, path, sha256 in known:
            yield _kept(name, path, sha256, read_image)
        return
    folder.mkdir(parents=True, exist_ok=True)
    listed: list[tuple[str, str, str]] = []
    for place, picture in enumerate(pictures):
        made = picture
        if picture.sha256 is None:
            file = folder / f"{place:06d}.png"
            data = encode_png(picture.read().to_rgb())
            write_atomic(file, data)
            sha256 = hashlib.sha256(data).hexdigest()
            made = CalibrationPicture(picture.name, partial(read_image, file), sha256)
            listed.append((picture.name, str(file.absolute()), sha256))
        else:
            listed.append((picture.name, str(Path(picture.name).absolute()), picture.sha256))
        yield made
    write_atomic(index, json.dumps({"key": key, "pictures": listed}).encode())


def _read_index(index: Path, key: str) -> list[tuple[str, str, str]] | None:
    """Name, file and sha256 of each picture; None where they were not gathered to the end, or of something else."""
    try:
        document = json.loads(index.read_bytes())
        if document["key"] == key:
            return [(name, path, sha256) for name, path, sha256 in document["pictures"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none, or cut short
    return None


def _kept(name: str, path: str, sha256: str, read_image: ReadImage) -> CalibrationPicture:
    try:
        found = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError:
        found = ""
    if found != sha256:
        raise UsageError(
            "has changed since the calibration began",
            code="calibration_changed",
            where=path,
            remedy="put it back, or remove the work folder to begin anew",
        )
    return CalibrationPicture(name, partial(read_image, Path(path)), sha256)
