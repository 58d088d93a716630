"""What FFmpeg is told to open for each kind of address, why so, and what its errors mean to whoever runs the camera.

Nothing of PyAV is imported here: errors come as numbers (FFmpeg's tags and the system's errno) and words.

Each option was checked against the FFmpeg 8.1 in PyAV 17.1 and 18.1, which ignores unknown ones without a word: the
tests give each a value that makes no sense, which only an option that is known refuses.
"""

from __future__ import annotations

import errno
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import REFUSED
from edge_runtime.errors import CameraError

StreamKind = Literal["file", "http", "rtsp", "v4l2"]

_SCHEMES: dict[str, StreamKind] = {
    "file": "file",
    "http": "http",
    "https": "http",
    "rtsp": "rtsp",
    "rtsps": "rtsp",
    "v4l2": "v4l2",
}

# Read until the codec and the size are known, and not for statistics. FFmpeg would look at 20 pictures for a rate and
# at 7 for the decoder's delay: 1.3 s at 15 fps, and longer than any time-out at 1 fps; those pictures would come out
# of its buffer all at once, late and with wrong capture times.
#
# analyzeduration (us of the stream): where neither a description nor a key frame has said what comes, reading begins
# after this without knowing, and the first key frame tells: it may be 20 s away. MPEG-TS, which never says that it has
# shown all of its streams, is read for the whole time, so this is also how long its first picture takes.
_QUICK = {"fpsprobesize": "0", "max_ts_probe": "0", "analyzeduration": "1000000"}

# Not set, though often recommended:
# - fflags=nobuffer throws away what was read to learn about the stream, the first key frame with it: with one every
#   20 s the first picture would come 20 s later.
# - fflags=discardcorrupt drops damaged packets before they can be counted.
# - timeout, rw_timeout: they count from the last byte, so that a byte a second keeps a dead stream open. PyAV's
#   time-outs are for opening and for each packet as a whole.

# What a stream's server may make this device talk to. A camera, or who pretends to be one, could otherwise redirect
# to `file:` or name files of this device in a playlist.
_FILE = {"protocol_whitelist": "file"}
_HTTP = _QUICK | {"protocol_whitelist": "http,https,httpproxy,tcp,tls,crypto,data"}
_RTSP = _QUICK | {
    # Sound and metadata would cost the network and delay the analysis.
    "allowed_media_types": "video",
}
# RTP packets that wait for one before them. By default there are none over TCP, and then gaps are not looked for:
# cameras leave out packets that they cannot send in time.
_RTSP_TCP = {"rtsp_transport": "tcp", "protocol_whitelist": "tcp", "reorder_queue_size": "2"}
_RTSP_TLS = _RTSP_TCP | {"protocol_whitelist": "tls,tcp"}
_RTSP_UDP = {
    "rtsp_transport": "udp",
    "protocol_whitelist": "rtp,udp,tcp",
    # us that a late packet is waited for before it counts as lost: FFmpeg's own value for UDP, said so that it stays.
    "max_delay": "100000",
    # Bytes (the kernel halves what is beyond net.core.rmem_max): a key frame of 4K comes in one burst of about 1 MB.
    "buffer_size": "1048576",
}

_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _OTHER = (
    (0xF8 | ord(a) << 8 | ord(b) << 16 | ord(c) << 24) for a, b, c in ("401", "403", "404", "4XX")
)
_EXIT, _INVALID_DATA = ((ord(a) | ord(b) << 8 | ord(c) << 16 | ord(d) << 24) for a, b, c, d in ("EXIT", "INDA"))


@dataclass(frozen=True, slots=True)
class Stream:
    """What to open: `target`, which may hold credentials, with FFmpeg's `options`, as `format` (None: found out).

    `timeouts_s`: for opening and for each packet, seconds; None for files, which need none.
    """

    kind: StreamKind
    target: str
    options: dict[str, str]
    format: str | None = None
    timeouts_s: tuple[float, float] | None = None

    def __repr__(self) -> str:
        return f"Stream({self.kind!r})"

    @property
    def live(self) -> bool:
        """Whether its end is a fault, and nobody can play it again."""
        return self.kind != "file"

    def no_answer(self) -> CameraError:
        """It could not be opened in time."""
        within = f"within {self.timeouts_s[0] if self.timeouts_s else 0:g} s"
        if self.options.get("rtsp_transport") == "udp":
            return CameraError(
                f"no answer, or no data over UDP, {within}",
                remedy='set transport = "tcp", or let UDP through every firewall between',
                retryable=True,
            )
        return CameraError(f"no answer {within}", retryable=True)

    def fault(self, number: int | None, word: str) -> CameraError:
        """Why it could not be opened: FFmpeg's error `number` and its `word` for it, which holds no address."""
        if number == _EXIT:
            return self.no_answer()
        code: str | None = None
        message, remedy = f"cannot open: {word}", None
        if number == _UNAUTHORIZED:
            code, message = REFUSED, f"user or password refused: {word}"
            remedy = "check them in its url; in a password write %40 for @, %2F for /, %3A for :, %23 for #, %25 for %"
        elif number == _FORBIDDEN:
            code, message = REFUSED, f"this user may not see it: {word}"
            remedy = "give the user the right to the live picture in the camera's settings"
        elif number == _NOT_FOUND:
            message, remedy = f"nothing at this path: {word}", "check the path in its url with the camera's manual"
        elif self.kind == "v4l2":
            remedy = _DEVICE_REMEDIES.get(number or 0)
        elif self.live:
            found = self._network(number, word)
            message, remedy = found.message, found.remedy
        return CameraError(message, code=code, remedy=remedy, retryable=True)

    def _network(self, number: int | None, word: str) -> CameraError:
        message, remedy = f"cannot open: {word}", None
        parts = urlsplit(self.target)
        if number == errno.EPERM:
            # What avformat_find_stream_info returns (-1) where it has not learnt enough.
            message = "data came, but nothing in it says what video it is"
            remedy = "let it send H.264, H.265 or MJPEG, with key frames every few seconds"
        elif number == errno.ECONNREFUSED:
            remedy = "check host and port; it may be starting"
        elif number in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            remedy = "check the network between"
        elif number == errno.EIO and (unknown := _unresolved(parts.hostname or "")):
            message, remedy = f"its host name cannot be resolved: {unknown}", "check the name, or write an address"
        elif number == errno.EIO and parts.scheme.lower() in ("rtsps", "https"):
            # The only word that FFmpeg has for it. Connecting has errors of its own.
            message = f"no TLS connection: {word}"
            if "ca_file" in self.options:
                remedy = "is its certificate for this host, in time, and signed by one in ca_file?"
            else:
                remedy = f"does it speak TLS at this port? If not, write {parts.scheme.lower()[:-1]}://"
        elif number == _OTHER and self.options.get("rtsp_transport") == "udp":
            remedy = 'it may not offer UDP: set transport = "tcp"'
        elif number == _INVALID_DATA and parts.scheme.lower() == "rtsp":
            remedy = "does it speak RTSP at this port? With TLS write rtsps://"
        return CameraError(message, remedy=remedy)


_DEVICE_REMEDIES = {
    errno.ENOENT: "is it plugged in? `ls /dev/video*` shows what there is",
    errno.ENODEV: "is it plugged in? `ls /dev/video*` shows what there is",
    errno.EACCES: "put the service's user into the group video",
    errno.EPERM: "let the service have it (DeviceAllow=char-video4linux)",
    errno.EBUSY: "another program has it open",
    errno.ENOTTY: "it is no video device, or one that brings no pictures: try the next number",
    errno.EINVAL: "it brings no pictures: try the next number",
}


def kind_of(url: str) -> StreamKind | None:
    """The kind of an address, None where it is not one of FFmpeg's. A plain path is a file."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*):", url)
    return "file" if scheme is None else _SCHEMES.get(scheme[1].lower())


def local_path(url: str) -> Path:
    """The path of `file:PATH`, `file:///PATH` or a plain path."""
    if url.startswith("file:"):
        url = url.removeprefix("file:")
        url = url.removeprefix("//") if url.startswith("///") else url
    return Path(url)


def stream_of(options: CameraOptions) -> Stream:
    """What to open for `options`.

    Raises CameraError for an address of another kind, and for a file that is not there or no regular one.
    """
    url, timeouts_s = options.url, (options.open_s, options.stall_s)
    kind = kind_of(url)
    if kind == "http":
        return Stream(kind, url, _HTTP | _trust(options), None, timeouts_s)
    if kind == "rtsp":
        secured = url.lower().startswith("rtsps:")
        transport = _RTSP_TLS if secured else _RTSP_UDP if options.transport == "udp" else _RTSP_TCP
        return Stream(kind, url, _RTSP | transport | (_trust(options) if secured else {}), None, timeouts_s)
    if kind == "v4l2":
        # Size, rate and format stay what the driver has: `v4l2-ctl` sets them, and other programs may rely on them.
        return Stream(kind, url.partition(":")[2], dict(_QUICK), "v4l2", timeouts_s)
    if kind == "file":
        path = local_path(url)
        if not path.exists():
            raise CameraError(f"no such file: {path}", retryable=True)
        if not path.is_file():
            # A FIFO or a device would block the open for ever.
            raise CameraError(f"{path} is not a regular file", retryable=True)
        # The scheme keeps FFmpeg from reading a colon in the name as a protocol.
        return Stream(kind, f"file:{path.absolute()}", dict(_FILE))
    raise CameraError(f"{url.partition(':')[0]}: is no kind of address that is read here", code="camera_unsupported")


def verified(options: CameraOptions) -> bool | None:
    """Whether the certificate of the camera's address is verified; None where it has none."""
    return options.ca_file is not None if options.url.lower().startswith(("rtsps:", "https:")) else None


def _trust(options: CameraOptions) -> dict[str, str]:
    """Cameras sign their certificates themselves: without one to compare with there is nothing to verify."""
    if options.ca_file is None:
        return {"tls_verify": "0"}
    return {"tls_verify": "1", "ca_file": options.ca_file}


def _unresolved(host: str) -> str | None:
    """Why `host` has no address, None where it has one. After a failure only: it may take the resolver's time-out."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or type(error).__name__
    return None
