"""The all-knowing bound against every plan there is on small cases."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain_lab.markets.offline_optimum import SLOT_S, KnownSupply, min_usd

RATES = (0.0, 1.0, 1.8)


def usd(supplies: list[KnownSupply], examples: float, slots: float, boot_s: float = 0.0) -> float:
    return min_usd(supplies, RATES, boot_s, examples, slots * SLOT_S)


def always(*prices: float) -> KnownSupply:
    return KnownSupply(lives=None, usd_per_hour=prices)


def test_work_is_done_in_the_cheapest_hours() -> None:
    market = always(4.0, 1.0, 3.0)
    # A slot is half an hour: one VM in the second slot, then 0.8 more beside it.
    assert usd([market], SLOT_S, 3) == pytest.approx(0.5)
    assert usd([market], 1.8 * SLOT_S, 3) == pytest.approx(1.0)


def test_the_second_vm_costs_more_an_example_than_the_first_one() -> None:
    market = always(1.0)
    assert usd([market], 2 * SLOT_S, 2) == pytest.approx(2 * 0.5)
    assert usd([market], 2 * SLOT_S, 1.5) > 2 * 0.5


def test_every_rise_pays_for_a_boot() -> None:
    spot = KnownSupply(lives=[(0.0, SLOT_S), (2 * SLOT_S, 3 * SLOT_S)], usd_per_hour=[2.0])
    boot_s = 360.0
    work = 2 * (SLOT_S - boot_s)
    # Each life trains after its boot: two half hours, less what the second one shares
    # with the first in the mean of its slot (0.8 VMs train on the mean, so 0.8 boots).
    training, boots = 2 * 2.0 * 0.5 * 0.8, 2 * 0.8 * 2.0 * 0.1
    assert usd([spot], work, 3, boot_s) == pytest.approx(training + boots)
    assert training + boots <= 2 * 2.0 * 0.5


def test_infeasible_work_has_an_infinite_cost() -> None:
    assert usd([always(1.0)], 1.9 * SLOT_S, 1) == math.inf


@st.composite
def markets(draw: st.DrawFn) -> tuple[list[KnownSupply], int, float]:
    slots = draw(st.integers(2, 5))
    rng = random.Random(draw(st.integers(0, 10**6)))
    spot = [
        KnownSupply(
            lives=[
                (a * SLOT_S, b * SLOT_S)
                for a in range(slots)
                for b in [rng.randint(a + 1, slots)]
                if rng.random() < 0.4
            ],
            usd_per_hour=[rng.uniform(0.1, 1.0) for _ in range(slots)],
        )
        for _ in range(rng.randint(1, 2))
    ]
    return [*spot, always(1.5)], slots, rng.uniform(0.1, 0.95) * slots * RATES[-1]


def by_brute_force(supplies: list[KnownSupply], slots: int, work: float) -> float:
    """Try all numbers of VMs of each supply in each slot; boots take no time here."""
    choices = []
    for slot in range(slots):
        options: dict[float, float] = {}
        caps = [
            2 if supply.lives is None else sum(a <= slot * SLOT_S < b for a, b in supply.lives)
            for supply in supplies
        ]
        for counts in itertools.product(*(range(min(cap, 2) + 1) for cap in caps)):
            if sum(counts) <= 2:
                cost = sum(
                    count * supply.usd_per_hour[min(slot, len(supply.usd_per_hour) - 1)]
                    for count, supply in zip(counts, supplies, strict=True)
                )
                done = RATES[sum(counts)]
                options[done] = min(options.get(done, math.inf), cost * SLOT_S / 3600)
        choices.append(list(options.items()))
    return min(
        (
            sum(cost for _, cost in plan)
            for plan in itertools.product(*choices)
            if sum(done for done, _ in plan) >= work - 1e-9
        ),
        default=math.inf,
    )


@given(markets())
def test_no_plan_of_whole_vms_is_cheaper_and_the_best_is_near(
    market: tuple[list[KnownSupply], int, float],
) -> None:
    supplies, slots, work = market
    least = usd(supplies, work * SLOT_S, slots)
    best = by_brute_force(supplies, slots, work)
    assert least <= best + 1e-6
    # Whole VMs and whole slots do at most one step too much, the most expensive one there is.
    most_expensive = 1.5 / (RATES[2] - RATES[1]) * SLOT_S / 3600
    assert best <= least + most_expensive + 1e-6


@given(markets(), st.integers(0, 10**6))
def test_with_boots_the_bound_never_passes_what_a_plan_of_lives_costs(
    market: tuple[list[KnownSupply], int, float], seed: int
) -> None:
    supplies, slots, _ = market
    draw, boot_s = random.Random(seed), 600.0
    # Rent some lives from a moment of our own until another, and count what comes out.
    moments = sorted(draw.uniform(0, slots * SLOT_S) for _ in range(4))
    spans = [(moments[0], moments[2]), (moments[1], moments[3])]
    price = supplies[-1].usd_per_hour[0]
    cost = sum(b - a for a, b in spans) * price / 3600
    grid = 5.0
    done = sum(
        grid * RATES[sum(a + boot_s <= at < b for a, b in spans)]
        for at in (grid * (k + 0.5) for k in range(int(slots * SLOT_S / grid)))
    )
    done -= 4 * grid  # what the grid may have rounded up
    if done <= 0:
        return
    assert usd(supplies, done, slots, boot_s) <= cost + 1e-6
