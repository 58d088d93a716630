"""What this room needs of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from edge_runtime.records.status import Health, StatusReport
from edge_runtime.records.window import WindowReport

Entry = Literal["socket", "http"]
"""Where a request came in: the control socket, or TCP with a token."""


@dataclass(frozen=True, slots=True)
class StoredBundle:
    """A bundle that is in the daemon's store. `digest` is "sha256:..."; `new`: it was not there before."""

    digest: str
    name: str
    version: str
    variants: tuple[str, ...]
    size_bytes: int
    new: bool


class BundleUpload(Protocol):
    """A bundle that comes in as a tar. Used by one thread. An error ends it; then nothing is left of it."""

    def write(self, chunk: bytes) -> None:
        """The next bytes of the tar. Raises EdgeError."""
        ...

    def finish(self) -> StoredBundle:
        """That was all: verify the bundle and keep it. Raises BundleError for what is none, EdgeError."""
        ...

    def abort(self) -> None:
        """Forget what came. Idempotent, and without effect after `finish`."""
        ...


class Door(Protocol):
    """The daemon, seen from outside. Called on short-lived threads of the web room, several at a time.

    Whatever a call holds it lets go of before it returns: what it returns is rendered and sent afterwards.
    An EdgeError becomes the error object; any other exception a 500.
    """

    def health(self) -> Health:
        """Whether it works. Should take no lock: if this does not answer in time, the answer is `wedged`."""
        ...

    def snapshot(self) -> StatusReport:
        """What it does now."""
        ...

    def windows(self, last: int) -> Sequence[WindowReport]:
        """The newest `last` windows (1-360), oldest first; fewer where there are fewer."""
        ...

    def execute(self, name: str, body: bytes, door: Entry) -> tuple[int, bytes]:
        """Do command `name` with the JSON `body` (at most 64 KiB, not checked); may take its time.

        Returns the HTTP status (200-599) and the reply as JSON.
        """
        ...

    def open_upload(self) -> BundleUpload:
        """A new bundle for the store; one at a time. May take its time, and so may all that it does."""
        ...
