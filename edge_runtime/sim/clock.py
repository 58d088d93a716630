"""The GPU clock of a simulated module, as the governor caps it."""

from __future__ import annotations

from edge_runtime.sim.device import SimDevice


class SimClock:
    """Implements ClockControl over a SimDevice."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device

    def find(self) -> str | None:
        return None

    def steps_hz(self) -> tuple[float, ...]:
        return self._device.clocks_hz

    def hz(self) -> float | None:
        return self._device.speed() * self._device.clocks_hz[-1]

    def cap(self, hz: float | None) -> str | None:
        if hz is not None and hz not in self._device.clocks_hz:
            return f"{hz / 1e6:g} MHz is no step of the simulated GPU's clock"
        self._device.set_gpu_cap(hz)
        return None

    def close(self) -> None:
        self._device.set_gpu_cap(None)
