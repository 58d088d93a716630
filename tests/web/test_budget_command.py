"""Commands whose daemon does not live to see them."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path

import pytest

from edge_runtime.cli.main import run as edge_runtime

BUNDLE = Path(__file__).resolve().parents[2] / "engines" / "centernet"


@pytest.mark.parametrize(
    "arguments",
    [
        ["budget", "--power-w", "9"],
        ["reload", "detector", "--reset"],
        ["reload", "detector", str(BUNDLE)],
        ["camera", "pause", "gate"],
        ["camera", "add", "gate", "synthetic:"],
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_daemon_that_ends_in_between_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], *, kept: bool
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
                body = json.dumps({"budget": {"power_w": 10.0}, "models": [{"name": "detector"}]}).encode()
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

        thread = threading.Thread(target=answer_once)
        thread.start()
        at = 2 if arguments[0] == "camera" else 1
        code = edge_runtime([*arguments[:at], "--socket", str(place), *arguments[at:]])
        thread.join(5)
    assert code == 4
    assert "the daemon has ended" in capsys.readouterr().err
