"""What `edge-runtime status --sensors` says: which sensors this device has, and which of them are used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from edge_runtime.records.window import Payload


class SourceReport(Payload):
    """One way to the device's sensors, and what it read."""

    name: str = Field(description="ina3221 (the kernel's own files), jtop or tegrastats.")
    used_for: list[Literal["power", "temperature"]]
    watts: float | None = Field(description="Power of the module.")
    power_reason: str | None = Field(description="Why it gives no power, or is not used for it; null where it is.")
    tj_c: float | None = Field(description="The hottest junction, degC.")
    temperature_reason: str | None = Field(description="The same for temperature.")
    module_rails: list[str] = Field(description="The rails that the power of the module is the sum of.")
    rails: dict[str, float] = Field(description="Every rail that could be read, W.")
    zones: dict[str, float] = Field(description="Every thermal zone that could be read, degC.")
    rate_hz: float | None = Field(description="How often it is read; null where it could not be opened.")
    quantum_w: float | None = Field(description="The step of a power reading; null where that is not known.")
    mode: str | None = Field(description="The power mode (nvpmodel); null where this source does not know it.")
    missing: dict[str, str] = Field(description="Why something is missing, by what it is.")
    found: list[str] = Field(description="What was found, for a person to read.")


class SensorReport(Payload):
    """The sensors of this device. A value that is not known is null, never 0."""

    schema_: Literal["edge.sensors/1"] = Field(default="edge.sensors/1", alias="schema")
    module: str | None
    module_reason: str = Field(description="By what the module was recognised, or why it was not.")
    power_source: str | None
    power_reason: str | None = Field(description="Why there is no power; null where there is.")
    temperature_source: str | None
    temperature_reason: str | None
    sources: list[SourceReport] = Field(description="In the order of preference.")
