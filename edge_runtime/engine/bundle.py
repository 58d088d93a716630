"""A model bundle on disk: proved whole, unchanged and self-contained before anything loads from it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edge_runtime.engine.manifest import BACKENDS, Backend, Manifest, PlanTable, VariantTable, parse_manifest
from edge_runtime.engine.manifest_values import FileTable
from edge_runtime.errors import BundleError
from edge_runtime.records.spec import InputSpec, OutputSpec

MANIFEST_NAME = "bundle.toml"
MAX_TEXT_BYTES = 1024 * 1024
MAX_FILE_BYTES = 2**31 - 1  # no protobuf, and so no ONNX, is larger
_CHUNK = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Artefact:
    """The file that one backend loads for one variant, and the sha256 (64 hex digits) it had when checked."""

    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle. `digest` ("sha256:...") is the hash of bundle.toml; `labels` one name per class."""

    root: Path
    digest: str
    manifest: Manifest
    labels: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.manifest.bundle.name

    @property
    def variants(self) -> tuple[str, ...]:
        """The names of all variants, in the order listed: the most accurate first, by custom."""
        return tuple(variant.name for variant in self.manifest.variant)

    def variants_for(self, backend: Backend) -> tuple[str, ...]:
        """The names of the variants that have a file for this backend."""
        return tuple(v.name for v in self.manifest.variant if _file_of(v, backend) is not None)

    def variant(self, name: str = "auto", backend: Backend | None = None) -> VariantTable:
        """The variant of that name; "auto" is the first one listed (with `backend`: that has a file for it).

        Raises BundleError (code "unknown_variant" or "no_artefact").
        """
        runnable = self.variants if backend is None else self.variants_for(backend)
        if name == "auto":
            if not runnable:
                raise self._no_artefact("no variant has", backend)
            name = runnable[0]
        for variant in self.manifest.variant:
            if variant.name == name:
                if name not in runnable:
                    raise self._no_artefact(f"variant {name!r} has no", backend)
                return variant
        raise BundleError(
            f"there is no variant {name!r}",
            code="unknown_variant",
            where=str(self.root / MANIFEST_NAME),
            remedy=f'it has {", ".join(self.variants)}; "auto" is the first of them',
        )

    def _no_artefact(self, who: str, backend: Backend | None) -> BundleError:
        others = [word for word in BACKENDS if self.variants_for(word)]
        return BundleError(
            f"{who} file for the backend {backend!r}",
            code="no_artefact",
            where=str(self.root / MANIFEST_NAME),
            remedy=f"the bundle is for {' and '.join(others)}; for {backend} it has "
            f"{', '.join(self.variants_for(backend) if backend else ()) or 'nothing'}",
        )

    def input_spec(self, variant: str = "auto") -> InputSpec:
        """The input of a variant. Raises BundleError for an unknown one."""
        table, shape = self.manifest.input, self.variant(variant)
        return InputSpec(
            width=shape.size[0],
            height=shape.size[1],
            color=table.color,
            resize=table.resize,
            pad=table.pad,
            scale=table.scale,
            mean=table.mean,
            std=table.std,
            short_side=table.short_side,
            pixel=shape.pixel,
        )

    def output_spec(self) -> OutputSpec:
        """How the outputs of every variant are read."""
        table = self.manifest.output
        return OutputSpec(
            layout=table.layout,
            labels=self.labels,
            score_threshold=table.score_threshold,
            nms_iou=table.nms_iou,
            max_detections=table.max_detections,
        )

    def artefact(self, variant: str, backend: Backend) -> Artefact:
        """The file that a backend loads. Raises BundleError where there is none."""
        file = _file_of(self.variant(variant, backend), backend)
        assert file is not None  # variant() refuses one without
        return Artefact(self.root / file.path, file.sha256)

    def read_artefact(self, variant: str, backend: Backend) -> bytes:
        """The artefact's bytes, hashed as read: what is given to a loader is what the manifest vouches for.

        Raises BundleError when the file is gone or no longer what it was.
        """
        artefact = self.artefact(variant, backend)
        return self._read(artefact.path, artefact.sha256, MAX_FILE_BYTES)

    def read_sidecar(self, plan: PlanTable) -> bytes:
        """The sidecar of a plan of this bundle, hashed as read. Raises BundleError."""
        return self._read(self.root / plan.sidecar.path, plan.sidecar.sha256, MAX_TEXT_BYTES)

    def read_plan(self, plan: PlanTable, limit: int = MAX_FILE_BYTES) -> bytes:
        """A plan of this bundle, hashed as read; one of more than `limit` bytes is not read.

        It is native code: for who trusts the bundle's origin, or has checked the plan's signature. Raises BundleError.
        """
        return self._read(self.root / plan.path, plan.sha256, min(limit, MAX_FILE_BYTES))

    def engine_digest(self, variant: str, backend: Backend) -> str:
        """ "sha256:..." over (bundle digest, variant, backend, artefact): who the engine is, in reports."""
        table = self.variant(variant, backend)
        parts = (self.digest, table.name, backend, self.artefact(table.name, backend).sha256)
        return f"sha256:{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()}"

    def golden_inputs(self, variant: str) -> tuple[Path, ...]:
        """The golden pictures of a variant, by name; empty where the bundle has none. Raises BundleError."""
        golden = self.variant(variant).golden
        if golden is None:
            return ()
        found = sorted(path for path in self.root.glob(golden.inputs) if path.is_file())
        if not found:
            raise BundleError(
                f"no picture matches golden.inputs = {golden.inputs!r}",
                code="file_missing",
                where=str(self.root / MANIFEST_NAME),
                remedy=_COPY_AGAIN,
            )
        for path in found:
            _inside(self.root, path)
        return tuple(found)

    def read_golden_outputs(self, variant: str) -> bytes | None:
        """The golden npz of a variant, verified where the manifest has its sha256. Raises BundleError."""
        golden = self.variant(variant).golden
        if golden is None:
            return None
        expected = (self.manifest.files or {}).get(golden.outputs)
        return self._read(self.root / golden.outputs, expected, 64 * MAX_TEXT_BYTES)

    def _read(self, path: Path, sha256: str | None, limit: int) -> bytes:
        with _open(self.root, path, limit) as stream:
            data = stream.read()
        if sha256 is not None:
            _compare(path, hashlib.sha256(data).hexdigest(), sha256, len(data))
        return data


_COPY_AGAIN = "copy or download the bundle again"


def load_bundle(path: Path) -> Bundle:
    """Read and verify the bundle in the folder `path` (its bundle.toml is accepted too). Loads no model.

    Every file that the manifest names exists inside the folder, is a plain, non-empty file, and has the
    sha256 that the manifest says.

    Raises BundleError: code "bundle_missing", "manifest_invalid" (with line and key), "file_missing",
    "file_empty", "path_escape", "digest_mismatch" or "labels_invalid".
    """
    root = path.parent if path.name == MANIFEST_NAME and not path.is_dir() else path
    if not root.is_dir():
        what = "is a file, not a bundle's folder" if root.exists() else "there is no such folder"
        raise BundleError(what, code="bundle_missing", where=str(root), remedy=f"name the folder with {MANIFEST_NAME}")
    file = root / MANIFEST_NAME
    if not file.is_file():
        raise BundleError(
            f"the folder has no {MANIFEST_NAME}, so it is no bundle",
            code="bundle_missing",
            where=str(root),
            remedy="`edge-runtime prepare import MODEL.onnx OUT_DIR` makes a bundle of a model",
        )
    raw = _read_small(root, file)
    manifest, source = parse_manifest(_decode(file, raw, "manifest_invalid"), str(file))
    listed = dict(manifest.files or {})
    checked: dict[str, str] = {}
    for variant in manifest.variant:
        for entry in artefacts_of(variant):
            if checked.setdefault(entry.path, entry.sha256) != entry.sha256:
                raise BundleError(
                    f"{entry.path!r} is listed with two different sha256",
                    code="manifest_invalid",
                    where=str(source.problem(("variant",), "").file),
                    remedy="one file has one sha256: correct the one that is wrong",
                )
    for name, sha256 in {**listed, **checked}.items():
        _verify(root, root / name, sha256)
    labels = _read_labels(root, manifest.bundle.labels)
    bundle = Bundle(root, f"sha256:{hashlib.sha256(raw).hexdigest()}", manifest, labels)
    for name in _unlisted(bundle):
        if manifest.files is not None and name not in listed and name not in checked:
            raise BundleError(
                f"{name!r} is used by the bundle but not listed under [files]",
                code="manifest_invalid",
                where=str(file),
                remedy="add it with its sha256, so that the bundle's digest stands for it too",
            )
    return bundle


def _unlisted(bundle: Bundle) -> Iterator[str]:
    """The files that variants' `files` do not list, each proved to exist inside the folder."""
    yield bundle.manifest.bundle.labels
    for variant in bundle.manifest.variant:
        if variant.golden is None:
            continue
        for picture in bundle.golden_inputs(variant.name):
            yield picture.relative_to(bundle.root).as_posix()
        with _open(bundle.root, bundle.root / variant.golden.outputs, MAX_FILE_BYTES):
            yield variant.golden.outputs


def artefacts_of(variant: VariantTable) -> Iterator[FileTable | PlanTable]:
    """Every file that a variant's `files` lists, with its sha256."""
    for backend in BACKENDS:
        if (entry := _file_of(variant, backend)) is not None:
            yield entry
    for plan in variant.files.tensorrt_plan:
        yield plan
        yield plan.sidecar


def _file_of(variant: VariantTable, backend: Backend) -> FileTable | None:
    return variant.files.onnxruntime if backend == "onnxruntime" else variant.files.tensorrt


def _inside(root: Path, path: Path) -> Path:
    """The real path. Raises BundleError when it does not exist or a symlink leads out of the folder."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):  # RuntimeError: a loop of symlinks, on Python 3.10 to 3.12
        raise BundleError(
            "the bundle lists this file and it is not there", code="file_missing", where=str(path), remedy=_COPY_AGAIN
        ) from None
    if not real.is_relative_to(root.resolve()):
        raise BundleError(
            f"a symlink leads out of the bundle's folder, to {real}",
            code="path_escape",
            where=str(path),
            remedy="put a copy of the file in its place: a bundle holds all that it needs",
        )
    return real


def _open(root: Path, path: Path, limit: int) -> BinaryIO:
    """Open a plain, non-empty file of the bundle of at most `limit` bytes. Raises BundleError."""
    real = _inside(root, path)
    try:
        # Not blocking: a FIFO in place of a file must not hang the loader.
        stream = os.fdopen(os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    except OSError as error:
        raise BundleError(
            f"cannot be read: {error.strerror}", code="file_missing", where=str(path), remedy="check owner and rights"
        ) from None
    status = os.fstat(stream.fileno())
    reason = None
    if not stat.S_ISREG(status.st_mode):
        reason = "is no plain file"
    elif status.st_size == 0:
        reason = "is empty"
    elif status.st_size > limit:
        reason = f"is {status.st_size} bytes, and more than {limit} are not read"
    if reason is None:
        return stream
    stream.close()
    code = "file_empty" if status.st_size == 0 else "bundle_invalid"
    raise BundleError(reason, code=code, where=str(path), remedy=_COPY_AGAIN)


def _verify(root: Path, path: Path, sha256: str) -> None:
    digest = hashlib.sha256()
    size = 0
    with _open(root, path, MAX_FILE_BYTES) as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    _compare(path, digest.hexdigest(), sha256, size)


def _compare(path: Path, found: str, expected: str, size: int) -> None:
    if found != expected:
        raise BundleError(
            f"is not the file that {MANIFEST_NAME} lists: damaged, half-copied or exchanged "
            f"({size} bytes, sha256 {found[:12]}..., expected {expected[:12]}...)",
            code="digest_mismatch",
            where=str(path),
            remedy=_COPY_AGAIN,
        )


def _read_small(root: Path, path: Path) -> bytes:
    with _open(root, path, MAX_TEXT_BYTES) as stream:
        return stream.read()


def _decode(path: Path, raw: bytes, code: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise BundleError(
            "is not UTF-8 text", code=code, where=f"{path}:{line}", remedy="save the file as UTF-8"
        ) from None


def _read_labels(root: Path, name: str) -> tuple[str, ...]:
    path = root / name
    lines = [line.strip() for line in _decode(path, _read_small(root, path), "labels_invalid").splitlines()]
    while lines and not lines[-1]:
        lines.pop()
    for number, line in enumerate(lines, start=1):
        if not line:  # dropping it would shift every class behind it
            raise BundleError(
                "the line is empty, and every line names one class",
                code="labels_invalid",
                where=f"{path}:{number}",
                remedy="write the class's name, or remove the line if the model has no such class",
            )
    if not lines:
        raise BundleError(
            "names no class", code="labels_invalid", where=str(path), remedy="write one class name a line"
        )
    return tuple(lines)
