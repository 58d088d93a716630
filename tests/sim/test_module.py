"""The first simulated device: its watts follow the lanes' busy time."""

from __future__ import annotations

import time
from typing import get_args

import pytest

from edge_runtime.config import Hardware
from edge_runtime.sim.module import AMBIENT_C, MODULES, SIM_MODE, SimDevice


@pytest.mark.parametrize("name", sorted(MODULES))
def test_power_goes_from_idle_to_busy_with_the_lanes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODULES[name]
    now_ns, busy_ns = [0], [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns[0])
    device = SimDevice(module, lambda: busy_ns[0], lambda: 2)
    assert (device.name, device.rails, device.read().mode) == ("simulated", module.rails, SIM_MODE)

    def after(seconds: float, utilisation: float) -> float:
        now_ns[0] += int(seconds * 1e9)
        busy_ns[0] += int(seconds * 1e9 * 2 * utilisation)
        watts = device.read().watts
        assert watts is not None
        return watts

    assert after(1, 0) == pytest.approx(module.idle_w)
    assert after(1, 1) == pytest.approx(module.busy_w)
    assert after(1, 0.5) == pytest.approx((module.idle_w + module.busy_w) / 2)
    reading = device.read()
    assert sum(reading.rails_w.values()) == pytest.approx(reading.watts)
    for _ in range(100):
        after(module.tau_s / 10, 1)
    assert device.read().tj_c == pytest.approx(AMBIENT_C + module.resistance_c_w * module.busy_w, abs=0.1)


def test_there_is_a_module_for_every_name_of_the_configuration() -> None:
    names = {name.removeprefix("sim:") for name in get_args(Hardware) if name.startswith("sim:")}
    assert names == set(MODULES)
