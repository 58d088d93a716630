"""`[engine] plan_keys`: each key checked, with its line, and never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.config import Config, parse_config
from edge_runtime.errors import ConfigError, ConfigProblem

KEY = "ed25519:A6EHv/POEL4dcN0Y50vAmWfk1jCbpQ1fHdyGZBJVMbg="
OTHER = "ed25519:11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo="
GOOD = """\
[[camera]]
name = "gate"
url = "bundled:vtest"
[[model]]
name = "detector"
bundle = "bundled:centernet"
[engine]
plan_keys = """


def parse(keys: str) -> Config:
    return parse_config(GOOD + keys + "\n", "edge.toml", Path("/etc/edge-runtime"))


def problems(keys: str) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        parse(keys)
    return caught.value.problems


def test_without_the_table_nobody_is_trusted() -> None:
    text = GOOD.partition("[engine]")[0]
    assert parse_config(text, "edge.toml", Path("/")).engine.plan_keys == ()
    assert parse("[]").engine.plan_keys == ()


def test_several_keys() -> None:
    assert parse(f'["{KEY}", "{OTHER}"]').engine.plan_keys == (KEY, OTHER)


@pytest.mark.parametrize(
    ("keys", "key", "message"),
    [
        (f'"{KEY}"', "engine.plan_keys", "what stands there is text, not a list"),
        (f'["{KEY}", "{KEY}"]', "engine.plan_keys", "it names a key twice"),
        ("[7]", "engine.plan_keys[1]", "what stands there is a number, not text"),
        (f'["{KEY}", "{OTHER[8:]}"]', "engine.plan_keys[2]", "does not begin with ed25519:"),
        (f'["{KEY[:-3]}"]', "engine.plan_keys[1]", "is not base64"),
        (f'["ed25519:{"A" * 43}="]', "engine.plan_keys[1]", "under which anybody can sign"),
        ('["-----BEGIN PRIVATE KEY-----"]', "engine.plan_keys[1]", "a PEM stands there"),
    ],
)
def test_what_is_wrong_is_told_with_its_place_and_what_would_be_right(keys: str, key: str, message: str) -> None:
    (problem,) = problems(keys)
    assert (problem.line, problem.key) == (8, key)
    assert message in problem.message
    assert "ed25519:..." in str(problem.remedy) or "name each key once" in str(problem.remedy)
    assert not any(each.strip('"[] ') in str(problem) for each in keys.split(",") if len(each) > 12)


def test_a_word_that_is_no_key_here() -> None:
    with pytest.raises(ConfigError, match="did you mean plan_keys") as caught:
        parse_config(GOOD.replace("plan_keys", "plan_key") + "[]\n", "edge.toml", Path("/"))
    assert caught.value.problems[0].line == 8
