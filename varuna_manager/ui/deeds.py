"""What the panel's buttons do, and what that costs, told before it is done.

What is done is done by the functions that commands call, which check it again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from spottrain.errors import ConfigError
from spottrain.units import counted
from spottrain.varuna_manager.api import limits as limits_view
from spottrain.varuna_manager.api import queries
from spottrain.varuna_manager.api.job import Job
from spottrain.varuna_manager.core.limits import with_limits
from spottrain.varuna_manager.core.model.events import LimitsChanged
from spottrain.varuna_manager.format import dollars, duration
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.launch import control, limits
from spottrain.varuna_manager.launch.submit import can_be_resumed
from spottrain.varuna_manager.pool.report.document import status as pool_status
from spottrain.varuna_manager.pool.report.tables import spent
from spottrain.varuna_manager.pool.store.client import ask_pool, read_changes
from spottrain.varuna_manager.pool.store.folder import PoolDir

BY = "the panel"
Query = Mapping[str, str]
POOL_LIMITS = ("max_vms", "budget.max_usd", "budget.max_usd_per_hour")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """Something that a button does."""

    title: str
    costs: list[str]
    """What it does and costs, for people."""
    do: Callable[[], object] | None
    """None: it is not known yet what is wanted."""
    danger: str = ""
    """What is lost for good; empty: nothing."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What is to be filled in, as it is given."""
    others: Mapping[str, str] = field(default_factory=dict)
    """Other ways to do it: words by query."""


def names(job: JobDir) -> list[str]:
    """Return the names of what can be done with a job now."""
    if job.remote_manager_file.exists():
        return []  # commands alone reach a manager on a VM of its own
    if job.is_managed():
        return ["limits", "stop"]
    return ["limits", "resume"] if can_be_resumed(job) else []


def of_job(job: JobDir, name: str, query: Query) -> Deed:
    """Return what a button on a job's page does.

    Raises:
        ConfigError: It can do nothing now, or what was filled in is wrong.
    """
    if name not in names(job):
        raise ConfigError(f"job {job.name}: {name} is not possible now")
    return {"stop": _stop, "resume": _resume, "limits": _limits}[name](job, query)


def _stop(job: JobDir, query: Query) -> Deed:
    status, report = queries.status(job), queries.report(job)
    is_now = "now" in query
    vms, rate = len(status["fleet"]), dollars(status["usd_per_hour"])
    costs = [f"{counted(vms, 'VM')}, {rate} an hour, will be returned."]
    lost = ""
    if is_now:
        lost = _lost(status, report)
    else:
        cost_s = status["safety"]["checkpoint_cost_s"]
        takes = "" if cost_s is None else f", which slowed training by {duration(cost_s)} last time"
        costs.insert(0, f"A checkpoint is saved first{takes}; nothing is lost.")
    costs.append(f"{_booting(report)} To continue later, VMs boot again.")
    return Deed(
        title=f"stop {job.name}" + (" without a checkpoint" if is_now else ""),
        costs=costs,
        danger=lost,
        do=partial(control.stop_job, job, now=is_now, by=BY),
        others={} if is_now else {"now=1": "at once, without a checkpoint"},
    )


def _lost(status: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    """Return what is to be trained again if no checkpoint is saved."""
    step, lag = status["safety"]["checkpoint_step"], status["safety"]["lag_steps"]
    if lag is None:
        return f"No checkpoint is known: all {counted(status['step'], 'step')} are lost."
    usd = _usd_of(lag, report)
    again = "" if usd is None else f": about {dollars(usd)}"
    return f"{counted(lag, 'step')} since the checkpoint of step {step} are trained again{again}."


def _usd_of(steps: int, report: Mapping[str, Any]) -> float | None:
    """Return what steps cost at what an example has cost so far."""
    usd = report["cost"]["usd_per_million_examples"]
    return None if usd is None else steps * report["minibatch_size"] * usd / 1e6


def _booting(report: Mapping[str, Any]) -> str:
    boot, vms = report["cost"]["usd_by_kind"]["boot"], report["vms_launched"]
    return f"Booting {counted(vms, 'VM')} has cost {dollars(boot)} so far."


def _rest(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the rest of a job costs, and what its budget leaves."""
    left = report["steps"] - report["steps_done"]
    usd, budget = _usd_of(left, report), report["usd_budget"]
    about = "for nobody knows how much yet"
    if usd is not None:
        about = f"for about {dollars(usd)}, at what an example has cost so far"
    yield f"{counted(left, 'step')} are left, {about}."
    if budget is not None:
        left_usd = dollars(max(0.0, budget - report["usd_spent"]))
        yield f"{dollars(report['usd_spent'])} are spent; the budget leaves {left_usd}."


def _resume(job: JobDir, query: Query) -> Deed:
    report, state = queries.report(job), read_state(job)
    most = counted(state.job.resources.max_vms, "VM")
    cap = state.job.budget.max_usd_per_hour
    cap_words = "" if cap is None else f", for at most {dollars(cap)} an hour"
    return Deed(
        title=f"resume {job.name}",
        costs=[f"At most {most} will be rented{cap_words}.", *_rest(report), _booting(report)],
        do=lambda: Job(job.name).resume(),
    )


def _limits(job: JobDir, query: Query) -> Deed:
    state, report = read_state(job), queries.report(job)
    fields = {key: query.get(key, "").strip() for key in limits.SETTABLE}
    given = [f"{key}={value}" for key, value in fields.items() if value]
    costs = list(limits_view.lines(limits_view.limits_of(job.name, state)))
    title = f"change the limits of {job.name}"
    if not given:
        return Deed(title=title, costs=[*costs, *_rest(report)], do=None, fields=fields)
    now_s = time.time()
    wanted = limits.read_limits(given, job.name, launched_at_s=state.submitted_at_s, now_s=now_s)
    event = LimitsChanged(at_s=now_s, by=BY, limits=wanted)
    after = with_limits(replace(state, now_s=max(state.now_s, now_s)), event)
    then = limits_view.lines(limits_view.limits_of(job.name, after) | {"forecast": None})
    danger = ""
    try:
        limits.check(state, event)
    except limits.LimitsRefusedError as error:
        danger = str(error)
    return Deed(
        title=title,
        costs=["From now on:", *then, *_rest(report | {"usd_budget": after.job.budget.max_usd})],
        danger=danger,
        do=partial(control.change_limits, job, wanted, sure="sure" in query),
        fields=fields,
    )


# --- Pools ----------------------------------------------------------------------------------


def of_pool(pool: PoolDir, query: Query) -> Deed:
    """Return a change of a pool's limits.

    Raises:
        ConfigError: What was filled in is wrong.
    """
    status = pool_status(pool)
    fields = {key: query.get(key, "").strip() for key in POOL_LIMITS}
    given = [f"{key}={value}" for key, value in fields.items() if value]
    held = sum(kind["held"] for kind in status["kinds"])
    rate, cap = dollars(status["usd_per_hour"]), status["max_usd_per_hour"]
    of = "" if cap is None else f" of at most {dollars(cap)}"
    most = counted(int(status["max_vms"]), "VM")
    costs = [f"{held} of {most} are rented, for {rate} an hour{of}.", f"{spent(status)}."]
    changes = read_changes(given)
    if given:
        costs.append(
            f"From now on: {', '.join(given)}; jobs beyond that save a checkpoint and wait."
        )
    return Deed(
        title=f"change the limits of pool {pool.name}",
        costs=costs,
        do=partial(ask_pool, pool, "set", {"changes": changes}) if given else None,
        fields=fields,
    )


def of_pools_job(pool: PoolDir, name: str, is_paused: bool) -> Deed:
    """Return what pauses a job of a pool, or lets it go on.

    Raises:
        ConfigError: The pool has no such job.
    """
    status = pool_status(pool)
    job = next((one for one in status["jobs"] if one["name"] == name), None)
    if job is None:
        raise ConfigError(f"pool {pool.name} has no job {name}")
    vms = counted(sum(job["vms"].values()), "VM")
    costs = [
        f"It saves a checkpoint and gives {vms} to other jobs, or returns them."
        if is_paused
        else f"It gets its share of the pool again: {job['share_due']:.0%} at present.",
        f"It has spent {dollars(job['usd_spent'])}.",
    ]
    verb = "pause" if is_paused else "resume"
    request = {"job": name, "is_paused": is_paused}
    return Deed(
        title=f"{verb} {name} of pool {pool.name}",
        costs=costs,
        do=partial(ask_pool, pool, "pause", request),
    )
