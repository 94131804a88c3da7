from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.steps import BYTES_PER_S, LATENCY_S, PROFILE, plan

from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.morphing.simulate.reducing import (
    NCCL_FAILED,
    Hop,
    Reducer,
    fastest_hop,
    gather_s,
    hop_of,
    networks_of,
)
from spottrain.wire.model import Network, Profile, Reduction, RingProfile, StateHome


def ring(
    ranks: int,
    rings: int,
    latency_s: float,
    between_vms: bool = True,
    on_device: bool = False,
) -> RingProfile:
    return RingProfile(
        ranks=ranks,
        rings=rings,
        between_vms=between_vms,
        latency_s=latency_s,
        bandwidth_bytes_per_s=1000.0,
        on_device=on_device,
    )


def with_rings(*rings: RingProfile) -> Profile:
    return replace(PROFILE, rings=rings)


def test_without_measured_rings_links_are_reckoned_with() -> None:
    assert hop_of(PROFILE, 4, True, 1) == Hop(2 * LATENCY_S, 2 / BYTES_PER_S)
    assert hop_of(PROFILE, 4, True, 3) == Hop(2 * LATENCY_S, 6 / BYTES_PER_S)
    assert hop_of(PROFILE, 4, False, 3) == hop_of(PROFILE, 4, False, 1)


def test_a_ring_of_the_measured_size_takes_the_measured_time() -> None:
    profile = with_rings(ring(2, 1, 1.0), ring(4, 1, 6.0), ring(8, 1, 21.0))
    hop = hop_of(profile, 4, True, 1)
    assert 3 * (hop.latency_s + 500 / 4 * hop.s_per_byte) == pytest.approx(6.0 + 0.5)


def test_a_ring_of_another_size_has_more_hops_like_those_of_the_nearest() -> None:
    profile = with_rings(ring(2, 1, 1.0), ring(4, 1, 6.0))
    assert hop_of(profile, 7, True, 1) == hop_of(profile, 4, True, 1)


def test_more_rings_than_were_measured_share_the_nic() -> None:
    profile = with_rings(ring(4, 1, 3.0), ring(4, 2, 3.0))
    few, many = (hop_of(profile, 4, True, rings) for rings in (2, 6))
    assert many.s_per_byte == pytest.approx(3 * few.s_per_byte)
    assert many.latency_s == few.latency_s


def test_rings_within_a_vm_are_not_those_between_vms() -> None:
    profile = with_rings(ring(2, 1, 0.001, between_vms=False))
    assert hop_of(profile, 2, False, 1).latency_s == 0.001
    assert hop_of(profile, 2, True, 1).latency_s == 2 * LATENCY_S


rings = st.builds(
    ring,
    st.integers(2, 16),
    st.integers(1, 4),
    st.floats(0.001, 9.0),
    st.booleans(),
    st.booleans(),
)


@given(
    st.lists(rings, max_size=4),
    st.integers(2, 40),
    st.booleans(),
    st.integers(1, 8),
    st.booleans(),
)
def test_no_ring_beats_the_fastest_hop(
    known: list[RingProfile], ranks: int, between_vms: bool, count: int, there: bool
) -> None:
    profile = with_rings(*known)
    hop = hop_of(profile, ranks, between_vms, count, there)
    for least in (fastest_hop(profile), fastest_hop(profile, leaves_vms=between_vms)):
        assert least.latency_s <= hop.latency_s
        assert least.s_per_byte <= hop.s_per_byte * (1 + 1e-9)


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (8, 3), (24, 5)])
def test_a_gather_takes_as_many_rounds_as_ranks_have_digits(ranks: int, rounds: int) -> None:
    assert gather_s(PROFILE, ranks) == rounds * LATENCY_S


def test_rings_of_all_stages_of_a_vm_share_its_nic() -> None:
    profile = with_rings(ring(2, 1, 0.5))
    alone_s = Reducer(plan(2, 2, 2, "abcd"), profile, "fast").sum_s(0, 1000)
    shared_s = Reducer(plan(2, 2, 2, "aabb"), profile, "fast").sum_s(0, 1000)
    assert shared_s - alone_s == pytest.approx(1.0)


def test_a_single_replica_has_nothing_to_reduce() -> None:
    assert Reducer(plan(2, 1, 2, "ab"), PROFILE, "exact").sum_s(1, 99) == 0.0


def test_ranks_that_divide_matrices_reduce_as_replicas_do() -> None:
    ranks = replace(Compute(), group_size=2)
    alone_s = Reducer(plan(1, 1, 2, "a"), PROFILE, "fast", ranks).sum_s(0, 1000)
    wide_s = Reducer(plan(1, 2, 2, "aa"), PROFILE, "fast").sum_s(0, 1000)
    assert alone_s == wide_s > 0


GPU = Compute(on_gpu=True)
NCCL_BROKEN = replace(PROFILE, sources=(f"{NCCL_FAILED}no route to host",))


def test_sums_on_gpus_take_what_was_measured_there() -> None:
    profile = with_rings(ring(2, 1, 6.0), ring(2, 1, 2.0, on_device=True))
    assert hop_of(profile, 2, True, 1).latency_s == 6.0
    assert hop_of(profile, 2, True, 1, on_device=True).latency_s == 2.0
    # What was measured in the VMs' memory only is the next best.
    within = with_rings(ring(2, 1, 6.0, between_vms=False))
    assert hop_of(within, 2, False, 1, on_device=True).latency_s == 6.0


@pytest.mark.parametrize(
    ("profile", "compute", "networks"),
    [
        (with_rings(ring(2, 1, 6.0, on_device=True)), GPU, ("nccl", "gloo")),
        (with_rings(ring(2, 1, 6.0, on_device=True)), CPU, ("auto",)),
        (with_rings(ring(2, 1, 6.0)), GPU, ("auto",)),
        (NCCL_BROKEN, GPU, ("gloo",)),
        (NCCL_BROKEN, replace(GPU, network="nccl"), ("nccl",)),
        (
            with_rings(ring(2, 1, 6.0, on_device=True)),
            replace(GPU, network="gloo"),
            ("gloo",),
        ),
    ],
)
def test_libraries_are_compared_where_both_were_measured(
    profile: Profile, compute: Compute, networks: tuple[Network, ...]
) -> None:
    wide = plan(1, 2, 2, "ab")
    assert networks_of(wide, profile, compute) == networks
    assert networks_of(replace(wide, network="gloo"), profile, compute) == ("gloo",)


def test_one_pipeline_does_without_a_library_that_failed() -> None:
    measured = with_rings(ring(2, 1, 6.0, on_device=True))
    assert networks_of(plan(2, 1, 2, "ab"), measured, GPU) == ("auto",)
    assert networks_of(plan(2, 1, 2, "ab"), NCCL_BROKEN, GPU) == ("gloo",)


@pytest.mark.parametrize(
    ("reduction", "state", "extra_s"),
    [
        ("fast", "host", 0),  # the update counts that gradients come down
        ("fast", "device", 1000 / 10 + 1000 / 20),
        ("exact", "host", 1000 / 10),  # 8 bytes come down instead of 4
        ("exact", "device", 2000 / 10 + 1000 / 20),
    ],
)
def test_sums_in_the_memory_of_vms_cost_their_way_there_and_back(
    reduction: Reduction, state: StateHome, extra_s: float
) -> None:
    profile = replace(PROFILE, download_bytes_per_s=10.0, upload_bytes_per_s=20.0)
    wide = replace(plan(1, 2, 2, "ab"), state=state)
    here, there = (
        Reducer(wide, profile, reduction, GPU, network).sum_s(0, 1000)
        for network in ("nccl", "gloo")
    )
    assert there - here == pytest.approx(extra_s)
