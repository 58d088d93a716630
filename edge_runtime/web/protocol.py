"""HTTP/1.1 of uvicorn, with bounds on what a client may hold: uvicorn itself waits for ever for a request's end, and
for a client to read its answer."""

from __future__ import annotations

import asyncio
import json
import logging

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from edge_runtime.errors import EdgeError

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 64
"""Per listener. Beyond, the client that has kept us waiting longest (for at least EVICT_S) makes room."""

MAX_HEADER_BYTES = 16 * 1024
RECEIVE_S = 10.0
SEND_S = 10.0
EVICT_S = 1.0
_CHECK_S = 0.5

SAFE_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"cache-control", b"no-store"),
    (b"x-content-type-options", b"nosniff"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
)
"""On every answer that does not set them itself. There are no CORS headers: no other origin may read anything."""


class BoundedProtocol(H11Protocol):
    """One connection. It is cut when a request takes more than RECEIVE_S to arrive, or an answer SEND_S to leave.

    The application may take over the first of these for a request that is long by nature: `state.timed_by_the_app`.
    """

    receive_s = RECEIVE_S
    send_s = SEND_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.waiting_since = self.loop.time()
        self._sending_since: float | None = None
        self._check_timer = self.loop.call_later(_CHECK_S, self._check)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._check_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        try:
            super().data_received(data)
        except Exception as error:  # noqa: BLE001 - nothing a client sends may reach the log as a traceback
            log.debug("a request that uvicorn cannot take: %r", error)
            self.transport.abort()

    def on_response_complete(self) -> None:
        self.waiting_since = self.loop.time()
        self.scope["state"].pop("timed_by_the_app", None)
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - ours says what theirs says
        """What is no HTTP gets the error object as well."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is on its way already
            self.transport.abort()
            return
        error = EdgeError("this is no HTTP request that can be served", code="bad_request")
        body = json.dumps(error.as_payload()).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *SAFE_HEADERS]
        response = h11.Response(status_code=400, headers=[*headers, (b"connection", b"close")], reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def is_waiting(self) -> bool:
        """Whether it is the client's turn: to send a request, or the rest of it."""
        if self.scope is not None and self.scope["state"].get("timed_by_the_app"):
            return False
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.get_write_buffer_size()

    def _check(self) -> None:
        now = self.loop.time()
        sending = self.transport.get_write_buffer_size() > 0
        if not sending:
            self._sending_since = None
        elif self._sending_since is None:
            self._sending_since = now
        if (self._sending_since is not None and now - self._sending_since > self.send_s) or (
            self.is_waiting() and now - self.waiting_since > self.receive_s
        ):
            # close() would wait until a client that does not read has read everything
            self.transport.abort()
        else:
            self._check_timer = self.loop.call_later(_CHECK_S, self._check)

    def _make_room(self) -> None:
        now = self.loop.time()
        others = [each for each in self.connections if isinstance(each, BoundedProtocol) and each is not self]
        waiting = [each for each in others if each.is_waiting() and now - each.waiting_since > EVICT_S]
        victim = min(waiting, key=lambda each: each.waiting_since, default=self)
        victim.transport.abort()
