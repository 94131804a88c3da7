"""What a choice is made from: sizes left open, what travels as JSON, what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import microbatch_profile
from tests.unit.morphing.plan.test_choose import (
    MIB,
    inputs,
    linked,
    measured,
    model,
    plan_of,
    with_memory,
)

from spottrain.codec import decode, encode
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import Choice, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs, PlanQuestion, question_of
from spottrain.morphing.plan.placement import Device
from spottrain.wire.model import Profile
from spottrain.wire.plan import Slot


def sized(each_s: dict[int, float]) -> Profile:
    """A profile whose forwards take so long, by the micro-batch's size."""
    base = measured(8)
    return replace(
        base,
        microbatches=tuple(
            microbatch_profile(
                (
                    replace(
                        s,
                        forward_s=time_s,
                        recompute_s=time_s,
                        backward_s=2 * time_s,
                        saved_bytes=4 * MIB * m,
                        output_bytes=s.output_bytes * m // 4,
                    )
                    for s in base.microbatches[0].sections
                ),
                m,
            )
            for m, time_s in each_s.items()
        ),
    )


def test_a_size_left_open_is_the_smallest_that_is_nearly_as_good() -> None:
    profile = sized({1: 0.006, 2: 0.0082, 4: 0.016, 8: 0.0319})
    case = replace(inputs(), profile=profile, microbatch_size=None)
    assert plan_of(case).microbatch_size == 2
    assert plan_of(replace(case, microbatch_size=8)).microbatch_size == 8
    odd = replace(case, minibatch_size=63)
    assert plan_of(odd).microbatch_size == 1


@pytest.mark.rotated
def test_a_size_left_open_is_one_that_fits() -> None:
    profile = sized({1: 0.006, 4: 0.007})
    case = replace(inputs(), profile=profile, microbatch_size=None)
    sizes = {
        choice.plan.microbatch_size
        for mib in range(1000, 60, -4)
        if (choice := choose_plan(with_memory(case, mib))).plan is not None
    }
    assert sizes == {1, 4}


def test_inputs_and_choice_travel_as_json() -> None:
    given_inputs = inputs()
    choice = choose_plan(given_inputs)
    again = replace(given_inputs, previous=choice.plan)
    assert decode(PlanInputs, encode(again)) == again
    assert decode(Choice, encode(choice)) == choice
    assert decode(PlanQuestion, encode(question_of(again))) == question_of(again)


def test_a_question_names_the_model_and_the_profile_it_was_about() -> None:
    case = inputs()
    faster = replace(case, profile=linked(case.profile, latency_s=0.0))
    assert question_of(case) == question_of(replace(case))
    assert question_of(case) != question_of(faster)


def slower(**changes: Any) -> Profile:
    base = measured(8)
    one = base.microbatches[0]
    first = replace(one.sections[0], **changes)
    sections = (first, *one.sections[1:])
    return replace(base, microbatches=(replace(one, sections=sections),))


DEVICE = Device(slot=Slot(vm_id="vm", index=0), memory_bytes=1, speed=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatch_size": 63}, "must be a multiple of microbatch_size: got 63 and 4"),
        ({"minibatch_size": 0}, "must be a multiple"),
        ({"microbatch_size": 0}, "must be a multiple"),
        ({"minibatch_size": 6, "microbatch_size": None}, "multiple of one of"),
        (
            {"profile": slower(forward_s=math.nan)},
            r"sections\[0\].forward_s .* got nan",
        ),
        ({"profile": slower(forward_s=0.0)}, r"sections\[0\].forward_s .* got 0.0"),
        ({"profile": slower(backward_s=-1.0)}, r"sections\[0\].backward_s .* got -1"),
        (
            {"profile": linked(measured(8), bandwidth_bytes_per_s=math.nan)},
            "bandwidth_bytes_per_s must be above 0",
        ),
        (
            {"profile": linked(measured(8), latency_s=-1.0)},
            "latency_s must be at least",
        ),
        ({"microbatch_size": 2}, r"micro-batches of \(4,\): got microbatch_size 2"),
        ({"facts": model(7)}, "7 sections, in order: got"),
        ({"pipeline_depth": 9}, "depth must be at most 8, the sections of the model: got 9"),
        ({"slots": (replace(DEVICE, speed=math.nan),)}, r"speed of vm\[0\]"),
        ({"slots": (replace(DEVICE, memory_bytes=0),)}, r"memory_bytes of vm\[0\]"),
        (
            {"slots": (DEVICE,), "objective": "examples_per_dollar"},
            "usd_per_hour of vm must be a number above 0",
        ),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        choose_plan(replace(inputs(), **change))  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 1
