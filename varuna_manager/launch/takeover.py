"""A job goes on from its checkpoint store, on a machine that knows nothing of it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable

from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.core.model.events import JobMoved, JobSubmitted
from spottrain.varuna_manager.core.model.state import State, spent_usd
from spottrain.varuna_manager.format import clock
from spottrain.varuna_manager.jobs.bucket import (
    Newest,
    StoredJob,
    StoredJobError,
    folder_mark,
    newest_job,
)
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.replication import uid_of
from spottrain.varuna_manager.jobs.segments import Segment
from spottrain.varuna_manager.launch.submit import (
    archive,
    check_name,
    draft_of,
    placing,
)

_FOLDER = "/job"
"""Where a job lies in its store; a URL may end with it or not."""


def take_over(url: str, say: Callable[[str], None]) -> JobDir:
    """Put a job from its checkpoint store on disk here, ready for a manager.

    Whole, or not at all. A manager that still runs elsewhere ends itself within seconds.

    Args:
        url: The job's ``checkpoint.path``; ``/job`` may follow.
        say: Told in lines what was found, and what is lost.

    Raises:
        ConfigError: No job is there, it is over, or this machine has it already.
        StorageError: The store cannot be read.
        StoredJobError: The copy is damaged from its beginning.
    """
    url, found = _find(url)
    stored, job = StoredJob(url, found.uid), job_dir(found.name)
    if stored.is_down():
        raise ConfigError(f"{url}: job {job.name} has been ended: launch it again")
    # To its end: whoever claims the job last must also be the one who has it here.
    with placing(job):
        _check_here(job, stored, found.uid)
        with draft_of(job) as draft:
            stored.fetch(draft.path)
            check_secrets(draft.config().secrets)
            state = _restore_journal(draft, stored, found, say)
            archive(job)
            draft.path.rename(job.path)
    _say_state(job, state, say)
    return job


def _find(url: str) -> tuple[str, Newest]:
    """Return the place of a job, and which one it is."""
    place, mark, options = url.partition("?")
    above = place.rstrip("/").removesuffix(_FOLDER) + mark + options
    for where in dict.fromkeys((url, above)):
        if (found := newest_job(where)) is not None:
            return where, found
    raise ConfigError(
        f"{url}: no job's journal is there: give the checkpoint.path of a job; its "
        "journal is copied if that is a URL"
    )


def _check_here(job: JobDir, stored: StoredJob, uid: str) -> None:
    """Check that this machine does not have the job, or another one of its name."""
    if not job.path.exists():
        return
    if job.is_managed():
        raise ConfigError(
            f"job {job.name} is running here; watch it with 'spottrain status "
            f"{job.name} --watch'"
        )
    if not job.journal.exists() or uid_of(job) != uid:
        check_name(job.name)
        return
    _, newest = stored.newest_claim()
    if newest is not None and newest.folder == folder_mark(job):
        raise ConfigError(
            f"job {job.name} is on this machine, and nowhere newer: go on with "
            f"'spottrain resume {job.name}'"
        )


def _restore_journal(
    draft: JobDir, stored: StoredJob, found: Newest, say: Callable[[str], None]
) -> State:
    """Copy the journal here and become the one who manages the job.

    Most is read before the claim: what cannot be read must not end a manager that works.
    """
    told = dict[str, None]()
    journal = Journal(draft.journal)
    try:
        for rows in stored.journal(told.setdefault):
            journal.take_over(rows)
        if not journal.last_seq():
            why = "; ".join(told) or "it is empty"
            raise StoredJobError(f"{stored.url}: the journal cannot be used: {why}")
        _check_whose(draft, stored, journal, found)
        _check_goes_on(stored, journal.replay())
        epoch = stored.claim(folder_mark(draft), take_over=True)
        for rows in stored.journal(told.setdefault, journal.last_seq() + 1):
            journal.take_over(rows)
        state = journal.replay()
        moved = JobMoved(at_s=time.time(), epoch=epoch, host=platform.node())
        last = journal.append(moved)
        # At once: whatever the manager before writes from now on counts no more.
        stored.put(Segment(last, last, epoch), journal.rows(last, last))
        say(f"{last - 1} events in {stored.url}, the last of {clock(state.now_s)}")
    finally:
        journal.close()
    for line in told:
        say(f"warning: {line}")
    return state


def _check_whose(
    draft: JobDir, stored: StoredJob, journal: Journal, found: Newest
) -> None:
    """Check that all of the job is the same job's: names and ids become paths."""
    _, first = next(journal.read())
    same = isinstance(first, JobSubmitted) and first.settings.uid == found.uid
    if not same or draft.config().name != found.name:
        raise StoredJobError(
            f"{stored.url}: what lies there is not all of job {found.name}: it is damaged"
        )


def _check_goes_on(stored: StoredJob, state: State) -> None:
    if state.outcome is not None and state.outcome.kind == "succeeded":
        raise ConfigError(
            f"{stored.url}: job {state.job.spec.name} is done: its weights are there"
        )


def _say_state(job: JobDir, state: State, say: Callable[[str], None]) -> None:
    steps, spent = state.job.spec.steps, spent_usd(state, state.now_s)
    say(
        f"job {job.name}: {state.progress.step} of {steps} mini-batches, "
        f"{spent:.4f} USD spent"
    )
    say(
        "its keys stayed behind: VMs that still run are returned and others rented; it "
        "goes on from the newest checkpoint, what was trained since is trained again"
    )
