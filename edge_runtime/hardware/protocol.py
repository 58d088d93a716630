"""Sensors of the device, as the sampler reads them."""

from __future__ import annotations

from typing import Protocol

from edge_runtime.errors import EdgeError
from edge_runtime.records.power import DeviceReading


class SensorError(EdgeError):
    """A sensor has no valid reading now; the message says why."""

    default_code = "sensor_unavailable"


class ClockControl(Protocol):
    """A cap of the GPU's clock. Used by one thread; no call takes longer than 0.2 s.

    A cap is a lease: it ends with whoever asked for it, and has to be asked for again all the time.
    """

    def find(self) -> str | None:
        """Look for it. Why it cannot be used; None where it can."""
        ...

    def steps_hz(self) -> tuple[float, ...]:
        """The clocks that can be capped to, ascending, up to the highest that the power mode allows; empty: none."""
        ...

    def hz(self) -> float | None:
        """The clock now, Hz; None where it is not known, as of a GPU that is switched off."""
        ...

    def cap(self, hz: float | None) -> str | None:
        """At most `hz`, one of the steps; None: no cap of ours. Returns why that is not in force; None where it is.
        Wants calling again, with the same cap, at least every second."""
        ...

    def close(self) -> None:
        """Take the cap away. Idempotent."""
        ...


class SensorSource(Protocol):
    """One way to all sensors of the device. Used by one thread, its own: `read` may block.

    `name`: `ina3221`, `jtop` or `tegrastats`. `rails`: the rails that module power is made of, by NVIDIA's names.
    `quantum_w`: the step of a power reading, W; None where it is not known. `period_s`: how often a new reading is
    worth asking for, s.
    """

    @property
    def name(self) -> str: ...

    @property
    def rails(self) -> tuple[str, ...]: ...

    @property
    def quantum_w(self) -> float | None: ...

    @property
    def period_s(self) -> float: ...

    def read(self) -> DeviceReading:
        """A reading that is new since the last one. Raises SensorError where there is nothing to be read at all."""
        ...

    def close(self) -> None:
        """Let go of files, sockets and processes; ends a `read` that blocks, as far as that can be. Idempotent."""
        ...
