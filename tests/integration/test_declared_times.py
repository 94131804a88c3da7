"""Calibration, planner and run agree over a stand-in for a GPU whose times are declared.

All times are virtual: how fast this machine is does not matter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.builders import a_plan, slots_of
from tests.fakes.timed import CONTEXT_BYTES, Figures, TimedDevice
from tests.fakes.timed_links import Wire
from tests.gpu import runs
from tests.integration.declared_ranks import trained

from spottrain.morphing.simulate.compute import Compute
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.pipeline.calibrate.calibrate import calibrate
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import LinkProfile, Profile, StateHome

WITHIN = 0.03
"""Share by which a prediction may be wrong."""
SLOWER = 4000.0
"""With it the tiny model's sections take the T4 as long as those of a real one."""
FIGURES = replace(Figures.of("T4").slowed(SLOWER), memory_bytes=CONTEXT_BYTES + (1 << 28))
WIRE = Wire(latency_s=1e-4, bytes_per_s=1e8)
MICROBATCHES = 8


def loaded_job(folder: Path) -> LoadedJob:
    spec = runs.job_spec(
        folder, "untied", reduction="fast", minibatch_size=2 * MICROBATCHES, microbatch_size=2
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
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
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

    took_s = trained(loaded, plan, FIGURES, WIRE).step_s

    print(f"{depth} stages, {state}: expected {expected.step_s:.4f} s, took {took_s:.4f} s")  # noqa: T201
    assert expected.step_s == pytest.approx(took_s, rel=WITHIN)
