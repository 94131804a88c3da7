"""How far the copy of a job's journal is, as its manager leaves it for ``status``."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal

BEHIND_S = 60.0
"""A copy that is behind for so long is told of."""


@dataclass(frozen=True, slots=True)
class ReplicationStatus:
    """How far the copy is, as a manager leaves it in the job's folder."""

    seq: int
    """Number of the newest event in the store."""
    at_s: float
    """When the copy last held the whole journal, in seconds since the epoch."""
    trouble: str = ""
    """Why it cannot go on; empty if it can."""
    elsewhere: str = ""
    """Who has taken the job over; empty if nobody has."""

    def told(self, last_seq: int, at_s: float) -> str:
        """Return one line for people; empty if the copy is not behind for long.

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
        return f"journal copied up to event {self.seq}, {behind} events behind{why}"


def told_of(job: JobDir, at_s: float) -> str:
    """Return one line about the copy of a job's journal if people must know of it.

    Args:
        job: One with a journal.
        at_s: Now, in seconds since the epoch.

    Raises:
        JournalError: The journal cannot be read.
    """
    try:
        note = ReplicationStatus(**json.loads(job.copy_note.read_text()))
    except FileNotFoundError:
        return ""
    return note.told(last_seq(job), at_s)


def last_seq(job: JobDir) -> int:
    """Return the number of the newest event in a job's journal.

    Raises:
        JournalError: The journal cannot be read.
    """
    journal = Journal(job.journal, read_only=True)
    try:
        return journal.last_seq()
    finally:
        journal.close()
