"""The tiny job over a corpus in files, of which a machine holds a tenth."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spottrain import Shards, TrainingJob
from spottrain.datasets import variable

if TYPE_CHECKING:
    from tests.integration import tiny_job
else:
    tiny_job = importlib.import_module("tiny_job")

EXAMPLE_BYTES = tiny_job.SEQUENCE + 1


def read(path: Path) -> torch.Tensor:
    tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    return tokens.long().view(-1, EXAMPLE_BYTES)


class Late:
    """Looks for its data where it is used: the tests load jobs before they fork machines."""

    window, shard_lengths = 2, (4,) * 40

    @functools.cached_property
    def shards(self) -> Shards:
        return Shards("corpus", read, lambda size: size // EXAMPLE_BYTES, window=self.window)

    def expect(self, shards: Sequence[int], current: Sequence[int]) -> None:
        self.shards.expect(shards, current)

    def __len__(self) -> int:
        return sum(self.shard_lengths)

    def __getitem__(self, index: int) -> torch.Tensor:
        if variable("corpus") not in os.environ:  # where it is only traced
            return torch.zeros(EXAMPLE_BYTES, dtype=torch.int64)
        example: torch.Tensor = self.shards[index]
        return example


def job() -> TrainingJob:
    return dataclasses.replace(tiny_job.job(), dataset=Late())
