"""Calls into the daemon, off the event loop: one that hangs costs a thread of a few, and no request but its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from edge_runtime.errors import EdgeError
from edge_runtime.threads import ThreadGroup

T = TypeVar("T")


class BusyError(EdgeError):
    """The daemon did not answer in time, has enough to do, or is stopping."""

    default_code = "busy"


class Workers:
    """At most `limit` calls at a time, each on a thread `name` of `threads`. To be used from one event loop."""

    def __init__(self, threads: ThreadGroup, name: str, limit: int) -> None:
        self._threads = threads
        self._name = name
        self._free = asyncio.Semaphore(limit)
        self._pending: set[asyncio.Future[Any]] = set()
        self._closed = False

    async def call(self, function: Callable[[], T], *, within_s: float | None = None, wait: bool = True) -> T:
        """What `function` returns or raises. Raises BusyError when all threads are taken and `wait` is false, when
        there is no answer `within_s`, and after `close`."""
        if self._closed:
            raise _stopping()
        if not wait and self._free.locked():
            raise BusyError(
                "too many of these are being carried out", remedy="wait for one of them to end", retryable=True
            )
        try:
            return await asyncio.wait_for(self._call(function), within_s)
        except asyncio.TimeoutError:
            raise BusyError(
                f"the daemon did not answer within {within_s} s", remedy="ask again; look at /healthz", retryable=True
            ) from None

    async def _call(self, function: Callable[[], T]) -> T:
        await self._free.acquire()
        if self._closed:
            self._free.release()
            raise _stopping()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def end(value: T | None, error: BaseException | None) -> None:
            # only now: a call that hangs keeps its place, however long ago its request gave up
            self._free.release()
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]

        def body() -> None:
            value, error = None, None
            try:
                value = function()
            except BaseException as problem:  # noqa: BLE001 - handed to whoever waits
                error = problem
            try:
                loop.call_soon_threadsafe(end, value, error)
            except RuntimeError:
                pass  # the loop has ended

        self._pending.add(future)
        try:
            try:
                self._threads.spawn(self._name, body)
            except RuntimeError as error:  # the system gives no more threads
                self._free.release()
                raise BusyError(f"no thread for it: {error}", retryable=True) from error
            return await future
        finally:
            self._pending.discard(future)

    def close(self) -> None:
        """Whoever waits for a call gets a BusyError now, and so does every later call."""
        self._closed = True
        for future in list(self._pending):
            if not future.done():
                future.set_exception(_stopping())


def _stopping() -> BusyError:
    return BusyError("the daemon is stopping", code="stopping", retryable=True)
