"""Events: what they say, where they go, and the one after an unclean start."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path

import pytest
from pydantic import ValidationError

from edge_runtime.records.events import Event, Reported, ReportedModel
from edge_runtime.telemetry.events import EventWriter
from edge_runtime.telemetry.spool import PreviousSession
from tests.telemetry.spools import FakeClock, Opened, identity

PREVIOUS = PreviousSession(
    "s0", "b0", False, {"telemetry": 41, "event": 3}, "2026-03-01T11:00:00.000Z", "2026-03-01T11:59:30.000Z"
)


def writer(opened: Opened, *, synced: bool = True) -> tuple[EventWriter, FakeClock]:
    clock = FakeClock()
    return EventWriter(identity(), clock, lambda: synced, opened.spool), clock


def test_an_event_has_the_number_of_its_row_and_the_time_it_was_emitted(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        events, clock = writer(opened)
        events.emit("camera", "gate is down", severity="warning", camera="gate", state="down", fps=None, tries=3)
        events.emit("model", "detector is up")
        clock.now_utc = datetime(2030, 1, 1, tzinfo=timezone.utc)
        opened.flush()
        rows = opened.read_all("event")
        assert [row.message.topic for row in rows] == [
            "edge/v1/gate-07/event/camera",
            "edge/v1/gate-07/event/model",
        ]
        assert json.loads(rows[0].message.payload) == {
            "schema": "edge.event/1",
            "device": "gate-07",
            "boot": "b1",
            "session": "s1",
            "seq": 0,
            "clock_synced": True,
            "kind": "camera",
            "severity": "warning",
            "message": "gate is down",
            "t_utc": "2026-03-01T12:00:00.000Z",
            "uptime_s": 1.0,
            "data": {"camera": "gate", "state": "down", "fps": None, "tries": 3},
        }
        assert Event.model_validate_json(rows[1].message.payload).seq == 1


@pytest.mark.parametrize("kind", ["", "Camera", "a/b", "a#", "-a", "a" * 33])
def test_a_kind_has_to_fit_into_a_topic(tmp_path: Path, kind: str) -> None:
    with Opened(tmp_path) as opened, pytest.raises(ValidationError):
        writer(opened)[0].emit(kind, "no")  # type: ignore[arg-type]


def test_an_unclean_start_says_the_last_numbers_and_the_downtime(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        events, _ = writer(opened)
        assert events.emit_start(PREVIOUS)
        opened.flush()
        (row,) = opened.read_all("event")
        event = Event.model_validate_json(row.message.payload)
        assert (event.kind, event.severity) == ("unclean-start", "warning")
        assert event.data == {
            "previous_session": "s0",
            "previous_boot": "b0",
            "same_boot": False,
            "last_utc": "2026-03-01T11:59:30.000Z",
            "downtime_s": 30.0,
            "last_seq_telemetry": 41,
            "last_seq_event": 3,
        }


@pytest.mark.parametrize(
    ("synced", "last_utc", "last_synced"),
    [
        (False, "2026-03-01T11:59:30.000Z", True),
        (True, "2026-03-01T12:00:01.000Z", True),
        (True, "yesterday", True),
        (True, "1970-01-01T00:05:00.000Z", False),  # synchronised since
    ],
)
def test_a_downtime_that_cannot_be_known_is_null(
    tmp_path: Path, synced: bool, last_utc: str, last_synced: bool
) -> None:
    with Opened(tmp_path) as opened:
        previous = PreviousSession("s0", "b1", False, {}, last_utc, last_utc, last_synced)
        assert writer(opened, synced=synced)[0].emit_start(previous)
        opened.flush()
        (row,) = opened.read_all("event")
        assert Event.model_validate_json(row.message.payload).data["downtime_s"] is None


def test_a_clean_or_first_start_is_no_event(tmp_path: Path) -> None:
    with Opened(tmp_path) as opened:
        events, _ = writer(opened)
        assert not events.emit_start(None)
        assert not events.emit_start(PreviousSession("s0", "b0", True, {}, "x", "x"))
        opened.flush()
        assert opened.read_all("event") == []


def test_an_unclean_start_is_told_after_a_real_one(tmp_path: Path) -> None:
    store = tmp_path / "killed"
    (tmp_path / "live").mkdir()
    with Opened(tmp_path / "live", "s0") as opened:
        opened.put("a", "b")
        opened.flush()
        store.mkdir()
        for file in (tmp_path / "live").iterdir():
            (store / file.name).write_bytes(file.read_bytes())
    with Opened(store) as opened:
        assert writer(opened)[0].emit_start(opened.spool.previous)
        opened.flush()
        (row,) = opened.read_all("event")
        data = Event.model_validate_json(row.message.payload).data
        assert (data["last_seq_telemetry"], data["downtime_s"], data["same_boot"]) == (1, 0.0, True)


def test_reported() -> None:
    model = ReportedModel(
        name="detector", engine=None, bundle=None, variant=None, backend=None, state="down", source="configuration"
    )
    reported = Reported(
        device="gate-07",
        boot="b1",
        session="s1",
        version="0",
        seq=0,
        t_utc="2026-03-01T12:00:00.000Z",
        clock_synced=True,
        models=[model],
        config_digest="sha256:00",
    )
    found = json.loads(reported.to_json())
    assert (found["schema"], found["generation"], found["update"]) == ("edge.reported/1", None, None)
    assert found["models"][0]["state"] == "down"
