"""The status of a pool as a table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spottrain.units import counted
from spottrain.varuna_manager.format import NOTHING, dollars, duration, number

COLOURS = {
    "running": "green",
    "succeeded": "green",
    "ending": "green",
    "starting": "yellow",
    "queued": "yellow",
    "paused": "yellow",
    "failed": "red",
}


def spent(document: Mapping[str, Any]) -> str:
    """Return in words what a pool has spent of its dollars.

    Args:
        document: From ``document.status``.
    """
    total, cap = dollars(document["usd_spent"]), dollars(document["max_usd"])
    month = document["usd_spent_this_month"]
    if document["max_usd"] is None:
        return f"{total} spent, no budget"
    if month is None:
        return f"{total} of {cap} spent"
    return f"{dollars(month)} of {cap} spent this month, {total} in all"


def parts(document: Mapping[str, Any]) -> list[RenderableType]:
    """Return a pool's status for people.

    Args:
        document: From ``document.status``.
    """
    head = (
        f"pool {document['name']}: {document['state']}, {document['policy']}; "
        f"{sum(kind['held'] for kind in document['kinds'])} of {counted(int(document['max_vms']), 'VM')}, "
        f"{spent(document)}, "
        f"{dollars(document['usd_per_hour'])} per hour"
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("job", "team", "state", "priority"):
        table.add_column(name)
    for name in ("due", "has", "VMs", "examples/s", "steps", "spent", "ends in"):
        table.add_column(name, justify="right")
    table.add_column("deadline")
    table.add_column("why")
    for job in document["jobs"]:
        table.add_row(*_cells(job))
    apart = (
        f"{job['name']}: {job['rents_because']}" for job in document["jobs"] if job["rents_because"]
    )
    return [head, table, *apart]


def _cells(job: Mapping[str, Any]) -> list[RenderableType]:
    colour = COLOURS.get(job["state"], "default")
    vms = ", ".join(f"{n} {kind}" for kind, n in job["vms"].items())
    is_over = job["finish_s"] is not None and job["finish_s"] <= time.time()
    left = (
        NOTHING if job["finish_s"] is None or is_over else duration(job["finish_s"] - time.time())
    )
    kept = {None: NOTHING, True: "kept", False: "late"}[job["deadline_kept"]]
    steps = NOTHING if job["steps"] is None else f"{job['steps_done']}/{job['steps']}"
    return [
        job["name"],
        job["team"] or NOTHING,
        Text(job["state"], style=colour),
        f"{job['priority']:g}",
        f"{job['share_due']:.0%}",
        f"{job['share']:.0%}",
        vms or NOTHING,
        number(job["examples_per_s"], 1),
        steps,
        dollars(job["usd_spent"]),
        left,
        kept,
        job["why"],
    ]
