"""The two sockets, bound by us: a control socket for the owner and its group, and TCP."""

from __future__ import annotations

import errno
import os
import socket
import stat
from pathlib import Path

from edge_runtime.errors import EdgeError, UsageError
from edge_runtime.web.access import parse_listen

MAX_PATH_BYTES = 107
"""sun_path has 108 bytes, one of them the final 0 (unix(7))."""

BACKLOG = 128
SOCKET_MODE = 0o660
FOLDER_MODE = 0o750
_PROBE_S = 1.0


class ControlSocket:
    """A listening Unix socket at `path`, mode 0660, and its file."""

    def __init__(self, path: Path) -> None:
        """Bind and listen. A missing folder is made with mode 0750; a dead daemon's socket file is replaced.

        Raises UsageError for a path that cannot be one, and EdgeError where another daemon listens.
        """
        self.path = path
        if (length := len(os.fsencode(path))) > MAX_PATH_BYTES:
            raise UsageError(
                f"the path of the control socket has {length} bytes, and a socket's may have {MAX_PATH_BYTES}",
                code="socket_path",
                where=str(path),
                remedy="set [device] store to a shorter path, or give a shorter one with --socket",
            )
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._bind()
        except BaseException:
            self.socket.close()
            raise

    def _bind(self) -> None:
        try:
            if not self.path.parent.is_dir():
                self.path.parent.mkdir(parents=True)
                self.path.parent.chmod(FOLDER_MODE)
            _remove_stale(self.path)
            # The mode of the open socket becomes its file's. Setting the umask would do the same, and for a moment
            # to the files of every other thread too.
            os.fchmod(self.socket.fileno(), SOCKET_MODE)
            self.socket.bind(os.fspath(self.path))
            # the process's umask took bits away
            self.path.chmod(SOCKET_MODE)
            self.socket.listen(BACKLOG)
            found = self.path.stat()
        except OSError as error:
            raise UsageError(
                f"the control socket cannot be made: {error.strerror}",
                code="socket_unusable",
                where=str(self.path),
                remedy="let this user write to the folder, or set [device] store to another one",
            ) from error
        self._file = (found.st_dev, found.st_ino)

    def remove(self) -> None:
        """Take the file away, unless another daemon has put its own there. Idempotent."""
        try:
            found = self.path.stat()
            if (found.st_dev, found.st_ino) == self._file:
                self.path.unlink()
        except OSError:
            pass  # gone, or in a folder that is no longer ours: the next daemon replaces it


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise UsageError(
            "stands where the control socket belongs, and is no socket",
            code="socket_unusable",
            where=str(path),
            remedy="remove it",
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):  # somebody listens, and is busy
            pass
    raise EdgeError(
        "another daemon listens on this control socket",
        code="socket_held",
        where=str(path),
        remedy="stop it, or set [device] store to another folder",
    )


def bind_tcp(listen: str) -> socket.socket:
    """A socket that listens on `HOST:PORT` (port 0: a free one). A name is bound at its first address.

    Raises UsageError for what is no address, and EdgeError where it cannot be listened on.
    """
    host, port = parse_listen(listen)
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        raise EdgeError(
            f"the web door cannot listen: {error.strerror or error}",
            code="web_listen",
            where=listen,
            remedy="stop what uses the port, or set [web] listen to another one"
            if taken
            else "set [web] listen to an address of this machine and a port that this user may use",
            retryable=taken,
        ) from error
    return bound
