"""deploy/emqx and deploy/systemd, as far as they can be looked at without an EMQX: its rules are evaluated here.

deploy/mosquitto runs in a real mosquitto: tests/mqtt/test_mqtt_acl.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.secret_file import CREDENTIAL_NAME
from tests.broker_rights import DEVICE, NAMES, OTHER_DEVICE, TOPICS, Role, may_read, may_write

DEPLOY = Path(__file__).resolve().parents[1] / "deploy"
Term = str | tuple["Term", ...] | list["Term"]
ROLES = pytest.mark.parametrize("role", ["device", "controller", "dashboard"])

# ---- Erlang's terms, as far as rules are made of them

_TOKEN = re.compile(r'\s+|%[^\n]*|(?P<string>"[^"\\]*")|(?P<atom>[a-z_]+)|(?P<sign>[{}\[\],.])')


def tokens(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        assert found is not None, f"no Erlang: {text[at : at + 30]!r}"
        at = found.end()
        if found.lastgroup is not None:
            yield found[0]


def read_terms(text: str) -> list[Term]:
    """Terms with a full stop after each, as file:consult reads them. Strings keep their quotes."""
    left = list(tokens(text))
    terms: list[Term] = []
    while left:
        terms.append(_term(left))
        assert left.pop(0) == "."
    return terms


def _term(left: list[str]) -> Term:
    token = left.pop(0)
    if token not in "{[":
        assert token not in "}],."
        return token
    end = "}" if token == "{" else "]"
    parts: list[Term] = []
    while True:
        parts.append(_term(left))
        sign = left.pop(0)
        if sign == end:
            return tuple(parts) if token == "{" else parts
        assert sign == ","


# ---- EMQX's rules: emqx_authz_rule, emqx_topic


def fits(topic: str, topic_filter: str) -> bool:
    """Level by level. `topic` may be a filter: then `+` in the rule fits its wildcards too."""
    levels, wanted = topic.split("/"), topic_filter.split("/")
    if wanted[-1] == "#":
        levels, wanted = levels[: len(wanted) - 1], wanted[:-1]
    return len(levels) == len(wanted) and all(want in ("+", level) for level, want in zip(levels, wanted, strict=True))


def is_who(who: Term, username: str) -> bool:
    if who == "all":
        return True
    assert isinstance(who, tuple)
    assert who[0] == "username"
    wanted = who[1]
    if isinstance(wanted, tuple):
        assert wanted[0] == "re"
        assert isinstance(wanted[1], str)
        return re.search(wanted[1].strip('"'), username) is not None
    return wanted == f'"{username}"'


def decide(rules: list[Term], username: str, action: str, topic: str) -> bool:
    """Whether it is allowed. The first rule that fits decides; where none does, no_match = deny."""
    for rule in rules:
        assert isinstance(rule, tuple)
        assert rule[0] in ("allow", "deny")
        if len(rule) == 2:
            assert rule[1] == "all"
            return rule[0] == "allow"
        _, who, what, topics = rule
        assert what in ("publish", "subscribe", "all")
        assert isinstance(topics, list)
        for one in topics:
            assert isinstance(one, str)
            topic_filter = one.strip('"').replace("${username}", username)
            assert "$" not in topic_filter
            if what in (action, "all") and is_who(who, username) and fits(topic, topic_filter):
                return rule[0] == "allow"
    return False


@pytest.fixture(scope="module")
def rules() -> list[Term]:
    return read_terms((DEPLOY / "emqx" / "acl.conf").read_text(encoding="ascii"))


@ROLES
def test_emqx_lets_everybody_write_what_mosquitto_does(rules: list[Term], role: Role) -> None:
    for topic in TOPICS:
        assert decide(rules, NAMES[role], "publish", topic) is may_write(role, topic), topic


@ROLES
def test_emqx_lets_everybody_subscribe_to_what_they_may_read(rules: list[Term], role: Role) -> None:
    for topic in TOPICS:
        assert decide(rules, NAMES[role], "subscribe", topic) is may_read(role, topic), topic


@pytest.mark.parametrize(
    "topic_filter",
    [
        "#",
        "+/#",
        "edge/#",
        "edge/v1/#",
        "edge/v1/+/desired",
        "edge/v1/+/cmd/+",
        f"edge/v1/{OTHER_DEVICE}/#",
        f"edge/v1/{DEVICE}/#",
        f"edge/v1/{DEVICE}/+",
        "$SYS/#",
    ],
)
def test_emqx_refuses_filters_of_a_device_that_cover_more(rules: list[Term], topic_filter: str) -> None:
    assert not decide(rules, DEVICE, "subscribe", topic_filter)


def test_emqx_grants_the_filters_of_the_daemon_and_of_a_dashboard(rules: list[Term]) -> None:
    for topic_filter in (f"edge/v1/{DEVICE}/cmd/+", f"edge/v1/{DEVICE}/desired"):
        assert decide(rules, DEVICE, "subscribe", topic_filter)
    for topic_filter in ("edge/v1/+/telemetry/+", "edge/v1/+/presence", f"edge/v1/{DEVICE}/event/+"):
        assert decide(rules, "dashboard", "subscribe", topic_filter)
    assert decide(rules, "controller", "subscribe", "edge/v1/#")


@pytest.mark.parametrize("username", ["+", "#", f"{DEVICE}/telemetry", "+/#"])
def test_emqx_gives_a_name_with_wildcards_nothing(rules: list[Term], username: str) -> None:
    for topic in TOPICS:
        assert not decide(rules, username, "publish", topic)
        assert not decide(rules, username, "subscribe", topic)


def test_emqx_lines_for_home_assistant(rules: list[Term]) -> None:
    text = (DEPLOY / "emqx" / "acl.conf").read_text(encoding="ascii")
    text, changed = re.subn(r"(?m)^%% (?=\{)", "", text)
    assert changed == 3
    more = read_terms(text)
    own, other = (f"homeassistant/device/edge_{device}/config" for device in (DEVICE, OTHER_DEVICE))
    assert (decide(rules, DEVICE, "publish", own), decide(more, DEVICE, "publish", own)) == (False, True)
    assert not decide(more, DEVICE, "publish", other)
    assert decide(more, "homeassistant", "subscribe", "edge/v1/+/telemetry/+")
    assert not decide(more, "homeassistant", "publish", f"edge/v1/{DEVICE}/cmd/ping")
    for topic in TOPICS[:-2]:  # less what is Home Assistant's
        assert decide(more, DEVICE, "publish", topic) is may_write("device", topic)


def test_emqx_settings_that_the_rules_rest_on() -> None:
    text = (DEPLOY / "emqx" / "emqx.conf").read_text(encoding="ascii")
    lines = {line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")}
    assert {
        "no_match = deny",
        "peer_cert_as_username = cn",
        "peer_cert_as_clientid = cn",
        "verify = verify_peer",
        "fail_if_no_peer_cert = true",
        "listeners.tcp.default.enable = false",
        "listeners.ws.default.enable = false",
    } <= lines
    assert text.count("{") == text.count("}")


def test_the_drop_in_hands_over_what_its_comments_configure() -> None:
    text = (DEPLOY / "systemd" / "mqtt-credentials.conf").read_text(encoding="ascii")
    handed = set(re.findall(r"(?m)^#?LoadCredential=([^:]+):", text))
    configured = re.findall(r'_file = "(credential:[^"]+)"', text)
    assert {name.removeprefix("credential:") for name in configured} == handed
    assert all(CREDENTIAL_NAME.fullmatch(name) for name in configured)
