"""Every sensor source of this device, looked at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edge_runtime.hardware.feed import Candidate, Quantity
from edge_runtime.hardware.modules import Module, recognise
from edge_runtime.hardware.sources import Sensors, SourceState, candidates
from edge_runtime.hardware.sysfs import SysfsSource
from edge_runtime.records.power import Unavailable
from edge_runtime.records.sensors import SensorReport, SourceReport
from edge_runtime.threads import ThreadGroup

_ROOT = Path("/")
_STOP_S = 1.0


def survey(root: Path = _ROOT, sources: Sequence[Candidate] | None = None, *, wait_s: float = 5.0) -> SensorReport:
    """What the sources of the device below `root` read now, and which are used for what; takes up to `wait_s`.

    `sources`: others than the device's own. One that does not answer in time is reported as such. Needs no daemon.
    """
    recognition = recognise(root)
    module = recognition.module
    sensors = Sensors(candidates(root) if sources is None else sources, read_all=True)
    sensors.start(wait_s)
    try:
        sensors.tick()
        states, power, temperature = sensors.states(), sensors.power(), sensors.temperature()
    finally:
        sensors.stop(_STOP_S)
    found = {"ina3221": _within(lambda: _described(root), wait_s)} if sources is None else {}
    return SensorReport(
        module=module.title if isinstance(module, Module) else None,
        module_reason=recognition.because,
        power_source=_user(states, "power"),
        power_reason=power.reason if isinstance(power, Unavailable) else None,
        temperature_source=_user(states, "temperature"),
        temperature_reason=temperature.reason if isinstance(temperature, Unavailable) else None,
        sources=[_source(state, states, found) for state in states],
    )


def text(report: SensorReport) -> str:
    """The report for a terminal."""
    lines = [f"module: {report.module or 'unknown'} ({report.module_reason})"]
    by_name = {source.name: source for source in report.sources}
    if report.power_source is None and report.temperature_source is None:
        lines.append("no sensor was found on this machine; what was tried:")
    else:
        lines += [_power_line(by_name, report.power_source), _temperature_line(by_name, report.temperature_source)]
    for source in report.sources:
        lines += ["", *_source_lines(source)]
    return "\n".join(lines)


def _power_line(by_name: Mapping[str, SourceReport], name: str | None) -> str:
    if name is None:
        return "power: no source gives it"
    source = by_name[name]
    step = "" if source.quantum_w is None else f", in steps of {source.quantum_w:g} W"
    return f"power: {source.watts:.2f} W from {name} ({' + '.join(source.module_rails)}{step})"


def _temperature_line(by_name: Mapping[str, SourceReport], name: str | None) -> str:
    return (
        "temperature: no source gives it"
        if name is None
        else f"temperature: Tj {by_name[name].tj_c:.1f} degC from {name}"
    )


def _source_lines(source: SourceReport) -> list[str]:
    used = f"used for {' and '.join(source.used_for)}" if source.used_for else "not used"
    rate = "" if source.rate_hz is None else f", read {source.rate_hz:g} times a second"
    lines = [f"{source.name}: {used}{rate}"]
    if source.power_reason is not None and source.power_reason == source.temperature_reason:
        lines.append(f"  neither power nor temperature from it: {source.power_reason}")
    else:
        reasons = (("power", source.power_reason), ("temperature", source.temperature_reason))
        lines += [f"  no {what} from it: {reason}" for what, reason in reasons if reason is not None]
    if source.found:
        return lines + [f"  {line}" for line in source.found]
    if source.rails:
        lines.append("  rails: " + ", ".join(f"{name} {watts:.3f} W" for name, watts in source.rails.items()))
    if source.zones:
        lines.append("  zones: " + ", ".join(f"{name} {value:.1f} degC" for name, value in source.zones.items()))
    return lines + [f"  {what}: {reason}" for what, reason in source.missing.items() if what not in ("power", "tj")]


def _source(state: SourceState, states: Sequence[SourceState], found: Mapping[str, list[str]]) -> SourceReport:
    reading = state.readings["power"] or state.readings["temperature"]
    heat = state.readings["temperature"]
    return SourceReport(
        name=state.name,
        used_for=list(state.used_for),
        watts=None if reading is None else reading.watts,
        power_reason=_reason(state, states, "power"),
        tj_c=None if heat is None else heat.tj_c,
        temperature_reason=_reason(state, states, "temperature"),
        module_rails=[] if state.origin is None else list(state.origin.rails),
        rails={} if reading is None else dict(reading.rails_w),
        zones={} if heat is None else dict(heat.zones_c),
        rate_hz=None if state.origin is None else round(1 / state.origin.period_s, 3),
        quantum_w=None if state.origin is None else state.origin.quantum_w,
        mode=None if reading is None else reading.mode,
        missing={} if reading is None else dict(reading.reasons),
        found=found.get(state.name, []),
    )


def _reason(state: SourceState, states: Sequence[SourceState], quantity: Quantity) -> str | None:
    if quantity in state.used_for:
        return None
    return state.reasons[quantity] or f"it is good, but {_user(states, quantity)} comes first"


def _user(states: Sequence[SourceState], quantity: Quantity) -> str | None:
    return next((state.name for state in states if quantity in state.used_for), None)


def _described(root: Path) -> list[str]:
    with contextlib.closing(SysfsSource(root)) as source:
        return source.describe().lines()


def _within(look: Callable[[], list[str]], wait_s: float) -> list[str]:
    """The lines, or one that says that they did not come in time."""
    found: list[str] = []
    threads = ThreadGroup()
    threads.spawn("survey", lambda: found.extend(look()))
    return ["it does not answer in time"] if threads.join(wait_s) else found
