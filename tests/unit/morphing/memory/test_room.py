from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.memory.room import (
    WorkerBytes,
    largest,
    smallest,
    times,
    total,
)

some = st.builds(WorkerBytes, *[st.integers(0, 100)] * 3)
several = st.lists(some, min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("needed", "room", "over", "is_host"),
    [
        ((5, 5), (5, 5), 0, False),
        ((6, 5), (5, 5), 1, False),
        ((5, 8), (5, 5), 3, True),
        ((7, 8), (5, 5), 3, False),
        ((5, 10**9), (5, 0), 0, False),
        ((5, 5, 4), (5, 5, 3), 1, True),
        ((5, 5, 4), (5, 5, 0), 0, False),
    ],
)
def test_what_lacks_is_the_larger_shortage_of_a_memory_that_is_known(
    needed: tuple[int, ...], room: tuple[int, ...], over: int, is_host: bool
) -> None:
    need, have = WorkerBytes(*needed), WorkerBytes(*room)
    assert need.beyond(have) == over
    assert need.lacks_host(have) == is_host
    assert need.lacks_lock(have) == (have.locked == 3)


@given(several, some)
def test_all_fit_where_the_largest_fits(needs: list[WorkerBytes], room: WorkerBytes) -> None:
    fits = all(need.beyond(room) <= 0 for need in needs)
    assert fits == (largest(needs).beyond(room) <= 0)
    if fits:
        assert total(needs).beyond(times(room, len(needs))) <= 0


@given(some, several)
def test_what_fits_into_the_smallest_fits_everywhere(
    need: WorkerBytes, rooms: list[WorkerBytes]
) -> None:
    if need.beyond(smallest(rooms)) <= 0:
        assert all(need.beyond(room) <= 0 for room in rooms)
