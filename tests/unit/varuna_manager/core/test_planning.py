"""What the planner is asked: the same of a job that runs, is ranked or is previewed."""

from __future__ import annotations

from dataclasses import replace

from tests.builders import a_plan, slots_of
from tests.fakes.gpus import facts as gpu_facts
from tests.unit.varuna_manager.story import (
    OFFER,
    PROFILE,
    SETTINGS,
    Story,
    plan_over,
)
from tests.view import settings_with

from spottrain.morphing.adapt.policy import UNSEEN_SHARE
from spottrain.pricing.ranking.gpu_speed import machine_as_offered
from spottrain.pricing.ranking.throughput import devices_of
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import newest_plan, settled_numerics
from spottrain.varuna_manager.core.planning import plan_inputs
from spottrain.wire import messages
from spottrain.wire.model import GpuFacts, Reduction
from spottrain.wire.numerics import Numerics


def test_inputs_are_what_the_settings_say_of_plans() -> None:
    settings = settings_with(
        SETTINGS,
        numerics=Numerics(microbatch_size=4),
        schedule="gpipe",
        recompute=False,
        objective="examples_per_dollar",
    )
    inputs = plan_inputs(settings, PROFILE)
    assert inputs.facts is settings.facts
    assert (inputs.minibatch_size, inputs.microbatch_size) == (8, 4)
    assert (inputs.schedule, inputs.recompute) == ("gpipe", False)
    assert inputs.objective == "examples_per_dollar"
    assert (inputs.slots, inputs.previous, inputs.lag_share) == ((), None, UNSEEN_SHARE)
    due = settings_with(settings, deadline_s=1e9)
    assert plan_inputs(due, PROFILE).objective == "throughput"


def test_a_plan_that_ran_settles_the_micro_batch_size_unless_the_job_says_it() -> None:
    plan = replace(plan_over(("a", "b")), microbatch_size=2, replica_bounds=(0, 4))
    assert SETTINGS.numerics_after(plan) == Numerics(microbatch_size=2)
    said = settings_with(SETTINGS, numerics=Numerics(microbatch_size=4))
    assert said.numerics_after(plan) == said.numerics


def test_types_of_devices_differ_in_micro_batches_only_where_nothing_depends_on_them() -> None:
    spec = SETTINGS.spec
    open_size = settings_with(SETTINGS, spec=replace(spec, reduction="fast"))
    facts = replace(SETTINGS.facts, normalises_batches="blocks.0.norm")
    settings = {
        "open": open_size,
        "said": settings_with(open_size, numerics=Numerics(microbatch_size=4)),
        "exact": settings_with(open_size, spec=replace(spec, reduction="exact")),
        "BatchNorm": settings_with(open_size, facts=facts),
    }
    merge = [name for name, one in settings.items() if plan_inputs(one, PROFILE).merges]
    assert merge == ["open"]


def test_a_job_that_runs_asks_with_its_fleet_and_its_plan() -> None:
    story = Story().training("a", "b", "c", "d")
    story.tell(e.VmLost, vm_id="d", reason="taken")
    story.broken("a", "b", "c")
    state = story.state
    (asked,) = story.emitted(c.ComputePlan)
    own = plan_inputs(
        state.job,
        PROFILE,
        asked.inputs.slots,
        previous=plan_over(("a", "b", "c", "d")),
        numerics=settled_numerics(state),
        lag_share=asked.inputs.lag_share,
    )
    assert newest_plan(state) == own.previous
    assert asked.inputs == own
    assert [device.slot.vm_id for device in asked.inputs.slots] == ["a", "b", "c"]
    assert all(device.usd_per_hour == 1.0 for device in asked.inputs.slots)


def test_in_exact_mode_a_plan_that_ran_settles_all_that_bits_depend_on() -> None:
    plan = replace(plan_over(("a", "b")), state="device")
    exact = settings_with(SETTINGS, spec=replace(SETTINGS.spec, reduction="exact"))
    settled = exact.numerics_after(plan)
    assert settled == Numerics(microbatch_size=1, tensor_parallel=1, state="device")
    inputs = plan_inputs(exact, PROFILE, numerics=settled)
    assert (inputs.microbatch_size, inputs.tensor_parallel, inputs.state) == (1, 1, "device")
    assert exact.numerics_after(None) == Numerics()
    asked = settings_with(exact, numerics=Numerics(state="host"))
    assert plan_inputs(asked, PROFILE).state == "host"


def told(reduction: Reduction, gpus: tuple[GpuFacts, ...]) -> Numerics | None:
    """What workers are told of a job's first plan, whose state is on the device."""
    story = Story(max_vms=1, spec=replace(SETTINGS.spec, reduction=reduction))
    story.devices = {"a": "EPYC, 1 thread"}
    story.start()
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a", intent),))
    story.ready("a", gpus=gpus)
    story.prepare()
    plan = a_plan(
        num_sections=2, virtual_nodes=8, slots=slots_of("a"), state="device" if gpus else "host"
    )
    story.tell(e.PlanComputed, inputs_hash=story.plan_asked, plan=plan)
    story.open()
    return story.sent(messages.RunGeneration)["a"].numerics


def test_workers_of_an_exact_job_are_told_what_their_checkpoints_must_have() -> None:
    gpus = (gpu_facts(name="NVIDIA L4"),)
    settled = Numerics(microbatch_size=1, tensor_parallel=1)
    on_gpus = replace(settled, state="device", kernels="NVIDIA L4 with torch 2")
    assert told("exact", gpus) == on_gpus
    assert told("exact", ()) == replace(settled, kernels="EPYC with torch 2")
    assert told("fast", gpus) is None


def test_where_no_plan_fits_any_more_an_exact_job_says_what_it_keeps() -> None:
    story = Story(spec=replace(SETTINGS.spec, reduction="exact")).training("a", "b")
    story.tell(e.VmLost, vm_id="b", reason="taken")
    story.broken("a")
    story.tell(e.PlanComputed, inputs_hash=story.plan_asked, plan=None, why_not="memory")
    answer = story.state.training.answer
    assert answer is not None
    assert answer.why_not == (
        "no plan fits: memory; reduction: exact keeps microbatch_size: 1 and runtime.state: host"
    )


def test_a_machine_of_the_catalogue_has_gpus_and_a_memory_of_its_own() -> None:
    offer = replace(OFFER, cloud="aws", instance_type="p3.2xlarge", gpus=1)
    machine = machine_as_offered(offer, 1, 1.0)
    assert machine.is_gpu
    (device,) = devices_of("vm", machine, 1.0)
    assert device.room == (offer.gpu_memory_bytes, 61 << 30, 0)
    cores = replace(OFFER, cloud="aws", instance_type="c7i.16xlarge", gpus=32)
    assert not machine_as_offered(cores, 32, 1.0).is_gpu
    own = machine_as_offered(replace(OFFER, cloud="local"), 2, 1.0)
    assert all(d.room == (1 << 30, 0, 0) for d in devices_of("vm", own, 1.0))


def test_slots_of_one_computer_share_its_cores() -> None:
    here = replace(OFFER, cloud="local", gpus=2, shared_cores=3)
    shape = machine_as_offered(here, 2, 1.0)
    fleet = [d for vm_id in "ab" for d in devices_of(vm_id, shape, 1.0)]
    assert {(d.machine, d.cores) for d in fleet} == {("local", 3)}
    apart = machine_as_offered(OFFER, 2, 1.0)
    fleet = [d for vm_id in "ab" for d in devices_of(vm_id, apart, 1.0)]
    assert {(d.machine, d.cores) for d in fleet} == {("a", 0), ("b", 0)}
