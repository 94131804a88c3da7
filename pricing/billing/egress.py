"""Cost of data that leaves a zone, a region or a cloud, at list prices.

Incoming data is free. Sources: docs/budget.md.
"""

from __future__ import annotations

from collections.abc import Mapping

from spottrain.pricing.billing.money import NOTHING, Money, total
from spottrain.pricing.billing.terms import CLOUD_USD_PER_GB, EXACT, TERMS
from spottrain.pricing.prices.place import Site


def usd_per_gb(here: Site, there: Site, zone_usd_per_gb: float | None = None) -> float:
    """Return the price of a gigabyte between two sites, both ends together.

    Args:
        here: One end.
        there: The other.
        zone_usd_per_gb: Price between zones of a region; None: the list price.
    """
    if here.cloud != there.cloud:
        return CLOUD_USD_PER_GB
    bill = TERMS.get(here.cloud, EXACT)
    if here.region != there.region:
        return bill.region_usd_per_gb
    if here.zone == there.zone:
        return 0.0
    return bill.zone_usd_per_gb if zone_usd_per_gb is None else zone_usd_per_gb


def sent(num_bytes: Mapping[tuple[Site, Site], int], zone_usd_per_gb: float | None = None) -> Money:
    """Return the cost of traffic between sites.

    Args:
        num_bytes: By the two sites.
        zone_usd_per_gb: As in ``usd_per_gb``.
    """
    return total(
        Money.of_bytes(usd_per_gb(here, there, zone_usd_per_gb), count)
        for (here, there), count in num_bytes.items()
    )


def fetched(data_bytes: Mapping[str, float], cloud: str) -> Money:
    """Return the cost of the data that a VM fetches when it boots.

    Data of the same cloud is free: the bucket's region is not known. VMs of the local
    provider find the data on the machine.

    Args:
        data_bytes: By the cloud that holds it.
        cloud: Where the VM is.
    """
    if cloud == "local":
        return NOTHING
    elsewhere = sum(n for holder, n in data_bytes.items() if holder != cloud)
    return Money.of_bytes(CLOUD_USD_PER_GB, int(elsewhere))
