"""A camera's process that was taken over: `python -m tests.camera.lying_child CONTROL RETURNS PARENT`.

The last word of the address that it is to open says what it does. It begins as an honest one does, with a picture.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

import numpy as np

from edge_runtime.camera.shared_frames import PictureForm, SlotWriter

REPORT: dict[str, Any] = {
    "state": "up",
    "reason": None,
    "since_ns": 1,
    "counters": dict.fromkeys(("decoded", "skipped_rate", "skipped_codec", "corrupt", "pre_key", "duplicate"), 5),
    "effort": {"decode_cpu_ns": 5, "saved_cpu_ns": 5, "opened": 1, "backend": "pyav"},
    "ticks": 1,
    "resting": True,
}
FORM = PictureForm("gray", 64, 32)


def form(**other: object) -> dict[str, Any]:
    return {
        "pixel_format": "gray",
        "width": 64,
        "height": 32,
        "matrix": 2,
        "range": 0,
        "siting": 0,
        "interlaced": False,
        "turn": [False, False, False],
        "shown": None,
        **other,
    }


def frame(slot: int = 0, **other: object) -> dict[str, Any]:
    return {
        "kind": "FrameSent",
        "slot": slot,
        "t_capture_ns": time.monotonic_ns(),
        "form": form(),
        "report": REPORT,
        **other,
    }


class Liar:
    def __init__(self, link: socket.socket, returns: int) -> None:
        self.link = link
        self.returns = returns

    def say(self, message: dict[str, Any]) -> None:
        self.link.send(json.dumps(message).encode())

    def begin(self) -> str:
        order = json.loads(self.link.recv(1 << 16))
        self.say({"kind": "MemoryWanted", "picture_bytes": 4096})
        data, descriptors, _, _ = socket.recv_fds(self.link, 1 << 16, 1)
        writer = SlotWriter(descriptors[0], json.loads(data)["slot_bytes"])
        writer.put(FORM, [np.full((32, 64), 7, np.uint8)])
        self.say(frame())
        return str(order["options"]["url"]).rpartition("=")[2]

    # what it does next

    def garbage(self) -> None:
        self.link.send(os.urandom(500))

    def oversize(self) -> None:
        self.link.send(b'{"kind":"' + b"x" * 100_000)

    def nothing(self) -> None:
        self.link.send(b"")

    def flood(self) -> None:
        while True:
            self.say({"kind": "Report", **REPORT})

    def larger(self) -> None:
        self.say(frame(1, form=form(width=4096, height=4096)))

    def backwards(self) -> None:
        self.say({"kind": "Report", **REPORT, "counters": dict.fromkeys(REPORT["counters"], 4)})

    def again(self) -> None:
        self.say({"kind": "MemoryWanted", "picture_bytes": 4096})

    def twice(self) -> None:
        """The same slot, which the test still holds."""
        self.say(frame())

    def descriptors(self) -> None:
        numbers = array.array("i", [self.link.fileno()] * 100)
        self.link.sendmsg([json.dumps(frame(1)).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)])

    def hang_up(self) -> None:
        self.link.close()

    def quit(self) -> None:
        os._exit(3)


def main() -> None:
    parent = int(sys.argv[3])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    liar = Liar(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

    def last_resort() -> None:
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)

    # A test that fails must not leave it behind.
    threading.Thread(target=last_resort, daemon=True).start()
    lie = liar.begin()
    try:
        getattr(liar, lie)()
        while lie not in ("nothing", "hang_up") and liar.link.recv(1 << 16):
            pass
    except OSError:
        os._exit(0)
    while lie in ("nothing", "hang_up"):  # nor do these go by themselves
        time.sleep(1)
    os._exit(0)


if __name__ == "__main__":
    main()
