"""`edge-runtime budget`, where the daemon does not live to see it."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from edge_runtime.cli.main import run as edge_runtime


@pytest.mark.parametrize("kept", [False, True])
def test_a_daemon_that_ends_in_between_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, kept: bool
) -> None:
    place = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(place))
        server.listen()

        def answer_once() -> None:
            client, _ = server.accept()
            with client:
                client.recv(65536)
                server.close()
                if not kept:
                    place.unlink()
                body = json.dumps({"budget": {"power_w": 10.0}}).encode()
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=answer_once)
        thread.start()
        code = edge_runtime(["budget", "--socket", str(place), "--power-w", "9"])
        thread.join(5)
    assert code == 4
    assert "the daemon has ended" in capsys.readouterr().err
