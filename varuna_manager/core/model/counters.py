"""The numbers of the report: commits, losses, interruptions and what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from spottrain.eventlog.changed import replace
from spottrain.units import counted
from spottrain.varuna_manager.core.model import records, starts
from spottrain.varuna_manager.core.model.events import ProgressMade
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire.messages import Evaluated
from spottrain.wire.plan import Slot

_Item = TypeVar("_Item")


def keep(items: tuple[_Item, ...], *more: _Item) -> tuple[_Item, ...]:
    """Append items, forgetting the oldest beyond ``KEPT``."""
    return (*items, *more)[-records.KEPT :]


def interrupted(
    transition: Transition, kind: records.InterruptionKind, vm_id: str, reason: str
) -> None:
    """Count an interruption; it costs nothing if the VM did not train."""
    state = transition.state
    generation = state.training.generation
    trainers = () if generation is None else _trainers(generation)
    hit = any(slot.vm_id == vm_id for slot in trainers)
    interruption = records.Interruption(
        interruption=kind,
        vm_id=vm_id,
        at_s=transition.now_s,
        reason=reason,
        generation=generation.number if generation and hit else None,
        cost_s=None if hit else 0.0,
    )
    counter = records.COUNTERS[kind]
    before = state.history.tally
    tally = replace(before, **{counter: getattr(before, counter) + 1})
    transition.put(
        replace(
            state.history,
            tally=tally,
            interruptions=keep(state.history.interruptions, interruption),
        )
    )
    transition.log(f"{vm_id}: {reason}")


def cancelled(transition: Transition, vm_id: str) -> None:
    """Take back a notice; what was done about it stays done."""
    state, tally = transition.state, transition.state.history.tally
    transition.put(
        replace(
            state.history,
            tally=replace(tally, preemptions_noticed=tally.preemptions_noticed - 1),
            interruptions=tuple(
                _cancelled(transition, hit)
                if hit.vm_id == vm_id
                and hit.interruption == "notice"
                and hit.cancelled_at_s is None
                else hit
                for hit in state.history.interruptions
            ),
        )
    )
    transition.log(f"{vm_id}: its preemption notice was cancelled")


def _cancelled(transition: Transition, hit: records.Interruption) -> records.Interruption:
    idle = transition.state.history.progress.paused_since_s is None
    return replace(
        hit,
        reason=f"{hit.reason}; cancelled",
        cost_s=0.0 if hit.cost_s is None and idle else hit.cost_s,
        cancelled_at_s=transition.now_s,
    )


def _trainers(generation: records.Generation) -> Iterable[Slot]:
    """Return slots whose loss stops the generation; donors only while sections move."""
    if generation.phase is records.GenerationPhase.STARTING:
        return generation.participants
    return generation.ranks


def replaced(transition: Transition, slow: records.SlowVm) -> None:
    """Count a slow VM that has been replaced."""
    state, tally = transition.state, transition.state.history.tally
    transition.put(
        replace(
            state.history,
            tally=replace(tally, slow_vms_replaced=tally.slow_vms_replaced + 1),
            slow_vms=keep(state.history.slow_vms, slow),
        )
    )


def prices_changed(transition: Transition, changes: Sequence[records.PriceChange]) -> None:
    """Count changes of prices; the last of them is the news."""
    history, last = transition.state.history, changes[-1]
    tally = history.tally
    transition.put(
        replace(
            history,
            price_changes=keep(history.price_changes, *changes),
            tally=replace(tally, price_changes=tally.price_changes + len(changes)),
        )
    )
    prices = f"{last.old_usd_per_hour:g} -> {last.new_usd_per_hour:g} USD/h"
    transition.log(f"price in {last.zone}: {prices}")


def progress_made(transition: Transition, event: ProgressMade) -> None:
    """Fold the progress of the generation that runs."""
    generation, progress = transition.generation, transition.state.history.progress
    step = min(event.step, transition.state.job.spec.steps)
    timed = generation.timed + max(0, step - progress.step)
    generation = replace(generation, measured_step_s=event.step_s, timed=timed)
    transition.put_generation(generation)
    if step >= progress.step:
        first = progress.loss_first
        loss_first = event.loss if first is None else first
        progress = replace(progress, loss_first=loss_first, loss_last=event.loss)
    newest = event.nonfinite_last
    progress = replace(
        progress,
        peak_bytes=max(event.peak_bytes, progress.peak_bytes),
        checkpoint_every_steps=event.checkpoint_every_steps,
        checkpoint_cost_s=event.checkpoint_cost_s or progress.checkpoint_cost_s,
        copied_step=event.copied_step,
        nonfinite_steps=progress.nonfinite_steps + event.nonfinite,
        nonfinite_in_row=event.nonfinite_in_row,
        nonfinite_last=progress.nonfinite_last if newest is None else newest,
    )
    transition.put(replace(transition.state.history, progress=progress))
    reached(transition, step, event.committed_at_s, event.step_s)
    _watch_nonfinite(transition, event)


def reached(transition: Transition, step: int, at_s: float, step_s: float = 0.0) -> None:
    """Fold that the generation that runs has committed mini-batches.

    Args:
        transition: With a generation.
        step: Mini-batches committed; no news if that is known.
        at_s: When the last of them was reported.
        step_s: How long it took, if that is known.
    """
    state, progress = transition.state, transition.state.history.progress
    if step <= progress.step:
        return
    generation, tally = transition.generation, state.history.tally
    if not generation.committed:
        transition.put_generation(replace(generation, committed=True))
        starts.trained(transition, (slot.vm_id for slot in generation.plan.slots))
    egress = tally.egress + generation.egress * (step - progress.step)
    if progress.paused_since_s is not None:
        cost_s = max(0.0, at_s - progress.paused_since_s - step_s)
        hits = [i for i in state.history.interruptions if i.cost_s is None]
        if all(hit.interruption == "notice" for hit in hits):
            progress = replace(progress, morph_cost_s=cost_s)  # it was planned
        _settle_interruptions(transition, cost_s)
    started_at_s = progress.first_commit_at_s
    progress = replace(
        progress,
        step=step,
        highest_step=max(progress.highest_step, step),
        paused_since_s=None,
        first_commit_at_s=at_s if started_at_s is None else started_at_s,
        last_commit_at_s=at_s,
    )
    tally = replace(tally, egress=egress)
    transition.put(replace(transition.state.history, tally=tally, progress=progress))


def _watch_nonfinite(transition: Transition, event: ProgressMade) -> None:
    """Tell of mini-batches that changed nothing because something was not finite, and end
    the job if there are too many in a row."""
    if event.nonfinite and event.nonfinite_in_row == 1:  # a row begins
        what = "loss is" if event.skipped == "loss" else "gradients are"
        step = event.nonfinite_last
        transition.log(f"step {step} changed nothing: its {what} not finite")
    if event.nonfinite_in_row >= transition.state.job.on_nonfinite.stop_after:
        transition.decides = True
        transition.fail(
            f"{counted(event.nonfinite_in_row, 'mini-batch', 'mini-batches')} in a row, up to step "
            f"{transition.state.history.progress.step}, not finite, changed nothing: look at data and "
            "learning rate, or at loss with SPOTTRAIN_CHECK_FINITE=1 in env",
            exit_code=3,
        )


def _settle_interruptions(transition: Transition, cost_s: float) -> None:
    """Training continues: settle the cost of the interruptions since the last commit."""
    transition.put(
        replace(
            transition.state.history,
            interruptions=tuple(
                replace(i, cost_s=cost_s) if i.cost_s is None else i
                for i in transition.state.history.interruptions
            ),
        )
    )


def evaluated(transition: Transition, report: Evaluated) -> None:
    """Fold an evaluation; the first set's loss stands for the job's."""
    progress = transition.state.history.progress
    if report.is_best:
        progress = replace(progress, best_step=report.step)
    name = progress.heldout_set or report.name
    if report.name == name:
        first = progress.heldout_first
        if first is None and report.step == 0:
            first = report.loss
        progress = replace(
            progress,
            heldout_first=first,
            heldout_last=report.loss,
            heldout_set=name,
        )
    transition.put(replace(transition.state.history, progress=progress))
    what = "held-out loss" if report.name == "heldout" else f"loss on {report.name}"
    best = ", the best so far" if report.is_best else ""
    transition.log(f"{what} {report.loss:.3f} after {counted(report.step, 'step')}{best}")
