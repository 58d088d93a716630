"""The spool on a good disk: numbers, order, limits, threads, kills and starts."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from edge_runtime.mqtt.outbox import Lane
from edge_runtime.telemetry.spool import Gap, LaneLimits, SpoolOptions
from tests.awaiting import wait_until
from tests.conftest import ROOT
from tests.telemetry.spools import SLOW, Opened, said

QUICK = SpoolOptions(commit_s=0.02, rows_out=1_000_000)


def test_rows_are_seen_once_they_are_committed_in_order(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        as_lane: Lane = opened.spool.lane("telemetry")
        opened.put("a", "b", "c")
        assert opened.words() == []
        assert as_lane.waiting() == 3
        opened.flush()
        assert opened.words() == ["a", "b", "c"]
        assert opened.seqs() == [0, 1, 2]
        assert as_lane.waiting() == 3
        assert (as_lane.name, as_lane.dropped(), opened.words("event")) == ("telemetry", 0, [])


def test_a_commit_comes_by_itself_and_wakes_the_pump(tmp_path: Path) -> None:
    with Opened(tmp_path, options=QUICK) as opened:
        woken = threading.Event()
        opened.spool.lane("telemetry").on_put(woken.set)
        opened.put("a")
        assert woken.wait(5)
        assert [row.token for row in opened.spool.lane("telemetry").read(-1, 5)] == [0]


def test_many_rows_are_committed_before_the_interval_is_over(tmp_path: Path) -> None:
    with Opened(tmp_path, options=SpoolOptions(commit_s=3600, commit_rows=10)) as opened:
        woken = threading.Event()
        opened.spool.lane("telemetry").on_put(woken.set)
        opened.put(*"abcdefghij")
        assert woken.wait(5)


def test_done_rows_are_gone_for_good_and_unknown_tokens_are_ignored(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        opened.put("a", "b", "c", "d")
        opened.flush()
        lane = opened.spool.lane("telemetry")
        lane.done([0, 99])  # 0 was never read
        assert opened.seqs() == [0, 1, 2, 3]
        lane.done([0, 2, 2, 99])
        lane.refuse(3, "the broker refused it")
        assert opened.words() == ["b"]
        assert lane.waiting() == 1
        opened.flush()
        assert (lane.waiting(), lane.dropped(), opened.words()) == (1, 0, ["b"])
    with Opened(tmp_path, "s2") as opened:
        assert opened.words() == ["b"]


def test_a_reconnect_reads_everything_again(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        opened.put(*(str(number) for number in range(1000)))
        opened.flush()
        assert len(opened.read_all(limit=20)) == 1000
        opened.spool.lane("telemetry").done(range(0, 1000, 2))
        assert opened.seqs() == list(range(1, 1000, 2))
        assert [row.token for row in opened.read_all(after=900)] == list(range(901, 1000, 2))


@pytest.mark.parametrize("how", ["raises", "no bytes"])
def test_a_message_that_cannot_be_made_is_lost_alone(tmp_path: Path, how: str) -> None:
    def make(seq: int) -> bytes:
        if how == "raises":
            raise ZeroDivisionError(seq)
        return "text"  # type: ignore[return-value]

    with Opened(tmp_path) as opened:
        opened.put("a")
        opened.spool.append("telemetry", "t", make)
        opened.put("b")
        opened.flush()
        assert (opened.words(), opened.seqs()) == (["a", "b"], [0, 1])
        assert opened.spool.lane("telemetry").dropped() == 1


def test_numbers_go_on_after_a_clean_stop_also_when_all_was_delivered(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        assert opened.spool.previous is None
        opened.put("a", "b")
        opened.put("e", lane="event")
        opened.flush()
        opened.seqs()
        opened.spool.lane("telemetry").done([0, 1])
        assert opened.close()
    with Opened(tmp_path, "s2", boot="b2") as opened:
        previous = opened.spool.previous
        assert previous is not None
        assert (previous.session, previous.boot, previous.clean) == ("s1", "b1", True)
        assert previous.last_seq == {"telemetry": 1, "event": 0}
        assert previous.last_utc == "2026-03-01T12:00:00.000Z"
        opened.put("c")
        opened.flush()
        assert (opened.words(), opened.seqs(), opened.seqs("event")) == (["c"], [2], [0])


@pytest.mark.parametrize(
    "limits", [LaneLimits("telemetry", 10, 1 << 20), LaneLimits("telemetry", 1000, 10 * (64 + 3 + 4))]
)
def test_the_oldest_rows_make_room_and_are_counted(tmp_path: Path, limits: LaneLimits) -> None:
    lanes = (LaneLimits("event", 100, 1 << 20), limits)
    with Opened(tmp_path, lanes=lanes) as opened:
        opened.put("e", lane="event")
        opened.put(*"abcdefgh")
        opened.flush()
        opened.seqs()
        opened.spool.lane("telemetry").done([0])
        opened.put(*"ijklmn")
        opened.flush()
        kept = opened.seqs()
        dropped = 13 - len(kept)
        assert 8 <= len(kept) <= 10
        assert kept == list(range(14 - len(kept), 14))
        assert opened.spool.lane("telemetry").dropped() == dropped
        assert opened.gaps == [Gap("telemetry", 1, dropped, dropped, "full")]
        assert opened.words("event") == ["e"]  # telemetry cannot evict events


def test_threads_may_append_at_once(tmp_path: Path) -> None:
    with Opened(tmp_path, options=QUICK) as opened:

        def work(thread: int) -> None:
            for number in range(500):
                opened.spool.append("telemetry", "t", said(f"{thread} {number}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        opened.flush()
        rows = [word.split() for word in opened.words()]
        assert opened.seqs() == list(range(2000))
        for number in range(4):
            assert [int(row[1]) for row in rows if row[0] == str(number)] == list(range(500))


def test_append_returns_at_once_while_the_disk_hangs(tmp_path: Path) -> None:
    hangs = threading.Event()
    with Opened(tmp_path) as opened:
        opened.spool.append("telemetry", "t", lambda seq: b"%d" % seq if hangs.wait(10) else b"")
        assert not opened.spool.flush(0.01)
        start_ns = time.monotonic_ns()
        opened.put(*(str(number) for number in range(1000)))
        assert opened.spool.lane("telemetry").read(-1, 5) == []
        assert opened.spool.lane("telemetry").waiting() == 1001
        assert time.monotonic_ns() - start_ns < 1e9
        assert not opened.spool.close(0.01)
        hangs.set()
        assert opened.close()


def test_more_than_can_be_pending_drops_the_oldest(tmp_path: Path) -> None:
    hangs = threading.Event()
    with Opened(tmp_path) as opened:
        opened.spool.append("telemetry", "t", lambda seq: b"%d x" % seq if hangs.wait(10) else b"")
        assert not opened.spool.flush(0.01)
        opened.put(*(str(number) for number in range(10_005)))
        hangs.set()
        opened.flush()
        assert opened.words()[:2] == ["x", "5"]
        assert opened.seqs()[:2] == [0, 6]
        assert opened.gaps == [Gap("telemetry", 1, 5, 5, "pending")]
        assert opened.spool.lane("telemetry").dropped() == 5


def test_what_a_kill_leaves(tmp_path: Path) -> None:
    commit_s = 0.05
    sent: set[int] = set()
    for turn in range(3):
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.telemetry.spool_child", str(tmp_path), str(commit_s)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(50 + 37 * turn)]
        child.kill()
        new = {int(line) for line in (*lines, *child.stdout) if line.endswith(b"\n")}
        child.stdout.close()
        child.wait(10)
        assert len(sent & new) <= 20
        sent |= new
        with Opened(tmp_path, "after") as opened:
            previous = opened.spool.previous
            assert previous is not None
            assert (previous.clean, previous.session) == (False, "killed")
            seqs = opened.seqs()
            # all that was not sent is there, little of what was, and numbers go on without a gap
            assert seqs == list(range(seqs[0], previous.last_seq["telemetry"] + 1))
            assert sent >= set(range(seqs[0]))
            assert len(sent & set(seqs)) <= 20
            opened.put(f"turn {turn}")
            opened.flush()
            assert opened.seqs()[-1] == seqs[-1] + 1
            assert (opened.alarms, opened.gaps) == ([], [])


def test_a_row_survives_a_kill_one_commit_interval_after_it_was_put(tmp_path: Path) -> None:
    program = (
        "import os, sys, time; from pathlib import Path; from tests.telemetry.spools import *\n"
        "opened = Opened(Path(sys.argv[1]), options=SpoolOptions(commit_s=0.2))\n"
        "opened.put('kept'); time.sleep(0.6); opened.put('lost?'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT, check=False, timeout=60)
    with Opened(tmp_path, "s2") as opened:
        assert opened.words()[0] == "kept"


def test_after_a_power_cut_numbers_that_may_have_been_sent_are_skipped(tmp_path: Path) -> None:
    """The kernel's page cache is gone with the power: the file is older than what was sent from it."""
    cut = tmp_path / "cut"
    cut.mkdir()
    store = tmp_path / "store"
    store.mkdir()
    with Opened(store) as opened:
        opened.put("a")
        opened.flush()
        for file in store.iterdir():
            (cut / file.name).write_bytes(file.read_bytes())
        opened.put("sent, and forgotten by the disk")
        opened.flush()
        assert opened.seqs() == [0, 1]
    with Opened(cut, "s2", boot="b2") as opened:
        assert opened.words() == ["a"]
        opened.put("b")
        opened.flush()
        assert opened.seqs() == [0, 1000]


def test_numbers_beyond_the_reserve_reserve_more(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        opened.put(*(str(number) for number in range(2500)))
        opened.flush()
        (tmp_path / "spool.sqlite-wal").write_bytes(b"")
        opened.spool._keeper._file = None  # a power cut: nothing is closed
    (tmp_path / "spool.sqlite").unlink()
    with Opened(tmp_path, "s2", boot="b2") as opened:
        opened.put("b")
        opened.flush()
        assert opened.seqs()[0] >= 2500


@pytest.mark.parametrize("rows", [20_000, pytest.param(100_000, marks=pytest.mark.full)])
def test_a_long_backlog_opens_at_once(tmp_path: Path, rows: int) -> None:
    with Opened(tmp_path) as opened:
        for first in range(0, rows, 5000):
            opened.put(*("x" * 300 for _ in range(first, first + 5000)))
            opened.flush()
    start_ns = time.monotonic_ns()
    with Opened(tmp_path, "s2") as opened:
        assert opened.spool.lane("telemetry").waiting() == rows
        lane = opened.spool.lane("telemetry")
        wait_until(lambda: lane.read(-1, 20), 5, "the first rows")
        assert time.monotonic_ns() - start_ns < 1e9


def test_a_backlog_drains_fast_though_little_is_out(tmp_path: Path) -> None:
    count = 6000
    with Opened(tmp_path) as opened:
        opened.put(*(str(number) for number in range(count)))
        assert opened.close()
    with Opened(tmp_path, "s2", options=SpoolOptions()) as opened:
        lane, visible = opened.spool.lane("telemetry"), threading.Event()
        lane.on_put(visible.set)
        start_ns, seqs = time.monotonic_ns(), [-1]
        while len(seqs) <= count and time.monotonic_ns() - start_ns < 20e9:
            visible.clear()
            rows = lane.read(seqs[-1], 20)
            assert lane.out() <= 20
            lane.done([row.token for row in rows])
            seqs += [row.token for row in rows]
            if not rows:
                visible.wait(1)
        assert seqs[1:] == list(range(count))
        assert count / ((time.monotonic_ns() - start_ns) / 1e9) > 3000


def test_status_and_ticks(tmp_path: Path) -> None:
    with Opened(tmp_path, options=SLOW) as opened:
        opened.put("a")
        status = opened.spool.status()
        assert (status.on_disk, status.reason) == (True, None)
        assert status.waiting == {"event": 0, "telemetry": 1}
        assert status.dropped == {"event": 0, "telemetry": 0}
        thread, tick_ns = opened.spool.ticks()["spool"]
        assert thread.name == "spool"
        wait_until(lambda: opened.spool.ticks()["spool"][1] > tick_ns)


def test_an_unknown_lane_is_a_mistake(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened, pytest.raises(KeyError):
        opened.spool.append("rumours", "t", said("a"))
