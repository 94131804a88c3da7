"""NCCL that does not start: once it is tried again, after the second time gloo sums."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.varuna_manager.story import FOUR, PROFILE, Story, plan_over

from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.reducing import NCCL_FAILED, networks_of
from spottrain.varuna_manager.core.generation import MAX_NCCL_FAILURES
from spottrain.varuna_manager.core.model import events as e
from spottrain.wire import messages
from spottrain.wire.model import Profile, RingProfile

RINGS = (
    RingProfile(ranks=2, rings=1, between_vms=True, latency_s=1e-4, bandwidth_bytes_per_s=1e9),
    RingProfile(
        ranks=2,
        rings=1,
        between_vms=True,
        latency_s=1e-5,
        bandwidth_bytes_per_s=1e10,
        on_device=True,
    ),
)
REASON = "the GPU has no memory left for it"


def training() -> Story:
    """Up to the first generation, planned by a profile with both libraries."""
    story = Story()
    story.start()
    story.boot("a", "b")
    story.prepare(replace(PROFILE, rings=RINGS))
    story.plan("a", "b")
    story.open()
    return story


def profile_of(story: Story) -> Profile:
    assert story.profile is not None
    return story.profile


def fails(story: Story) -> None:
    number = story.generation.number
    story.report("b", messages.NcclFailed(generation=number, slot=0, reason=REASON))
    story.broken("b", "a")


def test_gloo_sums_once_nccl_has_not_started_twice() -> None:
    story = training()
    for failure in range(1, MAX_NCCL_FAILURES + 1):
        assert profile_of(story).rings == RINGS
        fails(story)
        assert story.state.preparation.nccl_failures == failure % MAX_NCCL_FAILURES
        if failure < MAX_NCCL_FAILURES:
            story.open()  # of the next generation, under the same plan
    assert story.plan_asked is not None
    assert profile_of(story).rings == RINGS[:1]
    assert profile_of(story).sources[-1] == f"{NCCL_FAILED}b[0]: {REASON}"
    assert networks_of(plan_over(FOUR), profile_of(story), Compute(on_gpu=True)) == ("gloo",)


def test_a_worker_that_ends_itself_because_nccl_failed_is_no_loss() -> None:
    story = training()
    number = story.generation.number
    story.report("b", messages.NcclFailed(generation=number, slot=0, reason=REASON))
    ended = "worker of slot 0 ended itself: the device is unusable"
    story.report("b", messages.WorkerDied(generation=number, slot=0, reason=ended))
    story.broken("a")
    assert story.current_generation is None or story.generation.number > number
    assert story.state.preparation.nccl_failures == 1
    assert story.state.training.fruitless == 1


def test_nccl_that_fails_because_a_vm_is_lost_does_not_count() -> None:
    story = training()
    number = story.generation.number
    story.report("b", messages.NcclFailed(generation=number, slot=0, reason=REASON))
    story.tell(e.VmLost, vm_id="a", reason="killed")
    story.broken("b")
    assert story.current_generation is None
    assert story.state.preparation.nccl_failures == 0
