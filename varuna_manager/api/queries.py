"""What is known of a job, as plain data: for ``-o json`` and for Python.

It is read from the job's folder, and needs no manager. The status imports nothing that
only the others need: it must answer at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from spottrain.codec import to_data
from spottrain.errors import UserCodeError
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import Follower, JournalEntry, lag_line, read_state
from spottrain.varuna_manager.jobs.measurements import Measurements, Row
from spottrain.varuna_manager.reporting import documents
from spottrain.varuna_manager.reporting.measured import newest
from spottrain.varuna_manager.tracking.lines import COLUMNS, as_data

if TYPE_CHECKING:
    from spottrain.varuna_manager.reporting.history import JobHistory

POLL_S = 0.5
_METRICS = "metrics."
FINAL = ("succeeded", "failed")
"""Final states that ``down`` does not change."""


def status(job: JobDir) -> dict[str, Any]:
    """Return what ``spottrain status NAME -o json`` prints.

    Raises:
        JournalError: The job's journal cannot be read.
    """
    with closing(Measurements(job.measurements, read_only=True)) as measured:
        document = brief(job) | newest(job, measured)
    return document | {"journal_copy": lag_line(job, time.time())}


def brief(job: JobDir) -> dict[str, Any]:
    """Return a job's status without what it has measured; raises as ``status``."""
    managed = job.is_managed() or job.remote_manager_file.exists()
    return _named(job, documents.status(read_state(job), managed, time.time()))


def report(job: JobDir) -> dict[str, Any]:
    """Return what ``spottrain report NAME -o json`` prints; raises as ``status``."""
    return with_history(job, documents.report)[0]


def cost(job: JobDir) -> dict[str, Any]:
    """Return what ``spottrain cost NAME -o json`` prints; raises as ``status``."""
    return with_history(job, documents.cost)[0]


def with_history(
    job: JobDir, view: Callable[[State, JobHistory, bool, float], dict[str, Any]]
) -> tuple[dict[str, Any], State, JobHistory]:
    """Return a view of a job that needs its history, and what the view is made from."""
    from spottrain.varuna_manager.reporting.history import read_history

    state, history = read_history(job)
    document = view(state, history, job.is_managed(), time.time())
    return _named(job, document), state, history


def _named(job: JobDir, document: dict[str, Any]) -> dict[str, Any]:
    """Add what only the job's folder has."""
    document["name"] = job.name  # an ended job whose name was reused is kept as NAME.1
    if job.is_down and document["state"] not in FINAL:
        document["state"] = "down"
    return document


def entries(job: JobDir, *, follow: bool = False) -> Iterator[JournalEntry]:
    """Yield what is in a job's journal, oldest first.

    Args:
        follow: Go on until its manager ends.
    """
    with closing(Follower(job)) as follower:
        while True:
            managed = follow and job.is_managed()
            yield from follower.advance()
            if not managed:
                return
            time.sleep(POLL_S)


def event(entry: JournalEntry) -> dict[str, Any]:
    """Return an event as ``spottrain events NAME -o json`` prints it."""
    kind = type(entry.event).__name__
    return {"seq": entry.seq, "kind": kind, "message": entry.message, **to_data(entry.event)}


def row_names(metrics: Iterable[str]) -> list[str]:
    """Return the names of all columns of ``flat_row``.

    Args:
        metrics: Names of the user's own.
    """
    return [*COLUMNS, *(_METRICS + name for name in metrics)]


def flat_row(row: Row) -> dict[str, Any]:
    """Return what was measured, by the name of its column."""
    data = as_data(row)
    metrics = data.pop("metrics")
    return data | {_METRICS + name: value for name, value in metrics.items()}


OF_EVALUATIONS = ("step", "set", "loss", "is_best", "generation", "at_s")
OF_MINIBATCHES = tuple(name for name in COLUMNS if name not in ("kind", "set", "is_best"))


def columns(rows: Iterable[Row], names: Iterable[str]) -> dict[str, list[Any]]:
    """Return what was measured in columns of one length; ``None`` where it is unknown.

    Args:
        rows: All of one kind.
        names: The columns that there are without rows, too; those of the user's metrics
            follow.
    """
    flat = [flat_row(row) for row in rows]
    metrics = sorted({name for row in flat for name in row if name.startswith(_METRICS)})
    return {name: [row.get(name) for row in flat] for name in (*names, *metrics)}


def how_to_fix(state: State) -> str:
    """Return how a job goes on whose user code failed; empty where that is not why it ended."""
    outcome, newest_one = state.outcome, state.newest_checkpoint
    if outcome is None or outcome.exit_code != UserCodeError.exit_code or newest_one is None:
        return ""
    return (
        f"the state of step {newest_one.step} is saved: once the code is fixed, "
        f"'spottrain resume {state.job.spec.name} --update-code' continues from there"
    )
