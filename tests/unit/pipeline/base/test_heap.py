"""Each case in an interpreter of its own: a heap that other tests left full of holes takes
large blocks into these."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

SCRIPT = """
import gc
from contextlib import nullcontext
from pathlib import Path

import torch

from spottrain.pipeline.base.heap import mmap_large_blocks, trim_heap, tune_for_activations

BLOCK_BYTES, BLOCKS = 4 * 1024**2, 32


def resident_bytes():
    "Of memory alone: pages of files come and go as the whole machine needs room."
    _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(of_files)) * 4096


def small_things_left_behind(building):
    "Make and drop large blocks, with something small that stays above each."
    small, large = [], []
    with building():
        for _ in range(BLOCKS):
            large.append(torch.ones(BLOCK_BYTES // 4))
            small.append(torch.ones(512))
    return small


{prepare}
gc.collect()
trim_heap()
before = resident_bytes()
small = small_things_left_behind({building})
{finish}
assert len(small) == BLOCKS
print((resident_bytes() - before) / BLOCK_BYTES)
"""


def blocks_kept(prepare: str, building: str, finish: str = "") -> float:
    """Return by how many blocks the memory of a process has grown."""
    script = SCRIPT.format(prepare=prepare, building=building, finish=finish)
    run = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return float(run.stdout)


@pytest.mark.rotated
def test_blocks_of_a_model_that_was_built_and_dropped_leave_no_holes() -> None:
    assert blocks_kept("", "mmap_large_blocks") < 2


@pytest.mark.rotated
def test_in_training_blocks_larger_than_activations_leave_no_holes() -> None:
    assert blocks_kept("tune_for_activations(BLOCK_BYTES // 4)", "nullcontext") < 2


@pytest.mark.rotated
def test_free_memory_between_blocks_in_use_is_returned() -> None:
    once = "with mmap_large_blocks(): pass"
    assert blocks_kept(once, "nullcontext") > 16
    assert blocks_kept(once, "nullcontext", finish="trim_heap()") < 2
