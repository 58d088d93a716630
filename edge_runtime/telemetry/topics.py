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

    def results(self, camera: str) -> str:
        return f"{self.root}/results/{camera}"
