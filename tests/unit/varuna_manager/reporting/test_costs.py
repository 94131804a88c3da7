"""The cost of a job, by kind, and of alternatives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.varuna_manager.reporting.test_history import past_of
from tests.unit.varuna_manager.reporting.test_time_split import VM
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.bill import cost_parts
from spottrain.varuna_manager.reporting.costs import cheapest_fixed, cost
from spottrain.varuna_manager.reporting.history import PriceSeries

HOUR = replace(VM, slots=1, launched_s=0.0, ready_s=0.0, end_s=3600.0, billed_s=3600.0)


def line(usd: float, *later: tuple[float, float], **offer: object) -> PriceSeries:
    return PriceSeries(replace(OFFER, **offer), [(0.0, usd), *later])  # type: ignore[arg-type]


def told() -> Story:
    """Two VMs that trained for an hour, one of them longer, at a dollar an hour."""
    story = Story().training("a", "b", steps=3)
    story.now_s += 3597.0
    story.commit(4)
    story.tell(e.StopRequested, by="me", now=True)
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    return story


def test_the_bill_is_split_by_time_kind_and_zone() -> None:
    story = told()
    document = cost(story.state, past_of(story), story.now_s)
    assert document["usd_spent"] == pytest.approx(2.0, rel=1e-5)
    assert document["examples_done"] == 32
    assert document["usd_per_million_examples"] == pytest.approx(62500, rel=1e-5)
    seconds = document["vm_seconds"]
    assert seconds["billed"] == pytest.approx(7200.0)
    assert seconds["productive"] == pytest.approx(7200.0)
    assert sum(document["usd_by_kind"].values()) == document["usd_spent"]
    assert sum(document["usd_by_time"].values()) == pytest.approx(document["usd_spent"], abs=5e-6)
    (zone,) = document["by_zone"]
    assert (zone["zone"], zone["vms"]) == ("local z", 2)
    assert [row["vm"] for row in document["by_vm"]] == ["a", "b"]
    assert [row["type"] for row in document["by_type"]] == ["t"]


def test_savings_are_relative_to_on_demand_and_the_cheapest_single_offer() -> None:
    story = told()
    savings = cost(story.state, past_of(story), story.now_s)["savings"]
    assert savings["usd_on_demand"] == pytest.approx(6.0, rel=1e-5)
    assert savings["saved_on_demand_share"] == pytest.approx(2 / 3, rel=1e-4)
    assert savings["fixed"]["usd"] == pytest.approx(2.0, rel=1e-5)
    assert savings["fixed"]["saved_share"] == pytest.approx(0.0, abs=1e-4)


def test_a_job_that_rented_nothing_costs_nothing_and_divides_by_nothing() -> None:
    story = Story()
    document = cost(story.state, past_of(story), story.now_s)
    assert document["usd_spent"] == 0.0
    assert document["usd_per_million_examples"] is None
    assert document["useful_share"] is None
    assert document["savings"]["fixed"] is None
    assert document["savings"]["saved_on_demand_share"] is None


def test_the_fixed_choice_is_held_at_the_price_of_each_moment() -> None:
    prices = {"moving": line(1.0, (1800.0, 3.0)), "still": line(2.5)}
    offer, usd = cheapest_fixed([HOUR], prices) or (None, 0.0)
    assert offer == prices["moving"].offer
    assert usd == pytest.approx(2.0)


def test_a_faster_or_larger_machine_is_needed_for_less_time() -> None:
    big = line(3.0, gpus=4, zone="big")
    fast = line(1.0, gpu_speed=2.0, zone="fast")
    for one, usd in ((big, 0.75), (fast, 0.5)):
        found = cheapest_fixed([HOUR], {"it": one, "dear": line(9.0)})
        assert found is not None
        assert found[0] == one.offer
        assert found[1] == pytest.approx(usd)


def test_what_vanished_or_has_too_little_memory_is_no_choice() -> None:
    gone = line(0.1)
    gone.is_constant = False
    small = line(0.1, gpu_memory_bytes=OFFER.gpu_memory_bytes - 1)
    none = line(0.1, gpus=0)
    kept = line(2.0)
    prices = {"gone": gone, "small": small, "none": none, "kept": kept}
    found = cheapest_fixed([HOUR], prices)
    assert found is not None
    assert found[0] == kept.offer
    assert found[1] == pytest.approx(2.0)
    assert cheapest_fixed([HOUR], {"gone": gone}) is None
    assert cheapest_fixed([], prices) is None


def test_people_see_time_money_and_the_bill() -> None:
    story = told()
    story_view = documents.cost(story.state, past_of(story), False, story.now_s)
    console = Console(width=150)
    with console.capture() as captured:
        for part in cost_parts(story_view, "zone"):
            console.print(part, markup=False)
    text = captured.get()
    for words in (
        "job: stopped",
        "per million examples",
        "productive",
        "100.0%",
        "cheapest single offer",
        "local z",
    ):
        assert words in text
