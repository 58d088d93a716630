"""The door to GStreamer: streams, devices and pipelines in, intact pictures out. Pipelines are in `gst_pipelines`.

`gi` is the distribution's (no wheel brings GStreamer), and a virtual environment does not see it: it is taken from
there, and nothing beside it. No Python runs on GStreamer's threads: encoded and decoded pictures are pulled from
appsinks on the camera's own thread, the bus is polled, and there is no main loop.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
import itertools
import logging
import os
import sys
import sysconfig
import threading
import time
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from edge_runtime.backoff import Backoff
from edge_runtime.camera.gst_library import Complaints, Library, MapInfo
from edge_runtime.camera.gst_pipelines import (
    HARDWARE_ELEMENTS,
    JETSON,
    SOFTWARE,
    Chain,
    missing_element,
    plan_for,
)
from edge_runtime.camera.gst_session import GstSession
from edge_runtime.camera.gst_start import choose_registry, start
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import Intake, Session
from edge_runtime.camera.source import REFUSED_S, SourceCamera
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError

log = logging.getLogger(__name__)

_threads = itertools.count()
_CLOSE_S = 2.0
_MOST_STOPPING = 4


_library: Library | None = None
_lock = threading.Lock()


def _distribution_paths() -> list[str]:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return [
        "/usr/lib/python3/dist-packages",
        f"/usr/lib64/{version}/site-packages",
        f"/usr/lib/{version}/site-packages",
    ]


def _import_gi() -> Any:
    """The package `gi`, from the distribution where the environment has none. Raises CameraError."""
    with contextlib.suppress(ImportError):
        return importlib.import_module("gi")
    for path in _distribution_paths():
        spec = PathFinder.find_spec("gi", [path])
        if spec is None or spec.loader is None or spec.origin is None:
            continue
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        built = sorted(file.name.split(".")[1] for file in Path(spec.origin).parent.glob("_gi.*.so"))
        if not (Path(spec.origin).parent / f"_gi{suffix}").exists():
            raise _unavailable(
                f"the system's python3-gi is for {', '.join(built) or 'no Python'}, this is {sys.version.split()[0]}",
                "make the virtual environment with the system's own python3",
            )
        # Only this package: were its folder on sys.path, the system's numpy would be in the way of ours.
        module = importlib.util.module_from_spec(spec)
        sys.modules["gi"] = module
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            for name in [name for name in sys.modules if name == "gi" or name.startswith("gi.")]:
                del sys.modules[name]
            raise _unavailable(f"python3-gi cannot be loaded: {error}", "install python3-gi again") from None
        return module
    raise _unavailable("there is no Python package gi", "install python3-gi")


def _unavailable(why: str, remedy: str) -> CameraError:
    return CameraError(f"GStreamer is not available: {why}", code="gstreamer_missing", remedy=remedy, retryable=True)


def load() -> Library:
    """GStreamer, initialised. Raises CameraError with what is missing and the package that brings it; retryable."""
    global _library
    with _lock:
        if _library is None:
            _library = _load()
        return _library


def _repository(gi: Any, name: str, package: str, version: str = "1.0") -> Any:
    try:
        gi.require_version(name, version)
        with warnings.catch_warnings():
            # PyGObject's importer is of Python 3.3's kind, up to its version 3.48.
            warnings.simplefilter("ignore", ImportWarning)
            return importlib.import_module(f"gi.repository.{name}")
    except (ImportError, ValueError) as error:
        raise _unavailable(f"{error} (package {package})", f"install {package}") from None


def _load() -> Library:
    gi = _import_gi()
    gst = _repository(gi, "Gst", "gir1.2-gstreamer-1.0")
    # Without it a sink has no methods, only signals.
    _repository(gi, "GstApp", "gir1.2-gst-plugins-base-1.0")
    video = _repository(gi, "GstVideo", "gir1.2-gst-plugins-base-1.0")
    # GIO would ask a desktop's settings for a proxy, through D-Bus, with threads of its own.
    os.environ.setdefault("GSETTINGS_BACKEND", "memory")
    choose_registry(os.environ)
    try:
        if not start(lambda: gst.init(None)):
            raise _unavailable("it does not start: its search for plugins hangs", "see what `gst-inspect-1.0` says")
    except RuntimeError as error:  # GLib's error is one
        raise _unavailable(f"it does not start: {error}", "see what `gst-inspect-1.0` says") from None
    flags = gst.BufferFlags
    return Library(
        Gst=gst,
        GstVideo=video,
        Gio=_repository(gi, "Gio", "gir1.2-glib-2.0", "2.0"),
        GLib=_repository(gi, "GLib", "gir1.2-glib-2.0", "2.0"),
        complaints=_complaints(gst),
        mapping=_mapping(gst),
        bad_flags=int(flags.CORRUPTED) | int(flags.GAP) | int(flags.DECODE_ONLY),
    )


def _complaints(gst: Any) -> Complaints:
    """Have what libav's decoders say of damage told, and printed only where GST_DEBUG asks for a log."""
    complaints = Complaints()
    if not os.environ.get("GST_DEBUG"):
        gst.debug_remove_log_function(None)
    gst.debug_add_log_function(complaints.heard, None)
    gst.debug_set_active(True)
    gst.debug_set_threshold_for_name("libav", gst.DebugLevel.INFO)
    return complaints


def _mapping(gst: Any) -> Any:
    """libgstreamer, if this PyGObject's hash of a buffer is its address (it is, up to now); else None."""
    buffer = gst.Buffer.new_wrapped(b"edge")
    if f"at {hash(buffer):#x})" not in repr(buffer):
        return None
    try:
        library = ctypes.CDLL("libgstreamer-1.0.so.0")
        library.gst_buffer_map.argtypes = [ctypes.c_void_p, ctypes.POINTER(MapInfo), ctypes.c_int]
        library.gst_buffer_unmap.argtypes = [ctypes.c_void_p, ctypes.POINTER(MapInfo)]
    except (OSError, AttributeError):
        return None
    return library


def have_element(name: str) -> bool:
    """Whether GStreamer has an element of this name. Raises CameraError where there is no GStreamer."""
    return load().Gst.ElementFactory.find(name) is not None


def unavailable() -> str | None:
    """Why cameras cannot be read with GStreamer here; None where they can."""
    try:
        load()
    except CameraError as error:
        return error.message
    return None


@functools.cache
def hardware_missing() -> str | None:
    """Why there is no decoding in hardware here; None where there is. Asked for once."""
    try:
        for name in HARDWARE_ELEMENTS:
            if not have_element(name):
                return missing_element(name).message
    except CameraError as error:
        return error.message
    return None


def hardware_decoder() -> str | None:
    """The hardware decoder's element, None where there is none (`hardware_missing` says why). Raises nothing."""
    return JETSON.name if hardware_missing() is None else None


class GstCamera(SourceCamera):
    """A camera that GStreamer reads: csi:, v4l2:, rtsp(s)://, http(s):// (MJPEG), a video file, gst:PIPELINE.

    `chain`: what decodes; by default the Jetson's hardware where it is there, else FFmpeg's decoders. A wrong
    `gst:` pipeline stays `down` for good; everything else is retried (see SourceCamera), a missing GStreamer too.

    A pipeline that does not stop goes on stopping while the next one is opened, up to four of them. `close` waits 2 s
    and leaves what is left, with a word in the log; `isolation = "process"` is the remedy for drivers that hang.
    """

    def __init__(
        self,
        options: CameraOptions,
        *,
        chain: Chain | None = None,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        refused_s: float = REFUSED_S,
    ) -> None:
        clock = clock or SystemClock()
        live = not _is_file(options.url)
        self._stopping: list[threading.Thread] = []

        def open_session(intake: Intake) -> Session:
            self._stopping[:] = [thread for thread in self._stopping if thread.is_alive()]
            if len(self._stopping) >= _MOST_STOPPING:
                raise CameraError(
                    f"{len(self._stopping)} earlier connections have not ended yet",
                    remedy='isolation = "process" ends such by force',
                    retryable=True,
                )
            used = chain or (JETSON if hardware_decoder() else SOFTWARE)
            thread = f"d{next(_threads) % 100000}"
            plan = plan_for(options, used, have_element, thread=thread)
            session = GstSession(load(), plan, options, intake, clock, self._stopping)
            intake.ledger.opened(f"gstreamer ({plan.hardware})" if plan.hardware else "gstreamer")
            return session

        super().__init__(
            options.name,
            open_session,
            live=live,
            fps=options.fps,
            pace=options.pace,
            loop=options.loop,
            clock=clock,
            backoff=backoff,
            open_s=options.open_s,
            stall_s=options.stall_s,
            refused_s=refused_s,
        )

    def close(self) -> None:
        super().close()
        end_s = time.monotonic() + _CLOSE_S
        for thread in self._stopping:
            thread.join(max(0.0, end_s - time.monotonic()))
        if left := sum(thread.is_alive() for thread in self._stopping):
            log.warning("camera %s: %d of its pipelines do not stop, and are left", self.name, left)


def _is_file(url: str) -> bool:
    scheme, colon, _ = url.partition(":")
    return not colon or "/" in scheme or scheme.lower() == "file"
