"""`edge-runtime status`: what the running daemon says of itself, asked on its control socket."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edge_runtime.cli.control import add_daemon_arguments, clean, find_daemon
from edge_runtime.errors import EXIT_DONE, EXIT_NOT_THERE, EdgeError, UsageError

WATCH_S = 2.0
_CLEAR = "\x1b[H\x1b[2J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `status` its options."""
    add_daemon_arguments(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print one JSON document")
    how.add_argument("--watch", action="store_true", help=f"repaint every {WATCH_S:.0f} s until Ctrl-C")
    parser.add_argument(
        "--sensors",
        action="store_true",
        help="instead: what sensors this device has, which of them are used, and why; needs no daemon",
    )


def run(args: argparse.Namespace) -> int:
    """Print the status once, or with --watch again and again. Returns the exit code.

    Raises NotThereError where no daemon answers, and EdgeError where we may not ask it or it answers with an error.
    """
    if args.sensors:
        return _sensors(args)
    if not args.watch:
        report = fetch_status(args)
        print(json.dumps(report, indent=2) if args.json else describe(report))
        return EXIT_DONE
    text = describe(fetch_status(args))
    while True:
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{text}", flush=True)
        time.sleep(WATCH_S)
        try:
            text = describe(fetch_status(args))
        except EdgeError as error:  # it may come back: whoever watches a restart wants to see that
            text = f"edge-runtime: {error}"


def _sensors(args: argparse.Namespace) -> int:
    """What is found on this device, looked at now. NOT_THERE where that is nothing."""
    if args.watch:
        raise UsageError("--sensors looks once", where="--watch", remedy="leave one of them out")
    from edge_runtime.hardware.survey import survey, text

    report = survey()
    print(report.to_json().decode() if args.json else text(report))
    nothing = report.power_source is None and report.temperature_source is None
    return EXIT_NOT_THERE if nothing else EXIT_DONE


def fetch_status(args: argparse.Namespace) -> dict[str, Any]:
    """The status report of the daemon that `args` name (`--socket`, `-c`, or the usual places)."""
    _, report = find_daemon(args)
    return report


# ---- the table. The report is read leniently: the daemon may be older or newer than we are.


def describe(report: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    health = _map(report, "health")
    lines = [
        f"{clean(report.get('device'))}  edge-runtime {clean(report.get('version'))}, "
        f"up {duration_text(report.get('uptime_s'))}",
        f"health   {clean(health.get('state'))}",
        *(f"         - {clean(reason)}" for reason in health.get("reasons") or []),
        f"power    {_power(report)}",
        f"budget   {budget_text(report)}",
        f"governor {_governor(report)}",
        f"broker   {_broker(report.get('mqtt'))}",
    ]
    if (spool := report.get("spool")) is not None:
        lines.append(f"spool    {_spool(spool)}")
    if report.get("mqtt") is not None and report.get("clock_synced") is False:
        lines.append("clock    not synchronised: commands over MQTT are refused")
    if faults := report.get("gpu_faults"):
        lines.append(f"gpu      faults of it that ended the daemon so far: {clean(faults)}")
    cameras = [
        (
            clean(each.get("name")),
            clean(each.get("model")),
            clean(each.get("state")),
            duration_text(each.get("since_s")),
            number_text(each.get("fps"), 1),
            *(_count(each, key) for key in ("completed", "stale", "dropped", "failed")),
            clean(each.get("reason") or ""),
        )
        for each in report.get("cameras") or []
    ]
    header = ("CAMERA", "MODEL", "STATE", "SINCE", "FPS", "DONE", "STALE", "DROPPED", "FAILED", "REASON")
    lines += ["", *table_lines(header, cameras, right=range(3, 9))]
    if (touched := touched_text(report)) is not None:
        lines.append(touched)
    models = [
        (
            clean(each.get("name")),
            "down" if each.get("engine") is None else "up",
            clean(each.get("variant") or "-"),
            clean(each.get("backend") or "-"),
            clean(each.get("engine") or "-")[:19],
            clean(each.get("source") or "-"),
            clean(each.get("reason") or each.get("backend_reason") or ""),
        )
        for each in report.get("models") or []
    ]
    lines += ["", *table_lines(("MODEL", "STATE", "VARIANT", "BACKEND", "ENGINE", "WANTED BY", "REASON"), models)]
    return "\n".join(lines)


def touched_text(report: Mapping[str, Any]) -> str | None:
    """Which cameras are not as the configuration has them; None where all are."""
    cameras = {clean(each.get("name")) for each in report.get("cameras") or [] if each.get("source") == "overlay"}
    removed = [clean(name) for name in report.get("cameras_removed") or []]
    parts = [
        f"{word}: {', '.join(sorted(names))}" for word, names in (("changed", cameras), ("removed", removed)) if names
    ]
    return f"by commands {'; '.join(parts)} (see edge-runtime camera)" if parts else None


def _power(report: Mapping[str, Any]) -> str:
    parts = []
    power = report.get("power")
    if isinstance(power, Mapping):
        parts.append(f"{number_text(power.get('watts'), 2)} W ({clean(power.get('source'))})")
        parts.append(f"{number_text(power.get('joules_total'), 0)} J since the start")
    else:
        parts.append(f"not measured: {clean(report.get('power_reason') or 'unknown')}")
    ratio = _map(report, "window").get("fps_per_watt")
    if ratio is not None:
        parts.append(f"{number_text(ratio, 2)} fps/W")
    thermal = report.get("thermal")
    if isinstance(thermal, Mapping):
        slowed = ", throttling" if thermal.get("throttling") else ""
        parts.append(f"Tj {number_text(thermal.get('tj_c'), 1)} C{slowed}")
    return ", ".join(parts)


_BUDGETS = (("power_w", "{} W"), ("temperature_c", "{} C"), ("latency_p99_ms", "p99 {} ms"))


def budget_text(report: Mapping[str, Any]) -> str:
    """The budget in force, and who has set it."""
    budget = _map(report, "budget")
    parts = [text.format(f"{budget[key]:g}") for key, text in _BUDGETS if isinstance(budget.get(key), (int, float))]
    if not parts:
        return "none"
    parts.append(f"set by the {clean(budget.get('set_by') or '?')}")
    if budget.get("violated_s"):
        parts.append(f"above the power budget for {number_text(budget['violated_s'], 1)} s since the start")
    return ", ".join(parts)


def _governor(report: Mapping[str, Any]) -> str:
    governor = _map(report, "governor")
    text = f"{clean(governor.get('state') or '-')}: {clean(governor.get('because') or '-')}"
    point = _map(report, "operating_point")
    fps = _map(point, "fps")
    limits = [
        f"{clean(name)} {number_text(fps.get(name), 1)} fps for {clean(why)}"
        for name, why in _map(point, "limits").items()
    ]
    return f"{text} ({', '.join(limits)})" if limits else text


def _broker(mqtt: object) -> str:
    if not isinstance(mqtt, Mapping):
        return "none configured"
    connected = mqtt.get("connected")
    state = f"{'connected' if connected else 'away'} for {duration_text(mqtt.get('since_s'))}"
    if connected and mqtt.get("protocol"):
        state += f" with MQTT {clean(mqtt['protocol'])}"
    counts = [f"{mqtt[key]} {word}" for key, word in _BROKER_COUNTS if mqtt.get(key)]
    counts += [f"it refuses what lane {clean(lane)} sends" for lane in mqtt.get("held") or []]
    # last, since it may be long
    why = "" if connected else f": {clean(mqtt.get('reason') or 'unknown')}"
    return ", ".join([state, *counts]) + why


_BROKER_COUNTS = (
    ("queued", "queued"),
    ("dropped", "lost from a full queue"),
    ("results_dropped", "results lost"),
    ("refused", "refused"),
)


def _spool(spool: Mapping[str, Any]) -> str:
    why = f" ({clean(spool.get('reason'))})" if spool.get("reason") else ""
    lanes = [
        f"{clean(lane.get('name'))} {lane.get('queued')} waiting"
        + (f", {lane.get('dropped')} lost" if lane.get("dropped") else "")
        + (f", {lane.get('refused')} refused" if lane.get("refused") else "")
        for lane in spool.get("lanes") or []
    ]
    full = ", the disk is too full for more" if spool.get("reserve_touched") else ""
    where = "memory" if spool.get("where") == "memory" else "the store"
    return f"in {where}{why}{full}: {'; '.join(lanes) or 'empty'}"


def _map(report: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = report.get(key)
    return value if isinstance(value, Mapping) else {}


def _count(camera: Mapping[str, Any], key: str) -> str:
    value = _map(camera, "frames").get(key)
    return str(sum(value.values()) if isinstance(value, Mapping) else "-" if value is None else value)


def number_text(value: object, digits: int) -> str:
    """A number with so many digits after the point; "-" where there is none."""
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "-"


def duration_text(seconds: object) -> str:
    """Seconds as people say them; "-" where there are none."""
    if not isinstance(seconds, (int, float)):
        return "-"
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    hours, days = whole // 3600 % 24, whole // 86400
    return f"{days} d {hours} h" if days else f"{hours} h {whole % 3600 // 60} min"


def table_lines(header: Sequence[str], rows: Iterable[Sequence[str]], right: Iterable[int] = ()) -> list[str]:
    """Columns below a header, those in `right` against their right edge."""
    every = [header, *rows]
    widths = [max(len(row[column]) for row in every) for column in range(len(header))]
    to_right = set(right)
    lines = []
    for row in every:
        cells = (
            cell.rjust(width) if column in to_right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join(cells).rstrip())
    return lines
