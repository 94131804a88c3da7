"""What a job file says of the workers of the user's own machines."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, PositiveFloat, PositiveInt

from spottrain.cloud.local.market import ZoneSpec
from spottrain.pricing.prices.catalogue import GpuType, catalogue
from spottrain.suggest import did_you_mean
from spottrain.varuna_manager.config.base import Section


def _gpu(name: str) -> str:
    known = catalogue().gpus
    if name not in known:
        raise ValueError(did_you_mean(name, known) or f"must be one of {', '.join(known)}")
    return name


Gpu = Annotated[str, AfterValidator(_gpu)]
"""The name of a kind of GPU of the catalogue."""


class SlotSection(Section):
    """The workers of a machine, which no catalogue knows."""

    slots: PositiveInt = 1
    """Number of workers of a VM: its GPUs, or shares of its CPU."""
    gpu: Gpu | None = None
    """Kind of its GPUs, such as A100-80GB (see `spottrain prices`), by which it is ranked.
    Own hosts: by default as their driver says once they are reached."""
    slot_memory_bytes: PositiveInt = 4_000_000_000
    """Memory per slot, which the planner's memory model respects; of a known GPU, the
    GPU's counts."""
    slot_speed: PositiveFloat = 1.0
    """Speed relative to the machine on which the model is measured; 1: of GPUs that are
    known, estimated from their peaks."""

    @property
    def gpu_type(self) -> GpuType | None:
        """The kind of its GPUs, if the job file says it."""
        return None if self.gpu is None else catalogue().gpus[self.gpu]

    def slot_settings(self, *, uses_gpus: bool) -> dict[str, Any]:
        """Return the fields of ``SlotSettings`` but the price.

        Args:
            uses_gpus: False: slots are CPU slots.
        """
        return {
            "slots": self.slots,
            "gpu": self.gpu or "",
            "uses_gpus": uses_gpus,
            "slot_memory_bytes": self.slot_memory_bytes,
            "slot_speed": self.slot_speed,
        }

    def spec(self, name: str, instance_type: str, capacity: int, usd_per_hour: float) -> ZoneSpec:
        """Return such machines as a zone, for planners.

        Args:
            capacity: How many there may be.
            usd_per_hour: Price of one.
        """
        return ZoneSpec(
            name=name,
            instance_type=instance_type,
            slots=self.slots,
            slot_memory_bytes=self.slot_memory_bytes,
            slot_speed=self.slot_speed,
            capacity=capacity,
            spot_usd_per_hour=usd_per_hour,
            on_demand_usd_per_hour=usd_per_hour,
        )
