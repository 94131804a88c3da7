"""Measurements that are copied to a store come back from there as they were."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
from tests.unit.varuna_manager.measured_jobs import store as empty

from spottrain.varuna_manager.jobs.bucket import StoredJob
from spottrain.varuna_manager.jobs.measurements import (
    STEPS,
    Block,
    GenerationBegan,
    Measurements,
    Minibatch,
)
from spottrain.varuna_manager.jobs.packed import PackedError
from spottrain.varuna_manager.jobs.replication import BlockCopy


def row(step: int, generation: int) -> Minibatch:
    return Minibatch(
        step=step,
        generation=generation,
        at_s=float(step),
        loss=math.nan if step % 50 == 0 else 1.0 / step,
        grad_norm=1.0,
        metrics={"accuracy": 0.5},
        step_s=0.1,
        examples=8,
        plan="1x1",
        usd_spent=0.0,
    )


def train(measurements: Measurements, generation: int, start: int, end: int) -> None:
    measurements.write([GenerationBegan(generation=generation, step=start)])
    measurements.write(row(step, generation) for step in range(start + 1, end + 1))


def come_back(store: StoredJob, generations: dict[int, int]) -> list[str]:
    """Return the rows that a machine makes of a store and of the journal's generations."""
    found = empty()
    found.write(GenerationBegan(generation=g, step=s) for g, s in generations.items())
    found.await_blocks(store.blocks())
    for block in found.pending():
        found.fill(store.get_block(block), arrived=block)
    assert not found.pending()
    return list(map(repr, found.minibatches()))


def copy(copier: BlockCopy, measurements: Measurements) -> None:
    copier.hurry()
    copier.advance(measurements)


@pytest.mark.rotated
def test_what_was_measured_comes_back_whatever_was_restored(tmp_path: Path) -> None:
    draw = random.Random(1)
    store, here = StoredJob(f"file://{tmp_path}", "0-0"), empty()
    copier, begins, end = BlockCopy(store, 1), dict[int, int](), 0
    for generation in range(1, 13):
        start = draw.randint(max(0, end - 700), end)
        begins[generation] = start
        for end in range(start + 300, start + draw.choice([301, 1800]), 300):
            train(here, generation, start, end)
            copy(copier, here)
        if generation % 5 == 0:
            copier = BlockCopy(store, generation)  # another manager
    expected = list(map(repr, here.minibatches()))
    assert come_back(store, begins) == expected
    assert len(expected) == end
    assert end > STEPS, "more than one block"


@pytest.mark.rotated
def test_only_what_has_changed_is_copied(tmp_path: Path) -> None:
    store, here = StoredJob(f"file://{tmp_path}", "0-0"), empty()
    train(here, 1, 0, 2 * STEPS)
    copy(BlockCopy(store, 1), here)
    assert store.blocks() == [Block(n * STEPS, 1) for n in range(3)]
    copier = BlockCopy(store, 2)
    copy(copier, here)
    later = [block for block in store.blocks() if block.epoch == 2]
    assert later == [Block(2 * STEPS, 2)], "the newest, as it may lack rows"
    train(here, 1, 2 * STEPS, 3 * STEPS)
    copier.advance(here)
    assert Block(3 * STEPS, 2) not in store.blocks(), "it copied a moment ago"
    copy(copier, here)
    assert Block(3 * STEPS, 2) in store.blocks()
    assert Block(0, 2) not in store.blocks()


def test_a_damaged_block_is_named(tmp_path: Path) -> None:
    store, here = StoredJob(f"file://{tmp_path}", "0-0"), empty()
    train(here, 1, 0, STEPS + 10)
    copy(BlockCopy(store, 1), here)
    first = tmp_path / "job/0-0/measurements" / Block(0, 1).name
    first.write_bytes(first.read_bytes()[:-9])
    damaged, whole = store.blocks()
    with pytest.raises(PackedError, match=f"{Block(0, 1).name} is damaged"):
        store.get_block(damaged)
    assert [one.step for one in store.get_block(whole)] == [*range(STEPS, STEPS + 11)]
