"""A bundle being made: written aside, loaded, run, and only then put in place, so that there never is half of one."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_runtime.durable import sync_folder, write_atomic
from edge_runtime.engine.bundle import MANIFEST_NAME, Bundle, load_bundle
from edge_runtime.engine.manifest import VariantTable
from edge_runtime.engine.onnxrt import OnnxRuntimeEngine, load_engine
from edge_runtime.engine.probe import ReadImage, probe, record_golden
from edge_runtime.errors import BundleError, EdgeError, UsageError
from edge_runtime.prepare.manifest_text import manifest_text
from edge_runtime.prepare.png import encode_png
from edge_runtime.records.frames import Pixels
from edge_runtime.records.spec import InputSpec

__all__ = ["BundleDraft", "Golden", "check_target", "golden_picture", "named_reader", "trial_bundle", "written_aside"]

Prove = Callable[[OnnxRuntimeEngine], None]


@dataclass(frozen=True, slots=True)
class Golden:
    """Pictures to make golden ones of, by variant, and their reader; `tolerance` as in records of the golden check."""

    pictures: Mapping[str, Sequence[Path]]
    read_image: ReadImage
    tolerance: float


@dataclass(slots=True)
class BundleDraft:
    """The tables of a bundle.toml to be, the files that they name (models, golden ones made before) and the labels."""

    files: Mapping[str, bytes]
    labels: Sequence[str]
    bundle: Mapping[str, Any]
    input: Mapping[str, Any]
    output: Mapping[str, Any]
    variants: list[dict[str, Any]]

    @classmethod
    def like(cls, source: Bundle, files: Mapping[str, bytes], variants: list[dict[str, Any]]) -> BundleDraft:
        """All but models and variants as the source has it."""
        manifest = source.manifest
        return cls(
            files=files,
            labels=source.labels,
            bundle={**manifest.bundle.model_dump(), "labels": "labels.txt"},
            input=manifest.input.model_dump(exclude_none=True),
            output=manifest.output.model_dump(),
            variants=variants,
        )

    def write(self, out_dir: Path, golden: Golden | None, prove: Prove | None, notes: list[str]) -> Bundle:
        """Make the bundle `out_dir`, replacing one that is there (in two renames; it comes back if the second fails).

        prove: given the loaded engine of the first variant before anything is in place; what it raises ends the
        writing. `notes` is added to. Variants without a file for onnxruntime are not run: whoever makes them has to.

        Raises BundleError for what does not load and run, EdgeError (code "write_failed") when the disk refuses; then
        nothing is left.
        """
        with written_aside(out_dir) as aside:
            for name, data in self.files.items():
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomic(aside / name, data)
            write_atomic(aside / "labels.txt", "".join(f"{word}\n" for word in self.labels).encode())
            self._write_manifest(aside)
            bundle = load_bundle(aside)
            for place, name in enumerate(bundle.variants_for("onnxruntime")):
                engine = load_engine(bundle, name)
                if engine.allowed_batches is not None:
                    notes.append(f"{name} runs batches of {engine.allowed_batches[0]} only: its batch axis is fixed")
                try:
                    if prove is not None and place == 0:
                        prove(engine)
                finally:
                    engine.close()
            if golden is not None:
                for variant in self.variants:
                    if pictures := golden.pictures.get(variant["name"]):
                        _add_golden(aside, bundle, variant, pictures, golden)
                self._write_manifest(aside)
                bundle = load_bundle(aside)
                for name in bundle.variants_for("onnxruntime"):  # what was just written is read back as meant
                    engine = load_engine(bundle, name)
                    probe(engine, engine.open_lane(), bundle, name, golden.read_image)
                    engine.close()
        return replace(bundle, root=out_dir)

    def _write_manifest(self, folder: Path) -> None:
        listed = {MANIFEST_NAME, *(path for variant in self.variants for path in _artefacts(variant["files"]))}
        files = {}
        for path in sorted(folder.rglob("*")):
            relative = path.relative_to(folder).as_posix()
            if path.is_file() and relative not in listed:
                files[relative] = hashlib.sha256(path.read_bytes()).hexdigest()
        text = manifest_text(self.bundle, self.input, self.output, self.variants, files)
        write_atomic(folder / MANIFEST_NAME, text.encode())


def _artefacts(files: Mapping[str, Any]) -> Iterator[str]:
    """The paths that a variant's `files` lists: a model for each backend, and plans with a sidecar each."""
    for entry in files.values():
        for file in (
            [entry] if isinstance(entry, Mapping) else [each for plan in entry for each in (plan, plan["sidecar"])]
        ):
            yield file["path"]


def _add_golden(
    folder: Path, bundle: Bundle, variant: dict[str, Any], pictures: Sequence[Path], golden: Golden
) -> None:
    name = variant["name"]
    place = folder / "golden" / name
    place.mkdir(parents=True)
    made = []
    for number, picture in enumerate(pictures, start=1):
        # those of another variant are numbered already
        path = place / f"{number:02d}-{picture.stem.removeprefix(f'{number:02d}-')}.png"
        write_atomic(path, golden_picture(golden.read_image, picture, bundle.input_spec(name)))
        made.append(path)
    sync_folder(place)
    engine = load_engine(bundle, name)
    try:
        outputs = record_golden(engine, engine.open_lane(), made, golden.read_image)
        write_atomic(folder / "golden" / f"{name}.npz", outputs)
    finally:
        engine.close()
    variant["golden"] = {
        "inputs": f"golden/{name}/*.png",
        "outputs": f"golden/{name}.npz",
        "tolerance": golden.tolerance,
    }


def golden_picture(read_image: ReadImage, picture: Path, spec: InputSpec) -> bytes:
    """A PNG of the picture as the model sees it before normalisation: preprocessing it again scales nothing.

    Its size is the model's input, or for a crop with a `short_side` the part around it. The last three bits of
    every value are levelled, which halves the file and leaves people people.
    """
    size = replace(spec, color="RGB", scale=1.0, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), pixel="float32")
    if spec.short_side is not None:
        size = replace(size, width=max(spec.width, spec.short_side), height=max(spec.height, spec.short_side))
    plane = np.empty(size.shape, np.float32)
    read_image(picture).write_into(plane, size)
    pixels = np.clip(np.rint(plane), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    pixels = pixels & np.uint8(0xF8) | np.uint8(0x04)
    return encode_png(pixels)


def check_target(out_dir: Path, overwrite: bool) -> None:
    """Raises UsageError where `out_dir` may not become a bundle."""
    if not out_dir.exists():
        if not out_dir.parent.is_dir():
            raise UsageError("there is no such folder", where=str(out_dir.parent), remedy="make it first")
        return
    if out_dir.is_dir() and not any(out_dir.iterdir()):
        return
    if not (out_dir / MANIFEST_NAME).is_file():
        raise UsageError("exists and is no bundle", where=str(out_dir), remedy="name a new folder")
    if not overwrite:
        raise UsageError("is a bundle already", where=str(out_dir), remedy="name a new folder, or pass --overwrite")


def named_reader(read_image: ReadImage) -> ReadImage:
    """The same reader, whose refusals are UsageErrors that name the file."""

    def read(path: Path) -> Pixels:
        try:
            return read_image(path)
        except OSError as error:
            reason = f"cannot be read: {error.strerror or error}"
        except EdgeError as error:
            reason = error.message
        raise UsageError(
            reason, code="image_unreadable", where=str(path), remedy="name JPEG, PNG, BMP or WebP pictures"
        )

    return read


def trial_bundle(source: Bundle, table: VariantTable, name: str, precision: str, model: bytes, folder: Path) -> Bundle:
    """A bundle in `folder` of the model alone, as the variant `name` made of `table`, for ONNX Runtime."""
    variant = {
        "name": name,
        "precision": precision,
        "size": list(table.size),
        "pixel": table.pixel,
        "files": {"onnxruntime": {"path": "model.onnx", "sha256": hashlib.sha256(model).hexdigest()}},
    }
    return BundleDraft.like(source, {"model.onnx": model}, [variant]).write(folder, None, None, [])


@contextmanager
def written_aside(out_dir: Path) -> Iterator[Path]:
    """A new folder to write a whole bundle into, which then becomes `out_dir`. One that was there is gone then, or
    stays where anything fails.

    Raises EdgeError (code "write_failed") when the disk refuses, and BundleErrors of the body as of `out_dir`.
    """
    try:
        aside = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.", suffix=".new", dir=out_dir.parent))
        try:
            aside.chmod(0o755)
            yield aside
            _put_in_place(aside, out_dir)
        except BundleError as error:
            # The folder aside is gone when the operator reads this.
            hint = error.message.replace(f"{aside}{os.sep}", "")
            where = error.where.replace(str(aside), str(out_dir)) if error.where else None
            raise BundleError(hint, code=error.code, where=where, remedy=error.remedy) from None
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise EdgeError(
            f"the bundle could not be written: {error.strerror or error}",
            code="write_failed",
            where=str(out_dir),
            remedy="check free space and rights; nothing was left behind",
        ) from error


def _put_in_place(aside: Path, out_dir: Path) -> None:
    """Give a whole bundle its name; one that had it is gone, or back where that fails. Raises OSError."""
    sync_folder(aside)
    old = aside.with_suffix(".old")
    replaced = out_dir.exists()
    if replaced:
        out_dir.rename(old)
    try:
        aside.rename(out_dir)
    except OSError:
        if replaced:
            old.rename(out_dir)
        raise
    sync_folder(out_dir.parent)
    if replaced:
        shutil.rmtree(old, ignore_errors=True)
