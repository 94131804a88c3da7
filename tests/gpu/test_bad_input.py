"""What a user, or a machine, can do wrong with a GPU: told in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from tests.gpu import runs
from tests.gpu.devices import is_gpu
from tests.integration.fleet import FleetError, Zygote

from spottrain.codec import decode, encode
from spottrain.gpus.nvml import open_nvml
from spottrain.machine import SUPERVISOR_VARIABLES
from spottrain.wire import messages

NO_SUCH_GPU = "cuda:GPU-00000000-0000-0000-0000-000000000000"


def first_report(folder: Path, device: str, entrypoint: str) -> messages.Report:
    """Return what a real supervisor says first."""
    greeting = {
        "spec": json.loads(encode(runs.job_spec(folder, entrypoint))),
        "workdir": str(runs.WORKDIR),
        "num_slots": 1,
        "devices": [device],
        "gpus": _facts() if is_gpu(device) else [],
        "private_address": "127.0.0.1",
        "vm_id": "a",
    }
    module = "spottrain.pipeline.process.supervisor"
    with subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **SUPERVISOR_VARIABLES},
    ) as supervisor:
        assert supervisor.stdin is not None
        assert supervisor.stdout is not None
        supervisor.stdin.write(f"{json.dumps(greeting)}\n".encode())
        supervisor.stdin.flush()
        line = supervisor.stdout.readline()
        supervisor.kill()
    report: messages.Report = decode(messages.Report, line)
    return report


def _facts() -> list[dict[str, object]]:
    with open_nvml() as nvml:
        return [asdict(gpu) for gpu in nvml.gpus()]


@pytest.mark.parametrize(
    "entrypoint", ["import_uses:job", "jobs:calling_cuda"], ids=["import", "model"]
)
def test_code_that_uses_cuda_itself_is_told_why_not(
    tmp_path: Path, device: str, entrypoint: str
) -> None:
    report = first_report(tmp_path, device, entrypoint)

    assert isinstance(report, messages.UserCodeFailed)
    if torch.version.cuda is None:
        assert "not compiled with CUDA" in report.message
    elif is_gpu(device):
        assert "CUDA" in report.message or ".cuda()" in report.message
    else:
        assert "NVIDIA driver" in report.message


def test_code_may_ask_at_import_whether_there_is_a_gpu(tmp_path: Path, device: str) -> None:
    report = first_report(tmp_path, device, "import_asks:job")

    assert isinstance(report, messages.SupervisorReady)


def test_a_vm_whose_gpu_torch_cannot_use_says_so(zygote: Zygote, tmp_path: Path) -> None:
    spec = runs.job_spec(tmp_path)
    with runs.start(spec, "a", tmp_path, zygote, devices=[NO_SUCH_GPU]) as fleet:
        fleet.run(runs.plan_for(spec, (1, 1), "a"), fleet.initialise())
        report = fleet.wait_for(
            "VmUnfit", lambda _, r: r if isinstance(r, messages.VmUnfit) else None
        )

    assert NO_SUCH_GPU.partition(":")[2] in report.reason
    assert "spottrain doctor" in report.reason


def test_the_loss_scale_comes_down_until_the_loss_is_finite(zygote: Zygote, tmp_path: Path) -> None:
    spec = runs.job_spec(tmp_path, "exploding", steps=20, precision="fp16")
    with runs.start(spec, "a", tmp_path, zygote) as fleet:
        fleet.train(lambda vms: runs.plan_for(spec, (1, 1), vms), fleet.initialise())

    committed = [r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)]
    assert len(committed) == 20
    assert committed[-1].loss < committed[0].loss


def test_a_loss_that_is_never_a_number_changes_nothing(zygote: Zygote, tmp_path: Path) -> None:
    spec = runs.job_spec(tmp_path, "endless", precision="fp16", steps=3)
    with runs.start(spec, "a", tmp_path, zygote) as fleet:
        first = fleet.initialise()
        before = runs.weights_of(spec, first)
        after = fleet.train(lambda vms: runs.plan_for(spec, (1, 1), vms), first)

    assert {name: after[name] for name in before} == before


def test_out_of_memory_is_told(zygote: Zygote, tmp_path: Path, gpu: str) -> None:
    """Its size is read from the message of the driver's; the manager plans around it."""
    spec = runs.job_spec(tmp_path, "greedy")
    with runs.start(spec, "a", tmp_path, zygote) as fleet:
        fleet.run(runs.plan_for(spec, (1, 1), "a"), fleet.initialise())
        report = fleet.wait_for(
            "OutOfMemory",
            lambda _, r: r if isinstance(r, messages.OutOfMemory) else None,
        )

    assert report.requested_bytes == 1 << 42
    assert report.device_bytes > 0


def test_a_token_beyond_the_vocabulary_is_told(zygote: Zygote, tmp_path: Path, gpu: str) -> None:
    """A kernel stops itself there: the error comes late, and ends the context."""
    spec = runs.job_spec(tmp_path, "out_of_range")
    with (
        runs.start(spec, "a", tmp_path, zygote) as fleet,
        pytest.raises(FleetError) as raised,
    ):
        fleet.train(lambda vms: runs.plan_for(spec, (1, 1), vms), fleet.initialise())

    message = str(raised.value)
    print(message)  # noqa: T201
    assert "device-side assert" in message
