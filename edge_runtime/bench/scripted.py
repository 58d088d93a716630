"""Cameras whose rate is changed while they run, with pictures that are decoded already."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path

from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import Intake, Picture, Session
from edge_runtime.camera.source import SourceCamera
from edge_runtime.records.frames import Pixels

DRIFT = 0.01
"""How far a camera's clock may be off: cameras in step for ever are a chance that no second run would have."""


def decoded(clip: Path, count: int) -> list[Pixels]:
    """The first `count` pictures of a clip, or as many as it has."""
    camera = open_camera(CameraOptions(name="clip", url=f"file:{clip.resolve()}", pace="max", loop=False))
    pictures: list[Pixels] = []
    while len(pictures) < count and (frame := camera.read()) is not None:
        pictures.append(frame.pixels)
    camera.stop()
    camera.close()
    return pictures


class Pace:
    """How many pictures cameras have brought together by now: at a rate, Hz, that changes as it is told."""

    def __init__(self, hz: float) -> None:
        self._changed = threading.Condition()
        self._hz = hz
        self._since_s = time.monotonic()
        self._before = 0.0
        self._ended = False

    def set(self, hz: float) -> None:
        """From now on; whoever waits by a slower one wakes. Cameras are no more in step than they were."""
        with self._changed:
            now_s = time.monotonic()
            self._before += self._hz * (now_s - self._since_s)
            self._hz, self._since_s = hz, now_s
            self._changed.notify_all()

    def end(self) -> None:
        """Nobody waits any more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, count: float) -> float:
        """Until there are so many; when that is or was, monotonic."""
        with self._changed:
            while True:
                due_s = self._since_s + (count - self._before) / self._hz
                left_s = due_s - time.monotonic()
                if self._ended or left_s <= 0:
                    return due_s
                self._changed.wait(left_s)


class _ScriptedSession:
    interval_ns: int | None = None

    def __init__(self, pictures: Sequence[Pixels], pace: Pace, share: float, first: int, phase: float) -> None:
        self._pictures = pictures
        self._pace = pace
        self._share = share
        self._first = first
        self._phase = phase

    def pictures(self) -> Iterator[Picture]:
        order = cycle([*self._pictures[self._first :], *self._pictures[: self._first]])
        last_ns = 0
        for number, pixels in enumerate(order):
            due_ns = int(self._pace.wait((number + self._phase) / self._share) * 1e9)
            last_ns = max(last_ns + 1, due_ns)
            yield Picture(pixels, last_ns, last_ns)

    def close(self) -> None:
        pass


class _ScriptedCamera(SourceCamera):
    def __init__(self, name: str, session: Session, pace: Pace) -> None:
        def opener(_: Intake) -> Session:
            return session

        super().__init__(name, opener, live=True)
        self._pace = pace

    def stop(self) -> None:
        super().stop()
        self._pace.end()


def scripted_camera(name: str, number: int, of: int, pace: Pace, pictures: Sequence[Pixels]) -> SourceCamera:
    """Camera `number` of `of`, live, each with about its share of the rate; captured when it is due."""
    share = (1 + DRIFT * (2 * number / max(1, of - 1) - 1)) / of
    phase = random.Random(number).random()
    first = number * len(pictures) // of
    return _ScriptedCamera(name, _ScriptedSession(pictures, pace, share, first, phase), pace)
