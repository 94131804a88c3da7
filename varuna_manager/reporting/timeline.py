"""The timeline of a job: what happened, in order, with the plans that ran."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from spottrain.varuna_manager.core.model.records import GenerationSummary
from spottrain.varuna_manager.core.model.state import State

if TYPE_CHECKING:  # it needs the core, and `status` neither of them
    from spottrain.varuna_manager.reporting.history import JobHistory

LANES = {
    "plan": "new plan",
    "notice": "notice",
    "kill": "killed",
    "silence": "silent",
    "worker_death": "worker died",
    "sick_gpu": "GPU failed",
    "hang": "worker hung",
    "slow": "slow machine",
    "price": "price",
    "move": "moved",
    "manager": "manager",
    "stop": "stop",
    "limits": "limits",
    "change": "changed",
    "alert": "budget",
    "end": "end",
}
"""Names of the kinds of entries for people."""


def timeline(
    state: State, history: JobHistory, plans: Iterable[GenerationSummary]
) -> list[dict[str, Any]]:
    """Return what happened, in order of time.

    Args:
        plans: The plans that trained.

    Returns:
        ``at_s`` (seconds after the submission), ``kind`` (see ``LANES``), ``text``,
        and ``vm_id`` or None.
    """
    entries = [*_of_the_job(state, history), *_of_plans(state, plans), *_of_vms(state)]
    entries.sort(key=lambda entry: entry["at_s"])
    return entries


def _of_plans(state: State, plans: Iterable[GenerationSummary]) -> Iterator[dict[str, Any]]:
    for plan in plans:
        text = f"{plan.shape} from step {plan.from_step}: {plan.reason}"
        yield _entry(state, plan.started_at_s, "plan", text)


def _of_vms(state: State) -> Iterator[dict[str, Any]]:
    for hit in state.history.interruptions:
        yield _entry(state, hit.at_s, hit.interruption, hit.reason, hit.vm_id)
    for slow in state.history.slow_vms:
        text = f"{slow.evidence}: replaced by {slow.replaced_by}"
        yield _entry(state, slow.found_at_s, "slow", text, slow.vm_id)


def _of_the_job(state: State, history: JobHistory) -> Iterator[dict[str, Any]]:
    for change in state.history.price_changes:
        market = "" if change.spot else " on demand"
        text = (
            f"{change.instance_type} in {change.zone}{market}: "
            f"{change.old_usd_per_hour:g} → {change.new_usd_per_hour:g} USD/hour"
        )
        yield _entry(state, change.at_s, "price", text)
    for alert in state.history.alerts:
        text = f"{alert.share:.0%} of the budget spent: {alert.spent:.2f} of {alert.cap:g} {alert.unit}"
        yield _entry(state, alert.at_s, "alert", text)
    for one in history.milestones:
        yield _entry(state, one.at_s, one.kind, one.text)
    for made in history.moves:
        move, end = made.move, f": {made.given_up}" if made.given_up else ""
        text = f"from {move.source} to {move.to}: {move.why}{end}"
        yield _entry(state, move.since_s, "move", text)
    if state.outcome is not None:
        ending_s = state.ending_since_s or state.now_s
        text = f"{state.outcome.kind}: {state.outcome.reason}"
        yield _entry(state, ending_s, "end", text)


def _entry(
    state: State, at_s: float, kind: str, text: str, vm_id: str | None = None
) -> dict[str, Any]:
    since_s = at_s - state.submitted_at_s
    return {"at_s": since_s, "kind": kind, "text": text, "vm_id": vm_id}
