"""A job's deadline for people and programs: slack, expected finish and cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spottrain.pricing.deadline.best_case import best_case, over_budget, too_slow
from spottrain.pricing.deadline.forecast import forecast
from spottrain.pricing.deadline.model import Interval
from spottrain.varuna_manager.core import allocation
from spottrain.varuna_manager.core.deadline import is_cost_optimal, job_status, supplies
from spottrain.varuna_manager.core.model.state import JobPhase, State, spent_usd
from spottrain.varuna_manager.format import dollars, duration, finite, utc


def deadline_view(state: State, at_s: float) -> dict[str, Any] | None:
    """Return the state of a job's deadline at ``at_s``; None if it is unknown.

    ``finish_s`` (seconds since the epoch) and ``usd`` (of the whole job) are the expected
    values with a 90 % interval; None if unknown or never. ``out_of_reach`` has a line for
    each other limit that cannot be met.
    """
    decision, terms = state.deadline.decision, state.deadline.terms
    if decision is None or terms is None or state.phase is not JobPhase.ACTIVE:
        return None
    now = replace(job_status(state), now_s=at_s)
    then = replace(state, now_s=max(state.now_s, at_s))
    on_offer, held = supplies(then, terms), allocation.held(state)
    spent = spent_usd(state, at_s)
    foreseen = forecast(
        now,
        terms.fleet,
        on_offer,
        held,
        state.deadline.outlook,
        cost_optimal=is_cost_optimal(state),
        rolling=state.deadline.rolling,
        usd_spent=spent,
    )
    found = best_case(now, terms.fleet, on_offer, held)
    problems = over_budget(now, found), too_slow(now, terms.fleet, found)
    return {
        "mode": decision.mode,
        "reason": decision.reason,
        "slack_s": finite(decision.slack_s),
        "slack_usd": finite(decision.slack_usd),
        "finish_s": _interval(foreseen.finish_s, 0.0),
        "usd": _interval(foreseen.usd, spent),
        "out_of_reach": [problem for problem in problems if problem],
    }


def _interval(interval: Interval, base: float) -> dict[str, float | None]:
    return {
        "low": finite(base + interval.low),
        "expected": finite(base + interval.expected),
        "high": finite(base + interval.high),
    }


def deadline_line(slo: dict[str, Any], deadline_s: float | None) -> str:
    """Return slack, finish and cost in one line."""
    finish, usd, slack_s = slo["finish_s"], slo["usd"], slo["slack_s"]
    parts = []
    if deadline_s is not None:
        parts.append(f"due {utc(deadline_s)}")
    if slack_s is not None and slack_s >= 0:
        parts.append(f"{duration(slack_s)} of slack")
    elif deadline_s is not None and _is_late(slo, deadline_s):
        parts.append("cannot be met")
    elif deadline_s is not None:
        parts.append("not guaranteed" if slack_s is None else "no slack")
    if finish["expected"] is not None:
        high = finish["high"]
        latest = "latest finish unknown" if high is None else f"90 % by {utc(high)}"
        parts.append(f"done {utc(finish['expected'])} ({latest})")
    elif finish["low"] is not None:
        parts.append("finish unknown")
    if usd["expected"] is not None:
        highest = "?" if usd["high"] is None else dollars(usd["high"])
        parts.append(f"{dollars(usd['low'])} to {highest} in total")
    return " · ".join((*parts, *slo["out_of_reach"]))


def _is_late(slo: dict[str, Any], deadline_s: float) -> bool:
    """Return whether the deadline passes before the earliest possible finish."""
    soonest_s = slo["finish_s"]["low"]
    return slo["mode"] == "late" or soonest_s is None or soonest_s > deadline_s
