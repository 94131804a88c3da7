"""Examples of a micro-batch: a pure function of (seed, step, example slot).

No sampler has a state, so nothing about the order of data needs to be saved or moved.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys

import torch

from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.steps import at_step

_DATA, _HELDOUT = -1, -2
"""Distinguish the seeds of examples."""
HELDOUT_FACTOR = 4
"""Micro-batches of held-out examples are larger: nothing is kept for a backward."""


def random_seed(*parts: int) -> int:
    """Return a 63-bit seed that depends on every part, on any machine the same."""
    text = ",".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed what user code may draw random numbers from on this process.

    That is torch, Python's ``random`` and, where it is in use, numpy's global generator.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(random_seed(seed, epoch))
    return torch.randperm(length, generator=generator)


def example_index(seed: int, length: int, position: int) -> int:
    """Return the index of the example at ``position`` of the endless shuffled stream.

    Every epoch visits all ``length`` examples once, in an order of its own.
    """
    epoch, place = divmod(position, length)
    return int(_permutation(seed, epoch, length)[place])


class MicrobatchSource:
    """Makes the micro-batches of a job.

    Args:
        job: Gives the datasets and how examples are put together.
        seed: The job's seed.
        minibatch_size: Examples per mini-batch.
        microbatch_size: Examples per micro-batch.
    """

    def __init__(
        self, job: TrainingJob, seed: int, minibatch_size: int, microbatch_size: int
    ) -> None:
        self._job = job
        self._seed = seed
        self._minibatch_size = minibatch_size
        self._size = microbatch_size
        self._heldout = job.heldout_sets
        self._heldout_size = HELDOUT_FACTOR * microbatch_size

    def training(self, step: int, virtual_node: int) -> Batch:
        """Return the micro-batch of ``virtual_node`` in mini-batch ``step``.

        Examples that are drawn at random (augmentation) come out the same on every
        stage, in whatever micro-batch they lie.
        """
        first = step * self._minibatch_size + virtual_node * self._size
        dataset = self._job.dataset
        examples = []
        with at_step(step):  # also in a process of its own
            for position in range(first, first + self._size):
                seed_everything(random_seed(self._seed, _DATA, position))
                index = example_index(self._seed, len(dataset), position)
                examples.append(dataset[index])
            return self._job.collate(examples)

    def num_heldout(self, name: str) -> int:
        """Return how many micro-batches the examples of a held-out set make."""
        return -(-len(self._heldout[name]) // self._heldout_size)

    def heldout(self, name: str, microbatch: int) -> Batch:
        """Return a micro-batch of a held-out set; the last may be smaller."""
        heldout = self._heldout[name]
        start = microbatch * self._heldout_size
        end = min(start + self._heldout_size, len(heldout))
        examples = []
        for index in range(start, end):
            seed_everything(random_seed(self._seed, _HELDOUT, index))
            examples.append(heldout[index])
        return self._job.collate(examples)
