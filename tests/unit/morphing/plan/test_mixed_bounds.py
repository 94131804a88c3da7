from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import a_link, a_profile, microbatch_profile, section_profile
from tests.unit.morphing.plan.test_placement import FACTS, device, even_bounds

from spottrain.morphing.adapt.shares import share_virtual_nodes
from spottrain.morphing.plan.bounds import (
    SectionTimes,
    make_pipe,
    min_finish_s,
    replica_counts,
)
from spottrain.morphing.plan.placement import place
from spottrain.morphing.plan.profiles import derive_profile

INSTANT = a_link(latency_s=0.0, bytes_per_s=1e30)
PROFILE = a_profile(microbatch_profile(section_profile(i) for i in range(6)))


def times_at(speed: float) -> SectionTimes:
    """Return the times of devices of some speed."""
    profile = derive_profile(PROFILE, "device", speed)
    return SectionTimes(profile.sections_at(1), profile.overheads_at(1))


speeds = st.lists(st.sampled_from([1.0, 2.0, 4.0]), min_size=1, max_size=20)


@given(speeds, st.sampled_from([1, 2, 3, 6]), st.data())
def test_replicas_are_counted_as_they_are_placed(
    own: list[float], depth: int, data: st.DataObject
) -> None:
    if len(own) < depth:
        return
    width = data.draw(st.integers(1, len(own) // depth))
    fleet = [device(i, speed=speed) for i, speed in enumerate(sorted(own, reverse=True))]
    placed = place(fleet[: depth * width], even_bounds(depth), width, FACTS, None)
    each = [placed[i : i + depth] for i in range(0, len(placed), depth)]
    found = Counter((len({d.speed for d in one}) > 1, min(d.speed for d in one)) for one in each)
    kinds = sorted(set(own), reverse=True)
    counted = replica_counts(own, depth, [width])
    for mixed, row in enumerate(counts[0] for counts in counted):
        assert row.tolist() == [found[bool(mixed), speed] for speed in kinds]


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("virtual_nodes", [5, 60, 1000])
def test_replicas_that_never_wait_are_done_just_then(depth: int, virtual_nodes: int) -> None:
    each = {4.0: 2, 1.0: 3}
    pipes = [
        make_pipe(times_at(speed), even_bounds(depth), depth, False, INSTANT) for speed in each
    ]
    pure = np.array([list(each.values())])
    finish_s = min_finish_s(pipes, pure, np.zeros_like(pure), virtual_nodes)
    # A stage takes 3 s a section; the first micro-batch passes all, one after the other.
    stage_s = 18 / depth
    by_replica = [speed for speed, count in each.items() for _ in range(count)]
    bounds = share_virtual_nodes(
        virtual_nodes,
        [stage_s / speed for speed in by_replica],
        fixed_s=[(depth - 1) * stage_s / speed for speed in by_replica],
    )
    exact_s = max(
        (bounds[d + 1] - bounds[d] + depth - 1) * stage_s / speed
        for d, speed in enumerate(by_replica)
    )
    # Where replicas have few virtual nodes, one that gets none would be even sooner done.
    assert finish_s[0] <= exact_s + 1e-4
    if virtual_nodes >= 60:
        assert finish_s[0] == pytest.approx(exact_s)


def test_more_replicas_are_never_done_later() -> None:
    fleet = [4.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0]
    pipes = [make_pipe(times_at(v), even_bounds(2), 2, True, INSTANT) for v in (4.0, 2.0, 1.0)]
    pure, mixed = replica_counts(fleet, 2, [1, 2, 3])
    finish_s = min_finish_s(pipes, pure, mixed, 50).tolist()
    assert finish_s == sorted(finish_s, reverse=True)
