"""What TensorRT says: its reasons reach nobody but a logger, so one logger keeps the last of them for our errors."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from edge_runtime.engine.tensorrt.api import TensorRt, TrtLogger

log = logging.getLogger(__name__)

_KEPT_LINES = 200
_MAX_CHARS = 2000
_ERROR, _WARNING, _INFO = 1, 2, 3  # ILogger.Severity, the same since TensorRT 5; 0 is an internal error
_LEVELS = {0: logging.ERROR, _ERROR: logging.ERROR, _WARNING: logging.WARNING, _INFO: logging.DEBUG}


class Lines:
    """The last lines, each with its severity: 0 and 1 are errors, 2 a warning, 3 information. Any thread may call."""

    def __init__(self, kept: int = _KEPT_LINES) -> None:
        self._lines: deque[tuple[int, int, str]] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._count = 0

    def add(self, severity: int, text: str) -> None:
        """Keep a line, and pass it on to this program's log. Verbose ones are dropped."""
        if severity not in _LEVELS:
            return
        text = " ".join(text.split())[:_MAX_CHARS]
        with self._lock:
            self._count += 1
            self._lines.append((self._count, severity, text))
        log.log(_LEVELS[severity], "TensorRT: %s", text)

    def mark(self) -> int:
        """Where the lines are now, for `since`."""
        return self._count

    def since(self, mark: int, severity: int = _ERROR) -> list[str]:
        """The lines after a mark that are at least as severe, oldest first."""
        with self._lock:
            return [text for number, level, text in self._lines if number > mark and level <= severity]

    def tail(self, mark: int = 0, lines: int = 3) -> str:
        """The last errors after a mark in one line, else the last warnings, else "it says no reason"."""
        found = self.since(mark) or self.since(mark, _WARNING)
        return "; ".join(found[-lines:]) or "it says no reason"


_loggers: list[tuple[TensorRt, TrtLogger, Lines]] = []
_making = threading.Lock()


def capture(trt: TensorRt) -> tuple[TrtLogger, Lines]:
    """(the ILogger, what it keeps) of this TensorRT module: one a process, and for ever.

    TensorRT keeps the first logger that it is given for everything that has no other, so it may never be freed.
    """
    with _making:
        for known, logger, lines in _loggers:
            if known is trt:
                return logger, lines
        lines = Lines()
        logger = _logger_class(trt)(lines)
        _loggers.append((trt, logger, lines))
        return logger, lines


def _logger_class(trt: TensorRt) -> Callable[[Lines], TrtLogger]:
    class CapturingLogger(trt.ILogger):  # type: ignore[misc]  # the module is only known at run time
        def __init__(self, lines: Lines) -> None:
            trt.ILogger.__init__(self)  # without it, the first message crashes the process
            self._lines = lines

        def log(self, severity: Any, msg: str) -> None:
            try:
                self._lines.add(int(severity), str(msg))
            except Exception:  # nothing may be raised into TensorRT's own threads
                log.debug("a line of TensorRT was lost", exc_info=True)

    return CapturingLogger
