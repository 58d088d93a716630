"""The profile of a device: what is written is read again, what it says of costs, and every way to be damaged."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_runtime.errors import ConfigError
from edge_runtime.governor.profile import (
    MAX_POINTS,
    MAX_PROBLEMS,
    SCHEMA,
    Costs,
    Profile,
    ProfilePoint,
    load_profile,
    parse_profile,
    profile_text,
    save_profile,
)
from edge_runtime.toml_source import MAX_FILE_BYTES

A, B = "sha256:" + "a" * 64, "sha256:" + "b" * 64
VERSIONS = {"edge_runtime": "0.1", "onnxruntime": "1.23.2"}


def point(**changes: Any) -> ProfilePoint:
    fields: dict[str, Any] = {
        "engine": A, "bundle": B, "variant": "fp32-320", "backend": "onnxruntime", "lanes": 2, "batch": 1, "fps": 40.0,
        "busy_s": 0.05, "joules_per_frame": 0.2, "watts": 12.5, "p99_ms": 61.0,
    }  # fmt: skip
    return ProfilePoint(**{**fields, **changes})


def profile(*points: ProfilePoint) -> Profile:
    return Profile(
        schema=SCHEMA, module="orin-nx-16gb", mode="15W", t_utc="2026-01-31T12:00:00.000Z", idle_w=4.6,
        versions=VERSIONS, point=points,
    )  # fmt: skip


GOOD = profile_text(profile(point(), point(batch=4, busy_s=0.04)))


def problems(text: str) -> list[tuple[int | None, str | None, str]]:
    with pytest.raises(ConfigError) as caught:
        parse_profile(text, "profile.toml")
    return [(each.line, each.key, f"{each.message}; {each.remedy}") for each in caught.value.problems]


words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._+:-]{0,99}", fullmatch=True)
versions = st.from_regex(r"[!-~]([ -~]{0,198}[!-~])?", fullmatch=True)
digests = st.from_regex(r"sha256:[0-9a-f]{64}", fullmatch=True)
points = st.builds(
    ProfilePoint,
    engine=digests,
    bundle=digests,
    variant=words,
    backend=words,
    lanes=st.integers(1, 64),
    batch=st.integers(1, 256),
    gpu_hz=st.none() | st.floats(1e6, 1e10),
    fps=st.floats(0, 1e6, exclude_min=True),
    busy_s=st.floats(0, 3600, exclude_min=True),
    joules_per_frame=st.none() | st.floats(0, 1e5),
    watts=st.none() | st.floats(0, 1000, exclude_min=True),
    p99_ms=st.floats(0, 3.6e6, exclude_min=True),
)
profiles = st.builds(
    Profile,
    schema=st.just(SCHEMA),
    module=words,
    mode=st.none() | versions,
    t_utc=st.just("2026-01-31T12:00:00Z"),
    idle_w=st.none() | st.floats(0, 1000, exclude_min=True),
    versions=st.dictionaries(words, versions, max_size=4),
    point=st.lists(points, max_size=4, unique_by=lambda p: (p.engine, p.lanes, p.batch, p.gpu_hz)).map(tuple),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(profiles)
def test_what_is_saved_is_loaded_again(tmp_path: Path, made: Profile) -> None:
    path = tmp_path / "profile.toml"
    save_profile(path, made)
    assert load_profile(path) == made
    assert [each.name for each in tmp_path.iterdir()] == ["profile.toml"]


def test_the_operators_example_is_a_profile() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```text\n(schema = .*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(parse_profile(text, "operations.md").points) == 1


def test_costs_are_those_of_the_engine_the_batch_and_the_clock() -> None:
    found = profile(
        point(gpu_hz=306e6, busy_s=0.2, joules_per_frame=0.1),
        point(gpu_hz=918e6, busy_s=0.07, joules_per_frame=0.3),
        point(gpu_hz=918e6, batch=4, busy_s=0.05),
        point(engine=B, joules_per_frame=None, busy_s=0.09),
        point(engine=B, joules_per_frame=None, busy_s=0.11, lanes=4),
        point(engine=B, gpu_hz=1173e6, busy_s=0.12),
    )
    assert found.costs(A) == Costs(0.07, 0.3)
    assert found.costs(A, gpu_hz=306e6) == Costs(0.2, 0.1)
    assert found.costs(A, gpu_hz=305.5e6) == Costs(0.2, 0.1)
    assert found.costs(A, gpu_hz=408e6) is None
    assert found.costs(A, batch=4) == Costs(0.05, 0.2)
    assert found.costs(A, batch=2) is None
    # one without a cap ran at the highest clock; of several numbers of lanes, the dearest
    assert found.costs(B) == Costs(0.11, None)
    assert found.costs(B, lanes=2) == Costs(0.09, None)
    assert found.costs(B, lanes=3) == Costs(0.11, None)
    assert found.costs("sha256:" + "c" * 64) is None
    assert profile().costs(A) is None


def test_a_profile_fits_the_device_the_mode_and_the_versions_that_it_was_measured_with() -> None:
    found = profile(point())
    assert found.fits("orin-nx-16gb", "15W", {**VERSIONS, "tensorrt": "10.3"}) is None
    assert found.fits("orin-nano-8gb", "15W", VERSIONS) == "it was measured on orin-nx-16gb, this is orin-nano-8gb"
    assert found.fits("orin-nx-16gb", "25W", VERSIONS) == "it was measured in power mode 15W, this is 25W"
    assert found.fits("orin-nx-16gb", None, VERSIONS) == "it was measured in power mode 15W, this is not known"
    other = found.fits("orin-nx-16gb", "15W", {"edge_runtime": "0.1", "onnxruntime": "1.24"})
    assert other == "it was measured with onnxruntime 1.23.2, this has 1.24"
    assert found.fits("orin-nx-16gb", "15W", {}) == "it was measured with edge_runtime 0.1, this has none"


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "words"),
    [
        ("edge.profile/1", "edge.profile/2", 1, "schema", 'did you mean "edge.profile/1"'),
        ('schema = "edge.profile/1"\n', "", None, "schema", "is missing"),
        ('module = "orin-nx-16gb"', "module = 5", 2, "module", "5 is a number"),
        ('module = "orin-nx-16gb"', 'modul = "orin-nx-16gb"', 2, "modul", "did you mean [module]"),
        ("2026-01-31T12", "2026-01-31 12", 4, "t_utc", "is not right"),
        ("idle_w = 4.6", "idle_w = 0", 5, "idle_w", "out of range"),
        ("idle_w = 4.6", "idle_w = nan", 5, "idle_w", "no finite number"),
        ('onnxruntime = "1.23.2"', "onnxruntime = 1.23", 9, "versions.onnxruntime", "1.23 is a number"),
        ("lanes = 2", "lanes = 0", 16, "point[1].lanes", "out of range"),
        ("busy_s = 0.05", "busy_s = inf", 19, "point[1].busy_s", "no finite number"),
        ("busy_s = 0.05", "busy_ms = 50", 19, "point[1].busy_ms", "did you mean busy_s"),
        ("batch = 4", "batch = 1", 24, "point[2]", "has the engine, lanes, batch and clock of point[1]"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(old: str, new: str, line: int | None, key: str, words: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new, 1))
    hit = [each for each in found if each[1] == key]
    assert hit, found
    assert words in hit[0][2]
    assert hit[0][0] == line


def test_hostile_files_end_soon(tmp_path: Path) -> None:
    assert "at most" in problems(GOOD + "[[point]]\n" * MAX_POINTS)[0][2]
    assert len(problems(GOOD + "[[point]]\n" * 500)) == MAX_PROBLEMS
    assert "[[point]]" in problems(GOOD.partition("\n[[point]]")[0] + "\n[point]\nlanes = 1\n")[0][2]
    for text in ("", "[[", "point = 5\n", f"point = {'[' * 500}{']' * 500}\n", "schema = 1" + "0" * 5000 + "\n"):
        assert problems(text)
    path = tmp_path / "profile.toml"
    path.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        load_profile(path)
    with pytest.raises(ConfigError, match="does not exist"):
        load_profile(tmp_path / "no.toml")


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_with_words(data: bytes) -> None:
    text = data.decode("latin-1")
    with pytest.raises(ConfigError):
        parse_profile(text, "profile.toml")


def test_a_profile_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.toml"
    save_profile(path, profile(point()))
    with pytest.raises(ConfigError, match="keep one of them"):
        save_profile(path, profile(point(), point(fps=1.0)))
    assert load_profile(path) == profile(point())


def test_the_most_points_fit_into_a_file_that_may_be_read(tmp_path: Path) -> None:
    longest = {"variant": "v" * 100, "backend": "b" * 100, "fps": 123456.12345678901, "busy_s": 1.2345678901234567e-05}
    many = [point(**longest, gpu_hz=1e6 + index, p99_ms=12345.678901234567) for index in range(MAX_POINTS)]
    save_profile(tmp_path / "profile.toml", profile(*many))
    assert len(load_profile(tmp_path / "profile.toml").points) == MAX_POINTS
