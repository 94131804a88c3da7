"""Attempts at spot VMs on cruel markets: deadline and budget are kept, and waste is bounded."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.deadline.tuning import MARGIN_LOSSES, WASTE
from spottrain.pricing.simulation.baselines import CostOptimal, TimeOptimal
from spottrain.pricing.simulation.replay import play
from spottrain.pricing.simulation.scenarios import PRICE_S, Life, Scenario, Zone
from spottrain.units import HOUR_S

ON_DEMAND_USD = 3.0
SLACKS = (0.0, 0.02, 0.1, 0.3, 1.0, 3.0, 9.0)
BUDGETS = (1.0, 1.02, 1.05, 1.1, 1.3, 20.0)
FATES = ("boots", "joins", "flaps", "lives")


def cruel(seed: int, max_vms: int) -> Scenario:
    """A market whose VMs die as they boot or join, or come and go within minutes."""
    draw = random.Random(f"cruel/{seed}")
    friction = draw.uniform(0.0, 0.03)
    rates = [n / (1 + friction * (n - 1)) for n in range(1, max_vms + 1)]
    fleet = Fleet(
        examples_per_s=(0.0, *rates),
        boot_s=draw.uniform(60.0, 400.0),
        morph_s=draw.uniform(5.0, 45.0),
        lost_s=draw.uniform(5.0, 60.0),
    )
    train_s = draw.uniform(1.5, 12.0) * HOUR_S
    paid_s = fleet.boot_s + fleet.morph_s + train_s
    deadline_s = paid_s + train_s * draw.choice(SLACKS)
    zones = tuple(
        _zone(draw, f"zone-{n}", fleet, deadline_s) for n in range(draw.randint(1, 2))
    )
    usd = max_vms * ON_DEMAND_USD * paid_s / HOUR_S
    return Scenario(
        name=f"cruel {seed}",
        zones=zones,
        on_demand_usd_per_hour=ON_DEMAND_USD,
        notice_s=draw.choice((0.0, 30.0, 120.0)),
        fleet=fleet,
        examples=train_s * fleet.rates[-1],
        deadline_s=deadline_s,
        max_usd=usd * draw.choice(BUDGETS),
    )


def _zone(draw: random.Random, name: str, fleet: Fleet, end_s: float) -> Zone:
    fate = draw.choice((*FATES, "mixed"))
    lives: list[Life] = []
    for _ in range(fleet.max_vms):
        at_s = draw.uniform(0.0, 300.0)
        while at_s < end_s:
            life_s, gap_s = _life(
                draw, draw.choice(FATES) if fate == "mixed" else fate, fleet
            )
            lives.append((at_s, at_s + life_s))
            at_s += life_s + gap_s
    usd = ON_DEMAND_USD * draw.choice((0.1, 0.3, 0.6, 0.95, 1.0))
    prices = [
        usd * draw.choice((1.0, 1.0, 0.5, 1.2)) for _ in range(int(end_s / PRICE_S) + 1)
    ]
    return Zone(name=name, lives=tuple(sorted(lives)), usd_per_hour=tuple(prices))


def _life(draw: random.Random, fate: str, fleet: Fleet) -> Life:
    """Return how long a VM lives, and the time to the next."""
    if fate == "boots":
        return fleet.boot_s * draw.choice((0.3, 0.9, 0.999)), draw.choice((1.0, 60.0))
    if fate == "joins":
        more_s = draw.choice((1.0, fleet.morph_s, fleet.morph_s + 20.0))
        return fleet.boot_s + more_s, draw.choice((1.0, 60.0))
    if fate == "flaps":
        return draw.uniform(60.0, 1800.0), draw.uniform(10.0, 1800.0)
    return draw.uniform(0.5, 5.0) * HOUR_S, draw.uniform(60.0, 2 * HOUR_S)


def bound_usd(job: Scenario) -> float:
    """On-demand VMs alone, and one in a hundred more, or one attempt with the fleet."""
    fleet = job.fleet
    alone_usd = job.on_demand()[1]
    idle_s = fleet.boot_s + MARGIN_LOSSES * (2 * fleet.morph_s + fleet.lost_s)
    attempt_usd = fleet.max_vms * ON_DEMAND_USD * idle_s / HOUR_S
    return alone_usd + max(WASTE * alone_usd, attempt_usd)


@given(st.integers(0, 10**9), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
@example(seed=110, max_vms=1)
@example(seed=7, max_vms=3)
def test_deadline_budget_and_the_bound_of_waste_are_kept(
    seed: int, max_vms: int
) -> None:
    job = cruel(seed, max_vms)
    outcome = play(job, CostOptimal())
    assert outcome.in_time
    assert outcome.in_budget
    assert outcome.usd <= bound_usd(job) * (1 + 1e-9)


@given(st.integers(0, 10**9))
@settings(max_examples=8, deadline=None)
def test_time_optimal_jobs_keep_deadline_and_budget_too(seed: int) -> None:
    outcome = play(cruel(seed, 2), TimeOptimal())
    assert outcome.in_time
    assert outcome.in_budget


@pytest.mark.parametrize("slack", [2.0, 10.0])
def test_where_vms_die_as_they_boot_it_ends_on_demand(slack: float) -> None:
    fleet = Fleet(examples_per_s=(0.0, 1.0))
    lives = [(60.0 * n, 60.0 * n + 0.9 * fleet.boot_s) for n in range(20_000)]
    zone = Zone(name="zone", lives=tuple(lives), usd_per_hour=(0.9,))
    train_s = 20 * HOUR_S
    job = Scenario(
        name="cruel",
        zones=(zone,),
        on_demand_usd_per_hour=ON_DEMAND_USD,
        notice_s=0.0,
        fleet=fleet,
        examples=train_s,
        deadline_s=slack * train_s,
        max_usd=math.inf,
    )
    outcome = play(replace(job, max_usd=10 * job.on_demand()[1]), CostOptimal())
    assert outcome.in_time
    assert 1.0 < outcome.usd / job.on_demand()[1] <= 1 + WASTE
    assert 1 < outcome.launches < 40
