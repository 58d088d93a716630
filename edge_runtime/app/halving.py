"""`prepare half`: bundle, pictures or clip, labelled data and the measures, wired up."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from edge_runtime.app.evaluate import Progress, open_labelled, read_image
from edge_runtime.app.models import cores, open_bundle
from edge_runtime.bundled import SCHEME, bundled_media
from edge_runtime.camera.av import ContainerSession
from edge_runtime.camera.av_pixels import SCALER
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.session import Alone
from edge_runtime.camera.streams import stream_of
from edge_runtime.clock import SystemClock
from edge_runtime.errors import CameraError, UsageError
from edge_runtime.prepare.calibration import CalibrationPicture
from edge_runtime.prepare.gate import RESAMPLES, Accept
from edge_runtime.prepare.half import HalfResult, half_bundle
from edge_runtime.records.frames import Pixels

__all__ = ["EVERY", "calibration_pictures", "halve"]

EVERY = 10
"""Of a clip, every so many frames are taken: neighbours show the same."""
_PICTURES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def halve(
    source: str,
    out_dir: Path,
    *,
    calibrate: Sequence[str],
    evaluate: Path | None,
    variants: Sequence[str],
    max_loss: float,
    accept: Accept,
    every: int = EVERY,
    overwrite: bool = False,
    seed: int = 0,
    resamples: int = RESAMPLES,
    progress: Progress,
) -> HalfResult:
    """Make the bundle `out_dir` of a bundle (a folder, or `bundled:NAME`), as `prepare.half.half_bundle` does.

    `calibrate`: as in `calibration_pictures`. Raises EdgeError.
    """
    bundle = open_bundle(source)
    dataset = None
    notes: tuple[str, ...] = ()
    if evaluate is not None:
        dataset, notes = open_labelled(bundle, evaluate, progress)
    result = half_bundle(
        bundle,
        out_dir,
        pictures=calibration_pictures(calibrate, every),
        read_image=read_image,
        scaler=SCALER,
        dataset=dataset,
        max_loss=max_loss,
        accept=accept,
        variants=variants,
        overwrite=overwrite,
        lanes=cores(),
        seed=seed,
        resamples=resamples,
        progress=progress,
    )
    return HalfResult(result.bundle, result.variants, result.pictures, (*notes, *result.notes))


def calibration_pictures(sources: Sequence[str], every: int = EVERY) -> Iterator[CalibrationPicture]:
    """The pictures of files and folders of pictures, and every so many frames of clips (a file, or `bundled:NAME`), one
    after the other.

    Raises UsageError for what is neither, and for pictures that cannot be read, when it comes to them.
    """
    for source in sources:
        if source.startswith(SCHEME):
            yield from _frames(bundled_media(source.removeprefix(SCHEME)), source, every)
            continue
        path = Path(source)
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.suffix.lower() in _PICTURES)
            if not inside:
                raise UsageError("holds no pictures", where=source, remedy=f"wanted are files {', '.join(_PICTURES)}")
            yield from map(_picture, inside)
        elif not path.is_file():
            raise UsageError("does not exist", where=source, remedy="name pictures, folders of pictures, or clips")
        elif path.suffix.lower() in _PICTURES:
            yield _picture(path)
        else:
            yield from _frames(path, source, every)


def _picture(path: Path) -> CalibrationPicture:
    def read() -> Pixels:
        try:
            return read_image(path)
        except (CameraError, OSError) as error:
            reason = error.message if isinstance(error, CameraError) else f"cannot be read: {error.strerror}"
            remedy = "put a whole one in its place, or leave it out"
            raise UsageError(reason, code="picture_unreadable", where=str(path), remedy=remedy) from None

    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", code="picture_unreadable", where=str(path)) from None
    return CalibrationPicture(str(path), read, digest)


def _frames(path: Path, name: str, every: int) -> Iterator[CalibrationPicture]:
    """As a camera decodes them, but once and without its patience: a clip that cannot be read ends it."""
    clock = SystemClock()
    stream = stream_of(CameraOptions(name=name, url=f"file:{path.absolute()}", loop=False))
    session: ContainerSession | None = None
    taken = 0
    try:
        session = ContainerSession(stream, Alone(clock), clock)
        for index, picture in enumerate(session.pictures()):
            if index % every == 0:
                taken += 1
                yield CalibrationPicture(f"{name}#{index}", partial(_same, picture.pixels))
        if not taken:
            raise CameraError("no frame of it could be decoded")
    except CameraError as error:
        remedy = "name a picture, a folder of pictures, or a clip that plays"
        raise UsageError(error.message, code="picture_unreadable", where=name, remedy=remedy) from None
    finally:
        if session is not None:
            session.close()


def _same(pixels: Pixels) -> Pixels:
    return pixels
