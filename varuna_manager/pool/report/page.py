"""The report of a pool as an HTML page: who had which VMs when, and what came of it.

The allocation over time is drawn as in VirtualFlow's Figure 11: the VMs of each job, stacked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from html import escape
from typing import Any, NamedTuple

import spottrain
from spottrain.varuna_manager.format import NOTHING, dollars, duration
from spottrain.varuna_manager.pool.core.model import PoolState
from spottrain.varuna_manager.pool.report.document import status
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.reporting.html import plot
from spottrain.varuna_manager.reporting.html.page import (
    figure,
    html_page,
    moment,
    table,
)

COLOURS = 6
MAX_MOMENTS = 2000
"""Changes that are drawn; of more the last ones."""


class Allocation(NamedTuple):
    """What jobs held from a point in time on."""

    at_s: float
    held: Mapping[str, int]
    """VMs by job."""
    due: Mapping[str, int]
    """What the policy had decided on."""


def allocations(pool: PoolDir) -> list[Allocation]:
    """Return how a pool's VMs were divided, whenever that changed.

    Raises:
        PoolJournalError: The journal is missing or damaged.
    """
    found: list[Allocation] = []
    with closing(PoolJournal(pool.journal, read_only=True)) as journal:
        for entry in journal.entries():
            held, due = _vms(entry.state)
            if not found or (found[-1].held, found[-1].due) != (held, due):
                found.append(Allocation(entry.at_s, held, due))
    return found[-MAX_MOMENTS:]


def _vms(state: PoolState) -> tuple[dict[str, int], dict[str, int]]:
    held = {name: sum(job.held) for name, job in state.jobs.items()}
    return held, {name: sum(job.target) for name, job in state.jobs.items()}


def report_page(pool: PoolDir) -> str:
    """Return a pool's report as HTML.

    Raises:
        PoolJournalError: The journal is missing or damaged.
    """
    document, changes = status(pool), allocations(pool)
    names = [job["name"] for job in document["jobs"]]
    until_s = _end_s(document)
    keys = [(f"box b{n % COLOURS}", name) for n, name in enumerate(names)]
    total = int(max(document["max_vms"], 1))
    pictures = [
        figure(
            title,
            _stacked(short, title, changes, names, which, total, until_s),
            *keys,
        )
        for short, title, which in (
            ("held", "VMs that each job held", "held"),
            ("due", "VMs that the policy gave each job", "due"),
        )
    ]
    columns = [
        *("job", "team", "state", "r:priority", "r:steps", "r:spent", "r:queued"),
        *("r:from submission to end", "deadline", "why"),
    ]
    rows = [list(_row(job, changes)) for job in document["jobs"]]
    return html_page(
        document["name"],
        f"<header><h1>pool {escape(document['name'])}</h1>"
        f'<p class="lead">{escape(_lead(document))}</p></header><main>',
        f"<h2>Over time</h2>{''.join(pictures)}",
        f"<h2>Jobs</h2>{table(columns, rows)}",
        f"</main><footer>Made {moment(time.time())} by spottrain "
        f"{escape(spottrain.__version__)} from the pool's journal.</footer>",
    )


def _lead(document: Mapping[str, Any]) -> str:
    return (
        f"{document['state']}; policy {document['policy']}, at most "
        f"{document['max_vms']:g} VMs; {dollars(document['usd_spent'])} of "
        f"{dollars(document['max_usd'])} spent by {len(document['jobs'])} jobs"
    )


def _end_s(document: Mapping[str, Any]) -> float:
    """Return when the pool's jobs had ended; now if they have not."""
    ends = [job["finish_s"] for job in document["jobs"]]
    if not ends or document["state"] != "down" or None in ends:
        return time.time()
    return float(max(ends))


def _row(job: Mapping[str, Any], changes: Sequence[Allocation]) -> Iterator[str]:
    started = (c.at_s for c in changes if c.held.get(job["name"]))
    first_s = next(started, None)
    is_over = job["state"] not in ("running", "starting", "queued", "paused")
    ended_s = job["finish_s"] if is_over else None
    yield from (job["name"], job["team"] or NOTHING, job["state"])
    yield f"{job['priority']:g}"
    yield NOTHING if job["steps"] is None else f"{job['steps_done']}/{job['steps']}"
    yield dollars(job["usd_spent"])
    yield duration(None if first_s is None else first_s - job["arrived_s"])
    yield duration(None if ended_s is None else ended_s - job["arrived_s"])
    yield {None: NOTHING, True: "kept", False: "late"}[job["deadline_kept"]]
    yield job["why"]


def _stacked(
    short: str,
    title: str,
    changes: Sequence[Allocation],
    names: Sequence[str],
    which: str,
    total: int,
    until_s: float,
) -> str:
    """Return the VMs of all jobs on top of each other, over time."""
    if not changes:
        return ""
    from_s = changes[0].at_s
    frame = plot.Frame(
        from_s=from_s, to_s=max(until_s, from_s + 1.0), top=total, height=190
    )
    step = max(1, total // 8)
    parts = [plot.axes(frame, [(n, str(n)) for n in range(0, total + 1, step)])]
    for number, name in enumerate(names):
        boxes = ""
        for change, end_s in _spans(changes, until_s):
            sizes: Mapping[str, int] = getattr(change, which)
            below = sum(sizes.get(other, 0) for other in names[:number])
            if (size := sizes.get(name, 0)) and end_s > change.at_s:
                left, right = frame.x(change.at_s), frame.x(end_s)
                top, bottom = frame.y(below + size), frame.y(below)
                boxes += f"M{left:.1f} {bottom:.1f}V{top:.1f}H{right:.1f}V{bottom:.1f}Z"
        parts.append(plot.path(boxes, f"box b{number % COLOURS}", name))
    what = f"{title}, from {moment(from_s)} on"
    return plot.picture(frame, short, title, what, parts)


def _spans(
    changes: Sequence[Allocation], until_s: float
) -> Iterator[tuple[Allocation, float]]:
    ends = [change.at_s for change in changes[1:]]
    yield from zip(changes, [*ends, until_s], strict=True)
