"""What a governor is told of a simulated load."""

from __future__ import annotations

from edge_runtime.sim.load import SimCamera, SimLoad, SimModel, SimVariant, Steps

LOAD = SimLoad(
    (SimCamera("gate", Steps((10.0,)), ("model",), 10.0, 2.0, 1),),
    (SimModel("model", 2, (SimVariant("large", 0.02, 0.001), SimVariant("small", 0.01))),),
    (3e8, 6e8),
)


def test_a_site_tells_what_is_known_of_the_costs() -> None:
    def told(costs_s: dict[str, float] | None) -> list[float | None]:
        return [each.busy_s for each in LOAD.site(costs_s=costs_s).models[0].variants]

    assert told(None) == [0.021, 0.01]
    assert told({"large": 0.03}) == [0.03, None]
    assert told({}) == [None, None]
    site = LOAD.site(period_s=0.5)
    assert (site.clocks_hz, site.period_s) == ((3e8, 6e8), 0.5)
    camera = site.cameras[0]
    assert (camera.name, camera.wanted_hz, camera.min_hz, camera.priority) == ("gate", 10.0, 2.0, 1)
