"""`edge-runtime run`: the daemon in the foreground, with signals and a store."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from edge_runtime.app.daemon import Daemon
from edge_runtime.app.sd_notify import Notifier
from edge_runtime.app.store import StoreLock
from edge_runtime.config import Config

log = logging.getLogger(__name__)


def run_daemon(config: Config, config_file: Path) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. SIGHUP reads `config_file` again.

    Raises EdgeError where it cannot start.
    """
    faulthandler.enable()
    notifier = Notifier.from_environment()
    with StoreLock(config.device.store) as lock:
        daemon = Daemon(config, notifier=notifier, config_file=config_file)
        if lock.trouble is not None:
            daemon.alarm(lock.trouble)
        stop_on_signals(daemon)
        code = daemon.run()
    end_process(code)
    return code


def stop_on_signals(daemon: Daemon) -> None:
    """SIGTERM and SIGINT ask the daemon to stop; a second one of them ends the process at once. SIGHUP has it read
    its configuration again."""

    def handle(_: int, __: FrameType | None) -> None:
        # between two bytecodes of whatever runs now: no lock, no log
        if daemon.stopping:
            os._exit(1)
        daemon.request_stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle)
    signal.signal(signal.SIGHUP, lambda _, __: daemon.request_reread())


def end_process(code: int) -> None:
    """End now, where a thread still hangs in a native call: at a normal exit the interpreter would take its
    libraries away under it. Everything that had to be flushed has been."""
    import threading

    hanging = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if hanging:
        log.warning("ending with %s still running", ", ".join(hanging))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
