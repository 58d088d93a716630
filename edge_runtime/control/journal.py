"""What was accepted and what became of it: every id once, for as long as its command lives, also over a restart.

A command is *accepted* on disk before its sender is told so, *begun* on disk before it is obeyed, and *finished* with
its reply. So after a kill or a power cut at any instant it is known of each whether it was not begun (and can be
obeyed), may have taken effect, or what was answered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge_runtime.clock import Clock
from edge_runtime.control.commands import Door
from edge_runtime.control.journal_file import JournalFile, JournalFileError, Row, State
from edge_runtime.durable import REAL, put_aside
from edge_runtime.errors import RefusedError
from edge_runtime.records.commands import Reply

log = logging.getLogger(__name__)

JOURNAL_NAME = "commands.sqlite"
"""In the store."""
REMEMBERED = 4096
MAX_KEEP_S = 24 * 3600.0 + 60.0
"""How long an id is remembered at most, of one boot's time."""
MAX_BOOTS = 100
"""Over how many boots at most that never knew the time."""


@dataclass(slots=True, eq=False)
class Errand:
    """A command that was accepted, is being obeyed, or was.

    `fingerprint` tells it from another with the same id. `t_..._ns` are monotonic, `..._utc` seconds of the epoch.
    Without `t_expires_ns` and with `expires_utc` nobody can tell yet whether it has expired: the device was booted
    since, and its clock is not synchronised. `durable`: goes to disk. Written by CommandJournal alone.
    """

    command_id: str
    fingerprint: bytes
    name: str
    door: Door
    payload: bytes | None
    t_expires_ns: int | None
    t_forget_ns: int
    expires_utc: float | None
    forget_utc: float | None
    state: State = "accepted"
    durable: bool = True
    reply: Reply | None = None
    boots: int = 0
    place: int = 0


class CommandJournal:
    """Errands by id, at most `capacity`, in memory and in a file. Thread-safe; only what says so waits for the disk.

    `path` None: in memory alone, as if nothing had to outlive the process. `boot` is the kernel's boot id: within a
    boot the monotonic clock tells what has expired, whatever the wall clock does; over a boot the wall clock, once it
    is synchronised, and until then nothing is forgotten and nothing obeyed.
    """

    def __init__(
        self,
        path: Path | None,
        clock: Clock,
        clock_synced: Callable[[], bool],
        boot: str,
        *,
        capacity: int = REMEMBERED,
    ) -> None:
        self._path = path
        self._clock = clock
        self._clock_synced = clock_synced
        self._boot = boot
        self._capacity = capacity
        self._lock = threading.Lock()  # a leaf
        self._errands: dict[str, Errand] = {}
        self._changed: set[str] = set()
        """Ids whose rows on disk are not what they are here."""
        self._pending: list[Errand] = []
        self._next_place = 0
        self._disk = threading.Lock()  # taken before the other one, and held while the disk writes
        self._file: JournalFile | None = None
        self._loaded = path is None
        self._closed = False
        self._trouble: str | None = None
        self._damage: str | None = None

    # ---- life

    def open(self) -> None:
        """Read what an earlier start left, and try again a disk that took no writes. Waits for the disk; raises
        nothing: what is wrong is in `alarms`. May be called again."""
        self._save()

    def close(self, deadline_s: float) -> bool:
        """Close the file; what changes from here on stays in memory. False: the disk is still busy after
        `deadline_s`."""
        self._closed = True
        if not self._disk.acquire(timeout=deadline_s):
            return False
        try:
            self._drop_file()
        finally:
            self._disk.release()
        return True

    def pending(self) -> list[Errand]:
        """What an earlier start accepted and did not finish, in that order. Each is given out once."""
        with self._lock:
            found, self._pending = self._pending, []
        return sorted(found, key=lambda errand: errand.place)

    def alarms(self) -> list[str]:
        """What is wrong with the file, a sentence each."""
        return [each for each in (self._damage, self._trouble) if each is not None]

    # ---- errands

    def find(self, command_id: str) -> Errand | None:
        """The errand of this id, if it is not yet to be forgotten."""
        now_ns, synced = self._clock.monotonic_ns(), self._clock_synced()
        with self._lock:
            errand = self._errands.get(command_id)
            return None if errand is None or self._forgettable(errand, now_ns, synced) else errand

    def accept(self, errand: Errand, *, must_last: bool) -> Errand:
        """Enter a new errand. Returns `errand`, which is on disk then; or the one that is there already.

        Waits for the disk. Where that takes no writes the errand is kept in memory alone; with `must_last` it is not
        kept at all, and RefusedError `store_unwritable` raised. Raises RefusedError `busy` where there is no room.
        """
        if not self._loaded:
            self.open()
        now_ns, synced = self._clock.monotonic_ns(), self._clock_synced()
        with self._lock:
            known = self._errands.get(errand.command_id)
            if known is not None and not self._forgettable(known, now_ns, synced):
                return known
            for old in [each for each in self._errands.values() if self._forgettable(each, now_ns, synced)]:
                self._remove(old)
            # one that is forgotten too early could be obeyed twice: rather none than that
            if len(self._errands) >= self._capacity:
                raise RefusedError(
                    "more commands than can be remembered have not expired yet",
                    code="busy",
                    remedy="let commands expire sooner",
                    retryable=True,
                )
            errand.place, self._next_place = self._next_place, self._next_place + 1
            self._errands[errand.command_id] = errand
            self._change(errand)
        if not errand.durable or self._save():
            return errand
        if must_last:
            with self._lock:
                self._remove(errand)
            raise RefusedError(
                f"this could not be remembered over a restart, so it is not obeyed: {self._trouble}",
                code="store_unwritable",
                where=None if self._path is None else str(self._path),
                remedy="look at the disk of the store (df, dmesg); the control socket takes commands all the same",
                retryable=True,
            )
        log.warning("command %s (%s) is remembered in memory only: %s", errand.command_id, errand.name, self._trouble)
        return errand

    def expired(self, errand: Errand) -> bool | None:
        """Whether it may not be obeyed any more; None: nobody can tell before the clock is synchronised."""
        if errand.expires_utc is None:
            return False
        now_ns, synced = self._clock.monotonic_ns(), self._clock_synced()
        with self._lock:
            self._settle(errand, now_ns, synced)
        end_ns = errand.t_forget_ns if errand.t_expires_ns is None else errand.t_expires_ns
        if now_ns >= end_ns or errand.boots > MAX_BOOTS:
            return True
        if synced:
            return self._clock.utc().timestamp() >= errand.expires_utc
        return None if errand.t_expires_ns is None else False

    def begin(self, errand: Errand) -> bool:
        """Note that it is obeyed from now on. Waits for the disk; False: that took no writes, and it is not begun."""
        with self._lock:
            payload, errand.state, errand.payload = errand.payload, "begun", None
            self._change(errand)
        if not errand.durable or self._save():
            return True
        with self._lock:
            errand.state, errand.payload = "accepted", payload
            self._change(errand)
        return False

    def finish(self, errand: Errand, reply: Reply) -> None:
        """Note what became of it. Waits for the disk; one that takes no writes is tried again with the next change."""
        with self._lock:
            errand.reply, errand.payload, errand.state = reply, None, "finished"
            self._change(errand)
        if errand.durable:
            self._save()

    # ---- under the leaf lock

    def _change(self, errand: Errand) -> None:
        if errand.durable:
            self._changed.add(errand.command_id)

    def _remove(self, errand: Errand) -> None:
        del self._errands[errand.command_id]
        self._change(errand)

    def _forgettable(self, errand: Errand, now_ns: int, synced: bool) -> bool:
        self._settle(errand, now_ns, synced)
        return errand.state == "finished" and now_ns >= errand.t_forget_ns

    def _settle(self, errand: Errand, now_ns: int, synced: bool) -> None:
        """With the time of day known, say by the clock that never jumps when an errand of an earlier boot expires."""
        if not synced or errand.t_expires_ns is not None or errand.expires_utc is None:
            return
        errand.t_expires_ns = now_ns + self._ahead_ns(errand.expires_utc)
        errand.t_forget_ns = now_ns + self._ahead_ns(errand.forget_utc)
        self._change(errand)

    def _ahead_ns(self, utc_s: float | None) -> int:
        ahead_s = MAX_KEEP_S if utc_s is None else utc_s - self._clock.utc().timestamp()
        return int(min(max(ahead_s, 0.0), MAX_KEEP_S) * 1e9)

    # ---- the disk

    def _save(self) -> bool:
        """Bring the file to what is in memory. False: it cannot be written."""
        if self._path is None:
            return True
        with self._disk:
            for _ in range(2):  # a damaged file first, a fresh one then
                if self._closed:
                    return False
                try:
                    self._write(self._path)
                except JournalFileError as error:
                    self._drop_file()
                    if not error.corrupt or not self._set_aside(self._path, error):
                        self._fail(str(error))
                        return False
                else:
                    if self._trouble is not None:
                        log.info("%s can be written again", self._path)
                        self._trouble = None
                    return True
            return False

    def _write(self, path: Path) -> None:
        if self._file is None:
            self._file = JournalFile(path)
            if not self._loaded:
                self._take(self._file.load())
                self._loaded = True
            if self._file.fresh:
                with self._lock:
                    for errand in self._errands.values():
                        self._change(errand)
        with self._lock:
            changed, self._changed = self._changed, set()
            found = {each: self._errands.get(each) for each in changed}
            rows = [self._row(errand) for errand in found.values() if errand is not None and errand.durable]
        written = {row.command_id for row in rows}
        try:
            if changed or self._trouble is not None:
                self._file.write(rows, changed - written)
        except JournalFileError:
            with self._lock:
                self._changed |= changed
            raise

    def _row(self, errand: Errand) -> Row:
        return Row(
            command_id=errand.command_id,
            place=errand.place,
            fingerprint=errand.fingerprint,
            name=errand.name,
            door=errand.door,
            payload=errand.payload,
            state=errand.state,
            boot=self._boot,
            boots=errand.boots,
            t_expires_ns=errand.t_expires_ns,
            t_forget_ns=errand.t_forget_ns,
            expires_utc=errand.expires_utc,
            forget_utc=errand.forget_utc,
            reply=None if errand.reply is None else errand.reply.to_json().decode(),
        )

    def _take(self, rows: list[Row]) -> None:
        """Into memory, as an earlier start left them. What is in memory already is newer."""
        try:
            errands = [self._errand(row) for row in rows]
        except (TypeError, ValueError) as error:
            raise JournalFileError(f"a row cannot be read: {error}", corrupt=True) from error
        with self._lock:
            for errand, row in zip(errands, rows, strict=True):
                if errand.command_id in self._errands:
                    continue
                self._next_place = max(self._next_place, errand.place + 1)
                self._errands[errand.command_id] = errand
                if errand.state != "finished":
                    self._pending.append(errand)
                if errand.boots > MAX_BOOTS and errand.state == "finished":
                    self._remove(errand)
                elif row.boot != self._boot:
                    self._change(errand)

    def _errand(self, row: Row) -> Errand:
        errand = Errand(
            row.command_id, row.fingerprint, row.name, row.door, row.payload, row.t_expires_ns, row.t_forget_ns,
            row.expires_utc, row.forget_utc, row.state, boots=row.boots, place=row.place,
            reply=None if row.reply is None else Reply.model_validate_json(row.reply),
        )  # fmt: skip
        if row.boot != self._boot:
            now_ns = self._clock.monotonic_ns()
            errand.t_expires_ns = None
            if self._clock_synced():
                errand.t_expires_ns = None if row.expires_utc is None else now_ns + self._ahead_ns(row.expires_utc)
                errand.t_forget_ns = now_ns + self._ahead_ns(row.forget_utc)
            else:
                errand.t_forget_ns = now_ns + self._ahead_ns(None)
                errand.boots += 1
        return errand

    def _drop_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _set_aside(self, path: Path, error: JournalFileError) -> bool:
        """Whether a fresh file can be begun."""
        words = f"{path} is damaged: {error}" + put_aside(path)
        if path.exists():
            return False
        # sqlite lets go of a WAL that has no database: its name comes second, in case we end in between
        with contextlib.suppress(OSError):
            REAL.rename(path.with_name(path.name + "-wal"), path.with_name(path.name + ".damaged-wal"))
        if not self._loaded:
            words += "; commands that were accepted before this start may be obeyed twice, or not at all"
        self._loaded, self._damage = True, words
        log.error("%s", self._damage)
        return True

    def _fail(self, words: str) -> None:
        trouble = f"{self._path} cannot be written: {words}"
        if trouble != self._trouble:
            log.error("%s; commands over MQTT that change something are refused", trouble)
        self._trouble = trouble
