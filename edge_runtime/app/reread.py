"""SIGHUP: the configuration is read again, and what can change while cameras run is taken over.

A configuration that is wrong changes nothing. Everything but `[[camera]]`, `[[model]]` and `[budget]` needs a restart;
whoever changed it is told.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from edge_runtime.app.cameras import CameraKeeper
from edge_runtime.app.keeper import ModelKeeper
from edge_runtime.app.messaging import Messaging
from edge_runtime.app.sd_notify import Notifier
from edge_runtime.app.telling import LEVELS
from edge_runtime.config import BudgetConfig, Config, load_config
from edge_runtime.errors import EdgeError
from edge_runtime.records.events import Severity

log = logging.getLogger(__name__)

_TABLES = {
    "device": "[device]",
    "engine": "[engine]",
    "mqtt": "[mqtt]",
    "telemetry": "[telemetry]",
    "web": "[web]",
    "update": "[update]",
}


class Reread:
    """Reads `file` again on the loader's thread. `config` is what the daemon was started with. `budget` is given what
    the file says of budgets, changed or not."""

    def __init__(
        self,
        config: Config,
        file: Path | None,
        keeper: ModelKeeper,
        cameras: CameraKeeper,
        messaging: Messaging,
        notifier: Notifier,
        budget: Callable[[BudgetConfig | None], None],
    ) -> None:
        self._config = config
        self._file = file
        self._keeper = keeper
        self._cameras = cameras
        self._messaging = messaging
        self._notifier = notifier
        self._budget = budget

    def run(self) -> None:
        """Once. Never raises: what is wrong is logged and told as an event."""
        if self._file is None:
            log.warning("SIGHUP: this daemon was not started from a configuration file; nothing to read again")
            return
        self._notifier.reloading()
        try:
            self._take_over(self._file)
        except Exception:
            log.exception("reading the configuration again failed; what ran, runs on")
        finally:
            self._notifier.ready("configuration read again")

    def _take_over(self, file: Path) -> None:
        try:
            config = load_config(file)
        except EdgeError as error:
            self._tell("error", f"the configuration is wrong and was not taken over; what ran, runs on:\n{error}")
            return
        left = [
            f"{table}: changed, needs a restart"
            for key, table in _TABLES.items()
            if getattr(config, key) != getattr(self._config, key)
        ]
        # before the models: a stricter one should hold while they are loaded
        self._budget(config.budget)
        if _profile_of(config) != _profile_of(self._config):
            left.append("[budget] profile: changed, needs a restart")
        left += self._keeper.apply(config)
        # after the models: a camera goes to one that is there
        left += self._take_over_cameras(config)
        if left:
            self._tell("warning", "the configuration was read again; not taken over: " + "; ".join(left))
            return
        self._messaging.config_digest = config.digest
        self._tell("info", "the configuration was read again and is in force")
        self._messaging.reported(self._keeper.reported(), self._cameras.reported())

    def _take_over_cameras(self, config: Config) -> list[str]:
        try:
            return self._cameras.apply(config.cameras)
        except EdgeError as error:
            return [f"[[camera]]: every camera runs on as it did: {error}"]

    def _tell(self, severity: Severity, text: str) -> None:
        for line in text.splitlines():
            log.log(LEVELS[severity], "%s", line)
        if self._messaging.events is not None:
            self._messaging.events.emit("config", text, severity=severity, digest=self._messaging.config_digest)


def _profile_of(config: Config) -> Path | None:
    return None if config.budget is None else config.budget.profile
