"""`prepare capture`: a folder of unlike pictures of a source, to calibrate with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from edge_runtime.durable import write_atomic
from edge_runtime.engine.probe import ReadImage
from edge_runtime.errors import EdgeError, UsageError
from edge_runtime.prepare.diversity import NOVELTY, Selection, describe
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels

__all__ = ["MANIFEST", "MOST", "PRIVACY", "CaptureResult", "Captured", "Seen", "capture"]

MANIFEST = "capture.json"
PRIVACY = (
    "these are pictures as the camera sees them, of people perhaps: keep them where only those may look who may look "
    "at the camera, and delete them when they are no longer needed"
)
_NAME = re.compile(r"picture-(\d{6})\.png")
MOST = 5000
"""Every two of them are compared: of so many, the table of distances takes 100 MB."""
_LEVEL = 3
_SAVED_EVERY = 32
"""Changes after which the manifest is written; a picture that it does not name yet is taken up all the same."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A picture of the source, and which: its number from 0, and of a live source the time."""

    pixels: Pixels
    number: int
    taken_utc: datetime | None = None


@dataclass(slots=True)
class Captured:
    """A picture that is kept: `novelty` is its distance from the others when it came, None for the first."""

    file: str
    source: str | None
    number: int | None
    taken_utc: str | None
    width: int
    height: int
    novelty: float | None
    size_bytes: int

    def as_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class CaptureResult:
    """What lies in the folder now. `looked_at`: pictures of this run; `before`: pictures that were there before it.
    `closest`: the least distance of two pictures, None for fewer. `ended`: why it ended."""

    folder: Path
    pictures: tuple[Captured, ...]
    looked_at: int
    before: int
    closest: float | None
    ended: str


def capture(
    pictures: Iterable[Seen],
    out_dir: Path,
    *,
    source: str,
    count: int,
    max_bytes: int,
    read_image: ReadImage,
    until_full: bool = False,
    novelty: float = NOVELTY,
    progress: Callable[[int, int], None] = lambda *_: None,
) -> CaptureResult:
    """Keep at most `count` pictures that are unlike each other, as PNGs of full size in `out_dir`, no more than
    `max_bytes` together, and a manifest, capture.json.

    `out_dir` is made where it is missing; with a manifest in it, its pictures are gone on from. `source` is how it is
    named in the manifest (without a password). until_full: end as soon as there are `count`. progress: called with how
    many were looked at and how many are kept. Memory does not grow with `pictures`. An exception out of `pictures`,
    KeyboardInterrupt too, comes out when all that was kept is on disk and in the manifest.

    Raises UsageError for a folder that is something else or holds more than is allowed now, for a `count` beyond MOST,
    EdgeError (code "write_failed") when the disk refuses.
    """
    if count > MOST:
        raise UsageError(f"{count} pictures are too many to compare", remedy=f"{MOST} is the most, 1000 are plenty")
    folder = _Folder(out_dir, Selection(count, novelty), source, max_bytes)
    try:
        before = folder.open(read_image)
        looked_at, ended = 0, "the source ended"
        try:
            for seen in pictures:
                looked_at += 1
                folder.offer(seen)
                progress(looked_at, len(folder.kept))
                if until_full and len(folder.kept) >= folder.selection.capacity:
                    full = len(folder.kept) < count
                    ended = "they take as much of the disk as they may" if full else "there are as many as were wanted"
                    break
        finally:
            folder.save()
    except OSError as error:
        raise EdgeError(
            f"the pictures cannot be written: {error.strerror or error}",
            code="write_failed",
            where=str(out_dir),
            remedy="check free space and rights; what was kept before is there, and the same command goes on",
        ) from error
    closest = folder.selection.closest if len(folder.kept) > 1 else None
    kept = tuple(folder.kept[key] for key in sorted(folder.kept))
    return CaptureResult(out_dir, kept, looked_at, before, closest, ended)


@dataclass(slots=True)
class _Folder:
    """The pictures on disk and what is known of them."""

    path: Path
    selection: Selection
    source: str
    max_bytes: int
    kept: dict[str, Captured] = field(default_factory=dict)
    _next: int = 1
    _unsaved: int = 0

    def open(self, read_image: ReadImage) -> int:
        """Take up what is there; returns how many. Raises UsageError and OSError."""
        self.path.mkdir(mode=0o700, parents=False, exist_ok=True)
        there = {path.name: path for path in self.path.iterdir() if not path.name.startswith(".")}
        rows = self._rows(there)
        for left in (*self.path.glob(".picture-*.png.*.new"), *self.path.glob(f".{MANIFEST}.*.new")):
            left.unlink(missing_ok=True)  # of a run that was killed while it wrote
        mine = sorted(name for name in there if _NAME.fullmatch(name) is not None)
        self._next = max((int(name[8:14]) + 1 for name in mine), default=1)
        sizes = {name: there[name].stat().st_size for name in mine}
        if len(mine) > self.selection.capacity or sum(sizes.values()) > self.max_bytes:
            raise UsageError(
                f"holds {len(mine)} pictures of {sum(sizes.values()) / 1e6:.1f} MB, more than are allowed",
                where=str(self.path),
                remedy="allow as many by --count and --max-mb, or remove some of them yourself",
            )
        for name in mine:
            try:
                pixels = read_image(there[name])
            except EdgeError:
                there[name].unlink()  # the disk lost it
                continue
            row = rows.get(name) or Captured(name, None, None, None, pixels.width, pixels.height, None, 0)
            row.size_bytes = sizes[name]
            self._take(name, row, self.selection.add(name, describe(pixels)))
        self.save()  # from here on the folder is known for ours
        return len(self.kept)

    def _rows(self, there: dict[str, Path]) -> dict[str, Captured]:
        manifest = there.pop(MANIFEST, None)
        if manifest is None:
            if there:
                raise UsageError("exists, and holds something else", where=str(self.path), remedy="name a new folder")
            return {}
        try:
            rows = json.loads(manifest.read_bytes())["pictures"]
            return {row["file"]: Captured(**row) for row in rows}
        except (ValueError, KeyError, TypeError):
            remedy = "remove it: the pictures are taken up without what it says of them"
            raise UsageError("is no list of captured pictures", where=str(manifest), remedy=remedy) from None

    def offer(self, seen: Seen) -> None:
        """Keep a picture where it is unlike those that are kept."""
        descriptor = describe(seen.pixels)
        if not self.selection.wants(descriptor):
            return
        data = encode_png(seen.pixels.to_rgb(), _LEVEL)
        if len(data) > self.max_bytes:
            remedy = "allow more by --max-mb"
            raise UsageError(f"one picture takes {len(data) / 1e6:.1f} MB", where=str(self.path), remedy=remedy)
        near = self.selection.nearest(descriptor)
        if self._size_bytes() + len(data) > self.max_bytes:
            # the disk's share is full: from here on there is room for so many
            self.selection.capacity = max(1, min(self.selection.capacity, len(self.kept)))
            if not self.selection.wants(descriptor):
                return
            self._make_room(len(data))
        name = f"picture-{self._next:06d}.png"
        self._next += 1
        when = (
            None if seen.taken_utc is None else seen.taken_utc.astimezone(timezone.utc).isoformat("T", "milliseconds")
        )
        row = Captured(
            name,
            self.source,
            seen.number,
            when,
            seen.pixels.width,
            seen.pixels.height,
            round(near, 4) if self.kept else None,
            len(data),
        )
        write_atomic(self.path / name, data, mode=0o600)
        self._take(name, row, self.selection.add(name, descriptor))
        self._unsaved += 1
        if self._unsaved >= _SAVED_EVERY:
            self.save()

    def _take(self, name: str, row: Captured, gone: list[str]) -> None:
        self.kept[name] = row
        for each in gone:
            self._remove(each)

    def _make_room(self, more_bytes: int) -> None:
        while self.kept and self._size_bytes() + more_bytes > self.max_bytes:
            self._remove(self.selection.give_up())

    def _size_bytes(self) -> int:
        return sum(row.size_bytes for row in self.kept.values())

    def _remove(self, name: str) -> None:
        self.kept.pop(name, None)
        with suppress(FileNotFoundError):
            (self.path / name).unlink()

    def save(self) -> None:
        """Write the manifest. Raises OSError."""
        document = {
            "format": 1,
            "note": PRIVACY,
            "novelty": self.selection.novelty,
            "pictures": [self.kept[key].as_dict() for key in sorted(self.kept)],
        }
        write_atomic(self.path / MANIFEST, f"{json.dumps(document, indent=1)}\n".encode(), mode=0o600)
        self._unsaved = 0
