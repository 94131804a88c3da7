"""Tied parameters: what it takes to sum them is part of choosing the cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.morphing.plan.test_choose import MIB, inputs, plan_of

from spottrain.codec import decode, encode
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import ModelFacts, TiedParameter


def tied(case: PlanInputs, first: int, last: int, mib: int) -> PlanInputs:
    one = TiedParameter(name="weight", sections=(first, last), param_bytes=mib * MIB)
    return replace(case, facts=replace(case.facts, tied=(one,)))


def two_stages(virtual_nodes: int) -> PlanInputs:
    case = inputs(vms=2, virtual_nodes=virtual_nodes, memory_bytes=5100 * MIB)
    big = tuple(replace(s, optimizer_bytes=400 * MIB) for s in case.facts.sections)
    case = replace(case, facts=replace(case.facts, sections=big))
    return replace(case, schedule="varuna", recompute=False)


def test_tied_sections_come_into_one_stage_where_that_saves_more_than_it_costs() -> None:
    assert plan_of(two_stages(2)).stage_bounds == (0, 4, 8)
    heavy = tied(two_stages(2), 3, 4, 100)
    chosen = plan_of(heavy)
    assert chosen.stage_bounds in [(0, 3, 8), (0, 5, 8)]
    even = replace(chosen, stage_bounds=(0, 4, 8))
    step = simulate_step(even, heavy.profile, heavy.facts, reduction="fast")
    assert chosen.predicted_step_s < step.step_s


@pytest.mark.parametrize(("virtual_nodes", "mib"), [(2, 1), (64, 100)])
def test_tied_sections_stay_apart_where_an_even_cut_saves_more(
    virtual_nodes: int, mib: int
) -> None:
    light = tied(two_stages(virtual_nodes), 3, 4, mib)
    assert plan_of(light).stage_bounds == (0, 4, 8)


def test_tied_sections_that_cannot_be_in_one_stage_stay_apart() -> None:
    ends = tied(two_stages(2), 0, 7, 100)
    assert plan_of(ends).stage_bounds == (0, 4, 8)


def test_facts_from_before_sizes_were_kept_can_still_be_read() -> None:
    facts = tied(two_stages(2), 3, 4, 0).facts
    old = encode(facts).replace(',"param_bytes":0}', "}", 1)
    assert "param_bytes" not in old.split('"tied":')[1]
    assert decode(ModelFacts, old) == facts
