"""What a camera's process and its parent tell each other: one JSON object a datagram, checked as foreign on arrival.

The child decodes data of strangers. Whatever it sends may be a lie, and must not do more than end it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from edge_runtime.camera.shared_frames import MAX_PICTURE_BYTES, MAX_SIDE_PX, PIXEL_FORMATS, SLOTS, PictureForm
from edge_runtime.records.cameras import CameraEffort, CameraState, SourceCounters
from edge_runtime.records.spec import InputSpec
from edge_runtime.source_url import redact_text

MAX_MESSAGE_BYTES = 64 * 1024
_MAX_TEXT = 2000
_MAX_COUNT = 1 << 62
_STATES = get_args(CameraState)
_COUNTERS = tuple(field.name for field in fields(SourceCounters))
_EFFORTS = ("decode_cpu_ns", "saved_cpu_ns", "opened")
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


class MessageError(Exception):
    """A message that cannot be what it should be."""


@dataclass(frozen=True, slots=True)
class Report:
    """How the child's camera stands. `counters` and `effort` are since the child began; what `counters` says of
    `decoded` is not used (see IsolatedCamera).

    `ticks` counts up while its reading loop moves; `resting`: it waits for something else than a foreign call.
    """

    state: CameraState
    reason: str | None
    since_ns: int
    counters: SourceCounters
    effort: CameraEffort
    ticks: int
    resting: bool


@dataclass(frozen=True, slots=True)
class FrameSent:
    """A picture lies in a slot. `report` is None where the last one is recent and the state the same."""

    slot: int
    t_capture_ns: int
    form: PictureForm
    report: Report | None


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """The child needs memory for pictures of so many bytes."""

    picture_bytes: int


@dataclass(frozen=True, slots=True)
class LogLine:
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The camera has ended by itself, in the state that was reported last; nothing follows."""

    report: Report


FromChild = Report | FrameSent | MemoryWanted | LogLine | Ended


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a camera is asked for, all of it at once, so that any earlier one can be lost.

    `base_set`: whether `base` counts; otherwise the configured rate does.
    """

    paused: bool = False
    cap: float | None = None
    base: float | None = None
    base_set: bool = False
    inputs: tuple[InputSpec, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Wanted:
        """From `as_dict` after JSON, which knows no tuples."""
        inputs = [{**each, "mean": tuple(each["mean"]), "std": tuple(each["std"])} for each in values["inputs"]]
        return cls(**{**values, "inputs": tuple(InputSpec(**each) for each in inputs)})


def encode(message: FromChild) -> bytes:
    """For the parent: what `decode` reads."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode()


def decode(data: bytes) -> FromChild:
    """What a child sent. Raises MessageError, and nothing else, where it is not entirely in order."""
    try:
        facts = json.loads(data)
        read = _READERS[facts.pop("kind")]
        message = read(facts)
    except Exception as error:  # noqa: BLE001  whatever a stranger's message can bring about is its own fault
        raise MessageError(f"{type(error).__name__} in {data[:60]!r}") from None
    if facts:
        raise MessageError(f"unknown words in {data[:60]!r}")
    return message


def _whole(value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _text(value: object) -> str:
    """Text for a log or a status: of bounded length, without what a terminal would obey, and without credentials."""
    if type(value) is not str:
        raise ValueError
    value = value[:_MAX_TEXT].encode("utf-8", "replace").decode()
    return redact_text("".join(each if each.isprintable() or each == "\n" else " " for each in value))


def _read_report(facts: dict[str, Any]) -> Report:
    state, reason, effort = facts.pop("state"), facts.pop("reason"), facts.pop("effort")
    counters = facts.pop("counters")
    if state not in _STATES:
        raise ValueError
    report = Report(
        state=state,
        reason=None if reason is None else _text(reason),
        since_ns=_whole(facts.pop("since_ns"), 0, _MAX_COUNT),
        counters=SourceCounters(**{name: _whole(counters.pop(name), 0, _MAX_COUNT) for name in _COUNTERS}),
        effort=CameraEffort(
            **{name: _whole(effort.pop(name), 0, _MAX_COUNT) for name in _EFFORTS},
            backend=None if (backend := effort.pop("backend")) is None else _text(backend)[:100],
        ),
        ticks=_whole(facts.pop("ticks"), 0, _MAX_COUNT),
        resting=_flag(facts.pop("resting")),
    )
    if counters or effort:
        raise ValueError
    return report


def _read_form(facts: dict[str, Any]) -> PictureForm:
    turn, shown, name = facts.pop("turn"), facts.pop("shown"), facts.pop("pixel_format")
    if name not in PIXEL_FORMATS:
        raise ValueError
    form = PictureForm(
        pixel_format=name,
        width=_whole(facts.pop("width"), 1, MAX_SIDE_PX),
        height=_whole(facts.pop("height"), 1, MAX_SIDE_PX),
        matrix=_whole(facts.pop("matrix"), 0, 17),
        range=_whole(facts.pop("range"), 0, 2),
        siting=_whole(facts.pop("siting"), 0, 6),
        interlaced=_flag(facts.pop("interlaced")),
        turn=(_flag(turn[0]), _flag(turn[1]), _flag(turn[2])),
        shown=None if shown is None else (_whole(shown[0], 1, MAX_SIDE_PX), _whole(shown[1], 1, MAX_SIDE_PX)),
    )
    if facts or len(turn) != 3 or (shown is not None and len(shown) != 2):
        raise ValueError
    if form.size_bytes > MAX_PICTURE_BYTES:
        raise ValueError
    return form


def _read_inner_report(facts: dict[str, Any]) -> Report:
    inner = facts.pop("report")
    report = _read_report(inner)
    if inner:
        raise ValueError
    return report


def _read_frame(facts: dict[str, Any]) -> FrameSent:
    return FrameSent(
        slot=_whole(facts.pop("slot"), 0, SLOTS - 1),
        t_capture_ns=_whole(facts.pop("t_capture_ns"), 0, _MAX_COUNT),
        form=_read_form(facts.pop("form")),
        report=None if facts["report"] is None and facts.pop("report", True) is None else _read_inner_report(facts),
    )


def _read_memory(facts: dict[str, Any]) -> MemoryWanted:
    return MemoryWanted(_whole(facts.pop("picture_bytes"), 1, MAX_PICTURE_BYTES))


def _read_log(facts: dict[str, Any]) -> LogLine:
    level = facts.pop("level")
    if level not in _LEVELS:
        raise ValueError
    return LogLine(level, _text(facts.pop("text")))


def _read_ended(facts: dict[str, Any]) -> Ended:
    return Ended(_read_inner_report(facts))


_READERS: dict[str, Callable[[dict[str, Any]], FromChild]] = {
    "Report": _read_report,
    "FrameSent": _read_frame,
    "MemoryWanted": _read_memory,
    "LogLine": _read_log,
    "Ended": _read_ended,
}
