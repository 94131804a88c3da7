"""The section of a job file about the local provider's market."""

from __future__ import annotations

from typing import Annotated, Literal, Self, cast

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spottrain.cloud.local.market import MarketSpec
from spottrain.codec import decode
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.base import Section


class ZoneConfig(Section):
    """A zone of the local market, with identical machines."""

    name: str = Field(default="local-a", min_length=1)
    """Name of the zone."""
    instance_type: str = Field(default="cpu", min_length=1)
    """Name of its instance type."""
    slots: PositiveInt = 1
    """Number of workers per machine."""
    slot_memory_bytes: PositiveInt = 4_000_000_000
    """Declared memory per slot, which the planner's memory model respects."""
    slot_speed: PositiveFloat = 1.0
    """Speed relative to the machine on which the model is measured."""
    capacity: NonNegativeInt = 4
    """Number of spot VMs at the start; on-demand VMs are always available."""
    spot_usd_per_hour: NonNegativeFloat = 0.1
    """Initial spot price."""
    on_demand_usd_per_hour: NonNegativeFloat = 0.3
    """On-demand price."""
    boot_s: NonNegativeFloat = 0.0
    """Seconds from launch to running."""


class EventConfig(Section):
    """A scripted event of the local market."""

    at_s: NonNegativeFloat
    """Seconds after the launch."""
    kind: Literal["capacity", "price", "notice", "kill", "silence", "slow"]
    """Kind of event, see docs/configuration.md."""
    zone: str | None = None
    """The zone; by default any."""
    count: NonNegativeInt = 1
    """Number of VMs hit; for `capacity`, the zone's number of machines from now on."""
    lead_s: NonNegativeFloat = 0.0
    """For `notice`: seconds from the notice to the end of the VM."""
    usd_per_hour: NonNegativeFloat | None = None
    """For `price`: the new spot price."""
    factor: Annotated[float, Field(gt=1)] | None = None
    """For `slow`: factor by which everything takes longer from then on."""
    machine: NonNegativeInt | None = None
    """Number, in order of launch, of the zone's spot VM to hit, if it runs."""
    return_after_s: PositiveFloat | None = None
    """Seconds until the lost capacity returns; by default never."""


class LocalConfig(Section):
    """The spot market that the local provider simulates."""

    seed: NonNegativeInt = 0
    """Random seed: which VMs are hit, and when."""
    zones: tuple[ZoneConfig, ...] = Field(default=(ZoneConfig(),), min_length=1)
    """Zones of the market."""
    events: tuple[EventConfig, ...] = ()
    """Scripted events."""
    notices_per_hour: NonNegativeFloat = 0.0
    """Rate of preemptions with notice per running VM, at random times."""
    kills_per_hour: NonNegativeFloat = 0.0
    """Rate of preemptions without notice per running VM."""
    silences_per_hour: NonNegativeFloat = 0.0
    """Rate at which a running VM stops answering."""
    notice_lead_s: NonNegativeFloat = 30.0
    """Seconds from a random notice to the end of the VM."""
    return_after_s: PositiveFloat = 30.0
    """Seconds until the capacity of a random preemption returns."""
    price_volatility: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of the spot price after an hour."""

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        try:
            self.market()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    def market(self) -> MarketSpec:
        """Return the market for the local cloud."""
        return cast(MarketSpec, decode(MarketSpec, self.model_dump_json()))
