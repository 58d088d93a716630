"""From one set of cameras to another: what differs, in which order it is done, and what opens a camera."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from edge_runtime.bundled import bundled_media
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import CameraConfig
from edge_runtime.errors import CameraError, EdgeError
from edge_runtime.pipeline.pipeline import Pipeline
from edge_runtime.records.cameras import CameraEffort, CameraStatus, SourceCounters
from edge_runtime.records.frames import Frame
from edge_runtime.records.spec import InputSpec
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

OpenSource = Callable[[CameraConfig], Camera]

LIVE_KEYS: Final = frozenset({"fps", "min_fps", "priority", "model"})
"""What changes while a camera runs on. For any other key it is opened anew."""

LET_GO_S = 2.0
"""How long cameras that go may take to let go of their devices before those come that may want the same ones. A network
camera in a read that does not end goes by its own time-out, and nobody waits for it."""

_ORDER: Final = ("removed", "replaced", "changed", "added")
"""What is let go of first: another one may want the very same device."""


@dataclass(frozen=True, slots=True)
class Step:
    """What happens to one camera. `camera` is as it will be (or was, where it is removed), `keys` what differs."""

    did: Literal["added", "removed", "changed", "replaced"]
    camera: CameraConfig
    keys: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.camera.name

    def __str__(self) -> str:
        if self.did in ("added", "removed"):
            return f"camera {self.name}: {self.did}"
        return f"camera {self.name}: {', '.join(self.keys)} changed" + (
            ", opened anew" if self.did == "replaced" else ""
        )


def difference(before: Iterable[CameraConfig], after: Iterable[CameraConfig]) -> list[Step]:
    """What makes `after` of `before`, in the order in which to do it."""
    old, new = {each.name: each for each in before}, {each.name: each for each in after}
    steps = [Step("removed", camera) for name, camera in old.items() if name not in new]
    for name, camera in new.items():
        if name not in old:
            steps.append(Step("added", camera))
        elif keys := changed_keys(old[name], camera):
            steps.append(Step("changed" if LIVE_KEYS.issuperset(keys) else "replaced", camera, keys))
    return sorted(steps, key=lambda step: _ORDER.index(step.did))


def changed_keys(before: CameraConfig, after: CameraConfig) -> tuple[str, ...]:
    """The keys, by their names in a file, in which two cameras differ."""
    fields = CameraConfig.model_fields.items()
    return tuple(field.alias or name for name, field in fields if getattr(before, name) != getattr(after, name))


def open_source(config: CameraConfig) -> Camera:
    """The camera that a [[camera]] table means. Nothing is opened before its first `read`. Raises CameraError."""
    url = f"file:{bundled_media(config.source.location)}" if config.source.kind == "bundled" else config.url
    return open_camera(
        CameraOptions(
            name=config.name,
            url=url,
            fps=config.fps,
            pace=config.pace,
            loop=config.loop,
            transport=config.transport,
            stall_s=config.stall_s,
            backend=config.backend,
            isolation=config.isolation,
            ca_file=None if config.ca_file is None else str(config.ca_file),
        )
    )


class Fleet:
    """The cameras of a pipeline, as a change takes them from one set to another. For one thread at a time.

    `put` gives a camera that was made to the pipeline.
    """

    def __init__(self, pipeline: Pipeline, opener: OpenSource, put: Callable[[CameraConfig, Camera], None]) -> None:
        self._pipeline = pipeline
        self._opener = opener
        self._put = put

    def make(self, config: CameraConfig) -> Camera:
        """The camera of a table. Raises EdgeError without credentials, whatever the opener raises."""
        try:
            return self._opener(config)
        except EdgeError as error:
            raise CameraError(
                redact_text(error.message), code=error.code, where=f"camera {config.name}", remedy=error.remedy
            ) from None
        except Exception as error:  # noqa: BLE001
            # a foreign message may hold the address
            log.warning("camera %s cannot be made: %s", config.name, redact_text(traceback.format_exc()))
            raise CameraError(
                f"it cannot be made: {type(error).__name__}", where=f"camera {config.name}", remedy="see the log"
            ) from None

    def make_all(self, steps: Sequence[Step]) -> dict[str, Camera]:
        """The cameras that are to come, by name. Nothing of a source is opened yet. Raises EdgeError: none is left."""
        fresh: dict[str, Camera] = {}
        try:
            for step in steps:
                if step.did in ("added", "replaced"):
                    fresh[step.name] = self.make(step.camera)
        except EdgeError:
            for camera in fresh.values():
                _throw_away(camera)
            raise
        return fresh

    def change(self, steps: Sequence[Step], fresh: Mapping[str, Camera]) -> None:
        """Do all of it. What it raises may leave it half done: then `take_back`."""
        for step in steps:
            if step.did in ("removed", "replaced"):
                self._pipeline.remove_camera(step.name)
        if fresh:
            self._pipeline.await_removed(LET_GO_S)
        for step in steps:
            if step.did == "changed":
                self._retune(step.camera)
            elif step.did != "removed":
                self._put(step.camera, fresh[step.name])

    def take_back(
        self, before: Sequence[CameraConfig], steps: Sequence[Step], fresh: Mapping[str, Camera]
    ) -> frozenset[str]:
        """Bring back what was there before `steps`, of which some may have been done; the names of those that are lost.
        At a stop nobody comes back, and none is lost."""
        for name, camera in fresh.items():
            if self._pipeline.camera(name) is camera:
                self._pipeline.remove_camera(name)
            else:
                _throw_away(camera)
        self._pipeline.await_removed(LET_GO_S)
        old = {each.name: each for each in before}
        lost = set()
        for step in steps:
            config = old.get(step.name)
            if config is None:
                continue
            try:
                if step.did == "changed":
                    self._retune(config)
                elif self._pipeline.camera(step.name) is None:
                    self._bring_back(config)
            except Exception as error:  # noqa: BLE001  told, without an address that may be in it
                if isinstance(error, EdgeError) and error.code == "stopping":
                    return frozenset()
                lost.add(step.name)
                log.error("camera %s could not be brought back: %s", step.name, redact_text(traceback.format_exc()))
        return frozenset(lost)

    def _bring_back(self, config: CameraConfig) -> None:
        camera = self.make(config)
        try:
            self._put(config, camera)
        except BaseException:
            _throw_away(camera)
            raise

    def _retune(self, config: CameraConfig) -> None:
        """What changes while a camera runs on."""
        if (camera := self._pipeline.camera(config.name)) is not None:
            camera.set_base(config.fps)
            self._pipeline.set_priority(config.name, config.priority)
            self._pipeline.set_models(config.name, config.models)


def _throw_away(camera: Camera) -> None:
    """One that nobody has read."""
    camera.stop()
    camera.close()


class DownCamera:
    """In the place of a camera that cannot even be made: `down` for a reason, and nothing ever comes of it."""

    def __init__(self, name: str, reason: str, since_ns: int) -> None:
        self._name = name
        self._status = CameraStatus("down", reason, since_ns)

    @property
    def name(self) -> str:
        return self._name

    def read(self) -> Frame | None:
        return None

    def stop(self) -> None:
        pass

    def close(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def set_cap(self, fps: float | None) -> None:
        pass

    def set_base(self, fps: float | None) -> None:
        pass

    def expect(self, inputs: Sequence[InputSpec]) -> None:
        pass

    def status(self) -> CameraStatus:
        return self._status

    def source(self) -> SourceCounters:
        return SourceCounters()

    def effort(self) -> CameraEffort:
        return CameraEffort()
