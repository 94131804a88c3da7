"""The state of a job for readers: its journal, folded read-only as it grows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.replay.fold import Fold


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One event of a journal."""

    seq: int
    event: Event
    news: str
    """One line for people; empty if the event is no news to them."""


class Follower:
    """The state of a job, brought up to date by ``advance``.

    Args:
        job: Whose.
        from_now: Leave out what has happened before; else begin with the first event.

    Raises:
        JournalError: The journal is missing or damaged.
    """

    def __init__(self, job: JobDir, *, from_now: bool = False) -> None:
        self._journal = Journal(job.journal, read_only=True)
        self._seq = 0
        self._fold = Fold()
        if from_now:
            self._seq = self._journal.last_seq()
            self._fold = Fold(self._journal.replay(self._seq))
        self.news_at_s: float | None = None
        """When ``state.last_news`` happened."""

    def advance(self) -> Iterator[JournalEntry]:
        """Yield the events since the last call, each after it was folded."""
        for seq, (first, *more) in self._journal.steps(self._fold, self._seq):
            self._seq = seq
            news = (more or [first])[-1].after.last_news
            is_new = news != first.before.last_news
            if is_new:
                self.news_at_s = first.event.at_s
            yield JournalEntry(seq, first.event, news if is_new else "")

    @property
    def state(self) -> State:
        """The state after the newest event that was yielded."""
        return self._fold.state

    def measurements(self) -> Measurements:
        """Return the job's measurements, to read them until ``close``."""
        return self._journal.measurements()

    @property
    def has_ended(self) -> bool:
        """True if the job is over and nothing is rented any more."""
        return self.state.phase is JobPhase.ENDED

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def read_story(job: JobDir, after_seq: int = 0) -> Iterator[JournalEntry]:
    """Yield the events of a job's journal numbered above ``after_seq``.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        for entry in journal.story(after_seq):
            yield JournalEntry(*entry)


def read_state(job: JobDir) -> State:
    """Return the present state of a job.

    Raises:
        JournalError: The journal is missing or damaged.
    """
    with closing(Journal(job.journal, read_only=True)) as journal:
        return journal.replay()
