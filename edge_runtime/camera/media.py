"""Video files, folders of images and HTTP streams as cameras; the same door for evaluation and probing.

PyAV itself stays behind `camera/av.py`, which is imported when something is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.backoff import Backoff
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.source import Alone, Intake, Ledger, Picture, Session, SourceCamera
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Pixels

if TYPE_CHECKING:
    from edge_runtime.camera.av import ContainerSession

log = logging.getLogger(__name__)

_FILE_OPTIONS = {"protocol_whitelist": "file"}
_HTTP_OPTIONS = {
    "protocol_whitelist": "http,https,tcp,tls,httpproxy,crypto,data",
    # us of stream that may be read to learn about it; FFmpeg's 5 s would be 5 s without a picture.
    "analyzeduration": "1000000",
}
_IMAGE_CODECS = {".jpg": "mjpeg", ".jpeg": "mjpeg", ".png": "png", ".bmp": "bmp", ".webp": "webp"}


def list_images(folder: Path) -> list[Path]:
    """The pictures directly in `folder`, by sorted name. Raises OSError."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_CODECS and path.is_file())


def open_images(paths: Iterable[Path]) -> Iterator[tuple[Path, Pixels]]:
    """Each path with its picture, through the door that cameras use. Raises CameraError naming the first bad one."""
    for path in paths:
        yield path, _read_image(path)


def _read_image(path: Path) -> Pixels:
    from edge_runtime.camera.av import decode_image

    try:
        return decode_image(path.read_bytes())
    except OSError as error:
        raise CameraError(f"cannot read: {error.strerror}", where=str(path), retryable=True) from error
    except CameraError as error:
        raise CameraError(error.message, code=error.code, where=str(path)) from error


class FolderSession:
    """A folder of images as a clip."""

    def __init__(self, folder: Path, ledger: Ledger, clock: Clock, fps: float | None) -> None:
        self._ledger = ledger
        self._clock = clock
        self.interval_ns = nominal_interval_ns(fps or 1.0) or 1_000_000_000
        try:
            self._paths = list_images(folder)
        except OSError as error:
            raise CameraError(f"cannot list {folder}: {error.strerror}", retryable=True) from error
        if not self._paths:
            raise CameraError(f"no .jpg, .png, .bmp or .webp picture in {folder}", retryable=True)

    @property
    def paths(self) -> Sequence[Path]:
        return self._paths

    def pictures(self) -> Iterator[Picture]:
        shown = 0
        for path in self._paths:
            t_packet_ns = self._clock.monotonic_ns()
            try:
                pixels = _read_image(path)
            except CameraError as error:
                log.warning("%s", error)
                self._ledger.count(corrupt=1)
                continue
            yield Picture(pixels, shown * self.interval_ns, t_packet_ns)
            shown += 1

    def close(self) -> None:
        pass


def _is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def local_path(url: str) -> Path:
    """The path of `file:PATH`, `file:///PATH` or a plain path."""
    if url.startswith("file:"):
        url = url.removeprefix("file:")
        url = url.removeprefix("//") if url.startswith("///") else url
    return Path(url)


def _open_file(path: Path, intake: Intake, clock: Clock) -> ContainerSession:
    from edge_runtime.camera.av import ContainerSession

    if not path.exists():
        raise CameraError(f"no such file: {path}", retryable=True)
    if not path.is_file():
        # A FIFO or a device would block the open for ever.
        raise CameraError(f"{path} is not a regular file", retryable=True)
    # The scheme keeps FFmpeg from reading a colon in the name as a protocol; the whitelist keeps a
    # playlist from reaching into the network.
    return ContainerSession(f"file:{path.absolute()}", intake, clock, None, _FILE_OPTIONS)


def _open_http(url: str, intake: Intake, clock: Clock, timeouts_s: tuple[float, float]) -> ContainerSession:
    from edge_runtime.camera.av import ContainerSession

    return ContainerSession(url, intake, clock, timeouts_s, _HTTP_OPTIONS)


class AvCamera(SourceCamera):
    """A video file, a folder of images or an HTTP stream as a camera.

    `url`: `file:PATH`, a plain path, or http(s)://. `fps` caps the rate; of a folder it is the rate at which
    its images are shown (default 1). `pace` and `loop` count for files and folders only. An HTTP source is
    live: not paced, and opened again after it ends or fails, within `open_s` and `stall_s`.
    Without `loop` a file ends in state `stopped`. A file without a video stream, or with one that cannot be
    decoded, stays `down` for good; all other faults are retried (see SourceCamera).
    """

    def __init__(
        self,
        options: CameraOptions,
        *,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
    ) -> None:
        clock = clock or SystemClock()
        url, fps = options.url, options.fps
        path = None if _is_http(url) else local_path(url)

        def open_session(intake: Intake) -> Session:
            if path is None:
                return _open_http(url, intake, clock, (options.open_s, options.stall_s))
            if path.is_dir():
                return FolderSession(path, intake.ledger, clock, fps)
            return _open_file(path, intake, clock)

        super().__init__(
            options.name,
            open_session,
            live=path is None,
            fps=fps,
            pace=options.pace,
            loop=options.loop,
            clock=clock,
            backoff=backoff,
        )


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a source is: size of its first picture in px, declared rate and number of frames, None where unsaid."""

    width: int
    height: int
    fps: float | None
    codec: str
    frames: int | None


def probe(url: str, *, timeout_s: float = 10.0) -> ProbeResult:
    """Open `url` (as AvCamera takes it) and decode one picture.

    Raises CameraError where there is none: nothing there, no video, no decodable picture.
    """
    clock = SystemClock()
    intake = Alone(clock)
    path = None if _is_http(url) else local_path(url)
    where = None if path is None else str(path)
    if path is not None and path.is_dir():
        folder = FolderSession(path, intake.ledger, clock, None)
        for image in folder.paths:
            try:
                pixels = _read_image(image)
            except CameraError:
                continue
            return ProbeResult(
                pixels.width, pixels.height, None, _IMAGE_CODECS[image.suffix.lower()], len(folder.paths)
            )
        raise CameraError("no picture in it could be decoded", where=where)
    try:
        if path is None:
            session = _open_http(url, intake, clock, (timeout_s, timeout_s))
        else:
            session = _open_file(path, intake, clock)
    except CameraError as error:
        raise CameraError(
            error.message, code=error.code, where=where, remedy=error.remedy, retryable=error.retryable
        ) from None
    try:
        picture = next(session.pictures(), None)
        if picture is None:
            raise CameraError("no picture in it could be decoded", where=where)
        fps = None if session.interval_ns is None else 1e9 / session.interval_ns
        return ProbeResult(picture.pixels.width, picture.pixels.height, fps, session.codec, session.frames)
    finally:
        session.close()
