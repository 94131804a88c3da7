"""What befalls a GPU in training, over the stand-in: supervisors and workers are real."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gpus import VARIABLE, FakeGpus
from tests.fakes.timed import CONTEXT_BYTES
from tests.gpu import runs
from tests.integration.fleet import Fleet, Heard, Host, Zygote

from spottrain.pipeline.model.loaded import load
from spottrain.pipeline.state.arena import payload_bytes
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.plan import Plan

pytestmark = pytest.mark.rotated
DEVICE = "tests.fakes.timed:GPU-00000000-aaaa"


@pytest.fixture
def gpus(tmp_path: Path) -> FakeGpus:
    return FakeGpus(tmp_path / "nvml.json", name="NVIDIA L4")


@pytest.fixture
def spec(tmp_path: Path) -> JobSpec:
    return runs.job_spec(tmp_path, steps=1_000_000, checkpoint_every_steps=1_000_000)


@pytest.fixture
def fleet(spec: JobSpec, gpus: FakeGpus, tmp_path: Path, zygote: Zygote) -> Iterator[Fleet]:
    environment = {VARIABLE: str(gpus.file)}
    hosts = {"a": Host(device=DEVICE)}
    log = tmp_path / "log"
    with Fleet(spec, "a", log, zygote, environment, runs.WORKDIR, hosts) as fleet:
        fleet.ready()
        yield fleet


def plan_of(spec: JobSpec) -> Plan:
    return runs.plan_for(spec, (1, 1), "a", state="device")


def death(fleet: Fleet) -> str:
    def reason(_: str, report: Heard) -> str | None:
        return report.reason if isinstance(report, messages.WorkerDied) else None

    return fleet.wait_for("the worker's end", reason)


def test_state_is_brought_to_safety_beside_a_kernel_that_hangs(
    spec: JobSpec, gpus: FakeGpus, fleet: Fleet
) -> None:
    checkpoint = fleet.initialise()
    fleet.run(plan_of(spec), checkpoint)
    fleet.wait_for_step(2)
    gpus.change(hangs=True)
    abandon = messages.AbandonGeneration(generation=fleet.generation)
    fleet.machines["a"].send(abandon)

    assert "its state is in the VM's memory" in death(fleet)

    gpus.change(hangs=None)
    fleet.run(plan_of(spec), checkpoint)
    started = fleet.wait_for(
        "a new start",
        lambda _, r: (
            r
            if isinstance(r, messages.GenerationStarted) and r.generation == fleet.generation
            else None
        ),
    )
    assert started.step >= 2
    assert not started.sections_loaded


def test_with_a_lost_device_the_copy_is_lost_and_the_worker_says_so(
    spec: JobSpec, gpus: FakeGpus, fleet: Fleet
) -> None:
    fleet.run(plan_of(spec), fleet.initialise())
    fleet.wait_for_step(2)
    gpus.change(lost=True)

    reason = death(fleet)

    assert "the device is unusable" in reason
    assert "its copy of the state is lost" in reason


def test_a_device_whose_memory_is_full_is_reported_with_what_was_asked_for(
    spec: JobSpec, gpus: FakeGpus, fleet: Fleet
) -> None:
    sizes = [payload_bytes(specs) for specs in load(spec, runs.WORKDIR).specs]
    bound = CONTEXT_BYTES + sum(sizes) + max(sizes) + (32 << 10)
    gpus.change(memory_bytes=bound)
    fleet.run(plan_of(spec), fleet.initialise())

    found = fleet.wait_for(
        "OutOfMemory", lambda _, r: r if isinstance(r, messages.OutOfMemory) else None
    )

    assert found.requested_bytes > 0
    assert found.device_bytes == bound
    assert found.during in ("forward", "recompute", "backward")
