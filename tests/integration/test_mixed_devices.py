"""Fast replicas compute several virtual nodes at once, slow ones one: the result is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.builders import (
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
    slots_of,
)
from tests.faults import Action, environment_of
from tests.integration import stale_jobs
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import job_spec
from tests.integration.test_shares import SharingFleet
from tests.tiers import first_always

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.skeleton import materialise
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Profile, Reduction
from spottrain.wire.plan import Plan, ScheduleKind

NUM_SECTIONS = stale_jobs.BLOCKS


def a_spec(folder: Path, reduction: Reduction = "fast") -> JobSpec:
    """Return a job of mini-batches of eleven virtual nodes."""
    folder.mkdir(exist_ok=True)
    spec = job_spec(folder, reduction, entrypoint="stale_jobs:gpt_job")
    return replace(spec, minibatch_size=22)


def losses_of(fleet: Fleet, name: str) -> list[float]:
    """Return a rank's loss of each mini-batch, in order."""
    found = {
        r.step: r.loss
        for who, r in fleet.history
        if isinstance(r, messages.MinibatchCommitted) and who == name
    }
    return [found[step] for step in sorted(found)]


def plain_losses(spec: JobSpec) -> list[float]:
    """Train by hand, all of a mini-batch at once."""
    job = stale_jobs.gpt_job()
    source = MicrobatchSource(job, spec.seed, spec.minibatch_size, spec.minibatch_size)
    model = materialise(job, spec.seed).train()
    optimizer = job.optimizer(list(model.named_parameters()))
    rates = [group["lr"] for group in optimizer.param_groups]
    losses = list[float]()
    for step in range(spec.steps):
        optimizer.zero_grad()
        total, weight = job.loss(model, source.training(step, range(1)))  # type: ignore[misc]
        (total / weight).backward()
        assert job.clip_grad_norm is not None
        assert job.lr_schedule is not None
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_grad_norm)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * job.lr_schedule(step)
        optimizer.step()
        losses.append(float(total.detach()) / float(weight))
    return losses


def profile(device: str, sizes: Sequence[int], example_s: float) -> Profile:
    """Return what is declared of a type of device, for which micro-batches cost 0.1 s each."""
    last = NUM_SECTIONS - 1
    return a_profile(
        *(
            microbatch_profile(
                (
                    section_profile(
                        k,
                        forward_s=(0.1 + size * example_s) / 3,
                        output_bytes=1024 * size if k < last else 0,
                    )
                    for k in range(NUM_SECTIONS)
                ),
                size,
            )
            for size in sizes
        ),
        device=device,
        written=True,
    )


SLOW, FAST = profile("slow", (2,), 0.05), profile("fast", (2, 4), 0.01)


def planned(
    spec: JobSpec, machines: Sequence[str], schedule: ScheduleKind = "varuna", depth: int = 2
) -> Plan:
    """Return the planner's choice: ``a`` and ``b`` are fast, others slow."""
    inputs = PlanInputs(
        facts=model_facts(section_facts(k, param_bytes=4096) for k in range(NUM_SECTIONS)),
        profile=SLOW,
        measured=(FAST,),
        slots=tuple(
            Device(
                slot=slot,
                memory_bytes=2**30,
                speed=3.0 if slot.vm_id in "ab" else 1.0,
                kind="fast" if slot.vm_id in "ab" else "",
            )
            for slot in slots_of(machines)
        ),
        minibatch_size=spec.minibatch_size,
        microbatch_size=spec.microbatch_size,
        reduction=spec.reduction,
        merges=spec.reduction == "fast",
        schedule=schedule,
        pipeline_depth=depth,
    )
    plan = choose_plan(inputs).plan
    assert plan is not None
    return plan


def examples_of(plan: Plan) -> list[tuple[int, int]]:
    """Return the examples of each replica, and those of its micro-batches."""
    return [
        (
            len(plan.virtual_nodes_of(d)) * plan.microbatch_size,
            plan.microbatch_size_of(d),
        )
        for d in range(plan.data_parallel_width)
    ]


def blow(mark: Path) -> dict[str, str]:
    """Return the environment of workers of which one's VM is lost in its third mini-batch."""
    script = {"hook": Hook.BACKWARD, "rank": 2, "action": Action.KILL_VM, "step": 2}
    return environment_of([{**script, "mark": str(mark)}])


@pytest.mark.parametrize("schedule", first_always(["varuna", "1f1b", "gpipe"]))
def test_micro_batches_of_unlike_sizes_train_as_the_plain_loop_through_a_kill(
    zygote: Zygote, tmp_path: Path, schedule: ScheduleKind
) -> None:
    spec, mark, plans = a_spec(tmp_path), tmp_path / "mark", list[Plan]()

    def choose(machines: Sequence[str]) -> Plan:
        depth = 2 if len(machines) == 4 else 1
        plans.append(planned(spec, machines, schedule, depth))
        return plans[-1]

    with Fleet(spec, "abcd", tmp_path / "log", zygote, blow(mark)) as fleet:
        fleet.ready()
        fleet.train(choose, fleet.initialise())

    assert mark.exists(), "the blow did not strike"
    assert losses_of(fleet, "a") == pytest.approx(plain_losses(spec), rel=1e-5)
    # Two fast devices and two slow ones; then a fast device each, one with half a micro-batch.
    assert [examples_of(plan) for plan in plans] == [[(16, 4), (6, 2)], [(10, 4), (12, 4)]]
    assert fleet.committed_twice() == []


@pytest.mark.rotated
def test_shares_that_change_need_be_no_multiples_of_micro_batches(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec = a_spec(tmp_path)
    slowly = {"STALE_SLEEP_S": "0.05"}  # another share comes in before the last step is done
    with SharingFleet(spec, "abcd", tmp_path / "log", zygote, slowly) as fleet:
        fleet.ready()
        how = {"replica_bounds": (0, 8, 11), "nodes_per_microbatch": (4, 1)}
        fleet.run(make_plan(spec, 2, 2, "abcd", NUM_SECTIONS, **how), fleet.initialise())
        fleet.wait_for_step(1)
        fleet.share(1, (0, 6, 11))
        assert fleet.wait_for_end(set("abcd"))
        rows = fleet.computed()

    assert set(rows) == {(2, 2, 3, 3), (2, 2, 5, 5)}
    assert losses_of(fleet, "a") == pytest.approx(plain_losses(spec), rel=1e-5)


@pytest.mark.rotated
def test_shares_by_speed_change_no_bit_in_exact_mode(zygote: Zygote, tmp_path: Path) -> None:
    spec = a_spec(tmp_path / "alone", "exact")
    with Fleet(spec, "a", tmp_path / "alone" / "log", zygote) as fleet:
        fleet.ready()
        whole = make_plan(spec, 1, 1, "a", NUM_SECTIONS)
        reference = fleet.train(lambda _: whole, fleet.initialise())
    spec, mark = a_spec(tmp_path / "mixed", "exact"), tmp_path / "mark"
    plans = list[Plan]()

    def choose(machines: Sequence[str]) -> Plan:
        plans.append(planned(spec, machines, depth=2 if len(machines) == 4 else 1))
        return plans[-1]

    with Fleet(spec, "abcd", tmp_path / "mixed" / "log", zygote, blow(mark)) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())

    assert mark.exists(), "the blow did not strike"
    assert weights == reference
    assert [plan.nodes_per_microbatch for plan in plans] == [(), ()]
    assert all(len(set(examples_of(plan))) > 1 for plan in plans)
