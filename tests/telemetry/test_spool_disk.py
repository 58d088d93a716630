"""The spool on a bad disk: damaged files, full and read-only ones. Nothing is raised, and it goes on."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from edge_runtime.telemetry.spool import LANES, Gap, LaneLimits, SpoolOptions
from edge_runtime.telemetry.spool_file import SpoolFile, SpoolFileError
from edge_runtime.telemetry.spool_floors import FloorFile, Floors
from edge_runtime.telemetry.spool_keeper import Telling
from tests.awaiting import wait_until
from tests.telemetry.spools import SLOW, Opened, turn_of

RETRYING = SpoolOptions(commit_s=0.01, retry_s=0.05, rows_out=1_000_000)
FILE = "spool.sqlite"


def filled(store: Path, count: int = 50) -> None:
    with Opened(store) as opened:
        opened.put(*(f"{number} {'x' * 500}" for number in range(count)))
        assert opened.close()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "random": lambda data: random.Random(1).randbytes(len(data)),
    "zeros": lambda data: bytes(len(data)),
    "empty": lambda _data: b"",
    "header only": lambda data: data[:100],
    "no database": lambda _data: b"hello",
    "another version": lambda data: data[:60] + (99).to_bytes(4, "big") + data[64:],
    "first page": lambda data: data[:100] + random.Random(1).randbytes(3900) + data[4000:],
}


@pytest.mark.parametrize("how", list(DAMAGE))
def test_a_damaged_file_is_set_aside_at_the_start(tmp_path: Path, how: str) -> None:
    filled(tmp_path)
    path = tmp_path / FILE
    damaged = DAMAGE[how](path.read_bytes())
    path.write_bytes(damaged)
    with Opened(tmp_path, "s2") as opened:
        assert opened.alarms == ["spool_corrupt"]
        assert opened.spool.previous is None
        assert (tmp_path / f"{FILE}.corrupt-1").read_bytes() == damaged
        opened.put("a")
        opened.flush()
        assert opened.words() == ["a"]
        assert opened.seqs()[0] >= 50
        assert opened.spool.status().on_disk
        assert opened.close()
    with Opened(tmp_path, "s3") as opened:
        assert (opened.words(), opened.alarms) == (["a"], [])


@pytest.mark.parametrize("how", ["truncated", "a page", "all pages"])
def test_damage_that_shows_only_later(tmp_path: Path, how: str) -> None:
    filled(tmp_path, 500)
    path = tmp_path / FILE
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: 1024 * (len(data) // 2048)])
    else:
        noise = random.Random(2)
        for page in (len(data) // 2048,) if how == "a page" else range(10, len(data) // 1024):
            data[page * 1024 : page * 1024 + 1024] = noise.randbytes(1024)
        path.write_bytes(data)
    with Opened(tmp_path, "s2") as opened:
        opened.put("a")
        opened.spool.flush(10)
        opened.put("b")
        opened.flush()
        first = opened.read_all()
        opened.spool.lane("telemetry").done([row.token for row in first])
        opened.flush()
        opened.put("c")
        opened.flush()
        again = opened.read_all()
        # whatever could be read was read in order, and what came new was not lost
        assert [row.token for row in first] == sorted({row.token for row in first})
        new = [row.message.payload.split()[1] for row in (*first, *again) if row.token >= 500]
        assert new == [b"a", b"b", b"c"]
        assert set(opened.alarms) <= {"spool_corrupt"}
        assert opened.spool.status().on_disk


def test_damage_while_it_runs_keeps_what_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Opened(tmp_path) as opened:
        opened.put("a", "b", "c")
        opened.flush()
        opened.spool.lane("telemetry").read(-1, 1)
        real = SpoolFile.write

        def fail_once(self: SpoolFile, *_: object, **_more: object) -> object:
            monkeypatch.setattr(SpoolFile, "write", real)
            raise SpoolFileError("database disk image is malformed", corrupt=True)

        monkeypatch.setattr(SpoolFile, "write", fail_once)
        opened.put("d")
        opened.flush()
        assert opened.alarms == ["spool_corrupt"]
        assert opened.words() == ["a", "b", "c", "d"]
        assert opened.seqs() == [0, 1, 2, 3] or opened.seqs()[-1] >= 3
        assert opened.spool.lane("telemetry").waiting() == 4
        assert opened.gaps == []
        assert opened.close()
    with Opened(tmp_path, "s2") as opened:
        assert opened.words() == ["a", "b", "c", "d"]


def test_rows_that_a_damaged_file_takes_along_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path, 1000)
    with Opened(tmp_path, "s2") as opened:
        monkeypatch.setattr(SpoolFile, "load", _malformed)
        monkeypatch.setattr(SpoolFile, "rescue", lambda *_: [])
        opened.spool.lane("telemetry").read(-1, 10)
        wait_until(lambda: opened.gaps)
        assert opened.gaps == [Gap("telemetry", 0, 999, 1000, "corrupt")]
        assert opened.spool.lane("telemetry").dropped() == 1000
        assert opened.spool.lane("telemetry").waiting() == 0


def _malformed(*_: object) -> tuple[list[object], bool]:
    raise SpoolFileError("database disk image is malformed", corrupt=True)


def test_only_the_newest_damaged_files_are_kept(tmp_path: Path) -> None:
    for number in range(1, 6):
        (tmp_path / FILE).write_bytes(b"damage %d" % number)
        with Opened(tmp_path, f"s{number}") as opened:
            assert opened.alarms == ["spool_corrupt"]
    kept = sorted(path.name for path in tmp_path.glob("*corrupt*"))
    assert kept == [f"{FILE}.corrupt-{number}" for number in (3, 4, 5)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        command = ["mount", "-t", "tmpfs", "-o", "size=1M", "tmpfs", str(folder)]
        mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    if not mounted:
        pytest.skip("no small file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_o2_a_full_disk(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with Opened(small_disk, options=RETRYING) as opened:
        opened.put("first")
        opened.flush()
        filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
        sent = ["first"]
        while opened.spool.status().on_disk:
            sent.append(f"{len(sent)} {'x' * 20_000}")
            opened.put(sent[-1])
            opened.spool.flush(10)
        assert opened.alarms == ["spool_memory"]
        assert "full" in (opened.spool.status().reason or "")
        assert opened.words() == sent
        sent.append("in memory")
        opened.put("in memory")
        wait_until(lambda: opened.words() == sent)
        opened.spool.lane("telemetry").done(opened.seqs()[:1])
        sent.pop(0)
        assert opened.words() == sent
        filler.unlink()
        wait_until(lambda: opened.spool.status().on_disk)
        assert opened.alarms == ["spool_memory", "spool_restored"]
        assert opened.words() == sent
        last = opened.seqs()[-1]
        assert opened.close()
    with Opened(small_disk, "s2") as opened:
        assert opened.words() == sent
        opened.put("next")
        opened.flush()
        assert opened.seqs()[-1] == last + 1


def test_a_disk_that_is_full_from_the_start_and_to_the_end(small_disk: Path) -> None:
    filled(small_disk, 2)
    filler = small_disk / "filler"
    for name in (FILE, f"{FILE}-wal"):
        (small_disk / name).unlink(missing_ok=True)
    filler.write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    with Opened(small_disk, "s2", options=SLOW) as opened:
        opened.put("a", "b")
        assert not opened.spool.flush(10)
        assert opened.alarms == ["spool_memory"]
        assert opened.words() == ["a", "b"]
        seqs = opened.seqs()
        assert seqs[0] >= 2
        assert not opened.close()
    filler.unlink()
    with Opened(small_disk, "s3") as opened:
        assert opened.words() == []
        opened.put("c")
        opened.flush()
        # the numbers of rows that were in memory only are not used again
        assert opened.seqs()[0] > seqs[-1]


def test_memory_has_limits_too(tmp_path: Path) -> None:
    store = tmp_path / "absent"
    lanes = (LaneLimits("event", 5, 1 << 20), LANES[1])
    with Opened(store, lanes=lanes) as opened:
        assert opened.alarms == ["spool_memory"]
        opened.put(*"abcdefgh", lane="event")
        assert not opened.spool.flush(10)
        assert opened.words("event") == list("defgh")
        assert (opened.spool.lane("event").dropped(), opened.spool.lane("event").waiting()) == (3, 5)
        opened.spool.lane("event").done(opened.seqs("event")[:2])
        assert not opened.spool.flush(10)
        assert opened.words("event") == list("fgh")
        assert opened.spool.lane("event").waiting() == 3
        assert not opened.close()


def test_more_in_memory_than_is_kept_ready(tmp_path: Path) -> None:
    with Opened(tmp_path / "absent") as opened:
        opened.put(*(str(number) for number in range(3000)))
        opened.spool.flush(10)
        assert opened.words() == [str(number) for number in range(3000)]


def test_a_store_that_comes_later(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Opened(store, options=RETRYING) as opened:
        opened.put("a")
        wait_until(lambda: opened.words() == ["a"])
        store.mkdir()
        wait_until(lambda: opened.spool.status().on_disk)
        opened.put("b")
        opened.flush()
        assert opened.words() == ["a", "b"]
        assert opened.alarms == ["spool_memory", "spool_restored"]
        assert opened.close()
    with Opened(store, "s2") as opened:
        assert opened.words() == ["a", "b"]


def test_what_was_delivered_from_memory_is_not_sent_again_when_the_disk_is_back(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Opened(store, options=replace(SLOW, commit_rows=10)) as opened:
        opened.put(*(str(number) for number in range(100)))
        opened.spool.flush(10)
        opened.spool.lane("telemetry").done(opened.seqs()[:50])
        store.mkdir()
        opened.flush()
        assert opened.seqs() == list(range(50, 100))
        assert opened.spool.lane("telemetry").waiting() == 50


def test_a_backlog_that_can_be_read_only_later_is_sent_though_newer_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full at the start: what is in memory goes first, and the pump is beyond what is in the file."""

    def full(*_: object) -> NoReturn:
        raise SpoolFileError("database or disk is full", corrupt=False)

    filled(tmp_path, 3)
    with Opened(tmp_path, "s2") as opened:
        assert opened.close()
    with monkeypatch.context() as patched:
        patched.setattr(SpoolFile, "begin", full)
        opened = Opened(tmp_path, "s3")
        opened.put("a", "b")
        opened.spool.flush(10)
    with opened:
        rows = opened.read_all()
        assert [row.token for row in rows] == [3, 4]
        opened.spool.lane("telemetry").done([3])
        opened.flush()
        lane = opened.spool.lane("telemetry")
        lane.read(4, 1)
        turn_of(opened.spool)
        # 4 is under way
        assert [row.token for row in (*lane.read(4, 1), *lane.read(0, 9), *opened.read_all(after=2))] == [0, 1, 2]
        opened.put("c")
        opened.flush()
        assert [row.token for row in opened.read_all(after=2)] == [5]
        # but not in the next session any more
        assert opened.seqs() == [0, 1, 2, 4, 5]


def test_a_backlog_on_disk_can_be_sent_while_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(self: SpoolFile, *_: object, **_more: object) -> object:
        raise SpoolFileError("attempt to write a readonly database", corrupt=False)

    with Opened(tmp_path, options=RETRYING) as opened:
        opened.put(*(str(number) for number in range(600)))
        opened.flush()
        with monkeypatch.context() as patched:
            patched.setattr(SpoolFile, "write", read_only)
            opened.put("new")
            wait_until(lambda: not opened.spool.status().on_disk)
            assert opened.words() == [*(str(number) for number in range(600)), "new"]
            opened.spool.lane("telemetry").done(range(600))
            assert opened.words() == ["new"]
            assert opened.spool.lane("telemetry").waiting() == 1
        wait_until(lambda: opened.spool.status().on_disk)
        assert opened.words() == ["new"]
        assert opened.close()
    with Opened(tmp_path, "s2") as opened:
        assert opened.words() == ["new"]


@pytest.fixture
def read_only_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose file system is mounted read-only; what was in it stays readable."""
    folder = tmp_path / "store"
    folder.mkdir()
    filled(folder, 3)
    mounted = os.geteuid() == 0 and shutil.which("mount") is not None
    if mounted:
        for options in (["--bind", str(folder), str(folder)], ["-o", "remount,ro,bind", str(folder)]):
            mounted = mounted and subprocess.run(["mount", *options], capture_output=True, check=False).returncode == 0
    if not mounted:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)
        pytest.skip("nothing can be mounted read-only here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_read_only_store(read_only_folder: Path) -> None:
    with Opened(read_only_folder, "s2") as opened:
        assert opened.alarms == ["spool_memory"]
        opened.put("a")
        assert not opened.spool.flush(10)
        assert opened.words() == ["a"]
        assert opened.seqs()[0] >= 3
        assert not opened.close()


def _broken(*_: object) -> NoReturn:
    raise RuntimeError("no")


def test_an_alarm_that_raises_does_no_harm(tmp_path: Path) -> None:
    lanes = (LANES[0], LaneLimits("telemetry", 1, 1 << 20))
    with Opened(tmp_path / "absent", lanes=lanes) as opened:
        opened.spool._keeper._telling = Telling(_broken, _broken, _broken)
        opened.put("a", "b")
        opened.spool.flush(10)
        assert opened.words() == ["b"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"reserved": {"event": "x"}, "in_memory": false}', b"\xff"])
def test_floors_that_cannot_be_read_are_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "spool.seq"
    assert FloorFile(path).read() is None
    path.write_bytes(text)
    assert FloorFile(path).read() is None
    floors = Floors({"event": 7, "telemetry": 1000}, True, {"event": 3})
    FloorFile(path).write(floors)
    assert FloorFile(path).read() == floors
    FloorFile(path).write(Floors({"event": 8}, False))
    assert FloorFile(path).read() == Floors({"event": 8}, False)


def test_numbers_that_could_not_be_reserved_are_reserved_with_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> NoReturn:
        raise OSError(5, "Input/output error")

    with Opened(tmp_path) as opened:
        with monkeypatch.context() as patched:
            patched.setattr(FloorFile, "write", failing)
            opened.put(*(str(number) for number in range(1500)))
            opened.flush()
        opened.put("a")
        opened.flush()
        floors = FloorFile(tmp_path / "spool.seq").read()
        assert floors is not None
        assert floors.reserved["telemetry"] > 1500


def test_both_files_lost_still_starts(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / FILE).write_bytes(b"?" * 5000)
    (tmp_path / "spool.seq").write_bytes(b"?")
    with Opened(tmp_path, "s2") as opened:
        opened.put("a")
        opened.flush()
        assert (opened.words(), opened.alarms) == (["a"], ["spool_corrupt"])
