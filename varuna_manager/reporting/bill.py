"""What a job cost, by kind, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table

from spottrain.units import HOUR_S
from spottrain.varuna_manager.format import NOTHING, dollars, duration, gpu_hours
from spottrain.varuna_manager.reporting.columns import columns
from spottrain.varuna_manager.reporting.costs import By
from spottrain.varuna_manager.reporting.text import money_rows, time_kinds


def cost_parts(cost: Mapping[str, Any], by: By | None = None) -> Iterator[RenderableType]:
    """Yield the parts of the command's answer for people.

    Args:
        cost: From ``documents.cost``.
        by: Also break the bill down by this.
    """
    of = "" if cost["usd_budget"] is None else f" of {dollars(cost['usd_budget'])}"
    yield (
        f"{cost['name']}: {cost['state']}, {duration(cost['wall_s'])}, "
        f"{dollars(cost['usd_spent'])}{of}{gpu_hours(cost, ', ')}; "
        f"{dollars(cost['usd_per_million_examples'])} per million examples"
    )
    yield _time_table(cost)
    money = columns("MONEY", "r:USD", "HOW")
    for row in money_rows({"cost": cost}):
        money.add_row(*row)
    yield money
    if by is not None:
        yield _bill_table(cost, by)


def _time_table(cost: Mapping[str, Any]) -> Table:
    table = columns("TIME", "r:VM-HOURS", "r:SHARE", "r:USD", "WHAT IT IS")
    seconds = cost["vm_seconds"]
    for kind, words in time_kinds(cost).items():
        table.add_row(
            kind,
            f"{seconds[kind] / HOUR_S:.2f}",
            _share(seconds[kind], seconds["billed"]),
            f"${cost['usd_by_time'][kind]:.4f}",
            words,
        )
    table.add_row("billed", f"{seconds['billed'] / HOUR_S:.2f}", "", "", "total")
    return table


def _bill_table(cost: Mapping[str, Any], by: By) -> Table:
    shown = time_kinds(cost)
    kinds = (f"r:{kind.upper()}" for kind in shown)
    table = columns(by.upper(), "r:VMS", "r:VM-HOURS", *kinds, "r:USD")
    for row in cost[f"by_{by}"]:
        shares = (_share(row[kind], row["billed"]) for kind in shown)
        hours = f"{row['billed'] / HOUR_S:.2f}"
        table.add_row(row[by], str(row["vms"]), hours, *shares, f"${row['usd']:.4f}")
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else NOTHING
