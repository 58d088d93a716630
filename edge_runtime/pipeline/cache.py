"""Answers that are given again: fewer inferences for the same results. One AnswerCache per model, shared by its lanes.

A lane asks with a frame's scaled picture, before the run. A hit is an earlier answer of this very engine; a miss comes
with a memo that takes the answer once there is one. `exact` asks whether this input was seen before, on any camera;
`scene` whether the camera still shows what its last answer was about (vision/scene.py).

Each kind has one leaf lock (or one per camera) that is held for a look-up in memory only.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from edge_runtime.engine.slot import Resident
from edge_runtime.pipeline.batch import Memo
from edge_runtime.pipeline.ledger import Stream
from edge_runtime.records.activity import CacheMode, CacheOutcome
from edge_runtime.records.frames import Classification, Detections, Float32Array, InputArray, Output, Transform
from edge_runtime.vision.scene import CameraNoise, is_still, luma_grid

MAX_ANSWERS = 64
"""Answers that `exact` keeps per model, the latest used."""
PROBE = 64
"""Look-ups after which `exact` judges whether they are worth it for a camera."""
USEFUL_HITS = 2
"""Hits among them below which they are not: a hash costs about 1/300 of a run."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 4096
"""Frames of a camera that nobody asks for then, twice as many each time."""
TRIAL_FRAMES = 20
"""So many frames an engine runs before any is spared it: whoever has just put it in place looks at them."""


@dataclass(frozen=True, slots=True)
class Look:
    """What a cache says to a frame: its answer (`hit`), or who takes it once there is one (`miss`), or nothing."""

    outcome: CacheOutcome
    output: Output | None = None
    memo: Memo | None = None


_BYPASSED = Look("bypassed")


class _Kind(Protocol):
    def look(self, stream: Stream, t_capture_ns: int, picture: InputArray, transform: Transform,
             resident: Resident) -> Look: ...  # fmt: skip

    def forget(self, stream: Stream) -> None: ...


class AnswerCache:
    """The cache of one model. Any thread; what it is set to changes while lanes ask."""

    def __init__(self, mode: CacheMode = "off", max_age_s: float = 10.0) -> None:
        self._settings = (mode, max_age_s)
        self._kind = _make(mode, max_age_s)

    @property
    def is_on(self) -> bool:
        """Whether it has to see scaled pictures."""
        return self._kind is not None

    def configure(self, mode: CacheMode, max_age_s: float) -> None:
        """From the next frame on; what was kept is forgotten where something changes. `max_age_s`: for `scene`."""
        if (mode, max_age_s) != self._settings:
            self._settings = (mode, max_age_s)
            self._kind = _make(mode, max_age_s)

    def look(
        self, stream: Stream, t_capture_ns: int, picture: InputArray, transform: Transform, resident: Resident
    ) -> Look | None:
        """Ask for a frame of `stream`; None where there is no cache.

        picture: one place of a batch of `resident`, C-contiguous; it is not kept.
        """
        kind = self._kind
        if kind is None:
            return None
        if resident.tally.total()[0] < TRIAL_FRAMES:
            return _BYPASSED
        return kind.look(stream, t_capture_ns, picture, transform, resident)

    def forget(self, stream: Stream) -> None:
        """Its camera was removed."""
        if self._kind is not None:
            self._kind.forget(stream)


def _make(mode: CacheMode, max_age_s: float) -> _Kind | None:
    if mode == "off":
        return None
    return ExactCache() if mode == "exact" else SceneCache(max_age_s)


# --- the same input

_Key = tuple[bytes, Transform, str]


@dataclass(slots=True)
class _Pause:
    """Whether looking up is worth it for one camera."""

    lookups: int = 0
    hits: int = 0
    left: int = 0
    length: int = FIRST_PAUSE

    def count(self, hit: bool) -> None:
        self.lookups += 1
        self.hits += hit
        if self.lookups < PROBE:
            return
        if self.hits < USEFUL_HITS:
            self.left = self.length
            self.length = min(2 * self.length, LONGEST_PAUSE)
        else:
            self.length = FIRST_PAUSE
        self.lookups = self.hits = 0


class ExactCache:
    """The same input to the same engine, lying in the same place of its source, has the same answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[_Key, Output] = OrderedDict()
        self._pauses: dict[Stream, _Pause] = {}

    def look(
        self,
        stream: Stream,
        t_capture_ns: int,  # noqa: ARG002  an answer to the same input does not age
        picture: InputArray,
        transform: Transform,
        resident: Resident,
    ) -> Look:
        with self._lock:
            if stream.removed:
                return _BYPASSED
            pause = self._pauses.get(stream)
            if pause is None:
                pause = self._pauses[stream] = _Pause()
            if pause.left:
                pause.left -= 1
                return _BYPASSED
        key = (xxhash.xxh3_128_digest(picture.data), transform, resident.info.digest)
        with self._lock:
            output = self._answers.get(key)
            pause.count(output is not None)
            if output is None:
                return Look("miss", memo=_ExactMemo(self, key))
            self._answers.move_to_end(key)
        return Look("hit", output)

    def keep(self, key: _Key, output: Output) -> None:
        with self._lock:
            self._answers[key] = output
            self._answers.move_to_end(key)
            if len(self._answers) > MAX_ANSWERS:
                self._answers.popitem(last=False)

    def forget(self, stream: Stream) -> None:
        with self._lock:
            self._pauses.pop(stream, None)


@dataclass(frozen=True, slots=True)
class _ExactMemo:
    cache: ExactCache
    key: _Key

    def keep(self, output: Output) -> None:
        self.cache.keep(self.key, _frozen(output))


# --- the same scene


@dataclass(frozen=True, slots=True)
class _Reference:
    """What an answer was about, and the answer."""

    grid: Float32Array
    transform: Transform
    engine: str
    t_capture_ns: int
    output: Output


class _Scene:
    """One camera's."""

    __slots__ = ("lock", "noise", "reference")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.noise = CameraNoise()
        self.reference: _Reference | None = None


class SceneCache:
    """A camera's last answer holds until something moves in its picture, or it is `max_age_s` old."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_ns = int(max_age_s * 1e9)
        self._lock = threading.Lock()
        self._scenes: dict[Stream, _Scene] = {}

    def look(
        self, stream: Stream, t_capture_ns: int, picture: InputArray, transform: Transform, resident: Resident
    ) -> Look:
        with self._lock:
            if stream.removed:
                return _BYPASSED
            scene = self._scenes.get(stream)
            if scene is None:
                scene = self._scenes[stream] = _Scene()
        grid = luma_grid(picture, resident.info.input, transform)
        with scene.lock:
            levels = scene.noise.observe(grid)
            reference = scene.reference
        if (
            reference is not None
            and (reference.transform, reference.engine) == (transform, resident.info.digest)
            and t_capture_ns - reference.t_capture_ns < self._max_age_ns
            and is_still(grid, reference.grid, levels)
        ):
            return Look("hit", reference.output)
        return Look("miss", memo=_SceneMemo(scene, grid, transform, resident.info.digest, t_capture_ns))

    def forget(self, stream: Stream) -> None:
        with self._lock:
            self._scenes.pop(stream, None)


@dataclass(frozen=True, slots=True)
class _SceneMemo:
    scene: _Scene
    grid: Float32Array
    transform: Transform
    engine: str
    t_capture_ns: int

    def keep(self, output: Output) -> None:
        """Unless another lane was faster with a later frame."""
        scene = self.scene
        reference = _Reference(self.grid, self.transform, self.engine, self.t_capture_ns, _frozen(output))
        with scene.lock:
            if scene.reference is None or scene.reference.t_capture_ns < self.t_capture_ns:
                scene.reference = reference


_Scalar = TypeVar("_Scalar", bound=np.generic)


def _frozen(output: Output) -> Output:
    """A copy that many results may share: nobody can change it, and it holds nothing else alive."""
    if isinstance(output, Detections):
        boxes, scores, class_ids = _fixed(output.boxes), _fixed(output.scores), _fixed(output.class_ids)
        return Detections(boxes, scores, class_ids, output.cut, output.invalid)
    return Classification(_fixed(output.scores), _fixed(output.class_ids))


def _fixed(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    array = array.copy()
    array.flags.writeable = False
    return array
