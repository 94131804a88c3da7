"""What a pool file means for the pool's core."""

from __future__ import annotations

from collections.abc import Mapping

from spottrain.errors import ConfigError
from spottrain.pricing.billing.budget import WORTH_S, reserve_s
from spottrain.suggest import did_you_mean
from spottrain.units import HOUR_S
from spottrain.varuna_manager.config.pool import PoolConfig, microusd
from spottrain.varuna_manager.pool.core.model import Limits, PoolSettings, Supply, Team

_SPARE = 1.1
"""What grants are longer than their shortest use."""


def settings_of(config: PoolConfig) -> PoolSettings:
    """Return the core's settings."""
    # A manager rents only if its allowance pays for the reserve and some training.
    shortest_s = _SPARE * (reserve_s(config.lease_s) + WORTH_S)
    return PoolSettings(
        policy=config.policy,
        budget_per=config.budget.per or "life",
        limits=Limits(
            max_vms=config.max_vms,
            max_microusd=microusd(config.budget.max_usd),
            max_microusd_per_hour=microusd(config.budget.max_usd_per_hour),
        ),
        teams={
            name: Team(
                weight=team.weight,
                order=team.order,
                limits=Limits(
                    max_vms=float("inf") if team.max_vms is None else team.max_vms,
                    max_microusd=microusd(team.max_usd),
                    max_microusd_per_hour=microusd(team.max_usd_per_hour),
                ),
            )
            for name, team in config.teams.items()
        },
        grant_s=max(HOUR_S, 4 * shortest_s),
        min_stay_s=config.min_stay_s,
        round_s=config.round_s,
        shortest_grant_s=shortest_s,
    )


def supplies_of(config: PoolConfig, prices: Mapping[str, float]) -> tuple[Supply, ...]:
    """Return the kinds of VM that the pool may hold.

    Args:
        config: The pool file.
        prices: The highest price of each kind that may be rented, USD per hour.

    Raises:
        ConfigError: ``kinds`` names what is not offered, or nothing is.
    """
    names = sorted({kind.partition("/")[2] for kind in prices})
    if unknown := [name for name in config.kinds if name not in names]:
        offered = f"the pool's clouds offer {', '.join(names) or 'none'}"
        hint = did_you_mean(unknown[0], names) or offered
        raise ConfigError(f"kinds: unknown instance type: got {unknown[0]}; {hint}")
    if not prices:
        raise ConfigError(
            f"clouds: {', '.join(config.providers)} offers nothing that the pool may rent; "
            "name instance types or GPUs in its section"
        )
    return tuple(
        Supply(name=kind, vms=vms_of(config, kind), microusd_per_hour=round(price * 1e6))
        for kind, price in prices.items()
    )


def vms_of(config: PoolConfig, kind: str) -> int:
    """Return how many VMs of a kind the pool may hold."""
    instance_type = kind.partition("/")[2]
    most = min(config.max_vms, config.kinds.get(instance_type, config.max_vms))
    if config.clouds != "local" or config.allow_on_demand:
        return most
    zones = [zone for zone in config.local.specs if zone.instance_type == instance_type]
    return min(most, sum(zone.capacity for zone in zones))
