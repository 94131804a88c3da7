"""GPUs that fail under a job: real agents and manager, NVML is the fake, no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gpus import FAKE_NVML, VARIABLE, FakeGpus
from tests.fakes.nvml import pynvml
from tests.integration.test_manager_process import (
    END_S,
    ENDLESS,
    Job,
    assert_ended_well,
    is_training,
    trainer,
)
from tests.view import View

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core.model.state import MAX_UNFIT, State
from spottrain.varuna_manager.reporting.devices import computes_on


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpus:
    """The GPUs of this machine, which all VMs of the local provider see."""
    found = FakeGpus(tmp_path / "nvml.json", count=2)
    path = f"{FAKE_NVML}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv(VARIABLE, str(found.file))
    return found


@pytest.fixture
def job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Job]:
    changes: dict[str, Any] = getattr(request, "param", {})
    job = Job(tmp_path / "job", steps=ENDLESS, max_vms=2, **changes)
    yield job
    job.end()


def gpu_of(state: State, vm_id: str) -> int:
    (gpu,) = View(state).vm(vm_id).gpus
    return gpu.index


def both_are_ready(state: State) -> bool:
    vms = View(state).vms.values()
    return is_training(state) and len(vms) == 2 and all(vm.gpus for vm in vms)


@pytest.mark.rotated
def test_a_vm_whose_gpu_fails_is_returned_and_replaced(gpus: FakeGpus, job: Job) -> None:
    manager = job.start()
    state = job.wait_for(both_are_ready)
    assert "x NVIDIA A10G (GPU), fp32" in computes_on(state)
    assert {gpu_of(state, vm_id) for vm_id in View(state).vms} == {0, 1}
    gpus.change(gpu_of(state, trainer(state)), xids=[79])
    state = job.wait_for(lambda now: View(now).tally.vms_launched == 3)
    assert View(state).tally.sick_gpus == 1
    (hit,) = View(state).interruptions
    assert hit.interruption == "sick_gpu"
    assert hit.reason.endswith("XID 79: the GPU has fallen off the bus")
    job.may_end()
    state = assert_ended_well(job, manager)
    assert len(job.rented()) == 3
    assert View(state).tally.preemptions_unnoticed == 0


@pytest.mark.rotated
def test_a_kernel_that_fails_costs_a_worker_and_no_vm(gpus: FakeGpus, job: Job) -> None:
    manager = job.start()
    state = job.wait_for(is_training)
    gpus.change(gpu_of(state, trainer(state)), xids=[31])
    job.wait_for(lambda now: View(now).tally.worker_deaths >= 1)
    job.may_end()
    state = assert_ended_well(job, manager)
    assert View(state).tally.vms_launched == 2
    assert "XID 31" in View(state).interruptions[0].reason


@pytest.mark.parametrize("job", [{"device": "gpu"}], indirect=True)
def test_a_job_for_gpus_never_trains_on_cpus_and_does_not_rent_for_ever(
    gpus: FakeGpus, job: Job
) -> None:
    gpus.set(error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    manager = job.start()
    assert manager.wait(END_S) == 6, job.dir.log.read_text()[-2000:]
    state = job.state()
    assert state.outcome is not None
    assert "driver" in state.outcome.reason
    assert View(state).step == 0
    assert MAX_UNFIT <= len(job.rented()) <= MAX_UNFIT + 1
    assert all(vm.state is VmState.TERMINATED for vm in job.rented())
