"""The catalogue of instance types as adapters see it, and what they share to use it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.port.provider import Offer, Vm
from spottrain.units import counted


class GpuFacts(Protocol):
    """A GPU model, or a core of a CPU."""

    @property
    def memory_bytes(self) -> int:
        """Memory of one GPU."""


class MachineFacts(Protocol):
    """An instance type."""

    @property
    def gpu(self) -> GpuFacts:
        """The model of all its GPUs."""

    @property
    def gpus(self) -> int:
        """Number of GPUs, or of cores."""

    @property
    def device(self) -> Literal["gpu", "cpu"]:
        """What its workers compute on."""


class CloudFacts(Protocol):
    """A catalogue of instance types, such as ``pricing.prices.catalogue.Catalogue``."""

    def find(self, cloud: str, instance_type: str) -> MachineFacts | None:
        """Return an instance type, None if it is unknown."""


def check_types(facts: CloudFacts, cloud: str, title: str, names: Iterable[str]) -> None:
    """Refuse instance types that the catalogue does not know.

    Args:
        cloud: Name of the cloud in the catalogue.
        title: Name of the cloud in messages.
        names: The types.

    Raises:
        MisconfiguredError: some are unknown.
    """
    unknown = [name for name in names if facts.find(cloud, name) is None]
    if unknown:
        raise MisconfiguredError(
            f"{title}: instance types that the catalogue does not know: {unknown}"
        )


OnDemandPrice = Callable[[str, str], float | None]
"""(region, instance type) -> USD per hour, None if unknown."""


def make_offer(
    facts: CloudFacts,
    *,
    cloud: str,
    region: str,
    zone: str,
    instance_type: str,
    spot: bool,
    usd_per_hour: float,
    observed_at_s: float,
    family: str,
    attached_usd_per_hour: float = 0.0,
) -> Offer:
    """Return an offer; it has no slots if the catalogue does not know the type."""
    machine = facts.find(cloud, instance_type)
    return Offer(
        cloud=cloud,
        region=region,
        zone=zone,
        instance_type=instance_type,
        spot=spot,
        usd_per_hour=usd_per_hour,
        observed_at_s=observed_at_s,
        gpus=0 if machine is None else machine.gpus,
        gpu_memory_bytes=0 if machine is None else machine.gpu.memory_bytes,
        family=family,
        attached_usd_per_hour=attached_usd_per_hour,
        device="" if machine is None else machine.device,
    )


PRICE_DIGITS = 12
"""After the decimal point, of sums of prices: more than any cloud's, fewer than a float's."""


def with_attached(offer: Offer, usd_per_hour: float) -> Offer:
    """Return a machine's offer with its disk and address, which cost so much.

    The sum is of the decimal numbers that were written: that of their floating-point ones
    may be larger by an ulp, which the ledger would round up to a nano-dollar.
    """
    return replace(
        offer,
        usd_per_hour=round(offer.usd_per_hour + usd_per_hour, PRICE_DIGITS),
        attached_usd_per_hour=usd_per_hour,
    )


def without_attached(offer: Offer) -> Offer:
    """Return an offer at the price of the machine alone, to the nano-dollar."""
    usd = round(offer.usd_per_hour - offer.attached_usd_per_hour, 9)
    return replace(offer, usd_per_hour=usd, attached_usd_per_hour=0.0)


def check_offered(region: str, wanted: Sequence[str], offered: Collection[str]) -> str:
    """Return how many of the wanted types a region offers, and which it lacks.

    Raises:
        MisconfiguredError: it offers none of them.
    """
    missing = [name for name in wanted if name not in offered]
    if len(missing) == len(wanted):
        raise MisconfiguredError(
            f"{region} does not rent {', '.join(missing)}; use another region or type"
        )
    detail = f"{counted(len(wanted) - len(missing), 'type')} can be rented"
    return f"{detail}, but not {', '.join(missing)}" if missing else detail


def refuse_if_used(title: str, job: str, vms: Iterable[Vm]) -> None:
    """Refuse to remove what live VMs of a job still use.

    Raises:
        CloudError: some VMs are alive.
    """
    alive = sorted(vm.vm_id for vm in vms if vm.state.is_alive)
    if alive:
        raise CloudError(
            f"{title}: job {job} still has VMs: {', '.join(alive)}; terminate them first"
        )
