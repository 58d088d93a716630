"""What a comparison of two variants found, for programs and for a person at a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from pydantic import JsonValue

__all__ = ["Change", "Comparison", "Picture", "Shift", "Subject", "Verdict"]

Verdict = Literal["b is better", "b is worse", "no difference shown", "too few pictures"]

LEAST_PICTURES = 5
"""Fewer pictures than these give no interval: drawing them again tells hardly anything new."""

SEEN_SCORE = 0.3
"""Detections above it are what a person is shown: the usual threshold of a bundle."""

_CLASSES_SHOWN = 10
_SHIFTS_SHOWN = 5
_NAME_WIDTH = 28


@dataclass(frozen=True, slots=True)
class Change:
    """One measure (0-1) of a and of b on the same pictures.

    low, high: the middle 95 % of b - a over the resamples, None where fewer than five pictures have what is measured.
    count: how much of it there is: boxes for a detector, pictures for a classifier; pictures: in how many pictures.
    """

    a: float
    b: float
    low: float | None
    high: float | None
    count: int
    pictures: int

    @property
    def difference(self) -> float:
        return self.b - self.a

    @property
    def verdict(self) -> Verdict:
        if self.low is None or self.high is None:
            return "too few pictures"
        if self.high < 0:
            return "b is worse"
        return "b is better" if self.low > 0 else "no difference shown"

    def to_json(self) -> dict[str, JsonValue]:
        return {**asdict(self), "difference": self.difference, "verdict": self.verdict}


@dataclass(frozen=True, slots=True)
class Shift:
    """How the scores moved of what both found: median and quartiles of (b's score - a's), None without a pair."""

    pairs: int
    lower_quartile: float | None
    median: float | None
    upper_quartile: float | None
    only_a: int
    only_b: int


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture to look at: how many of its `truths` a and b found."""

    name: str
    truths: int
    found_a: int
    found_b: int


@dataclass(frozen=True, slots=True)
class Subject:
    """What was compared: as in `Predictions`."""

    bundle: str
    digest: str
    engine: str
    variant: str
    backend: str
    scaler: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """b against a; `compare` says what its intervals mean and what they don't.

    measures: `AP50`, `AP75`, `small`, `medium`, `large` for a detector (those of which there are boxes), `top5` for a
    classifier; classes: those with a box or picture, by name; confidence_classes: those with ten pairs or more.
    changed: pictures with other detections above `SEEN_SCORE`, or another best class; worst: those on which b lost
    most of what a found above that score, or where only a is right, worst first.
    """

    metric: Literal["mAP", "top1"]
    dataset: str
    data_sha256: str
    pictures: int
    score_threshold: float
    subjects: tuple[Subject, Subject]
    overall: Change
    measures: Mapping[str, Change]
    classes: Mapping[str, Change]
    confidence: Shift
    confidence_classes: Mapping[str, Shift]
    changed: int
    worst: tuple[Picture, ...]
    seed: int
    resamples: int

    @property
    def a(self) -> float:
        return self.overall.a

    @property
    def b(self) -> float:
        return self.overall.b

    @property
    def difference(self) -> float:
        return self.overall.difference

    @property
    def low(self) -> float | None:
        return self.overall.low

    @property
    def high(self) -> float | None:
        return self.overall.high

    @property
    def verdict(self) -> Verdict:
        return self.overall.verdict

    def to_json(self) -> dict[str, JsonValue]:
        """Everything, as one JSON object; differences are b - a."""
        subject_a, subject_b = self.subjects
        return {
            "metric": self.metric,
            **self.overall.to_json(),
            "dataset": self.dataset,
            "data_sha256": self.data_sha256,
            "images": self.pictures,
            "score_threshold": self.score_threshold,
            "subject_a": asdict(subject_a),
            "subject_b": asdict(subject_b),
            "measures": {name: change.to_json() for name, change in self.measures.items()},
            "classes": {name: change.to_json() for name, change in self.classes.items()},
            "confidence": asdict(self.confidence),
            "confidence_classes": {name: asdict(shift) for name, shift in self.confidence_classes.items()},
            "changed": self.changed,
            "worst": [asdict(picture) for picture in self.worst],
            "resamples": self.resamples,
            "seed": self.seed,
        }

    def table(self) -> str:
        """The same for a person, at most 100 columns: the verdict first, then what to look at."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        change = _difference(self.overall, "95 % interval ")
        yield f"{self.verdict}: {self.metric} {self.a:.3f} -> {self.b:.3f}, {change}"
        for letter, subject in zip("ab", self.subjects, strict=True):
            what = f"{_cut(subject.bundle, 30)} {_cut(subject.variant, 20)}, {subject.backend}, {subject.scaler}"
            yield f"  {letter}: {_cut(what, 94)}"
        drawn = f"{self.resamples} resamples, seed {self.seed}"
        yield f"  {self.pictures} pictures of {_cut(self.dataset, 40)}; {drawn}"
        yield ""
        yield from _changes(self.measures, self._counted)
        yield ""
        changed = sorted((item for item in self.classes.items() if item[1].difference), key=lambda item: _rank(item[1]))
        yield f"{len(changed)} of {len(self.classes)} classes changed" + (", these most:" if changed else "")
        yield from _changes(dict(changed[:_CLASSES_SHOWN]), self._counted)
        yield ""
        yield from self._confidence_lines()
        yield ""
        what = f"other detections above {SEEN_SCORE}" if self.metric == "mAP" else "another best class"
        yield f"{self.changed} of {self.pictures} pictures have {what}"
        if self.worst:
            yield f"where b lost most ({self._counted} found by a -> by b, of all):"
        for picture in self.worst:
            yield f"  {_cut(picture.name, 60)}  {picture.found_a} -> {picture.found_b} of {picture.truths}"

    @property
    def _counted(self) -> str:
        return "boxes" if self.metric == "mAP" else "pictures"

    def _confidence_lines(self) -> Iterator[str]:
        shift = self.confidence
        yield f"confidence: both found {shift.pairs}, only a {shift.only_a}, only b {shift.only_b}; b's score - a's:"
        moved = [(name, of) for name, of in self.confidence_classes.items() if abs(of.median or 0.0) >= 0.0005]
        moved.sort(key=lambda item: -abs(item[1].median or 0.0))
        yield f"  {'':{_NAME_WIDTH}}  median  quartiles          pairs  only a  only b"
        for name, row in [("all", shift), *moved[:_SHIFTS_SHOWN]]:
            if row.median is not None:
                quartiles = f"{row.lower_quartile:+.3f} to {row.upper_quartile:+.3f}"
                counts = f"{row.pairs:6}  {row.only_a:6}  {row.only_b:6}"
                yield f"  {_cut(name):{_NAME_WIDTH}}  {row.median:+.3f}  {quartiles}  {counts}"


def _rank(change: Change) -> tuple[bool, bool, float]:
    """Sorts what is shown by its interval first, what has none last, and then by the difference."""
    return change.low is None, change.verdict == "no difference shown", -abs(change.difference)


def _difference(change: Change, what: str = "") -> str:
    if change.low is None or change.high is None:
        return f"{change.difference:+.3f} (no interval: {change.pictures} pictures)"
    return f"{change.difference:+.3f} ({what}{change.low:+.3f} to {change.high:+.3f})"


def _changes(changes: Mapping[str, Change], counted: str) -> Iterator[str]:
    if changes:
        yield f"  {'':{_NAME_WIDTH}}      a       b  {counted:>8}  b - a"
    for name, change in changes.items():
        values = f"{change.a:5.3f}   {change.b:5.3f}  {change.count:8}"
        yield f"  {_cut(name):{_NAME_WIDTH}}  {values}  {_difference(change)}"


def _cut(text: str, width: int = _NAME_WIDTH) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
