"""Calibration, planner and run agree over a stand-in for a GPU whose times are declared.

All times are virtual: how fast this machine is does not matter.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.builders import a_plan, slots_of
from tests.fakes.timed import CONTEXT_BYTES, Figures, TimedDevice
from tests.fakes.timed_links import Wire
from tests.gpu import runs
from tests.gpu.forked import Child, Say, start_store
from tests.integration.declared_ranks import TIMEOUT_S, calibrated_together, trained

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.calibrate.links import Rings, measure_rings
from spottrain.pipeline.comm.device_group import TrialGroups
from spottrain.pipeline.comm.groups import connect_rendezvous, join
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import LinkProfile, Profile, RingProfile, StateHome

WITHIN = 0.03
"""Share by which a prediction may be wrong."""
SLOWER = 4000.0
"""With it the tiny model's sections take the T4 as long as those of a real one."""
FIGURES = replace(Figures.of("T4").slowed(SLOWER), memory_bytes=CONTEXT_BYTES + (1 << 28))
WIRE = Wire(latency_s=1e-4, bytes_per_s=1e8)
MICROBATCHES = 8


@pytest.fixture(autouse=True)
def ranks_meet_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def loaded_job(folder: Path, *, sequence: bool = False) -> LoadedJob:
    spec = runs.job_spec(
        folder,
        "deep",
        reduction="fast",
        minibatch_size=2 * MICROBATCHES,
        microbatch_size=2,
        sequence_parallel=sequence,
    )
    return load(spec, runs.WORKDIR)


def measured(loaded: LoadedJob) -> Profile:
    """Calibrate on one device; the link is as declared, from device to device."""
    command = Calibrate(microbatch_sizes=(2,))
    device = TimedDevice(FIGURES)
    profile = calibrate(loaded, command, 0, lambda report: None, device, "a GPU")
    assert profile is not None
    s_per_byte = (
        1 / WIRE.bytes_per_s + 1 / profile.upload_bytes_per_s + 1 / profile.download_bytes_per_s
    )
    link = LinkProfile(latency_s=WIRE.latency_s, bandwidth_bytes_per_s=1 / s_per_byte)
    return replace(profile, within_vm=link, between_vms=link)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    torch.set_num_threads(1)
    return measured(loaded_job(tmp_path_factory.mktemp("job")))


def test_sums_of_devices_are_measured_in_declared_time() -> None:
    sizes = 1 << 12, 1 << 16, 1 << 20
    store, port = start_store()

    def measure(rank: int, say: Say) -> None:
        join(connect_rendezvous("127.0.0.1", port, TIMEOUT_S), "ranks", rank, 2, TIMEOUT_S)
        device = TimedDevice(FIGURES, numbers=False)
        with device.using():
            trial = TrialGroups(device)
            assert trial.form([(0, 1)], rank, TIMEOUT_S)
            (ring,) = measure_rings([Rings(((0, 1),), False)], trial.groups, sizes, device)
        say(asdict(ring))
        trial.close()

    children = [Child(partial(measure, rank)) for rank in range(2)]
    try:
        found = [RingProfile(**child.hear()) for child in children]
    finally:
        for child in (*children, store):
            child.close()

    for ring in found:  # two messages one after the other, half of the bytes in each
        assert ring.latency_s == pytest.approx(2 * FIGURES.peer_latency_s)
        assert ring.bandwidth_bytes_per_s == pytest.approx(FIGURES.peer_bytes_per_s)


ROTATED = pytest.mark.rotated


@pytest.mark.parametrize(
    ("depth", "state"),
    [
        (2, "device"),
        pytest.param(4, "device", marks=ROTATED),
        pytest.param(1, "device", marks=ROTATED),
        pytest.param(1, "host", marks=ROTATED),
    ],
)
def test_what_calibration_predicts_is_what_a_run_takes(
    depth: int,
    state: StateHome,
    profile: Profile,
    tmp_path: Path,
) -> None:
    loaded = loaded_job(tmp_path)
    plan = a_plan(
        depth,
        num_sections=loaded.layout.num_sections,
        virtual_nodes=MICROBATCHES,
        microbatch_size=2,
        slots=slots_of("abcd"[:depth]),
        state=state,
    )
    facts = model_facts(loaded.job, loaded.layout)
    expected = expect_step(plan, profile, facts, reduction="fast", compute=Compute(on_gpu=True))

    took = trained(loaded, plan, FIGURES, WIRE)

    print(f"{depth} stages, {state}: expected {expected.step_s:.4f} s, took {took.step_s:.4f} s")  # noqa: T201
    assert expected.step_s == pytest.approx(took.step_s, rel=WITHIN)
    summed_ties = "peers" in took.spent  # there is one replica
    assert summed_ties == (depth > 1)


@ROTATED
@pytest.mark.parametrize("sequence", [False, True])
def test_ranks_that_divide_the_matrices_of_stages_take_what_is_planned(
    sequence: bool, profile: Profile, tmp_path: Path
) -> None:
    loaded, size = loaded_job(tmp_path, sequence=sequence), 2
    together = calibrated_together(loaded, FIGURES, size, tensor_sizes=(size,))
    sums = tuple(ring for ring in together.rings if ring.on_device)  # others are not declared
    choice = choose_plan(
        PlanInputs(
            facts=model_facts(loaded.job, loaded.layout),
            profile=replace(
                profile, groups=together.groups, rings=sums, sequence_parallel=sequence
            ),
            slots=tuple(
                Device(slot=slot, memory_bytes=1 << 40, speed=1.0, is_gpu=True)
                for slot in slots_of("aaaa")
            ),
            minibatch_size=2 * MICROBATCHES,
            microbatch_size=2,
            reduction="fast",
            pipeline_depth=2,
            tensor_parallel=size,
        )
    )
    plan = choice.plan
    assert plan is not None, choice.why_not
    assert plan.shape == "2x1x2"

    took_s = trained(loaded, plan, FIGURES, WIRE).step_s

    print(f"{plan.shape}: expected {plan.predicted_step_s:.4f} s, took {took_s:.4f} s")  # noqa: T201
    assert plan.predicted_step_s == pytest.approx(took_s, rel=WITHIN)
