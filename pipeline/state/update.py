"""The end of a mini-batch at one rank: prepare, decide, apply (design: Commit, a to c)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from spottrain.pipeline.base.faults import FaultScript, Hook
from spottrain.pipeline.base.loss_scale import MIN_EXPONENT, LossScale
from spottrain.pipeline.comm.collectives import gather_rows
from spottrain.pipeline.model.optimizer import SectionOptimizer
from spottrain.pipeline.state.agreement import Contribution, MinibatchDecision
from spottrain.pipeline.state.arena import ControlBlock, SectionArena, UndoSlot
from spottrain.wire.messages import SkipReason
from spottrain.wire.model import TiedParameter
from spottrain.wire.plan import Plan

_NORM_ELEMENTS = {"cpu": 1 << 14, "cuda": 1 << 24}
"""Elements of a row, the part of a tensor that has a norm of its own. On the CPU one thread
adds up a row, however many threads there are: the bits do not depend on their number."""
_NORM_ROWS = {"cpu": 64, "cuda": 1}
"""Rows at a time: torch converts its whole argument to float64."""


@dataclass(frozen=True, slots=True)
class GradientFit:
    """What a reduction found out about a section's gradients."""

    finite: bool = True
    in_range: bool = True
    """They fit into their fixed point; always so without one."""


def contributions(
    arenas: Iterable[SectionArena],
    ties: Sequence[TiedParameter],
    sums: Mapping[int, Sequence[float]],
    fits: Mapping[int, GradientFit],
) -> list[Contribution]:
    """Return what sections with reduced gradients contribute to the decision.

    Args:
        arenas: Hold the gradients, all on the same device.
        ties: A tied parameter counts in the norm of its first section only.
        sums: By section, the mini-batch's loss sum and weight, then sum and weight of each
            metric; zeros of sections that are not in it.
        fits: By section, what the reduction found; of others, that gradients fit.
    """
    arenas = list(arenas)
    fit_of = {arena.section: fits.get(arena.section, GradientFit()) for arena in arenas}
    counted_elsewhere = {(tie.name, k) for tie in ties for k in tie.sections[1:]}
    usable = {
        arena.section: [
            gradient
            for name, gradient in arena.gradients.items()
            if (name, arena.section) not in counted_elsewhere and name not in arena.running
        ]
        for arena in arenas
        if fit_of[arena.section].finite and fit_of[arena.section].in_range
    }
    square_norms = dict(zip(usable, _square_norms(usable.values()), strict=True))
    return [
        _contribution(
            arena.section,
            square_norms.get(arena.section, math.inf),
            sums.get(arena.section, (0.0, 0.0)),
            in_range=fit_of[arena.section].in_range,
        )
        for arena in arenas
    ]


def _contribution(
    section: int, square_norm: float, sums: Sequence[float], *, in_range: bool
) -> Contribution:
    return Contribution(
        section=section,
        loss_sum=sums[0],
        weight=sums[1],
        square_norm=square_norm,
        overflow=not math.isfinite(square_norm),
        out_of_range=not in_range,
        metrics=tuple(sums[2:]),
    )


def _square_norms(sections: Iterable[Iterable[torch.Tensor]]) -> list[float]:
    """Return the squared norm of all tensors of each section, the host reading once from
    the device."""
    norms = [[part for g in gradients for part in _norms_of_rows(g)] for gradients in sections]
    counts = [sum(part.numel() for part in parts) for parts in norms]
    parts = list(itertools.chain.from_iterable(norms))
    values = iter(torch.cat(parts).tolist() if parts else ())
    square_norms = []
    for count in counts:
        square_norm = 0.0
        for norm in itertools.islice(values, count):
            square_norm += norm * norm  # where ** would raise, this is infinite
        square_norms.append(square_norm)
    return square_norms


def _norms_of_rows(gradient: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the norms of a tensor's rows, in order, as float64; the last one may be short."""
    kind, flat = gradient.device.type, gradient.view(-1)
    elements, rows = _NORM_ELEMENTS[kind], _NORM_ROWS[kind]
    whole = flat.numel() // elements * elements
    for start in range(0, whole, rows * elements):
        part = flat[start : min(start + rows * elements, whole)].view(-1, elements)
        yield torch.linalg.vector_norm(part, dim=1, dtype=torch.float64)
    if whole < flat.numel():
        yield torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).view(1)


@dataclass(frozen=True, slots=True)
class ExchangeResult:
    """Result of the exchange at the end of a mini-batch, the same at all ranks."""

    contributions: list[Contribution]
    """One of each section, in order."""
    stop: int
    """The strongest ``StopRequest`` of any rank."""
    settled_step: int
    """Step of the newest checkpoint whose shares every rank has settled."""
    share: int
    """Number of the newest ``ShareMinibatch`` if all ranks know the same, else 0."""
    trace: int
    """Number of the newest ``TraceMinibatches`` if all ranks know the same, else 0."""
    save: bool
    """True if a checkpoint is due after this mini-batch, by rank 0's word."""
    copied_step: int
    """Step of the newest copies that every rank has sent and received."""
    copy: bool
    """True if copies are due after this mini-batch, by rank 0's word."""

    @property
    def in_range(self) -> bool:
        """True if there is a decision; else the mini-batch is computed again."""
        return not any(one.out_of_range for one in self.contributions)


class Gatherer:
    """The exchange that ends a mini-batch: contributions of all ranks to all ranks.

    Args:
        plan: Says which ranks hold each section; the first one's count.
        num_metrics: What the loss measures besides the loss.
    """

    _FIELDS = 5
    _EXTRAS = 7

    def __init__(self, plan: Plan, num_metrics: int = 0) -> None:
        self._owners = [plan.holders_of(k)[0] for k in range(plan.num_sections)]
        self._metrics_at = plan.num_sections * self._FIELDS
        self._extras_at = self._metrics_at + 2 * num_metrics
        self._length = self._extras_at + self._EXTRAS

    def exchange(
        self,
        mine: Sequence[Contribution],
        stop: int,
        checkpoint: int,
        share: int,
        trace: int,
        *,
        save: bool,
        copied: int = 0,
        copy: bool = False,
    ) -> ExchangeResult:
        """Exchange this rank's values with those of all ranks.

        Args:
            mine: Contributions of this rank's sections.
            stop: Its ``StopRequest``.
            checkpoint: Step of the newest checkpoint that it has settled.
            share: Number of the newest ``ShareMinibatch`` that it knows, or 0.
            trace: Number of the newest ``TraceMinibatches`` that it knows, or 0.
            save: True if it finds a checkpoint due after this mini-batch.
            copied: Step of the newest copies that it has sent and received.
            copy: True if it finds copies due after this mini-batch.
        """
        row = torch.zeros(self._length, dtype=torch.float64)
        for c in mine:
            at = c.section * self._FIELDS
            fields = c.loss_sum, c.weight, c.square_norm, c.overflow, c.out_of_range
            row[at : at + self._FIELDS] = torch.tensor(fields, dtype=torch.float64)
            if c.metrics:
                metrics = torch.tensor(c.metrics, dtype=torch.float64)
                row[self._metrics_at : self._extras_at] = metrics
        extras = copy, copied, save, trace, share, stop, checkpoint
        row[-self._EXTRAS :] = torch.tensor(extras)
        everything = gather_rows(row)
        copies, copied_steps, saves, traces, shares, stops, settled_steps = everything[
            :, -self._EXTRAS :
        ].unbind(1)
        return ExchangeResult(
            contributions=self._contributions(everything),
            stop=int(stops.max()),
            settled_step=int(settled_steps.min()),
            share=share if _all_equal(shares, share) else 0,
            trace=trace if _all_equal(traces, trace) else 0,
            save=bool(saves[0]),
            copied_step=int(copied_steps.min()),
            copy=bool(copies[0]),
        )

    def _contributions(self, everything: torch.Tensor) -> list[Contribution]:
        """Return that of each section, from the rows of all ranks."""
        contributions = []
        for section, owner in enumerate(self._owners):
            at = section * self._FIELDS
            loss_sum, weight, square_norm, overflow, out_of_range = everything[
                owner, at : at + self._FIELDS
            ].tolist()
            contributions.append(
                Contribution(
                    section=section,
                    loss_sum=loss_sum,
                    weight=weight,
                    square_norm=square_norm,
                    overflow=bool(overflow),
                    out_of_range=bool(out_of_range),
                )
            )
        last = everything[owner, self._metrics_at : self._extras_at]
        contributions[-1] = replace(contributions[-1], metrics=tuple(last.tolist()))
        return contributions


def _all_equal(column: torch.Tensor, value: int) -> bool:
    return bool((column == value).all())


class Updater:
    """Applies decided mini-batches to the sections of one rank.

    Args:
        control: Holds the decision, and the section that may be undone.
        undo: Backup of the section during its update.
        arenas: The sections, by number.
        optimizers: Their optimizers.
        clip_grad_norm: Bound on the whole model's gradient norm.
        faults: Faults to inject, in tests.
        scales_loss: True if losses are scaled, in fp16.
    """

    def __init__(
        self,
        control: ControlBlock,
        undo: UndoSlot,
        arenas: Mapping[int, SectionArena],
        optimizers: Mapping[int, SectionOptimizer],
        clip_grad_norm: float | None,
        faults: FaultScript,
        *,
        scales_loss: bool = False,
    ) -> None:
        self._control = control
        self._undo = undo
        self._arenas = arenas
        self._optimizers = optimizers
        self._means = {k: undo.gradients(arenas[k]) for k in optimizers}
        """Room for mean gradients, by name and as runs."""
        self.section: int | None = None
        """Whose update is under way."""
        self._clip = clip_grad_norm
        self._faults = faults
        self._scales_loss = scales_loss

    def learning_rate(self, step: int) -> float | None:
        """Return the first group's learning rate in a mini-batch; ``None`` where nothing
        is trained."""
        rates = (one.learning_rate(step) for one in self._optimizers.values())
        return next((rate for rate in rates if rate is not None), None)

    def apply(
        self,
        decision: MinibatchDecision,
        sections: Sequence[int],
        updated: Callable[[SectionArena], None] = lambda arena: None,
    ) -> None:
        """Bring ``sections`` from version ``decision.step`` to the next.

        The decision must be written before. A mini-batch whose gradient is not finite
        or weighs nothing changes no parameter, but counts as applied.

        Args:
            decision: To apply.
            sections: In the order in which to do so.
            updated: Called with each section as soon as it is whole again.
        """
        with self._control.lock:
            try:
                for section in sections:
                    self.section = section
                    self._update(self._arenas[section], decision)
                    if self._arenas[section].device is None:
                        self._flip(updated)
                self._flip(updated)
            except BaseException:
                self._control.flip()
                raise
        self.section = None

    def _update(self, arena: SectionArena, decision: MinibatchDecision) -> None:
        """Do all of a section's update but its last word, or let its device begin with it."""
        self._undo.save(arena)
        self._control.undo_section = arena.section
        self._faults.at(Hook.UNDO_SAVED)
        optimizer = self._optimizers[arena.section]
        if arena.versions > 1:
            optimizer.point_at(arena.advance())
        changes = decision.changes
        if changes:
            scale = gradient_scale(decision, self._clip)
            means, runs = self._means[arena.section]
            for run, mean in zip(arena.gradient_runs, runs, strict=True):
                torch.mul(run, scale, out=mean)
            optimizer.step(decision.step, means)
            for name in arena.running:
                arena.parameters[name].add_(arena.gradients[name])
        arena.numbers.update(overflow=decision.overflow, changes=changes, scaled=self._scales_loss)
        self._faults.at(Hook.UPDATED)
        self._control.updated(arena, decision.step + 1, decision.generation)

    def _flip(self, updated: Callable[[SectionArena], None]) -> None:
        """Let the sections whose update is done have the next version."""
        for arena in self._control.flip():
            self._faults.at(Hook.FLIPPED)
            updated(arena)
        self._control.undo_section = None


NOT_FINITE: tuple[SkipReason, ...] = ("loss", "gradients")
"""What is a sign of trouble: no smaller loss scale would have helped."""


def skip_reason(decision: MinibatchDecision, scale: LossScale | None) -> SkipReason:
    """Return why a mini-batch changes no parameter.

    Args:
        decision: About it.
        scale: Its loss scale; ``None``: losses are not scaled.
    """
    if not decision.overflow:
        return "" if decision.weight > 0 else "weight"
    if not (math.isfinite(decision.loss_sum) and math.isfinite(decision.weight)):
        return "loss"
    backs_off = scale is not None and scale.exponent > MIN_EXPONENT
    return "scale" if backs_off else "gradients"


def gradient_norm(decision: MinibatchDecision) -> float:
    """Return the norm of the whole model's mean gradient."""
    if not decision.weight:
        return 0.0
    return math.sqrt(decision.square_norm) / decision.weight


def gradient_scale(decision: MinibatchDecision, clip_grad_norm: float | None) -> float:
    """Return the factor from summed to mean gradients, clipped as torch clips."""
    scale = 1.0 / decision.weight
    if clip_grad_norm is not None:
        scale *= min(1.0, clip_grad_norm / (gradient_norm(decision) + 1e-6))
    return scale
