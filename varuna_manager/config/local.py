"""The part of a job file that the local provider plays by."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spottrain.cloud.local.market import MarketSpec
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.base import Section


class ZoneConfig(Section):
    """One zone of the local market; its machines are all alike."""

    name: str = Field(default="local-a", min_length=1)
    """Name of the zone."""
    instance_type: str = Field(default="cpu", min_length=1)
    """Name of its kind of machine."""
    slots: PositiveInt = 1
    """Workers that one machine can run."""
    slot_memory_bytes: PositiveInt = 4_000_000_000
    """Declared memory of a slot; the planner keeps tensors within it."""
    slot_speed: PositiveFloat = 1.0
    """Speed relative to the machine that is measured."""
    capacity: NonNegativeInt = 4
    """Spot VMs that the zone has at the start; on demand there is always another one."""
    spot_usd_per_hour: NonNegativeFloat = 0.1
    """Price of a machine that may be taken away."""
    on_demand_usd_per_hour: NonNegativeFloat = 0.3
    """Price of a machine that stays."""
    boot_s: NonNegativeFloat = 0.0
    """Seconds from launch to running."""


class EventConfig(Section):
    """Something that the local market does at a given time."""

    at_s: NonNegativeFloat
    """Seconds since the market opened, at launch."""
    kind: Literal["capacity", "price", "notice", "kill", "silence", "slow"]
    """What happens: see docs/configuration.md."""
    zone: str | None = None
    """Where; any zone if not given."""
    count: NonNegativeInt = 1
    """VMs hit, or for `capacity` the machines that the zone has from now on."""
    lead_s: NonNegativeFloat = 0.0
    """For `notice`: seconds from the notice to the end."""
    usd_per_hour: NonNegativeFloat | None = None
    """For `price`: the new spot price."""
    factor: Annotated[float, Field(gt=1)] | None = None
    """For `slow`: how many times longer everything takes there from then on."""
    machine: NonNegativeInt | None = None
    """Hit the zone's spot VM of this number in order of launch, if it runs."""
    return_after_s: PositiveFloat | None = None
    """Seconds until the capacity that was taken comes back by itself, if ever."""


class LocalConfig(Section):
    """The spot market that the local provider plays."""

    seed: NonNegativeInt = 0
    """Decides who is hit and when hazards strike."""
    zones: tuple[ZoneConfig, ...] = Field(default=(ZoneConfig(),), min_length=1)
    """Where machines can be had."""
    events: tuple[EventConfig, ...] = ()
    """What happens when, written by hand."""
    notices_per_hour: NonNegativeFloat = 0.0
    """Preemptions with notice for each running VM, at random times."""
    kills_per_hour: NonNegativeFloat = 0.0
    """Preemptions without notice for each running VM."""
    silences_per_hour: NonNegativeFloat = 0.0
    """VMs that stop answering, for each running VM."""
    notice_lead_s: NonNegativeFloat = 30.0
    """Seconds from a hazard's notice to the end."""
    return_after_s: PositiveFloat = 30.0
    """Seconds until capacity that a hazard took comes back."""
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
        """Return the market as the local cloud plays it."""
        return MarketSpec.from_json(self.model_dump_json())
