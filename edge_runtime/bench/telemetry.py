"""What reporting does to the frames, and what it costs: every fault of a broker, and the figures of spool and line.

Real daemon, real broker (mosquitto, which has to be installed), on this machine. A device's own figures need a device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from edge_runtime.bench.telemetry_broker import find_mosquitto
from edge_runtime.bench.telemetry_faults import FAULTS, FaultRun, Faults, script, window_of
from edge_runtime.bench.telemetry_figures import (
    Backlog,
    Filled,
    Wear,
    measure_backlog,
    measure_cap,
    measure_wear,
)

CAMERAS = (1, 16)
"""Of the windows whose bytes are counted."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`seconds` of each phase with a fault or without; `rows` of the backlog, watched for `drain_s` seconds; `windows`
    over which bytes are counted; `cap`: whether the file is filled."""

    faults: Sequence[str] = FAULTS
    seconds: float = 30.0
    rows: int = 100_000
    drain_s: float = 60.0
    windows: int = 200
    cap: bool = True


QUICK = Plan(seconds=5.0, rows=20_000, drain_s=10.0, windows=20)


@dataclass(slots=True)
class TelemetryBench:
    """What was measured until now; None or empty: not yet."""

    faults: Faults | None = None
    backlog: Backlog | None = None
    wear: list[Wear] = field(default_factory=list)
    filled: Filled | None = None
    interrupted: bool = False

    def as_dict(self) -> dict[str, object]:
        return {
            **asdict(self),
            "wear": [{**asdict(each), "written_mb_a_day": each.written_mb_a_day} for each in self.wear],
        }


def measure_telemetry(plan: Plan, *, progress: Callable[[str], None] = lambda _: None) -> TelemetryBench:
    """Faults first, then a start with a backlog, bytes, and a file that is full.

    An interrupt ends it: what was measured until then is in the result. Raises NotThereError without mosquitto.
    """
    find_mosquitto()
    bench = TelemetryBench()
    with tempfile.TemporaryDirectory(prefix="edge-runtime-bench-") as name:
        try:
            _measure(bench, plan, Path(name), progress)
        except KeyboardInterrupt:
            bench.interrupted = True
    return bench


def _measure(bench: TelemetryBench, plan: Plan, folder: Path, progress: Callable[[str], None]) -> None:
    if plan.faults:
        progress("a daemon starts")
        with FaultRun(folder) as run:
            for name in script(plan.faults):
                progress(f"broker {name}")
                run.phase(name, plan.seconds)
                bench.faults = run.result()
    progress("windows")
    reports = [(cameras, window_of(folder / f"window-{cameras}", cameras)) for cameras in CAMERAS]
    if plan.rows:
        bench.backlog = measure_backlog(
            folder,
            reports[0][1],
            rows=plan.rows,
            seconds=plan.drain_s,
            progress=lambda rows: progress(f"backlog {rows}"),
        )
    if plan.windows:
        progress("bytes")
        bench.wear = measure_wear(folder, reports, windows=plan.windows)
    if plan.cap:
        bench.filled = measure_cap(folder, reports[-1][1], lambda windows: progress(f"filling {windows}"))
