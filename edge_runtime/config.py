"""The daemon's configuration: every key, its default and its range, and how a file becomes a `Config`.

A file is checked as a whole: `load_config` reports every problem at once, each with its line. What is allowed
beyond one key's own range, and what this version cannot do yet, is in `config_rules`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    PrivateAttr,
    ValidationError,
)
from pydantic.fields import FieldInfo

from edge_runtime.config_rules import (
    Finding,
    camera_findings,
    keys_of,
    model_names,
    right_of,
    rule_findings,
    table_of,
    validation_findings,
)
from edge_runtime.config_values import (
    BUNDLED_BUNDLES,
    FILE,
    NAME,
    PUBLIC_KEY,
    SECRET,
    SWITCH,
    Right,
    auto_or_count,
    check_bundle,
    check_host,
    check_listen,
    check_name,
    check_names,
    check_path,
    check_public_key,
    check_public_keys,
    check_repository,
    check_secret,
    check_source,
    check_tables,
    check_topic_prefix,
    check_variants,
    default_device_id,
    render,
)
from edge_runtime.errors import ConfigError, ConfigProblem, EdgeError
from edge_runtime.records.activity import CacheMode
from edge_runtime.source_url import CameraSource, redact_text, redact_url
from edge_runtime.toml_source import TomlSource, key_text, parse_toml, read_text

__all__ = [
    "BUNDLED_BUNDLES",
    "DEFAULT_CONFIG",
    "BudgetConfig",
    "CameraConfig",
    "CameraSource",
    "Config",
    "DeviceConfig",
    "EngineConfig",
    "ModelConfig",
    "MqttConfig",
    "ReferenceRow",
    "TelemetryConfig",
    "UpdateConfig",
    "WebConfig",
    "camera_table",
    "check_camera",
    "config_reference",
    "default_device_id",
    "load_config",
    "parse_config",
    "redact_url",
]

DEFAULT_CONFIG = Path(__file__).with_name("default.toml")
"""The commented configuration that comes with the package; valid on every machine."""

Hardware = Literal[
    "auto",
    "jetson",
    "none",
    "sim:orin-nano-4gb",
    "sim:orin-nano-8gb",
    "sim:orin-nx-8gb",
    "sim:orin-nx-16gb",
    "sim:agx-orin-32gb",
    "sim:agx-orin-64gb",
    "sim:agx-xavier",
]


class _Table(BaseModel):
    # hide_input_in_errors: values may hold credentials, and somebody may log pydantic's own message one day.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


# ---- the tables


class DeviceConfig(_Table):
    """`[device]`: this machine."""

    id: Annotated[str, PlainValidator(check_name), Right(NAME.words, default="from the machine id")] = Field(
        default_factory=default_device_id, description="The device's name in topics and reports."
    )
    hardware: Annotated[Hardware, Right("auto, jetson, none, or sim: and a module's name")] = Field(
        "auto",
        description="Where power and temperature are read. auto: from a Jetson's sensors, where this is one; "
        "jetson: also where the module is not recognised; sim: simulates a module's.",
    )
    store: Annotated[Path, PlainValidator(check_path), Right("the path of a folder, in quotes")] = Field(
        Path("/var/lib/edge-runtime"), description="The daemon's own folder; one daemon at a time holds it."
    )


class CameraConfig(_Table):
    """`[[camera]]`: one source of frames."""

    name: Annotated[str, PlainValidator(check_name), NAME] = Field(
        description="The camera's name in topics and reports."
    )
    source: Annotated[
        CameraSource,
        PlainValidator(check_source),
        PlainSerializer(lambda source: source.shown, return_type=str),  # a dump is for eyes, too
        Right('an address, as "file:clip.mp4"'),
    ] = Field(
        alias="url",
        description="Where frames come from: rtsp(s)://, http(s)://, file:PATH (a video, a picture or a folder of "
        "pictures), v4l2:/dev/video0, csi:0, gst:PIPELINE, synthetic: or bundled:vtest.",
    )
    models: Annotated[
        tuple[str, ...],
        PlainValidator(check_names),
        Right("a model's name or a list of names, in quotes", default="the only model"),
    ] = Field((), alias="model", description="The models that see every frame. Needed with several models.")
    fps: Annotated[float | None, Right("a number above 0 and at most 1000", default="the source's rate")] = Field(
        None, gt=0, le=1000, description='Frames per second wanted. Not with pace = "max".'
    )
    min_fps: Annotated[float | None, Right("a number above 0 and at most fps", default="none")] = Field(
        None, gt=0, le=1000, description="Frames per second that are kept for as long as the budget allows any."
    )
    pace: Annotated[Literal["realtime", "max"], Right("realtime or max")] = Field(
        "realtime", description="Files only. How fast they play: as recorded, or as fast as the model is."
    )
    loop: Annotated[bool, SWITCH] = Field(True, description="Files only. Whether to start again at the end.")
    transport: Annotated[Literal["tcp", "udp"], Right("tcp or udp")] = Field(
        "tcp", description="RTSP only. How pictures travel; udp loses some where the network does."
    )
    stall_s: Annotated[float, Right("a number from 0.5 to 3600")] = Field(
        5.0,
        ge=0.5,
        le=3600,
        description="Live sources only. Seconds without a picture after which it counts as stalled and is opened anew.",
    )
    backend: Annotated[Literal["auto", "pyav", "gstreamer"], Right("auto, pyav or gstreamer")] = Field(
        "auto",
        description="What reads it. auto: GStreamer for csi: and gst:, and where this machine decodes in hardware; "
        "else PyAV.",
    )
    isolation: Annotated[Literal["thread", "process"], Right("thread or process")] = Field(
        "thread",
        description="Where it is read and decoded. process: in one of its own, so that a crash or a wedged driver "
        "there costs the other cameras nothing.",
    )
    ca_file: Annotated[Path | None, PlainValidator(check_path), Right(FILE.words, default="none")] = Field(
        None,
        description="For rtsps:// and https://: certificates that must have signed the camera's, as PEM. Without it "
        "any is taken.",
    )
    priority: Annotated[int, Right("a whole number from -100 to 100")] = Field(
        0, ge=-100, le=100, description="When a model is overloaded, cameras with a higher one go first."
    )

    @property
    def url(self) -> str:
        """The resolved address, with its credentials if it has any: show `source.shown` instead."""
        return self.source.url


class ModelConfig(_Table):
    """`[[model]]`: one model to keep loaded."""

    name: Annotated[str, PlainValidator(check_name), NAME] = Field(
        description="The model's name in commands and reports."
    )
    bundle: Annotated[Path | str, PlainValidator(check_bundle), Right("the path of a bundle's folder, in quotes")] = (
        Field(description="The bundle's folder (relative ones count from this file's folder), or bundled:centernet.")
    )
    variant: Annotated[str, PlainValidator(check_name), Right('"auto" or a name from the bundle')] = Field(
        "auto",
        description="Which of the bundle's variants runs. auto: the first listed, by custom the best.",
    )
    backend: Annotated[Literal["auto", "tensorrt", "onnxruntime"], Right("auto, tensorrt or onnxruntime")] = Field(
        "auto",
        description="What runs the model. auto: TensorRT where it is installed and a plan for this device is built, "
        "which happens by itself; until then, and elsewhere, ONNX Runtime on the CPU. tensorrt: that or nothing.",
    )
    max_batch: Annotated[Literal["auto"] | int, auto_or_count(256), Right('"auto" or a whole number from 1 to 256')] = (
        Field("auto", description="Most frames in one run. auto: measured at warm-up; on a CPU usually 1.")
    )
    batch_timeout_ms: Annotated[float, Right("a number from 0 to 10000")] = Field(
        20.0, ge=0, le=10_000, description="Longest time in ms that a frame waits for others to fill its batch."
    )
    letterbox: Annotated[Literal["auto", "cpu", "gpu"], Right("auto, cpu or gpu")] = Field(
        "auto",
        description="Where pictures larger than the model's input are scaled. auto: on the GPU where TensorRT runs the "
        "model and the kernel for it can be had; gpu: refused where it cannot. With a cache always on the CPU.",
    )
    lanes: Annotated[Literal["auto"] | int, auto_or_count(64), Right('"auto" or a whole number from 1 to 64')] = Field(
        "auto", description="Runs at a time. auto: on a CPU, the cores shared out among the models."
    )
    timeout_s: Annotated[float, Right("a number above 0 and at most 600")] = Field(
        10.0, gt=0, le=600, description="Seconds after which a frame in flight counts as failed."
    )
    ladder: Annotated[
        tuple[str, ...],
        PlainValidator(check_variants),
        Right("a variant's name or a list of names, in quotes", default="only the variant that runs"),
    ] = Field((), description="Variants that stay loaded beside the one that runs, to be switched to at once.")
    allow_pause: Annotated[bool, SWITCH] = Field(
        False, description="Whether a new model that does not fit beside the old one may take its place first."
    )
    cache: Annotated[CacheMode, Right("off, exact or scene")] = Field(
        "off",
        description="When an earlier answer is given again without a run. exact: for the very same input; "
        "scene: for as long as nothing moves before the camera.",
    )
    cache_max_age_s: Annotated[float, Right("a number above 0 and at most 3600")] = Field(
        10.0, gt=0, le=3600, description='Seconds after which a still scene is inferred anew. With cache = "scene".'
    )


class EngineConfig(_Table):
    """`[engine]`: TensorRT plans."""

    plan_keys: Annotated[
        tuple[Annotated[str, PlainValidator(check_public_key)], ...],
        BeforeValidator(check_public_keys),
        Right(f"a list of public keys, each {PUBLIC_KEY.words.partition(', ')[2]}", default="none"),
    ] = Field(
        (),
        description="Who may sign plans that come with a bundle. A plan is native code: one that none of these keys "
        "has signed for this TensorRT, GPU and module is not used.",
    )


class BudgetConfig(_Table):
    """`[budget]`: what the governor holds."""

    power_w: Annotated[float | None, Right("a number above 0 and at most 1000", default="none")] = Field(
        None, gt=0, le=1000, description="Power budget in watts, of the module as a whole."
    )
    max_power_w: Annotated[float | None, Right("a number above 0 and at most 1000", default="power_w")] = Field(
        None, gt=0, le=1000, description="Power in watts that the command set-budget may not exceed."
    )
    temperature_c: Annotated[float | None, Right("a number from 30 to 110", default="none")] = Field(
        None, ge=30, le=110, description="Junction temperature budget in degrees Celsius."
    )
    latency_p99_ms: Annotated[float | None, Right("a number above 0 and at most 60000", default="none")] = Field(
        None, gt=0, le=60_000, description="99th percentile of the time from capture to result, in ms."
    )
    profile: Annotated[
        Path | None, PlainValidator(check_path), Right(FILE.words, default="profile.toml in the store, if it is there")
    ] = Field(None, description="What the models cost on this very device, as its own benchmark has measured it.")


class MqttConfig(_Table):
    """`[mqtt]`: the broker; left out, nothing is sent."""

    host: Annotated[
        str,
        AfterValidator(check_host),
        Right("a name or address, in quotes, without mqtt:// and port"),
    ] = Field("127.0.0.1", description="The broker's name or address. This or broker.")
    port: Annotated[int, Right("a whole number from 1 to 65535")] = Field(
        1883, ge=1, le=65535, description="The broker's port; with TLS usually 8883."
    )
    broker: Annotated[Literal["embedded"] | None, Right("embedded", default="none")] = Field(
        None, description="embedded: a broker inside the daemon, for trials. This or host."
    )
    protocol: Annotated[Literal["auto", "5", "3.1.1"], Right('"auto", "5" or "3.1.1"')] = Field(
        "auto", description="MQTT version. auto: 5, then 3.1.1 if the broker refuses it."
    )
    username: Annotated[str | None, Right("text in quotes", default="none")] = Field(
        None, min_length=1, max_length=1024, description="User at the broker."
    )
    password_file: Annotated[Path | None, PlainValidator(check_secret), Right(SECRET.words, default="none")] = Field(
        None, description="File with the user's password as its only line."
    )
    ca_file: Annotated[Path | None, PlainValidator(check_path), Right(FILE.words, default="none")] = Field(
        None, description="Certificates that may sign the broker's, as PEM. Turns TLS on."
    )
    cert_file: Annotated[Path | None, PlainValidator(check_path), Right(FILE.words, default="none")] = Field(
        None, description="This device's certificate, as PEM. Together with key_file."
    )
    key_file: Annotated[Path | None, PlainValidator(check_secret), Right(SECRET.words, default="none")] = Field(
        None, description="The key of cert_file, as PEM."
    )
    tls: Annotated[bool, SWITCH] = Field(
        False, description="TLS with the system's certificates. ca_file, and cert_file, turn TLS on by themselves."
    )
    results: Annotated[bool, SWITCH] = Field(False, description="Whether to publish every frame's detections.")
    keepalive_s: Annotated[int, Right("a whole number from 5 to 3600")] = Field(
        30, ge=5, le=3600, description="Seconds of silence after which the connection is tested."
    )
    queue: Annotated[int, Right("a whole number from 1 to 100000")] = Field(
        1000,
        ge=1,
        le=100_000,
        description="Answers kept in memory while the broker is away. Windows wait on disk.",
    )
    backlog_rate: Annotated[float, Right("a number from 1 to 100000")] = Field(
        100.0,
        ge=1,
        le=100_000,
        description="Stored windows and events that are sent per second at most, once the broker is back.",
    )
    home_assistant: Annotated[
        str | None, AfterValidator(check_topic_prefix), Right('a topic prefix, usually "homeassistant"', default="none")
    ] = Field(None, description="Home Assistant's discovery prefix: this device announces itself there.")


class TelemetryConfig(_Table):
    """`[telemetry]`: what is reported."""

    window_s: Annotated[float, Right("a number from 0.2 to 3600")] = Field(
        10.0, ge=0.2, le=3600, description="Seconds that one window report covers."
    )
    spool_mb: Annotated[int, Right("a whole number from 8 to 16384")] = Field(
        160, ge=8, le=16384, description="Most that windows and events may take on disk, in MB of 2^20 bytes."
    )
    spool_days: Annotated[float, Right("a number from 0.01 to 3650")] = Field(
        30.0, ge=0.01, le=3650, description="Days after which a window that nobody could be sent is dropped."
    )
    disk_reserve_mb: Annotated[int, Right("a whole number from 0 to 1048576")] = Field(
        200, ge=0, le=1_048_576, description="Free space on the store's disk that the spool does not touch, in MB."
    )


class WebConfig(_Table):
    """`[web]`: HTTP over TCP. Left out, there is only the control socket."""

    listen: Annotated[str, AfterValidator(check_listen), Right('host and port, as "127.0.0.1:8080"')] = Field(
        "127.0.0.1:8080", description="Address and port. Beyond this machine only with token_file."
    )
    token_file: Annotated[Path | None, PlainValidator(check_secret), Right(SECRET.words, default="none")] = Field(
        None, description="File with the token that changes need, and off loopback everything but /healthz."
    )
    names: Annotated[tuple[str, ...], BeforeValidator(check_names), Right("a list of host names, in quotes")] = Field(
        (), description="Further names by which browsers may reach it. Others are refused."
    )


class UpdateConfig(_Table):
    """`[update]`: updates over MQTT; left out, there are none."""

    repository: Annotated[str, AfterValidator(check_repository), Right('a web address, as "https://HOST/PATH"')] = (
        Field(description="The TUF repository that updates come from.", repr=False)
    )
    controller_key: Annotated[str, Right("a public key, in quotes")] = Field(
        min_length=1, description="Public key of the rollout controller."
    )


class Config(_Table):
    """A whole configuration, checked. Only `parse_config` and `load_config` make one."""

    device: DeviceConfig = Field(default_factory=DeviceConfig, description="This machine.")
    cameras: Annotated[tuple[CameraConfig, ...], BeforeValidator(check_tables)] = Field(
        (), alias="camera", description="The sources of frames."
    )
    models: Annotated[tuple[ModelConfig, ...], BeforeValidator(check_tables)] = Field(
        (), alias="model", description="The models to keep loaded."
    )
    engine: EngineConfig = Field(default_factory=EngineConfig, description="TensorRT plans that come with a bundle.")
    budget: BudgetConfig | None = Field(None, description="What the governor holds.")
    mqtt: MqttConfig | None = Field(None, description="The broker; left out, nothing is sent.")
    telemetry: TelemetryConfig = Field(default_factory=TelemetryConfig, description="What is reported.")
    web: WebConfig | None = Field(None, description="HTTP over TCP; left out, only the control socket.")
    update: UpdateConfig | None = Field(None, description="Updates over MQTT; left out, there are none.")

    _digest: str = PrivateAttr("")

    @property
    def digest(self) -> str:
        """`sha256:` and the hex digest of the text this configuration was read from."""
        return self._digest


# ---- from a file to a Config


def load_config(path: Path) -> Config:
    """Read and check a configuration file; relative paths in it count from its folder.

    Raises ConfigError with every problem found, each with its line and key.
    """
    return parse_config(read_text(path), str(path), path.absolute().parent)


def parse_config(text: str, file: str, base: Path) -> Config:
    """Check a configuration's text. `file` names it in messages; `base` is what relative paths count from.

    Raises ConfigError with every problem found, each with its line and key.
    """
    source = parse_toml(text, file)
    if not source.data:
        remedy = f"start from {DEFAULT_CONFIG}"
        raise ConfigError([source.problem((), "holds no configuration", remedy)])
    base = base.absolute()
    findings = list(rule_findings(source.data, base))
    config = None
    try:
        config = Config.model_validate(_with_the_only_model(source.data), context={"base": base})
    except ValidationError as error:
        findings += validation_findings(error, Config)
    if findings or config is None:
        # Not from inside the except clause: the chained error would show the values, credentials and all.
        raise ConfigError(_placed(findings, source))
    config._digest = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    return config


def _with_the_only_model(data: dict[str, Any]) -> dict[str, Any]:
    """The document with a camera's model filled in where there is only one to choose."""
    names, cameras = model_names(data), data.get("camera")
    if len(names) != 1 or not isinstance(cameras, list):
        return data
    return {**data, "camera": [{"model": names[0], **each} if isinstance(each, dict) else each for each in cameras]}


def _placed(findings: list[Finding], source: TomlSource) -> list[ConfigProblem]:
    problems = {source.problem(each.path, each.message, each.remedy): None for each in findings}
    return sorted(problems, key=lambda problem: (problem.line or 0, problem.key or ""))


# ---- a camera without a file


def camera_table(camera: CameraConfig) -> dict[str, Any]:
    """The keys of a camera that were written, by their names in a file, with paths in full: JSON's own types, and
    `check_camera` makes the same camera of them. Holds its credentials."""
    table = {}
    for name in camera.model_fields_set:
        value = getattr(camera, name)
        value = value.url if isinstance(value, CameraSource) else str(value) if isinstance(value, Path) else value
        table[CameraConfig.model_fields[name].alias or name] = list(value) if isinstance(value, tuple) else value
    return table


def check_camera(table: Mapping[str, Any], models: Sequence[str], *, where: str | None = None) -> CameraConfig:
    """A camera of the keys of a [[camera]], by the rules of a file that has `models`, and with no relative paths.

    Raises EdgeError (code "invalid", with this `where`) with every problem found, each with its key, as `camera.url`,
    and without credentials.
    """
    camera, base = dict(table), Path("/")
    findings = list(camera_findings(camera, models, base))
    config = None
    document = {"camera": [camera], "model": [{"name": name, "bundle": "bundled:centernet"} for name in models]}
    try:
        config = Config.model_validate(_with_the_only_model(document), context={"base": base})
    except ValidationError as error:
        findings += validation_findings(error, Config)
    if findings or config is None:
        raise _not_a_camera(findings, where)
    return config.cameras[0]


def _not_a_camera(findings: Sequence[Finding], where: str | None) -> EdgeError:
    # a key may be an address that was put in the wrong place
    told = list(dict.fromkeys((redact_text(key_text((each.path[0], *each.path[2:]))), each) for each in findings))
    if len(told) == 1:
        ((key, only),) = told
        return EdgeError(f"{key}: {only.message}", code="invalid", where=where, remedy=only.remedy)
    problems = [f"{key}: {each.message}" + (f" ({each.remedy})" if each.remedy else "") for key, each in told]
    return EdgeError("; ".join(problems), code="invalid", where=where)


class ReferenceRow(NamedTuple):
    """One key for the reference: what may stand there, its default as written or in words, and what it means."""

    key: str
    type: str
    default: str
    meaning: str


def config_reference() -> list[ReferenceRow]:
    """Every key, in the file's order, from the models themselves. Keys of `[[camera]]` read `camera.fps`."""
    return [
        ReferenceRow(f"{table}.{key}", right_of(field).words, _default_text(field), field.description or "")
        for table, key, field in _fields()
    ]


def _fields() -> Iterator[tuple[str, str, FieldInfo]]:
    for table, holder in keys_of(Config).items():
        model = table_of(holder)
        if model is not None:
            yield from ((table, key, field) for key, field in keys_of(model).items())


def _default_text(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    return right_of(field).default or render(str(default) if isinstance(default, Path) else default)
