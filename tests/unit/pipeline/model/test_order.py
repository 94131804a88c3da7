"""The order in which the examples of a data set come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.model.order import announce_next, example_index, order, random_seed

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@dataclass
class Sharded:
    """A data set of which only the shards are known."""

    shard_lengths: Sequence[int]
    window: int
    expected: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(self.shard_lengths)

    def expect(self, shards: Sequence[int], current: Sequence[int]) -> None:
        self.expected.append((shards, current))

    def shard_of(self, index: int) -> int:
        ends = torch.tensor(self.shard_lengths).cumsum(0)
        return int(torch.searchsorted(ends, index, right=True))


@given(seed=st.integers(0, 2**31), length=st.integers(1, 40), epoch=st.integers(0, 5))
def test_every_epoch_visits_every_example_once(seed: int, length: int, epoch: int) -> None:
    positions = range(epoch * length, (epoch + 1) * length)
    visited = [example_index(seed, range(length), position) for position in positions]
    assert sorted(visited) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first = [example_index(1, range(20), position) for position in range(20)]
    assert first != [example_index(1, range(20), position) for position in range(20, 40)]
    assert first != [example_index(2, range(20), position) for position in range(20)]


@given(LENGTHS, st.integers(1, 5), st.integers(0, 3))
def test_an_epoch_of_shards_visits_every_example_once(
    lengths: list[int], window: int, epoch: int
) -> None:
    data = Sharded(lengths, window)
    positions = range(epoch * len(data), (epoch + 1) * len(data))
    visited = [example_index(3, data, position) for position in positions]
    assert sorted(visited) == list(range(len(data)))


@given(LENGTHS, st.integers(1, 5))
def test_the_shards_of_a_window_are_read_before_any_other(lengths: list[int], window: int) -> None:
    data = Sharded(lengths, window)
    read = [data.shard_of(example_index(3, data, position)) for position in range(len(data))]
    found = order(3, 0, tuple(lengths), window)
    begin = 0
    for shards, end in zip(found.windows, found.ends, strict=True):
        assert set(read[begin:end]) == set(shards)
        assert len(shards) <= window
        begin = end
    assert sorted(x for shards in found.windows for x in shards) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 5), st.data())
def test_a_data_set_hears_which_shards_are_read_next(
    lengths: list[int], window: int, data: st.DataObject
) -> None:
    dataset = Sharded(lengths, window)
    position = data.draw(st.integers(0, 2 * len(dataset) - 1))
    announce_next(3, dataset, position)
    ((following, current),) = dataset.expected
    epoch, place = divmod(position, len(dataset))
    ends = order(3, epoch, tuple(lengths), window).ends
    end = min(x for x in ends if x > place)
    before = example_index(3, dataset, epoch * len(dataset) + end - 1)
    after = example_index(3, dataset, epoch * len(dataset) + end)
    assert dataset.shard_of(before) in current
    assert dataset.shard_of(after) in following


def test_shards_are_drawn_anew_for_each_epoch() -> None:
    windows = [order(1, epoch, (1,) * 20, 4).windows for epoch in range(3)]
    assert len(set(windows)) == 3


@given(parts=st.lists(st.integers(0, 1000), min_size=1, max_size=4))
def test_seeds_fit_torch_and_depend_on_every_part(parts: list[int]) -> None:
    seed = random_seed(*parts)
    torch.Generator().manual_seed(seed)
    assert seed == random_seed(*parts)
    assert seed != random_seed(*parts[:-1], parts[-1] + 1)
