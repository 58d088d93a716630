"""What the spool writes in a day: by the kernel's count of what its thread wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_runtime.telemetry.spool import LANES, LaneLimits
from tests.telemetry.payloads import window_maker
from tests.telemetry.spools import SLOW, Opened

DAY = 8640
"""Windows of 10 s."""
MOST_MB = 200
TOPIC = "edge/v1/gate-07/telemetry/window"


def written(opened: Opened) -> int:
    thread = opened.spool.ticks()["spool"][0]
    found = Path(f"/proc/self/task/{thread.native_id}/io").read_text()
    return int(found.split("wchar: ")[1].split()[0])


def mb_a_day(
    store: Path, *, cameras: int, windows: int, delivered: bool, lanes: tuple[LaneLimits, ...] = LANES
) -> float:
    """Each window is a commit of its own. What was delivered is deleted with the next."""
    makers = [window_maker(cameras, number) for number in range(100)]
    with Opened(store, lanes=lanes, options=SLOW) as opened:
        lane, cursor = opened.spool.lane("telemetry"), -1
        for number in range(lanes[1].max_rows if lanes is not LANES else 0):
            opened.spool.append("telemetry", TOPIC, makers[number % 100])
        opened.flush()
        before = written(opened)
        for number in range(windows):
            opened.clock.now_ns += 10 * 10**9
            opened.spool.append("telemetry", TOPIC, makers[number % 100])
            opened.flush()
            rows = lane.read(cursor, 20) if delivered else ()
            if rows:
                cursor = rows[-1].token
                lane.done([row.token for row in rows])
        assert opened.spool.lane("telemetry").next_seq >= windows
        assert (lane.waiting() == 0) is delivered
        return (written(opened) - before) / windows * DAY / 1e6


@pytest.mark.parametrize("cameras", [1, 16])
def test_a_day_with_a_broker(tmp_path: Path, cameras: int) -> None:
    assert 10 < mb_a_day(tmp_path, cameras=cameras, windows=200, delivered=True) < MOST_MB / 2


def test_a_day_without_a_broker(tmp_path: Path) -> None:
    assert 10 < mb_a_day(tmp_path, cameras=16, windows=200, delivered=False) < MOST_MB / 2


def test_a_day_of_a_full_lane(tmp_path: Path) -> None:
    lanes = (LANES[0], LaneLimits("telemetry", 1000, 128 << 20))
    assert 10 < mb_a_day(tmp_path, cameras=1, windows=200, delivered=False, lanes=lanes) < MOST_MB / 2


@pytest.mark.full
@pytest.mark.parametrize("cameras", [1, 16])
@pytest.mark.parametrize("delivered", [True, False])
def test_a_whole_day(tmp_path: Path, cameras: int, delivered: bool) -> None:
    assert mb_a_day(tmp_path, cameras=cameras, windows=DAY, delivered=delivered) < MOST_MB / 2
