"""One dispatcher for the commands of all doors: MQTT, the control socket, HTTP. It does no I/O.

A command over MQTT may have waited at a broker, come twice, or been sent by mistake as retained. So there it needs an
`id`, which is obeyed once, and an `expires_utc`, which needs a synchronised clock here. At the other doors somebody
waits for the answer of a command that nobody stored: both may be left out, and are heeded where given.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import logging
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pydantic import JsonValue, TypeAdapter, ValidationError

from edge_runtime.clock import Clock, utc_text
from edge_runtime.control.commands import CommandSpec, Door
from edge_runtime.control.once import Errand, Memory
from edge_runtime.errors import EdgeError
from edge_runtime.records.commands import Command, CommandError, Reply
from edge_runtime.records.identity import Identity
from edge_runtime.source_url import redact_text

log = logging.getLogger(__name__)

__all__ = ["Dispatcher", "Door", "Observe"]

Observe = Callable[[str, Door, Reply], None]

MAX_BYTES = 64 * 1024
MAX_AHEAD_S = 24 * 3600.0
REMEMBERED = 4096
# Longer than `expires_utc` by this, so that a wall clock that is set back a little changes nothing.
_MARGIN_S = 60.0
# For an id at a door that needs no expiry.
_REMEMBER_S = 600.0
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


class _No(Exception):
    """Refused, with the error to answer."""

    def __init__(
        self, code: str, message: str, *, where: str | None = None, remedy: str | None = None, retryable: bool = False
    ) -> None:
        super().__init__(message)
        self.error = CommandError(
            code=code,
            message=_clean(message),
            where=_clean_or_none(where),
            remedy=_clean_or_none(remedy),
            retryable=retryable,
        )


class Dispatcher:
    """Checks commands, has them obeyed, and says what became of them. Any thread, several at once.

    `commands` are by name. `observe(name, door, reply)` is told of every reply but repeated ones, on the caller's
    thread; what it raises is logged. `max_ahead_s`: how far ahead a command may expire. `remembered`: how many ids
    that have not expired are kept; while there are more, further commands are refused (`busy`). Ids do not outlive
    the process.
    """

    def __init__(
        self,
        identity: Identity,
        clock: Clock,
        clock_synced: Callable[[], bool],
        commands: Mapping[str, CommandSpec[Any]],
        *,
        observe: Observe = lambda _name, _door, _reply: None,
        max_ahead_s: float = MAX_AHEAD_S,
        remembered: int = REMEMBERED,
    ) -> None:
        self._identity = identity
        self._clock = clock
        self._clock_synced = clock_synced
        self._commands = dict(commands)
        self._observe = observe
        self._max_ahead_s = max_ahead_s
        self._memory = Memory(remembered)
        self._seq = itertools.count()

    def slow(self, name: str) -> bool:
        """Whether the command takes its time: nobody else's command should wait behind it."""
        spec = self._commands.get(name)
        return spec is not None and spec.slow

    def handle(
        self, name: str, payload: bytes | Mapping[str, object], *, retained: bool = False, door: Door
    ) -> Reply | None:
        """Obey or refuse a command; returns when it is done. Raises nothing.

        None: nobody can be answered, since over MQTT no id could be read. Elsewhere there is always a reply.
        """
        command_id: str | None = None
        try:
            document = _document(payload)
            command_id = _id_of(document)
            return self._repeated(name, document, command_id, retained=retained) or self._checked(
                name, document, retained=retained, door=door
            )
        except _No as no:
            reply = self._reply(command_id, error=no.error)
        except Exception as error:  # noqa: BLE001  told, without an address that may be in it
            log.error("command %r failed: %s", name, redact_text(traceback.format_exc()))
            reply = self._reply(command_id, error=_internal(error))
        self._tell(name, door, reply)
        return None if reply.id is None and door == "mqtt" else reply

    def _tell(self, name: str, door: Door, reply: Reply) -> None:
        if reply.error is not None:
            log.warning("command %r (%s, id %s) is not obeyed: %s", name, door, reply.id, reply.error.message)
        try:
            self._observe(name, door, reply)
        except Exception:
            log.exception("the observer of commands failed")

    # ---- checks, in the order in which they are answered

    def _repeated(
        self, name: str, document: Mapping[str, object], command_id: str | None, *, retained: bool
    ) -> Reply | None:
        if command_id is None or retained:
            return None
        errand = self._memory.find(command_id, self._clock.monotonic_ns())
        return None if errand is None else self._again(errand, _fingerprint(name, document))

    @staticmethod
    def _again(errand: Errand, fingerprint: bytes) -> Reply:
        if errand.fingerprint != fingerprint:
            raise _No("id_reused", "this id was used for another command", where="id", remedy="use a new id")
        if not errand.finished.is_set() or errand.reply is None:
            raise _No("in_progress", "this command is being obeyed", where="id", retryable=True)
        return errand.reply

    def _checked(self, name: str, document: Mapping[str, object], *, retained: bool, door: Door) -> Reply:
        if retained:
            raise _No(
                "retained",
                "a retained command is never obeyed: it would be again at every start",
                remedy="publish it without retain, and clear the topic",
            )
        spec = self._commands.get(name)
        if spec is None:
            near = difflib.get_close_matches(name, self._commands, 1)
            known = ", ".join(sorted(self._commands))
            raise _No(
                "unknown_command",
                f"there is no command {name!r}",
                where="name",
                remedy=f"did you mean {near[0]!r}?" if near else f"there are: {known}",
            )
        command = _validated(Command, document, "")
        keep_s = self._check_expiry(command, door)
        if spec.forbid is not None and (no := spec.forbid(command.args, door)) is not None:
            raise _No(no.code, no.message, where=no.where, remedy=no.remedy)
        args = _validated(spec.args, command.args, "args.")
        if command.id is None:
            reply = self._obey(name, spec, args, None)
            self._tell(name, door, reply)
            return reply
        now_ns = self._clock.monotonic_ns()
        errand = Errand(_fingerprint(name, document), now_ns + int(keep_s * 1e9))
        begun = self._memory.begin(command.id, errand, now_ns)
        if begun is None:
            raise _No(
                "busy",
                "more commands than can be remembered have not expired yet",
                remedy="let commands expire sooner",
                retryable=True,
            )
        if begun is not errand:  # another thread was first
            return self._again(begun, errand.fingerprint)
        try:
            errand.reply = self._obey(name, spec, args, command.id)
        finally:
            errand.finished.set()
        self._tell(name, door, errand.reply)
        return errand.reply

    def _check_expiry(self, command: Command, door: Door) -> float:
        """How long the id has to be remembered, in seconds."""
        if door == "mqtt":
            for field in ("id", "expires_utc"):
                if getattr(command, field) is None:
                    raise _No("invalid", f"{field} is missing", where=field, remedy=f"add {field}")
        synced = self._clock_synced()
        if door == "mqtt" and not synced:
            raise _No(
                "clock_unsynced",
                "the clock of this device is not synchronised, so it cannot tell whether this has expired",
                remedy="wait until it is, or use the control socket",
                retryable=True,
            )
        if command.expires_utc is None or not synced:
            return _REMEMBER_S
        ahead_s = (command.expires_utc - self._clock.utc()).total_seconds()
        if ahead_s <= 0:
            raise _No("expired", f"it expired {-ahead_s:.1f} s ago", where="expires_utc", remedy="send a new one")
        if ahead_s > self._max_ahead_s:
            raise _No(
                "invalid",
                f"it expires in {ahead_s:.0f} s, which is more than {self._max_ahead_s:.0f} s ahead",
                where="expires_utc",
                remedy="let it expire sooner",
            )
        return ahead_s + _MARGIN_S

    # ---- answers

    def _obey(self, name: str, spec: CommandSpec[Any], args: object, command_id: str | None) -> Reply:
        start_ns = self._clock.monotonic_ns()
        try:
            # strictly JSON, and no NaN that a parser would choke on
            result = _JSON.validate_json(json.dumps(spec.run(args), allow_nan=False))
            return self._reply(command_id, result=result)
        except EdgeError as error:
            return self._reply(command_id, error=_edge_error(error))
        except Exception as error:  # noqa: BLE001  told, without an address that may be in it
            log.error("command %r failed: %s", name, redact_text(traceback.format_exc()))
            return self._reply(command_id, error=_internal(error))
        finally:
            took_s = (self._clock.monotonic_ns() - start_ns) / 1e9
            if took_s > spec.budget_s:
                log.warning("command %r took %.1f s, more than its %g s", name, took_s, spec.budget_s)

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


def _document(payload: bytes | Mapping[str, object]) -> Mapping[str, object]:
    if isinstance(payload, Mapping):
        return payload
    if len(payload) > MAX_BYTES:
        raise _No("invalid", f"{len(payload)} bytes are more than the {MAX_BYTES} that a command may have")
    try:
        document = json.loads(payload.decode(), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _No("invalid", f"it is not JSON: {error}", remedy="send a JSON object") from error
    if not isinstance(document, dict):
        raise _No("invalid", "it is not a JSON object", remedy='send {"id": ..., "expires_utc": ..., "args": {...}}')
    return document


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _id_of(document: Mapping[str, object]) -> str | None:
    found = document.get("id")
    return found if isinstance(found, str) and _ID.fullmatch(found) else None


def _fingerprint(name: str, document: Mapping[str, object]) -> bytes:
    text = json.dumps([name, document], sort_keys=True, default=str)
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _validated(model: type[Any], document: Mapping[str, object], prefix: str) -> Any:
    try:
        return model.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = prefix + ".".join(str(part) for part in first["loc"]) if first["loc"] else prefix.rstrip(".") or None
        message = str(first["msg"]).removeprefix("Value error, ")
        known = ", ".join(field.alias or name for name, field in model.model_fields.items()) or "nothing"
        remedy = f"it takes: {known}" if first["type"] == "extra_forbidden" else None
        raise _No("invalid", f"{where}: {message}" if where else message, where=where, remedy=remedy) from error


def _edge_error(error: EdgeError) -> CommandError:
    return CommandError(
        code=error.code,
        message=_clean(error.message),
        where=_clean_or_none(error.where),
        remedy=_clean_or_none(error.remedy),
        retryable=error.retryable,
    )


def _internal(error: Exception) -> CommandError:
    return CommandError(
        code="internal",
        message=_clean(f"{type(error).__name__}: {redact_text(str(error))}"),
        where=None,
        remedy="see the log of the daemon",
        retryable=False,
    )


def _clean(text: str) -> str:
    """Text as UTF-8 can carry it (JSON may have said \\ud800), and not without end."""
    return text.encode(errors="replace").decode()[:1000]


def _clean_or_none(text: str | None) -> str | None:
    return None if text is None else _clean(text)
