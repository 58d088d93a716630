"""Sensors of the device, as the sampler reads them."""

from __future__ import annotations

from typing import Protocol

from edge_runtime.errors import EdgeError
from edge_runtime.records.power import PowerReading, ThermalReading


class SensorError(EdgeError):
    """A sensor has no valid reading now; the message says why."""

    default_code = "sensor_unavailable"


class PowerSensor(Protocol):
    """Module power by declared rails."""

    @property
    def source(self) -> str:
        """Where readings come from: `ina3221`, `jtop`, `tegrastats`, `simulated`."""
        ...

    @property
    def rails(self) -> tuple[str, ...]: ...

    @property
    def idle_w(self) -> float | None:
        """Module power with no load in the same power mode, W; None where it was never measured."""
        ...

    def read(self) -> PowerReading:
        """Raises SensorError."""
        ...


class ThermalSensor(Protocol):
    """Temperatures by zone."""

    def read(self) -> ThermalReading:
        """Raises SensorError."""
        ...
