"""The split of rented time and its cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.story import OFFER

from spottrain.pricing.billing.ledger import LedgerLine
from spottrain.pricing.billing.money import Money, Rate, total
from spottrain.varuna_manager.reporting.time_split import (
    KINDS,
    Activity,
    Interval,
    Rental,
    TimeSplit,
    rental,
    share_money,
    split_time,
    sum_of,
)

VM = Rental(
    vm_id="a",
    offer=OFFER,
    slots=2,
    launched_s=100.0,
    ready_s=110.0,
    end_s=200.0,
    billed_s=100.0,
    cost=Money(1000),
    if_on_demand=Money(3000),
)


def stretch(from_s: float, to_s: float, activity: Activity, slots: int = 2) -> Interval:
    return Interval(from_s=from_s, to_s=to_s, activity=activity, slots={"a": slots})


def test_a_second_goes_to_what_was_done_in_it() -> None:
    did = [
        stretch(0.0, 105.0, "waiting"),
        stretch(105.0, 120.0, "preparing"),
        stretch(120.0, 130.0, "morphing"),
        stretch(130.0, 160.0, "training"),
        stretch(160.0, 164.0, "lost"),
        stretch(164.0, 170.0, "waiting"),
        stretch(170.0, 300.0, "training"),
    ]
    split = split_time(VM, did)
    assert split == TimeSplit(productive_s=60.0, morph_s=10.0, boot_s=20.0, idle_s=6.0, lost_s=4.0)
    assert split.billed_s == VM.billed_s


def test_a_vm_with_one_of_its_two_slots_in_the_plan_works_by_half() -> None:
    split = split_time(VM, [stretch(0.0, 300.0, "training", slots=1)])
    assert (split.productive_s, split.idle_s) == (45.0, 45.0)


def test_a_vm_that_takes_no_part_is_idle() -> None:
    split = split_time(replace(VM, vm_id="b"), [stretch(0.0, 300.0, "training")])
    assert (split.productive_s, split.idle_s, split.boot_s) == (0.0, 90.0, 10.0)


def test_what_is_billed_beyond_a_life_is_idle() -> None:
    split = split_time(replace(VM, billed_s=160.0), [stretch(0.0, 300.0, "training")])
    assert (split.productive_s, split.idle_s) == (90.0, 60.0)


TIMES = st.integers(0, 300).map(float)
DOINGS = st.sampled_from(["waiting", "preparing", "morphing", "training", "lost"])


@given(
    st.lists(TIMES, min_size=2, max_size=12, unique=True),
    st.lists(DOINGS, min_size=11, max_size=11),
    st.tuples(TIMES, TIMES, TIMES),
    st.integers(0, 4),
    st.floats(0.0, 100.0),
)
def test_the_parts_always_add_up_to_what_is_billed(
    cuts: list[float],
    doings: list[Activity],
    life: tuple[float, float, float],
    slots: int,
    beyond_s: float,
) -> None:
    cuts.sort()
    did = [
        stretch(begin, end, activity, slots)
        for begin, end, activity in zip(cuts, cuts[1:], doings, strict=False)
    ]
    launched_s, ready_s, end_s = sorted(life)
    vm = replace(
        VM,
        launched_s=launched_s,
        ready_s=ready_s,
        end_s=end_s,
        billed_s=end_s - launched_s + beyond_s,
    )
    split = split_time(vm, did)
    assert split.billed_s == pytest.approx(vm.billed_s, abs=1e-6)
    assert all(seconds >= 0 for seconds in split.parts().values())
    assert sum_of([split, split]).billed_s == pytest.approx(2 * vm.billed_s, abs=1e-6)


@given(
    st.integers(0, 10**18),
    st.lists(st.floats(0.0, 1e7), min_size=len(KINDS), max_size=len(KINDS)),
)
def test_the_money_of_all_kinds_of_time_is_all_the_money(grains: int, seconds: list[float]) -> None:
    split = TimeSplit(**{f"{kind}_s": s for kind, s in zip(KINDS, seconds, strict=True)})
    shares = share_money(Money(grains), split)
    assert total(shares.values()) == Money(grains)
    assert set(shares) == set(KINDS)


def test_money_goes_with_time() -> None:
    split = TimeSplit(productive_s=75.0, boot_s=25.0)
    shares = share_money(Money(1000), split)
    assert (shares["productive"], shares["boot"]) == (Money(750), Money(250))


def test_a_line_of_the_ledger_becomes_a_rental() -> None:
    line = LedgerLine(
        offer=OFFER,
        rate=Rate.of(3.6),
        on_demand=Rate.of(7.2),
        from_us=100_000_000,
        ready_us=110_000_000,
        ended_us=200_000_000,
    )
    one = rental("a", line, 0, 500.0)
    assert one is not None
    assert (one.launched_s, one.ready_s, one.end_s) == (100.0, 110.0, 200.0)
    assert (one.slots, one.billed_s) == (1, 100.0)
    assert (one.cost.usd, one.if_on_demand.usd) == (0.1, 0.2)
    running = rental("a", replace(line, ended_us=None, ready_us=None), 4, 150.0)
    assert running is not None
    assert (running.end_s, running.ready_s, running.slots) == (150.0, 150.0, 4)
    assert rental("a", LedgerLine(gone_us=5), 1, 500.0) is None


def test_the_least_charge_of_a_cloud_is_in_what_is_billed() -> None:
    offer = replace(OFFER, cloud="aws")
    line = LedgerLine(offer=offer, rate=Rate.of(3.6), from_us=0, ended_us=10_000_000)
    one = rental("a", line, 1, 500.0)
    assert one is not None
    assert (one.end_s, one.billed_s) == (10.0, 60.0)
    assert split_time(one, []).parts()["idle"] == 50.0
