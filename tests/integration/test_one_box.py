"""A job whose replicas share one VM, as the GPUs of one machine do."""

from __future__ import annotations

import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.watch import Watch
from tests.integration.jobs import Job, until, weights
from tests.integration.undisturbed import Undisturbed

from spottrain.cloud.process import tree


def lose_a_worker_and_then_a_vm(watch: Watch, vm_id: str) -> None:
    os.kill(watch.worker(vm_id), signal.SIGKILL)
    watch.until("a second generation", lambda: watch.number == 2 and watch.trains())
    tree.signal_groups(watch.groups(vm_id), signal.SIGKILL)
    watch.until("a third generation", lambda: watch.number == 3 and watch.trains())


@pytest.mark.rotated(parts=[1])
def test_replicas_in_one_vm_lose_a_worker_and_then_the_vm_and_end_with_the_same_weights(
    tmp_path: Path, reference: Undisturbed
) -> None:
    zone = {"name": "box", "capacity": 1, "slots": 4}
    settings = {"resources": {"max_vms": 1}, "local": {"zones": [zone]}}
    with Job(tmp_path, "box", **settings) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        with closing(Watch(job)) as watch:
            watch.until("training", watch.trains)
            assert watch.generation is not None
            plan = watch.generation.plan
            assert plan.data_parallel_width > 1
            assert plan.copies == 1

            lose_a_worker_and_then_a_vm(watch, plan.slots[0].vm_id)
        job.pace(0.0)
        until("the end", lambda: not job.dir.is_managed())
        assert weights(job.checkpoint_root) == reference.weights
        report = job.run("report", job.name, "-o", "json").report
        assert report["state"] == "succeeded"
        assert report["minibatches_recomputed"] > 0, "the VM took the only copies with it"
        events = job.run("events", job.name).out
        assert f"starts with {plan.shape}: start; one VM holds all replicas of a stage" in events


@pytest.mark.rotated(parts=[1])
def test_ranks_that_divide_matrices_lose_a_worker_and_then_the_vm_and_end_with_the_same_weights(
    tmp_path: Path,
) -> None:
    zone = {"name": "boxes", "capacity": 2, "slots": 2}
    settings = {
        "entrypoint": "tiny_job:divided_job",
        "runtime": {"tensor_parallel": 2},
        "resources": {"max_vms": 2},
        "local": {"zones": [zone]},
    }
    with Job(tmp_path, "quiet", **settings) as quiet:
        assert quiet.launch().code == 0
    with Job(tmp_path, "divided", **settings) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        with closing(Watch(job)) as watch:
            watch.until("training", watch.trains)
            assert watch.generation is not None
            plan = watch.generation.plan
            assert plan.devices_per_stage_replica == 2

            lose_a_worker_and_then_a_vm(watch, plan.slots[0].vm_id)
        job.pace(0.0)
        until("the end", lambda: not job.dir.is_managed())
        assert weights(job.checkpoint_root) == weights(quiet.checkpoint_root)
        assert f"starts with {plan.shape}:" in job.run("events", job.name).out


@pytest.mark.rotated(parts=[5])
def test_replicas_that_share_state_lose_a_worker_and_then_the_vm_and_end_with_the_same_weights(
    tmp_path: Path, reference: Undisturbed
) -> None:
    """One byte less than the plan without needs is what memory asks for it with."""
    zone: dict[str, Any] = {"name": "box", "capacity": 1, "slots": 2}
    settings = {"resources": {"max_vms": 1}, "local": {"zones": [zone]}}
    with Job(tmp_path, "roomy", **settings) as roomy:
        chosen = roomy.run("plan", str(roomy.file), "-o", "json").report["candidates"][0]
        assert (chosen["shape"], chosen["shares_state"]) == ("1x2", False)
    zone["slot_memory_bytes"] = chosen["stage_bytes"] - 1
    with Job(tmp_path, "shared", **settings) as job:
        job.pace(0.05)
        assert job.launch("--detach").code == 0
        with closing(Watch(job)) as watch:
            watch.until("training", watch.trains)
            assert watch.generation is not None
            plan = watch.generation.plan
            assert plan.shape == "1x2"
            assert plan.shared_state

            lose_a_worker_and_then_a_vm(watch, plan.slots[0].vm_id)
        job.pace(0.0)
        until("the end", lambda: not job.dir.is_managed())
        assert weights(job.checkpoint_root) == reference.weights
        events = job.run("events", job.name).out
        assert (
            "one VM holds all replicas of a stage; replicas in one VM share their state" in events
        )


@pytest.mark.rotated(parts=[9])
def test_a_job_that_leaves_the_number_of_slots_to_the_planner_knows_what_its_model_can_have(
    tmp_path: Path,
) -> None:
    settings = {
        "entrypoint": "tiny_job:divided_job",
        "reduction": "fast",
        "runtime": {"tensor_parallel": "auto"},
        "resources": {"max_vms": 1},
        "local": {"zones": [{"name": "box", "capacity": 1, "slots": 4}]},
    }
    with Job(tmp_path, "auto", **settings) as job:
        assert job.launch().code == 0
        assert '"tensor_sizes":[2' in (job.dir.path / "facts.json").read_text()
