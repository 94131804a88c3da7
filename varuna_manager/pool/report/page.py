"""The report of a pool as an HTML page: who had which VMs when, and what came of it.

The allocation over time is drawn as in VirtualFlow's Figure 11.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from html import escape
from typing import Any, NamedTuple

import spottrain
from spottrain.units import counted
from spottrain.varuna_manager.format import NOTHING, dollars, duration
from spottrain.varuna_manager.pool.core.model import Vms
from spottrain.varuna_manager.pool.report.document import status
from spottrain.varuna_manager.pool.report.tables import spent
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.varuna_manager.pool.store.journal import PoolJournal
from spottrain.varuna_manager.reporting.html.allocations import Allocation, drawing
from spottrain.varuna_manager.reporting.html.page import (
    figure,
    html_page,
    moment,
    table,
)
from spottrain.varuna_manager.reporting.text import RowsTable

MAX_MOMENTS = 2000
"""Changes that are drawn; of more the last ones."""


class Division(NamedTuple):
    """How a pool's VMs were divided from a point in time on; VMs by supply, by job."""

    at_s: float
    held: Mapping[str, Vms]
    due: Mapping[str, Vms]
    """What the policy had decided on."""


_Identity = tuple[str, float]
"""The name that a job had at first, and when it arrived: one that has ended gets another name
when its own is used again."""
_ByJob = dict[_Identity, Vms]


def divisions(pool: PoolDir) -> list[Division]:
    """Return how a pool's VMs were divided, whenever that changed.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    found: list[tuple[float, _ByJob, _ByJob]] = []
    names: dict[_Identity, str] = {}
    with closing(PoolJournal(pool.journal, read_only=True)) as journal:
        for _, step in journal.steps():
            jobs = {
                (name.partition(".")[0], job.arrived_s): job
                for name, job in step.after.jobs.items()
            }
            names = dict(zip(jobs, step.after.jobs, strict=True))
            held = {one: job.held for one, job in jobs.items()}
            due = {one: job.target for one, job in jobs.items()}
            if not found or found[-1][1:] != (held, due):
                found.append((step.event.at_s, held, due))

    def named(vms: _ByJob) -> dict[str, Vms]:
        return {names[one]: of_job for one, of_job in vms.items()}

    return [Division(at_s, named(held), named(due)) for at_s, held, due in found[-MAX_MOMENTS:]]


def report_page(pool: PoolDir) -> str:
    """Return a pool's report as HTML.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    document, changes = status(pool), divisions(pool)
    jobs = jobs_table(document, changes)
    return html_page(
        document["name"],
        f"<header><h1>pool {escape(document['name'])}</h1>"
        f'<p class="lead">{escape(lead(document))}</p></header><main>',
        f"<h2>Over time</h2>{pictures(document, changes)}",
        f"<h2>Jobs</h2>{table(jobs.columns, jobs.rows)}",
        f"</main><footer>Made {moment(time.time())} by spottrain "
        f"{escape(spottrain.__version__)} from the pool's journal.</footer>",
    )


def pictures(document: Mapping[str, Any], changes: Sequence[Division]) -> str:
    """Return who had which VMs of a pool when, as HTML.

    Args:
        document: From ``document.status``.
        changes: From ``divisions``.
    """
    until_s = _end_s(document)
    return "".join(
        figure(title, _drawn(document, changes, which, until_s))
        for title, which in (
            ("VMs that each job held", "held"),
            ("VMs that the policy gave each job", "due"),
        )
    )


def jobs_table(document: Mapping[str, Any], changes: Sequence[Division]) -> RowsTable:
    """Return what came of each job; arguments as of ``pictures``."""
    columns = [
        *("job", "team", "state", "r:priority", "r:steps", "r:spent", "r:queued"),
        *("r:from submission to end", "deadline", "why"),
    ]
    return RowsTable("Jobs", columns, [list(_row(job, changes)) for job in document["jobs"]])


def lead(document: Mapping[str, Any]) -> str:
    """Return the state of a pool in a line."""
    return (
        f"{document['state']}; policy {document['policy']}, at most "
        f"{counted(int(document['max_vms']), 'VM')}; {spent(document)} by "
        f"{counted(len(document['jobs']), 'job')}"
    )


def _end_s(document: Mapping[str, Any]) -> float:
    """Return when the pool's jobs had ended; now if they have not."""
    ends = [job["finish_s"] for job in document["jobs"]]
    if not ends or document["state"] != "down" or None in ends:
        return time.time()
    return float(max(ends))


def _row(job: Mapping[str, Any], changes: Sequence[Division]) -> Iterator[str]:
    started = (c.at_s for c in changes if any(c.held.get(job["name"], ())))
    first_s = next(started, None)
    is_over = job["state"] not in ("running", "ending", "starting", "queued", "paused")
    ended_s = job["finish_s"] if is_over else None
    yield from (job["name"], job["team"] or NOTHING, job["state"])
    yield f"{job['priority']:g}"
    yield NOTHING if job["steps"] is None else f"{job['steps_done']}/{job['steps']}"
    yield dollars(job["usd_spent"])
    yield duration(None if first_s is None else first_s - job["arrived_s"])
    yield duration(None if ended_s is None else ended_s - job["arrived_s"])
    yield {None: NOTHING, True: "kept", False: "late"}[job["deadline_kept"]]
    yield job["why"]


def _drawn(
    document: Mapping[str, Any],
    changes: Sequence[Division],
    which: str,
    until_s: float,
) -> str:
    """Return the VMs of all jobs over time."""
    if not changes:
        return ""
    from_s = changes[0].at_s
    kinds = [(kind["name"], kind["vms"]) for kind in document["kinds"]]
    found = []
    for name in dict.fromkeys(job["name"] for job in document["jobs"]):
        for k, (kind, vms) in enumerate(kinds):
            sizes = []
            for change in changes:
                of_job: Mapping[str, Vms] = getattr(change, which)
                size = of_job[name][k] if name in of_job else 0
                sizes.append((change.at_s - from_s, min(size, vms)))
            found.append(Allocation(name, kind, tuple(sizes)))
    return drawing(kinds, found, until_s - from_s, is_alone=False)
