"""Trains and evaluates one example over stages, before anything is rented.

Stages are run as workers run them, but on the meta device, where nothing is computed,
or on the CPU where the user's code reads values. Parameters take no memory, and each
gradient is dropped as soon as autograd has it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.heap import mmap_large_blocks
from spottrain.pipeline.base.operations import OperationMode
from spottrain.pipeline.model.checks.python_state import snapshot
from spottrain.pipeline.model.data import collated
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums, check_leads_back
from spottrain.pipeline.model.optimizer import rate_factor
from spottrain.pipeline.model.recorder import KnownValues
from spottrain.pipeline.model.sections import ModelLayout, TensorSpec
from spottrain.pipeline.model.skeleton import of_any_size, run_eagerly
from spottrain.pipeline.model.stage import Activations, StageModel, go_backward
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.steps import at_step

MOST_NAMES = 3
"""Of state that is told."""
MAX_STAGES = 3
"""A first one, one in the middle, a last one: all ways of running a section."""

MAX_ASKED = 100_000
"""Steps for which a schedule is asked, at most, for the range of its factors."""


def rehearse(
    job: TrainingJob,
    layout: ModelLayout,
    shards: Shards = ALONE,
) -> tuple[str, ...]:
    """Train one example and evaluate one of every held-out set, over stages.

    Returns:
        What evaluations measure besides the loss, each as ``set/metric``, sorted.

    Raises:
        UserCodeError: The user's code raised, nothing is trained, or the loss has no
            gradient.
    """
    if not any(spec.requires_grad and not spec.running for spec in layout.specs.values()):
        raise UserCodeError(
            "model has no parameter that is trained: all have requires_grad=False; "
            "leave at least one with requires_grad=True"
        )
    if not layout.needs_values:
        with contextlib.suppress(NotImplementedError):
            return _Rehearsal(job, layout, "meta", shards).run()
    return _Rehearsal(job, layout, "cpu", shards).run()


def check_schedule(schedule: Callable[[int], float] | None, num_steps: int) -> None:
    """Check that a schedule of the learning rate is a function of the step alone.

    Args:
        schedule: The job's.
        num_steps: Mini-batches that the job trains.

    Raises:
        UserCodeError: It raised, returns something else than finite numbers, or
            another one when it is asked again.
    """
    if schedule is None:
        return
    asked = {0, 1, 2, 10, 100, 1000, num_steps // 2, num_steps - 1}
    steps = sorted(step for step in asked if 0 <= step < num_steps)
    first = {step: rate_factor(schedule, step) for step in steps}
    for step in reversed(steps):
        again = rate_factor(schedule, step)
        if again != first[step]:
            raise UserCodeError(
                f"lr_schedule must be a function of the step alone: it returned "
                f"{first[step]:g} for step {step}, and {again:g} when asked again; compute "
                "the factor from its argument, without a counter or a scheduler object"
            )


def schedule_factors(
    schedule: Callable[[int], float], num_steps: int
) -> tuple[float, float, float]:
    """Return a schedule's factor in the first step, the highest one, and that of the last.

    Of more than ``MAX_ASKED`` steps so many are asked for, evenly apart.

    Raises:
        UserCodeError: As ``rate_factor``.
    """
    asked = min(num_steps, MAX_ASKED)
    last = num_steps - 1
    steps = [index * last // max(1, asked - 1) for index in range(asked)]
    factors = [rate_factor(schedule, step) for step in steps]
    return factors[0], max(factors), factors[-1]


def changing_state(job: TrainingJob, layout: ModelLayout) -> str:
    """Return the names of what each of two rehearsals changes in Python objects.

    That is for models that are too large to be computed with: whether results depend on it
    is not known. Nothing is found where the user's code reads values.
    """
    if layout.needs_values:
        return ""
    rehearsal = _Rehearsal(job, layout, "meta")
    roots = [job.loss, job.dataset, job.collate, *rehearsal.modules]
    states = [snapshot(roots)]
    with contextlib.suppress(NotImplementedError):
        for _ in range(2):
            rehearsal.run()
            states.append(snapshot(roots))
        first, second, third = states
        always = sorted(first.changed(second) & second.changed(third))
        return ", ".join(always[:MOST_NAMES])
    return ""


class _OnStandIns(OperationMode):
    """Runs operations on tensors that take no memory, and follows known values."""

    def __init__(self) -> None:
        super().__init__()
        self._known = KnownValues()

    def operate(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result, _ = self._known.call(operation, args, kwargs)
        return result


class _Rehearsal:
    """Stages of a job on one device."""

    def __init__(
        self,
        job: TrainingJob,
        layout: ModelLayout,
        device: str,
        shards: Shards = ALONE,
    ) -> None:
        self._job, self._layout, self._device = job, layout, device
        self._shards = shards
        number = layout.num_sections
        stages = min(MAX_STAGES, number)
        bounds = [number * index // stages for index in range(stages + 1)]
        self._stages = [self._stage(range(a, b)) for a, b in pairwise(bounds)]
        self.modules = [stage.module for stage in self._stages]

    @mmap_large_blocks()
    def run(self) -> tuple[str, ...]:
        """Train on one example, evaluate others; return what evaluations measure.

        Raises:
            UserCodeError: As ``rehearse``.
            NotImplementedError: The device lacks an operation.
        """
        found: list[str] = []
        with torch.random.fork_rng(devices=[]), self._mode():
            with at_step(0):
                train_once(self._stages, self._batch("data set", self._job.dataset))
            for name, heldout in self._job.heldout_sets.items():
                if len(heldout) > 0:
                    batch = self._batch(f"held-out set {name}", heldout)
                    found += (f"{name}/{metric}" for metric in self._evaluate(batch))
        return tuple(sorted(found))

    @contextlib.contextmanager
    def _mode(self) -> Iterator[None]:
        try:
            with run_eagerly(), of_any_size(), _OnStandIns():
                yield
        except UserCodeError as error:
            if self._device == "meta" and error.__cause__ is not None:
                raise NotImplementedError from error
            raise

    def _stage(self, sections: range) -> StageModel:
        specs = self._layout.specs
        tensors = {
            section: {
                name: self._shards.part_of(name, _stand_in(specs[name], self._device))
                for name in self._layout.parameters[section]
            }
            for section in sections
        }
        stage = StageModel(
            self._job, self._layout, sections, tensors, self._device, shards=self._shards
        )
        for section in sections:
            for _, parameter in stage.parameters_of(section):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        return stage

    def _batch(self, what: str, dataset: Any) -> Batch:
        with user_code(f"{what} or collate"):
            batch = collated(self._job, [dataset[0]])
        return tree_map_only(torch.Tensor, lambda t: t.to(self._device), batch)

    def _evaluate(self, batch: Batch) -> Iterable[str]:
        """Return the names of the metrics of one example."""
        received: Activations = []
        metrics: Iterable[str] = ()
        with torch.no_grad():
            for stage in self._stages:
                stage.eval()
                output = stage.forward(batch, received, int)
                if isinstance(output, LossSums):
                    metrics = output.metrics
                else:
                    received = output
        return metrics


def train_once(stages: Sequence[StageModel], batch: Batch, forwards: int = 1) -> LossSums:
    """Go forward and back through stages with one micro-batch, as workers do.

    Args:
        stages: From the first to the last.
        batch: The micro-batch.
        forwards: How often each stage runs forward: twice as where it is recomputed.

    Raises:
        UserCodeError: The user's code raised, or the loss has no gradient.
    """
    outputs: list[Activations] = []
    inputs: list[Activations] = [[]]
    for stage in stages:
        stage.train()
        stage.require_gradients(inputs[-1])
        for _ in range(forwards - 1):
            with torch.no_grad():
                stage.forward(batch, inputs[-1], int)
        output = stage.forward(batch, inputs[-1], int)
        if not isinstance(output, LossSums):
            outputs.append(output)
            inputs.append([tensor.detach().clone() for tensor in output])
    assert isinstance(output, LossSums)
    check_leads_back(output.loss)
    with user_code("backward"):
        torch.autograd.backward(output.loss)
        for sent, received in zip(reversed(outputs), reversed(inputs), strict=False):
            go_backward(sent, [one.grad for one in received])
    return output


def _stand_in(spec: TensorSpec, device: str) -> torch.Tensor:
    number = torch.full((), 0.02, device=device).to(spec.dtype)
    return number.expand(spec.shape)


def _drop_gradient(parameter: torch.Tensor) -> None:
    parameter.grad = None
