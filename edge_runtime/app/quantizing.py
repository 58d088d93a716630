"""`prepare quantize`: bundle, pictures, clips and cameras, labelled data, the search and the measures, wired up."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from edge_runtime.app.capturing import FPS, OPEN_S, configured_camera, live_pictures
from edge_runtime.app.evaluate import Progress, open_labelled, read_image
from edge_runtime.app.halving import EVERY, calibration_pictures
from edge_runtime.app.models import cores, open_bundle
from edge_runtime.app.work_folder import work_in
from edge_runtime.bundled import SCHEME
from edge_runtime.camera.av_pixels import SCALER
from edge_runtime.camera.open import open_camera
from edge_runtime.camera.options import CameraOptions
from edge_runtime.camera.protocol import Camera
from edge_runtime.config import load_config
from edge_runtime.errors import BundleError, CameraError, ConfigError, EdgeError, UsageError
from edge_runtime.prepare.bundle_draft import check_target
from edge_runtime.prepare.calibration import CalibrationPicture
from edge_runtime.prepare.gate import RESAMPLES, Accept
from edge_runtime.prepare.quant import Family
from edge_runtime.prepare.quantize import FAMILIES, quantize_bundle
from edge_runtime.prepare.quantize_records import MethodChoice, QuantizeResult, Search
from edge_runtime.prepare.quantize_search import search_plan
from edge_runtime.records.frames import Pixels
from edge_runtime.source_url import redact_url

__all__ = ["FAMILIES", "FRAMES", "camera_pictures", "default_out_dir", "default_work", "quantize"]

FRAMES = 500
"""Of a camera, so many frames are taken where nothing else is said."""
_SCHEME_OF = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")


def default_out_dir(source: str) -> Path:
    """Where the new bundle goes: the bundle's name with `-int8` behind it, beside it (a bundled one's: here)."""
    if source.startswith("bundled:"):
        return Path(f"{source.removeprefix('bundled:')}-int8")
    folder = Path(source).absolute()
    folder = folder.parent if folder.name == "bundle.toml" else folder
    return folder.with_name(f"{folder.name}-int8")


def default_work(out_dir: Path) -> Path:
    """Where what an interrupted run has done lies."""
    return out_dir.with_name(f".{out_dir.name}.quantize")


def quantize(
    source: str,
    out_dir: Path,
    *,
    calibrate: Sequence[str],
    evaluate: Path | None,
    config: Path | None = None,
    variants: Sequence[str] = (),
    families: Sequence[Family] = FAMILIES,
    method: MethodChoice = "auto",
    max_loss: float = 0.01,
    search_loss: float | None = None,
    accept: Accept = "bound",
    every: int = EVERY,
    frames: int = FRAMES,
    fps: float = FPS,
    seconds: float | None = None,
    minutes: float | None = None,
    work: Path | None = None,
    overwrite: bool = False,
    seed: int = 0,
    resamples: int = RESAMPLES,
    search: Search = search_plan,
    progress: Progress,
) -> QuantizeResult:
    """Make the bundle `out_dir` of a bundle (a folder, or `bundled:NAME`), as `prepare.quantize.quantize_bundle` does.

    `calibrate`: files and folders of pictures, clips (every `every`th frame), addresses of cameras and, with `config`,
    names of cameras in that file, which are opened beside the daemon that may run with it. Of a camera `fps` frames a
    second are taken until there are `frames`, or for `seconds`. `work`: left out, `default_work`, which is removed when
    this is done, accepted or refused, but not when it is interrupted. A folder that is named is kept.

    Raises UsageError (code "work_taken") for a work folder of another run, and EdgeError.
    """
    if out_dir.name in ("", ".."):
        raise UsageError("is no name of a new folder", where=str(out_dir), remedy="give it one")
    bundle = open_bundle(source)
    check_target(out_dir, overwrite)
    dataset = None
    notes: tuple[str, ...] = ()
    if evaluate is not None:
        dataset, notes = open_labelled(bundle, evaluate, progress)
    key = _key([bundle.digest, str(config), every, frames, fps, seconds, evaluate is None], calibrate)
    folder = default_work(out_dir) if work is None else work
    with work_in(folder, key):
        done = False
        try:
            result = quantize_bundle(
                bundle,
                out_dir,
                pictures=_pictures(calibrate, config, every, fps, frames, seconds),
                pictures_key=key,
                read_image=read_image,
                scaler=SCALER,
                search=search,
                cpu=_processor(),
                work=folder,
                dataset=dataset,
                max_loss=max_loss,
                search_loss=search_loss,
                accept=accept,
                method=method,
                families=families,
                variants=variants,
                minutes=minutes,
                overwrite=overwrite,
                lanes=cores(),
                seed=seed,
                resamples=resamples,
                progress=progress,
            )
            done = True
        except (UsageError, BundleError, CameraError, ConfigError) as error:
            # what cannot be quantised has nothing to go on from; a picture that has changed can be put back
            done = error.code != "calibration_changed"
            raise
        except OSError as error:
            raise EdgeError(
                f"cannot be written or read: {error.strerror or error}",
                code="write_failed",
                where=str(error.filename or folder),
                remedy="check free space and rights; the same command goes on from here",
            ) from error
        finally:
            if work is None and done:
                shutil.rmtree(folder, ignore_errors=True)
    return replace(result, notes=(*notes, *result.notes))


def _key(options: Sequence[object], sources: Sequence[str]) -> str:
    """What a run is of. A folder that gains or loses a picture is another one."""
    inside = [sorted(each.name for each in Path(source).iterdir()) for source in sources if Path(source).is_dir()]
    what = json.dumps([*options, [redact_url(each) for each in sources], inside])
    return hashlib.sha256(what.encode()).hexdigest()


def _pictures(
    sources: Sequence[str], config: Path | None, every: int, fps: float, frames: int, seconds: float | None
) -> Iterator[CalibrationPicture]:
    configured = set() if config is None else {each.name for each in load_config(config).cameras}
    for source in sources:
        scheme = _SCHEME_OF.match(source)
        if config is not None and source in configured:
            name, camera = configured_camera(source, config, fps)
            yield from camera_pictures(camera, name, frames=frames, seconds=seconds)
        elif scheme is not None and scheme[1].lower() != "file" and not source.startswith(SCHEME):
            camera = open_camera(CameraOptions(name="calibrate", url=source, fps=fps, loop=False))
            yield from camera_pictures(camera, redact_url(source), frames=frames, seconds=seconds)
        elif config is not None and not Path(source.removeprefix("file:")).exists() and scheme is None:
            there = f"cameras are {', '.join(sorted(configured))}" if configured else "it names no camera"
            raise UsageError(f"is no file, and no camera of {config}", where=source, remedy=there)
        else:
            yield from calibration_pictures([source.removeprefix("file:")], every)


def camera_pictures(
    camera: Camera, name: str, *, frames: int = FRAMES, seconds: float | None = None, open_s: float = OPEN_S
) -> Iterator[CalibrationPicture]:
    """A camera's frames until there are `frames` of them or `seconds` are over; a recording on a server may end before.
    Each frame has to be taken before the next one is asked for: the camera does not wait. In the end it is closed.

    Raises CameraError where no frame comes within `open_s`.
    """
    with closing(live_pictures(camera, name, seconds, open_s)) as found:
        for each in islice(found, frames):
            yield CalibrationPicture(f"{name}#{each.number}", partial(_same, each.pixels))


def _same(pixels: Pixels) -> Pixels:
    return pixels


def _processor() -> str:
    """The processor's name as the kernel says it; where it says none, the board's, or the architecture."""
    named: list[str] = []
    for path, begin in (("/proc/cpuinfo", "model name"), ("/proc/device-tree/model", "")):
        try:
            lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        named += [line.rpartition(":")[2].strip(" \t\0") for line in lines if line.startswith(begin)]
    return next((name for name in named if name), platform.machine() or "unknown")
