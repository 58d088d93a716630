"""Models as ONNX Runtime has optimised them for this CPU, kept on disk: a session made of one is there sooner.

Optimising is most of what making a session takes, and with onnxruntime 1.23 every other thread waits for it. A file of
it is of one onnxruntime, one CPU and one model, and has these in its name; it begins with its own digest, so that what
a power cut or a bad disk left of it is made anew. Nothing here raises: without a cache a session only takes longer.
The digest finds damage, not malice: so folder and files have to be this user's, and nobody else's to write.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edge_runtime.durable import write_atomic

__all__ = ["FOLDER", "SessionCache", "cpu_identity"]

log = logging.getLogger(__name__)

FOLDER = "sessions"
"""In the daemon's store."""
_FORMAT = 1
_MAGIC = b"edge-runtime optimised model\n"
_SUFFIX = ".optimised"
_TOUCHED_AGAIN_S = 86_400.0
"""Flash wears: that a file was used is noted once a day."""
_LEFT_OVER_S = 3_600.0
_CPU_LINES = re.compile(
    r"^(model name|flags|Features|CPU implementer|CPU architecture|CPU part|CPU variant)\s*:\s*(.*)$", re.MULTILINE
)


def cpu_identity(cpuinfo: Path = Path("/proc/cpuinfo")) -> str | None:
    """What kernels are chosen by: the kind of machine, the models of its processors, and what they can do. None where
    that cannot be told."""
    try:
        text = cpuinfo.read_text("utf-8", "replace")
    except OSError:
        return None
    found = sorted({f"{key}={' '.join(value.split())}" for key, value in _CPU_LINES.findall(text)})
    return "\n".join([platform.machine(), *found]) if found else None


class SessionCache:
    """A folder of optimised models, the newest `most` of them and `most_bytes` together. Any thread, several processes.

    `reserve_bytes` stay free on the disk. `cpu`: what this CPU is; None: nothing is kept or found.
    """

    def __init__(
        self,
        folder: Path,
        *,
        cpu: str | None = None,
        most: int = 16,
        most_bytes: int = 256 * 2**20,
        reserve_bytes: int = 256 * 2**20,
    ) -> None:
        self.folder = folder
        self._cpu = cpu or cpu_identity()
        self._most = most
        self._most_bytes = most_bytes
        self._reserve_bytes = reserve_bytes

    def find(self, sha256: str, library: str) -> bytes | None:
        """What `library` (name, version, options) made of the model of this digest on this CPU; None where that is not
        here, is another user's, or is damaged, which then is removed."""
        if (path := self._path(sha256, library)) is None:
            return None
        try:
            if not _ours(self.folder.lstat()):
                self._foreign(self.folder)
                return None
            # what is looked at is what is read, whatever takes its name meanwhile
            with open(path, "rb", opener=_no_link) as stream:
                status = os.fstat(stream.fileno())
                if not (stat.S_ISREG(status.st_mode) and _ours(status)):
                    self._foreign(path)
                    return None
                data = stream.read(self._most_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._lost(error)
            return None
        body = _opened(data)
        if body is None:
            log.warning("%s is damaged, and is made anew", path)
            self.drop(sha256, library)
            return None
        if time.time() - status.st_mtime > _TOUCHED_AGAIN_S:
            with suppress(OSError):
                os.utime(path)
        return body

    def keep(self, sha256: str, size_bytes: int, library: str, make: Callable[[Path], object]) -> bytes | None:
        """Have `make` write the optimised model of one of this digest and size to a path, and keep it; what it wrote,
        None where nothing is kept.

        `make` may raise what it likes; that comes out. An existing file is replaced.
        """
        if (path := self._path(sha256, library)) is None or not self._has_room(size_bytes):
            return None
        written = self.folder / f".{secrets.token_hex(8)}.new"
        try:
            make(written)
            body = written.read_bytes()
        except OSError as error:
            self._lost(error)
            return None
        finally:
            with suppress(OSError):
                written.unlink(missing_ok=True)
        if not body or len(body) > self._most_bytes // 2:
            return None
        try:
            write_atomic(path, _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body, mode=0o640)
            self._bound(path)
        except OSError as error:
            self._lost(error)
            return None
        return body

    def drop(self, sha256: str, library: str) -> None:
        """Forget what was kept of a model."""
        if (path := self._path(sha256, library)) is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, sha256: str, library: str) -> Path | None:
        if self._cpu is None:
            return None
        key = f"{_FORMAT}\n{library}\n{self._cpu}\n{sha256}"
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()}{_SUFFIX}"

    def _has_room(self, size_bytes: int) -> bool:
        try:
            self.folder.mkdir(mode=0o750, exist_ok=True)
            if not _ours(self.folder.lstat()):
                self._foreign(self.folder)
                return False
            disk = os.statvfs(self.folder)
        except OSError as error:
            self._lost(error)
            return False
        # halves become floats: twice the size; once as the library writes it, once with its digest
        return disk.f_bavail * disk.f_frsize - 4 * size_bytes >= self._reserve_bytes

    def _bound(self, newest: Path) -> None:
        """Remove what was used longest ago, of too many files, and what a kill left. Raises OSError."""
        entries = []
        for path in self.folder.iterdir():
            with suppress(OSError):  # another process may have removed it
                status = path.stat()
                if path.suffix == _SUFFIX:
                    entries.append((path != newest, -status.st_mtime, status.st_size, path))
                elif time.time() - status.st_mtime > _LEFT_OVER_S:
                    path.unlink()
        total_bytes = 0
        for place, (_, _, size_bytes, path) in enumerate(sorted(entries)):
            total_bytes += size_bytes
            if place >= self._most or total_bytes > self._most_bytes:
                path.unlink(missing_ok=True)

    def _foreign(self, path: Path) -> None:
        log.warning("%s is another user's, a link, or for others to write: no optimised model comes from there", path)

    def _lost(self, error: OSError) -> None:
        log.info("no optimised model is kept in %s: %s", self.folder, error.strerror or error)


def _ours(status: os.stat_result) -> bool:
    """Whether nobody but this user, and root, could have written it."""
    return not stat.S_ISLNK(status.st_mode) and status.st_uid in (0, os.geteuid()) and not status.st_mode & 0o022


def _no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _opened(data: bytes) -> bytes | None:
    """A file's model; None where it is not what was written."""
    start = len(_MAGIC) + 65
    body = data[start:]
    stated = data[len(_MAGIC) : start]
    whole = data.startswith(_MAGIC) and stated == hashlib.sha256(body).hexdigest().encode() + b"\n"
    return body if whole and body else None
