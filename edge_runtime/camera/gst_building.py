"""A pipeline made of its plan: parsed, its properties set, its certificates chosen."""

from __future__ import annotations

from typing import Any

from edge_runtime.camera.gst_library import Library
from edge_runtime.camera.gst_pipelines import Plan, missing_element
from edge_runtime.camera.gst_reasons import hide, position
from edge_runtime.errors import CameraError


def build(library: Library, plan: Plan, ca_file: str | None) -> Any:
    """The pipeline of `plan`, not started. Raises CameraError."""
    gst = library.Gst
    try:
        pipeline = gst.parse_launch_full(plan.text, None, gst.ParseFlags.FATAL_ERRORS)
    except library.GLib.Error as error:
        raise _unbuildable(library, plan, error) from None
    for element, name, value in plan.properties:
        pipeline.get_by_name(element).set_property(name, value)
    for element, name, text in plan.wishes:
        wished = pipeline.get_by_name(element)
        if wished is not None and wished.find_property(name) is not None:
            gst.util_set_object_arg(wished, name, text)
    _secure(library, pipeline.get_by_name("src"), ca_file)
    return pipeline


def _unbuildable(library: Library, plan: Plan, error: Any) -> CameraError:
    parse = library.Gst.ParseError
    message = hide(error.message, plan.secrets)
    if error.matches(parse.quark(), parse.NO_SUCH_ELEMENT) and (name := error.message.split('"')[1:2]):
        return missing_element(name[0])
    if not plan.own:
        return CameraError(f"GStreamer cannot build the pipeline: {message}", code="gst_pipeline", retryable=True)
    at = position(plan.own, error.message, lambda text: _parses(library, text))
    return CameraError(
        f"its pipeline is wrong at character {at}: {message}",
        code="gst_pipeline",
        remedy="write it as for gst-launch-1.0, up to the element that gives decoded pictures",
    )


def _parses(library: Library, text: str) -> bool:
    gst = library.Gst
    try:
        gst.parse_launch_full(text, None, gst.ParseFlags.FATAL_ERRORS)
    except library.GLib.Error:
        return False
    return True


def _secure(library: Library, source: Any, ca_file: str | None) -> None:
    """Certificates: those signed by `ca_file`, or any."""
    if source is None:
        return
    if source.find_property("tls-validation-flags") is not None and ca_file is None:
        source.set_property("tls-validation-flags", library.Gio.TlsCertificateFlags(0))
    if source.find_property("ssl-strict") is not None:
        source.set_property("ssl-strict", ca_file is not None)
    if ca_file is None or source.find_property("tls-database") is None:
        return
    try:
        source.set_property("tls-database", library.Gio.TlsFileDatabase.new(ca_file))
    except library.GLib.Error as error:
        raise CameraError(
            f"the certificates in {ca_file} cannot be read: {error.message}",
            remedy="name a PEM file",
            retryable=True,
        ) from None
