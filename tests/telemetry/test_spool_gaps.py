"""Gaps: what is noted, what becomes one, and when an event says it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_runtime.records.events import Event
from edge_runtime.telemetry import spool_saying
from edge_runtime.telemetry.events import EventWriter
from edge_runtime.telemetry.spool import Gap, LaneLimits, SpoolOptions
from edge_runtime.telemetry.spool_gaps import PENDING_GAPS, GapBook
from tests.awaiting import wait_until
from tests.telemetry.spools import FakeClock, Opened, gap_words, identity, turn_of

SMALL = (LaneLimits("event", 10, 1 << 20), LaneLimits("telemetry", 10, 1 << 20))
QUICK = SpoolOptions(commit_s=0.01, rows_out=1_000_000)


def gap_events(opened: Opened) -> list[str]:
    """What is said in the lane `event`, after a look that makes gaps be said."""
    opened.spool.lane("event").read(-1, 0)
    opened.spool.flush(10)
    return [row.message.payload.decode().split()[1] for row in opened.read_all("event") if row.message.topic == "t/gap"]


# --- the book


def test_what_adjoins_is_one_gap() -> None:
    book = GapBook()
    book.lost("telemetry", [1, 2], "full")
    book.lost("telemetry", [5], "full")
    book.lost("event", [3], "full")
    book.lost("telemetry", [3], "age")
    assert len(book.pending) == 4
    book.lost("telemetry", [3, 4], "full")
    assert Gap("telemetry", 1, 5, 5, "full") in book.pending
    assert len(book.pending) == 3
    book.add(Gap("telemetry", 6, 9, None, "full"))
    assert Gap("telemetry", 1, 9, None, "full") in book.pending


def test_refusals_are_one_gap_where_they_were_refused_for_the_same() -> None:
    book = GapBook()
    for seq, why in enumerate(["too large", "too large", "not authorised"]):
        book.lost("telemetry", [seq], "refused", why)
    assert book.pending == [
        Gap("telemetry", 0, 1, 2, "refused", "too large"),
        Gap("telemetry", 2, 2, 1, "refused", "not authorised"),
    ]


LOST = st.tuples(
    st.sampled_from(["event", "telemetry"]),
    st.sampled_from(["full", "refused"]),
    st.integers(0, 2000),
    st.integers(1, 3),
)


@given(st.lists(LOST, max_size=150, unique_by=lambda lost: lost[2]))
def test_few_gaps_stand_for_many_and_count_right(losses: list[tuple[str, str, int, int]]) -> None:
    book = GapBook()
    for lane, reason, seq, kind in losses:
        book.lost(lane, [seq], reason, f"detail {kind}" if reason == "refused" else None)
    assert len(book.pending) <= PENDING_GAPS
    for lane, reason, seq, _ in losses:
        found = [gap for gap in book.pending if (gap.lane, gap.reason) == (lane, reason)]
        assert any(gap.from_seq <= seq <= gap.to_seq for gap in found)
        expected = sum((other[0], other[1]) == (lane, reason) for other in losses)
        assert sum(gap.count or 0 for gap in found) == expected


# --- said


def test_a_month_without_a_reader_is_said_in_one_event(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=SMALL, gap_message=gap_words) as opened:
        for turn in range(50):
            opened.put(*(f"{turn}-{number}" for number in range(4)))
            opened.flush()
        assert opened.gaps == [Gap("telemetry", 0, 189, 190, "full")]
        assert opened.spool.status().gaps_pending == 1
        assert gap_events(opened) == ["telemetry:0:189:190:full"]
        assert (opened.gaps, opened.spool.status().gaps_pending) == ([], 0)
        # one that is on its way is not said again, and what comes meanwhile waits
        opened.put(*"abc")
        opened.flush()
        assert gap_events(opened) == ["telemetry:0:189:190:full"]
        assert opened.gaps == [Gap("telemetry", 190, 192, 3, "full")]
        assert opened.close()
    with Opened(tmp_path, "s2", lanes=SMALL, gap_message=gap_words) as opened:
        assert opened.gaps == [Gap("telemetry", 190, 192, 3, "full")]
        (row,) = opened.read_all("event")
        opened.spool.lane("event").done([row.token])
        assert gap_events(opened) == ["telemetry:190:192:3:full"]


def test_gaps_are_said_by_themselves_while_somebody_reads(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=SMALL, gap_message=gap_words, options=QUICK) as opened:
        opened.put(*(str(number) for number in range(15)))
        wait_until(lambda: opened.gaps)
        events = opened.spool.lane("event")
        wait_until(lambda: [row.message.topic for row in events.read(-1, 5)] == ["t/gap"], 5, "the event")
        assert (opened.gaps, opened.saved[-1]) == ([], ("event", 0))


def test_gaps_outlive_a_kill(tmp_path: Path) -> None:
    store, killed = tmp_path / "store", tmp_path / "killed"
    store.mkdir()
    with Opened(store, lanes=SMALL, gap_message=gap_words) as opened:
        opened.put(*(str(number) for number in range(15)))
        opened.flush()
        assert gap_events(opened) == ["telemetry:0:4:5:full"]
        opened.put(*"ab")
        opened.flush()
        shutil.copytree(store, killed)
    with Opened(killed, "s2", lanes=SMALL, gap_message=gap_words) as opened:
        assert opened.gaps == [Gap("telemetry", 5, 6, 2, "full")]
        assert gap_events(opened) == ["telemetry:0:4:5:full"]


def test_what_an_evicted_event_said_is_said_again(tmp_path: Path) -> None:
    with Opened(tmp_path, lanes=SMALL, gap_message=gap_words) as opened:
        opened.put(*(str(number) for number in range(11)))
        opened.flush()
        assert gap_events(opened) == ["telemetry:0:0:1:full"]
        opened.put(*(str(number) for number in range(11)), lane="event")
        opened.flush()
        assert set(opened.gaps) == {Gap("telemetry", 0, 0, 1, "full"), Gap("event", 0, 1, 2, "full")}


def test_what_a_refused_event_said_is_not_said_in_a_circle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool_saying, "_EVERY_S", 0.0)
    with Opened(tmp_path, lanes=SMALL, gap_message=gap_words) as opened:
        opened.put(*(str(number) for number in range(11)))
        opened.flush()
        assert gap_events(opened) == ["telemetry:0:0:1:full"]
        opened.spool.lane("event").refuse(0, "not authorised")
        again = {Gap("telemetry", 0, 0, 1, "full"), Gap("event", 0, 0, 1, "refused", "not authorised")}
        for _ in range(3):
            assert gap_events(opened) == []
            assert set(opened.gaps) == again
        monkeypatch.setattr(spool_saying, "_HELD_S", 0.0)
        opened.spool.lane("event")._reading_since_ns += 10**12  # another session of reading
        assert sorted(gap_events(opened)) == ["event:0:0:1:refused", "telemetry:0:0:1:full"]
        assert opened.spool.status().refused == {"event": 1, "telemetry": 0}


def test_a_gap_that_cannot_be_said_stays(tmp_path: Path) -> None:
    def broken(_gap: Gap) -> tuple[str, object]:
        raise ZeroDivisionError

    with Opened(tmp_path, lanes=SMALL, gap_message=broken) as opened:  # type: ignore[arg-type]
        opened.put(*(str(number) for number in range(11)))
        opened.flush()
        assert gap_events(opened) == []
        turn_of(opened.spool)
        assert opened.gaps == [Gap("telemetry", 0, 0, 1, "full")]


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        (Gap("telemetry", 3, 9, 5, "full"), "5 of the messages 3 to 9 of the lane telemetry will not arrive"),
        (Gap("event", 0, 999, None, "skipped"), "some, maybe, of the messages 0 to 999 of the lane event will not"),
        (
            Gap("event", 4, 4, 1, "refused", "not authorised (0x87)"),
            "it can never be delivered (not authorised (0x87))",
        ),
    ],
)
def test_the_event_of_a_gap(tmp_path: Path, gap: Gap, words: str) -> None:
    with Opened(tmp_path) as opened:
        topic, make = EventWriter(identity(), FakeClock(), lambda: True, opened.spool).gap_message(gap)
    assert topic == "edge/v1/gate-07/event/spool-gap"
    event = Event.model_validate_json(make(17))
    assert (event.seq, event.kind, event.severity) == (17, "spool-gap", "warning")
    assert words in event.message
    expected = {"lane": gap.lane, "from_seq": gap.from_seq, "to_seq": gap.to_seq, "count": gap.count}
    expected["reason"] = gap.reason
    if gap.detail is not None:
        expected["detail"] = gap.detail
    assert json.loads(make(17))["data"] == expected


# --- what is noted, and why


def test_a_refused_row_is_a_gap_and_is_kept(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        opened.put("a", "x" * 2000, "c")
        opened.flush()
        opened.read_all()
        opened.spool.lane("telemetry").refuse(1, "too large")
        opened.flush()
        assert opened.gaps == [Gap("telemetry", 1, 1, 1, "refused", "too large")]
        assert opened.close()
    with Opened(tmp_path, "s2") as opened:
        assert opened.gaps == [Gap("telemetry", 1, 1, 1, "refused", "too large")]
        assert opened.seqs() == [0, 2]


def test_numbers_that_a_power_cut_may_have_taken_are_a_gap(tmp_path: Path) -> None:
    store, cut = tmp_path / "store", tmp_path / "cut"
    store.mkdir()
    with Opened(store) as opened:
        opened.put("a")
        opened.flush()
        shutil.copytree(store, cut)
    with Opened(cut, "s2", boot="b2") as opened:
        assert set(opened.gaps) == {Gap("telemetry", 1, 999, None, "skipped"), Gap("event", 0, 999, None, "skipped")}
        assert opened.seqs() == [0]
        opened.put("b")
        opened.flush()
        assert opened.seqs() == [0, 1000]


def test_after_a_power_cut_in_a_session_that_wrote_nothing_numbers_are_skipped_too(tmp_path: Path) -> None:
    """That it had begun is written with an fsync; what it sent may be forgotten."""
    store, cut = tmp_path / "store", tmp_path / "cut"
    store.mkdir()
    with Opened(store) as opened:
        opened.put("a")
        assert opened.close()
    with Opened(store, "s2"):
        shutil.copytree(store, cut)
    with Opened(cut, "s3", boot="b2") as opened:
        opened.put("b")
        opened.flush()
        assert opened.seqs() == [0, 1001]


@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_a_lost_file_leaves_a_gap_from_where_all_was_settled(tmp_path: Path, how: str) -> None:
    with Opened(tmp_path) as opened:
        opened.put(*(str(number) for number in range(1500)))
        opened.flush()
        opened.spool.lane("telemetry").done(opened.seqs()[:1200])
        opened.flush()
        opened.put(*(str(number) for number in range(1500)))  # reserves more numbers, and notes what is settled
        opened.flush()
        assert opened.close()
    if how == "missing":
        (tmp_path / "spool.sqlite").unlink()
    else:
        (tmp_path / "spool.sqlite").write_bytes(b"x" * 5000)
    with Opened(tmp_path, "s2") as opened:
        (gap,) = [gap for gap in opened.gaps if gap.lane == "telemetry"]
        assert (gap.from_seq, gap.count, gap.reason) == (1200, None, "skipped" if how == "missing" else "corrupt")
        opened.put("next")
        opened.flush()
        assert opened.seqs() == [gap.to_seq + 1]


def test_what_was_in_memory_when_the_process_ended_is_a_gap(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        opened.put("a")
        opened.flush()
        opened.spool._keeper.enter_trouble("for this test")
        shutil.copytree(tmp_path, tmp_path / "killed")
    with Opened(tmp_path / "killed", "s2") as opened:
        assert Gap("telemetry", 1, 1000, None, "memory") in opened.gaps
        assert opened.seqs() == [0]


def test_rows_that_memory_could_not_hold_are_a_gap_once_there_is_a_disk(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Opened(store, lanes=SMALL) as opened:
        opened.put(*(str(number) for number in range(14)))
        assert not opened.spool.flush(10)
        assert opened.gaps == [Gap("telemetry", 0, 3, 4, "memory")]
        store.mkdir()
        opened.flush()
        assert opened.seqs() == list(range(4, 14))
        assert opened.close()
    with Opened(store, "s2", lanes=SMALL) as opened:
        assert opened.gaps == [Gap("telemetry", 0, 3, 4, "memory")]


def test_a_store_that_comes_late_with_numbers_of_its_own(tmp_path: Path) -> None:
    store, away = tmp_path / "store", tmp_path / "away"
    store.mkdir()
    with Opened(store) as opened:
        opened.put(*"abc")
        assert opened.close()
    store.rename(away)
    with Opened(store, "s2") as opened:
        opened.put("used", "again")
        assert not opened.spool.flush(10)
        away.rename(store)
        opened.flush()
        opened.put("new")
        opened.flush()
        assert opened.words() == ["a", "b", "c", "new"]
        assert opened.gaps == [Gap("telemetry", 0, 1, 2, "memory")]
        assert opened.alarms == ["spool_memory", "spool_restored"]


def test_each_row_is_told_of_once_when_it_may_be_sent(tmp_path: Path) -> None:
    store = tmp_path / "store"
    with Opened(store) as opened:
        opened.put("a", "b")
        assert opened.saved == []
        opened.spool.flush(10)
        opened.put("c")
        opened.spool.flush(10)
        store.mkdir()
        opened.put("d")
        opened.flush()
        assert opened.saved == [("telemetry", seq) for seq in range(4)]
        assert opened.close()
    with Opened(store, "s2") as opened:
        opened.put("e")
        opened.flush()
        assert opened.saved == [("telemetry", 4)]
