"""One dispatcher for the commands of all doors: MQTT, the control socket, HTTP. Its only I/O is its journal's.

A command over MQTT may have waited at a broker, come twice, or been sent by mistake as retained. So there it needs an
`id`, which is obeyed once, and an `expires_utc`, which needs a synchronised clock here. At the other doors somebody
waits for the answer of a command that nobody stored: both may be left out, and are heeded where given.

Over MQTT a command is accepted first (`accept`), so that it can be acknowledged to the broker, and obeyed later
(`obey`); at the other doors both at once (`handle`).
"""

from __future__ import annotations

import difflib
import itertools
import json
import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue, TypeAdapter

from edge_runtime.clock import Clock, utc_text
from edge_runtime.control.commands import CommandSpec, Door
from edge_runtime.control.journal import CommandJournal, Errand
from edge_runtime.control.reading import (
    Refusal,
    document_of,
    edge_error,
    fingerprint_of,
    id_of,
    internal_error,
    validated,
)
from edge_runtime.errors import EdgeError
from edge_runtime.records.commands import Command, CommandError, Reply
from edge_runtime.records.identity import Identity
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

__all__ = ["Dispatcher", "Door", "Observe", "Task"]

Observe = Callable[[str, Door, Reply], None]

MAX_AHEAD_S = 24 * 3600.0
# Longer than `expires_utc` by this, so that a wall clock that is set back a little changes nothing.
_MARGIN_S = 60.0
# For an id at a door that needs no expiry.
_REMEMBER_S = 600.0
# A topic may be 65 kB long, and its end is the name.
_MAX_NAME = 64
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


@dataclass(frozen=True, slots=True)
class Task:
    """An accepted command, to be given to `Dispatcher.obey`."""

    name: str
    door: Door
    spec: CommandSpec[Any]
    args: Any
    errand: Errand | None
    """None: it has no id."""


class Dispatcher:
    """Checks commands, has them obeyed, and says what became of them. Any thread, several at once; the caller's waits
    for the disk of `journal`, and for the command.

    `commands` are by name. `observe(name, door, reply)` is told of every reply but repeated ones, on the caller's
    thread; what it raises is logged. `max_ahead_s`: how far ahead a command may expire. Without a `journal` ids do not
    outlive the process.
    """

    def __init__(
        self,
        identity: Identity,
        clock: Clock,
        clock_synced: Callable[[], bool],
        commands: Mapping[str, CommandSpec[Any]],
        *,
        journal: CommandJournal | None = None,
        observe: Observe = lambda _name, _door, _reply: None,
        max_ahead_s: float = MAX_AHEAD_S,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._clock_synced = clock_synced
        self._commands = dict(commands)
        self._observe = observe
        self._max_ahead_s = max_ahead_s
        self._journal = journal or CommandJournal(None, clock, clock_synced, identity.boot)
        self._seq = itertools.count()

    def slow(self, name: str) -> bool:
        """Whether the command takes its time: nobody else's command should wait behind it."""
        spec = self._commands.get(name)
        return spec is not None and spec.slow

    def handle(self, name: str, payload: bytes | Mapping[str, object], *, retained: bool = False, door: Door) -> Reply:
        """Obey or refuse a command; returns when it is done. Raises nothing."""
        taken = self._take(name, payload, retained=retained, door=door, at_once=True)
        return taken if isinstance(taken, Reply) else self._done(taken)

    def accept(
        self,
        name: str,
        payload: bytes | Mapping[str, object],
        *,
        retained: bool = False,
        door: Door,
        refusal: EdgeError | None = None,
    ) -> Reply | Task:
        """Refuse a command, repeat the reply to one that is known, or accept it. Raises nothing.

        An accepted one is on disk: after a kill or a power cut the next start obeys it. `refusal`: why nothing that
        changes something may be accepted now.
        """
        return self._take(name, payload, retained=retained, door=door, refusal=refusal)

    def obey(self, task: Task) -> Reply | None:
        """Obey an accepted command, once. Raises nothing.

        None: not now, and it may be tried again later. Either nobody can tell yet whether it has expired, or the disk
        takes no writes, so that a kill in the middle would have it obeyed twice.
        """
        errand = task.errand
        if errand is not None and errand.state == "accepted":
            expired = self._journal.expired(errand)
            if expired:
                error = _expired("it expired before its turn came").error
                return self._finished(task, self._error(errand.command_id, error))
            if expired is None or not self._journal.begin(errand):
                return None
        return self._done(task)

    def recover(self) -> tuple[list[Reply], list[Task]]:
        """What an earlier start accepted over MQTT and did not finish: replies to send, and what is still to be obeyed.

        A command that was begun may have taken effect, and is not obeyed again: `interrupted`. A reply that was
        written but may never have reached the broker is not among these: whoever misses it sends the same command
        again, and gets it. Tries the disk again where it took no writes; so call this now and then while it does not.
        """
        self._journal.open()
        replies, tasks = [], []
        for errand in self._journal.pending():
            found = self._recovered(errand)
            if isinstance(found, Task):
                tasks.append(found)
            elif errand.door == "mqtt":  # at the other doors nobody waits any more
                replies.append(found)
        return replies, tasks

    def _recovered(self, errand: Errand) -> Reply | Task:
        try:
            return self._task_of(errand)
        except Refusal as no:
            reply = self._error(errand.command_id, no.error)
        self._journal.finish(errand, reply)
        self._tell(errand.name, errand.door, reply)
        return reply

    def _task_of(self, errand: Errand) -> Task:
        if errand.state == "begun" or errand.payload is None:
            raise Refusal(
                "interrupted",
                "the daemon ended while it was obeying this: whether it took effect is not known",
                remedy="look at `reported` and `edge-runtime status`; if it did not, send it again under a new id",
            )
        spec = self._spec(errand.name)  # another version may know other commands
        command = validated(Command, document_of(errand.payload), "")
        return Task(errand.name, errand.door, spec, validated(spec.args, command.args, "args."), errand)

    # ---- checks, in the order in which they are answered

    def _take(
        self,
        name: str,
        payload: bytes | Mapping[str, object],
        *,
        retained: bool,
        door: Door,
        at_once: bool = False,
        refusal: EdgeError | None = None,
    ) -> Reply | Task:
        name = name[:_MAX_NAME]
        command_id: str | None = None
        try:
            document = document_of(payload)
            command_id = id_of(document)
            return self._repeated(name, document, command_id, retained=retained) or self._checked(
                name, document, retained=retained, door=door, at_once=at_once, refusal=refusal
            )
        except Refusal as no:
            reply = self._error(command_id, no.error)
        except EdgeError as error:
            reply = self._error(command_id, edge_error(error))
        except Exception as error:  # noqa: BLE001  told, without an address that may be in it
            log.error("command %r failed: %s", name, redact_text(traceback.format_exc()))
            reply = self._error(command_id, internal_error(error))
        self._tell(name, door, reply)
        return reply

    def _repeated(
        self, name: str, document: Mapping[str, object], command_id: str | None, *, retained: bool
    ) -> Reply | None:
        if command_id is None or retained:
            return None
        errand = self._journal.find(command_id)
        return None if errand is None else self._again(errand, fingerprint_of(name, document))

    @staticmethod
    def _again(errand: Errand, fingerprint: bytes) -> Reply:
        if errand.fingerprint != fingerprint:
            raise Refusal("id_reused", "this id was used for another command", where="id", remedy="use a new id")
        if errand.reply is None:
            raise Refusal("in_progress", "this command was accepted and is not done yet", where="id", retryable=True)
        return errand.reply

    def _checked(
        self,
        name: str,
        document: Mapping[str, object],
        *,
        retained: bool,
        door: Door,
        at_once: bool,
        refusal: EdgeError | None,
    ) -> Reply | Task:
        if retained:
            raise Refusal(
                "retained",
                "a retained command is never obeyed: it would be again at every start",
                remedy="publish it without retain, and clear the topic",
            )
        spec = self._spec(name)
        command = validated(Command, document, "")
        ahead_s = self._check_expiry(command, door)
        if spec.forbid is not None and (no := spec.forbid(command.args, door)) is not None:
            raise no
        args = validated(spec.args, command.args, "args.")
        if refusal is not None and spec.changes:
            raise refusal
        if command.id is None:
            return Task(name, door, spec, args, None)
        errand = self._errand(name, command, document, ahead_s, door)
        errand.durable = spec.changes
        if at_once or not spec.changes:
            errand.state, errand.payload = "begun", None
        known = self._journal.accept(errand, must_last=spec.changes and door == "mqtt")
        if known is not errand:  # another thread was first
            return self._again(known, errand.fingerprint)
        return Task(name, door, spec, args, errand)

    def _spec(self, name: str) -> CommandSpec[Any]:
        spec = self._commands.get(name)
        if spec is None:
            near = difflib.get_close_matches(name, self._commands, 1)
            known = ", ".join(sorted(self._commands))
            raise Refusal(
                "unknown_command",
                f"there is no command {name!r}",
                where="name",
                remedy=f"did you mean {near[0]!r}?" if near else f"there are: {known}",
            )
        return spec

    def _check_expiry(self, command: Command, door: Door) -> float | None:
        """In how many seconds it expires; None: never, or nobody can tell."""
        if door == "mqtt":
            for field in ("id", "expires_utc"):
                if getattr(command, field) is None:
                    raise Refusal("invalid", f"{field} is missing", where=field, remedy=f"add {field}")
        synced = self._clock_synced()
        if door == "mqtt" and not synced:
            raise Refusal(
                "clock_unsynced",
                "the clock of this device is not synchronised, so it cannot tell whether this has expired",
                remedy="wait until it is, or use the control socket",
                retryable=True,
            )
        if command.expires_utc is None or not synced:
            return None
        ahead_s = (command.expires_utc - self._clock.utc()).total_seconds()
        if ahead_s <= 0:
            raise _expired(f"it expired {-ahead_s:.1f} s ago")
        if ahead_s > self._max_ahead_s:
            raise Refusal(
                "invalid",
                f"it expires in {ahead_s:.0f} s, which is more than {self._max_ahead_s:.0f} s ahead",
                where="expires_utc",
                remedy="let it expire sooner",
            )
        return ahead_s

    def _errand(
        self, name: str, command: Command, document: Mapping[str, object], ahead_s: float | None, door: Door
    ) -> Errand:
        now_ns = self._clock.monotonic_ns()
        keep_s = _REMEMBER_S if ahead_s is None else ahead_s + _MARGIN_S
        assert command.id is not None
        return Errand(
            command_id=command.id,
            fingerprint=fingerprint_of(name, document),
            name=name,
            door=door,
            payload=command.model_dump_json().encode(),
            t_expires_ns=None if ahead_s is None else now_ns + int(ahead_s * 1e9),
            t_forget_ns=now_ns + int(keep_s * 1e9),
            expires_utc=None if ahead_s is None or command.expires_utc is None else command.expires_utc.timestamp(),
            forget_utc=self._clock.utc().timestamp() + keep_s if self._clock_synced() else None,
        )

    # ---- answers

    def _done(self, task: Task) -> Reply:
        return self._finished(task, self._run(task))

    def _finished(self, task: Task, reply: Reply) -> Reply:
        if task.errand is not None:
            self._journal.finish(task.errand, reply)
        self._tell(task.name, task.door, reply)
        return reply

    def _run(self, task: Task) -> Reply:
        command_id = None if task.errand is None else task.errand.command_id
        start_ns = self._clock.monotonic_ns()
        try:
            # strictly JSON, and no NaN that a parser would choke on
            result = _JSON.validate_json(json.dumps(task.spec.run(task.args), allow_nan=False))
            return self._reply(command_id, result=result)
        except EdgeError as error:
            return self._error(command_id, edge_error(error))
        except Exception as error:  # noqa: BLE001  told, without an address that may be in it
            log.error("command %r failed: %s", task.name, redact_text(traceback.format_exc()))
            return self._error(command_id, internal_error(error))
        finally:
            took_s = (self._clock.monotonic_ns() - start_ns) / 1e9
            if took_s > task.spec.budget_s:
                log.warning("command %r took %.1f s, more than its %g s", task.name, took_s, task.spec.budget_s)

    def _tell(self, name: str, door: Door, reply: Reply) -> None:
        if reply.error is not None:
            log.warning("command %r (%s, id %s) is not obeyed: %s", name, door, reply.id, reply.error.message)
        try:
            self._observe(name, door, reply)
        except Exception:
            log.exception("the observer of commands failed")

    def _error(self, command_id: str | None, error: CommandError) -> Reply:
        return self._reply(command_id, error=error)

    def _reply(self, command_id: str | None, *, result: JsonValue = None, error: CommandError | None = None) -> Reply:
        return Reply(
            device=self._identity.device,
            boot=self._identity.boot,
            session=self._identity.session,
            seq=next(self._seq),
            clock_synced=self._clock_synced(),
            t_utc=utc_text(self._clock.utc()),
            id=command_id,
            ok=error is None,
            error=error,
            result=result,
        )


def _expired(text: str) -> Refusal:
    return Refusal("expired", text, where="expires_utc", remedy="send a new one")
