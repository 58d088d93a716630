"""The topics of a device, `edge/v1/{device}/...`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topics:
    """Topic names of one device."""

    device: str

    @property
    def root(self) -> str:
        return f"edge/v1/{self.device}"

    @property
    def presence(self) -> str:
        return f"{self.root}/presence"

    @property
    def window(self) -> str:
        return f"{self.root}/telemetry/window"

    @property
    def live(self) -> str:
        """Copies of windows that would wait behind a backlog."""
        return f"{self.root}/telemetry/live"

    @property
    def reported(self) -> str:
        return f"{self.root}/reported"

    def event(self, kind: str) -> str:
        return f"{self.root}/event/{kind}"

    def command(self, name: str) -> str:
        return f"{self.root}/cmd/{name}"

    def reply(self, command_id: str) -> str:
        return f"{self.root}/reply/{command_id}"

    def results(self, camera: str) -> str:
        return f"{self.root}/results/{camera}"
