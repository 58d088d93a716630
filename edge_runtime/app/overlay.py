"""What commands have done to cameras, over what the configuration says: kept in the store until it is reset."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from edge_runtime.config import CameraConfig, camera_table, check_camera
from edge_runtime.durable import REAL, Files, put_aside, sweep_aside, write_atomic
from edge_runtime.errors import EdgeError

OVERLAY_NAME = "cameras.json"
"""In the store."""


@dataclass(frozen=True, slots=True, repr=False)
class Entry:
    """What was done to one camera. `keys`: of an added one all keys but its name; of a changed one those that differ
    from the configuration's, None: without that key. May hold credentials."""

    did: Literal["added", "changed", "removed"]
    keys: Mapping[str, JsonValue] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Entry({self.did!r}, {sorted(self.keys)})"


@dataclass(frozen=True, slots=True)
class Overlay:
    """All of it: by camera's name what was done to it, which are paused, and caps in frames per second."""

    entries: Mapping[str, Entry] = field(default_factory=dict)
    paused: frozenset[str] = frozenset()
    caps: Mapping[str, float] = field(default_factory=dict)

    def touches(self, name: str) -> bool:
        """Whether there is anything in it about a camera."""
        return name in self.entries or name in self.paused or name in self.caps

    def with_entry(self, name: str, entry: Entry | None) -> Overlay:
        """With another entry for a camera, None: with none."""
        others = {each: kept for each, kept in self.entries.items() if each != name}
        return replace(self, entries=others if entry is None else {**others, name: entry})

    def with_pause(self, name: str, *, paused: bool) -> Overlay:
        return replace(self, paused=self.paused | {name} if paused else self.paused - {name})

    def with_cap(self, name: str, fps: float | None) -> Overlay:
        """With a cap for a camera; None: with none."""
        others = {each: cap for each, cap in self.caps.items() if each != name}
        return replace(self, caps=others if fps is None else {**others, name: fps})

    def without(self, name: str) -> Overlay:
        """As if nothing had been done to a camera."""
        return self.with_entry(name, None).with_pause(name, paused=False).with_cap(name, None)


@dataclass(frozen=True, slots=True)
class Resolved:
    """What comes of a configuration and an overlay.

    `overlay` is without what no longer says anything; `troubles`: what of it could not be used, and why, by name.
    """

    cameras: tuple[CameraConfig, ...]
    overlay: Overlay
    troubles: Mapping[str, str]


def resolve(configured: Sequence[CameraConfig], overlay: Overlay, models: Sequence[str]) -> Resolved:
    """The cameras in force: the configured ones in their order, then those that were added. Pure, raises nothing.

    An entry that cannot be used any more (its model is gone; the camera that it changed is no longer configured, or
    one that was added is configured otherwise now) is left in the overlay and not used: somebody may put right what
    it waits for, or reset it.
    """
    found: dict[str, CameraConfig] = {}
    troubles: dict[str, str] = {}
    known = {camera.name: camera for camera in configured}
    for name, camera in known.items():
        entry = overlay.entries.get(name)
        if entry is None or entry.did == "removed":
            found |= {name: camera} if entry is None else {}
            continue
        merged = _try(name, {**camera_table(camera), **entry.keys} if entry.did == "changed" else entry.keys, models)
        if entry.did == "added":
            found[name] = camera
            if merged == camera:
                overlay = overlay.with_entry(name, None)  # the file says the same now: nothing is over it any more
            else:
                troubles[name] = "it was added by a command, and the configuration has another one of that name now"
        elif isinstance(merged, EdgeError):
            found[name], troubles[name] = camera, f"what was changed by a command cannot be used: {merged}"
        else:
            found[name] = merged
            if merged == camera:
                overlay = overlay.with_entry(name, None)
    for name, entry in dict(overlay.entries).items():
        if name in known:
            continue
        if entry.did == "removed":
            overlay = overlay.with_entry(name, None)
        elif entry.did == "changed":
            troubles[name] = "it was changed by a command, and is no longer configured"
        elif isinstance(made := _try(name, entry.keys, models), EdgeError):
            troubles[name] = f"it was added by a command and cannot be used: {made}"
        else:
            found[name] = made
    return Resolved(tuple(found.values()), _without_strangers(overlay, {*known, *overlay.entries}), troubles)


def _try(name: str, keys: Mapping[str, JsonValue], models: Sequence[str]) -> CameraConfig | EdgeError:
    table = {key: value for key, value in keys.items() if value is not None}
    try:
        return check_camera({**table, "name": name}, models, where=f"camera {name}")
    except EdgeError as error:
        return error


def _without_strangers(overlay: Overlay, names: Collection[str]) -> Overlay:
    """A camera that nobody knows any more shall not be found paused when it comes back one day."""
    caps = {name: fps for name, fps in overlay.caps.items() if name in names}
    return replace(overlay, paused=overlay.paused & set(names), caps=caps)


class _Model(BaseModel):
    # values may hold credentials, and somebody may log pydantic's own message one day
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, hide_input_in_errors=True)


class _KeptEntry(_Model):
    name: str
    did: Literal["added", "changed", "removed"]
    keys: dict[str, JsonValue]


class _Kept(_Model):
    schema_: Literal["edge.cameras/1"] = Field(default="edge.cameras/1", alias="schema")
    cameras: list[_KeptEntry]
    paused: list[str]
    caps: dict[str, Annotated[float, Field(gt=0, le=1000)]]


class OverlayFile:
    """The file of an overlay, for its owner alone to read. One thread at a time."""

    def __init__(self, path: Path, *, files: Files = REAL) -> None:
        self._path = path
        self._files = files
        self._lock = threading.Lock()
        self._unreadable = False
        self.trouble: str | None = None
        """What is wrong with the file; None when nothing is."""

    def load(self) -> Overlay:
        """What is kept; an empty overlay where the file is missing. Also clears what a kill left beside it.

        A damaged file is put aside as `NAME.damaged`; that one, and one that cannot be read, count as empty, and
        `trouble` says so. Raises nothing.
        """
        with self._lock:
            try:
                sweep_aside(self._path, files=self._files)
            except OSError:
                pass  # a disk that takes no writes can still be read
            self.trouble, self._unreadable = None, False
            try:
                found = _Kept.model_validate_json(self._path.read_bytes())
            except FileNotFoundError:
                return Overlay()
            except OSError as error:
                self.trouble, self._unreadable = f"{self._path} cannot be read: {error.strerror}", True
                return Overlay()
            except ValidationError as error:
                self.trouble = f"{self._path} is damaged: {error.errors(include_input=False)[0]['msg']}"
                self.trouble += put_aside(self._path, files=self._files)
                return Overlay()
            entries = {each.name: Entry(each.did, each.keys) for each in found.cameras}
            return Overlay(entries, frozenset(found.paused), found.caps)

    def save(self, overlay: Overlay) -> None:
        """Put it in the place of what is kept: afterwards it is on disk.

        Raises EdgeError (code "store_write_failed", or "store_unreadable": nobody knows what would be lost); what was
        kept stays.
        """
        with self._lock:
            if self._unreadable and self._path.exists():
                raise EdgeError(
                    "what commands have done to cameras before could not be read",
                    code="store_unreadable",
                    where=str(self._path),
                    remedy="check owner and rights, and the disk (dmesg); then restart",
                )
            kept = _Kept(
                cameras=[
                    _KeptEntry(name=name, did=entry.did, keys=dict(entry.keys))
                    for name, entry in overlay.entries.items()
                ],
                paused=sorted(overlay.paused),
                caps=dict(overlay.caps),
            )
            try:
                data = kept.model_dump_json(by_alias=True, indent=2).encode() + b"\n"
                write_atomic(self._path, data, mode=0o600, files=self._files)
            except OSError as error:
                raise EdgeError(
                    f"what commands do to cameras cannot be saved: {error.strerror or error}",
                    code="store_write_failed",
                    where=str(self._path),
                    remedy="look at the disk (df, dmesg)",
                ) from error
            self.trouble, self._unreadable = None, False
