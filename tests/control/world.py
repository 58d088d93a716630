"""A device whose clocks, boots and deaths a test decides; its journal is a real file."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from edge_runtime.control.commands import CommandSpec, Door
from edge_runtime.control.dispatcher import Dispatcher, Task
from edge_runtime.control.journal import JOURNAL_NAME, REMEMBERED, CommandJournal
from edge_runtime.records.commands import PingArgs, Reply
from edge_runtime.records.identity import Identity
from edge_runtime.records.window import Payload

START = datetime(2026, 3, 1, 12, 0, tzinfo=timezone.utc)


class Killed(BaseException):
    """The process ends here."""


class NoteArgs(Payload):
    what: str


class World:
    """`now_s` is the true time since the start. `skew_s`: by how much the wall clock is wrong.

    Commands: `note` writes down what it is given, and dies in the middle if `die` says so; `slow-note` is the same,
    and slow; `look` changes nothing. `folder` is the store, another one after every kill.
    """

    def __init__(self, root: Path, *, capacity: int = REMEMBERED) -> None:
        self._root = root
        self._capacity = capacity
        self._starts = 0
        self.now_s = 0.0
        self.skew_s = 0.0
        self.synced = True
        self.boot = 0
        self._boot_s = -5.0
        self.die = False
        self.notes: list[str] = []
        self.folder = root / "store-0"
        self.folder.mkdir(parents=True)
        self.start()

    # ---- Clock

    def monotonic_ns(self) -> int:
        return int((self.now_s - self._boot_s) * 1e9)

    def utc(self) -> datetime:
        return START + timedelta(seconds=self.now_s + self.skew_s)

    # ---- life

    def start(self) -> None:
        boot = f"b{self.boot}"
        identity = Identity("gate-07", boot, f"s{self._starts}", "1", 0)
        self.journal = CommandJournal(
            self.folder / JOURNAL_NAME, self, lambda: self.synced, boot, capacity=self._capacity
        )
        commands: dict[str, CommandSpec[Any]] = {
            "note": CommandSpec(NoteArgs, self._note),
            "slow-note": CommandSpec(NoteArgs, self._note, slow=True),
            "look": CommandSpec(PingArgs, lambda _: len(self.notes), changes=False),
        }
        self.dispatcher = Dispatcher(identity, self, lambda: self.synced, commands, journal=self.journal)

    def kill(self, *, reboot: bool = False) -> None:
        """What is on disk now is what the next start finds."""
        self._starts += 1
        store = self._root / f"store-{self._starts}"
        shutil.copytree(self.folder, store)
        self.journal.close(1.0)
        shutil.rmtree(self.folder)
        self.folder = store
        if reboot:
            self.boot += 1
            self._boot_s = self.now_s - 5.0
        self.start()

    def _note(self, args: NoteArgs) -> JsonValue:
        self.notes.append(args.what)
        if self.die:
            raise Killed
        return f"noted {args.what}"

    # ---- senders

    def wish(self, command_id: str, ahead_s: float = 60.0) -> dict[str, object]:
        """`note` with its id, by a sender who knows the time."""
        expires = START + timedelta(seconds=self.now_s + ahead_s)
        return {"id": command_id, "expires_utc": expires.isoformat(), "args": {"what": command_id}}

    def mqtt(self, wish: dict[str, object], name: str = "note") -> Reply | Task:
        return self.dispatcher.accept(name, json.dumps(wish).encode(), door="mqtt")

    def send(self, wish: dict[str, object], door: Door = "socket", name: str = "note") -> Reply:
        return self.dispatcher.handle(name, json.dumps(wish).encode(), door=door)

    def task(self, command_id: str, ahead_s: float = 60.0) -> Task:
        """Of a command that is accepted."""
        task = self.mqtt(self.wish(command_id, ahead_s))
        assert isinstance(task, Task)
        return task


def code_of(reply: Reply | Task | None) -> str | None:
    """The error's code; None where there is none."""
    assert isinstance(reply, Reply)
    return None if reply.error is None else reply.error.code
