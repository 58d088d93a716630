"""A real RTSP server for tests: GStreamer's, driven by JSON lines on stdin and stdout.

It runs on the system's Python, the only one that has `gi`: nothing but that and the standard library is imported.
`rtsp.py` is the tests' side. With `--check` it says what it lacks, and nothing if it can run.

A line in is an object with `do` and its arguments, a line out its answer, with `error` where it failed.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

ELEMENTS = (
    *("videotestsrc", "appsrc", "appsink", "clocksync", "decodebin", "qtdemux", "avdec_h264", "h265parse"),
    *("videoconvert", "videoscale", "x264enc", "x265enc", "jpegenc", "rtph264pay", "rtph265pay", "rtpjpegpay"),
)
# The most pictures of a clip that are kept, raw, in memory.
_CLIP_PICTURES = 600
_SECOND_NS = 1_000_000_000


def missing() -> str | None:
    """What is not installed, if anything."""
    try:
        gi: Any = importlib.import_module("gi")
        for name in ("Gst", "GstRtsp", "GstRtspServer"):
            gi.require_version(name, "1.0")
        gst: Any = importlib.import_module("gi.repository.Gst")
        importlib.import_module("gi.repository.GstRtspServer")
    except (ImportError, ValueError) as error:
        return str(error)
    gst.init(None)
    absent = [name for name in ELEMENTS if gst.ElementFactory.find(name) is None]
    return f"GStreamer lacks {', '.join(absent)}" if absent else None


if __name__ == "__main__":
    if lacking := missing():
        sys.exit(lacking)
    if "--check" in sys.argv:
        sys.exit(0)

Gio: Any = importlib.import_module("gi.repository.Gio")
GLib: Any = importlib.import_module("gi.repository.GLib")
Gst: Any = importlib.import_module("gi.repository.Gst")
GstRtsp: Any = importlib.import_module("gi.repository.GstRtsp")
GstRtspServer: Any = importlib.import_module("gi.repository.GstRtspServer")


class Clip:
    """The pictures of a file, decoded and scaled once, given again and again."""

    def __init__(self, path: str, width: int, height: int, fps: int) -> None:
        self.caps = f"video/x-raw,format=I420,width={width},height={height}"
        self.pictures: list[bytes] = []
        self._fps = fps
        line = (
            "filesrc name=file ! decodebin ! videoconvert n-threads=1 ! videoscale n-threads=1 add-borders=false"
            f" ! {self.caps},pixel-aspect-ratio=1/1 ! appsink name=out sync=false max-buffers=8"
        )
        pipeline = Gst.parse_launch(line)
        pipeline.get_by_name("file").set_property("location", path)
        sink = pipeline.get_by_name("out")
        pipeline.set_state(Gst.State.PLAYING)
        while len(self.pictures) < _CLIP_PICTURES and not sink.get_property("eos"):
            if sample := sink.emit("try-pull-sample", _SECOND_NS // 20):
                buffer = sample.get_buffer()
                self.pictures.append(buffer.extract_dup(0, buffer.get_size()))
            elif pipeline.get_bus().pop_filtered(Gst.MessageType.ERROR):
                break
        pipeline.set_state(Gst.State.NULL)
        if not self.pictures:
            raise ValueError(f"no pictures in {path}")

    def feed(self, source: Any) -> None:
        """Answer what `source` asks for, from the first picture on, a picture per 1/fps."""
        buffers = self._buffers()
        source.connect("need-data", lambda element, _size: element.emit("push-buffer", next(buffers)))

    def _buffers(self) -> Iterator[Any]:
        number = 0
        while True:
            buffer = Gst.Buffer.new_wrapped(self.pictures[number % len(self.pictures)])
            buffer.pts = buffer.dts = number * _SECOND_NS // self._fps
            buffer.duration = _SECOND_NS // self._fps
            yield buffer
            number += 1


def _encoder(codec: str, gop: int, bframes: int, inband_headers: bool) -> str:
    interval = -1 if inband_headers else 0
    if codec == "h264":
        shape = "byte-stream" if inband_headers else "avc"
        order, profile = "tune=zerolatency", "baseline"
        if bframes:
            order, profile = f"bframes={bframes} b-adapt=false rc-lookahead=0 sync-lookahead=0", "main"
        return (
            f"x264enc speed-preset=ultrafast {order} threads=1 key-int-max={gop} pass=qual quantizer=24"
            f" option-string=scenecut=0:repeat-headers={int(inband_headers)}"
            f" ! video/x-h264,stream-format={shape},alignment=au,profile={profile}"
            f" ! rtph264pay name=pay0 pt=96 config-interval={interval}"
        )
    if codec == "h265":
        shape = "byte-stream" if inband_headers else "hvc1"
        order = "" if bframes else "tune=zerolatency"
        options = "scenecut=0:open-gop=0:pools=none:frame-threads=1:crf=26"
        options += f":bframes={bframes}:b-adapt=0:rc-lookahead={bframes + 1}"
        return (
            f"x265enc speed-preset=ultrafast {order} key-int-max={gop} log-level=none option-string={options}"
            f" ! h265parse ! video/x-h265,stream-format={shape},alignment=au"
            f" ! rtph265pay name=pay0 pt=96 config-interval={interval}"
        )
    if codec == "mjpeg":
        return "jpegenc quality=80 ! rtpjpegpay name=pay0 pt=26"
    raise ValueError(f"codec {codec!r}: h264, h265, mjpeg")


class Server:
    """The RTSP server and everything that can be done to it while it runs. Each public method is a command."""

    def __init__(self, port: int, certificate: str | None) -> None:
        self._server = GstRtspServer.RTSPServer()
        self._server.set_address("127.0.0.1")
        self._server.set_service(str(port))
        self._certificate = certificate
        self._mounts = self._server.get_mount_points()
        self._media: dict[str, Any] = {}
        self._clips: dict[tuple[str, int, int, int], Clip] = {}
        self._clients: dict[Any, str | None] = {}
        self._accepted = 0
        self._plays: dict[str, int] = {}
        self._server.connect("client-connected", self._on_client)
        if certificate is not None:
            self.require(None, None)
        if not self._server.attach(None):
            raise OSError(f"cannot listen on port {port}")
        self.port: int = self._server.get_bound_port()
        GLib.timeout_add_seconds(5, self._clean)

    def add(
        self,
        mount: str,
        codec: str,
        width: int,
        height: int,
        fps: int,
        gop: int,
        bframes: int,
        clip: str | None,
        inband_headers: bool,
    ) -> None:
        """Take the place of what was at that mount; clients that are connected keep what they have."""
        size = f"width={width},height={height}"
        film: Clip | None = None
        if clip is None:
            source = f"videotestsrc is-live=true horizontal-speed=4 ! video/x-raw,format=I420,framerate={fps}/1"
            source += f" ! capsfilter name=size caps=video/x-raw,{size}"
        else:
            key = (clip, width, height, fps)
            film = self._clips.get(key) or self._clips.setdefault(key, Clip(*key))
            source = "appsrc name=source is-live=true format=time max-buffers=2 max-bytes=0"
            source += f" caps={film.caps},framerate={fps}/1 ! clocksync"
        factory = GstRtspServer.RTSPMediaFactory()
        factory.set_launch(f"( {source} ! {_encoder(codec, gop, bframes, inband_headers)} )")
        factory.set_shared(True)
        factory.set_latency(0)
        factory.connect("media-configure", self._on_media, mount, film)
        rights = GstRtspServer.RTSPPermissions()
        for role in ("user", "anyone"):
            for right in ("access", "construct"):
                rights.add_permission_for_role(role, f"media.factory.{right}", True)
        factory.set_permissions(rights)
        self._mounts.add_factory(f"/{mount}", factory)

    def remove(self, mount: str) -> None:
        self._mounts.remove_factory(f"/{mount}")
        self._media.pop(mount, None)

    def resize(self, mount: str, width: int, height: int) -> None:
        """Another size within the connections that there are; only of a test picture."""
        element = self._media[mount].get_element().get_by_name("size")
        element.set_property("caps", Gst.Caps.from_string(f"video/x-raw,width={width},height={height}"))

    def require(self, user: str | None, password: str | None, scheme: str = "digest") -> None:
        """Ask everybody who asks from now on for this user, or for none."""
        if user is None and self._certificate is None:
            self._server.set_auth(None)
            return
        auth = GstRtspServer.RTSPAuth()
        if self._certificate is not None:
            auth.set_tls_certificate(Gio.TlsCertificate.new_from_file(self._certificate))
        token = GstRtspServer.RTSPToken()
        if user is None:
            token.set_string("media.factory.role", "anyone")
            auth.set_default_token(token)
        else:
            token.set_string("media.factory.role", "user")
            if scheme == "digest":
                auth.set_supported_methods(GstRtsp.RTSPAuthMethod.DIGEST)
                auth.add_digest(user, password, token)
            else:
                auth.set_supported_methods(GstRtsp.RTSPAuthMethod.BASIC)
                auth.add_basic(GstRtspServer.RTSPAuth.make_basic(user, password), token)
        self._server.set_auth(auth)

    def cut(self, mount: str | None) -> int:
        """Close the connections of a mount, or all; how many."""
        chosen = [client for client, its in self._clients.items() if mount is None or its == mount]
        for client in chosen:
            client.close()
        return len(chosen)

    def statistics(self) -> dict[str, Any]:
        return {"clients": len(self._clients), "accepted": self._accepted, "plays": self._plays}

    def _on_client(self, _server: Any, client: Any) -> None:
        self._clients[client] = None
        self._accepted += 1
        client.connect("closed", lambda gone: self._clients.pop(gone, None))
        client.connect("describe-request", self._on_describe)
        client.connect("play-request", self._on_play)

    def _on_describe(self, client: Any, context: Any) -> None:
        self._clients[client] = context.uri.abspath.strip("/")

    def _on_play(self, client: Any, _context: Any) -> None:
        mount = self._clients.get(client) or ""
        self._plays[mount] = self._plays.get(mount, 0) + 1

    def _on_media(self, _factory: Any, media: Any, mount: str, film: Clip | None) -> None:
        self._media[mount] = media
        if film is not None:
            film.feed(media.get_element().get_by_name("source"))

    def _clean(self) -> bool:
        self._server.get_session_pool().cleanup()
        return True


class Commands:
    """Lines in, lines out, on the main loop."""

    def __init__(self, server: Server, loop: Any) -> None:
        self._server = server
        self._loop = loop
        self._rest = b""
        GLib.unix_fd_add_full(
            GLib.PRIORITY_DEFAULT, 0, GLib.IOCondition.IN | GLib.IOCondition.HUP, self._on_input, None
        )

    def _on_input(self, _fd: int, _condition: Any, _data: Any) -> bool:
        got = os.read(0, 65536)
        if not got:
            self._loop.quit()
            return False
        *lines, self._rest = (self._rest + got).split(b"\n")
        for line in lines:
            answer(self._obey(json.loads(line)))
        return True

    def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        try:
            return {"result": getattr(self._server, command.pop("do"))(**command)}
        except Exception as error:  # noqa: BLE001 - the tests' side raises it
            return {"error": f"{type(error).__name__}: {error}"}


def answer(line: dict[str, Any]) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def main() -> None:
    """Arguments: the port (0: any), and the file of a certificate and its key for rtsps."""
    Gst.init(None)
    loop = GLib.MainLoop()
    try:
        server = Server(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    except OSError as error:
        sys.exit(str(error))
    commands = Commands(server, loop)
    answer({"port": server.port})
    loop.run()
    del commands
    # Not through the interpreter's end: GStreamer's threads may be inside Python there.
    os._exit(0)


if __name__ == "__main__":
    main()
