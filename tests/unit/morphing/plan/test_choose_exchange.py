"""What travels between workers: the library of gradients, the type of activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.morphing.plan.test_choose import inputs, on_gpus, plan_of

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.wire.model import Network, RingProfile, WireType


def ring(bandwidth_bytes_per_s: float, *, on_device: bool) -> RingProfile:
    return RingProfile(
        ranks=4,
        rings=1,
        between_vms=True,
        latency_s=1e-3,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        on_device=on_device,
    )


def summing(nccl_bytes_per_s: float, gloo_bytes_per_s: float) -> PlanInputs:
    """Four GPUs that each hold the whole model."""
    case = on_gpus(inputs(vms=4), 0)
    rings = (
        ring(gloo_bytes_per_s, on_device=False),
        ring(nccl_bytes_per_s, on_device=True),
    )
    profile = replace(case.profile, rings=rings, download_bytes_per_s=1e12)
    profile = replace(profile, upload_bytes_per_s=1e12)
    return replace(case, profile=profile, pipeline_depth=1)


@pytest.mark.parametrize(("nccl", "gloo", "faster"), [(2e9, 1e9, "nccl"), (1e9, 2e9, "gloo")])
def test_the_library_that_was_measured_faster_is_taken(
    nccl: float, gloo: float, faster: Network
) -> None:
    case = summing(nccl, gloo)
    choice = choose_plan(case)
    assert choice.plan is not None
    assert (choice.plan.network, choice.candidates[0].network) == (faster, faster)
    best = choice.candidates[0]
    assert best.nccl_s is not None
    assert best.gloo_s is not None
    assert (best.nccl_s < best.gloo_s) == (faster == "nccl")
    tolds: tuple[Network, ...] = ("nccl", "gloo")
    for told in tolds:
        plan = plan_of(replace(case, network=told))
        assert plan.network == told
        slower = plan.predicted_step_s > choice.plan.predicted_step_s
        assert slower == (told != faster)


def test_the_running_plan_keeps_its_library_where_nothing_changed() -> None:
    case = summing(1e9, 2e9)
    running = plan_of(case)
    assert plan_of(replace(case, previous=running)) == running


def test_without_measured_sums_on_gpus_nothing_is_chosen() -> None:
    case = summing(1e9, 2e9)
    silent = replace(case, profile=replace(case.profile, rings=case.profile.rings[:1]))
    choice = choose_plan(silent)
    assert choice.plan is not None
    assert choice.plan.network == "auto"
    assert choice.candidates[0].nccl_s is choice.candidates[0].gloo_s is None
    assert plan_of(replace(inputs(vms=4), pipeline_depth=1)).network == "auto"


def sending(element_bytes: int, wire: WireType) -> PlanInputs:
    """Two stages, between which links are slower than the stages compute."""
    case = replace(inputs(vms=2), pipeline_depth=2, wire=wire)
    (one,) = case.profile.microbatches
    sections = tuple(replace(s, output_element_bytes=element_bytes) for s in one.sections)
    link = replace(case.profile.between_vms, bandwidth_bytes_per_s=1e6)
    return replace(
        case,
        profile=replace(
            case.profile,
            microbatches=(replace(one, sections=sections),),
            between_vms=link,
        ),
    )


def test_plans_count_the_bytes_that_travel() -> None:
    own_s = plan_of(sending(4, "own")).predicted_step_s
    assert plan_of(sending(4, "bf16")).predicted_step_s < 0.6 * own_s
    assert plan_of(sending(8, "fp16")).predicted_step_s < 0.3 * own_s
    # Nothing is widened, and of an unknown type the measured bytes count.
    for element_bytes in (0, 1, 2):
        case = sending(element_bytes, "bf16")
        assert plan_of(case).predicted_step_s == own_s
