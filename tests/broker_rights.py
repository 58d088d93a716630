"""Who may do what at a broker that has one of deploy/'s access lists, told apart from the lists themselves."""

from __future__ import annotations

from typing import Literal

Role = Literal["device", "controller", "dashboard"]

DEVICE, OTHER_DEVICE = "gate-07", "gate-08"
NAMES: dict[Role, str] = {"device": DEVICE, "controller": "controller", "dashboard": "dashboard"}

TOLD = ("presence", "reported", "telemetry/window", "telemetry/live", "results/gate", "event/camera")
ANSWERED = ("reply/c1",)
ASKED = ("cmd/ping", "cmd/reload", "desired")
"""What only a controller writes."""
STRAY = ("", "/other", "/telemetry", "/telemetry/a/b", "/presence/x", "/cmd", "/cmd/a/b", "/desired/x", "/event/a/b")

_ALL = (*TOLD, *ANSWERED, *ASKED)
TOPICS = (
    *(f"edge/v1/{device}/{rest}" for device in (DEVICE, OTHER_DEVICE) for rest in _ALL),
    *(f"edge/v1/{device}{rest}" for device in (DEVICE, OTHER_DEVICE) for rest in STRAY),
    "edge/v1",
    "edge/v2/gate-07/presence",
    f"homeassistant/device/{DEVICE}/config",
    "anything",
)
"""Where everybody tries to publish, and to read."""


def _rest(topic: str) -> tuple[str, str]:
    """(device, what is below it), ("", "") for what is no topic of a device."""
    parts = topic.split("/", 3)
    return (parts[2], parts[3]) if parts[:2] == ["edge", "v1"] and len(parts) == 4 else ("", "")


def may_write(role: Role, topic: str) -> bool:
    device, rest = _rest(topic)
    if role == "device":
        return device == DEVICE and rest in (*TOLD, *ANSWERED)
    return role == "controller" and rest in ASKED


def may_read(role: Role, topic: str) -> bool:
    device, rest = _rest(topic)
    if role == "device":
        return device == DEVICE and rest in ASKED
    if role == "controller":
        return topic == "edge/v1" or topic.startswith("edge/v1/")
    return rest in TOLD
