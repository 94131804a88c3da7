"""Examples of a micro-batch: a pure function of (seed, step, example slot).

No sampler has a state, so nothing about the order of data needs to be saved or moved.
Every stage of a pipeline, on whatever VM, may make the same examples by itself; so an
example must be found by its index and be the same in every process, which is checked
before anything is rented.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, IterableDataset

from spottrain.errors import UserCodeError
from spottrain.manifest import DatasetLength
from spottrain.pipeline.base.containers import know_classes_in, opaque_class
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.order import announce_next, example_index, random_seed
from spottrain.steps import at_step

_DATA, _HELDOUT = -1, -2
"""Distinguish the seeds of examples."""
HELDOUT_FACTOR = 4
"""Micro-batches of held-out examples are larger: nothing is kept for a backward."""


def seed_everything(seed: int) -> None:
    """Seed what user code may draw random numbers from on this process.

    That is torch, Python's ``random`` and, where it is in use, numpy's global generator.
    """
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)


class Microbatch(NamedTuple):
    """Name of a micro-batch: with the job and its seed it determines every bit."""

    first: int
    """Place of its first example in the mini-batch, or in a held-out set."""
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
        first = wanted.step * wanted.minibatch_size + wanted.first
        positions = range(first, first + wanted.size)
    else:
        what, kind = "evaluation", _HELDOUT
        dataset = job.heldout_sets[wanted.heldout]
        positions = range(wanted.first, min(wanted.first + wanted.size, len(dataset)))
    examples = []
    # Here, not where it is asked for: that may be another process.
    now = nullcontext() if wanted.heldout is not None else at_step(wanted.step)
    with user_code(what), now:
        for position in positions:
            seed_everything(random_seed(seed, kind, position))
            index = position
            if wanted.heldout is None:
                index = example_index(seed, dataset, position)
            examples.append(dataset[index])
        if wanted.heldout is None:
            announce_next(seed, dataset, positions[-1])
        return collated(job, examples)


def collated(job: TrainingJob, examples: list[Any]) -> Batch:
    """Put examples together; torch's pytree knows the classes of the batch from then on."""
    batch = job.collate(examples)
    know_classes_in(batch)
    return batch


Fetch = Callable[[Microbatch, Iterable[Microbatch]], Batch]
"""Returns a micro-batch, given also which ones will probably be wanted next."""


class MicrobatchSource:
    """Names the micro-batches of a plan and gets them.

    Args:
        job: Gives the datasets and how examples are put together.
        seed: The job's seed.
        minibatch_size: Examples per mini-batch.
        microbatch_size: Examples of a virtual node.
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
        self._node_size = microbatch_size
        self._heldout_sets = job.heldout_sets
        self._heldout_size = HELDOUT_FACTOR * microbatch_size
        self._fetch = fetch or (lambda wanted, _: make_batch(job, seed, wanted))

    def training(
        self, step: int, nodes: range, following: Iterable[tuple[int, range]] = ()
    ) -> Batch:
        """Return a micro-batch of mini-batch ``step``.

        Args:
            step: The mini-batch.
            nodes: Virtual nodes that make up the micro-batch.
            following: Steps and virtual nodes that will probably be wanted next.

        Raises:
            UserCodeError: The data set or ``collate`` raised.
        """
        rest = (self._name(*one) for one in following)
        return self._fetch(self._name(step, nodes), rest)

    def num_examples(self, nodes: range) -> int:
        """Return how many examples virtual nodes have."""
        return self._node_size * len(nodes)

    def _name(self, step: int, nodes: range) -> Microbatch:
        first = nodes.start * self._node_size
        return Microbatch(first, self.num_examples(nodes), step, self._minibatch_size)

    def num_heldout(self, name: str) -> int:
        """Return how many micro-batches the examples of a held-out set make."""
        return -(-len(self._heldout_sets[name]) // self._heldout_size)

    def heldout_examples(self, name: str, microbatch: int) -> int:
        """Return how many examples a micro-batch of a held-out set has."""
        rest = len(self._heldout_sets[name]) - microbatch * self._heldout_size
        return min(self._heldout_size, rest)

    def heldout(self, name: str, microbatch: int, following: Iterable[int] = ()) -> Batch:
        """Return a micro-batch of a held-out set; the last may be smaller.

        Args:
            name: The set.
            microbatch: Which part of it.
            following: Parts that will probably be wanted next.

        Raises:
            UserCodeError: The data set or ``collate`` raised.
        """
        size = self._heldout_size
        rest = (Microbatch(number * size, size, heldout=name) for number in following)
        return self._fetch(Microbatch(microbatch * size, size, heldout=name), rest)


# --- Checks of the user's data sets ----------------------------------------------------


Digests = dict[str, str]
"""Hashes of batches of a few examples each, as one process has made them, by the name of the
example; empty: it cannot be compared."""


def check_datasets(job: TrainingJob) -> None:
    """Check that data sets give examples by index, and that there are some.

    Raises:
        UserCodeError: One does not, or the data set for training is empty.
    """
    for name, dataset in _datasets(job).items():
        if isinstance(dataset, DataLoader):
            raise UserCodeError(
                f"{name} is a DataLoader: got batches instead of examples; give "
                "dataset=loader.dataset and collate=loader.collate_fn (batches are "
                "minibatch_size, its workers loader.workers in the job file)"
            )
        kind = type(dataset)
        by_index = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
        if isinstance(dataset, IterableDataset) or not by_index:
            raise UserCodeError(
                f"{name} must give any example by its index, and have a length: got "
                f"{kind.__name__}, which is read from beginning to end; docs/data.md "
                "shows how to read streams, shards and token files by index"
            )
    with user_code("length of the data set"):
        if not len(job.dataset):
            raise UserCodeError("dataset is empty: its length is 0; give it examples")


def dataset_lengths(job: TrainingJob) -> tuple[DatasetLength, ...]:
    """Return the lengths of all data sets.

    Raises:
        UserCodeError: One raised.
    """
    with user_code("length of a data set"):
        return tuple(
            DatasetLength(name=name, length=len(dataset))
            for name, dataset in _datasets(job).items()
        )


def digests(job: TrainingJob, *, backwards: bool = False) -> Digests:
    """Return hashes of a few examples of every data set, and their lengths.

    Args:
        job: The job, just loaded.
        backwards: Take the examples in another order.

    Raises:
        UserCodeError: A data set or ``collate`` raised.
    """
    places = [
        (name, index)
        for name, dataset in _datasets(job).items()
        for index in dict.fromkeys((0, len(dataset) - 1))
        if index >= 0
    ]
    hashes = {
        f"example {index} of {name}": batch_digest(_batch(job, name, index))
        for name, index in (reversed(places) if backwards else places)
    }
    lengths = {f"length of {x.name}": str(x.length) for x in dataset_lengths(job)}
    return hashes | lengths


def helper_digests(helpers: Sequence[torch.Tensor]) -> Digests:
    """Return a hash of the parameters of helper models."""
    found = hashlib.sha256()
    for tensor in helpers:
        plain = tensor.detach().cpu().contiguous().flatten()
        found.update(plain.view(torch.uint8).numpy().tobytes())
    return {"helper models": found.hexdigest()}


def refuse_differing(here: Digests, there: Digests) -> None:
    """Refuse data sets that gave two processes different examples.

    Raises:
        UserCodeError: They did.
    """
    for what, digest in here.items():
        if there.get(what, digest) != digest:
            raise UserCodeError(
                f"{what} differs between processes: the stages of a pipeline would "
                "train on different data; take an example's random numbers from torch, "
                "random or numpy.random itself, which are seeded for it, or from a "
                "generator seeded with the index, seed what draws numbers when the data "
                "set is built, and sort what comes from sets and folders"
            )


def why_unsendable(job: TrainingJob) -> str:
    """Return why a batch cannot go from one process to another; empty: it can.

    Raises:
        UserCodeError: The data set or ``collate`` raised.
    """
    batch = _batch(job, "dataset", 0)
    try:
        pickle.dumps(batch)
    except Exception as error:  # noqa: BLE001  whatever the user's objects raise
        return (str(error).splitlines() or [type(error).__name__])[0]
    return ""


def why_unmovable(job: TrainingJob) -> str:
    """Return the class in a batch whose tensors nobody can move to a GPU; empty: none.

    Raises:
        UserCodeError: The data set or ``collate`` raised.
    """
    return opaque_class(_batch(job, "dataset", 0))


@contextmanager
def other_process(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command beside this process, and end it at the latest with the block."""
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def digests_of(process: subprocess.Popen[bytes]) -> Digests:
    """Return what another process has found out, once it has ended.

    Raises:
        UserCodeError: The user's code raised there, or ended the process.
    """
    assert process.stdout is not None
    line = process.stdout.readline()  # what user code has started may hold the pipe
    code = process.wait()
    if code == 0:
        found: Digests = json.loads(line)
        return found
    if code == UserCodeError.exit_code:
        failure = json.loads(line)
        raise UserCodeError(
            f"in a second process beside the first: {failure['error']}",
            failure["traceback"],
        )
    raise UserCodeError(
        "the process that loads the job a second time ended with "
        f"{code}: got no examples from it; several workers of a machine "
        "must be able to load the job at once"
    )


def second_command(entrypoint: str, workdir: Path, what: str = "--digests") -> list[str]:
    """Return what makes the digests in a process of its own."""
    module = "spottrain.pipeline.model.inspect"
    start = [sys.executable, "-P", "-m", "spottrain.start", module]
    return [*start, what, entrypoint, str(workdir)]


def _datasets(job: TrainingJob) -> dict[str, Any]:
    heldout = {f"heldout set {k}": v for k, v in job.heldout_sets.items()}
    return {"dataset": job.dataset, **heldout}


def _batch(job: TrainingJob, name: str, index: int) -> Batch:
    with user_code("data set or collate"), at_step(0):
        seed_everything(random_seed(0, index))
        return collated(job, [_datasets(job)[name][index]])


class _Canonical(pickle.Pickler):
    """Pickles tensors by their values alone, wherever they lie in memory."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make ``value`` again, see ``pickle.Pickler``."""
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1)
            content = b""
            if len(flat):  # an empty one may keep strides that no view accepts
                content = flat.contiguous().view(torch.uint8).numpy().tobytes()
            what = str(value.dtype), tuple(value.shape), content
            return bytes, (repr(what).encode(),)
        return NotImplemented


def batch_digest(batch: Batch) -> str:
    """Return a hash of all values of a batch; empty: it cannot be compared."""
    stream = io.BytesIO()
    try:
        _Canonical(stream).dump(batch)
    except Exception:  # noqa: BLE001  what cannot be compared is not refused
        return ""
    return hashlib.sha256(stream.getvalue()).hexdigest()
