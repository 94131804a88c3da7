"""The ranked offers, as ``spottrain plan`` shows them to people and programs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spottrain.pricing.prices.hazard import Basis
from spottrain.pricing.ranking.rank import OfferScore, RankedOffer, Ranking
from spottrain.units import HOUR_S, counted
from spottrain.varuna_manager.format import NOTHING, age, dollars, duration, finite, number
from spottrain.varuna_manager.reporting.columns import columns

SHORT_TABLE = 6
"""Offers that are shown without ``--explain``."""
LEAST_GAIN = 5e-4
"""From which on it is a number other than 0.0 %."""
REASONS = 5
"""Reasons that are listed why offers cannot be used."""


def ranking_view(
    ranking: Ranking,
    now_s: float,
    warnings: Sequence[str] = (),
    bests: Sequence[tuple[str, RankedOffer]] = (),
    examples: float = 0.0,
) -> dict[str, Any]:
    """Return a ranking as plain data.

    Args:
        now_s: Seconds since the epoch.
        warnings: A line each about what was left out before.
        bests: The best offer of each GPU, by its name; none if clouds were not asked.
        examples: That time and cost of these are for.
    """
    view: dict[str, Any] = {
        "offers": [_row_view(row, now_s) for row in ranking.rows],
        "choice": None if ranking.best is None else name_of(ranking.best),
        "why": why(ranking),
        "warnings": list(warnings),
    }
    if bests:
        view["examples"] = examples
        view["by_gpu"] = [_gpu_view(gpu, row, examples, now_s) for gpu, row in bests]
    return view


def _gpu_view(gpu: str, row: RankedOffer, examples: float, now_s: float) -> dict[str, Any]:
    """Return the best offer of a GPU: what its fleet does to so many examples.

    The money is that of the ranking's key: boot, losses and storage counted.
    """
    assert row.worth is not None
    assert row.throughput is not None
    hours = examples / row.worth.net_examples_per_s / HOUR_S
    losses_per_hour = row.throughput.vms * row.priced.losses_per_hour
    return {
        "gpu": gpu,
        **_row_view(row, now_s),
        "hours": hours,
        "total_usd": examples / row.worth.examples_per_usd,
        "losses": hours * losses_per_hour,
    }


def _row_view(row: RankedOffer, now_s: float) -> dict[str, Any]:
    offer, worth = row.priced.offer, row.worth
    planned = None if row.is_bound else row.throughput
    return {
        "cloud": offer.cloud,
        "region": offer.region,
        "zone": offer.zone,
        "instance_type": offer.instance_type,
        "spot": offer.spot,
        "gpus": offer.gpus,
        "usd_per_hour": finite(offer.usd_per_hour),
        "observed_at": offer.observed_at_s,
        "age_s": max(0.0, now_s - offer.observed_at_s),
        "losses_per_hour": finite(row.priced.losses_per_hour),
        "losses_basis": row.priced.losses_basis,
        "obtainability": row.priced.obtainability,
        "lost_share": worth and _lost_share(worth),
        "vms": row.vms,
        "plan": planned and planned.shape,
        "paid_vms": planned and planned.vms,
        "is_estimate": row.priced.is_estimate,
        "is_dated": row.priced.is_dated,
        "is_bound": row.is_bound,
        "examples_per_s": worth and worth.examples_per_s,
        "net_examples_per_s": worth and worth.net_examples_per_s,
        "fleet_usd_per_hour": worth and worth.usd_per_hour,
        "usd": worth and worth.usd,
        "raw_examples_per_usd": worth and finite(worth.raw_examples_per_usd),
        "examples_per_usd": worth and finite(worth.examples_per_usd),
        "why_not": row.why_not,
    }


def _lost_share(worth: OfferScore) -> float:
    """Return the share of a fleet's throughput that interruptions take."""
    if not worth.examples_per_s:
        return 0.0
    return 1.0 - worth.net_examples_per_s / worth.examples_per_s


def name_of(row: RankedOffer) -> str:
    """Return the name of an offer, such as ``aws us-east-1a p4d.24xlarge spot``."""
    offer = row.priced.offer
    market = "spot" if offer.spot else "on demand"
    return f"{offer.cloud} {offer.zone} {offer.instance_type} {market}"


def why(ranking: Ranking) -> str:
    """Return a line: why the first offer is the best, or why there is none."""
    usable = [row for row in ranking.rows if not row.why_not]
    if not usable:
        return f"no offer can be used: {why_nothing(ranking)}"
    best, others = usable[0], usable[1:]
    assert best.worth is not None
    if math.isinf(best.worth.examples_per_usd):
        return f"{name_of(best)} costs nothing"
    worth = best.worth.examples_per_usd
    line = f"{name_of(best)} trains {worth:,.0f} examples per dollar"
    if not others:
        return f"{line}; no other offer can be used"
    line += f", {_compared(best, others[0])} {name_of(others[0])}"
    return line + _though(best, others)


def _compared(best: RankedOffer, other: RankedOffer) -> str:
    assert best.worth is not None
    assert other.worth is not None
    gain = best.worth.examples_per_usd / other.worth.examples_per_usd - 1
    if gain < LEAST_GAIN:
        return "no fewer than" if other.is_bound else "as many as"
    return f"{'at least ' if other.is_bound else ''}{gain:.1%} more than"


def _though(best: RankedOffer, others: Sequence[RankedOffer]) -> str:
    """Return a remark on an offer with more throughput for its rent, but not in the end."""
    known = [row for row in (best, *others) if row.worth and not row.is_bound]
    raw = max(known, key=lambda row: row.worth.raw_examples_per_usd if row.worth else 0)
    if raw is best:
        return ""
    per_day = 24 * raw.priced.losses_per_hour
    return (
        f"; {name_of(raw)} trains more for its rent alone, but not after boot and "
        f"interruptions ({number(per_day, 2)} per VM and day)"
    )


def why_nothing(ranking: Ranking) -> str:
    """Return why offers cannot be used, the most frequent reasons first."""
    reasons = ranking.reasons()
    if not reasons:
        return "there are none"
    lines = [f"{why_not} ({count})" for why_not, count in reasons.items()]
    more = [f"and {len(lines) - REASONS} other reasons"] if len(lines) > REASONS else []
    return "; ".join([*lines[:REASONS], *more])


def ranking_parts(
    view: dict[str, Any], explain: bool = False, every: bool = False
) -> Iterator[RenderableType]:
    """Yield a ranking for people: of clouds the best offer of each GPU.

    Args:
        view: See ``ranking_view``.
        explain: Show all offers, those that cannot be used too.
        every: Show all that can be used.
    """
    usable = [row for row in view["offers"] if not row["why_not"]]
    if "by_gpu" in view and not (explain or every):
        yield _gpu_table(view["by_gpu"])
        of = f"{view['tokens']:,} tokens in " if "tokens" in view else ""
        yield f"         for {of}{view['examples']:,.0f} examples; ~ marks estimates"
        yield f"         every usable offer ({len(usable)}) with --all"
    else:
        shown = view["offers"] if explain else usable
        shown = shown if explain or every else usable[:SHORT_TABLE]
        if shown:
            yield _table(shown)
        left = len(usable) - SHORT_TABLE
        if not (explain or every) and left > 0:
            yield f"         {left} more with --all"
    out = len(view["offers"]) - len(usable)
    if out and not explain:
        yield f"         {counted(out, 'offer')} cannot be used; --explain says why"
    yield Text(f"offer    {view['why']}")


def _gpu_table(rows: Sequence[dict[str, Any]]) -> Table:
    table = columns(
        *("GPU", "BEST OFFER", "MARKET", "r:VMS", "r:PLAN", "r:EX/S", "r:NET EX/$"),
        *("r:$/HOUR", "r:TIME", "r:COST", "r:LOSSES", "r:PRICE AGE"),
    )
    for row in rows:
        mark = "~" if row["is_dated"] else ""
        total = row["total_usd"]
        table.add_row(
            row["gpu"],
            f"{row['cloud']} {row['zone']} {row['instance_type']}",
            "spot" if row["spot"] else "on demand",
            str(row["paid_vms"]),
            row["plan"],
            _figure(row, "examples_per_s"),
            _figure(row, "examples_per_usd"),
            f"{mark}{dollars(row['fleet_usd_per_hour'])}",
            f"{'~' if row['is_estimate'] else ''}{duration(row['hours'] * HOUR_S)}",
            f"{'~' if row['is_estimate'] else mark}{dollars(total)}",
            losses_text(row["losses"], row["losses_basis"]),
            age(row["age_s"]),
        )
    return table


def losses_text(losses: float, basis: Basis) -> str:
    """Return expected interruptions for people, and what they rest on."""
    if not losses:
        return NOTHING
    return f"{number(losses, 2)} {basis}"


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = columns(
        *("OFFER", "MARKET", "r:$/HOUR", "r:AGE", "r:LOSSES/DAY", "r:LOST", "r:OBTAINABLE"),
        *("r:VMS", "r:PLAN", "r:EX/S", "r:EX/$", "r:NET EX/$", ""),
    )
    for row in rows:
        losses = row["losses_per_hour"]
        table.add_row(
            f"{row['cloud']} {row['zone']} {row['instance_type']}",
            "spot" if row["spot"] else "on demand",
            dollars(row["usd_per_hour"]),
            age(row["age_s"]),
            NOTHING if losses is None else losses_text(24 * losses, row["losses_basis"]),
            _percent(row["lost_share"]),
            _percent(row["obtainability"]),
            str(row["vms"]),
            row["plan"] or NOTHING,
            _figure(row, "examples_per_s"),
            _figure(row, "raw_examples_per_usd"),
            _figure(row, "examples_per_usd"),
            Text(row["why_not"]),
        )
    return table


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _figure(row: dict[str, Any], name: str) -> str:
    """Return a figure: ``~`` an estimate, ``<`` a bound."""
    value = row[name]
    if value is None:
        return NOTHING
    mark = "<" if row["is_bound"] else "~" if row["is_estimate"] else ""
    return f"{mark}{value:,.1f}"
