"""The device as Home Assistant's MQTT integration discovers it: one retained message, which names every sensor.

Needs Home Assistant 2024.11 or later ("device discovery").
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from edge_runtime.durable import sweep_aside, write_atomic
from edge_runtime.records.cameras import CameraState
from edge_runtime.records.events import ReportedCamera
from edge_runtime.records.identity import Identity
from edge_runtime.telemetry.topics import Topics

__all__ = ["FILE_NAME", "HomeAssistant", "discovery"]

log = logging.getLogger(__name__)

FILE_NAME = "home-assistant.json"

Stream = tuple[str, str]
"""A camera and a model that sees it: a window counts each pair apart."""

_PLATFORM = "sensor"
_EXPIRE_MIN_S = 30
_FRESH_MIN_S = 60
_MAX_GONE = 64
"""Components that are kept as removed: Home Assistant may be away for long, and reads it when it is back."""
_STATES = list(get_args(CameraState))


def discovery(
    prefix: str,
    identity: Identity,
    *,
    streams: Iterable[Stream],
    window_s: float,
    hardware: str | None,
    sensors: bool,
    known: Iterable[str] = (),
) -> tuple[str, bytes]:
    """Topic and payload of the one retained message that makes this device known.

    `prefix`: Home Assistant's discovery prefix. `window_s`: seconds of a window. `hardware`: the module's name, None
    where it is not known. `sensors`: whether this device measures watts and degrees; without, there is nothing about
    them. `known`: keys of the components of earlier messages, oldest first; those that are no more are removed.
    """
    topics = Topics(identity.device)
    object_id = _object_id(identity.device)
    found = _components(list(streams), max(_FRESH_MIN_S, 3 * window_s), sensors=sensors)
    gone = [key for key in known if key not in found][-_MAX_GONE:]
    components: dict[str, Mapping[str, Any]] = {key: {"platform": _PLATFORM} for key in gone}
    components |= {
        key: {
            "platform": _PLATFORM,
            "unique_id": f"{object_id}.{key}",
            "expire_after": max(_EXPIRE_MIN_S, math.ceil(3 * window_s)),
            **values,
        }
        for key, values in found.items()
    }
    device = {
        "identifiers": [object_id],
        "name": identity.device,
        "manufacturer": "edge-runtime",
        "sw_version": identity.version,
    }
    if hardware is not None:
        device["model"] = hardware
    payload = {
        "device": device,
        "origin": {"name": "edge-runtime", "sw_version": identity.version},
        # live copies too: while a backlog drains they alone say what is now
        "state_topic": f"{topics.root}/telemetry/+",
        "availability": [{"topic": topics.presence, "value_template": _AVAILABLE}],
        "components": components,
    }
    text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    return _topic(prefix, identity), text.encode()


def _topic(prefix: str, identity: Identity) -> str:
    return f"{prefix}/device/{_object_id(identity.device)}/config"


def _object_id(device: str) -> str:
    """Of letters, digits, - and _ only, as Home Assistant wants it; another device has another one."""
    return "edge_" + _escape(device, r"[^A-Za-z0-9-]")


def _escape(name: str, what: str) -> str:
    """`_` leads every escape, so that no two names become one."""
    return re.sub(
        what, lambda found: "__" if found[0] == "_" else "".join(f"_{b:02x}" for b in found[0].encode()), name
    )


def _keys(stream: Stream) -> tuple[str, str]:
    """Keys of a stream's components: state and FPS. The hyphen is the separator, hence none in a name."""
    camera, model = (_escape(name, r"[^A-Za-z0-9]") for name in stream)
    return f"camera-{camera}-{model}-state", f"camera-{camera}-{model}-fps"


# --- what Home Assistant renders for every message (Jinja)
# "None" is its word for unknown; nothing at all leaves a number as it is. So what is null is unknown, and a window out
# of a backlog changes nothing.

_AVAILABLE = "{{ 'online' if value_json is mapping and value_json.get('online') else 'offline' }}"


def _fresh(fresh_s: float) -> str:
    """Whether it is a window, and one of now. Where the device's clock is not set nobody can tell: it is taken."""
    return (
        "value_json is mapping and value_json.get('schema')=='edge.window/1' and (not value_json.clock_synced or "
        f"as_timestamp(utcnow())-as_timestamp(value_json.t_end_utc)<{fresh_s:g})"
    )


def _number(value: str, fresh_s: float) -> str:
    return f"{{% if {_fresh(fresh_s)} %}}{{{{ {value} }}}}{{% endif %}}"


def _word(value: str, fresh_s: float) -> str:
    """Of a sensor of words, which does not take nothing for an answer: its own state is told again."""
    kept = f"this.state if this is defined and this.state in {_STATES} else None"
    return f"{{% if {_fresh(fresh_s)} %}}{{{{ {value} }}}}{{% else %}}{{{{ {kept} }}}}{{% endif %}}"


def _of_stream(stream: Stream, field: str) -> str:
    camera, model = (json.dumps(name, ensure_ascii=False) for name in stream)
    return (
        f"(value_json.cameras|selectattr('name','eq',{camera})|selectattr('model','eq',{model})"
        f"|first|default({{}},true)).get('{field}')"
    )


def _of(part: str, field: str) -> str:
    return f"(value_json.{part} or {{}}).get('{field}')"


def _components(streams: list[Stream], fresh_s: float, *, sensors: bool) -> dict[str, dict[str, Any]]:
    def gauge(name: str, value: str, unit: str, precision: int, device_class: str | None = None) -> dict[str, Any]:
        return {
            "name": name,
            **({} if device_class is None else {"device_class": device_class}),
            "state_class": "measurement",
            "unit_of_measurement": unit,
            "suggested_display_precision": precision,
            "value_template": _number(value, fresh_s),
        }

    found = {
        "fps": gauge("FPS", "value_json.fps", "fps", 1),
        "latency_p99": gauge("Latency p99", _of("latency_ms", "p99"), "ms", 0, "duration"),
    }
    if sensors:
        found["power"] = gauge("Power", _of("energy", "mean_w"), "W", 2, "power")
        found["fps_per_watt"] = gauge("FPS per watt", "value_json.fps_per_watt", "fps/W", 2)
        found["temperature"] = gauge("Temperature", _of("thermal", "tj_c"), "°C", 1, "temperature")
    cameras = [camera for camera, _ in streams]
    for stream in streams:
        camera, model = stream
        name = camera if cameras.count(camera) == 1 else f"{camera} ({model})"
        state, fps = _keys(stream)
        found[state] = {
            "name": f"{name} state",
            "device_class": "enum",
            "options": _STATES,
            "value_template": _word(_of_stream(stream, "state"), fresh_s),
        }
        found[fps] = gauge(f"{name} FPS", _of_stream(stream, "fps"), "fps", 1)
    return found


# --- what was announced, over restarts


class _Told(BaseModel):
    """What is at the broker, as far as we know; on disk before it is."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    topic: str | None = None
    known: tuple[str, ...] = ()
    withdrawn: tuple[str, ...] = ()


class HomeAssistant:
    """Announces the device, and takes back what it has announced before, also in an earlier session.

    `prefix` None: it is not wanted (any more). `path`: the file that remembers. `set_retained` must not block.
    """

    def __init__(
        self,
        prefix: str | None,
        identity: Identity,
        path: Path,
        set_retained: Callable[[str, bytes], None],
        *,
        window_s: float,
        hardware: str | None,
        sensors: bool,
    ) -> None:
        self._prefix = prefix
        self._identity = identity
        self._path = path
        self._set_retained = set_retained
        self._window_s = window_s
        self._hardware = hardware
        self._sensors = sensors
        self._lock = threading.Lock()
        self._told = self._read()

    def announce(self, cameras: Iterable[ReportedCamera]) -> None:
        """Tell what there is now. For the start, and whenever cameras or their models change; any thread."""
        with self._lock:
            prefix = self._prefix
            self._move_to(None if prefix is None else _topic(prefix, self._identity))
            for left in self._told.withdrawn:
                self._set_retained(left, b"")
            if prefix is not None:
                streams = [(camera.name, model) for camera in cameras for model in camera.models]
                topic, payload = discovery(
                    prefix,
                    self._identity,
                    streams=streams,
                    window_s=self._window_s,
                    hardware=self._hardware,
                    sensors=self._sensors,
                    known=self._told.known,
                )
                known = tuple(json.loads(payload)["components"])
                self._write(_Told(topic=topic, known=known, withdrawn=self._told.withdrawn))
                self._set_retained(topic, payload)

    def settled(self) -> None:
        """The broker has acknowledged everything: what was taken back need not be taken back again."""
        with self._lock:
            if self._told.withdrawn:
                self._write(self._told.model_copy(update={"withdrawn": ()}))

    def _move_to(self, topic: str | None) -> None:
        told = self._told
        if told.topic == topic:
            return
        withdrawn = {*told.withdrawn, *([] if told.topic is None else [told.topic])} - {topic}
        self._write(_Told(topic=topic, withdrawn=tuple(sorted(withdrawn))))

    def _read(self) -> _Told:
        try:
            sweep_aside(self._path)
            return _Told.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            pass
        except (OSError, ValidationError) as error:
            log.warning("home assistant: %s cannot be read (%s): what it knew is left at the broker", self._path, error)
        return _Told()

    def _write(self, told: _Told) -> None:
        if told == self._told:
            return
        self._told = told
        try:
            write_atomic(self._path, told.model_dump_json().encode())
        except OSError as error:
            log.warning("home assistant: %s cannot be written (%s): it holds until the daemon ends", self._path, error)
