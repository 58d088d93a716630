"""What is used of GStreamer, as its door (`gstreamer`) hands it on; nothing is imported of it here."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edge_runtime.errors import CameraError

_READ = 1
"""GST_MAP_READ."""


class MapInfo(ctypes.Structure):
    """GstMapInfo (gst/gstmemory.h), the same in all of GStreamer 1.x."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        ("maxsize", ctypes.c_size_t),
        ("user_data", ctypes.c_void_p * 4),
        ("reserved", ctypes.c_void_p * 4),
    )


class Complaints:
    """What decoders write into GStreamer's log, told to who watches the thread that they run on.

    The one place where Python runs on GStreamer's threads, and only where something is wrong: libav's decoders conceal
    damage and say so nowhere else.
    """

    def __init__(self) -> None:
        self._watchers: dict[int, Callable[[int, str], None]] = {}

    def watch(self, thread_id: int, watcher: Callable[[int, str], None] | None) -> None:
        """`watcher` gets level and text of each line from the thread of this (kernel's) id; None: no longer."""
        if watcher is None:
            self._watchers.pop(thread_id, None)
        else:
            self._watchers[thread_id] = watcher

    def heard(self, _category: Any, level: Any, *rest: Any) -> None:
        """GstLogFunction: (category, level, file, function, line, object, message)."""
        watcher = self._watchers.get(threading.get_native_id())
        if watcher is not None:
            watcher(int(level), rest[4].get())


@dataclass(frozen=True, slots=True)
class Library:
    """What is used of GStreamer, loaded once."""

    Gst: Any
    GstVideo: Any
    Gio: Any
    GLib: Any
    complaints: Complaints
    mapping: Any
    """libgstreamer, where buffers can be mapped without a copy of their content into bytes."""
    bad_flags: int

    @contextlib.contextmanager
    def mapped(self, buffer: Any) -> Iterator[memoryview]:
        """The content of a buffer, to be read within the context alone. Raises CameraError."""
        if self.mapping is not None:
            info = MapInfo()
            if not self.mapping.gst_buffer_map(hash(buffer), ctypes.byref(info), _READ):
                raise CameraError("a picture cannot be read from the decoder's memory", retryable=True)
            try:
                yield memoryview((ctypes.c_uint8 * info.size).from_address(info.data)).cast("B")
            finally:
                self.mapping.gst_buffer_unmap(hash(buffer), ctypes.byref(info))
            return
        readable, gst_info = buffer.map(self.Gst.MapFlags.READ)
        if not readable:
            raise CameraError("a picture cannot be read from the decoder's memory", retryable=True)
        try:
            yield memoryview(gst_info.data)
        finally:
            buffer.unmap(gst_info)
