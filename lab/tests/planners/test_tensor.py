"""Tensor parallelism's price, against chapter 4 of the dissertation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_link

from spottrain.codec import from_data
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.transformer import TransformerShape
from spottrain.morphing.plan.workload import Workload
from spottrain.varuna_manager.offers.preview import workload_inputs
from spottrain_lab.planners.gpt import gpt_shape
from spottrain_lab.planners.tensor import (
    GpuCluster,
    boundary_bytes,
    iteration_s,
    layer_elements,
    megatron_sizes,
    sum_s,
    tensor_parallel,
)

PROFILES = Path(__file__).resolve().parents[3] / "examples/profiles"
DGX = GpuCluster(
    flops_per_s=0.6 * 312e12,
    gpus_per_server=8,
    within_bytes_per_s=300e9,
    between_bytes_per_s=25e9,
)
"""Eight A100 with NVLink, a 200 Gbit/s adapter each: nominal but for 0.6 of the peak."""


def gpt(hidden: int, layers: int) -> TransformerShape:
    return gpt_shape(layers=layers, hidden=hidden, context=2048, vocabulary=51200)


def test_a_layer_of_gpt_3_sends_176_million_elements() -> None:
    activation = 2048 * 12288
    assert layer_elements(activation, 8) == pytest.approx(176.2e6, rel=1e-3)
    assert layer_elements(activation, 1) == 0
    assert boundary_bytes(2 * activation, 1) == pytest.approx(50.33e6, rel=1e-3)
    assert boundary_bytes(2 * activation, 8) == pytest.approx(6.29e6, rel=1e-3)


@given(st.integers(2, 64), st.floats(1, 1e12), st.floats(1e3, 1e12))
def test_four_sums_send_the_elements_of_a_layer(
    size: int, num_bytes: float, bandwidth: float
) -> None:
    link = a_link(latency_s=0.0, bytes_per_s=bandwidth)
    sent = 4 * sum_s(num_bytes, size, link) * bandwidth
    assert sent == pytest.approx(8 * num_bytes * (size - 1) / size)


@pytest.mark.parametrize(
    ("hidden", "layers", "sizes"),
    [
        (2304, 24, (1, 1)),
        (3072, 30, (2, 1)),
        (4096, 36, (4, 1)),
        (6144, 40, (8, 1)),
        (8192, 48, (8, 2)),
        (10240, 60, (8, 4)),
        (12288, 80, (8, 8)),
        (16384, 96, (8, 16)),
        (20480, 105, (8, 35)),
        (25600, 128, (8, 64)),
    ],
)
def test_sizes_of_table_4_1(hidden: int, layers: int, sizes: tuple[int, int]) -> None:
    assert megatron_sizes(gpt(hidden, layers), 80e9, 8) == sizes


def test_a_layer_that_fits_nowhere_is_refused() -> None:
    with pytest.raises(PlanError, match="does not fit on 8 devices"):
        megatron_sizes(gpt(25600, 128), 1e9, 8)


@pytest.mark.parametrize("minibatch_size", [32, 128])
def test_eight_gpus_a_layer_are_best_in_figure_4_13(minibatch_size: int) -> None:
    times = {
        size: iteration_s(
            gpt(20480, 32),
            DGX,
            size=size,
            stages=64 // size,
            replicas=1,
            minibatch_size=minibatch_size,
        )
        for size in (2, 4, 8, 16, 32)
    }
    assert min(times, key=times.__getitem__) == 8


def test_uneven_minibatches_are_refused() -> None:
    with pytest.raises(PlanError, match="multiple of 3 replicas"):
        iteration_s(gpt(64, 2), DGX, size=1, stages=1, replicas=3, minibatch_size=4)


def inputs(gpus_per_vm: int, vms: int = 2) -> PlanInputs:
    text = (PROFILES / "gpt2-2.5b-v100.json").read_text()
    workload = from_data(Workload, json.loads(text))
    return workload_inputs(workload, vms * gpus_per_vm, gpus_per_vm)


def test_devices_of_a_vm_act_as_one() -> None:
    before = inputs(4)
    after = tensor_parallel(before, 4)
    assert after is not None
    assert [device.slot.vm_id for device in after.slots] == ["vm-00000", "vm-00001"]
    assert after.slots[0].memory_bytes == 4 * before.slots[0].memory_bytes
    assert tensor_parallel(before, 8) is None
    assert tensor_parallel(before, 1) is before
    for old, new in zip(before.profile.microbatches, after.profile.microbatches, strict=True):
        for section, shared in zip(old.sections, new.sections, strict=True):
            assert shared.forward_s > section.forward_s / 4
            assert shared.output_bytes == section.output_bytes


def test_free_sums_leave_compute_divided() -> None:
    before = inputs(2)
    fast = a_link(latency_s=0.0, bytes_per_s=1e18)
    free = replace(before, profile=replace(before.profile, within_vm=fast))
    after = tensor_parallel(free, 2)
    assert after is not None
    size = after.profile.microbatch_sizes[0]
    for section, shared in zip(
        free.profile.sections_at(size), after.profile.sections_at(size), strict=True
    ):
        assert shared.backward_s == pytest.approx(section.backward_s / 2)
    choice = choose_plan(replace(after, schedule="varuna"))
    # Not every model that is drawn fits two GPUs.
    assert choice.plan is None or len(choice.plan.slots) <= 2
