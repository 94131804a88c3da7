"""Shapes of fleets: the planner's own choice, and what no plan can be made from."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import slots_of
from tests.unit.morphing.plan.test_choose import MIB
from tests.unit.morphing.spot import GIB, workload

from spottrain.morphing.adapt.policy import capped_slowdown
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import MEASURED, NOISE, choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.workload import Workload
from spottrain.wire.model import SectionProfile
from spottrain_lab.traces.shapes import Shapes

SLACK = 0.02
"""What more can be had with fewer replicas, which shapes do not leave out."""


def planned(load: Workload, vms: int, share: float = 0.0) -> PlanInputs:
    slots = slots_of(f"vm{i:03}" for i in range(vms))
    memory_bytes = load.gpu_memory_bytes
    return PlanInputs(
        facts=load.facts,
        profile=load.profile,
        slots=tuple(Device(slot=slot, memory_bytes=memory_bytes, speed=1.0) for slot in slots),
        minibatch_size=load.minibatch_size,
        microbatch_size=load.profile.microbatch_sizes[0],
        reduction="fast",
        schedule="varuna",
        recompute=True,
        lag_share=share,
    )


@pytest.mark.parametrize("memory_bytes", [GIB, 110 * MIB])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_the_best_shape_is_the_planner_s_choice(memory_bytes: int, share: float) -> None:
    load = replace(workload(minibatch_size=240), gpu_memory_bytes=memory_bytes)
    known = Shapes(load)
    for vms in range(1, 17):
        plan = choose_plan(planned(load, vms, share)).plan
        shape = known.best(vms, share)
        if plan is None:
            assert shape is None
            continue
        if plan.segments > 1:  # a replay's shapes recompute as a whole
            continue
        assert shape is not None
        # The planner leaves out replicas that gain nothing, and takes equals as good.
        assert shape.depth * shape.width <= vms
        depth, width = plan.pipeline_depth, plan.data_parallel_width
        planned_s = plan.predicted_step_s * capped_slowdown(depth, width, share)
        shape_s = shape.step_s * capped_slowdown(shape.depth, shape.width, share)
        # It also prefers plans that outlive any VM, which replays do not.
        allowed = (1 + NOISE) * (1 + MEASURED if width > 1 else 1)
        assert planned_s <= shape_s * allowed
        assert shape_s <= planned_s * (1 + SLACK)


def test_no_shape_takes_more_vms_than_there_are() -> None:
    known = Shapes(workload())
    for vms in range(1, 25):
        shape = known.best(vms)
        assert shape is not None
        assert shape.slots <= vms


def test_a_fixed_depth_takes_as_many_replicas_as_there_are_vms_for() -> None:
    known = Shapes(workload())
    shape = known.at_depth(3, 11)
    assert shape is not None
    assert (shape.depth, shape.width, shape.slots) == (3, 3, 9)
    assert known.at_depth(3, 2) is None
    assert known.at_depth(7, 20) is None, "there are six sections"


def test_a_worker_new_to_a_stage_fetches_its_state() -> None:
    shape = Shapes(workload()).at(3, 1)
    assert shape is not None
    assert shape.move_bytes == 2 * 12 * MIB, "two sections, parameters and optimizer"


def test_a_model_that_does_not_fit_one_gpu_takes_several() -> None:
    assert Shapes(workload()).fewest() == 1
    small = Shapes(replace(workload(), gpu_memory_bytes=110 * MIB))
    fewest = small.fewest()
    assert fewest is not None
    assert fewest > 1
    assert small.best(fewest - 1) is None
    assert small.best(fewest) is not None
    assert Shapes(replace(workload(), gpu_memory_bytes=MIB)).fewest() is None


def test_a_gpu_keeps_state_in_the_memory_of_its_vm() -> None:
    """The first of both homes: shapes have one execution mode."""
    everything = workload()
    gpu = replace(everything, is_gpu=True, gpu_memory_bytes=2 * GIB)
    facts = gpu.facts
    large = replace(
        gpu,
        facts=replace(
            facts,
            sections=tuple(replace(section, optimizer_bytes=GIB) for section in facts.sections),
        ),
    )
    assert Shapes(large).at(1, 1) is not None
    assert Shapes(replace(large, is_gpu=False)).at(1, 1) is None
    assert Shapes(replace(large, host_memory_bytes=4 * GIB)).at(1, 1) is None


def profile_of(**changes: Any) -> Workload:
    return replace(workload(), profile=replace(workload().profile, **changes))


SECTIONS = workload().profile.microbatches[0].sections


def section_of(**changes: Any) -> Workload:
    return sections_of(replace(SECTIONS[0], **changes), *SECTIONS[1:])


def sections_of(*sections: SectionProfile) -> Workload:
    measured = replace(workload().profile.microbatches[0], sections=sections)
    return profile_of(microbatches=(measured,))


def link_of(**changes: Any) -> Workload:
    return profile_of(between_vms=replace(workload().profile.between_vms, **changes))


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            section_of(forward_s=math.nan),
            r"sections\[0\].forward_s .* above 0: got nan",
        ),
        (section_of(backward_s=-1.0), r"sections\[0\].backward_s"),
        (section_of(recompute_s=0.0), r"sections\[0\].recompute_s"),
        (link_of(bandwidth_bytes_per_s=0.0), "between_vms.bandwidth_bytes_per_s"),
        (link_of(latency_s=math.inf), "between_vms.latency_s"),
        (profile_of(fingerprint="other"), "to another model"),
        (sections_of(*SECTIONS[1:]), "of 6 sections, in order: got"),
        (replace(workload(), minibatch_size=66), "multiple"),
        (replace(workload(), minibatch_size=0), "multiple"),
        (replace(workload(), gpu_memory_bytes=0), "gpu_memory_bytes"),
        (replace(workload(), usd_per_hour=math.nan), "usd_per_hour"),
    ],
)
def test_a_workload_without_sense_is_refused(load: Workload, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Shapes(load)
