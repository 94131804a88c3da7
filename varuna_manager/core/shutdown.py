"""The end of a job: at a limit, without capacity or by a person; and what follows.

Once the outcome is known, a last checkpoint is written if one is wanted and possible, the
VMs are returned, and what they shared in the cloud is removed.
"""

from __future__ import annotations

from spottrain.eventlog.changed import replace
from spottrain.pricing.billing.budget import LAST_CHECKPOINT_S, Budget, BudgetKey, reserve_s
from spottrain.pricing.billing.money import FREE, NOTHING, Money
from spottrain.units import counted
from spottrain.varuna_manager.core import generation, planning, spending, vm_transfer
from spottrain.varuna_manager.core.allocation import affordable, why_unlike
from spottrain.varuna_manager.core.fleet import release_or_reserve
from spottrain.varuna_manager.core.launches import abandon
from spottrain.varuna_manager.core.model.commands import Finish, Outcome, ReleaseJob
from spottrain.varuna_manager.core.model.events import (
    CommandFailed,
    FolderSeen,
    StopRequested,
)
from spottrain.varuna_manager.core.model.records import BudgetAlert, Release, VmPhase
from spottrain.varuna_manager.core.model.settings import BUDGET_LIMITS, PoolGrant
from spottrain.varuna_manager.core.model.starts import MAX_FAILED, MAX_FAILED_BESIDE
from spottrain.varuna_manager.core.model.state import JobPhase, State, budget, budgets
from spottrain.varuna_manager.core.model.transition import Transition

FOLDER_WAIT_S = 60.0
"""How long a job trains on while its folder cannot be used."""
TRIES = 6
"""Tries to remove it before a person has to."""
FIRST_PAUSE_S = 5.0
"""After the first try that failed; each later pause is twice as long."""


def stop_requested(transition: Transition, event: StopRequested) -> None:
    """A person wants the job to stop; a second request may be more urgent."""
    outcome = Outcome(kind="stopped", exit_code=130, reason=f"stopped by {event.by}")
    transition.end(outcome, checkpoint=event.checkpoint and not event.now)
    state = transition.state
    if event.now and state.phase is JobPhase.ENDING:
        transition.state = replace(state, ending_checkpoint=False)
        abandon(transition)


def watch_limits(transition: Transition) -> None:
    """Begin to end the job when a limit is reached."""
    state = transition.state
    if state.phase is not JobPhase.ACTIVE:
        return
    job = state.job
    if job.grant is not None and _watch_grant(transition, job.grant):
        return
    if job.deadline_s is not None and transition.waited_until(job.deadline_s):
        outcome = Outcome(kind="deadline", exit_code=4, reason="the deadline passed")
        transition.end(outcome)
    else:
        for money in budgets(state):
            cap: float | None = getattr(job.budget, money.key)
            if cap is not None:
                _watch_budget(transition, money, cap)
    _watch_capacity(transition)
    _watch_starts(transition)
    _watch_folder(transition)


def _watch_starts(transition: Transition) -> None:
    """End a job whose VMs come up and never train."""
    failing = transition.state.launches.failing
    if failing is None:
        return
    vms = transition.state.fleet.vms.values()
    trains = any(vm.has_trained and vm.phase is VmPhase.READY for vm in vms)
    if failing.times >= (MAX_FAILED_BESIDE if trains else MAX_FAILED):
        transition.fail(
            f"{failing.times} VMs in a row came up and never trained; the last of them, "
            f"{failing.vm_id}: {failing.reason}",
            exit_code=6,
        )


def _watch_folder(transition: Transition) -> None:
    """End a job whose folder cannot be used for too long."""
    launches = transition.state.launches
    if launches.folder_trouble and transition.waited_until(
        launches.folder_trouble_since_s + FOLDER_WAIT_S
    ):
        transition.fail(f"for {FOLDER_WAIT_S:g} s {launches.folder_trouble}")


def folder_seen(transition: Transition, event: FolderSeen) -> None:
    """Rent nothing while the job's folder cannot be used; end the job if it is gone."""
    launches = transition.state.launches
    if event.is_gone:
        transition.fail(event.trouble)
    if event.trouble == launches.folder_trouble:
        return
    since_s = launches.folder_trouble_since_s
    since_s = since_s if launches.folder_trouble else transition.now_s
    transition.put(replace(launches, folder_trouble=event.trouble, folder_trouble_since_s=since_s))
    if not event.trouble:
        transition.log("the job's folder can be used again")
    elif not event.is_gone:
        transition.log(
            f"{event.trouble}: nothing is rented, and the job ends unless that is over "
            f"in {FOLDER_WAIT_S:g} s"
        )


def _watch_grant(transition: Transition, grant: PoolGrant) -> bool:
    """Begin to end a job whose pool gives it nothing, until it does; return whether."""
    state = transition.state
    ends_s = grant.until_s - reserve_s(state.job.spec.lease_s)
    money = budget(state)
    lasts_s = None if grant.is_own_budget(state.job.budget.max_usd) else money.lasts_s
    if not grant.total:
        reason = f"pool {grant.pool} has no VM for it now"
    elif transition.waited_until(ends_s):
        reason = f"the grant of pool {grant.pool} has not been renewed"
    elif lasts_s is not None and transition.waited_until(state.now_s + lasts_s):
        reason = f"pool {grant.pool}: the budget of this job is used up"
    else:
        return False
    transition.end(Outcome(kind="queued", exit_code=0, reason=reason))
    return True


def _watch_budget(transition: Transition, money: Budget, cap: float) -> None:
    """End the job while a budget still covers what the fleet may cost."""
    state = transition.state
    _alert(transition, money, cap)
    lasts_s = money.lasts_s
    is_over = lasts_s is not None and transition.waited_until(state.now_s + lasts_s)
    if is_over or _is_over_budget(state, money.key):
        reason = f"budget of {cap:g} {money.unit} used up: {money.spent.usd:.4f} spent"
        if money.reserve > NOTHING:
            reason += f", {money.reserve.usd:.4f} reserved for {money.reserve_s:g} s"
        outcome = Outcome(kind="budget", exit_code=4, reason=reason)
        transition.end(outcome)


def _alert(transition: Transition, money: Budget, cap: float) -> None:
    """Alert, once each, to the shares of a budget that are spent."""
    state, unit = transition.state, money.unit
    given = {alert.share for alert in state.history.alerts if alert.unit == unit}
    reached = []
    for share in sorted(set(state.job.budget.alerts) - given):
        left = Money.allowed(cap).share(share) - money.spent
        if left <= NOTHING or (
            money.job_rate > FREE
            and transition.waited_until(state.now_s + money.job_rate.lasts_s(left))
        ):
            reached.append(share)
    if not reached:
        return
    at_s, spent = transition.now_s, money.spent.usd
    alerts = [
        BudgetAlert(share=share, at_s=at_s, spent=spent, cap=cap, unit=unit) for share in reached
    ]
    transition.put(replace(transition.state.history, alerts=(*state.history.alerts, *alerts)))
    transition.log(f"{reached[-1]:.0%} of the budget of {cap:g} {unit} is spent")


def _is_over_budget(state: State, key: BudgetKey) -> bool:
    """Return whether nothing is rented and a budget allows no offer."""
    if state.fleet.vms or state.launches.intents or not state.market.offers:
        return False
    others = BUDGET_LIMITS - {key}
    budget = state.job.budget.model_copy(update=dict.fromkeys(others))
    count_of = affordable(replace(state, settings=replace(state.job, budget=budget)))
    return all(count_of(offer) == 0 for offer in state.market.offers)


def _watch_capacity(transition: Transition) -> None:
    state = transition.state
    why = _why_short(state)
    if not why:
        if state.fleet.short_since_s is not None:
            transition.put(replace(state.fleet, short_since_s=None))
        return
    if state.fleet.short_since_s is None:
        transition.put(replace(state.fleet, short_since_s=state.now_s))
        state = transition.state
    wait_s, since_s = state.job.resources.capacity_wait_s, state.fleet.short_since_s
    if wait_s is None or since_s is None:
        return
    if transition.waited_until(since_s + wait_s):
        reason = f"for {wait_s:g} s {why}"
        transition.end(Outcome(kind="capacity", exit_code=5, reason=reason))


def _why_short(state: State) -> str:
    """Return why the VMs do not suffice to train; empty if they do, or may soon."""
    vms = state.fleet.vms.values()
    if not vms and state.fleet.move is None:
        why = why_unlike(state)
        return f"no VM could be rented{why and f': it needs {why}'}"
    if state.training.generation is not None or not all(vm.is_usable for vm in vms):
        return ""
    if len(vms) < state.job.resources.min_vms:
        return f"only {len(vms)} of min_vms: {state.job.resources.min_vms} could be rented"
    answer = state.training.answer
    if answer is None or answer.plan is not None or state.training.plan_asked is not None:
        return ""
    return f"only {counted(len(vms), 'VM')} could be rented: {answer.why_not}"


def advance(transition: Transition) -> None:
    """Return the VMs once the last checkpoint is written, or cannot be; then finish."""
    state = transition.state
    if state.phase is not JobPhase.ENDING or state.outcome is None:
        return
    if state.ending_checkpoint and _may_save(transition):
        return
    if state.ending_checkpoint:
        transition.state = replace(transition.state, ending_checkpoint=False)
    if transition.state.training.generation is not None:
        generation.close(transition, state.outcome.reason)
    release_or_reserve(transition, transition.state.fleet.vms.values(), "the job is over")
    state = transition.state
    assert state.outcome is not None
    rents_nothing = not state.fleet.vms and not state.launches.intents
    rents_nothing = rents_nothing and not vm_transfer.is_asking(state)
    if rents_nothing and is_released(transition):
        spending.managers_end(transition)  # last thing that the manager's VM does
        transition.state = replace(transition.state, phase=JobPhase.ENDED)
        transition.note_phase(JobPhase.ENDING, JobPhase.ENDED)
        transition.emit(Finish(outcome=state.outcome))


def _may_save(transition: Transition) -> bool:
    """Return whether a last checkpoint can still be written."""
    state = transition.state
    since_s = state.ending_since_s
    assert since_s is not None
    possible = state.training.generation is not None or planning.usable_vms(state)
    return bool(possible) and not transition.waited_until(since_s + LAST_CHECKPOINT_S)


def reopen(transition: Transition) -> None:
    """Resume a job that had ended or was ending, unless it has succeeded."""
    state = transition.state
    if state.outcome is None:
        return
    if state.outcome.kind == "succeeded":
        if state.phase is JobPhase.ENDED:
            transition.emit(Finish(outcome=state.outcome))
        return
    transition.state = replace(
        state,
        phase=JobPhase.ACTIVE,
        outcome=None,
        ending_since_s=None,
        ending_checkpoint=False,
    )
    transition.put(
        replace(state.training, plan_reason="resumed", fruitless=0),
        replace(state.fleet, shortages={}, short_since_s=None),
        replace(state.preparation, failed_preparations=0),
        replace(state.launches, failing=None),
        replace(state.history, progress=replace(state.history.progress, nonfinite_in_row=0)),
    )
    transition.note_phase(state.phase, JobPhase.ACTIVE)


# --- What the VMs shared in the cloud -----------------------------------------------------


def is_released(transition: Transition) -> bool:
    """Return whether nothing is left to remove; if something is, have it removed."""
    state, release = transition.state, transition.state.release
    if not state.job.shares or (release is not None and release.done):
        return True
    tries = 0 if release is None else release.tries
    retry_at_s = None if release is None else release.retry_at_s
    if release is None or (retry_at_s is not None and transition.waited_until(retry_at_s)):
        transition.state = replace(state, release=Release(tries=tries + 1))
        transition.emit(ReleaseJob())
    return False


def job_released(transition: Transition) -> None:
    """Nothing that the VMs shared is left."""
    if transition.state.release is not None:
        release = replace(transition.state.release, done=True)
        transition.state = replace(transition.state, release=release)


def release_failed(transition: Transition, event: CommandFailed) -> None:
    """Try again after a pause, ``TRIES`` times."""
    release, name = transition.state.release, transition.state.job.spec.name
    if release is None:
        return
    if release.tries < TRIES:
        pause_s = FIRST_PAUSE_S * 2 ** (release.tries - 1)
        release = replace(release, retry_at_s=transition.now_s + pause_s)
        reason = event.reason
        transition.log(f"removing the shared resources failed, retrying: {reason}")
    else:
        release = replace(release, done=True)
        transition.log(
            f"could not remove the shared resources: {event.reason}; run 'spottrain down {name}' to remove them"
        )
    transition.state = replace(transition.state, release=release)
