"""Watts and degrees from the lines that NVIDIA's `tegrastats` prints.

The format differs between releases: JetPack 4 prints no unit, 5 and 6 `mW` and present/average, 7
present/average/maximum. The average is one since the program started: it is never used. Source: NVIDIA's Jetson Linux
Developer Guide, "Tegrastats Utility", and lines of real devices; what is none of these is left out.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing import Pipe

from edge_runtime.hardware.findings import MAX_CLOCK_HZ, Findings
from edge_runtime.hardware.line_program import LineProgram
from edge_runtime.hardware.modules import Module, Unknown
from edge_runtime.hardware.protocol import SensorError
from edge_runtime.hardware.retry import Retry
from edge_runtime.records.power import DeviceReading

STALE_PERIODS = 3.0
STALE_S = 1.0
"""No line for this many periods, and at least so long, is no reading."""

HUNG_S = 10.0
"""A program that prints no line for so long is killed, and started anew."""

_RAIL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_NUMBER = re.compile(r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?")
_ZONE = re.compile(r"([A-Za-z][A-Za-z0-9_-]*)@([^/]*)(?:/.*)?")
_GPU = re.compile(r"(?:([^%@]*)%)?(?:@(\[[^\[\]]*\]|[^\[\]]+))?")
_NO_RAILS = frozenset({"RAM", "SWAP", "IRAM", "NC"})


def parse(line: str) -> Findings | None:
    """What one line says, in any release's form; None where it says nothing. A line may be cut anywhere."""
    found = Findings()
    tokens = line.split()
    for at, token in enumerate(tokens[1:], 1):
        name = tokens[at - 1]
        if name == "GR3D_FREQ":
            _add_gpu(found, token, last=at == len(tokens) - 1)
        elif "/" in token and _RAIL_NAME.fullmatch(name) and name not in _NO_RAILS:
            _add_rail(found, name, token)
    for token in tokens:
        if zone := _ZONE.fullmatch(token):
            told = zone[2]
            found.add_zone(zone[1], _number(told[:-1]) if told.endswith("C") else told)
    return found or None


def _add_rail(found: Findings, name: str, token: str) -> None:
    """`5299mW/5299mW`, `182/182` or `5139mW/5139mW/5139mW`; the present value comes first."""
    values = [_number(part.removesuffix("mW")) for part in token.split("/")]
    if any(isinstance(value, float) for value in values):  # else it is a date, or a memory: 721/31927MB
        found.add_rail(name, values[0])


def _add_gpu(found: Findings, token: str, *, last: bool) -> None:
    """`X%`, `X%@MHZ`, `X%@[MHZ,MHZ]` with a clock for each cluster, or either part alone: the fastest one counts."""
    told = _GPU.fullmatch(token)
    if told is None:
        found.add_gpu(token, token)
        return
    load, clock = told[1], told[2]
    if clock is None or (last and not clock.startswith("[")):  # a number at the end may be half a number
        found.add_gpu(_number(load), None)
        return
    clocks_hz = [value * 1e6 for value in _numbers(clock.strip("[]").split(",")) if 0 <= value * 1e6 <= MAX_CLOCK_HZ]
    found.add_gpu(_number(load), max(clocks_hz, default=clock))


def _numbers(texts: Iterable[str]) -> list[float]:
    return [value for value in map(_number, texts) if isinstance(value, float)]


def _number(text: str | None) -> float | str | None:
    """The number that a text is; the text itself where it is none."""
    return float(text) if text is not None and _NUMBER.fullmatch(text) else text


class TegrastatsSource:
    """A SensorSource that runs `command` and reads its lines; started by the first `read`, started again when it ends.

    `period_s`: the interval that `command` asks for. Readings carry the time at which their line arrived.
    """

    def __init__(
        self,
        module: Module | Unknown,
        command: Sequence[str] = ("tegrastats", "--interval", "100"),
        *,
        period_s: float = 0.1,
    ) -> None:
        self._module = module
        self._command = tuple(command)
        self._period_s = period_s
        self._stale_s = max(STALE_PERIODS * period_s, STALE_S)
        self._reading = threading.Lock()
        self._closing = threading.Lock()
        self._closed = threading.Event()
        self._program: LineProgram | None = None
        self._retry = Retry()
        self._lost = ""
        self._line_at = self._read_at = 0.0
        # closing its other end ends every wait
        self._stop, self._stopper = Pipe(duplex=False)

    @property
    def name(self) -> str:
        return "tegrastats"

    @property
    def rails(self) -> tuple[str, ...]:
        return self._module.rails

    @property
    def quantum_w(self) -> float | None:
        return self._module.quantum_w

    @property
    def period_s(self) -> float:
        return self._period_s

    def read(self) -> DeviceReading:
        """Waits for the next line, at most three periods or 1 s.

        Raises SensorError where the program is not there, has ended (it is started again after a while), prints
        nothing or nothing that can be read, and after `close`.
        """
        with self._reading:
            program = self._running()
            deadline = time.monotonic() + self._stale_s
            unread: str | None = None
            try:
                while (line := self._next(program, deadline)) is not None:
                    t_ns = time.monotonic_ns()
                    found = parse(line)
                    if found is not None:
                        self._retry.up()
                        return found.reading(self._module, t_ns)
                    unread = line
            except SensorError as error:
                raise self._give_up(error.message) from None
            if self._closed.is_set():
                raise self._error("it is closed")
            silent_s = time.monotonic() - self._line_at
            if silent_s > HUNG_S:
                raise self._give_up(f"it printed nothing for {silent_s:.1f} s and was killed")
            if unread is not None:
                raise self._error(f"its lines cannot be read: {unread[:40]!r}")
            raise self._error(f"no line for {silent_s:.1f} s")

    def close(self) -> None:
        """Kill the program and reap it; a `read` that waits for a line ends at once. Idempotent, for any thread."""
        with self._closing:
            self._closed.set()
            self._stopper.close()
        with self._reading:
            self._end()
            self._stop.close()

    def _next(self, program: LineProgram, deadline: float) -> str | None:
        """The next line; of a program that prints faster than it was asked to, the newest one when it is time."""
        line = program.newest(deadline)
        if line is None:
            return None
        early_s = self._read_at + self._period_s / 2 - time.monotonic()
        if early_s > 0:
            self._closed.wait(early_s)
            line = program.newest(time.monotonic()) or line
        self._line_at = self._read_at = time.monotonic()
        return line

    def _running(self) -> LineProgram:
        if self._closed.is_set():
            raise self._error("it is closed")
        if self._program is not None:
            return self._program
        wait_s = self._retry.wait_s
        if wait_s > 0:
            raise self._error(f"{self._lost}; it is tried again in {wait_s:.1f} s")
        try:
            self._program = LineProgram(self._command, self._stop.fileno())
        except SensorError as error:
            self._lost = error.message
            self._retry.failed()
            raise
        self._line_at = time.monotonic()
        return self._program

    def _give_up(self, reason: str) -> SensorError:
        self._end()
        self._retry.failed()
        self._lost = reason
        return self._error(f"{reason}; it is started again in {self._retry.wait_s:.1f} s")

    def _end(self) -> None:
        program, self._program = self._program, None
        if program is not None:
            program.end()

    def _error(self, reason: str) -> SensorError:
        return SensorError(reason, where=self._command[0], retryable=True)
