"""A server on real sockets."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_runtime.web.server import WebServer
from tests.web.doors import TOKEN, FakeDoor


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: pytest's own may not fit a socket's."""
    with tempfile.TemporaryDirectory(prefix="edge-web-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def door(folder: Path) -> FakeDoor:
    return FakeDoor(folder)


@pytest.fixture
def control(folder: Path) -> Path:
    return folder / "run" / "control.sock"


@pytest.fixture
def server(door: FakeDoor, control: Path) -> Iterator[WebServer]:
    """On the control socket, and on a free port of the loopback with a token."""
    with WebServer(door, control, listen="127.0.0.1:0", token=TOKEN, names=["gate-07.local"]) as running:
        yield running


@pytest.fixture
def tcp(server: WebServer) -> tuple[str, int]:
    assert server.address is not None
    return server.address
