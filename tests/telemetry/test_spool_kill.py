"""A kill between any two things that reach the disk: nothing is unaccounted for, and no number is used twice."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from edge_runtime.telemetry import spool_file
from edge_runtime.telemetry.spool import LANES, Gap, SpoolOptions
from edge_runtime.telemetry.spool_aside import set_aside
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_floors import FloorFile
from tests.telemetry.spools import Opened, gap_words

OPTIONS = SpoolOptions(commit_s=3600.0, commit_rows=4, retry_s=3600.0, delete_s=3600.0, rows_out=1_000_000)
FILE = "spool.sqlite"


@dataclass
class Killed:
    """What a kill leaves: a copy of the store, and what the broker had by then."""

    store: Path
    delivered: set[int]
    next_seq: int


@dataclass
class World:
    """A store, of which a copy is made after each thing that reaches the disk."""

    folder: Path
    store: Path
    delivered: set[int] = field(default_factory=set)
    kills: list[Killed] = field(default_factory=list)
    opened: Opened | None = None
    sessions: int = 0

    def start(self) -> Opened:
        self.sessions += 1
        self.opened = Opened(self.store, f"s{self.sessions}", options=OPTIONS, gap_message=gap_words)
        return self.opened

    def deliver(self, most: int) -> None:
        assert self.opened is not None
        rows = self.opened.read_all()[:most]
        self.delivered |= {row.token for row in rows}
        self.opened.spool.lane("telemetry").done([row.token for row in rows])

    def snap(self) -> None:
        copied = self.folder / f"killed-{len(self.kills)}"
        if self.store.exists():
            shutil.copytree(self.store, copied)
        else:
            copied.mkdir()
        lane = None if self.opened is None else self.opened.spool.lane("telemetry")
        self.kills.append(Killed(copied, set(self.delivered), 0 if lane is None else lane.next_seq))

    @contextmanager
    def watched(self) -> Iterator[None]:
        def after(owner: object, name: str) -> object:
            real = getattr(owner, name)

            def wrapped(*args: object, **more: object) -> object:
                try:
                    return real(*args, **more)
                finally:
                    self.snap()

            return mock.patch.object(owner, name, wrapped)

        steps = [(FloorFile, "write"), (spool_file, "prepare"), (Path, "rename")]
        steps += [(SpoolFile, name) for name in ("begin", "_write", "close")]
        patches = [after(*step) for step in steps]
        for patch in patches:
            patch.start()  # type: ignore[attr-defined]
        try:
            yield
        finally:
            for patch in patches:
                patch.stop()  # type: ignore[attr-defined]


def numbers(first: int, count: int) -> list[str]:
    return [str(number) for number in range(first, first + count)]


def in_order(world: World) -> None:
    """Nothing goes wrong."""
    with world.start() as opened:
        opened.put(*numbers(0, 10))
        opened.flush()
        world.deliver(3)
        opened.put("more")
        opened.flush()


def damaged_before(world: World) -> None:
    """The file is damaged while nobody has it open, and a gap was pending."""
    path = world.store / FILE
    path.write_bytes(path.read_bytes()[:3000] + b"?" * 3000)
    in_order(world)


def damaged_in_between(world: World) -> None:
    """The open file turns out to be damaged; it can be read still."""

    def malformed(*_: object, **_more: object) -> object:
        write.stop()
        raise SpoolFileError("malformed", corrupt=True)

    with world.start() as opened:
        opened.put(*numbers(0, 10))
        opened.flush()
        world.deliver(3)
        opened.put("more")
        write = mock.patch.object(SpoolFile, "_write", malformed)
        write.start()
        opened.flush()


def disk_away_at_first(world: World, sent: int = 6) -> None:
    """The file cannot be opened for a while; what is in memory is sent meanwhile."""

    def full(*_: object, **_more: object) -> None:
        raise SpoolFileError("database or disk is full", corrupt=False)

    with mock.patch.object(SpoolFile, "begin", full):
        opened = world.start()
        opened.put(*numbers(0, 12))
        assert not opened.spool.flush(10)
        world.deliver(sent)
    with opened:
        opened.flush()
        world.deliver(2)


def all_sent_from_memory(world: World) -> None:
    disk_away_at_first(world, 12)


SCENES = [in_order, damaged_before, damaged_in_between, disk_away_at_first, all_sent_from_memory]


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("used", [False, True])
def test_a_kill_at_any_point(tmp_path: Path, scene: Callable[[World], None], used: bool) -> None:
    world = World(tmp_path, tmp_path / "store")
    world.store.mkdir()
    if used or scene is damaged_before:
        with world.start() as opened:
            opened.put(*numbers(0, 1200))
            opened.flush()
            world.deliver(1190)
            opened.flush()
            opened.spool.lane("telemetry").read(-1, 1)
            opened.spool.lane("telemetry").refuse(1190, "for this test")
            opened.flush()
    with world.watched():
        scene(world)
    assert len(world.kills) >= 8
    for number, kill in enumerate(world.kills):
        with Opened(kill.store, "next", options=OPTIONS, lanes=LANES) as opened:
            opened.put("new")
            opened.flush()
            waiting = opened.seqs()
            new = waiting[-1]
            covered = kill.delivered | set(waiting)
            for gap in (*opened.gaps, *opened.spool._keeper._gaps.said.values()):
                if gap.lane == "telemetry":
                    covered |= set(range(gap.from_seq, gap.to_seq + 1))
            assert new > max(kill.delivered, default=-1), (number, new)
            assert not set(range(new)) - covered, (number, sorted(set(range(new)) - covered)[:9])


def test_a_kill_while_a_damaged_file_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its main file alone would be an older one, in which the session before this one is the last."""
    store, killed = tmp_path / "store", tmp_path / "killed"
    store.mkdir()
    with Opened(store) as opened:
        opened.put("a")
        assert opened.close()
    with Opened(store, "s2") as opened:
        opened.put("b")
        opened.flush()
        shutil.copytree(store, killed)
    assert (killed / f"{FILE}-wal").exists()
    real = Path.rename

    def killed_after(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", mock.Mock(side_effect=InterruptedError))
        return real(path, target)

    with monkeypatch.context():
        monkeypatch.setattr(Path, "rename", killed_after)
        with pytest.raises(InterruptedError):
            set_aside(killed / FILE)
        monkeypatch.setattr(Path, "rename", real)
    with Opened(killed, "s3") as opened:
        opened.put("c")
        opened.flush()
        assert opened.seqs()[-1] > 1
        assert Gap("telemetry", 0, 1000, None, "skipped") in opened.gaps
