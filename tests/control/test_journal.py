"""The journal: an id is obeyed once and an accepted command is not lost, over kills, boots, wrong clocks, bad disks."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from edge_runtime.control.dispatcher import Task
from edge_runtime.control.journal import JOURNAL_NAME, MAX_KEEP_S
from edge_runtime.records.commands import Reply
from tests.control.world import Killed, World, code_of


class JournalMachine(RuleBasedStateMachine):
    """Wishes are sent, sent again, obeyed, and cut short, in any order.

    The wall clock is right within 25 s while it is synchronised, and anything while it is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="journal-"))
        self.world = World(self.root)
        self.wishes: dict[str, dict[str, object]] = {}
        self.accepted: dict[str, Task] = {}
        self.replies: dict[str, Reply] = {}

    @rule(ahead_s=st.sampled_from([1.0, 60.0, 3000.0, 86_000.0]))
    def send(self, ahead_s: float) -> None:
        command_id = f"c{len(self.wishes)}"
        self.wishes[command_id] = self.world.wish(command_id, ahead_s)
        self.deliver(command_id)

    @precondition(lambda self: self.wishes)
    @rule(data=st.data(), door=st.sampled_from(["mqtt", "socket"]))
    def again(self, data: st.DataObject, door: str) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.wishes)))
        if door == "mqtt" or not self.world.synced:
            # (the socket obeys what has long expired while nobody knows the time)
            self.deliver(command_id)
            return
        reply = self.world.send(self.wishes[command_id])
        if command_id in self.replies and reply.ok:
            assert reply == self.replies[command_id]
        if code_of(reply) != "in_progress":
            self.replies.setdefault(command_id, reply)

    def deliver(self, command_id: str) -> None:
        taken = self.world.mqtt(self.wishes[command_id])
        if isinstance(taken, Task):
            assert command_id not in self.accepted
            assert command_id not in self.replies or not self.replies[command_id].ok
            self.accepted[command_id] = taken
        elif code_of(taken) == "in_progress":
            assert command_id in self.accepted
        elif command_id in self.replies and code_of(taken) not in ("expired", "clock_unsynced"):
            assert taken == self.replies[command_id]

    @precondition(lambda self: self.accepted)
    @rule(data=st.data(), dies=st.booleans(), reboot=st.booleans())
    def obey(self, data: st.DataObject, dies: bool, reboot: bool) -> None:
        command_id = data.draw(st.sampled_from(sorted(self.accepted)))
        self.world.die = dies
        try:
            reply = self.world.dispatcher.obey(self.accepted[command_id])
        except Killed:
            self.world.die = False
            self.kill(reboot=reboot)
            assert code_of(self.replies[command_id]) == "interrupted"
            return
        self.world.die = False
        if reply is None:
            assert not self.world.synced
        else:
            del self.accepted[command_id]
            self.replies[command_id] = reply

    @rule(reboot=st.booleans())
    def kill(self, reboot: bool) -> None:
        self.world.kill(reboot=reboot)
        replies, tasks = self.world.dispatcher.recover()
        for reply in replies:
            assert reply.id is not None
            assert code_of(reply) == "interrupted"
            del self.accepted[reply.id]
            self.replies[reply.id] = reply
        found = {task.errand.command_id: task for task in tasks if task.errand is not None}
        assert list(found) == list(self.accepted), "an accepted command was lost, came back, or lost its place"
        self.accepted = found

    @rule(seconds=st.sampled_from([0.5, 30.0, 100.0, 4000.0, 90_000.0]))
    def wait(self, seconds: float) -> None:
        self.world.now_s += seconds

    @rule(skew_s=st.sampled_from([0.0, 20.0, -20.0, 1e6, -1e6]))
    def set_clock(self, skew_s: float) -> None:
        self.world.skew_s = skew_s
        self.world.synced = abs(skew_s) <= 25

    @invariant()
    def once(self) -> None:
        twice = [what for what, count in Counter(self.world.notes).items() if count > 1]
        assert not twice

    def teardown(self) -> None:
        try:
            self.set_clock(0.0)
            for command_id, task in self.accepted.items():
                reply = self.world.dispatcher.obey(task)
                assert code_of(reply) in (None, "expired")
                assert (code_of(reply) is None) == (command_id in self.world.notes)
            self.once()
        finally:
            self.world.journal.close(1.0)
            shutil.rmtree(self.root)


# no telling how long a busy disk takes
TestJournalMachine = JournalMachine.TestCase
TestJournalMachine.settings = settings(
    max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class JournalMachineFull(JournalMachine):
    """The same, more often."""


JournalMachineFull.TestCase.settings = settings(TestJournalMachine.settings, max_examples=300, stateful_step_count=60)
TestJournalMachineFull = pytest.mark.full(JournalMachineFull.TestCase)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path / "world")
    yield world
    world.journal.close(1.0)


def test_what_was_begun_is_not_obeyed_again_and_what_was_accepted_is(world: World) -> None:
    world.die = True
    for command_id in ("begun", "accepted"):
        world.task(command_id)
    with pytest.raises(Killed):
        world.dispatcher.obey(world.task("first"))
    with pytest.raises(Killed):
        world.send(world.wish("at-the-socket"))
    world.die = False
    world.kill()
    replies, tasks = world.dispatcher.recover()
    assert [(reply.id, code_of(reply)) for reply in replies] == [("first", "interrupted")]
    assert "not known" in str(replies[0].error)
    assert [task.errand.command_id for task in tasks if task.errand is not None] == ["begun", "accepted"]
    for task in tasks:
        assert code_of(world.dispatcher.obey(task)) is None
    assert world.notes == ["first", "at-the-socket", "begun", "accepted"]
    world.kill()
    assert world.dispatcher.recover() == ([], [])
    # remembered at both doors, and whoever asks later
    for command_id, code in (("first", "interrupted"), ("at-the-socket", "interrupted"), ("accepted", None)):
        assert code_of(world.send(world.wish(command_id), "http")) == code
    assert world.notes == ["first", "at-the-socket", "begun", "accepted"]


def test_another_command_under_a_known_id_over_a_restart(world: World) -> None:
    wish = world.wish("c1")
    first = world.send(wish)
    world.kill()
    assert world.send(wish) == first, "whoever is quicker than the start finds it known, too"
    assert world.mqtt(wish) == first
    assert code_of(world.mqtt({**wish, "args": {"what": "else"}})) == "id_reused"
    assert code_of(world.mqtt(wish, "slow-note")) == "id_reused"


def test_it_expires_while_it_waits(world: World) -> None:
    task = world.task("c1", 10)
    world.now_s += 11
    reply = world.dispatcher.obey(task)
    assert code_of(reply) == "expired"
    assert world.notes == []
    world.task("c2", 10)
    world.now_s += 11
    world.kill()
    (task,) = world.dispatcher.recover()[1]
    assert code_of(world.dispatcher.obey(task)) == "expired"
    assert code_of(world.mqtt(world.wish("c2"))) == "id_reused"  # another expiry: another wish


def test_after_a_boot_it_waits_until_somebody_knows_the_time(world: World) -> None:
    """No battery behind the clock: a power cut, then 1970."""
    for command_id, ahead_s in (("short", 60.0), ("long", 600.0)):
        world.task(command_id, ahead_s)
    wishes = world.wish("long", 600.0)
    world.now_s += 120
    world.synced, world.skew_s = False, -1e9
    world.kill(reboot=True)
    tasks = world.dispatcher.recover()[1]
    assert [world.dispatcher.obey(task) for task in tasks] == [None, None]
    assert code_of(world.mqtt(wishes)) in ("in_progress", "id_reused")
    world.synced, world.skew_s = True, 0.0
    assert [code_of(world.dispatcher.obey(task)) for task in tasks] == ["expired", None]
    assert world.notes == ["long"]


def test_a_restart_within_a_boot_needs_no_clock(world: World) -> None:
    for command_id, ahead_s in (("short", 60.0), ("long", 600.0)):
        world.task(command_id, ahead_s)
    world.now_s += 120
    world.synced, world.skew_s = False, 1e9
    world.kill()
    tasks = world.dispatcher.recover()[1]
    assert [code_of(world.dispatcher.obey(task)) for task in tasks] == ["expired", None]


def test_nothing_is_kept_for_ever_by_a_device_that_never_knows_the_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_runtime.control.journal.MAX_BOOTS", 3)
    world.send(world.wish("c1", 60.0))
    world.synced = False
    for _ in range(3):
        world.kill(reboot=True)
        world.journal.open()
    assert world.journal.find("c1") is not None
    world.now_s += MAX_KEEP_S + 1
    assert world.journal.find("c1") is None
    world.send(world.wish("c2", 60.0))
    for boot in range(4):
        world.kill(reboot=True)
        world.journal.open()
        assert (world.journal.find("c2") is None) == (boot == 3)


def test_room_is_counted_over_a_restart(tmp_path: Path) -> None:
    world = World(tmp_path / "world", capacity=3)
    for number in range(3):
        world.send(world.wish(f"c{number}"))
    world.kill()
    world.journal.open()
    assert code_of(world.mqtt(world.wish("c3"))) == "busy"
    world.now_s += 125
    world.task("c4")
    world.kill()
    with sqlite3.connect(world.folder / JOURNAL_NAME) as db:
        assert db.execute("SELECT id FROM command").fetchall() == [("c4",)]
    db.close()
    world.journal.close(1.0)


def test_what_a_command_carried_is_not_kept(world: World) -> None:
    wish = {**world.wish("c1"), "args": {"what": "rtsp://admin:hunter2@10.0.0.9/"}}
    world.send(wish)
    files = list(world.folder.iterdir())
    assert {each.name for each in files} >= {JOURNAL_NAME, f"{JOURNAL_NAME}-wal"}
    assert [oct(each.stat().st_mode & 0o777) for each in files] == ["0o600"] * len(files)
    assert sum(each.read_bytes().count(b'"what"') for each in files) == 0


def test_what_changes_nothing_needs_no_disk(world: World) -> None:
    look = {**world.wish("look"), "args": {}}
    assert code_of(world.send(look, "mqtt", "look")) is None
    assert code_of(world.mqtt(look, "note")) == "id_reused"
    world.kill()
    world.journal.open()
    assert world.journal.find("look") is None


def test_a_command_that_another_version_does_not_know(world: World) -> None:
    world.task("c1")
    world.kill()
    world.dispatcher._commands.clear()
    ((reply,), tasks) = world.dispatcher.recover()
    assert (code_of(reply), tasks) == ("unknown_command", [])


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "header only": lambda data: data[:100],
    "no database": lambda _data: b"hello",
    "another version": lambda data: data[:60] + (99).to_bytes(4, "big") + data[64:],
    "a row": lambda data: data.replace(b"finished", b"vanished"),
    "a reply": lambda data: data.replace(b'{"device"', b'["device"'),
}


@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_damaged_file_is_put_aside(world: World, how: str) -> None:
    world.send(world.wish("c1"))
    world.journal.close(1.0)
    path = world.folder / JOURNAL_NAME
    damaged = DAMAGE[how](path.read_bytes())
    path.write_bytes(damaged)
    world.start()
    assert world.dispatcher.recover() == ([], [])
    (alarm,) = world.journal.alarms()
    assert "is damaged: " in alarm
    assert alarm.endswith(
        f"; kept as {JOURNAL_NAME}.damaged; commands that were accepted before this start may be obeyed twice, or not"
        " at all"
    )
    assert (world.folder / f"{JOURNAL_NAME}.damaged").read_bytes() == damaged
    assert code_of(world.send(world.wish("c2"), "mqtt")) is None
    world.kill()
    world.journal.open()
    assert world.journal.find("c2") is not None
    assert world.journal.alarms() == []


def test_damage_that_shows_while_it_runs_costs_nothing(world: World) -> None:
    first = world.send(world.wish("c1"))
    task = world.task("c2")
    world.journal._drop_file()  # else sqlite reads what it has in memory
    (world.folder / JOURNAL_NAME).write_bytes(b"hello")
    assert code_of(world.dispatcher.obey(task)) is None
    (alarm,) = world.journal.alarms()
    assert "is damaged" in alarm
    assert "twice" not in alarm
    world.kill()
    assert world.dispatcher.recover() == ([], [])
    assert world.journal.find("c1") is not None
    assert world.send(world.wish("c1", 60.0)) == first
    assert world.notes == ["c1", "c2"]


Mounted = tuple[World, Callable[[], None], Callable[[], None]]


@pytest.fixture(params=["full", "read-only"])
def troubled(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Mounted]:
    """A world whose store is a small file system, what breaks that, and what puts it right again."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    folder = tmp_path / "mounted"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], check=True)
    world = World(folder)
    filler = folder / "filler"

    def fill() -> None:
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
            while stream.write(bytes(4096)):
                pass

    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)

    try:
        if request.param == "full":
            yield world, fill, filler.unlink
        else:
            yield world, lambda: remount("ro"), lambda: remount("rw")
    finally:
        world.journal.close(1.0)
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("opened", [True, False])
def test_a_disk_that_takes_no_writes(troubled: Mounted, opened: bool, request: pytest.FixtureRequest) -> None:
    world, break_it, mend_it = troubled
    task = world.task("before") if opened else None
    if "read-only" in request.node.name:
        world.journal._drop_file()  # else nothing can be remounted
    break_it()
    # over MQTT it would be forgotten: refused, and everything else as ever
    refused = world.mqtt(world.wish("c1"))
    assert isinstance(refused, Reply)
    assert refused.error is not None
    assert (refused.error.code, refused.error.retryable) == ("store_unwritable", True)
    assert "control socket" in (refused.error.remedy or "")
    (alarm,) = world.journal.alarms()
    assert alarm.startswith(f"{world.folder / JOURNAL_NAME} cannot be written: ")
    assert code_of(world.send({**world.wish("look"), "args": {}}, "mqtt", "look")) is None
    # somebody waits at the socket
    done = world.send(world.wish("c2"))
    assert done.ok
    assert world.send(world.wish("c2")) == done
    assert world.notes == ["c2"]
    # what was accepted before is not begun without a note of it, and not given up
    if task is not None:
        assert world.dispatcher.obey(task) is None
    world.dispatcher.recover()
    assert world.journal.alarms() == [alarm]
    mend_it()
    assert world.dispatcher.recover() == ([], [])
    assert world.journal.alarms() == []
    if task is not None:
        assert code_of(world.dispatcher.obey(task)) is None
    assert code_of(world.dispatcher.obey(world.task("c1"))) is None
    world.kill()
    world.journal.open()
    assert world.journal.find("c2") is not None
    assert Counter(world.notes) == Counter(["c2", "c1", *(["before"] if task is not None else [])])
