from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.calibrate.calibrate import (
    pairs_between_vms,
    pairs_within_vms,
    section_shares,
)
from spottrain.pipeline.calibrate.links import (
    SMALLEST_BYTES,
    MessageTimes,
    message_sizes,
    rings_to_measure,
)
from spottrain.wire.plan import Slot

FLEETS = st.lists(st.sampled_from("abcdef"), min_size=2, max_size=24)


def rings(vms: str) -> list[tuple[int, int, bool]]:
    """(ranks, rings at once, between VMs) of every measurement."""
    return [
        (len(one.members[0]), len(one.members), one.between_vms) for one in rings_to_measure(vms)
    ]


def test_rings_go_through_sizes_and_numbers_at_once() -> None:
    assert rings("ab") == [(2, 1, True)]
    assert rings("aa") == [(2, 1, False)]
    assert rings("aabb") == [(2, 1, False), (2, 1, True), (2, 2, True)]
    assert rings("abcde") == [(2, 1, True), (4, 1, True), (5, 1, True)]
    assert rings("aaaa") == [(2, 1, False), (2, 2, False), (4, 1, False)]


@given(FLEETS)
def test_rings_are_where_they_say(vms: list[str]) -> None:
    for one in rings_to_measure(vms):
        members = [rank for ring in one.members for rank in ring]
        assert len(set(members)) == len(members)
        for ring in one.members:
            places = {vms[rank] for rank in ring}
            assert len(places) == (len(ring) if one.between_vms else 1)


@given(FLEETS)
def test_pairs_are_where_they_say_and_no_rank_is_in_two(vms: list[str]) -> None:
    within, between = pairs_within_vms(vms), pairs_between_vms(vms)

    assert all(vms[a] == vms[b] for a, b in within)
    assert all(vms[a] != vms[b] for a, b in between)
    assert bool(between) == (len(set(vms)) > 1)
    for pairs in (within, between):
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)


@given(FLEETS, st.integers(1, 80))
def test_every_section_is_measured_once_by_even_shares(vms: list[str], num_sections: int) -> None:
    slots = [Slot(vm_id=vm, index=0) for vm in vms]  # a VM twice: one process of two

    shares = section_shares(slots, num_sections)

    assert [k for share in shares for k in share] == list(range(num_sections))
    sizes = [len(s) for s, slot in zip(shares, slots, strict=True) if slot in slots]
    computing = [sizes[vms.index(vm)] for vm in dict.fromkeys(vms)]
    assert sum(computing) == num_sections, "the second process of a slot has none"
    assert max(computing) - min(computing) <= 1


def test_messages_are_of_sizes_around_the_activation() -> None:
    assert message_sizes(1 << 20) == (1024, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
    assert message_sizes(0) == (SMALLEST_BYTES,)


def test_jitter_is_that_of_one_message_of_the_two_of_a_round_trip() -> None:
    times = MessageTimes({1024: [0.9e-3, 1e-3, 1.1e-3]}, {1024: 1e-5, 4096: 2e-5})

    assert abs(times.profile().jitter - 2**0.5 * 0.14826) < 1e-6
    assert times.posting_near_s(5000) == 2e-5
