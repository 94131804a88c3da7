"""Two homes of committed state on GPUs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from tests.unit.morphing.plan.test_choose import MIB, inputs, on_gpus, plan_of

from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs

GIB = 2**30


def case(memory_mib: int = 2**20, host_gib: int = 0) -> PlanInputs:
    """Eight sections of 400 MiB of state, whose update is ten times as fast on a GPU."""
    small = inputs(vms=4, sections=8, memory_bytes=memory_mib * MIB)
    facts = replace(
        small.facts,
        sections=tuple(
            replace(section, param_bytes=100 * MIB, optimizer_bytes=200 * MIB)
            for section in small.facts.sections
        ),
    )
    profile = replace(
        small.profile,
        optimizer_s_per_byte=1e-11,
        host_optimizer_s_per_byte=1e-10,
        download_bytes_per_s=1e10,
        upload_bytes_per_s=1e10,
    )
    return on_gpus(replace(small, facts=facts, profile=profile), host_gib * GIB)


def test_cpu_slots_know_one_home() -> None:
    assert inputs().homes == ("host",)
    assert plan_of(inputs()).state == "host"


def test_the_faster_home_is_taken_and_both_are_shown() -> None:
    choice = choose_plan(case())
    assert choice.plan is not None
    assert choice.plan.state == "device"
    same = [
        c
        for c in choice.candidates
        if (c.shape, c.schedule, c.recompute)
        == (choice.plan.shape, choice.plan.schedule, choice.plan.recompute)
    ]
    there = next(c for c in same if c.state == "device")
    here = next(c for c in same if c.state == "host")
    assert (here.stage_bytes or 0) < (there.stage_bytes or 0)
    assert (here.host_stage_bytes or 0) > (there.host_stage_bytes or 0)
    assert (here.update_s or 0) > (there.update_s or 0)


def test_state_is_kept_on_the_host_where_a_device_is_too_small() -> None:
    small = case(600)
    assert plan_of(small).state == "host"
    assert plan_of(replace(small, state="host")) == plan_of(small)
    refused = choose_plan(replace(small, state="device", pipeline_depth=2))
    assert refused.plan is None
    assert "1,702.9 MB" in refused.candidates[0].why_not


def test_state_is_kept_on_devices_where_hosts_are_too_small() -> None:
    ample = replace(case(host_gib=64), pipeline_depth=1)
    assert plan_of(replace(ample, state="host")).state == "host"
    scarce = replace(case(host_gib=6), pipeline_depth=1)
    assert plan_of(scarce).state == "device"
    choice = choose_plan(replace(scarce, state="host"))
    assert choice.plan is None
    why_not = choice.candidates[0].why_not
    assert "of its VM's memory, a slot has 6,442.5 MB" in why_not
    # Deeper pipelines have less of it each.
    assert plan_of(replace(case(host_gib=6), state="host")).pipeline_depth > 1


def test_hosts_too_small_for_any_plan_are_named_with_what_to_change() -> None:
    choice = choose_plan(replace(case(host_gib=3), state="host"))
    assert choice.plan is None
    assert re.fullmatch(
        r"the model needs \d+ devices of .* of a VM.* each: got .*; "
        r"take VMs with more memory for each GPU, or change runtime\.state",
        choice.why_not,
    )


def test_precision_halves_what_is_computed_on() -> None:
    full = replace(case(), state="host", pipeline_depth=1)
    half = replace(full, precision="bf16")
    (large, *_), (small, *_) = (choose_plan(one).candidates for one in (full, half))
    assert (large.stage_bytes or 0) - (small.stage_bytes or 0) == 8 * 50 * MIB
    staged = (small.host_stage_bytes or 0) - (large.host_stage_bytes or 0)
    assert staged == 8 * 50 * MIB, "converted on the host"


def test_memory_of_a_host_must_make_sense() -> None:
    broken = tuple(replace(d, host_memory_bytes=-1) for d in case().slots)
    with pytest.raises(PlanError, match=r"host_memory_bytes of vm"):
        choose_plan(replace(case(), slots=broken))


def test_no_more_is_page_locked_than_a_vm_allows() -> None:
    def limited(mib: int, **changes: Any) -> PlanInputs:
        asked = replace(case(), pipeline_depth=1, **changes)
        slots = (replace(d, locked_memory_bytes=mib * MIB) for d in asked.slots)
        return replace(asked, slots=tuple(slots))

    # 8 sections of 100 MiB of parameters, as much of gradients, twice as much of state.
    whole_mib = 8 * 400
    assert plan_of(limited(whole_mib, state="host")).state == "host"
    assert plan_of(limited(whole_mib - 1)).state == "device"
    refused = choose_plan(limited(whole_mib - 1, state="host"))
    assert refused.plan is None
    assert "3,355.5 MB page-locked, its VM allows 3,354.4 MB" in (refused.candidates[0].why_not)
    none_fits = choose_plan(replace(limited(1, state="host"), pipeline_depth=None))
    assert "ulimit -l" in none_fits.why_not
