"""Which slot drives what."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.gpus import facts

from spottrain.gpus.slots import (
    CPU,
    UnfitVmError,
    assign,
    device_of,
    visible_gpus,
)

counts = st.integers(1, 9)


@given(counts, counts, st.integers(1, 256), st.integers(0, 2**32))
def test_slots_are_spread_evenly_and_share_a_gpu_fairly(
    num_gpus: int, num_slots: int, cores: int, first_gpu: int
) -> None:
    gpus = [facts(index) for index in range(num_gpus)]
    found = assign("auto", gpus, num_slots, first_gpu=first_gpu, cores=cores)
    assert len(found.devices) == len(found.memory_shares) == num_slots
    on = Counter(found.devices)
    assert set(on) <= {device_of(gpu) for gpu in gpus}
    assert len(on) == min(num_gpus, num_slots)
    assert max(on.values()) - min(on.values()) <= 1
    for device in on:
        shares = [
            Fraction(share).limit_denominator(16)
            for one, share in zip(found.devices, found.memory_shares, strict=True)
            if one == device
        ]
        assert sum(shares) == 1
    assert found.threads >= 1
    assert found.threads * num_slots <= max(cores, num_slots)


@given(counts, st.integers(1, 64))
def test_cpus_compute_with_one_thread_each(num_slots: int, cores: int) -> None:
    gpus = [facts()]
    for found in (
        assign("cpu", gpus, num_slots, cores=cores),
        assign("auto", (), num_slots, cores=cores),
    ):
        assert found.devices == (CPU,) * num_slots
        assert found.threads == 1
        assert found.memory_shares == (1.0,) * num_slots


def test_vms_that_share_a_machine_share_its_gpu_by_their_declared_memory() -> None:
    gpu = facts(memory_bytes=80 * 10**9)
    found = assign("gpu", [gpu], 1, cores=16, slot_memory_bytes=20 * 10**9)
    assert found.memory_shares == (0.25,)
    assert found.threads == 4
    nearly = assign("gpu", [gpu], 1, cores=16, slot_memory_bytes=79 * 10**9)
    assert nearly.memory_shares == (1.0,)


def test_cpus_never_stand_in_for_gpus() -> None:
    with pytest.raises(UnfitVmError, match="no driver; its CPUs are not used instead"):
        assign("gpu", (), 1, cores=4, why_none="no driver")
    gpus = [facts(index) for index in range(3)]
    with pytest.raises(UnfitVmError, match="3 of 4 GPUs can be used"):
        assign("gpu", gpus, 4, cores=4, min_gpus=4)
    with pytest.raises(UnfitVmError, match="partitioned"):
        assign("auto", [facts(is_partitioned=True)], 1, cores=4)


def test_slots_of_a_vm_drive_gpus_of_one_type() -> None:
    gpus = [facts(0, name="NVIDIA L4"), facts(1, name="Tesla T4"), facts(2, name="Tesla T4")]
    with pytest.raises(UnfitVmError, match="several types: got NVIDIA L4, Tesla T4; let its agent"):
        assign("gpu", gpus, 3, cores=4)
    assert assign("gpu", gpus[1:], 2, cores=4).devices == tuple(map(device_of, gpus[1:]))


def test_a_device_names_its_gpu() -> None:
    assert device_of(facts(3)) == "cuda:GPU-00000003-aaaa"


@pytest.mark.parametrize(
    ("variable", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("GPU-00000001", [1]),
        ("GPU-00000001-aaaa, 0", [1, 0]),
        ("1,7,0", [1]),
        ("1,1", [1]),
    ],
)
def test_hidden_gpus_are_left_alone(variable: str | None, left: list[int]) -> None:
    gpus = [facts(index) for index in range(3)]
    assert [gpu.index for gpu in visible_gpus(gpus, variable)] == left
