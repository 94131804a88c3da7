"""What is chosen for the profiles in examples/profiles, which docs/planning.md explains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spottrain.codec import decode
from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.layouts import Layouts, PlanLayout
from spottrain.morphing.plan.modes import RUNNABLE, Draft, ExecutionMode
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.offers.preview import workload_inputs

PROFILES = Path(__file__).resolve().parents[4] / "examples" / "profiles"
STATED = {
    "compute-bound": 16,
    "slow-link": 16,
    "jittery-link": 16,
    "small-memory": 16,
    "many-gpus": 256,
    "uneven-sections": 16,
}
"""And on how many GPUs."""


def stated(name: str, gpus: int) -> PlanInputs:
    workload: Workload = decode(Workload, (PROFILES / f"{name}.json").read_text())
    return workload_inputs(workload, gpus)


def chosen(name: str) -> Candidate:
    choice = choose_plan(stated(name, STATED[name]))
    assert choice.plan is not None
    return choice.candidates[0]


def test_six_stated_profiles_lead_to_at_least_four_different_plans() -> None:
    plans = {name: chosen(name) for name in STATED}
    differ = {(c.shape, c.schedule, c.recompute, c.in_flight_bound) for c in plans.values()}
    assert len(differ) >= 4
    assert plans["compute-bound"].pipeline_depth == 1, "no bubble, a cheap all-reduce"
    assert plans["slow-link"].data_parallel_width == 1, "no all-reduce at all"
    assert plans["small-memory"].recompute, "nothing else fits as well"
    assert not plans["slow-link"].recompute, "there is room for all graphs"
    assert plans["many-gpus"].unused_slots > 0, "there are but 16 micro-batches"
    assert plans["uneven-sections"].pipeline_depth < plans["slow-link"].pipeline_depth


@pytest.mark.parametrize(
    ("gpus", "faster", "slower", "strictly"),
    [
        (36, (6, 6), (9, 4), False),
        (36, (9, 4), (18, 2), True),
        (100, (9, 11), (6, 16), True),
        (100, (6, 16), (18, 5), True),
    ],
)
def test_shapes_of_the_2_5_billion_model_rank_as_measured(
    gpus: int, faster: tuple[int, int], slower: tuple[int, int], strictly: bool
) -> None:
    """Varuna, table 3; mini-batches of 8192 as in its table 7, its own schedule."""
    case = replace(stated("gpt2-2.5b-v100", gpus), minibatch_size=8192)
    layouts = Layouts(case, 2)
    varuna = ExecutionMode(RUNNABLE.index("varuna"), 1, 0, True)

    def step_s(shape: tuple[int, int]) -> float:
        layout = layouts.lay_out(Draft(*shape, varuna))
        assert isinstance(layout, PlanLayout)
        return layouts.simulate(layout).predicted_step_s

    assert step_s(faster) * (1.02 if strictly else 1.0) <= step_s(slower)
