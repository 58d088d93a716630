"""What a configuration may not say: rules over several keys, what is not built yet, and how problems are put.

Pydantic checks key by key and stops before rules over several keys once one key is wrong. An operator wants all
problems at once, so these rules read the raw document, and skip what is of the wrong type: that has been said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeGuard, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from edge_runtime.config_values import Right, is_loopback, kind_of, render
from edge_runtime.errors import UsageError
from edge_runtime.source_url import CameraSource, parse_source
from edge_runtime.toml_source import KeyPath

# Known, checked, and refused with the reason: whoever builds one deletes its row. The key path has no indexes;
# "= VALUE" narrows a row to one value, and to one scheme for an address ("= rtsp" covers rtsps too).
NOT_YET: Final[dict[str, str]] = {
    "update": "updates over MQTT",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, before it has a place in the file."""

    path: KeyPath
    message: str
    remedy: str | None


# ---- rules over several keys


def rule_findings(data: dict[str, Any], base: Path) -> Iterator[Finding]:
    """Everything wrong that a look at one key alone does not show, and every use of what is not built yet."""
    yield from _not_yet(data, base)
    for key, use in (("camera", "there is nothing to look at"), ("model", "there is nothing to run")):
        if data.get(key, []) == []:
            path: KeyPath = (key,) if key in data else ()
            yield Finding(path, f"no {key} is configured: {use}", f"add a [[{key}]] table")
        yield from _twice(data, key)
    yield from _cameras_rules(data, base)
    for index, model in _tables(data, "model"):
        if "cache_max_age_s" in model and model.get("cache", "off") in ("off", "exact"):
            message = f'{render(model["cache_max_age_s"])} has no meaning without cache = "scene"'
            yield Finding(("model", index, "cache_max_age_s"), message, 'leave it out, or set cache = "scene"')
        if model.get("letterbox") == "gpu":
            yield from _gpu_letterbox_rules(index, model)
    if isinstance(mqtt := data.get("mqtt"), dict):
        yield from _mqtt_rules(mqtt)
    if isinstance(web := data.get("web"), dict):
        yield from _web_rules(web)
    if isinstance(budget := data.get("budget"), dict):
        device = data.get("device")
        yield from _budget_rules(budget, device.get("hardware") if isinstance(device, dict) else None)


def _gpu_letterbox_rules(index: int, model: dict[str, Any]) -> Iterator[Finding]:
    path: KeyPath = ("model", index, "letterbox")
    if model.get("backend") == "onnxruntime":
        yield Finding(
            path, '"gpu" has no meaning with backend = "onnxruntime"', "leave it out, or choose another backend"
        )
    if model.get("cache", "off") in ("exact", "scene"):
        message = f'"gpu" is not possible with cache = {render(model["cache"])}: a cache looks at scaled pictures'
        yield Finding(path, message, 'leave it out, or set cache = "off"')


def camera_findings(camera: dict[str, Any], models: Sequence[str], base: Path) -> Iterator[Finding]:
    """The same for the keys of one [[camera]] that does not come from a file, beside the configured `models`."""
    data = {"camera": [camera], "model": [{"name": name} for name in models]}
    yield from _not_yet({"camera": [camera]}, base)
    yield from _cameras_rules(data, base)
    for key, why in (("url", _is_relative(camera.get("url"))), ("ca_file", _is_relative_path(camera.get("ca_file")))):
        if why:
            message = f"{render(camera[key])} is a relative path, and there is no file here that it could count from"
            yield Finding(("camera", 0, key), message, "write the path in full, from / on")


def _is_relative(url: object) -> bool:
    if not isinstance(url, str):
        return False
    found = {_source({"url": url}, Path(base)) for base in ("/a", "/b")}
    return len(found) > 1


def _is_relative_path(path: object) -> bool:
    return isinstance(path, str) and path != "" and not path.startswith(("/", "~"))


def _cameras_rules(data: dict[str, Any], base: Path) -> Iterator[Finding]:
    models = model_names(data)
    for index, camera in _tables(data, "camera"):
        yield from _models_of_camera(index, camera, models)
        yield from _camera_rules(index, camera, base)


def model_names(data: dict[str, Any]) -> list[str]:
    """The names of the configured models, as far as they are text, each once."""
    return list({name: None for _, model in _tables(data, "model") if isinstance(name := model.get("name"), str)})


def _tables(data: dict[str, Any], key: str) -> list[tuple[int, dict[str, Any]]]:
    value = data.get(key)
    return [(i, item) for i, item in enumerate(value) if isinstance(item, dict)] if isinstance(value, list) else []


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _source(camera: dict[str, Any], base: Path) -> CameraSource | None:
    """The camera's source, None if it is missing or wrong (which is said elsewhere)."""
    url = camera.get("url")
    try:
        return parse_source(url, base) if isinstance(url, str) else None
    except UsageError:
        return None


def _not_yet(data: dict[str, Any], base: Path) -> Iterator[Finding]:
    def look(path: KeyPath, value: Any) -> Iterator[Finding]:
        key = ".".join(part for part in path if isinstance(part, str))
        shown: object = value
        if key == "camera.url" and (source := _source({"url": value}, base)) is not None:
            shown = source.kind
        for row, what, remedy in (
            (key, "", f"leave the table [{key}] out for now" if isinstance(value, dict) else "leave it out for now"),
            (f"{key} = {shown}" if isinstance(shown, str) else "", f"{render(value)} is ", "use another one for now"),
        ):
            if row in NOT_YET:
                yield Finding(path, f"{what}known, but this version can't do it yet: {NOT_YET[row]}", remedy)
        if len(path) > 3:  # no key lies deeper, and a hostile file may nest hundreds of lists
            return
        if isinstance(value, dict):
            for name, child in value.items():
                yield from look((*path, name), child)
        elif isinstance(value, list):
            for index, child in enumerate(value):
                yield from look((*path, index), child)

    for name, child in data.items():
        yield from look((name,), child)


def _twice(data: dict[str, Any], key: str) -> Iterator[Finding]:
    first: dict[str, int] = {}
    for index, table in _tables(data, key):
        name = table.get("name")
        if isinstance(name, str) and first.setdefault(name, index) != index:
            message = f"{render(name)} is already the name of {key}[{first[name] + 1}]"
            yield Finding((key, index, "name"), message, f"give every {key} a name of its own")


def _models_of_camera(index: int, camera: dict[str, Any], models: list[str]) -> Iterator[Finding]:
    wanted = camera.get("model")
    if wanted is None:
        if len(models) > 1:
            message = "is missing, and there are several models"
            yield Finding(("camera", index, "model"), message, f"add model = one of {_choices(models)}")
        return
    is_list = isinstance(wanted, list)
    for place, name in enumerate(wanted if is_list else [wanted]):
        if isinstance(name, str) and name not in models:
            path: KeyPath = ("camera", index, "model", place) if is_list else ("camera", index, "model")
            yield Finding(path, f"{render(name)} is no configured model", nearest(name, models))


def _camera_rules(index: int, camera: dict[str, Any], base: Path) -> Iterator[Finding]:
    fps, min_fps = camera.get("fps"), camera.get("min_fps")
    if camera.get("pace") == "max" and "fps" in camera:
        message = f'{render(fps)} has no meaning with pace = "max", which is as fast as the model'
        yield Finding(("camera", index, "fps"), message, 'leave fps out, or write pace = "realtime"')
    if _is_number(fps) and _is_number(min_fps) and min_fps > fps:
        remedy = f"at most fps = {render(fps)}"
        yield Finding(("camera", index, "min_fps"), f"{render(min_fps)} is more than fps", remedy)
    source = _source(camera, base)
    if source is not None and not source.is_recording:
        for key in ("pace", "loop"):
            if key in camera:
                message = f"{render(camera[key])} has no meaning here: only files have a {key}, this is {source.kind}"
                yield Finding(("camera", index, key), message, "leave it out")
    if source is not None:
        yield from _capture_rules(index, camera, source)


_ONLY_OF: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "transport": (("rtsp",), "RTSP cameras have a transport"),
    "ca_file": (("rtsp", "http"), "cameras at an rtsps:// or https:// address have a certificate"),
    "stall_s": (("rtsp", "http", "v4l2", "csi", "gst"), "live sources can stall"),
}


def _capture_rules(index: int, camera: dict[str, Any], source: CameraSource) -> Iterator[Finding]:
    for key, (kinds, why) in _ONLY_OF.items():
        if key in camera and source.kind not in kinds:
            message = f"{render(camera[key])} has no meaning here: only {why}, this is {source.kind}"
            yield Finding(("camera", index, key), message, "leave it out")
    if "ca_file" in camera and source.kind in ("rtsp", "http") and not re.match(r"(?i)(rtsps|https):", source.url):
        message = f"{render(camera['ca_file'])} has no meaning for an address without encryption"
        yield Finding(("camera", index, "ca_file"), message, "write rtsps:// or https://, or leave it out")
    backend = camera.get("backend")
    if backend == "pyav" and source.kind in ("csi", "gst"):
        yield Finding(("camera", index, "backend"), f'"pyav" cannot read {source.kind}:', 'write "gstreamer" or "auto"')
    if backend == "gstreamer" and source.kind in ("bundled", "synthetic"):
        yield Finding(("camera", index, "backend"), f'"gstreamer" cannot read {source.kind}:', 'write "auto"')


_BROKER_KEYS = ("tls", "username", "password_file", "ca_file", "cert_file", "key_file")


def _mqtt_rules(mqtt: dict[str, Any]) -> Iterator[Finding]:
    if "host" in mqtt and "broker" in mqtt:
        message = f"{render(mqtt['broker'])} and host = {render(mqtt['host'])} exclude each other"
        yield Finding(("mqtt", "broker"), message, "keep host for a real broker, broker for a trial")
    if "broker" in mqtt and "host" not in mqtt:
        for key in _BROKER_KEYS:
            if key in mqtt:
                message = 'has no meaning with broker = "embedded"'
                yield Finding(("mqtt", key), message, "leave it out, or name a host in place of broker")
        return
    for key, other in (("cert_file", "key_file"), ("key_file", "cert_file"), ("password_file", "username")):
        if key in mqtt and other not in mqtt:
            yield Finding(("mqtt", key), f"{render(mqtt[key])} is of no use without {other}", f"add {other}")


_MEASURED = {"power_w": "watts", "temperature_c": "degrees"}


def _budget_rules(budget: dict[str, Any], hardware: object) -> Iterator[Finding]:
    if not {"power_w", "temperature_c", "latency_p99_ms"} & budget.keys():
        remedy = "give it power_w, temperature_c or latency_p99_ms, or leave the table out"
        yield Finding(("budget",), "holds nothing: it names no budget", remedy)
    power_w, most_w = budget.get("power_w"), budget.get("max_power_w")
    if _is_number(power_w) and _is_number(most_w) and power_w > most_w:
        remedy = f"at most max_power_w = {render(most_w)}"
        yield Finding(("budget", "power_w"), f"{render(power_w)} is more than max_power_w", remedy)
    for key, unit in _MEASURED.items():
        if hardware == "none" and key in budget:
            message = f'{render(budget[key])} could not be held: with hardware = "none" nothing tells the {unit}'
            yield Finding(("budget", key), message, f'leave {key} out, or set [device] hardware = "auto" or "jetson"')


def _web_rules(web: dict[str, Any]) -> Iterator[Finding]:
    listen = web.get("listen")
    if isinstance(listen, str) and "token_file" not in web:
        host = listen.rpartition(":")[0].strip("[]")
        if host and not is_loopback(host):
            message = f"{render(listen)} is open to other machines, and there is no token"
            yield Finding(("web", "listen"), message, "add token_file, or listen on 127.0.0.1")


# ---- what pydantic found, in the operator's words


def validation_findings(error: ValidationError, root: type[BaseModel]) -> Iterator[Finding]:
    """The findings of pydantic over a document of `root`, whose fields carry `Right` and a description.

    Values are shown short and without credentials; the error itself holds them in full and must not be chained.
    """
    for details in error.errors(include_url=False):
        path: KeyPath = tuple(details["loc"])
        yield Finding(path, *_worded(details, path, root))


def _worded(details: ErrorDetails, path: KeyPath, root: type[BaseModel]) -> tuple[str, str | None]:
    kind, value, context = details["type"], details["input"], details.get("ctx", {})
    field = _field_at(root, path)
    right = right_of(field).words if field is not None else None
    if kind == "extra_forbidden":
        return "unknown key", _known_key(root, path)
    if kind == "missing":
        return "is missing", f"add {path[-1]} = {right}"
    if kind == "edge":
        return str(context["message"]), context["remedy"] or right
    shown = render(value)
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        header = f"[[{path[-2]}]]" if isinstance(path[-1], int) else f"[{path[-1]}]"
        return f"{shown} stands where a table belongs", f"write its keys below a line {header}"
    if kind == "literal_error":
        choices = [str(choice) for choice in _literals(field)]
        if not isinstance(value, str) and str(value) in choices:
            return f"{shown} is {kind_of(value)}, not text", f'put it in quotes: {path[-1]} = "{value}"'
        return f"{shown} is not one of the choices", nearest(str(value), choices)
    if kind == "finite_number":
        return f"{shown} is no finite number", right
    if kind.endswith("_type") or kind.startswith("int_"):
        return f"{shown} is {kind_of(value)}", right
    if kind.startswith(("greater_than", "less_than")):
        return f"{shown} is out of range", right
    return f"{shown} is not right", right


def right_of(field: FieldInfo) -> Right:
    """What a field's annotation says would be right."""
    return next((item for item in field.metadata if isinstance(item, Right)), Right(field.description or ""))


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """A table's fields by the key they have in a file."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def table_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a field that is a table or an array of tables, else None."""
    pending: list[Any] = [field.annotation]
    while pending:
        hint = pending.pop()
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            return hint
        pending.extend(get_args(hint))
    return None


def _field_at(root: type[BaseModel], path: KeyPath) -> FieldInfo | None:
    table: type[BaseModel] | None = root
    field = None
    for part in path:
        if isinstance(part, str):
            field = keys_of(table).get(part) if table is not None else None
            table = table_of(field) if field is not None else None
    return field


def _known_key(root: type[BaseModel], path: KeyPath) -> str:
    """The remedy for an unknown key: the nearest key here, else the same key elsewhere, else all there are."""
    key, above = str(path[-1]), _field_at(root, path[:-1])
    here = (table_of(above) if above is not None else None) or root
    near = get_close_matches(key.lower().replace("-", "_"), keys_of(here), n=1)
    if near:
        return f"did you mean {near[0]}?" if here is not root else f"did you mean {_header(root, near[0])}?"
    homes = [name for name, field in keys_of(root).items() if (table := table_of(field)) and key in keys_of(table)]
    if homes:
        return f"it belongs below {' or '.join(_header(root, home) for home in homes)}"
    return f"known here: {', '.join(keys_of(here))}"


def _header(root: type[BaseModel], name: str) -> str:
    is_array = getattr(keys_of(root)[name].annotation, "__origin__", None) is tuple
    return f"[[{name}]]" if is_array else f"[{name}]"


def _literals(field: FieldInfo | None) -> Iterator[object]:
    pending: list[Any] = [field.annotation] if field is not None else []
    while pending:
        hint = pending.pop(0)
        arguments = get_args(hint)
        if arguments and not any(get_args(item) or isinstance(item, type) for item in arguments):
            yield from arguments
        else:
            pending.extend(arguments)


def nearest(value: str, choices: list[str]) -> str | None:
    """A remedy that names the nearest of the choices, or all; None without choices."""
    near = get_close_matches(value, choices, n=1)
    if near:
        return f"did you mean {render(near[0])}?"
    return f"one of {_choices(choices)}" if choices else None


def _choices(choices: list[str]) -> str:
    return ", ".join(render(choice) for choice in choices)
