"""Logs go to standard error: for a person, for the journal, or as JSON lines for machines."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Literal

LogFormat = Literal["text", "json"]


class JsonFormatter(logging.Formatter):
    """One JSON object a line: t_utc, level, logger, thread, message, and the trace where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "t_utc": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class JournalFormatter(logging.Formatter):
    """A syslog level in front (sd-daemon(3)), which journald takes off again; the journal has its own clock."""

    _LEVELS = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))

    def format(self, record: logging.LogRecord) -> str:
        level = next((number for minimum, number in self._LEVELS if record.levelno >= minimum), 7)
        return "\n".join(f"<{level}>{line}" for line in super().format(record).splitlines())


def set_up_logs(log_format: LogFormat = "text", level: int = logging.INFO) -> None:
    """Configure the root logger of this process."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(JsonFormatter())
    elif "JOURNAL_STREAM" in os.environ:
        handler.setFormatter(JournalFormatter("%(message)s"))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.captureWarnings(True)
