"""Small jobs and markets for the tests of the deadline policy."""

from __future__ import annotations

from spottrain.pricing.deadline.model import Fleet, JobStatus, Supply
from spottrain.units import HOUR_S

FLEET = Fleet(examples_per_s=(0.0, 1.0, 1.9, 2.7, 3.4), boot_s=100.0, morph_s=20.0, lost_s=20.0)
"""Up to four VMs; each further one adds less."""
ON_DEMAND = Supply(name="on-demand", spot=False, usd_per_hour=3.0)


def spot(name: str = "spot", usd: float = 1.0, available: int | None = 4) -> Supply:
    return Supply(name=name, spot=True, usd_per_hour=usd, available=available)


def status(
    *,
    hours: float | None,
    work: float,
    usd: float | None = None,
    cap: float | None = None,
) -> JobStatus:
    """``work``: hours of the largest fleet."""
    return JobStatus(
        now_s=0.0,
        deadline_s=None if hours is None else hours * HOUR_S,
        examples_left=work * HOUR_S * FLEET.rates[-1],
        usd_left=usd,
        usd_per_hour_cap=cap,
    )
