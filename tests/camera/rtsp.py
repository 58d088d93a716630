"""A real RTSP server for tests: mounts come, go and change while it runs, and it can be killed and frozen."""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

PYTHON = "/usr/bin/python3"
CHILD = Path(__file__).with_name("rtsp_child.py")
Codec = Literal["h264", "h265", "mjpeg"]
_ANSWER_S = 20.0


@functools.cache
def _missing() -> str | None:
    try:
        check = subprocess.run([PYTHON, str(CHILD), "--check"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"{PYTHON}: {error.strerror}"
    return (
        None
        if check.returncode == 0
        else f"no RTSP server for tests: {check.stderr.strip()} (scripts/test installs it)"
    )


def gstreamer_missing() -> str | None:
    """Why RtspServer cannot run here, for `pytest.mark.skipif`. None in CI, where its tests fail instead."""
    return None if os.environ.get("CI") == "true" else _missing()


class RtspServer:
    """GStreamer's RTSP server on a loopback port that stays the same over restarts, in a process of its own.

    Everybody at a mount sees the same pictures, so whoever comes later does not begin at a key frame. What was added
    and required is remembered over `restart`. With `tls` it speaks rtsps, with a self-signed certificate. Raises
    RuntimeError if it cannot run or refuses what it is told.
    """

    def __init__(self, *, tls: bool = False) -> None:
        if reason := _missing():
            raise RuntimeError(reason)
        self.host = "127.0.0.1"
        self.port = 0
        self._scheme = "rtsps" if tls else "rtsp"
        self._folder = tempfile.TemporaryDirectory(prefix="rtsp-")
        self._log = Path(self._folder.name) / "log"
        self._certificate = _certificate(Path(self._folder.name)) if tls else None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._frozen = False
        self._rest = b""
        self._mounts: dict[str, dict[str, Any]] = {}
        self._account: dict[str, Any] | None = None
        self.start()

    def url(self, mount: str = "cam", user: str | None = None, password: str | None = None) -> str:
        account = "" if user is None else f"{quote(user, safe='')}:{quote(password or '', safe='')}@"
        return f"{self._scheme}://{account}{self.host}:{self.port}/{mount}"

    def add(
        self,
        mount: str = "cam",
        *,
        codec: Codec = "h264",
        width: int = 320,
        height: int = 240,
        fps: int = 15,
        gop: int = 15,
        bframes: int = 0,
        clip: Path | None = None,
        inband_headers: bool = True,
    ) -> None:
        """A moving test picture, or every picture of `clip` in turn, again and again, encoded live.

        Without `inband_headers` parameter sets are in the SDP alone, or for H.265 also before the mount's first
        picture; with them also before every key frame. Key frames are IDR, one in `gop` pictures.
        """
        media: dict[str, Any] = {
            "codec": codec,
            "width": width,
            "height": height,
            "fps": fps,
            "gop": gop,
            "bframes": bframes,
        }
        media |= {"clip": None if clip is None else str(Path(clip).resolve()), "inband_headers": inband_headers}
        self._ask("add", mount=mount, **media)
        self._mounts[mount] = media

    def replace(self, mount: str = "cam", *, cut: bool = True, **media: Any) -> None:
        """What `add` takes, where it differs from what is there. Cuts the mount's clients, as a camera does."""
        self.add(mount, **{**self._mounts[mount], **media})
        if cut:
            self.cut(mount)

    def remove(self, mount: str = "cam", *, cut: bool = True) -> None:
        """From now on: 404."""
        self._ask("remove", mount=mount)
        self._mounts.pop(mount, None)
        if cut:
            self.cut(mount)

    def resize(self, mount: str = "cam", *, width: int, height: int) -> None:
        """Another size within the connections that there are; somebody has to watch. Not for a clip."""
        self._ask("resize", mount=mount, width=width, height=height)
        self._mounts[mount] |= {"width": width, "height": height}

    def require(
        self, user: str | None, password: str | None = None, *, scheme: Literal["digest", "basic"] = "digest"
    ) -> None:
        """Ask for this user and password from now on; None asks for nothing."""
        account = {"user": user, "password": password, "scheme": scheme}
        self._ask("require", **account)
        self._account = account

    def cut(self, mount: str | None = None) -> int:
        """Close the connections of a mount, or all of them; returns how many."""
        return int(self._ask("cut", mount=mount))

    def clients(self) -> int:
        """Open connections."""
        return int(self._ask("statistics")["clients"])

    def accepted(self) -> int:
        """Connections since the last start."""
        return int(self._ask("statistics")["accepted"])

    def plays(self, mount: str = "cam") -> int:
        """PLAY requests since the last start."""
        return int(self._ask("statistics")["plays"].get(mount, 0))

    def start(self) -> None:
        """Returns when it accepts connections, with everything that was added before."""
        assert self._process is None
        command = [PYTHON, str(CHILD), str(self.port)]
        if self._certificate is not None:
            command.append(str(self._certificate))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        self._rest = b""
        try:
            self.port = int(self._answer()["port"])
            for mount, media in self._mounts.items():
                self._ask("add", mount=mount, **media)
            if self._account is not None:
                self._ask("require", **self._account)
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        """SIGTERM; its connections are closed by the kernel."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """SIGKILL unless it is stopped already, and start again on the same port."""
        self.kill()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, new ones are accepted by the kernel, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._frozen = True

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        self._frozen = False

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")

    def _end(self, signum: signal.Signals) -> None:
        process, self._process = self._process, None
        self._frozen = False
        if process is None:
            return
        process.send_signal(signum)
        process.send_signal(signal.SIGCONT)
        process.wait(10)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        process.stdout.close()

    def _ask(self, name: str, **arguments: Any) -> Any:
        with self._lock:
            if self._process is None or self._frozen:
                raise RuntimeError(f"the RTSP server is {'frozen' if self._frozen else 'not running'}: {name}")
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"do": name, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._answer()
        if "error" in answer:
            raise RuntimeError(f"{name}: {answer['error']}")
        return answer["result"]

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        end = time.monotonic() + _ANSWER_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([fd], [], [], max(0.0, end - time.monotonic()))
            got = os.read(fd, 65536) if ready else b""
            if not got:
                raise RuntimeError(f"the RTSP server {'ended' if ready else 'does not answer'}: {self.log()[-2000:]}")
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> RtspServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._folder.cleanup()


def _certificate(folder: Path) -> Path:
    """One file with a new key and a certificate for 127.0.0.1."""
    key, certificate, both = folder / "key.pem", folder / "certificate.pem", folder / "both.pem"
    command = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    return both
