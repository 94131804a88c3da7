"""A job's limits, as ``spottrain set`` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spottrain.pricing.billing.money import is_amount
from spottrain.varuna_manager.core.model.state import State, budget, spent_usd
from spottrain.varuna_manager.format import NOTHING, dollars, number, utc
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.reporting.deadline import deadline_line, deadline_view
from spottrain.varuna_manager.reporting.documents import gpu_hours

SCHEMA_VERSION = 1


def limits(job: JobDir) -> dict[str, Any]:
    """Return a job's present limits and how much of them is used.

    Raises:
        JournalError: The job's journal cannot be read.
    """
    return limits_of(job.name, read_state(job))


def limits_of(name: str, state: State) -> dict[str, Any]:
    """Return the limits that a job has in a state, as ``limits``."""
    settings, deadline_s = state.job, state.job.deadline_s
    return {
        "schema_version": SCHEMA_VERSION,
        "name": name,
        "max_usd": settings.budget.max_usd,
        "max_usd_per_hour": settings.budget.max_usd_per_hour,
        "deadline": None if deadline_s is None else utc(deadline_s),
        "deadline_s": deadline_s,
        "min_examples_per_s": settings.min_examples_per_s,
        "usd_spent": spent_usd(state, state.now_s),
        "usd_reserved": budget(state).reserve.usd,
        "usd_per_hour": budget(state).rate.usd_per_hour,
        **gpu_hours(state, state.now_s),
        "forecast": deadline_view(state, state.now_s),
        "notes": list(_notes(state)),
    }


def _notes(state: State) -> Iterator[str]:
    """Yield a line for each limit under which nothing can be rented at known prices."""
    cap, on_demand_allowed = state.job.budget.max_usd_per_hour, state.job.resources.allow_on_demand
    prices = [
        offer.usd_per_hour for offer in state.market.offers if offer.spot or on_demand_allowed
    ]
    cheapest = min(filter(is_amount, prices), default=None)
    min_vms = state.job.resources.min_vms
    if cap is not None and cheapest is not None and cap < cheapest * min_vms:
        some = "no machine" if min_vms == 1 else f"fewer than {min_vms} machines"
        yield (
            f"budget.max_usd_per_hour: {dollars(cap)} pays for {some} at present: the "
            f"cheapest costs {dollars(cheapest)} per hour; the job waits until prices fall"
        )


def lines(document: dict[str, Any]) -> Iterator[str]:
    """Yield limits for people, a line each."""
    spent, reserved = dollars(document["usd_spent"]), dollars(document["usd_reserved"])
    rate, min_speed = dollars(document["usd_per_hour"]), document["min_examples_per_s"]
    total = f"{dollars(document['max_usd'])}: {spent} spent, {reserved} reserved"
    yield f"budget       {total}"
    yield f"per hour     {dollars(document['max_usd_per_hour'])}: {rate} now"
    if document["gpu_hours_budget"] is not None:
        used, kept = document["gpu_hours"], document["gpu_hours_reserved"]
        yield f"GPU-hours    {document['gpu_hours_budget']:g}: {used:.2f} used, {kept:.2f} reserved"
    yield f"deadline     {document['deadline'] or NOTHING}"
    yield f"min speed    {number(min_speed, 1)} examples/s"
    if (forecast := document["forecast"]) is not None:
        yield f"forecast     {deadline_line(forecast, document['deadline_s'])}"
    yield from document["notes"]
