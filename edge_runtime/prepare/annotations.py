"""What the readers of labelled pictures share: an entry per picture, faults with their place, classes by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_runtime.errors import ConfigProblem, UsageError
from edge_runtime.prepare.samples import Boxes

__all__ = ["Entry", "Faults", "Listing", "RelativeBoxes", "invalid", "match_classes", "shown"]

_FAULTS_SHOWN = 10
_NAMES_SHOWN = 8


@dataclass(frozen=True, slots=True)
class RelativeBoxes:
    """Boxes of a picture whose size is not known yet.

    boxes: [n, 4] float64, x1 y1 x2 y2 as shares (0-1) of the picture's width and height; class_ids: [n] int32.
    """

    boxes: NDArray[np.float64]
    class_ids: NDArray[np.int32]

    def scaled(self, width: int, height: int) -> Boxes:
        """The same in a picture of width x height px; `area` is the box's own."""
        boxes = (self.boxes * (width, height, width, height)).astype(np.float32)
        sides = boxes[:, 2:] - boxes[:, :2]
        crowd = np.zeros(len(boxes), np.bool_)
        return Boxes(boxes, self.class_ids, crowd, sides.prod(axis=1, dtype=np.float32))


@dataclass(frozen=True, slots=True)
class Entry:
    """A picture as it is annotated.

    `annotation`: the bytes that stand for its labels in the dataset's hash, in the dataset's own words, so
    that they do not depend on a model. `size`: (width, height) px that the annotations are for, None where
    they do not say.
    """

    name: str
    path: Path
    annotation: bytes
    truth: Boxes | RelativeBoxes | int
    size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What a reader found: `entries` in any order; `notes` in plain words."""

    root: Path
    kind: str
    entries: Sequence[Entry]
    notes: Sequence[str]


def invalid(where: Path, message: str, remedy: str | None = None) -> UsageError:
    """A dataset that cannot be used, for one reason."""
    return UsageError(message, code="dataset_invalid", where=str(where), remedy=remedy)


class Faults:
    """Collects what is wrong, so that one run tells of many."""

    def __init__(self) -> None:
        self._problems: list[ConfigProblem] = []

    def add(
        self, file: Path, message: str, *, line: int | None = None, key: str | None = None, remedy: str | None = None
    ) -> None:
        """A fault in line `line` (from 1) or under `key` of a file."""
        self._problems.append(ConfigProblem(str(file), line, key, message, remedy))

    def refuse(self) -> None:
        """Raises UsageError (code "dataset_invalid") with the first faults, one a line, where there are any."""
        if not self._problems:
            return
        lines = [str(problem) for problem in self._problems[:_FAULTS_SHOWN]]
        if (more := len(self._problems) - len(lines)) > 0:
            lines.append(f"and {more} more of such faults")
        raise UsageError("\n".join(lines), code="dataset_invalid")


def shown(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def match_classes(
    names: Mapping[int, str], used: Collection[int], labels: Sequence[str], where: Path | str
) -> tuple[dict[int, int], list[str]]:
    """Which of the model's classes each of the dataset's is: id -> index into `labels`, and notes.

    By name (case does not matter) where every class in `used` has its name among the labels. Else, where there
    are as many classes as labels, by order of id, if no class has the name of a label at another place; a note
    says which names differ. Raises UsageError (code "classes_differ") where neither holds.
    """
    places: dict[str, int] = {}
    for place, label in enumerate(labels):
        key = label.strip().casefold()
        places[key] = place if key not in places else -1  # two labels of one name: it tells nothing
    named = {number: places.get(name.strip().casefold(), -1) for number, name in names.items()}
    unknown = [number for number in sorted(used) if named[number] < 0]
    twice = len({named[number] for number in used}) < len(used)
    if not unknown and not twice:
        without = [label for place, label in enumerate(labels) if place not in named.values()]
        note = f"{len(without)} of {len(labels)} labels do not occur in the data: {shown(without)}"
        return {number: place for number, place in named.items() if place >= 0}, [note] if without else []
    if len(names) == len(labels):
        ordered = {number: place for place, number in enumerate(sorted(names))}
        elsewhere = [names[number] for number, place in ordered.items() if named[number] not in (-1, place)]
        if not elsewhere:
            pairs = [(names[number], labels[place]) for number, place in ordered.items()]
            differ = [f"{name} is {label}" for name, label in pairs if name.casefold() != label.casefold()]
            note = f"classes are taken in order of their ids; {len(differ)} of {len(labels)} names differ: "
            return ordered, [note + shown(differ)] if differ else []
        reason = f"in order of their ids they do not fit either: {shown(elsewhere)} would become another label"
    else:
        reason = f"and they are {len(names)} for {len(labels)} labels"
    missing = shown([names[number] for number in unknown]) or "a name that occurs twice"
    raise UsageError(
        f"classes that the model has no label for: {missing}; {reason}",
        code="classes_differ",
        where=str(where),
        remedy="evaluate on data of the model's classes, or correct the names in the data or in the bundle's labels",
    )
