"""Samples for the store of measurements: from reports, and from events."""

from __future__ import annotations

from collections.abc import Iterable

from spottrain.varuna_manager.core.model.events import Event, ReportReceived
from spottrain.varuna_manager.core.model.state import State, spent_usd
from spottrain.varuna_manager.jobs.measurements import (
    Evaluation,
    GenerationBegan,
    Minibatch,
    Sample,
)
from spottrain.wire import messages


class Sampler:
    """Turns reports into samples; leaves out most of what other ranks report again."""

    def __init__(self) -> None:
        self._generation = 0
        self._step = 0
        """Newest mini-batch of the generation that was sampled."""
        self._rated_step = 0
        """The newest one of them with a learning rate."""

    def measured(self, report: messages.Measurement, at_s: float, state: State) -> list[Sample]:
        """Return what a measurement adds.

        Args:
            report: Of one rank.
            at_s: When it arrived, in seconds since the epoch.
            state: The state by then.
        """
        match report:
            case messages.MinibatchAdopted():
                generation = _trained_by(state, report)
                return [_minibatch(report, at_s, state, generation, None)]
            case messages.MinibatchCommitted():
                if not self._has_changes(report):
                    return []
                number, step_s = report.generation, report.step_s
                return [_minibatch(report, at_s, state, number, step_s)]

    def _has_changes(self, report: messages.MinibatchCommitted) -> bool:
        """Return whether a report may add something; ranks report in order of step."""
        if report.generation != self._generation:
            self._generation, self._step, self._rated_step = report.generation, 0, 0
        known = self._step if report.learning_rate is None else self._rated_step
        if report.step <= known:
            return False
        self._step = max(self._step, report.step)
        if report.learning_rate is not None:
            self._rated_step = report.step
        return True


def samples_of(event: Event) -> list[Sample]:
    """Return what an event measures by itself, without the state that it leads to."""
    match event.report if isinstance(event, ReportReceived) else None:
        case messages.GenerationStarted(generation=number, step=step):
            return [GenerationBegan(generation=number, step=step)]
        case messages.Evaluated() as report:
            return [_evaluation(report, event.at_s)]
        case _:
            return []


def _minibatch(
    report: messages.Measurement,
    at_s: float,
    after: State,
    generation: int,
    step_s: float | None,
) -> Minibatch:
    return Minibatch(
        step=report.step,
        generation=generation,
        at_s=at_s,
        loss=report.loss,
        grad_norm=report.grad_norm,
        weight=report.weight,
        learning_rate=report.learning_rate,
        metrics=_values(report.metrics),
        step_s=step_s,
        examples=after.job.spec.minibatch_size,
        plan=_shape(after, generation),
        usd_spent=spent_usd(after, at_s),
        skipped=report.skipped,
    )


def _evaluation(report: messages.Evaluated, at_s: float) -> Evaluation:
    return Evaluation(
        step=report.step,
        name=report.name,
        generation=report.generation,
        at_s=at_s,
        loss=report.loss,
        metrics=_values(report.metrics),
        is_best=report.is_best,
    )


def _values(metrics: Iterable[messages.Metric]) -> dict[str, float]:
    return {metric.name: metric.value for metric in metrics}


def _trained_by(state: State, report: messages.MinibatchAdopted) -> int:
    """Return the generation that computed a mini-batch; a later one adopted it."""
    trained = (
        one.generation
        for one in reversed(state.history.generations)
        if one.from_step is not None and one.from_step < report.step
    )
    return next(trained, report.generation)


def _shape(state: State, number: int) -> str:
    """Return the shape of a generation's plan; empty if it is not known any more."""
    if (now := state.training.generation) is not None and now.number == number:
        return now.plan.shape
    ran = (one for one in reversed(state.history.generations) if one.generation == number)
    plan = next(ran, None)
    shape = (plan.pipeline_depth, plan.data_parallel_width) if plan else ()
    return "x".join(map(str, shape))
