from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch

from spottrain.pipeline.heap import blocks_apart, give_back, suit_activations

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

BLOCK_BYTES, BLOCKS = 4 * 1024**2, 32


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def growth_below(limit_bytes: int) -> Iterator[None]:
    gc.collect()
    give_back()
    before = resident_bytes()
    yield
    assert resident_bytes() - before < limit_bytes


def leave_small_things_behind(
    building: Callable[[], AbstractContextManager[None]],
) -> list[torch.Tensor]:
    """Make and drop large blocks, with something small that stays above each."""
    small, large = [], []
    with building():
        for _ in range(BLOCKS):
            large.append(torch.ones(BLOCK_BYTES // 4))
            small.append(torch.ones(512))
    return small


def test_blocks_of_a_model_that_was_built_and_dropped_leave_no_holes() -> None:
    with growth_below(2 * BLOCK_BYTES):
        small = leave_small_things_behind(blocks_apart)
    assert len(small) == BLOCKS


def test_in_training_what_is_larger_than_activations_leaves_no_holes() -> None:
    suit_activations(BLOCK_BYTES // 4)
    with growth_below(2 * BLOCK_BYTES):
        small = leave_small_things_behind(nullcontext)
    assert len(small) == BLOCKS


def test_what_is_free_between_things_in_use_is_given_back() -> None:
    with blocks_apart():
        pass
    with growth_below(2 * BLOCK_BYTES):
        small = leave_small_things_behind(nullcontext)
        assert len(small) == BLOCKS
        give_back()
