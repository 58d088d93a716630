"""GStreamer's start: where its list of plugins is kept, and an end to a search for plugins that hangs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path

log = logging.getLogger(__name__)

SCAN_S = 30.0
"""The first search on a device with NVIDIA's plugins takes some seconds; later ones read the list."""
_TRIES = 2
_NAMES = ("GST_REGISTRY_1_0", "GST_REGISTRY")
_SCANNER = "gst-plugin-scan"
"""The kernel keeps 15 characters of gst-plugin-scanner."""

_hanging: threading.Thread | None = None


def choose_registry(environ: MutableMapping[str, str]) -> None:
    """Where the home cannot be written to, keep the list of plugins in the service's own folder.

    Without any place all plugins are searched at every start, in every process.
    """
    if any(environ.get(name) for name in _NAMES):
        return
    home = environ.get("XDG_CACHE_HOME") or f"{environ.get('HOME') or '/'}/.cache"
    if _writable(Path(home) / "gstreamer-1.0"):
        return
    for name in ("CACHE_DIRECTORY", "STATE_DIRECTORY"):  # systemd's; several are parted by colons
        folder = environ.get(name, "").partition(":")[0]
        if folder and os.access(folder, os.W_OK):
            environ[_NAMES[0]] = f"{folder}/gstreamer-1.0.registry"
            return


def _writable(folder: Path) -> bool:
    """Whether this folder, or the nearest one above it that there is, can be written to."""
    for each in (folder, *folder.parents):
        with contextlib.suppress(OSError):
            if each.exists():
                return each.is_dir() and os.access(each, os.W_OK)
    return False


def start(init: Callable[[], object], within_s: float = SCAN_S) -> bool:
    """Call `init`, and end its plugin scanner where that hangs: the plugin is then left out. Raises what `init` does.

    False where it hangs all the same; it is left alone then. Not for two threads at once.
    """
    global _hanging
    if _hanging is not None and _hanging.is_alive():
        return False
    failures: list[BaseException] = []

    def work() -> None:
        try:
            init()
        except BaseException as error:  # noqa: BLE001  to be raised where it is waited for
            failures.append(error)

    thread = threading.Thread(target=work, name="gst-init", daemon=True)
    thread.start()
    for _ in range(_TRIES):
        thread.join(within_s)
        if not thread.is_alive():
            break
        log.warning("GStreamer has searched for plugins for %g s: its scanner is ended", within_s)
        _end_scanners()
    else:
        thread.join(within_s)
    if failures:
        raise failures[0]
    _hanging = thread if thread.is_alive() else None
    return _hanging is None


def _end_scanners() -> None:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError):
            head, _, tail = stat.read_text("utf-8", "replace").rpartition(")")
            pid, _, name = head.partition(" (")
            if name == _SCANNER and int(tail.split()[1]) == os.getpid():
                os.kill(int(pid), signal.SIGKILL)
