"""The profile of a device, `edge.profile/1`: what each engine costs on it, as its own benchmark has measured it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from edge_runtime.config_rules import validation_findings
from edge_runtime.config_values import Right, render, wrong
from edge_runtime.durable import write_atomic
from edge_runtime.errors import ConfigError, ConfigProblem
from edge_runtime.toml_source import TomlSource, parse_toml, read_text

SCHEMA: Final = "edge.profile/1"
MAX_POINTS = 1000
"""Far more than a sweep over variants, batches, lanes and clocks has; as many fit into a file that may be read."""
MAX_VERSIONS = 32
MAX_PROBLEMS = 50
"""A damaged file has some for each of its points."""

_Word = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._+:-]{0,99}$")]
_WORD = Right("up to 100 of A-Z a-z 0-9 . _ + : - with a letter or digit first")
_Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
_DIGEST = Right("sha256: and 64 hex digits")
_Moment = Annotated[str, StringConstraints(pattern=r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}(\.\d{1,6})?Z$")]
_MOMENT = Right('a UTC time, as "2026-01-31T12:00:00Z"')
_Version = Annotated[str, StringConstraints(pattern=r"^[!-~]([ -~]{0,198}[!-~])?$")]
_SECONDS = Right("a number above 0 and at most 3600")
_WATTS = Right("a number above 0 and at most 1000")


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ProfilePoint(_Table):
    """`[[point]]`: one engine at full load, at one setting."""

    engine: Annotated[_Digest, _DIGEST] = Field(description="As in reports: of bundle, variant, backend, artefact.")
    bundle: Annotated[_Digest, _DIGEST] = Field(description="Of bundle.toml.")
    variant: Annotated[_Word, _WORD] = Field(description="The bundle's variant.")
    backend: Annotated[_Word, _WORD] = Field(description="What ran it.")
    lanes: Annotated[int, Right("a whole number from 1 to 64")] = Field(ge=1, le=64, description="Runs at a time.")
    batch: Annotated[int, Right("a whole number from 1 to 256")] = Field(ge=1, le=256, description="Frames in a run.")
    gpu_hz: Annotated[float | None, Right("Hz, a number from 1e6 to 1e10")] = Field(
        None, ge=1e6, le=1e10, description="The GPU's clock, where it was capped for this point."
    )
    fps: Annotated[float, Right("a number above 0 and at most 1000000")] = Field(
        gt=0, le=1e6, description="Frames per second."
    )
    busy_s: Annotated[float, _SECONDS] = Field(gt=0, le=3600, description="Seconds of one lane for a frame.")
    joules_per_frame: Annotated[float | None, Right("a number from 0 to 100000")] = Field(
        None, ge=0, le=1e5, description="Energy of a frame beyond idle; left out where nothing tells watts."
    )
    watts: Annotated[float | None, _WATTS] = Field(
        None, gt=0, le=1000, description="Power of the module meanwhile; left out likewise."
    )
    p99_ms: Annotated[float, Right("a number above 0 and at most 3600000")] = Field(
        gt=0, le=3.6e6, description="99th percentile from capture to result."
    )


def _check_points(value: object) -> tuple[object, ...]:
    if isinstance(value, dict):
        raise wrong("is written as a single table", "write [[point]], with two brackets, once for each point")
    if not isinstance(value, (list, tuple)):
        raise wrong(f"{render(value)} stands where tables belong", "write [[point]] once for each point")
    if len(value) > MAX_POINTS:
        raise wrong(f"there are {len(value)} points", f"at most {MAX_POINTS}")
    return tuple(value)


class Costs(NamedTuple):
    """What one frame costs: seconds of one lane, and J beyond idle; None where nothing told watts."""

    busy_s: float
    joules: float | None


class Profile(_Table):
    """A whole profile. `load_profile` reads one; whoever has measured makes one."""

    schema_: Literal["edge.profile/1"] = Field(alias="schema", description="What this file is.")
    module: Annotated[_Word, _WORD] = Field(description="The module, as orin-nx-16gb, or another machine's name.")
    mode: Annotated[_Version | None, Right("a power mode's name, in quotes")] = Field(
        None, description="The power mode; left out where there is no such thing."
    )
    t_utc: Annotated[_Moment, _MOMENT] = Field(description="When it was measured.")
    idle_w: Annotated[float | None, _WATTS] = Field(
        None, gt=0, le=1000, description="Power of the module without load; left out where nothing tells watts."
    )
    versions: Annotated[dict[_Word, _Version], Right("a table of name = version, at most 32")] = Field(
        default_factory=dict, max_length=MAX_VERSIONS, description="What ran the engines."
    )
    points: Annotated[tuple[ProfilePoint, ...], BeforeValidator(_check_points)] = Field(
        (), alias="point", description="The settings that were measured."
    )

    def costs(self, engine: str, gpu_hz: float | None = None, batch: int = 1, lanes: int | None = None) -> Costs | None:
        """What a frame costs on the engine of that digest; None where that was not measured.

        Without `gpu_hz` at the highest clock. Of several numbers of lanes it is the one that is asked for, else the
        one at which a frame costs most.
        """
        found = [point for point in self.points if (point.engine, point.batch) == (engine, batch)]
        if gpu_hz is None:
            # one without a cap ran at the highest clock there is
            gpu_hz = None if any(p.gpu_hz is None for p in found) else max((p.gpu_hz or 0 for p in found), default=None)
        found = [point for point in found if _same_clock(point.gpu_hz, gpu_hz)]
        found = [point for point in found if point.lanes == lanes] or found
        if not found:
            return None
        dearest = max(found, key=lambda point: point.busy_s)
        return Costs(dearest.busy_s, dearest.joules_per_frame)

    def fits(self, module: str, mode: str | None, versions: Mapping[str, str]) -> str | None:
        """Why this profile says nothing about that device as it runs now; None where it does."""
        if module != self.module:
            return f"it was measured on {self.module}, this is {module}"
        if mode != self.mode:
            return f"it was measured in power mode {self.mode or 'none'}, this is {mode or 'not known'}"
        for name, version in self.versions.items():
            if (now := versions.get(name)) != version:
                return f"it was measured with {name} {version}, this has {now or 'none'}"
        return None


def _same_clock(one_hz: float | None, other_hz: float | None) -> bool:
    if one_hz is None or other_hz is None:
        return one_hz is other_hz
    return abs(one_hz - other_hz) <= 0.005 * other_hz  # drivers round


def load_profile(path: Path) -> Profile:
    """Read and check a profile. Raises ConfigError with every problem found, each with its line and key."""
    return parse_profile(read_text(path), str(path))


def parse_profile(text: str, file: str) -> Profile:
    """Check the text of a profile; `file` names it in messages. Raises ConfigError likewise."""
    source = parse_toml(text, file)
    problems: list[ConfigProblem] = []
    profile = None
    try:
        profile = Profile.model_validate(source.data)
    except ValidationError as error:
        findings = validation_findings(error, Profile)
        problems = [source.problem(each.path, each.message, each.remedy) for each in findings]
    if profile is not None:
        problems = _twice(profile, source)
    if profile is None or problems:
        raise ConfigError(sorted(problems, key=lambda problem: (problem.line or 0, problem.key or ""))[:MAX_PROBLEMS])
    return profile


def _twice(profile: Profile, source: TomlSource) -> list[ConfigProblem]:
    first: dict[tuple[object, ...], int] = {}
    problems = []
    for index, point in enumerate(profile.points):
        other = first.setdefault((point.engine, point.lanes, point.batch, point.gpu_hz), index)
        if other != index:
            message = f"has the engine, lanes, batch and clock of point[{other + 1}]"
            problems.append(source.problem(("point", index), message, "keep one of them"))
    return problems


def profile_text(profile: Profile) -> str:
    """The profile as TOML."""
    head = {"schema": profile.schema_, "module": profile.module, "mode": profile.mode, "t_utc": profile.t_utc}
    lines = [*_pairs({**head, "idle_w": profile.idle_w})]
    if profile.versions:
        lines += ["", "[versions]", *_pairs(profile.versions)]
    for point in profile.points:
        lines += ["", "[[point]]", *_pairs(point.model_dump())]
    return "\n".join(lines) + "\n"


def save_profile(path: Path, profile: Profile) -> None:
    """Put the profile in the place of the file `path`, whole. Raises ConfigError for one that `load_profile` would not
    take (a point that is there twice), OSError where the disk does not take it."""
    text = profile_text(profile)
    parse_profile(text, str(path))
    write_atomic(path, text.encode())


def _pairs(table: Mapping[str, str | int | float | None]) -> list[str]:
    return [
        f"{json.dumps(key)} = {_value(value)}" if not key.isidentifier() else f"{key} = {_value(value)}"
        for key, value in table.items()
        if value is not None
    ]


def _value(value: str | int | float) -> str:
    # JSON's strings are TOML's: only printable ASCII is in these
    return json.dumps(value) if isinstance(value, str) else repr(value)
