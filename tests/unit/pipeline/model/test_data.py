from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.data import (
    HELDOUT_FACTOR,
    MicrobatchSource,
    check_datasets,
    digests,
    refuse_differing,
    why_unmovable,
    why_unsendable,
)
from spottrain.pipeline.model.job import TrainingJob


class Numbers:
    """Example ``i`` is the number ``i``."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def a_job(length: int, heldout: int | None = None) -> TrainingJob:
    return TrainingJob(
        model=lambda: torch.nn.Linear(1, 1),
        dataset=Numbers(length),
        heldout=None if heldout is None else Numbers(heldout),
        loss=lambda model, batch: (torch.zeros(()), 1.0),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
    )


@given(
    step=st.integers(0, 30),
    nodes=st.integers(1, 6),
    size=st.integers(1, 4),
    seed=st.integers(0, 100),
)
def test_a_minibatch_holds_the_same_examples_however_it_is_cut(
    step: int, nodes: int, size: int, seed: int
) -> None:
    whole = nodes * size
    cut = MicrobatchSource(a_job(50), seed, whole, size)
    uncut = MicrobatchSource(a_job(50), seed, whole, whole)

    parts = [cut.training(step, range(node, node + 1)) for node in range(nodes)]

    assert torch.equal(torch.cat(parts), uncut.training(step, range(1)))


@given(length=st.integers(0, 50), size=st.integers(1, 5))
def test_held_out_examples_are_each_seen_once_in_order(length: int, size: int) -> None:
    source = MicrobatchSource(a_job(5, heldout=length), 0, size, size)

    seen = [source.heldout("heldout", number) for number in range(source.num_heldout("heldout"))]

    assert [int(x) for part in seen for x in part] == list(range(length))
    assert all(len(part) <= HELDOUT_FACTOR * size for part in seen)


def test_without_held_out_examples_there_are_no_microbatches_of_them() -> None:
    assert a_job(5).heldout_sets == {}


class Drawn(Numbers):
    """Examples that are drawn at random when they are asked for."""

    def __getitem__(self, index: int) -> int:
        drawn = random.random(), numpy.random.rand(), float(torch.rand(()))
        return hash((index, *drawn))


def test_examples_drawn_at_random_are_the_same_whoever_draws_them() -> None:
    job = dataclasses.replace(a_job(8, heldout=8), dataset=Drawn(8), heldout=Drawn(8))
    one = dataclasses.replace(job, collate=list)
    whole = MicrobatchSource(one, 1, 8, 4)
    halves = MicrobatchSource(one, 1, 8, 2)

    nodes = [*halves.training(3, range(1)), *halves.training(3, range(1, 2))]

    random.seed(5)
    torch.manual_seed(5)
    assert whole.training(3, range(1)) == halves.training(3, range(2)) == nodes
    assert whole.training(4, range(1)) != nodes
    assert whole.heldout("heldout", 0) == halves.heldout("heldout", 0)


class Stream(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Stream(), "dataset must give any example by its index.*got Stream"),
        (iter([1, 2]), "got list_iterator, which is read from beginning to end"),
        (
            torch.utils.data.DataLoader(Stream(), batch_size=2),
            r"is a DataLoader: .* dataset=loader\.dataset and collate=loader\.collate_fn",
        ),
        ([], "dataset is empty"),
    ],
)
def test_data_sets_that_have_no_examples_by_index_are_refused(dataset: Any, message: str) -> None:
    with pytest.raises(UserCodeError, match=message):
        check_datasets(dataclasses.replace(a_job(3), dataset=dataset))


def test_held_out_sets_are_refused_by_name() -> None:
    job = dataclasses.replace(a_job(3), heldout={"books": Stream()})
    with pytest.raises(UserCodeError, match="heldout set books must give"):
        check_datasets(job)


class Counting(Numbers):
    """Examples depend on how many were asked for before."""

    asked = 0

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return self.asked


def test_examples_that_differ_between_processes_are_refused() -> None:
    job = dataclasses.replace(a_job(8, heldout=3), collate=list)
    refuse_differing(digests(job), digests(job, backwards=True))
    drawn = dataclasses.replace(job, dataset=Drawn(8))
    refuse_differing(digests(drawn), digests(drawn, backwards=True))

    one, other = (dataclasses.replace(job, dataset=Counting(8)) for _ in range(2))
    here, there = digests(one), digests(other, backwards=True)
    with pytest.raises(UserCodeError, match="example 0 of dataset differs between"):
        refuse_differing(here, there)

    longer = dataclasses.replace(job, heldout=Numbers(4))
    with pytest.raises(UserCodeError, match="length of heldout set heldout"):
        refuse_differing(digests(job), digests(longer))


@given(shape=st.lists(st.integers(0, 3), max_size=3), steps=st.integers(1, 3))
def test_digests_are_of_values_wherever_they_lie(shape: list[int], steps: int) -> None:
    values = torch.arange(torch.Size(shape).numel() * steps).float()
    spread = values[::steps].reshape(shape)
    job = dataclasses.replace(a_job(1), collate=lambda _: spread)
    copied = dataclasses.replace(a_job(1), collate=lambda _: spread.clone())
    other = dataclasses.replace(a_job(1), collate=lambda _: spread + 1)

    assert digests(job) == digests(copied)
    assert (digests(job) == digests(other)) == (spread.numel() == 0)


def test_batches_that_no_other_process_can_read_are_told() -> None:
    assert why_unsendable(a_job(2)) == ""
    job = dataclasses.replace(a_job(2), collate=lambda examples: lambda: examples)
    assert "pickle" in why_unsendable(job)


def test_batches_whose_tensors_nobody_finds_are_told() -> None:
    assert why_unmovable(a_job(2)) == ""
    job = dataclasses.replace(a_job(2), collate=lambda examples: SimpleNamespace(x=torch.ones(1)))
    assert why_unmovable(job) == "SimpleNamespace"
