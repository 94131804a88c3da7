"""Evaluation of held-out sets while training goes on, and what it decides.

Every rank computes its part of the sets, all add up the same sums in the same order, so
all reach the same conclusions: whether these are the best weights so far, and whether
training stops early. What is remembered from one evaluation to the next is contents of
every section (``state.numbers``), moved and saved with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from spottrain.codec import from_data
from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.groups import world
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.state.numbers import EvaluationRecord
from spottrain.pipeline.train.executor import StageExecutor, read_reals
from spottrain.pipeline.train.reduction import add_up
from spottrain.units import counted
from spottrain.wire import messages
from spottrain.wire.messages import EvaluationSpec, RunGeneration

LOSS = "loss"


Means = Mapping[str, float]
"""What was measured over one held-out set: weighted means by name, the loss among them; empty
where nothing had weight."""


class Evaluation:
    """The evaluations of one generation, as one rank sees them.

    Args:
        context: The worker's.
        command: The generation's.
        rank: Of this worker.
        arenas: Its sections.
        source: Makes micro-batches.
    """

    def __init__(
        self,
        context: WorkerContext,
        command: RunGeneration,
        rank: int,
        arenas: Mapping[int, SectionArena],
        source: MicrobatchSource,
    ) -> None:
        self._context, self._command, self._rank = context, command, rank
        self._arenas, self._source = arenas, source
        self._spec = context.loaded.spec.evaluation
        self._sets = tuple(context.loaded.job.heldout_sets)
        self._evaluated: int | None = None
        """Step of this generation's newest evaluation."""

    def is_due(self, step: int) -> bool:
        """Return whether the weights after ``step`` mini-batches are to be evaluated."""
        if not self._sets or step == self._evaluated:
            return False
        if step == self._context.loaded.spec.steps:
            return True
        if step == 0:
            return self._command.evaluate_first
        return self._spec.every_steps > 0 and step % self._spec.every_steps == 0

    def run(self, step: int, executor: StageExecutor) -> EvaluationRecord:
        """Evaluate all sets; report and remember the outcome.

        Called by all ranks at the same step. A step that was evaluated before, by ranks
        that did not all live to remember it, comes to the same conclusion again.
        """
        self._evaluated = step
        results = {name: self._evaluate(name, executor) for name in self._sets}
        record = self._remember(step, results)
        if self._rank == 0:
            for name, means in results.items():
                if LOSS in means:
                    self._report(step, name, means, record)
        return record

    def stops_early(self) -> str:
        """Return why training stops before its last step; empty if it does not."""
        record, patience = self._newest(), self._spec.patience
        if not patience or record.without_improvement < patience:
            return ""
        return (
            f"{decisive_metric(self._spec, self._sets)} has not improved in "
            f"{counted(record.without_improvement, 'evaluation')} since step {record.best_step}"
        )

    def _evaluate(self, name: str, executor: StageExecutor) -> Means:
        plan = self._command.plan
        count, width = self._source.num_heldout(name), plan.data_parallel_width
        replica = plan.replica_of(self._rank)
        share = [count * d // width for d in range(width + 1)]
        mine = range(share[replica], share[replica + 1])
        found = executor.evaluate(name, mine)
        self._context.faults.at(Hook.EVALUATED)
        with self._context.activity.waiting():
            seen = gather_json(sorted({metric for sums in found for metric in sums.metrics}))
        metrics = sorted({metric for names in seen for metric in names})
        table = torch.zeros(count, 2 + 2 * len(metrics), dtype=torch.float64)
        rows = [sums.values(metrics) for sums in found]
        if rows and self._rank == plan.tensor_ranks(self._rank)[0]:
            values = read_reals(rows, self._context.device)
            table[mine.start : mine.stop] = torch.tensor(values, dtype=torch.float64)
        with self._context.activity.waiting():
            world().sum(table)
        sums = add_up(table.tolist(), table.shape[1])
        return weighted_means([LOSS, *metrics], sums)

    def _newest(self) -> EvaluationRecord:
        records = (arena.numbers.evaluation for arena in self._arenas.values())
        return max(records, key=lambda record: record.step)

    def _remember(self, step: int, results: Mapping[str, Means]) -> EvaluationRecord:
        """Have every section remember what the evaluation has shown."""
        if not step:
            return EvaluationRecord()
        with self._context.activity.waiting():
            rows = gather_json(dataclasses.asdict(self._newest()))
        records = [from_data(EvaluationRecord, row) for row in rows]
        record = max(records, key=lambda record: record.step)
        if record.step != step:
            value = decisive_value(self._spec, results)
            record = after(record, step, value, self._spec)
        assert isinstance(record, EvaluationRecord)
        with self._context.memory.control.lock:
            for arena in self._arenas.values():
                arena.numbers.evaluation = record
        return record

    def _report(self, step: int, name: str, means: Means, record: EvaluationRecord) -> None:
        decisive = decisive_metric(self._spec, self._sets).rpartition("/")[0]
        self._context.supervisor.report(
            messages.Evaluated(
                generation=self._command.generation,
                step=step,
                loss=means[LOSS],
                name=name,
                metrics=tuple(
                    messages.Metric(name=metric, value=value)
                    for metric, value in means.items()
                    if metric != LOSS
                ),
                is_best=bool(step) and record.best_step == step and name == decisive,
            )
        )


def weighted_means(names: Iterable[str], sums: Sequence[float]) -> dict[str, float]:
    """Return sum over weight of each name that has weight.

    Args:
        names: In the order of ``sums``.
        sums: Sum and weight of each.
    """
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {name: total / weight for name, total, weight in pairs if weight}


def decisive_metric(spec: EvaluationSpec, sets: Sequence[str]) -> str:
    """Return ``set/metric`` by which the best weights are chosen."""
    return spec.metric or f"{sets[0]}/{LOSS}"


def decisive_value(spec: EvaluationSpec, results: Mapping[str, Means]) -> float:
    """Return the value of the decisive metric; not a number where it has none."""
    name, _, metric = decisive_metric(spec, list(results)).rpartition("/")
    return results[name].get(metric, math.nan)


def after(
    record: EvaluationRecord, step: int, value: float, spec: EvaluationSpec
) -> EvaluationRecord:
    """Return what is remembered after an evaluation; a value that is not finite is no
    improvement."""
    better: Callable[[float, float], bool] = (
        (lambda new, old: new < old - spec.min_delta)
        if spec.goal == "min"
        else (lambda new, old: new > old + spec.min_delta)
    )
    is_first = record.best_step == 0
    if math.isfinite(value) and (is_first or better(value, record.best)):
        return EvaluationRecord(step=step, best=value, best_step=step)
    return dataclasses.replace(
        record, step=step, without_improvement=record.without_improvement + 1
    )
