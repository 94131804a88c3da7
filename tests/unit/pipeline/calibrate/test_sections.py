"""Calibration on a device whose memory is bounded."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from tests.fakes.deferred import DeferredDevice
from tests.gpu import runs

from spottrain.morphing.plan.profiles import SIZES_ENDED, check_profile
from spottrain.pipeline.calibrate.calibrate import NoRoomError, calibrate
from spottrain.pipeline.model.loaded import LoadedJob, load
from spottrain.wire import messages
from spottrain.wire.messages import Calibrate
from spottrain.wire.model import Profile


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> LoadedJob:
    """A model most of whose memory is that of parameters."""
    spec = runs.job_spec(tmp_path_factory.mktemp("job"), "deep", precision="bf16", reduction="fast")
    return load(spec, runs.WORKDIR)


def parameters_of(loaded: LoadedJob) -> int:
    return sum(spec.num_bytes for spec in loaded.layout.specs.values()) // 4


def measured(loaded: LoadedJob, device: DeferredDevice, *sizes: int) -> Profile:
    torch.set_num_threads(1)
    heard: list[messages.Report] = []
    command = Calibrate(microbatch_sizes=sizes)
    profile = calibrate(loaded, command, 0, heard.append, device, "a GPU")
    assert profile is not None
    prepared = [one.section for one in heard if isinstance(one, messages.SectionPrepared)]
    assert prepared == list(range(loaded.layout.num_sections))
    return profile


@pytest.mark.rotated
def test_measuring_takes_less_than_training_with_state_on_the_host(deep: LoadedJob) -> None:
    """That is two bytes of each parameter, and four of its gradient, on the device."""
    device = DeferredDevice(3, memory_bytes=6 * parameters_of(deep))

    profile = measured(deep, device, 1, 2)

    check_profile(profile)
    assert profile.microbatch_sizes == (1, 2)
    assert profile.optimizer_s_per_byte > 0
    assert profile.host_optimizer_s_per_byte > 0


@pytest.mark.rotated
def test_a_size_that_memory_does_not_allow_ends_the_list(deep: LoadedJob) -> None:
    enough = DeferredDevice(3)
    measured(deep, enough, 1)
    peak = enough.peak_bytes()
    assert peak is not None

    some = replace(deep, spec=replace(deep.spec, minibatch_size=512))
    profile = measured(some, DeferredDevice(3, memory_bytes=peak), 1, 256)

    assert profile.microbatch_sizes == (1,)
    assert SIZES_ENDED in profile.sources


@pytest.mark.rotated
@pytest.mark.parametrize("share", [0.5, 0.7, 0.9])
def test_no_bound_of_memory_ends_measuring_in_the_middle(deep: LoadedJob, share: float) -> None:
    enough = DeferredDevice(3)
    measured(deep, enough, 1, 8)
    peak = enough.peak_bytes()
    assert peak is not None

    with contextlib.suppress(NoRoomError):
        profile = measured(deep, DeferredDevice(3, memory_bytes=int(share * peak)), 1, 8)
        check_profile(profile)


@pytest.mark.rotated
def test_no_memory_for_a_single_example_is_told(deep: LoadedJob) -> None:
    one_section = parameters_of(deep) // deep.layout.num_sections
    with pytest.raises(NoRoomError, match="has no memory for one section"):
        measured(deep, DeferredDevice(3, memory_bytes=one_section), 1)
