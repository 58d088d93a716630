"""Labelled pictures of a classifier: a `labels.txt`, or a folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from edge_runtime.camera.media import list_images
from edge_runtime.prepare.annotations import Entry, Faults, Listing, invalid

__all__ = ["read_classes"]

LIST_NAME = "labels.txt"


def read_classes(root: Path, labels: Sequence[str]) -> Listing:
    """The pictures below `root` with their class.

    Where there is a `labels.txt`, each of its lines is `FILE CLASS` (a tab between them where the file's name
    holds a space), and other pictures are not looked at; else every folder in `root` is called by a class and
    holds its pictures. CLASS is a label of the model (case does not matter) or its index. Raises UsageError.
    """
    finder = _ClassFinder(labels)
    listed = root / LIST_NAME
    if listed.is_file():
        kind, entries, notes = "labels.txt", *_read_list(listed, finder)
    else:
        kind, entries, notes = "folders", *_read_folders(root, finder)
    if not entries:
        raise invalid(root, "labels no picture at all", f"write {LIST_NAME} with lines `FILE CLASS`")
    return Listing(root, kind, entries, [*notes, *finder.notes])


class _ClassFinder:
    def __init__(self, labels: Sequence[str]) -> None:
        self._count = len(labels)
        self._places: dict[str, list[int]] = {}
        self.notes: list[str] = []
        for place, label in enumerate(labels):
            self._places.setdefault(label.strip().casefold(), []).append(place)

    def find(self, word: str) -> int | str:
        """The class that is called so, or why there is none."""
        places = self._places.get(word.strip().casefold(), [])
        index = int(word) if word.isdecimal() and int(word) < self._count else None
        if len(places) == 1:
            if index not in (None, places[0]):
                note = f"{word!r} is taken as the label, not as the class of that number"
                self.notes += [note] if note not in self.notes else []
            return places[0]
        if index is not None:
            return index
        if places:
            return f"the label {word!r} stands for the classes {', '.join(map(str, places))}: write a number"
        return f"there is no class {word!r} among the model's {self._count} labels"


def _read_list(file: Path, finder: _ClassFinder) -> tuple[list[Entry], list[str]]:
    faults = Faults()
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(file, f"cannot be read: {error}", "save it as UTF-8 text") from None
    entries: dict[str, Entry] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        name, _, word = (part.strip() for part in line.strip().partition("\t" if "\t" in line else " "))
        if not word:
            faults.add(file, f"{line!r} is not `FILE CLASS`", line=number)
            continue
        found = finder.find(word)
        if isinstance(found, str):
            faults.add(file, found, line=number)
        elif name in entries:
            faults.add(file, f"{name!r} has a line already", line=number)
        elif not (file.parent / name).is_file():
            faults.add(file, f"there is no picture {name!r} beside it", line=number)
        else:
            entries[name] = Entry(name, file.parent / name, word.encode(), found)
    faults.refuse()
    unlisted = sum(path.name not in entries for path in list_images(file.parent))
    notes = [f"{unlisted} pictures have no line in {file.name} and are left out"] if unlisted else []
    return list(entries.values()), notes


def _read_folders(root: Path, finder: _ClassFinder) -> tuple[list[Entry], list[str]]:
    faults = Faults()
    entries: list[Entry] = []
    seen: dict[int, Path] = {}
    empty = 0
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")):
        pictures = list_images(folder)
        if not pictures:
            empty += 1
            continue
        found = finder.find(folder.name)
        if isinstance(found, str):
            faults.add(folder, found, remedy="call the folder by a label or its index")
            continue
        if found in seen:
            faults.add(folder, f"is the same class as {seen[found].name}", remedy="put them into one folder")
            continue
        seen[found] = folder
        word = folder.name.encode()
        entries += [Entry(f"{folder.name}/{path.name}", path, word, found) for path in pictures]
    faults.refuse()
    if loose := sum(1 for _ in list_images(root)):
        raise invalid(root, f"holds {loose} pictures without a class", f"put them into folders, or write {LIST_NAME}")
    return entries, [f"{empty} folders hold no picture"] if empty else []
