"""The published configurations of Varuna fit its machines, as docs/planning.md shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from scripts.published_profiles import MODELS, ON_NVLINK, Published, workload_of
from tests.unit.morphing.steps import plan_bytes

from spottrain.codec import decode, encode
from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.offers.preview import workload_inputs

PROFILES = Path(__file__).resolve().parents[4] / "examples" / "profiles"
EACH = {model.name: model for model in MODELS}


def inputs_of(model: Published) -> PlanInputs:
    text = (PROFILES / f"varuna-{model.name}.json").read_text()
    workload: Workload = decode(Workload, text)
    inputs = workload_inputs(workload, model.depth * model.width)
    return replace(inputs, pipeline_depth=model.depth, schedule="varuna", recompute=True)


def chosen(name: str) -> tuple[PlanInputs, Choice]:
    inputs = inputs_of(EACH[name])
    return inputs, choose_plan(inputs)


@pytest.mark.parametrize("model", [*MODELS, ON_NVLINK], ids=lambda model: model.name)
def test_files_are_what_the_script_writes(model: Published) -> None:
    path = PROFILES / f"varuna-{model.name}.json"
    assert path.read_text() == encode(workload_of(model)) + "\n"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_published_configuration_fits(model: Published) -> None:
    inputs, choice = chosen(model.name)
    plan = choice.plan
    assert plan is not None
    assert plan.shape == f"{model.depth}x{model.width}"
    assert (plan.schedule, plan.recompute) == ("varuna", True)
    memory = plan_bytes(inputs.facts, inputs.profile, plan, "fast", inputs.compute)
    room = inputs.slots[0].room
    assert all(stage.needed.beyond(room) <= 0 for stage in memory)


def test_8_3_billion_parameters_were_refused_without_state_on_the_host() -> None:
    inputs, choice = chosen("8.3b")
    assert choice.plan is not None
    assert choice.plan.state == "host"
    there = choose_plan(replace(inputs, state="device"))
    assert there.plan is not None
    even = tuple(range(0, 73, 4))
    assert there.plan.stage_bounds != even, "some stages need fewer layers"
    assert there.plan.predicted_step_s > 1.2 * choice.plan.predicted_step_s
    # As before GPUs had two homes: everything in the memory that computes.
    slots = tuple(replace(device, is_gpu=False) for device in inputs.slots)
    before = choose_plan(replace(inputs, slots=slots, precision="fp32"))
    refused = next(c for c in before.candidates if c.in_flight_bound is None)
    assert (refused.stage_bytes or 0) > 16e9


@pytest.mark.nightly
def test_200_billion_parameters_need_state_on_the_host() -> None:
    inputs, choice = chosen("200b")
    assert choice.plan is not None
    assert choice.plan.state == "host"
    assert choice.plan.in_flight_bound is not None
    there = choose_plan(replace(inputs, state="device"))
    assert there.plan is None
    small = tuple(replace(d, host_memory_bytes=61 << 30) for d in inputs.slots)
    refused = choose_plan(replace(inputs, slots=small))
    assert refused.plan is None
    reasons = " ".join(candidate.why_not for candidate in refused.candidates)
    assert "65,498.3 MB" in reasons
    assert "of a VM" in refused.why_not
