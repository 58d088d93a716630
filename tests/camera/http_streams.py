"""An HTTP server for tests: MJPEG as cameras send it, and live HLS, with stalls, cuts and passwords on request."""

from __future__ import annotations

import base64
import contextlib
import http.server
import itertools
import socket
import threading
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import av

SegmentType = Literal["ts", "fmp4"]
_BOUNDARY = "picture"


class Hls:
    """A clip as HLS segments of `segment_s`, made once, in a folder."""

    def __init__(
        self,
        clip: Path,
        folder: Path,
        kind: SegmentType = "ts",
        *,
        fps: int = 10,
        segment_s: int = 1,
        pictures: int = 120,
        width: int = 320,
        height: int = 240,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.kind = kind
        playlist = folder / "whole.m3u8"
        options = {"hls_time": str(segment_s), "hls_list_size": "0", "hls_playlist_type": "vod"}
        options["hls_segment_type"] = "fmp4" if kind == "fmp4" else "mpegts"
        suffix = "m4s" if kind == "fmp4" else "ts"
        options["hls_segment_filename"] = str(folder / f"part%d.{suffix}")
        encoder = {"preset": "ultrafast", "tune": "zerolatency", "g": str(fps * segment_s), "sc_threshold": "0"}
        with av.open(str(clip)) as source, av.open(str(playlist), "w", format="hls", options=options) as out:
            stream: Any = out.add_stream("libx264", rate=fps, options=encoder)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for number, frame in enumerate(itertools.islice(source.decode(video=0), pictures)):
                picture = frame.reformat(width, height, "yuv420p")
                picture.pts, picture.time_base = number, Fraction(1, fps)
                picture.pict_type = 0
                out.mux(stream.encode(picture))
            out.mux(stream.encode(None))
        lines = playlist.read_text(encoding="utf-8").splitlines()
        self.segments = [line for line in lines if line and not line.startswith("#")]
        self.durations_s = [float(line[8:].rstrip(",")) for line in lines if line.startswith("#EXTINF:")]
        self._head = [line for line in lines if line.startswith("#EXT-X-MAP")]

    def playlist(self, age_s: float, window: int = 4) -> str:
        """What a live server says at that age: the newest segments. After the last the first comes again."""
        whole_s, count = sum(self.durations_s), len(self.segments)
        rounds, rest_s = divmod(age_s, whole_s)
        last = int(rounds) * count + sum(1 for end_s in itertools.accumulate(self.durations_s) if end_s <= rest_s)
        first, last = last, last + window - 1
        lines = ["#EXTM3U", "#EXT-X-VERSION:7", f"#EXT-X-TARGETDURATION:{max(map(round, self.durations_s))}"]
        lines += [f"#EXT-X-MEDIA-SEQUENCE:{first}", f"#EXT-X-DISCONTINUITY-SEQUENCE:{max(0, first - 1) // count}"]
        lines += self._head
        for number in range(first, last + 1):
            if number and number % count == 0:
                lines.append("#EXT-X-DISCONTINUITY")
            lines += [f"#EXTINF:{self.durations_s[number % count]:.6f},", self.segments[number % count]]
        return "\n".join([*lines, ""])


class HttpStreams:
    """`/cam.mjpg` from JPEGs, and with `hls` `/live.m3u8`, on a loopback port.

    Every client of `/cam.mjpg` gets the pictures from the first on, again and again. `fps` may be changed.
    """

    def __init__(self, jpegs: Sequence[bytes] = (), *, fps: float = 10.0, hls: Hls | None = None) -> None:
        self._jpegs = list(jpegs)
        self.fps = fps
        self._hls = hls
        self._changed = threading.Condition()
        self._account: str | None = None
        self._stalled = False
        self._ended = False
        self._round = 0
        self._clients = 0
        self._requests: list[str] = []
        self._t_start_s = time.monotonic()
        self._t_playlist_s: float | None = None
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self.host, self.port = "127.0.0.1", int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, name=f"http-{self.port}", daemon=True
        )
        self._thread.start()

    def url(self, path: str = "/cam.mjpg", user: str | None = None, password: str | None = None) -> str:
        account = "" if user is None else f"{quote(user, safe='')}:{quote(password or '', safe='')}@"
        return f"http://{account}{self.host}:{self.port}/{path.lstrip('/')}"

    def require(self, user: str | None, password: str | None = None) -> None:
        """Basic authentication from the next request on; None asks for nothing."""
        with self._changed:
            token = base64.b64encode(f"{user}:{password or ''}".encode()).decode()
            self._account = None if user is None else f"Basic {token}"

    def stall(self) -> None:
        """Connections stay open, nothing more is sent, requests are not answered."""
        with self._changed:
            self._stalled = True

    def resume(self) -> None:
        with self._changed:
            self._stalled = False
            self._changed.notify_all()

    def hold_playlist(self) -> None:
        """HLS stands still: the playlist is answered, and stays as it is."""
        with self._changed:
            self._t_playlist_s = time.monotonic()

    def release_playlist(self) -> None:
        """The playlist goes on from where it stood."""
        with self._changed:
            if self._t_playlist_s is not None:
                self._t_start_s += time.monotonic() - self._t_playlist_s
                self._t_playlist_s = None

    def cut(self) -> None:
        """Close the connections, in the middle of a picture where one is being sent."""
        with self._changed:
            self._round += 1
            self._changed.notify_all()
        self._server.shut()

    @property
    def clients(self) -> int:
        """Requests that are being answered."""
        with self._changed:
            return self._clients

    @property
    def requests(self) -> list[str]:
        """The paths that were asked for, in order."""
        with self._changed:
            return list(self._requests)

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._server.shutdown()
        self._thread.join(10)
        self._server.shut()
        self._server.server_close()

    def __enter__(self) -> HttpStreams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, seconds: float, its_round: int) -> bool:
        """So long, and while it is stalled; False where the connection has to be closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._round != its_round, seconds)
            self._changed.wait_for(lambda: self._ended or self._round != its_round or not self._stalled)
            return not self._ended and self._round == its_round

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        streams = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                streams._answer(self)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        handler.close_connection = True
        with self._changed:
            self._clients += 1
            self._requests.append(path)
            its_round, account = self._round, self._account
        try:
            if not self._wait(0, its_round):
                return
            if account is not None and handler.headers.get("Authorization") != account:
                handler.send_response(401)
                handler.send_header("WWW-Authenticate", 'Basic realm="camera"')
                handler.send_header("Content-Length", "0")
                handler.end_headers()
            elif path == "/cam.mjpg" and self._jpegs:
                self._send_mjpeg(handler, its_round)
            elif (body := self._file(path)) is not None:
                handler.send_response(200)
                handler.send_header("Content-Length", str(len(body)))
                handler.end_headers()
                handler.wfile.write(body)
            else:
                handler.send_error(404)
        except OSError:
            pass  # the client is gone
        finally:
            with self._changed:
                self._clients -= 1

    def _file(self, path: str) -> bytes | None:
        if self._hls is None:
            return None
        if path == "/live.m3u8":
            with self._changed:
                now_s = time.monotonic() if self._t_playlist_s is None else self._t_playlist_s
                return self._hls.playlist(now_s - self._t_start_s).encode()
        name = path.strip("/")
        file = self._hls.folder / name
        return file.read_bytes() if "/" not in name and file.is_file() else None

    def _send_mjpeg(self, handler: http.server.BaseHTTPRequestHandler, its_round: int) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", f"multipart/x-mixed-replace; boundary={_BOUNDARY}")
        handler.end_headers()
        t_next_s = time.monotonic()
        for jpeg in itertools.cycle(self._jpegs):
            head = f"--{_BOUNDARY}\r\nContent-Type: image/jpeg\r\nContent-Length: {len(jpeg)}\r\n\r\n".encode()
            part = head + jpeg + b"\r\n"
            # In halves, so that a stall and a cut come in the middle of a picture.
            handler.wfile.write(part[: len(part) // 2])
            if not self._wait(max(0.0, t_next_s - time.monotonic()), its_round):
                return
            handler.wfile.write(part[len(part) // 2 :])
            t_next_s = max(t_next_s + 1 / self.fps, time.monotonic() - 1.0)


class _Server(http.server.ThreadingHTTPServer):
    """A named thread for each connection; `shut` ends them all, whatever they wait for."""

    daemon_threads = False  # server_close() joins them
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, *arguments: Any) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(*arguments)

    def shut(self) -> None:
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # the client is gone
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        threading.current_thread().name = f"http-{client_address[1]}"
        super().process_request_thread(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)
