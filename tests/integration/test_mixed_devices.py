"""Fast replicas compute several virtual nodes at once, slow ones one: the result is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.faults import Action, environment_of
from tests.integration import stale_jobs
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import job_spec
from tests.tiers import first_always

from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.skeleton import materialise
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Plan, Reduction, ScheduleKind

NUM_SECTIONS = stale_jobs.BLOCKS


def a_spec(folder: Path, reduction: Reduction = "fast") -> JobSpec:
    """Return a job of mini-batches of eight virtual nodes."""
    folder.mkdir(exist_ok=True)
    spec = job_spec(folder, reduction, entrypoint="stale_jobs:gpt_job")
    return replace(spec, minibatch_size=16)


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


@pytest.mark.parametrize("schedule", first_always(["varuna", "1f1b", "gpipe"]))
def test_micro_batches_of_unlike_sizes_train_as_the_plain_loop_through_a_kill(
    zygote: Zygote, tmp_path: Path, schedule: ScheduleKind
) -> None:
    spec, mark = a_spec(tmp_path), tmp_path / "mark"
    blow = {"hook": Hook.BACKWARD, "rank": 2, "action": Action.KILL_VM, "step": 2}

    def choose(machines: Sequence[str]) -> Plan:
        # Fast devices first: five virtual nodes as 2 + 2 + 1, and three alone.
        depth, sizes = (2, (2, 1)) if len(machines) == 4 else (1, (4, 1))
        how = {"replica_bounds": (0, 5, 8), "nodes_per_microbatch": sizes, "schedule": schedule}
        return make_plan(spec, depth, 2, machines, NUM_SECTIONS, **how)

    environment = environment_of([{**blow, "mark": str(mark)}])
    with Fleet(spec, "abcd", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        fleet.train(choose, fleet.initialise())
        counts = {
            (r.generation, name): r.microbatches
            for name, r in fleet.history
            if isinstance(r, messages.MinibatchCommitted)
        }

    assert mark.exists(), "the blow did not strike"
    assert losses_of(fleet, "a") == pytest.approx(plain_losses(spec), rel=1e-5)
    assert {name: counts[1, name] for name in "abcd"} == {"a": 3, "b": 3, "c": 3, "d": 3}
    assert sorted(counts[max(counts)[0], name] for name in "ab") == [2, 3]
    assert fleet.committed_twice() == []
