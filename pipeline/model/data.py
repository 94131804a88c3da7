"""Examples of a micro-batch: a pure function of (seed, step, example slot).

No sampler has a state, so nothing about the order of data needs to be saved or moved.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob

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


class Microbatch(NamedTuple):
    """Name of a micro-batch: with the job and its seed it determines every bit."""

    number: int
    """The virtual node, or the place in a held-out set."""
    size: int
    """Examples; the last micro-batch of a held-out set may have fewer."""
    step: int = 0
    minibatch_size: int = 0
    heldout: str | None = None
    """The set; ``None``: of training."""


def make_batch(job: TrainingJob, seed: int, wanted: Microbatch) -> Batch:
    """Fetch the examples of a micro-batch and put them together.

    Examples that are drawn at random (augmentation) come out the same in every process,
    in whatever micro-batch they lie.

    Raises:
        UserCodeError: The data set or ``collate`` raised.
    """
    if wanted.heldout is None:
        what, kind = f"dataset in mini-batch {wanted.step}", _DATA
        dataset = job.dataset
        first = wanted.step * wanted.minibatch_size + wanted.number * wanted.size
        positions = range(first, first + wanted.size)
    else:
        what, kind = "evaluation", _HELDOUT
        dataset = job.heldout_sets[wanted.heldout]
        first = wanted.number * wanted.size
        positions = range(first, min(first + wanted.size, len(dataset)))
    examples = []
    with user_code(what):
        for position in positions:
            seed_everything(random_seed(seed, kind, position))
            index = position
            if wanted.heldout is None:
                index = example_index(seed, len(dataset), position)
            examples.append(dataset[index])
        return job.collate(examples)


Fetch = Callable[[Microbatch, Iterable[Microbatch]], Batch]
"""Returns a micro-batch, given also which ones will probably be wanted next."""


class MicrobatchSource:
    """Names the micro-batches of a plan and gets them.

    Args:
        job: Gives the datasets and how examples are put together.
        seed: The job's seed.
        minibatch_size: Examples per mini-batch.
        microbatch_size: Examples per micro-batch.
        fetch: How to get them; by default they are made where they are asked for.
    """

    def __init__(
        self,
        job: TrainingJob,
        seed: int,
        minibatch_size: int,
        microbatch_size: int,
        fetch: Fetch | None = None,
    ) -> None:
        self._minibatch_size = minibatch_size
        self._size = microbatch_size
        self._heldout_sets = job.heldout_sets
        self._heldout_size = HELDOUT_FACTOR * microbatch_size
        self._fetch = fetch or (lambda wanted, _: make_batch(job, seed, wanted))

    def training(
        self, step: int, virtual_node: int, following: Iterable[tuple[int, int]] = ()
    ) -> Batch:
        """Return the micro-batch of ``virtual_node`` in mini-batch ``step``.

        Args:
            step: The mini-batch.
            virtual_node: Which part of it.
            following: Steps and virtual nodes that will probably be wanted next.

        Raises:
            UserCodeError: The data set or ``collate`` raised.
        """
        rest = (self._name(*one) for one in following)
        return self._fetch(self._name(step, virtual_node), rest)

    def _name(self, step: int, virtual_node: int) -> Microbatch:
        return Microbatch(virtual_node, self._size, step, self._minibatch_size)

    def num_heldout(self, name: str) -> int:
        """Return how many micro-batches the examples of a held-out set make."""
        return -(-len(self._heldout_sets[name]) // self._heldout_size)

    def heldout(
        self, name: str, microbatch: int, following: Iterable[int] = ()
    ) -> Batch:
        """Return a micro-batch of a held-out set; the last may be smaller.

        Args:
            name: The set.
            microbatch: Which part of it.
            following: Parts that will probably be wanted next.

        Raises:
            UserCodeError: The data set or ``collate`` raised.
        """
        size = self._heldout_size
        rest = (Microbatch(number, size, heldout=name) for number in following)
        return self._fetch(Microbatch(microbatch, size, heldout=name), rest)
