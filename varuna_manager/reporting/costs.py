"""The cost of a job, by kind, and of alternatives: plain data.

Everything comes from the journal: the prices and times that the job has seen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.billing.money import Money, total
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.reporting.history import JobHistory, PriceSeries
from spottrain.varuna_manager.reporting.series import Point
from spottrain.varuna_manager.reporting.time_split import (
    KINDS,
    Rental,
    TimeSplit,
    rental,
    share_money,
    split_time,
    sum_of,
)

By = Literal["zone", "type", "vm"]
"""How the bill can be broken down."""
_NAMES: dict[By, Callable[[Rental], str]] = {
    "zone": lambda one: f"{one.offer.cloud} {one.offer.zone}",
    "type": lambda one: one.offer.instance_type + ("" if one.offer.spot else " (on demand)"),
    "vm": lambda one: one.vm_id,
}


def rentals(state: State, history: JobHistory, at_s: float) -> list[Rental]:
    """Return all VMs that a job had until ``at_s``, in order of launch."""
    lines = {**state.history.ledger.closed, **state.history.ledger.open}
    known = (rental(k, v, history.slots.get(k, 0), at_s) for k, v in lines.items())
    return sorted((one for one in known if one), key=lambda one: one.launched_s)


def cost(state: State, history: JobHistory, at_s: float) -> dict[str, Any]:
    """Return what a job cost until ``at_s`` (seconds since the epoch), by kind.

    Money in dollars, times in VM-seconds; ``None`` where nothing is known. The fields
    are described in docs/reports.md.
    """
    at_s = max(at_s, state.now_s)  # as in ``spent_usd``
    rented = rentals(state, history, at_s)
    splits = _splits(rented, history, at_s)
    spending = state.history.ledger.spending(at_s)
    spent, machines = spending.total, spending.spot + spending.on_demand
    examples = state.history.progress.step * state.job.spec.minibatch_size
    time = sum_of(splits.values())
    return {
        "usd_spent": spent.usd,
        "usd_budget": state.job.budget.max_usd,
        "gpu_hours": spending.gpu_hours.usd,
        "gpu_hours_budget": state.job.budget.max_gpu_hours,
        "examples_done": examples,
        "usd_per_million_examples": spent.usd / examples * 1e6 if examples else None,
        "vm_seconds": {"billed": time.billed_s, **time.parts()},
        "useful_share": _share(time.productive_s, time.billed_s),
        "usd_by_time": _by_time(rented, splits),
        "usd_by_kind": {
            "compute": (machines - spending.boot - spending.attached).usd,
            "boot": spending.boot.usd,
            "disks_and_addresses": spending.attached.usd,
            "storage": spending.storage.usd,
            "egress": spending.egress.usd,
        },
        "usd_spot": spending.spot.usd,
        "usd_on_demand_vms": spending.on_demand.usd,
        "savings": _savings(machines, spending.if_on_demand, rented, history.prices),
        **{f"by_{by}": _rows(by, rented, splits) for by in _NAMES},
    }


def _splits(rented: Iterable[Rental], history: JobHistory, at_s: float) -> dict[str, TimeSplit]:
    intervals = history.intervals(at_s)
    return {one.vm_id: split_time(one, intervals) for one in rented}


def _by_time(rented: Iterable[Rental], splits: Mapping[str, TimeSplit]) -> dict[str, float]:
    """Return dollars by how the VMs' time was spent."""
    shares = [share_money(one.cost, splits[one.vm_id]) for one in rented]
    return {kind: total(share[kind] for share in shares).usd for kind in KINDS}


def _rows(
    by: By, rented: Iterable[Rental], splits: Mapping[str, TimeSplit]
) -> list[dict[str, Any]]:
    """Return the bill by zone, type or VM; the most expensive first."""
    groups: dict[str, list[Rental]] = {}
    for one in rented:
        groups.setdefault(_NAMES[by](one), []).append(one)
    rows = []
    for name, group in groups.items():
        time = sum_of(splits[one.vm_id] for one in group)
        usd = total(one.cost for one in group).usd
        row = {by: name, "vms": len(group), "usd": usd, "billed": time.billed_s}
        rows.append(row | time.parts())
    return sorted(rows, key=lambda row: (-row["usd"], row[by]))


# --- Alternatives ---------------------------------------------------------------------


def _savings(
    spent: Money,
    on_demand: Money,
    rented: Sequence[Rental],
    prices: Mapping[str, PriceSeries],
) -> dict[str, Any]:
    fixed = None
    if (cheapest := cheapest_fixed(rented, prices)) is not None:
        offer, usd = cheapest
        fixed = {
            "cloud": offer.cloud,
            "zone": offer.zone,
            "instance_type": offer.instance_type,
            "spot": offer.spot,
            "usd": usd,
            "saved_share": _saved(spent.usd, usd),
        }
    return {
        "usd_on_demand": on_demand.usd,
        "saved_on_demand_share": _saved(spent.usd, on_demand.usd),
        "fixed": fixed,
    }


def cheapest_fixed(
    rented: Sequence[Rental], prices: Mapping[str, PriceSeries]
) -> tuple[Offer, float] | None:
    """Return the single offer that would have been cheapest all along, and its cost.

    Each VM is replaced, while it was billed, by as much of the offer (slots times declared
    speed) at the price that the offer was seen to have at each moment. Only offers that
    were seen in every listing count, with at least the smallest memory per slot that was
    rented; that they had enough machines and no more interruptions is assumed.

    Returns:
        None: Nothing was rented, or no offer was in every listing.
    """
    rented = [one for one in rented if one.trains]
    if not rented:
        return None
    memory = min(one.offer.gpu_memory_bytes for one in rented)
    found: list[tuple[float, str, Offer]] = []
    for key, line in prices.items():
        offer = line.offer
        power = offer.gpus * offer.gpu_speed
        if line.is_constant and power > 0 and offer.gpu_memory_bytes >= memory:
            found.append((_held(rented, line.points, power), key, offer))
    if not found:
        return None
    usd, _, offer = min(found, key=lambda one: one[:2])
    return offer, usd


def _held(rented: Iterable[Rental], points: Sequence[Point], power: float) -> float:
    """Return dollars for renting as much of one offer as was rented."""
    usd_at = _integral(points)
    dollars = 0.0
    for one in rented:
        share = one.slots * one.offer.gpu_speed / power
        end_s = one.launched_s + one.billed_s
        dollars += share * (usd_at(end_s) - usd_at(one.launched_s))
    return dollars


def _integral(points: Sequence[Point]) -> Callable[[float], float]:
    """Return the integral of a price over time; the first price holds
    before the first listing, too."""
    times = [at_s for at_s, _ in points]
    sums = [0.0]
    for (at_s, usd), (next_s, _) in pairwise(points):
        sums.append(sums[-1] + usd * (next_s - at_s) / HOUR_S)

    def usd_at(at_s: float) -> float:
        index = max(0, bisect_right(times, at_s) - 1)
        return sums[index] + points[index][1] * (at_s - times[index]) / HOUR_S

    return usd_at


def _saved(usd: float, otherwise_usd: float) -> float | None:
    """Return the share that was saved; negative if it cost more."""
    return 1 - usd / otherwise_usd if otherwise_usd > 0 else None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
