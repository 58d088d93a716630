"""tegrastats: every release's line read truly, and a program that hangs, dies, floods or cannot be ended politely."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edge_runtime.hardware.findings import MAX_CLOCK_HZ, Findings
from edge_runtime.hardware.modules import MODULES, Module
from edge_runtime.hardware.protocol import SensorError, SensorSource
from edge_runtime.hardware.sysfs_power import MAX_RAIL_W
from edge_runtime.hardware.sysfs_thermal import MAX_C, MIN_C
from edge_runtime.hardware.tegrastats import TegrastatsSource, parse
from edge_runtime.records.power import DeviceReading
from tests.awaiting import wait_until
from tests.hardware.tegrastats_lines import LINES, Line

NANO = LINES[6]


def module_of(name: str) -> Module:
    return next(module for module in MODULES if module.name == name)


def reading_of(text: str, module: str = "orin-nano-8gb") -> DeviceReading:
    found = parse(text)
    assert found is not None
    return found.reading(module_of(module), 7)


@pytest.mark.parametrize("line", LINES, ids=[line.title for line in LINES])
def test_a_line_of_a_real_device_says_what_it_says(line: Line) -> None:
    reading = reading_of(line.text, line.module)
    assert reading.t_ns == 7
    assert reading.watts == pytest.approx(line.watts)
    assert reading.tj_c == line.tj_c
    assert reading.gpu_load == line.gpu_load
    assert reading.gpu_hz == (None if line.gpu_mhz is None else line.gpu_mhz * 1e6)
    assert {name: reading.zones_c.get(name) for name in line.zones_c} == line.zones_c
    assert {name: reading.rails_w.get(name) for name in line.rails_w} == pytest.approx(line.rails_w)
    assert not set(line.gone) & set(reading.zones_c)
    assert not {"RAM", "SWAP", "NC"} & set(reading.rails_w)
    assert "power" not in reading.reasons
    assert ("gpu" in reading.reasons) == (line.gpu_load is None)


def test_a_zone_that_is_off_is_not_a_temperature() -> None:
    reading = reading_of("CPU@44.5C GPU@-256C tj@-256C SOC0@offC CV0@C CV1@ VDD_IN 5299mW/5299mW")
    assert dict(reading.zones_c) == {"cpu": 44.5}
    assert reading.tj_c == 44.5
    assert {"zone gpu", "zone tj", "zone soc0", "zone cv0", "zone cv1"} <= set(reading.reasons)


@pytest.mark.parametrize(
    ("told", "load", "hz"),
    [
        ("37%", 0.37, None),
        ("37%@114", 0.37, 114e6),
        ("37%@[713]", 0.37, 713e6),
        ("37%@[1300,1100]", 0.37, 1300e6),
        ("@[1574,1574,1574]", None, 1574e6),
        ("N/A%@[200,300]", None, 300e6),
        ("@[NaN,Inf,-2,1e999,500]", None, 500e6),
        ("NaN%@[NaN]", None, None),
        ("101%@99999", None, None),
        ("-1%@-5", None, None),
        ("off", None, None),
        ("%@", None, None),
        ("@[]", None, None),
        ("37%@[71", None, None),
    ],
)
def test_every_form_of_the_gpu_load(told: str, load: float | None, hz: float | None) -> None:
    reading = reading_of(f"GR3D_FREQ {told} cpu@47.875C VDD_IN 4654mW/4654mW")
    assert (reading.gpu_load, reading.gpu_hz) == (load, hz)
    assert (reading.gpu_load is None) == ("gpu" in reading.reasons)


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ("VDD_IN 0mW/0mW", "cannot be"),  # a module that runs takes some
        ("VDD_IN -5mW/20mW", "missing"),
        ("VDD_IN N/A/4654mW", "missing"),
        ("VDD_IN 999999mW/4654mW", "missing"),
        ("VDD_IN off", "missing"),
        ("VDD_IN 46", "missing"),
        ("VDD_IN", "missing"),
        ("VDD_IN /4654mW", "missing"),
        ("RAM 4654/7620", "missing"),
        ("VDD_SOC 1484mW/1484mW", "missing"),
    ],
)
def test_a_power_that_cannot_be_is_none_and_says_why(told: str, reason: str) -> None:
    reading = reading_of(f"cpu@47.875C {told}")
    assert reading.watts is None
    assert reason in reading.reasons["power"]


def test_the_gpu_rails_own_number_and_not_another_ones_is_taken_where_a_line_is_cut() -> None:
    text = NANO.text
    for end in range(len(text)):
        found = parse(text[:end])
        if found is None:
            continue
        reading = found.reading(module_of("orin-nano-8gb"), 0)
        assert reading.watts in (None, 4.654), text[:end]
        assert reading.tj_c in (None, 47.875, 50.218), text[:end]
        assert all(NANO.zones_c.get(name, value) == value for name, value in found.zones_c.items()), text[:end]
        assert found.gpu_load in (None, 0.0)


def assert_sane(found: Findings) -> None:
    assert all(0 <= watts <= MAX_RAIL_W for watts in found.rails_w.values())
    assert all(MIN_C <= temp_c <= MAX_C for temp_c in found.zones_c.values())
    assert found.gpu_load is None or 0 <= found.gpu_load <= 1
    assert found.gpu_hz is None or 0 <= found.gpu_hz <= MAX_CLOCK_HZ
    for module in MODULES:
        reading = found.reading(module, 0)
        assert reading.watts is None or 0 < reading.watts <= MAX_RAIL_W * len(module.rails)
        assert reading.tj_c is None or MIN_C <= reading.tj_c <= MAX_C


@given(st.text())
@example("GR3D_FREQ")
@example("@C @ / // 1/1 a/ VDD_IN / VDD_IN 1e999/1 tj@1e999C")
def test_any_text_is_read_or_not_but_never_wrongly(text: str) -> None:
    found = parse(text)
    if found is not None:
        assert_sane(found)


@st.composite
def mutated(draw: st.DrawFn) -> str:
    """A real line with some pieces cut out, doubled or replaced."""
    text = draw(st.sampled_from(LINES)).text
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 40)))
        piece = draw(
            st.one_of(st.text(alphabet="0123456789@%/[],.-mWC nafVDIN_", max_size=8), st.just(text[start:end] * 2))
        )
        text = text[:start] + piece + text[end:]
    return text


@given(mutated())
def test_any_damage_to_a_real_line_leaves_sane_values(text: str) -> None:
    found = parse(text)
    if found is not None:
        assert_sane(found)


# --- the program

PROGRAM = '''
import os, signal, sys, time
LINE = {line!r}
def say(text=LINE, end="\\n"):
    sys.stdout.write(text + end)
    sys.stdout.flush()
def count():
    """How often the program has been started."""
    with open({starts!r}, "a") as file:
        file.write(str(os.getpid()) + "\\n")
    with open({starts!r}) as file:
        return len(file.readlines())
def until_killed():
    while True:
        signal.pause()
def lines(period_s=0.05):
    while True:
        say()
        time.sleep(period_s)
started = count()
{body}
'''


class Program:
    """A stand-in for tegrastats that does what the Python statements `body` say."""

    def __init__(self, folder: Path, body: str) -> None:
        self._starts = folder / "starts"
        self._starts.touch()
        script = folder / "tegrastats.py"
        script.write_text(PROGRAM.format(line=NANO.text, starts=str(self._starts), body=body), encoding="utf-8")
        self.command = (sys.executable, "-I", "-S", str(script))

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._starts.read_text(encoding="ascii").splitlines()]


@contextmanager
def source_of(folder: Path, body: str, *, period_s: float = 0.05) -> Iterator[tuple[TegrastatsSource, Program]]:
    program = Program(folder, body)
    source = TegrastatsSource(module_of("orin-nano-8gb"), program.command, period_s=period_s)
    try:
        yield source, program
    finally:
        t0 = time.monotonic()
        source.close()
        assert time.monotonic() - t0 < 1.0
    for pid in program.pids:
        assert is_gone(pid)


def is_gone(pid: int) -> bool:
    """Ended and reaped: not even a zombie is left."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def read_or_reason(source: SensorSource) -> DeviceReading | str:
    """The next reading, or why there is none."""
    try:
        return source.read()
    except SensorError as error:
        return str(error)


def read_when_there(source: SensorSource) -> DeviceReading:
    """The next reading, however often the source says that there is none yet."""
    readings: list[DeviceReading | str] = []

    def came() -> bool:
        readings.append(read_or_reason(source))
        return isinstance(readings[-1], DeviceReading)

    wait_until(came, what="a reading")
    assert isinstance(readings[-1], DeviceReading)
    return readings[-1]


def test_readings_come_at_the_programs_rate_with_the_time_of_their_line(tmp_path: Path) -> None:
    with source_of(tmp_path, "lines()") as (source, _):
        first = source.read()
        readings = [source.read() for _ in range(5)]
        now_ns = time.monotonic_ns()
    assert first.watts == 4.654
    times = [first.t_ns, *(reading.t_ns for reading in readings)]
    assert times == sorted(set(times))
    assert times[-1] - times[0] >= 5 * 25_000_000
    assert now_ns - times[-1] < 1_000_000_000
    assert (source.name, source.rails, source.quantum_w) == ("tegrastats", ("VDD_IN",), 0.04)


def test_lines_that_were_not_asked_for_are_passed_over(tmp_path: Path) -> None:
    go = tmp_path / "go"
    body = f"""
say()
while not os.path.exists({str(go)!r}):
    time.sleep(0.005)
for n in range(50):
    say(LINE.replace("4654mW/", str(n + 1) + "000mW/"))
count()
until_killed()
"""
    with source_of(tmp_path, body) as (source, program):
        assert source.read().watts == 4.654
        go.touch()
        wait_until(lambda: len(program.pids) == 2)
        assert source.read().watts == 50.0


def test_a_program_that_dies_is_started_again_and_its_last_words_are_told(tmp_path: Path) -> None:
    body = 'say()\nif started == 1: sys.exit("no permission to read the power rails")\nlines()'
    with source_of(tmp_path, body) as (source, program):
        assert source.read().watts == 4.654
        with pytest.raises(SensorError, match=r"status 1: no permission to read the power rails; .*again in 0\.5 s"):
            source.read()
        with pytest.raises(SensorError, match=r"no permission.*tried again in"):
            source.read()
        assert is_gone(program.pids[0])
        assert read_when_there(source).watts == 4.654
        assert len(program.pids) == 2


def test_a_program_that_always_dies_is_started_ever_less_often(tmp_path: Path) -> None:
    with source_of(tmp_path, "say()\nsys.exit(3)") as (source, program):
        end = time.monotonic() + 1.3
        while time.monotonic() < end:
            reading = read_or_reason(source)
            if isinstance(reading, str):
                assert "status 3" in reading
                threading.Event().wait(0.02)
        assert len(program.pids) <= 2  # at 0, 0.5 and 1.5 s


def test_a_program_that_hangs_is_stale_and_then_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_runtime.hardware.tegrastats.STALE_S", 0.3)
    monkeypatch.setattr("edge_runtime.hardware.tegrastats.HUNG_S", 0.5)
    with source_of(tmp_path, "say()\nif started == 1: until_killed()\nlines()") as (source, program):
        source.read()
        t0 = time.monotonic()
        with pytest.raises(SensorError, match=r"no line for 0\.3 s"):
            source.read()
        assert 0.25 < time.monotonic() - t0 < 1.0
        with pytest.raises(SensorError, match=r"printed nothing for 0\.[5-9] s and was killed"):
            source.read()
        assert is_gone(program.pids[0])
        assert read_when_there(source).watts == 4.654


def test_close_ends_a_read_that_waits(tmp_path: Path) -> None:
    with source_of(tmp_path, "until_killed()", period_s=20.0) as (source, program):
        said: list[str] = []

        def read() -> None:
            with pytest.raises(SensorError) as caught:
                source.read()
            said.append(caught.value.message)

        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: program.pids)
        t0 = time.monotonic()
        source.close()
        thread.join(5.0)
        assert time.monotonic() - t0 < 1.0
    assert said == ["it is closed"]
    with pytest.raises(SensorError, match="closed"):
        source.read()
    source.close()


def test_a_program_that_ignores_sigterm_and_has_children_is_ended_with_them(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if os.fork() == 0:
    count()
lines()
"""
    with source_of(tmp_path, body) as (source, program):
        source.read()
        wait_until(lambda: len(program.pids) == 2)
        child = next(pid for pid in program.pids if Path(f"/proc/{pid}/stat").read_text().split()[4] != str(pid))
        source.close()
        # whoever inherits the orphan may be slow to reap it, or never do
        wait_until(lambda: not Path(f"/proc/{child}").exists() or state_of(child) == "Z", what="the child's end")
        program._starts.write_text("".join(f"{pid}\n" for pid in program.pids if pid != child))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "body",
    ["while True: say()", 'while True: say("x" * 100_000, "")', 'while True: say("\\0" * 5000); say()'],
    ids=["lines", "one line without end", "rubbish"],
)
def test_a_flood_costs_neither_memory_nor_the_rate(tmp_path: Path, body: str) -> None:
    with source_of(tmp_path, body) as (source, _):
        t0 = time.monotonic()
        readings = 0
        while time.monotonic() - t0 < 0.5:
            reading = read_or_reason(source)
            if isinstance(reading, str):
                assert "no line" in reading or "cannot be read" in reading
            else:
                assert reading.watts == 4.654
                readings += 1
        assert readings <= 21


def test_an_over_long_line_and_one_without_its_end_are_skipped(tmp_path: Path) -> None:
    body = 'say("x" * 40_000, "")\nsay("y" * 100)\nsay(LINE[:-9], "")\ntime.sleep(0.1)\nsay(LINE[-9:])\nuntil_killed()'
    with source_of(tmp_path, body) as (source, _):
        reading = source.read()
        assert dict(reading.rails_w) == pytest.approx({"VDD_IN": 4.654, "VDD_CPU_GPU_CV": 0.56, "VDD_SOC": 1.484})


def test_lines_that_say_nothing_are_no_reading(tmp_path: Path) -> None:
    with (
        source_of(tmp_path, 'while True: say("usage: tegrastats [-options]"); time.sleep(0.05)') as (source, _),
        pytest.raises(SensorError, match="cannot be read: 'usage: tegrastats"),
    ):
        source.read()


def test_complaints_without_end_do_not_hold_it_up(tmp_path: Path) -> None:
    with source_of(tmp_path, 'while True: sys.stderr.write("e" * 20_000); say(); time.sleep(0.02)') as (source, _):
        for _ in range(10):
            assert source.read().watts == 4.654


def test_without_the_program_the_reason_is_told(tmp_path: Path) -> None:
    source = TegrastatsSource(module_of("orin-nano-8gb"), (str(tmp_path / "tegrastats"),))
    with pytest.raises(SensorError, match="no such program on PATH nor in /usr/bin"):
        source.read()
    with pytest.raises(SensorError, match=r"no such program.*tried again"):
        source.read()
    source.close()


def test_a_program_that_may_not_be_run_is_a_reason_too(tmp_path: Path) -> None:
    script = tmp_path / "tegrastats"
    script.write_bytes(b"\x7fELF no program")
    script.chmod(0o755)
    source = TegrastatsSource(module_of("orin-nano-8gb"), (str(script),))
    with pytest.raises(SensorError, match=r"cannot be started: .*Exec format"):
        source.read()
    source.close()
