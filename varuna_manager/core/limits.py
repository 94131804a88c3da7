"""What a person changes of a job, and what follows: limits while it runs; before it goes
on, the number of steps and the user's code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spottrain.eventlog.changed import replace
from spottrain.pricing.billing.money import FREE, Rate
from spottrain.units import counted
from spottrain.varuna_manager.core import vm_transfer
from spottrain.varuna_manager.core.fleet import is_needed, release_or_reserve
from spottrain.varuna_manager.core.model.events import (
    CodeUpdated,
    GrantReceived,
    LimitsChanged,
    StepsChanged,
)
from spottrain.varuna_manager.core.model.records import BudgetAlert, VmPhase, VmRecord
from spottrain.varuna_manager.core.model.settings import BUDGET_LIMITS, JobSettings
from spottrain.varuna_manager.core.model.state import JobPhase, State, budget, budgets, kind_of
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.format import utc

REPLACED = "its replacement was rented before its notice was cancelled"
"""Why a VM is drained that the cloud does not take any more."""
DRAIN_S = 120.0
"""How long a VM over the hourly cap may take to hand its sections over."""
_WORDS = {
    "max_usd": ("budget.max_usd", " USD"),
    "max_usd_per_hour": ("budget.max_usd_per_hour", " USD/h"),
    "max_gpu_hours": ("budget.max_gpu_hours", " GPU-hours"),
    "deadline_s": ("slo.deadline", ""),
    "min_examples_per_s": ("slo.min_examples_per_s", " examples/s"),
}


def changed(settings: JobSettings, event: LimitsChanged) -> JobSettings:
    """Return the settings with the limits that ``event`` names."""
    limits = {limit.name: limit.value for limit in event.limits}
    budget: dict[str, Any] = {key: limits.pop(key) for key in BUDGET_LIMITS & limits.keys()}
    return replace(
        settings,
        budget=settings.budget.model_copy(update=budget),
        **limits,  # type: ignore[arg-type]
    )


def with_limits(state: State, event: LimitsChanged) -> State:
    """Return the state with new limits; alerts of a raised budget are given again."""
    after = replace(state, settings=changed(state.job, event))
    money = {one.unit: one for one in budgets(after)}

    def is_due(alert: BudgetAlert) -> bool:
        one = money.get(alert.unit)
        cap: float | None = None if one is None else getattr(after.job.budget, one.key)
        if one is None or cap is None:
            return False
        return alert.cap == cap or one.spent.usd >= alert.share * cap

    alerts = tuple(alert for alert in state.history.alerts if is_due(alert))
    return replace(after, history=replace(state.history, alerts=alerts))


def limits_changed(transition: Transition, event: LimitsChanged) -> None:
    """A person has changed limits; decisions follow from the new state."""
    transition.state = with_limits(transition.state, event)
    transition.log(f"{event.by}: {described(event)}")


def with_grant(state: State, event: GrantReceived) -> State:
    """Return the state with a pool's grant, unless a later one is known."""
    known, grant = state.job.grant, event.grant
    if known is not None and known.serial > grant.serial:
        return state
    return replace(state, settings=replace(state.job, grant=grant))


def grant_received(transition: Transition, event: GrantReceived) -> None:
    """The job's pool has given it another grant; decisions follow from the new state."""
    known = transition.state.job.grant
    transition.state = with_grant(transition.state, event)
    vm_transfer.granted(transition)
    grant = transition.state.job.grant
    assert grant is not None
    if grant.idle_s > (
        0.0 if known is None else known.idle_s
    ):  # a move that was asked for may begin
        transition.put(replace(transition.state.market, considered=-1))
    if known is None or known.vms != grant.vms:
        some = ", ".join(f"{number} {kind}" for kind, number in grant.vms if number)
        transition.log(f"pool {grant.pool}: may hold {some or 'no VM'}")


def described(event: LimitsChanged) -> str:
    """Return the new limits as text."""
    parts = []
    for limit in event.limits:
        key, unit = _WORDS[limit.name]
        value = "none" if limit.value is None else f"{limit.value:.12g}{unit}"
        if limit.name == "deadline_s" and limit.value is not None:
            value = utc(limit.value)
        parts.append(f"{key} is now {value}")
    return ", ".join(parts)


def with_steps(state: State, event: StepsChanged) -> State:
    """Return the state with another number of steps: of a job that has succeeded too, if
    there are more than it has trained."""
    spec, outcome = replace(state.job.spec, steps=event.steps), state.outcome
    news = f"{event.by}: {counted(event.steps, 'step')} instead of {state.job.spec.steps}"
    done = outcome is not None and outcome.kind == "succeeded"
    if outcome is not None and done and event.steps > state.history.progress.step:
        outcome = replace(outcome, kind="stopped", exit_code=130, reason=news)
    settings = replace(state.job, spec=spec)
    return replace(state, settings=settings, outcome=outcome, last_message=news)


def with_code(state: State, event: CodeUpdated) -> State:
    """Return the state with other code; what was measured of the old holds if it was
    measured of an equal model."""
    was = state.job.facts.fingerprint
    same = event.facts.fingerprint == was
    changes = "".join(f"; {line}" for line in event.changes)
    return replace(
        state,
        settings=replace(state.job, facts=event.facts, profile=event.profile),
        code_sha256=event.sha256,
        last_message=f"{event.by}: code updated to {event.sha256[:12]}{changes}",
        preparation=replace(
            state.preparation,
            profile=state.preparation.profile if same else event.profile,
            known_profiles=state.preparation.known_profiles if same else (),
            known_models=tuple(dict.fromkeys((*state.preparation.known_models, was))),
        ),
    )


def with_from_scratch(state: State) -> State:
    """Return the state of a job that may begin again if no checkpoint can be used."""
    return replace(state, preparation=replace(state.preparation, from_scratch=True))


def advance(transition: Transition) -> None:
    """Drain VMs until the fleet is within grant and hourly cap, the most expensive first."""
    state = transition.state
    if state.phase is not JobPhase.ACTIVE:
        return
    for vm in tuple(state.fleet.vms.values()):
        leaves_at_s = vm.leaves_at_s if vm.drain_reason else None
        is_due = leaves_at_s is not None and transition.waited_until(leaves_at_s)
        if is_due and not _may_stay(transition, vm):
            release_or_reserve(transition, (vm,), vm.drain_reason)
    _drain_to_grant(transition)
    if state.job.budget.max_usd_per_hour is None:
        return
    money = budget(transition.state)
    assert money.hourly_cap is not None
    staying = [vm for vm in transition.state.fleet.vms.values() if not _is_going(vm)]
    going = [vm for vm in transition.state.fleet.vms.values() if _is_going(vm)]
    over = money.rate - money.hourly_cap
    for vm in going:
        over -= _rate(transition.state, vm)
    for vm in by_eviction_cost(transition.state, staying):
        if over <= FREE:
            return
        over -= _rate(transition.state, vm)
        drain(transition, vm, f"over the cap of {state.job.budget.max_usd_per_hour:g} USD/h")


def _may_stay(transition: Transition, vm: VmRecord) -> bool:
    """Return whether a VM may stay beyond its time for what only it may hold: no cloud
    takes it, nothing trains without it, and there is money for it."""
    if vm.drain_reason != REPLACED or not is_needed(transition, vm):
        return False
    if _trains(transition.state, vm):
        return False
    money = budget(transition.state)
    return money.hourly_cap is None or money.rate <= money.hourly_cap


def _drain_to_grant(transition: Transition) -> None:
    """Drain the VMs of each kind that a pool's grant does not allow any more."""
    grant = transition.state.job.grant
    if grant is None:
        return
    granted = dict(grant.vms)
    by_kind: dict[str, list[VmRecord]] = {}
    for vm in transition.state.fleet.vms.values():
        if not _is_going(vm):
            by_kind.setdefault(kind_of(vm.offer), []).append(vm)
    for kind, vms in by_kind.items():
        over = len(vms) - granted.get(kind, 0)
        for vm in by_eviction_cost(transition.state, vms)[: max(0, over)]:
            drain(transition, vm, f"pool {grant.pool} gives it to another job")


def _is_going(vm: VmRecord) -> bool:
    return vm.phase is VmPhase.RETURNING or vm.leaves_at_s is not None


def _rate(state: State, vm: VmRecord) -> Rate:
    line = state.history.ledger.open.get(vm.vm_id)
    return FREE if line is None else line.rate_now


def _trains(state: State, vm: VmRecord) -> bool:
    generation = state.training.generation
    return generation is not None and generation.trains_on(vm.vm_id)


def by_eviction_cost(state: State, vms: Iterable[VmRecord]) -> list[VmRecord]:
    """Sort VMs: idle ones first, then slow ones, then by falling price."""

    def key(vm: VmRecord) -> tuple[bool, bool, int, str]:
        price = _rate(state, vm).nanousd_per_hour
        return _trains(state, vm), vm.slow is None, -price, vm.vm_id

    return sorted(vms, key=key)


def drain(transition: Transition, vm: VmRecord, reason: str) -> None:
    """Return a VM; if it trains, once others have what its memory holds."""
    transition.log(f"{vm.vm_id}: {reason}")
    if not _trains(transition.state, vm):
        release_or_reserve(transition, (vm,), reason)
        return
    leaves_at_s = transition.now_s + DRAIN_S
    transition.put_vm(
        replace(
            vm,
            noticed_at_s=transition.now_s,
            leaves_at_s=leaves_at_s,
            drain_reason=reason,
        )
    )
    transition.note_fleet_change()
