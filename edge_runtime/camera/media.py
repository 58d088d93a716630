"""Video files, folders of images, network streams and devices as cameras; the same door for evaluation and probing.

PyAV itself stays behind `camera/av.py`, which is imported when something is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edge_runtime.backoff import Backoff
from edge_runtime.camera.ledger import Ledger
from edge_runtime.camera.options import CameraOptions, Transport
from edge_runtime.camera.pacing import nominal_interval_ns
from edge_runtime.camera.session import Alone, Intake, Picture, Session
from edge_runtime.camera.source import REFUSED_S, SourceCamera
from edge_runtime.camera.streams import Stream, kind_of, local_path, stream_of, verified
from edge_runtime.clock import Clock, SystemClock
from edge_runtime.errors import CameraError
from edge_runtime.records.frames import Pixels

if TYPE_CHECKING:
    from edge_runtime.camera.av import ContainerSession

log = logging.getLogger(__name__)

_TOLD = 100  # what is wrong with a camera's files is told up to so many times
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

    def __init__(
        self,
        folder: Path,
        ledger: Ledger,
        clock: Clock,
        fps: float | None,
        tell: Callable[[str], None] = log.warning,
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._tell = tell
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
                self._tell(str(error))
                self._ledger.count(corrupt=1)
                continue
            yield Picture(pixels, shown * self.interval_ns, t_packet_ns)
            shown += 1

    def close(self) -> None:
        pass


def _open_stream(
    stream: Stream, intake: Intake, clock: Clock, tell: Callable[[str], None] = log.warning
) -> ContainerSession:
    from edge_runtime.camera.av import ContainerSession

    return ContainerSession(stream, intake, clock, tell)


class AvCamera(SourceCamera):
    """A video file, a folder of images, a network stream or a V4L2 device as a camera.

    `url`: `file:PATH`, a plain path, rtsp(s)://, http(s):// (MJPEG, HLS, MPEG-TS) or `v4l2:/dev/videoN`. `fps` caps the
    rate; of a folder it is the rate at which its images are shown (default 1). `pace` and `loop` count for files and
    folders only. All others are live: captured as they come (HLS and recordings on a server: when they are due), and
    opened again after they end or fail, within `open_s` and `stall_s`.
    Without `loop` a file ends in state `stopped`. A file without a video stream, or with one that cannot be
    decoded, stays `down` for good; all other faults are retried (see SourceCamera).
    """

    def __init__(
        self,
        options: CameraOptions,
        *,
        clock: Clock | None = None,
        backoff: Backoff | None = None,
        refused_s: float = REFUSED_S,
    ) -> None:
        clock = clock or SystemClock()
        self._options = options
        self._told: set[str] = set()
        live = kind_of(options.url) != "file"

        def open_session(intake: Intake) -> Session:
            if not live and (folder := local_path(options.url)).is_dir():
                return FolderSession(folder, intake.ledger, clock, options.fps, self._tell_once)
            return self._open_container(intake, clock)

        super().__init__(
            options.name,
            open_session,
            live=live,
            fps=options.fps,
            pace=options.pace,
            loop=options.loop,
            clock=clock,
            backoff=backoff,
            open_s=options.open_s if live else None,
            stall_s=options.stall_s if live else None,
            refused_s=refused_s,
        )
        if verified(options) is False:
            log.info("camera %s: its certificate is not verified, since no ca_file is given", options.name)

    def _tell_once(self, words: str) -> None:
        """Of a file: not again in every round."""
        if words not in self._told and len(self._told) < _TOLD:
            self._told.add(words)
            log.warning("camera %s: %s", self.name, words)

    def _open_container(self, intake: Intake, clock: Clock) -> Session:
        stream = stream_of(self._options)
        session = _open_stream(stream, intake, clock, self._tell_once)
        if stream.live:
            self.play(session.in_bursts)
        intake.ledger.opened("pyav")
        return session


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a source is: size of its first picture in px, declared rate and number of frames, None where unsaid."""

    width: int
    height: int
    fps: float | None
    codec: str
    frames: int | None


def probe(
    url: str, *, timeout_s: float = 10.0, transport: Transport = "tcp", ca_file: str | None = None
) -> ProbeResult:
    """Open `url` (as AvCamera takes it) and decode one picture.

    Raises CameraError where there is none: nothing there, no video, no decodable picture.
    """
    clock = SystemClock()
    options = CameraOptions("probe", url, transport=transport, open_s=timeout_s, stall_s=timeout_s, ca_file=ca_file)
    path = local_path(url) if kind_of(url) == "file" else None
    where = None if path is None else str(path)
    if path is not None and path.is_dir():
        return _probe_folder(FolderSession(path, Alone(clock).ledger, clock, None), where)
    intake = Alone(clock, within_s=None if path is not None else timeout_s)
    try:
        session = _open_stream(stream_of(options), intake, clock)
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


def _probe_folder(folder: FolderSession, where: str | None) -> ProbeResult:
    for image in folder.paths:
        try:
            pixels = _read_image(image)
        except CameraError:
            continue
        return ProbeResult(pixels.width, pixels.height, None, _IMAGE_CODECS[image.suffix.lower()], len(folder.paths))
    raise CameraError("no picture in it could be decoded", where=where)
