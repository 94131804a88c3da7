"""The state of a job for readers: its journal, folded read-only as it grows, and how far its
copy is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass

from spottrain.errors import SpottrainError
from spottrain.units import counted
from spottrain.varuna_manager.core.model.events import Event, JobSubmitted
from spottrain.varuna_manager.core.model.state import JobPhase, NoJobError, State
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event of a journal."""

    seq: int
    event: Event
    message: str
    """One line for people; empty if the event says nothing to them."""


class Follower:
    """The state of a job, brought up to date by ``advance``.

    Args:
        from_now: Leave out what has happened before; else begin with the first event.

    Raises:
        JournalError: The journal is missing or damaged.
    """

    def __init__(self, job: JobDir, *, from_now: bool = False) -> None:
        self._job = job
        self._journal = Journal(job.journal, read_only=True)
        self._seq = self._journal.last_seq() if from_now else 0
        self.state = self._journal.replay(self._seq)
        """The state after the newest event that was yielded."""
        self._measurements: Measurements | None = None
        self.message_at_s: float | None = None
        """When ``state.last_message`` happened."""

    def advance(self) -> Iterator[JournalEntry]:
        """Yield the events since the last call, each after it was folded."""
        for seq, step in self._journal.steps(self._seq, self.state):
            self._seq, self.state = seq, step.after
            message = step.after.last_message
            is_new = message != step.before.last_message
            if is_new:
                self.message_at_s = step.event.at_s
            yield JournalEntry(seq, step.event, message if is_new else "")

    def measurements(self) -> Measurements:
        """Return the job's measurements, to read them until ``close``."""
        if self._measurements is None:
            self._measurements = Measurements(self._job.measurements, read_only=True)
        return self._measurements

    @property
    def has_ended(self) -> bool:
        """True if the job is over and nothing is rented any more."""
        return self.state.phase is JobPhase.ENDED

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        if self._measurements is not None:
            self._measurements.close()


def uid_of(job: JobDir) -> str:
    """Return the unique id of a job.

    Raises:
        JournalError: Its journal cannot be read.
        NoJobError: It lacks the first event.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        _, event = next(journal.read(), (0, None))
    if isinstance(event, JobSubmitted):
        return event.settings.uid
    raise NoJobError


def folder_of(name: str, uid: str) -> JobDir:
    """Return the folder of a job that may have ended, and whose name another one may have.

    Args:
        name: That it has, or had: what follows a point is left out.
        uid: Its unique id; empty: not known.
    """
    if not uid:
        return job_dir(name)
    job = job_dir(name.partition(".")[0])
    for folder in (job, *map(JobDir, job.path.parent.glob(f"{job.name}.*"))):
        with suppress(SpottrainError):
            if uid_of(folder) == uid:
                return folder
    return job_dir(f"{job.name}.gone")


def read_state(job: JobDir) -> State:
    """Return the present state of a job.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        return journal.replay()


# --- How far the copy of the journal is ---------------------------------------------------

BEHIND_S = 60.0
"""A copy that lags for longer is reported to the user."""


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """Progress of the journal's copy; the manager keeps it in the job's folder."""

    seq: int
    """Number of the newest event in the store."""
    at_s: float
    """When the copy last held the whole journal, in seconds since the epoch."""
    trouble: str = ""
    """Why copying fails; empty if it works."""
    elsewhere: str = ""
    """Which machine has taken the job over; empty if none has."""

    def line(self, last_seq: int, at_s: float) -> str:
        """Return a line for people; empty unless the copy has lagged for a while.

        Args:
            last_seq: Number of the newest event here.
            at_s: Now, in seconds since the epoch.
        """
        if self.elsewhere:
            return self.elsewhere
        behind = last_seq - self.seq
        if behind <= 0 or at_s - self.at_s < BEHIND_S:
            return ""
        why = f": {self.trouble}" if self.trouble else ""
        return f"journal copied up to event {self.seq}, {counted(behind, 'event')} behind{why}"


def lag_line(job: JobDir, at_s: float) -> str:
    """Return a line for people if the copy of a job's journal lags; empty if not.

    Args:
        job: One with a journal.
        at_s: Now, in seconds since the epoch.

    Raises:
        JournalError: The journal cannot be read.
    """
    try:
        note = ReplicationStatus(**json.loads(job.copy_status.read_bytes()))
    except FileNotFoundError:
        return ""
    except (ValueError, TypeError):
        return f"{job.copy_status} is damaged: whether the journal's copy lags is unknown"
    return note.line(last_seq(job), at_s)


def last_seq(job: JobDir) -> int:
    """Return the number of the newest event in a job's journal.

    Raises:
        JournalError: The journal cannot be read.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        return journal.last_seq()
