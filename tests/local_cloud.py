"""What tests do with the local cloud beside what a provider can."""

from __future__ import annotations

import time

from spottrain.cloud.local.market import MarketEvent
from spottrain.cloud.local.provider import LocalProvider
from spottrain.units import HOUR_S


def inject(cloud: LocalProvider, event: MarketEvent) -> tuple[str, ...]:
    """Apply a market event now, whatever its ``at_s``; return the affected VMs.

    Kills and silences have already taken effect.
    """
    return tuple(cloud._ask_market("POST", "/market", event))


def bill(cloud: LocalProvider, job: str) -> float:
    """Return the cost so far in dollars, at each VM's price at launch."""
    now_s = time.time()
    return sum(
        vm.offer.usd_per_hour * ((vm.ended_at_s or now_s) - vm.launched_at_s) / HOUR_S
        for vm in cloud.list_vms(job)
    )
