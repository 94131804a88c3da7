from __future__ import annotations

import pytest
from tests.builders import a_link
from tests.unit.morphing.steps import PROFILE, plan, profile_of

from spottrain.morphing.simulate.wiring import wire_replicas

WITHIN = a_link(latency_s=0.01, bytes_per_s=1e6)
BETWEEN = a_link(latency_s=0.5, bytes_per_s=1e3, jitter=0.1)
MIXED = profile_of(PROFILE, output_bytes=2000, within_vm=WITHIN, between_vms=BETWEEN)


def test_stages_of_one_vm_talk_within_it() -> None:
    ((first, second, third),) = wire_replicas(plan(4, 1, 1, "aabb"), MIXED)
    assert first.latency_s == third.latency_s == 0.01
    assert first.transfer_s == pytest.approx(0.002)
    assert first.vms is None
    assert (second.latency_s, second.jitter) == (0.5, 0.1)
    assert second.transfer_s == pytest.approx(2.0)
    assert second.vms == (0, 1)


def test_replicas_whose_links_share_a_nic_get_a_part_of_it_each() -> None:
    apart = wire_replicas(plan(2, 2, 2, "abcd"), MIXED)
    assert [row[0].transfer_s for row in apart] == [2.0, 2.0]
    # Both first stages are in a, the second ones in b and in c.
    together = wire_replicas(plan(2, 2, 2, "abac"), MIXED)
    assert [row[0].transfer_s for row in together] == [4.0, 4.0]


def test_an_interleaved_plan_has_a_link_back_to_the_first_stage() -> None:
    (links,) = wire_replicas(plan(2, 1, 2, "ab", chunks=2), MIXED)
    assert [link.vms for link in links] == [(0, 1), (1, 0)]
