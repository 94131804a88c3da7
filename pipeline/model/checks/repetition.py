"""Runs micro-batches again, in another order and cut otherwise, and compares all bits.

Stages of one micro-batch are run by several processes, each of them twice where it is
recomputed, and after a loss of VMs by others. So results must depend on parameters, batch,
seeds and ``spottrain.step()`` alone. What Python objects carry from call to call differs
from process to process; where results depend on it, exact mode cannot keep its promise.
State that no result depends on (caches, counters for a log) is welcome.
"""

from __future__ import annotations

import contextlib
import math
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.python_state import Snapshot, snapshot
from spottrain.pipeline.model.checks.rehearsal import MAX_STAGES, MOST_NAMES, train_once
from spottrain.pipeline.model.checks.trial import same_bits
from spottrain.pipeline.model.data import (
    batch_digest,
    collated,
    seed_everything,
)
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.order import random_seed
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise, run_eagerly
from spottrain.pipeline.model.stage import StageModel
from spottrain.steps import at_step

MOST_BYTES = 1 << 29
"""Of the parameters of models that are tried: for any machine to have the memory."""
MOST_FLOPS = 4e11
"""Of a trial: about ten seconds of one core."""
_EXAMPLES = 2
_FORWARDS = 15
"""What a trial takes, in forwards of a micro-batch."""
_JUMPS = (10, 1_000, 100_000, 10_000_000)
"""By which counters are set forward: what begins or ends later shows now."""
_NOISE = 0.02
"""Added to initial weights: outputs of layers that begin as zeros tell nothing."""

_ON_META = re.compile(r"\bmeta\b|\bMeta\b")
"""In what torch says of parameters that are no module's any more."""

UNSEEN = "something that inspect does not see"

Pair = tuple[float, float]
Tensors = dict[int, dict[str, torch.Tensor]]
Result = list[torch.Tensor | None]
"""Loss, weight, metrics, and all gradients of a micro-batch."""


def is_small(layout: ModelLayout) -> bool:
    """Return whether ``try_loss`` takes some seconds at most."""
    num_bytes = sum(spec.num_bytes for spec in layout.specs.values())
    flops = sum(layout.flops_per_example) * _EXAMPLES * _FORWARDS
    return num_bytes <= MOST_BYTES and flops <= MOST_FLOPS


def try_loss(job: TrainingJob, layout: ModelLayout) -> str:
    """Return the names of state that results depend on and calls change; empty: none.

    Where results differ and nothing that is seen has changed, that is ``UNSEEN``. Nothing
    is found in models that cannot run on a CPU.

    Raises:
        UserCodeError: The loss returns a mean with a weight that is a sum, or a weight that
            is negative or not finite; a module uses
            what is a parameter's no more.
    """
    with torch.random.fork_rng(devices=[]), run_eagerly(), at_step(0):
        trial = _Trial(job, layout)
        try:
            trial.run()
        except _CannotRunError as error:
            cause = error.__cause__
            if isinstance(cause, UserCodeError) and _ON_META.search(str(cause)):
                raise cause from cause.__cause__  # so would training end
        return trial.finding


class _CannotRunError(Exception):
    """The user's code does not run here, also at first."""


class _DependsError(Exception):
    """Results depend on what calls have changed, or a call raised that did not at first."""


@dataclass
class _Trial:
    job: TrainingJob
    layout: ModelLayout
    finding: str = ""
    _changes_batch: bool = False
    _states: list[Snapshot] = field(default_factory=list)
    """Before the first call, and after each."""
    _tensors: Tensors = field(default_factory=dict)
    _roots: Sequence[object] = ()
    """From which state is looked for."""

    def run(self) -> None:
        """Run everything up to the first finding.

        Raises:
            _CannotRunError: There is nothing to compare with.
        """
        try:
            self._run()
        except _DependsError as error:
            unseen = "" if error.__cause__ else UNSEEN
            self.finding = ", ".join(self._culprits()[:MOST_NAMES]) or unseen

    def _run(self) -> None:
        with _at_first():
            self._tensors = first_tensors(self.job, self.layout)
            whole = self._stages(1)
        _check_sums(self.job, whole[0])
        parts = self.job.loss, self.job.dataset, self.job.collate
        self._roots = [*parts, *(stage.module for stage in whole)]
        self._look()
        with _at_first():
            batches = [trial_batch(self.job, number) for number in (0, 1)]
            made = [batch_digest(batch) for batch in batches]
            results = [_train(whole, batches[0], 1)]
        self._changes_batch = batch_digest(batches[0]) != made[0]
        self._look()
        with _later():
            results.append(_train(whole, batches[1], 1))
            self._look()
            for number in (1, 0):
                again = trial_batch(self.job, number)
                self._compare([batch_digest(again)], [made[number]])
            self._look()
            chain = self._stages(MAX_STAGES)
            for number in (1, 0):
                self._compare(_train(chain, batches[number], 2), results[number])
            self._look()
            for jump in _JUMPS:
                self._jump(jump, lambda: _train(whole, batches[0], 1), results[0])

    def _look(self) -> None:
        self._states.append(snapshot(self._roots))

    def _stages(self, number: int) -> list[StageModel]:
        count = self.layout.num_sections
        number = min(number, count)
        bounds = [count * index // number for index in range(number + 1)]
        return [
            StageModel(self.job, self.layout, range(a, b), self._tensors)
            for a, b in pairwise(bounds)
        ]

    def _compare(self, one: Sequence[Any], other: Sequence[Any]) -> None:
        if not all(map(_same, one, other)):
            self._look()
            raise _DependsError

    def _jump(self, jump: int, train: Callable[[], Result], expected: Result) -> None:
        """Compare results after counters are set forward."""
        first, second, third = self._states[:3]
        always = first.changed(second) & second.changed(third)
        places = [place for name in always for place in self._states[-1].numbers.get(name, ())]
        if not places:
            return
        for value, set_it in places:
            set_it(value + jump)
        try:
            result = train()
        except UserCodeError:
            return  # no value that it ever has
        finally:
            for value, set_it in places:
                set_it(value)
        self._compare(result, expected)

    def _culprits(self) -> list[str]:
        """Return what changed, what changed by every call before anything else."""
        changed = [one.changed(two) for one, two in pairwise(self._states)]
        always = changed[0] & changed[1] if len(changed) > 1 else set()
        batch = ["the batch, which loss changes in place"] * self._changes_batch
        return batch + sorted(always or set().union(*changed))


@contextlib.contextmanager
def _at_first() -> Iterator[None]:
    try:
        yield
    except UserCodeError as error:
        raise _CannotRunError from error


@contextlib.contextmanager
def _later() -> Iterator[None]:
    """Take an error that did not come at first for a sign of what calls leave."""
    try:
        yield
    except UserCodeError as error:
        raise _DependsError from error


def first_tensors(job: TrainingJob, layout: ModelLayout) -> Tensors:
    """Return the first values of what each section has, by name."""
    model = materialise(job, seed=0)
    made: dict[str, torch.Tensor] = {}
    buffers = [(name, model.get_buffer(name)) for name in layout.running]
    for name, parameter in [*model.named_parameters(), *buffers]:
        tensor = parameter.detach().to(layout.specs[name].dtype, copy=True)
        if tensor.is_floating_point():
            seed = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.empty(tensor.shape).uniform_(-_NOISE, _NOISE, generator=seed)
            tensor.add_(noise.to(tensor.dtype))
        made[name] = tensor
    return {
        section: {name: made[name] for name in names}
        for section, names in enumerate(layout.parameters)
    }


def trial_batch(job: TrainingJob, number: int) -> Batch:
    """Return micro-batch ``number``, of other examples than those before it."""
    with user_code("data set or collate"):
        indices = range(number * _EXAMPLES, (number + 1) * _EXAMPLES)
        examples = [_example(job, index) for index in indices]
        try:
            return collated(job, examples)
        except RuntimeError:  # examples of several sizes, for micro-batches of one
            return collated(job, examples[:1])


def _example(job: TrainingJob, index: int) -> Any:
    seed_everything(random_seed(0, index))
    return job.dataset[index % len(job.dataset)]


def _train(stages: Sequence[StageModel], batch: Batch, forwards: int) -> Result:
    """Train one micro-batch, each stage's forward so many times, as in a recompute."""
    trained = [p for stage in stages for _, p in _trained(stage)]
    for parameter in trained:
        parameter.grad = None
    sums = train_once(stages, batch, forwards)
    values = sums.values(sorted(sums.metrics))
    numbers = [torch.as_tensor(value).detach().clone() for value in values]
    gradients = [parameter.grad for parameter in trained]
    return [*numbers, *(None if g is None else g.to_dense().clone() for g in gradients)]


def _sums_of_two(job: TrainingJob, stage: StageModel) -> list[dict[str, Pair]]:
    """Return what the loss measures, as values and weights, of two examples one by one and
    of both together; nothing if they cannot be put together."""
    with user_code("data set or collate"):
        examples = [_example(job, index) for index in range(2)]
        batches = [collated(job, examples[:1]), collated(job, examples[1:])]
        try:
            batches.append(collated(job, examples))
        except RuntimeError:  # of several sizes, for micro-batches of one
            return []
    stage.eval()
    sums = []
    with torch.no_grad():
        for batch in batches:
            output = stage.forward(batch, [], int)
            assert isinstance(output, LossSums)
            pairs = {"loss": (output.loss, output.weight), **output.metrics}
            sums.append({k: (float(a), float(b)) for k, (a, b) in pairs.items()})
    return sums


def _check_sums(job: TrainingJob, stage: StageModel) -> None:
    """Check that the loss and metrics of two examples are the sums of theirs where their
    weights are; of code that does not evaluate examples nothing is known.

    Raises:
        UserCodeError: One is a mean, or its weight is none.
    """
    sums: list[dict[str, Pair]] = []
    with contextlib.suppress(UserCodeError):
        sums = _sums_of_two(job, stage)
    for name in set.intersection(*map(set, sums)) if sums else ():
        pairs = [found[name] for found in sums]
        what = "loss" if name == "loss" else f"metric {name} of the loss"
        if wrong := [weight for _, weight in pairs if not 0 <= weight < math.inf]:
            raise UserCodeError(
                f"{what} must have a sum of weights that is finite, and zero or more: got {wrong[0]:g}"
            )
        if is_mean(*pairs):
            raise UserCodeError(
                f"{what} must be a sum as its weight is: got the mean of two examples, "
                f"{pairs[2][0]:g}, of {pairs[0][0]:g} and {pairs[1][0]:g}, with the sum of "
                f"their weights, {pairs[2][1]:g}; return (mean * n, n)"
            )


def is_mean(one: Pair, other: Pair, both: Pair) -> bool:
    """Return whether (value, weight) of two micro-batches together show the value to be a
    mean and the weight to be a sum.

    Args:
        one: Of the one.
        other: Of the other.
        both: Of both together.
    """
    (a, weight_a), (b, weight_b), (value, weight) = one, other, both
    total = weight_a + weight_b
    if min(weight_a, weight_b) <= 0 or not math.isclose(weight, total, rel_tol=1e-5):
        return False
    means = (a + b) / 2, (weight_a * a + weight_b * b) / total
    is_sum = math.isclose(value, a + b, rel_tol=1e-3)
    return not is_sum and any(math.isclose(value, m, rel_tol=1e-4) for m in means)


def _trained(stage: StageModel) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        pair
        for section in stage.sections
        for pair in stage.parameters_of(section)
        if pair[1].requires_grad
    ]


def _same(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return bool(one == other)
    return same_bits(one, other)
