"""A job from the command line to the end of its training, through a killed VM."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from tests.bench.bench_declared import BOX, measured_in_box, planned, run
from tests.gpu.devices import is_gpu
from tests.gpu.launched import launch, stand_ins

STEPS = 16
WITHIN = 0.03
"""Share by which the time of a mini-batch may be predicted wrong."""


@pytest.mark.timeout(1800)
@pytest.mark.rotated
def test_a_job_is_trained_to_its_end_though_a_worker_and_a_vm_are_killed(
    device: str, tmp_path: Path
) -> None:
    on_gpu = is_gpu(device)
    chosen = argparse.Namespace(
        job="tiny",
        minibatch=8,
        microbatch=2,
        steps=STEPS,
        gpus=1 if on_gpu else 2,
        vms=2,
        kills="worker:3,vm:8",
    )
    more = {} if on_gpu else stand_ins(tmp_path, "H100", 2, numbers=True)[1]

    found = launch(tmp_path, chosen, more)

    assert found["exit_code"] == 0, found["error"]
    assert found["state"] == "succeeded"
    assert found["steps_done"] == STEPS
    assert "NVIDIA" in found["computes_on"]
    assert found["kills"] == 2
    assert len(found["interruptions"]) >= 2


@pytest.mark.timeout(1800)
@pytest.mark.nightly
def test_a_model_of_real_size_is_launched_without_numbers(tmp_path: Path) -> None:
    chosen = argparse.Namespace(
        job="gpt2_124m", minibatch=64, microbatch=0, steps=10, gpus=1, vms=0, kills=""
    )

    found = launch(tmp_path, chosen, stand_ins(tmp_path, "T4", 1)[1])

    assert found["state"] == "succeeded", found["error"]
    assert found["first_step_s"] < found["last_step_s"]


@pytest.mark.timeout(1800)
@pytest.mark.nightly
def test_a_box_of_eight_trains_replicas_in_the_time_that_is_predicted(tmp_path: Path) -> None:
    boxed = planned(*measured_in_box(tmp_path, "gpt2_124m"))
    ran, plan = run(boxed, BOX["gpt2_124m"].trained), boxed.plan

    assert (plan.shape, plan.devices_per_stage_replica) == ("1x8", 1)
    assert abs(ran.error) < WITHIN
