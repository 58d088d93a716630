"""A bundle that comes in over HTTP: from the event loop to the one thread that writes it."""

from __future__ import annotations

import asyncio
import json
import queue
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import ClientDisconnect, Request

from edge_runtime.errors import BundleError, EdgeError
from edge_runtime.web.door import BundleUpload, StoredBundle
from edge_runtime.web.workers import BusyError, Workers

MAX_UPLOAD_BYTES = 4 * 1024**3
BLOCK_BYTES = 256 * 1024
STALL_S = 30.0
"""In this time a block has to come, or the rest of the body."""

AHEAD_BLOCKS = 4
"""So many blocks may wait for the disk; more are not read from the client."""

_STATUS = {"store_full": 507, "no_store": 503, "upload_too_large": 413, "upload_stalled": 408}


def status_of(error: EdgeError) -> int:
    """The HTTP status of an upload that failed."""
    if isinstance(error, BusyError):
        return 503
    return _STATUS.get(error.code, 400 if isinstance(error, BundleError) else 500)


async def receive_bundle(request: Request, open_upload: Callable[[], BundleUpload], workers: Workers) -> bytes:
    """Give the body to an upload, on a thread of `workers`, and return what became of it as JSON.

    About (AHEAD_BLOCKS + 2) * BLOCK_BYTES are in memory at most. Whatever goes wrong, that thread lets go of the
    upload, and nothing is left of it.

    Raises EdgeError: what the upload raises; "upload_too_large", "upload_stalled"; BusyError while another one
    comes in. Raises ClientDisconnect when the client has gone.
    """
    if int(request.headers.get("content-length", "0")) > MAX_UPLOAD_BYTES:  # h11 lets nothing but digits through
        raise _too_large()
    request.state.timed_by_the_app = True  # see BoundedProtocol
    loop = asyncio.get_running_loop()
    blocks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()  # None: no more
    room = asyncio.Semaphore(AHEAD_BLOCKS)
    whole = False

    def write() -> StoredBundle | None:
        upload = open_upload()
        try:
            while (block := blocks.get()) is not None:
                upload.write(block)
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(room.release)
            return upload.finish() if whole else None
        finally:
            upload.abort()

    writing = asyncio.ensure_future(workers.call(write, wait=False))
    try:
        whole = await _feed(request, blocks, room, writing)
        blocks.put(None)
        stored = await writing
        assert stored is not None
        return _json(stored)
    finally:
        blocks.put(None)  # it may still be waiting
        await asyncio.wait({writing})
        if not writing.cancelled():
            writing.exception()  # seen, if it is not the one that is raised


async def _feed(
    request: Request, blocks: queue.SimpleQueue[bytes | None], room: asyncio.Semaphore, writing: asyncio.Future[Any]
) -> bool:
    """The body, block by block; false when the writing has ended before it."""
    loop = asyncio.get_running_loop()
    block, more, received_bytes = bytearray(), True, 0
    while more:
        if not await _done(room.acquire(), writing, None):
            return False
        end = loop.time() + STALL_S
        while more and len(block) < BLOCK_BYTES:
            receiving = asyncio.ensure_future(request.receive())
            if not await _done(receiving, writing, end - loop.time()):
                if writing.done():
                    return False
                raise _stalled()
            message = receiving.result()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            block += message.get("body", b"")
            more = message.get("more_body", False)
        received_bytes += len(block)
        if received_bytes > MAX_UPLOAD_BYTES:
            raise _too_large()
        blocks.put(bytes(block))
        block.clear()
    return True


async def _done(step: Awaitable[object], writing: asyncio.Future[Any], within_s: float | None) -> bool:
    """Whether the step is done, before the writing has ended and within that time. Else it is cancelled.

    (asyncio.wait_for swallows a cancellation now and then, before Python 3.12.)
    """
    task = asyncio.ensure_future(step)
    try:
        await asyncio.wait({task, writing}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        return task.done()
    finally:
        task.cancel()


def _stalled() -> EdgeError:
    return EdgeError(
        f"the sender stalls: {BLOCK_BYTES} bytes did not come within {STALL_S:g} s",
        code="upload_stalled",
        remedy="send it again",
        retryable=True,
    )


def _too_large() -> EdgeError:
    return EdgeError(f"a bundle may have {MAX_UPLOAD_BYTES} bytes", code="upload_too_large", remedy="send less")


def _json(stored: StoredBundle) -> bytes:
    answer = {
        "digest": stored.digest,
        "name": stored.name,
        "version": stored.version,
        "variants": list(stored.variants),
        "bytes": stored.size_bytes,
        "new": stored.new,
    }
    return json.dumps(answer).encode()
