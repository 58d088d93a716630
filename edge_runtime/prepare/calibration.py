"""Pictures that a model is calibrated with, one after the other, and those held back to judge the result by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge_runtime.engine.bundle import Bundle
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import UsageError
from edge_runtime.prepare.samples import Boxes, Dataset, Sample
from edge_runtime.records.frames import Pixels

__all__ = ["Calibration", "CalibrationPicture"]

_EVERY_HELD = 4
_MOST_HELD_FRAMES = 64


@dataclass(frozen=True, slots=True)
class CalibrationPicture:
    """A picture to see ranges on. `read` opens it, again and again for a file; `sha256` is its file's, None for a frame
    of a clip, which stays in memory as long as this does."""

    name: str
    read: Callable[[], Pixels]
    sha256: str | None = None


class Calibration:
    """Gives out pictures once each, in order. With `hold_back` every fourth is not given out but held back, frames of
    clips up to a bound: their pixels stay in memory."""

    def __init__(self, pictures: Iterable[CalibrationPicture], *, hold_back: bool) -> None:
        self._pictures = pictures
        self._hold_back = hold_back
        self._held: list[CalibrationPicture] = []
        self.shown = 0
        self.digests: set[str] = set()
        """sha256 of the files of the pictures that were given out."""

    def __iter__(self) -> Iterator[CalibrationPicture]:
        frames = 0
        for index, picture in enumerate(self._pictures):
            if self._hold_back and index % _EVERY_HELD == _EVERY_HELD - 1 and frames < _MOST_HELD_FRAMES:
                frames += picture.sha256 is None
                self._held.append(picture)
                continue
            self.shown += 1
            if picture.sha256 is not None:
                self.digests.add(picture.sha256)
            yield picture

    def check(self) -> None:
        """Raises UsageError (code "too_few_pictures") where none was given out, or none held back that should be."""
        if not self.shown or (self._hold_back and all(each.sha256 in self.digests for each in self._held)):
            raise UsageError(
                f"{self.shown + len(self._held)} pictures are too few to calibrate with and to judge by",
                code="too_few_pictures",
                remedy="name some dozens or more, such as the cameras see",
            )

    def held_back(self, source: Bundle, read_image: ReadImage) -> tuple[Dataset, ReadImage]:
        """The pictures held back as a dataset without truth, and a reader that knows them. Frames that were given out
        as well (a file twice under two names) are left out."""
        held = {Path(each.name): each for each in self._held if each.sha256 not in self.digests}
        nothing = Boxes(
            np.zeros((0, 4), np.float32), np.zeros(0, np.int32), np.zeros(0, np.bool_), np.zeros(0, np.float32)
        )
        truth: Boxes | int = nothing if source.manifest.bundle.task == "detect" else 0
        samples = tuple(Sample(str(path), path, truth) for path in held)
        digest = hashlib.sha256("".join(f"{each.name}\0{each.sha256}\n" for each in held.values()).encode()).hexdigest()

        def read(path: Path) -> Pixels:
            return held[path].read() if path in held else read_image(path)

        return Dataset(Path("held-back"), "held back", source.labels, samples, digest), read
