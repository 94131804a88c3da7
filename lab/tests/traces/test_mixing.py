from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.errors import PlanError
from spottrain_lab.traces.mixing import Mixing, WorkerType, split_minibatch

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Powers of two and their mid-points, as the paper measures them."""


def worker(name: str, count: int, speed: float) -> WorkerType:
    """Return GPUs that need long for small virtual nodes, as real ones do."""
    times = {b: (0.02 + b / 400) / speed for b in SIZES}
    return WorkerType(name=name, count=count, virtual_node_s=times)


def ring(allreduce_s: float) -> Callable[[int], float]:
    return lambda workers: 2 * (workers - 1) / workers * allreduce_s


def used(mixing: Mixing) -> dict[str, tuple[int, int]]:
    """Return workers and examples of each, by type."""
    return {share.name: (share.workers, share.examples) for share in mixing.best.shares}


def alone_s(mixing: Mixing, name: str) -> float:
    split = mixing.alone[name]
    assert split is not None
    return split.step_s


def test_fast_and_slow_gpus_of_equal_sum_beat_either_type_alone() -> None:
    mixing = split_minibatch(8192, [worker("V", 2, 4), worker("P", 8, 1)], ring(0.1))
    # The paper's H3: 2048 examples for each fast GPU, 512 for each slow one.
    assert used(mixing) == {"V": (2, 2048), "P": (8, 512)}
    assert mixing.best.is_mixed
    best_s = mixing.best.step_s
    assert alone_s(mixing, "V") / best_s > 1.4
    assert alone_s(mixing, "P") / best_s > 1.4


def test_mixing_that_does_not_pay_falls_back_to_the_faster_type() -> None:
    types = [worker("V", 2, 4), worker("P", 2, 1)]
    assert split_minibatch(8192, types, ring(0.1)).best.is_mixed
    mixing = split_minibatch(8192, types, ring(1.0))
    assert used(mixing) == {"V": (2, 4096)}
    assert mixing.best == mixing.alone["V"]
    far_slower = [worker("V", 2, 4), worker("P", 2, 0.01)]
    assert used(split_minibatch(8192, far_slower, ring(0.1))) == {"V": (2, 4096)}


def test_of_equally_fast_splits_the_one_with_fewer_workers_is_taken() -> None:
    same = {1: 1.0}
    types = [
        WorkerType(name="a", count=3, virtual_node_s=same),
        WorkerType(name="b", count=3, virtual_node_s=same),
    ]
    assert list(used(split_minibatch(3, types, ring(0))).values()) == [(3, 1)]
    assert list(used(split_minibatch(1, types, ring(0))).values()) == [(1, 1)]
    four = used(split_minibatch(4, types, ring(0)))
    assert sum(workers for workers, _ in four.values()) == 4
    slowed = split_minibatch(4, types, ring(10))
    assert list(used(slowed).values()) == [(1, 4)]


def test_each_type_has_virtual_nodes_of_its_own_size() -> None:
    large = WorkerType(name="large", count=1, virtual_node_s={1: 1.0, 8: 2.0})
    small = WorkerType(name="small", count=1, virtual_node_s={1: 1.0})
    shares = split_minibatch(10, [large, small], ring(0)).best.shares
    sizes = {share.name: (share.virtual_node_examples, share.virtual_nodes) for share in shares}
    assert sizes == {"large": (8, 1), "small": (1, 2)}


def every_split_s(
    minibatch_size: int,
    types: list[WorkerType],
    communication_s: Callable[[int], float],
) -> list[float]:
    """Return the step times of all splits, one after the other."""
    parts = []
    for one in types:
        part = [(0, 0, 0.0)]
        for workers, (b, s) in itertools.product(
            range(1, one.count + 1), one.virtual_node_s.items()
        ):
            part += [
                (workers, workers * b * waves, s * waves) for waves in range(1, minibatch_size + 1)
            ]
        parts.append(part)
    return [
        max(compute_s for *_, compute_s in split)
        + communication_s(sum(workers for workers, *_ in split))
        for split in itertools.product(*parts)
        if sum(examples for _, examples, _ in split) == minibatch_size
    ]


small_types = st.builds(
    WorkerType,
    name=st.just(""),
    count=st.integers(0, 3),
    virtual_node_s=st.dictionaries(
        st.integers(1, 4), st.sampled_from([0.5, 1.0, 1.5, 3.0, 7.0]), max_size=2
    ),
)


@given(
    st.integers(1, 8),
    st.lists(small_types, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.1, 2.0]),
)
def test_no_split_at_all_is_faster(
    minibatch_size: int, drawn: list[WorkerType], allreduce_s: float
) -> None:
    types = [
        WorkerType(name=str(i), count=one.count, virtual_node_s=one.virtual_node_s)
        for i, one in enumerate(drawn)
    ]
    every = every_split_s(minibatch_size, types, ring(allreduce_s))
    if not every:
        with pytest.raises(PlanError, match="no split"):
            split_minibatch(minibatch_size, types, ring(allreduce_s))
        return
    mixing = split_minibatch(minibatch_size, types, ring(allreduce_s))
    assert mixing.best.step_s == min(every)
    shares = mixing.best.shares
    assert sum(share.workers * share.examples for share in shares) == minibatch_size
    for share in shares:
        own = types[int(share.name)]
        assert share.workers <= own.count
        each_s = own.virtual_node_s[share.virtual_node_examples]
        assert share.compute_s == each_s * share.virtual_nodes
    for one in types:
        own_s = every_split_s(minibatch_size, [one], ring(allreduce_s))
        split = mixing.alone[one.name]
        assert (None if split is None else split.step_s) == min(own_s, default=None)


def test_the_type_alone_may_be_unable_where_together_they_are_able() -> None:
    odd = WorkerType(name="odd", count=1, virtual_node_s={3: 1.0})
    even = WorkerType(name="even", count=1, virtual_node_s={2: 1.0})
    mixing = split_minibatch(5, [odd, even], ring(0))
    assert mixing.alone == {"odd": None, "even": None}
    assert used(mixing) == {"odd": (1, 3), "even": (1, 2)}


@pytest.mark.parametrize(
    ("minibatch_size", "types", "message"),
    [
        (0, [worker("a", 1, 1)], "mini-batch of 1 or more"),
        (64, [], "types of distinct names"),
        (64, [worker("a", 1, 1), worker("a", 1, 2)], "distinct names"),
        (64, [worker("a", -1, 1)], "count of 0 or more"),
        (64, [WorkerType(name="a", count=1, virtual_node_s={0: 1.0})], "sizes of 1"),
        (64, [WorkerType(name="a", count=1, virtual_node_s={1: 0.0})], "above 0"),
        (64, [WorkerType(name="a", count=1, virtual_node_s={1: math.nan})], "above 0"),
        (64, [worker("a", 0, 1)], "no split over the workers gives 64 examples"),
        (7, [worker("a", 2, 1)], "measure smaller ones"),
    ],
)
def test_an_impossible_split_is_refused(
    minibatch_size: int, types: list[WorkerType], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        split_minibatch(minibatch_size, types, ring(0))
