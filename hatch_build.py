"""Build hook: the wheel carries the demo's bundle and clip, so that `edge-runtime demo` needs no checkout.

An editable install does not: `edge_runtime.bundled` finds them in the checkout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = ("engines/centernet", "media/vtest.mp4")


class BundledDataHook(BuildHookInterface):  # type: ignore[type-arg]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        for path in CARRIED:
            if not Path(self.root, path).exists():
                raise FileNotFoundError(f"{path} is missing from {self.root}: the wheel must carry it")
            build_data["force_include"][path] = f"edge_runtime/_bundled/{path}"
