"""What the spool may take on disk: the cap of its file, and the disk's reserve."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from edge_runtime.telemetry import spool_disk, spool_file
from edge_runtime.telemetry.spool import LANES, Gap, LaneLimits, SpoolOptions
from edge_runtime.telemetry.spool_file import SLACK_BYTES
from tests.telemetry.spools import SLOW, Opened
from tests.telemetry.test_spool_disk import small_disk

__all__ = ["small_disk"]

WIDE = (LaneLimits("event", 100_000, 1 << 30), LaneLimits("telemetry", 100_000, 1 << 30))
MIB = 1 << 20


def options(max_file_bytes: int | None = None, disk_reserve_bytes: int = 0) -> SpoolOptions:
    return SpoolOptions(
        SLOW.commit_s,
        500,
        SLOW.retry_s,
        SLOW.delete_s,
        SLOW.rows_out,
        max_file_bytes=max_file_bytes,
        disk_reserve_bytes=disk_reserve_bytes,
    )


def fill(opened: Opened, dice: random.Random, mib: float, lane: str = "telemetry") -> int:
    """Put so much that does not become smaller by being packed; the largest size that the file was seen to have."""
    left, largest = mib * MIB, 0
    while left > 0:
        for _ in range(20):
            body = dice.randbytes(dice.randrange(1, dice.choice([100, 900, 5000, 60_000])))
            left -= len(body)
            opened.spool.append(lane, "t", lambda seq, body=body: b"%d " % seq + body)  # type: ignore[misc]
        opened.flush()
        largest = max(largest, opened.spool._keeper.path.stat().st_size)
    return largest


def held(opened: Opened, lane: str = "telemetry") -> int:
    return sum(len(row.message.payload) for row in opened.read_all(lane))


def test_the_file_is_never_above_its_cap(tmp_path: Path) -> None:
    cap = 3 * MIB
    dice = random.Random(4)
    with Opened(tmp_path, lanes=WIDE, options=options(cap)) as opened:
        opened.put("first", lane="event")
        largest = fill(opened, dice, 6)
        assert cap // 2 < largest <= cap + SLACK_BYTES
        assert opened.words("event") == ["first"]
        (gap,) = opened.gaps
        assert (gap.lane, gap.from_seq, gap.reason) == ("telemetry", 0, "full")
        seqs = opened.seqs()
        assert seqs == list(range(gap.to_seq + 1, seqs[-1] + 1))
        assert opened.alarms == []
        # events may have the rest, but for what telemetry keeps in any case
        largest = fill(opened, dice, 4, "event")
        assert largest <= cap + SLACK_BYTES
        assert MIB // 2 < held(opened) < 2 * MIB
        assert opened.alarms == []
        assert opened.close()
    assert (tmp_path / "spool.sqlite").stat().st_size <= cap + SLACK_BYTES
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spool.seq", "spool.sqlite"]


def test_the_wal_is_bounded(tmp_path: Path) -> None:
    dice = random.Random(5)
    with Opened(tmp_path, lanes=WIDE, options=options()) as opened:
        for _ in range(2000):
            opened.spool.append("telemetry", "t", lambda seq: b"%d " % seq + dice.randbytes(3000))
        opened.flush()
        assert (tmp_path / "spool.sqlite-wal").stat().st_size < 4 * MIB
        assert len(opened.seqs()) == 2000


def test_a_row_that_is_larger_than_the_cap_goes_alone(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=WIDE, options=options(MIB)) as opened:
        opened.put("a")
        opened.spool.append("telemetry", "t", lambda seq: b"%d " % seq + random.Random(6).randbytes(MIB))
        opened.put("b")
        opened.flush()
        assert opened.words() == ["a", "b"]
        assert opened.gaps == [Gap("telemetry", 1, 1, 1, "full")]
        assert opened.alarms == []


def test_a_file_that_cannot_be_made_smaller_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Opened(tmp_path, lanes=WIDE, options=options()) as opened:
        fill(opened, random.Random(7), 3)
        assert opened.close()
    before = (tmp_path / "spool.sqlite").stat().st_size
    monkeypatch.setattr(spool_file, "_QUICK_VACUUM_BYTES", 0)
    with Opened(tmp_path, "s2", lanes=WIDE, options=options(2 * MIB)) as opened:
        fill(opened, random.Random(8), 2)
        assert opened.alarms == []
        assert held(opened) < 2 * MIB
        assert opened.close()
    assert (tmp_path / "spool.sqlite").stat().st_size <= before


def test_a_cap_that_was_lowered(tmp_path: Path) -> None:
    dice = random.Random(7)
    with Opened(tmp_path, lanes=WIDE, options=options()) as opened:
        fill(opened, dice, 4)
        last = opened.seqs()[-1]
        assert opened.close()
    path = tmp_path / "spool.sqlite"
    assert path.stat().st_size > 4 * MIB
    with Opened(tmp_path, "s2", lanes=WIDE, options=options(2 * MIB)) as opened:
        assert path.stat().st_size <= 2 * MIB + SLACK_BYTES
        (gap,) = opened.gaps
        assert (gap.from_seq, gap.reason) == (0, "full")
        assert opened.seqs() == list(range(gap.to_seq + 1, last + 1))
        assert fill(opened, dice, 2) <= 2 * MIB + SLACK_BYTES
        assert opened.alarms == []


def test_below_the_reserve_new_rows_replace_the_oldest(tmp_path: Path) -> None:
    free = 500 * MIB
    dice = random.Random(8)
    with Opened(
        tmp_path, lanes=WIDE, options=options(disk_reserve_bytes=200 * MIB), free_bytes=lambda _: free
    ) as opened:
        fill(opened, dice, 4)
        fill(opened, dice, 1.5, "event")
        assert opened.gaps == []
        events = len(opened.seqs("event"))
        before = (tmp_path / "spool.sqlite").stat().st_size
        free = 199 * MIB
        largest = fill(opened, dice, 4)
        assert largest <= max(before, 5.5 * MIB) + 2 * MIB  # what was in the WAL only
        settled = largest
        assert fill(opened, dice, 4) <= settled
        (gap,) = opened.gaps
        assert (gap.lane, gap.reason) == ("telemetry", "disk-reserve")
        assert len(opened.seqs("event")) == events
        assert (opened.alarms, opened.spool.status().reserve_touched) == (["spool_reserve"], True)
        free = 205 * MIB  # not yet
        opened.put("a")
        opened.flush()
        assert opened.alarms == ["spool_reserve"]
        free = 211 * MIB
        opened.put("b")
        opened.flush()
        assert opened.alarms == ["spool_reserve", "spool_reserve_over"]
        before = len(opened.seqs())
        fill(opened, dice, 1)
        assert opened.seqs()[0] == opened.gaps[0].to_seq + 1
        assert len(opened.seqs()) > before


def test_below_the_reserve_each_lane_may_have_a_little(tmp_path: Path) -> None:
    with Opened(
        tmp_path, lanes=WIDE, options=options(disk_reserve_bytes=200 * MIB), free_bytes=lambda _: MIB
    ) as opened:
        fill(opened, random.Random(9), 0.5)
        fill(opened, random.Random(9), 0.3, "event")
        assert opened.gaps == []
        fill(opened, random.Random(9), 3)
        assert {gap.lane for gap in opened.gaps} == {"telemetry"}
        assert MIB // 2 < held(opened) < 1.5 * MIB


def test_the_reserve_of_a_real_disk(small_disk: Path) -> None:
    def free_bytes() -> int:
        found = os.statvfs(small_disk)
        return found.f_bavail * found.f_frsize

    (small_disk / "filler").write_bytes(bytes(free_bytes() - 600_000))
    with Opened(
        small_disk, lanes=LANES, options=options(disk_reserve_bytes=500_000), free_bytes=spool_disk.free_bytes
    ) as opened:
        opened.put("a")
        opened.flush()
        assert opened.alarms == []
        with (small_disk / "filler").open("ab") as filler:
            filler.write(bytes(200_000))
        opened.put("b")
        opened.flush()
        assert opened.alarms == ["spool_reserve"]
        (small_disk / "filler").unlink()
        opened.put("c")
        opened.flush()
        assert opened.alarms == ["spool_reserve", "spool_reserve_over"]
        assert opened.words() == ["a", "b", "c"]


def test_a_disk_that_does_not_say_what_is_free(tmp_path: Path) -> None:
    def broken(_folder: Path) -> int:
        raise OSError("no")

    with Opened(tmp_path, options=options(disk_reserve_bytes=1), free_bytes=broken) as opened:
        opened.put("a")
        opened.flush()
        assert (opened.words(), opened.alarms) == (["a"], [])


@pytest.mark.parametrize("rows_out", [20, 8])
def test_no_more_rows_are_out_than_a_kill_may_send_again(tmp_path: Path, rows_out: int) -> None:
    with Opened(tmp_path, options=SpoolOptions(3600, rows_out=rows_out)) as opened:
        for lane in ("event", "telemetry"):
            opened.put(*(str(number) for number in range(50)), lane=lane)
        opened.flush()
        events, windows = opened.spool.lane("event"), opened.spool.lane("telemetry")
        first = opened.read_all("telemetry")
        assert len(first) == rows_out - 4
        assert len(opened.read_all("event")) == 4
        assert opened.read_all("telemetry") == first  # those again, and no others
        windows.done([row.token for row in first[:-1]])
        opened.flush()
        assert windows.out() == 1
        assert len(opened.read_all("telemetry")) == rows_out - 4
        assert events.out() + windows.out() == rows_out
