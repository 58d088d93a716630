"""A process that takes commands and is meant to be killed. Arguments: the store, the port of the broker.

`mark` and `slow-mark` append their id to the file `marks`. Says `ready` when it is connected.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from edge_runtime.app.command_door import CommandDoor
from edge_runtime.clock import SystemClock
from edge_runtime.control.commands import CommandSpec
from edge_runtime.control.dispatcher import Dispatcher
from edge_runtime.control.journal import JOURNAL_NAME, CommandJournal
from edge_runtime.mqtt.link import MqttLink
from edge_runtime.mqtt.settings import BrokerSettings
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import Payload
from tests.mosquitto import wait_until


class MarkArgs(Payload):
    mark: str


def main() -> None:
    store, port = Path(sys.argv[1]), int(sys.argv[2])
    marks = os.open(store / "marks", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def run(args: MarkArgs) -> JsonValue:
        os.write(marks, f"{args.mark}\n".encode())
        return args.mark

    clock = SystemClock()
    journal = CommandJournal(store / JOURNAL_NAME, clock, lambda: True, "b1")
    commands: dict[str, CommandSpec[Any]] = {
        "mark": CommandSpec(MarkArgs, run),
        "slow-mark": CommandSpec(MarkArgs, run, slow=True),
    }
    dispatcher = Dispatcher(Identity("gate-07", "b1", "s1", "0", 0), clock, lambda: True, commands, journal=journal)
    link = MqttLink(BrokerSettings(host="127.0.0.1", port=port, client_id="gate-07"))
    door = CommandDoor(dispatcher, "gate-07", retry_s=0.2)
    door.attach(link)
    link.start()
    door.start()
    wait_until(lambda: link.status().connected)
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
