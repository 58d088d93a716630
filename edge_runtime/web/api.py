"""The endpoints: JSON in, JSON out, and Prometheus text."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_runtime.errors import EdgeError
from edge_runtime.records.status import HealthReport, WindowList
from edge_runtime.web.access import Access, DeniedError
from edge_runtime.web.door import Door, Entry
from edge_runtime.web.metrics import CONTENT_TYPE, render_metrics
from edge_runtime.web.protocol import SAFE_HEADERS
from edge_runtime.web.upload import receive_bundle, status_of
from edge_runtime.web.workers import BusyError, Workers

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 1024 * 1024
"""So much of a body that is too large is still read, so that its sender gets to see the answer."""

MAX_WINDOWS = 360
DEFAULT_WINDOWS = 60
HEALTH_S = 2.0
READ_S = 5.0

_COMMAND = re.compile(r"[a-z][a-z0-9-]{0,31}")

Handler = Callable[[Request], Awaitable[Response]]


class BadRequestError(EdgeError):
    """A request that cannot be understood, with its HTTP status."""

    default_code = "bad_request"

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, remedy: str | None = None) -> None:
        super().__init__(message, code=code, remedy=remedy)
        self.status = status


@dataclass(frozen=True, slots=True)
class Crew:
    """Who calls the daemon: health never waits behind reads, and reads never behind commands."""

    health: Workers
    reads: Workers
    commands: Workers
    uploads: Workers

    def close(self) -> None:
        for workers in (self.health, self.reads, self.commands, self.uploads):
            workers.close()


def build_app(door: Door, access: Access, crew: Crew) -> ASGIApp:
    """The application of one listener."""
    api = _Api(door, access, crew)
    app = Starlette(
        routes=[
            Route("/healthz", _guarded(api.healthz), methods=["GET"]),
            Route("/metrics", _guarded(api.metrics), methods=["GET"]),
            Route("/api/status", _guarded(api.status), methods=["GET"]),
            Route("/api/windows", _guarded(api.windows), methods=["GET"]),
            Route("/api/command/{name}", _guarded(api.command), methods=["POST"]),
            Route("/api/bundles", _guarded(api.bundles), methods=["PUT"]),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    # a redirect would send the client to whatever its Host header says
    app.router.redirect_slashes = False
    return _Guard(app, access)


class _Api:
    def __init__(self, door: Door, access: Access, crew: Crew) -> None:
        self._door = door
        self._access = access
        self._crew = crew

    async def healthz(self, request: Request) -> Response:
        _query(request)
        try:
            health = await self._crew.health.call(self._door.health, within_s=HEALTH_S)
        except BusyError as error:
            report = HealthReport(status="wedged", reasons=[error.message])
        else:
            report = HealthReport(status=health.state, reasons=health.reasons)
        return _json(report.to_json(), 503 if report.status == "wedged" else 200)

    async def metrics(self, request: Request) -> Response:
        _query(request, unknown_allowed=True)  # Prometheus and its kin add parameters of their own
        body = await self._crew.reads.call(lambda: render_metrics(self._door.snapshot()), within_s=READ_S)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def status(self, request: Request) -> Response:
        _query(request)
        return _json(await self._crew.reads.call(lambda: self._door.snapshot().to_json(), within_s=READ_S))

    async def windows(self, request: Request) -> Response:
        text = _query(request, "last").get("last", str(DEFAULT_WINDOWS))
        if not re.fullmatch(r"[0-9]{1,3}", text, re.ASCII) or not 1 <= int(text) <= MAX_WINDOWS:
            raise BadRequestError("last is not a number of windows", remedy=f"give 1 to {MAX_WINDOWS}")

        def read() -> bytes:
            return WindowList(windows=list(self._door.windows(int(text)))[-int(text) :]).to_json()

        return _json(await self._crew.reads.call(read, within_s=READ_S))

    async def command(self, request: Request) -> Response:
        _query(request)
        name = request.path_params["name"]
        if not _COMMAND.fullmatch(name):
            raise BadRequestError("there is no command of this name", status=404, code="not_found")
        body = await _read_body(request)
        entry: Entry = "socket" if self._access.trusted else "http"
        execute = partial(self._door.execute, name, body, entry)
        status, reply = await self._crew.commands.call(execute, wait=False)
        return _json(reply, status)

    async def bundles(self, request: Request) -> Response:
        if not self._access.trusted:
            raise DeniedError(
                403,
                "socket_only",
                "bundles come in by the control socket only",
                "run `edge-runtime reload MODEL BUNDLE` on the device",
            )
        _query(request)
        try:
            return _json(await receive_bundle(request, self._door.open_upload, self._crew.uploads))
        except EdgeError as error:
            response = error_response(status_of(error), error)
            response.headers["connection"] = "close"  # the rest of the body is not wanted
            return response


def _guarded(handler: Handler) -> Handler:
    """Errors as the contract's object."""

    async def guarded(request: Request) -> Response:
        try:
            return await handler(request)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is there to read it
        except (BadRequestError, DeniedError) as error:
            return error_response(error.status, error)
        except BusyError as error:
            return error_response(503, error)
        except EdgeError as error:
            return error_response(500, error)
        except Exception:
            log.exception("%s %s failed", request.method, request.scope["path"])
            return error_response(500, EdgeError("this request failed", code="internal", remedy="see the log"))

    return guarded


async def _http_error(request: Request, error: Exception) -> Response:
    """What starlette itself raises: no such path, or another method."""
    assert isinstance(error, HTTPException)
    where = request.scope["path"][:200]
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        problem = EdgeError("is not asked this way", code="method_not_allowed", where=where, remedy=f"use {allowed}")
    elif error.status_code == 404:
        problem = EdgeError("there is nothing here", code="not_found", where=where)
    else:
        problem = EdgeError(str(error.detail), code="bad_request", where=where)
    response = error_response(error.status_code, problem)
    response.headers.update(error.headers or {})
    return response


def error_response(status: int, error: EdgeError) -> Response:
    """The contract's error object."""
    response = _json(json.dumps(error.as_payload()).encode(), status)
    if status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if status in (401, 403, 413):  # the rest of the request is not wanted
        response.headers["connection"] = "close"
    return response


def _json(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


def _query(request: Request, *known: str, unknown_allowed: bool = False) -> dict[str, str]:
    """The query, each key once. Raises BadRequestError for one that is not known or stands twice."""
    found: dict[str, str] = {}
    if unknown_allowed:
        return found
    for key, value in request.query_params.multi_items():
        if key not in known or key in found:
            what = "stands twice" if key in found else "is not known"
            remedy = f"known is: {', '.join(known)}" if known else "leave the query out"
            raise BadRequestError(f"the parameter {key[:40]!r} {what}", remedy=remedy)
        found[key] = value
    return found


async def _read_body(request: Request) -> bytes:
    """The body, at most MAX_BODY_BYTES. Raises BadRequestError (413) for more."""
    body, discarded = bytearray(), 0
    async for chunk in request.stream():
        if discarded or len(body) + len(chunk) > MAX_BODY_BYTES:
            discarded += len(body) + len(chunk)
            body.clear()
        else:
            body += chunk
        if discarded > MAX_DISCARDED_BYTES:
            break
    if discarded:
        raise BadRequestError(
            f"a body may have {MAX_BODY_BYTES} bytes", status=413, code="too_large", remedy="send less"
        )
    return bytes(body)


class _Guard:
    """Lets in what Access allows, and puts the safe headers on every answer."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                given = {name.lower() for name, _ in headers}
                message = {**message, "headers": headers + [each for each in SAFE_HEADERS if each[0] not in given]}
            await send(message)

        headers: dict[str, str] = {}
        for raw_name, raw_value in scope["headers"]:
            name, value = raw_name.decode("latin-1"), raw_value.decode("latin-1")
            # said twice, it is neither: the two never match what is expected
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        try:
            self._access.check(scope["method"], scope["path"], headers)
        except DeniedError as error:
            await error_response(error.status, error)(scope, receive, send_safely)
        else:
            await self._app(scope, receive, send_safely)
