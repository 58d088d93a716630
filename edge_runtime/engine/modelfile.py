"""Why a file is not loaded as an ONNX model, in an operator's words: from its first bytes and from ORT's errors."""

from __future__ import annotations

import re

from edge_runtime.errors import BundleError

_STARTS: tuple[tuple[int, bytes, str, str | None], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the model", "run `git lfs pull`"),
    (0, b"\xff\xd8\xff", "a JPEG picture", None),
    (0, b"\x89PNG", "a PNG picture", None),
    (0, b"%PDF", "a PDF document", None),
    (0, b"PK\x03\x04", "a zip archive (PyTorch checkpoints are, too)", "export the model to ONNX"),
    (0, b"\x80\x02", "a pickle (an old PyTorch checkpoint?)", "export the model to ONNX"),
    (0, b"\x1f\x8b", "gzip-compressed", "unpack it"),
    (0, b"\x28\xb5\x2f\xfd", "zstd-compressed", "unpack it"),
    (0, b"\x89HDF", "an HDF5 file (Keras?)", "export the model to ONNX"),
    (4, b"TFL3", "a TensorFlow Lite model", "export the model to ONNX"),
    (4, b"ORTM", "a model in ORT format", "use the ONNX that it was made from"),
    (0, b"ftrt", "a TensorRT plan", "plans belong to one device: use the ONNX that it was built from"),
    (0, b"ptrt", "a TensorRT plan", "plans belong to one device: use the ONNX that it was built from"),
    (4, b"ftyp", "a video", None),
)


def foreign_kind(data: bytes) -> tuple[str, str | None] | None:
    """What the bytes are, and what to do, where they begin like something that is no ONNX model; else None."""
    if not data:
        return "empty", None
    for offset, magic, what, remedy in _STARTS:
        if data[offset : offset + len(magic)] == magic:
            return what, remedy
    head = data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if head.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page, not the model", "the download got an error or login page: download the file itself"
    if head.startswith((b"{", b"[")):
        return "JSON text", None
    if not any(data[:4096]):
        return "only zeros where a model begins", "the copy was cut off by a power loss or a full disk: copy it again"
    return None


def foreign_model(data: bytes, where: str) -> BundleError | None:
    """The refusal of a file that is recognisably something else, or None."""
    foreign = foreign_kind(data)
    if foreign is None:
        return None
    message = f"is no ONNX model: it is {foreign[0]}"
    return BundleError(message, code="model_invalid", where=where, remedy=foreign[1] or _EXPORT)


_EXPORT = "put the exported ONNX file in its place"


def refused_model(error: Exception, where: str, reader: str) -> BundleError:
    """The refusal of a model that ONNX Runtime would not load; `reader` is the library and its version."""
    text = plain_message(error, limit=10_000)
    low = text.lower()
    if "external" in low or "/dev/null" in low or "model_path must not be empty" in low:
        return BundleError(
            "its weights lie in a second file (ONNX external data), and a bundle holds a model in one file",
            code="model_external_data",
            where=where,
            remedy="`edge-runtime prepare import` joins them",
        )
    if type(error).__name__ == "InvalidProtobuf" or "no graph was found" in low:
        return BundleError(
            "is damaged, cut off or no ONNX model at all", code="model_invalid", where=where, remedy=_EXPORT
        )
    if found := re.search(r"opset (\d+) is under development.*?till opset (\d+)", low):
        what = f"is of ONNX opset {found[1]}, and {reader} reads up to opset {found[2]}"
    elif found := re.search(r"model ir version: (\d+), max supported ir version: (\d+)", low):
        what = f"is of ONNX IR version {found[1]}, and {reader} reads up to {found[2]}"
    elif found := re.search(r"(?:no op registered for|error:) (\S+?)(?:\(-?\d+\) is not a reg| with dom)", text, re.I):
        what = f"uses the operator {found[1]}, which {reader} does not have"
    elif type(error).__name__ == "NotImplemented":
        what = f"uses an operator that {reader} has no CPU code for: {text[:300]}"
    else:
        what = f"is refused by {reader}: {text[:300]}"
        return BundleError(what, code="model_invalid", where=where, remedy="export the model again")
    remedy = "export the model with standard operators of ONNX opset 13 to 17"
    return BundleError(what, code="model_unsupported", where=where, remedy=remedy)


def plain_message(error: Exception, limit: int = 300) -> str:
    """The library's message without its prefix and source place, on one line of bounded length."""
    text = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    text = " ".join(re.sub(r"/onnxruntime_src/\S+:\d+ ", "", text).split())
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
