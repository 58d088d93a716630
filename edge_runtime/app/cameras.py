"""The cameras in force: the configuration's, and over them what commands and the governor have done to them.

A change is all or nothing. Cameras that can be made are made before anything else is touched (nothing of a source is
opened by that); then the change is kept in the store, so that a kill at any instant leaves the old set or the new one
for the next start; then cameras come and go, and those that the change does not name notice nothing.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from pydantic import JsonValue

from edge_runtime.app.camera_set import DownCamera, Fleet, OpenSource, difference
from edge_runtime.app.overlay import Entry, Overlay, OverlayFile, resolve
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import CameraConfig, camera_table, check_camera
from edge_runtime.errors import EdgeError, RefusedError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.commands import CameraAction, CameraResult
from edge_runtime.records.events import ReportedCamera, Scalar, Severity
from edge_runtime.records.status import CameraOrigin
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

NEWCOMER_HZ = 1.0
"""What a new camera may have, or its `min_fps`, where the governor holds others back and has not seen it yet."""

Tell = Callable[[Severity, str, Mapping[str, Scalar]], None]
"""Takes an event about a camera: how bad, in words, and for machines."""


class CameraKeeper:
    """Holds the cameras, applies every change of them, and remembers what commands wanted. Any thread may call.

    `configured`: the file's; `models`: the names of those that run. `tell` gets events, `changed` is called when other
    cameras are in force or a command wants something else of one; both on the thread that changes it.
    """

    def __init__(
        self,
        configured: Sequence[CameraConfig],
        models: Sequence[str],
        pipeline: Pipeline,
        file: OverlayFile,
        open_source: OpenSource,
        *,
        tell: Tell,
        changed: Callable[[], None],
    ) -> None:
        self._configured = tuple(configured)
        self._models = tuple(models)
        self._pipeline = pipeline
        self._file = file
        self._fleet = Fleet(pipeline, open_source, self._put)
        self._tell = tell
        self._changed = changed
        self._changing = threading.Lock()  # held over a whole change
        self._lock = threading.Lock()  # a leaf but for a camera's own: what is below is whole under it
        self._cameras = self._configured
        self._overlay = self._kept = Overlay()
        self._troubles: Mapping[str, str] = {}
        self._unsaved: str | None = None
        self._limits: dict[str, float] = {}
        self._lost: frozenset[str] = frozenset()  # in force, and not there: a change failed, and so did taking it back

    # --- the start

    def load(self) -> None:
        """Take over what commands did before the start. Once, before everything else; raises nothing."""
        self._overlay = self._kept = self._file.load()
        resolved = resolve(self._configured, self._overlay, self._models)
        self._cameras, self._overlay, self._troubles = resolved.cameras, resolved.overlay, resolved.troubles

    def start(self) -> None:
        """Give every camera to the pipeline. One that cannot be made is `down`; the others are not held up."""
        for config in self._cameras:
            try:
                camera = self._fleet.make(config)
            except EdgeError as error:
                log.error("%s", error)
                reason = error.message if error.remedy is None else f"{error.message} ({error.remedy})"
                camera = DownCamera(config.name, redact_text(reason), time.monotonic_ns())
            self._put(config, camera)

    def tell_start(self) -> None:
        """An event for everything that is not as commands wanted it; once events can be sent."""
        for text in self.alarms():
            self._tell("error", text, {"change": "not in force"})

    # --- looking

    def cameras(self) -> tuple[CameraConfig, ...]:
        """Those in force, each with what commands have changed of it."""
        return self._cameras

    def removed(self) -> list[str]:
        """Configured cameras that a command has removed."""
        with self._lock:
            there = {each.name for each in self._cameras}
            return [each.name for each in self._configured if each.name not in there]

    def wanted(self) -> dict[str, float | None]:
        """The rate that people want of every camera now, frames per second; None: the source's own."""
        with self._lock:
            return {each.name: lowest(each.fps, self._cap_of(each)) for each in self._cameras}

    def reported(self) -> list[ReportedCamera]:
        """Every camera, as `reported` has it."""
        with self._lock:
            return [
                ReportedCamera(
                    name=each.name,
                    models=list(each.models),
                    source=self._origin(each.name),
                    paused=each.name in self._overlay.paused,
                    cap_fps=self._cap_of(each),
                )
                for each in self._cameras
            ]

    def alarms(self) -> list[str]:
        """What commands did and is not in force or not kept, until it is put right or reset."""
        found = []
        if (trouble := self._file.trouble) is not None:
            found.append(f"what commands did to cameras is not known: {trouble}; the configuration's run")
        if self._unsaved is not None:
            found.append(self._unsaved)
        if lost := sorted(self._lost):
            found.append(
                f"not running since a change of cameras failed: {', '.join(lost)}; the next change tries again"
            )
        return found + [
            f"camera {name}: {why}; it counts again, or `edge-runtime camera reset {name}` ends it"
            for name, why in self._troubles.items()
        ]

    # --- the governor

    def limit(self, name: str, fps: float | None) -> None:
        """The governor's own cap, frames per second, 0: none; None lifts it. At full pace, too: there it makes the
        source wait. Nothing where the camera has been removed since the governor looked."""
        with self._lock:
            config = self._find(name)
            if config is None or self._limits.get(name) == fps:
                return
            if fps is None:
                del self._limits[name]
            else:
                self._limits[name] = fps
            self._set_cap(config)

    # --- commands that any door may bring

    def pause(self, name: str) -> CameraResult:
        """Implements control.commands.CameraControl, as all that follow."""
        return self._switch(name, "pause", lambda overlay: overlay.with_pause(name, paused=True))

    def resume(self, name: str) -> CameraResult:
        return self._switch(name, "resume", lambda overlay: overlay.with_pause(name, paused=False))

    def cap(self, name: str, fps: float | None) -> CameraResult:
        config = self._find(name)
        if fps is not None and config is not None and config.pace == "max":
            raise EdgeError(
                f'camera {name!r} plays with pace = "max": as fast as its model, a cap has no meaning',
                code="full_pace",
                where="args.fps",
                remedy='set pace = "realtime"',
            )
        return self._switch(name, "cap", lambda overlay: overlay.with_cap(name, fps))

    # --- commands of the control socket

    def add(self, table: Mapping[str, JsonValue]) -> CameraResult:
        config = self._check(table)
        name = config.name
        with self._changing:
            if self._find(name) is not None:
                raise RefusedError(
                    f"there is a camera {name} already", code="camera_exists", where="args.camera.name",
                    remedy="change it, or give this one another name",
                )  # fmt: skip
            if any(each.name == name for each in self._configured):
                raise RefusedError(
                    f"camera {name} is the configuration's, and was removed by a command",
                    code="camera_exists", where="args.camera.name",
                    remedy=f"`edge-runtime camera reset {name}` brings it back, and then it can be changed",
                )  # fmt: skip
            keys = {key: value for key, value in camera_table(config).items() if key != "name"}
            return self._command("add", name, self._overlay.with_entry(name, Entry("added", keys)))

    def change(self, name: str, keys: Mapping[str, JsonValue]) -> CameraResult:
        with self._changing:
            self._require(name)
            if "name" in keys:
                raise EdgeError(
                    "camera.name: a camera keeps its name", code="invalid", where="args.camera",
                    remedy="add another one and remove this",
                )  # fmt: skip
            entry = self._overlay.entries.get(name)
            configured = next((each for each in self._configured if each.name == name), None)
            if entry is not None and entry.did == "added" and configured is not None:
                raise RefusedError(
                    f"camera {name} was added by a command and is in the configuration now, otherwise",
                    code="camera_exists", where="args.name",
                    remedy=f"`edge-runtime camera reset {name}` first: it forgets what was added",
                )  # fmt: skip
            before: Mapping[str, JsonValue] = {} if entry is None else entry.keys
            base = {} if configured is None else camera_table(configured)
            config = self._check({**base, **before, **keys, "name": name})
            if configured is None:
                kept = {key: value for key, value in camera_table(config).items() if key != "name"}
                entry = Entry("added", kept)
            else:
                entry = Entry("changed", {**before, **keys})
            return self._command("change", name, self._overlay.with_entry(name, entry))

    def remove(self, name: str) -> CameraResult:
        with self._changing:
            self._require(name)
            overlay = self._overlay.without(name)
            if any(each.name == name for each in self._configured):
                overlay = overlay.with_entry(name, Entry("removed"))
            return self._command("remove", name, overlay)

    def reset(self, name: str | None) -> CameraResult:
        with self._changing:
            if name is not None and not self._overlay.touches(name):
                if not any(each.name == name for each in self._configured):
                    raise self._unknown(name)
                return self._command("reset", name, self._overlay)
            return self._command("reset", name, Overlay() if name is None else self._overlay.without(name))

    # --- the configuration was read again

    def apply(self, configured: Sequence[CameraConfig]) -> list[str]:
        """Take over the [[camera]] tables of a configuration; what commands have done goes over them as before.

        Returns what of the file is not in force for that reason, in words. Raises EdgeError where nothing was taken
        over: every camera runs on as it did.
        """
        with self._changing:
            for each in configured:
                if missing := [model for model in each.models if model not in self._models]:
                    raise RefusedError(f"its model {missing[0]} does not run here yet", code="needs_restart",
                                       where=f"camera {each.name}", remedy="restart the daemon")  # fmt: skip
            before = {each.name: each for each in self._configured}
            self._become(tuple(configured), self._overlay, "configuration")
            return [
                f"camera {each.name}: what a command did to it goes before what the file says, "
                f"until `edge-runtime camera reset {each.name}`"
                for each in configured
                if before.get(each.name) != each and self._find(each.name) != each
            ]

    # --- under `_changing`

    def _switch(self, name: str, action: CameraAction, switched: Callable[[Overlay], Overlay]) -> CameraResult:
        with self._changing:
            self._require(name)
            return self._command(action, name, switched(self._overlay))

    def _command(self, action: CameraAction, name: str | None, overlay: Overlay) -> CameraResult:
        done, unsaved = self._become(self._configured, overlay, "command")
        notes = [] if unsaved is None else [f"it is in force, and the next start will not know of it: {unsaved}"]
        config = None if name is None else self._find(name)
        return CameraResult(
            name=name,
            action=action,
            fps=None if config is None else self._cap_of(config),
            done=done,
            persisted=unsaved is None,
            notes=notes,
        )

    def _become(
        self, configured: tuple[CameraConfig, ...], overlay: Overlay, by: str
    ) -> tuple[list[str], EdgeError | None]:
        """Bring what comes of these into force: what was done, and why it is not kept. Raises EdgeError: nothing was
        done."""
        resolved = resolve(configured, overlay, self._models)
        before = [each for each in self._cameras if each.name not in self._lost]
        steps = difference(before, resolved.cameras)
        fresh = self._fleet.make_all(steps)
        unsaved = self._save(resolved.overlay, by)
        try:
            for step in steps:
                if step.did == "added":
                    self._limit_newcomer(step.camera)
            self._fleet.change(steps, fresh)
        except Exception as error:  # noqa: BLE001  told, without an address that may be in it
            why = str(error) if isinstance(error, EdgeError) else redact_text(traceback.format_exc())
            log.warning("a change of cameras failed half-way and is taken back: %s", why)
            self._lost |= self._fleet.take_back(before, steps, fresh)
            self._save(self._overlay, by)
            raise error if isinstance(error, EdgeError) else _failed(error) from None
        with self._lock:
            old = self._overlay
            self._configured, self._cameras = configured, resolved.cameras
            self._overlay, self._troubles = resolved.overlay, resolved.troubles
            self._lost = frozenset()
            names = {each.name for each in self._cameras}
            self._limits = {name: fps for name, fps in self._limits.items() if name in names}
            switched = _switched(old, self._overlay)
            fresh_names = {step.name for step in steps if step.did in ("added", "replaced")}
            for config in self._cameras:
                if config.name in fresh_names | switched.keys():
                    self._set_cap(config)
                if config.name in fresh_names | (old.paused ^ self._overlay.paused):
                    self._set_pause(config)
        for step in steps:
            self._tell("info", f"{step}, by {'a command' if by == 'command' else 'the configuration'}", {
                "camera": step.name, "change": step.did, "by": by, "keys": ", ".join(step.keys) or None,
            })  # fmt: skip
        if steps or old != self._overlay:
            self._changed()
        told = [f"camera {name}: {words}" for name, words in switched.items() if name in names]
        for text in told:
            log.info("%s, by a command", text)
        return [*map(str, steps), *told], unsaved

    def _put(self, config: CameraConfig, camera: Camera) -> None:
        if config.name in self._overlay.paused:
            camera.pause()  # before its first read: it is not opened for nothing
        self._pipeline.add_camera(camera, config.models, full_pace=config.pace == "max", priority=config.priority)
        with self._lock:
            self._set_cap(config)

    def _limit_newcomer(self, config: CameraConfig) -> None:
        with self._lock:
            self._limits.pop(config.name, None)
            if self._limits:
                self._limits[config.name] = max(config.min_fps or 0.0, NEWCOMER_HZ)

    def _save(self, overlay: Overlay, by: str) -> EdgeError | None:
        """Keep it, where it is not kept already. Why not, where that fails."""
        # over a file that could not be read only somebody who wants something of a camera puts another one
        known = self._file.trouble is None or by != "command"
        if overlay == self._kept and self._unsaved is None and known:
            return None
        try:
            self._file.save(overlay)
        except EdgeError as error:
            self._unsaved = f"what a command did to cameras is in force, and not for the next start: {error}"
            log.error("%s", self._unsaved)
            return error
        self._kept, self._unsaved = overlay, None
        return None

    def _check(self, table: Mapping[str, JsonValue]) -> CameraConfig:
        there = {key: value for key, value in table.items() if value is not None}
        return check_camera(there, self._models, where="args.camera")

    def _require(self, name: str) -> None:
        if self._find(name) is None:
            raise self._unknown(name)

    def _unknown(self, name: str) -> EdgeError:
        return EdgeError(
            f"there is no camera {redact_text(name)!r}",
            code="unknown_camera",
            where="args.name",
            remedy=f"there are: {', '.join(sorted(each.name for each in self._cameras)) or 'none'}",
        )

    # --- small

    def _find(self, name: str) -> CameraConfig | None:
        return next((each for each in self._cameras if each.name == name), None)

    def _origin(self, name: str) -> CameraOrigin:
        used = self._overlay.touches(name) and name not in self._troubles
        return "overlay" if used else "configuration"

    def _cap_of(self, config: CameraConfig) -> float | None:
        """What a command allows, frames per second. At full pace that has no meaning."""
        return None if config.pace == "max" else self._overlay.caps.get(config.name)

    def _set_cap(self, config: CameraConfig) -> None:
        if (camera := self._pipeline.camera(config.name)) is not None:
            camera.set_cap(lowest(self._cap_of(config), self._limits.get(config.name)))

    def _set_pause(self, config: CameraConfig) -> None:
        if (camera := self._pipeline.camera(config.name)) is None:
            return
        if config.name in self._overlay.paused:
            camera.pause()
        else:
            camera.resume()


def lowest(*rates: float | None) -> float | None:
    """The lowest of the rates that are there; None: there is none."""
    return min((rate for rate in rates if rate is not None), default=None)


def _switched(before: Overlay, after: Overlay) -> dict[str, str]:
    """Which cameras are paused or capped otherwise, in words."""
    words: dict[str, list[str]] = {}
    for name in sorted(before.paused ^ after.paused):
        words.setdefault(name, []).append("paused" if name in after.paused else "resumed")
    for name in sorted({name for name, _ in before.caps.items() ^ after.caps.items()}):
        fps = after.caps.get(name)
        words.setdefault(name, []).append("no cap any more" if fps is None else f"at most {fps:g} fps")
    return {name: ", ".join(each) for name, each in words.items()}


def _failed(error: Exception) -> EdgeError:
    return EdgeError(
        f"the cameras could not be changed: {type(error).__name__}", code="change_failed", remedy="see the log"
    )
