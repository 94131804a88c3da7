"""Parallel calls to a cloud."""

from __future__ import annotations

import pytest

from spottrain.cloud.parallel import run_parallel


@pytest.mark.parametrize("count", [1, 2, 16, 40])
def test_every_call_is_made_though_the_first_fails(count: int) -> None:
    """Of VMs that are returned, throttling of one leaves none of the others running."""
    made: list[int] = []

    def call(number: int) -> None:
        made.append(number)
        if number in (0, 1):
            raise ValueError(number)

    with pytest.raises(ValueError, match="0"):
        run_parallel(call, range(count))
    assert sorted(made) == list(range(count))


def test_answers_come_in_order() -> None:
    assert run_parallel(str, range(40)) == tuple(map(str, range(40)))
    assert run_parallel(str, ()) == ()
