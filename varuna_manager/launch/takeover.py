"""Resumes a job from its checkpoint store on a machine that does not have it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from contextlib import closing

from spottrain.errors import ConfigError
from spottrain.manifest import hash_file
from spottrain.units import counted
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.core.model.events import JobMoved, JobSubmitted
from spottrain.varuna_manager.core.model.state import State, spent_usd
from spottrain.varuna_manager.format import clock
from spottrain.varuna_manager.jobs import trust
from spottrain.varuna_manager.jobs.bucket import (
    Newest,
    StoredJob,
    StoredJobError,
    find_stored,
    folder_mark,
)
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.segments import Segment
from spottrain.varuna_manager.launch.changes import check_steps
from spottrain.varuna_manager.launch.submit import check_name


def take_over(
    url: str, say: Callable[[str], None], steps: int | None = None, trusted: str = ""
) -> JobDir:
    """Copy a job from its checkpoint store to this machine, ready for a manager.

    All of it or nothing. A manager that runs on another machine ends within seconds.

    Args:
        url: The job's ``checkpoint.path``; ``/job`` may follow.
        say: Called with messages: what was found and what is lost.
        steps: To train from now on, in all, if they change.
        trusted: Digest of what it may run, see ``trust``; that of a folder which this
            machine has of the job is trusted, too.

    Raises:
        ConfigError: There is no job, it has ended, this machine has it already, or it is
            not trusted.
        StorageError: The store cannot be read.
        StoredJobError: The copy is damaged from its first event.
    """
    url, found = find_stored(url)
    stored, job = StoredJob(url, found.uid), job_dir(found.name)
    if stored.is_down():
        raise ConfigError(f"{url}: job {job.name} has ended; launch it again")
    # Held to the end: the last process to claim the job must also be the one to place it.
    with job.name_lock():
        _check_here(job, stored, found.uid)
        with job.draft() as draft:
            stored.fetch(draft.path)
            _check_trusted(job, draft, stored, trusted, say)
            check_secrets(draft.config().secrets)
            state = _restore_journal(draft, stored, found, say, steps)
            if state.code_sha256 not in ("", hash_file(draft.workdir)):
                say(
                    "warning: the code in the store is not that of the newest update; "
                    "'resume --update-code' sends it"
                )
            job.place(draft)
    _say_state(job, state, say)
    return job


def _check_here(job: JobDir, stored: StoredJob, uid: str) -> None:
    """Check that this machine has neither the job nor another one of its name."""
    if not job.path.exists():
        return
    if job.is_managed():
        raise ConfigError(
            f"job {job.name} is running here; watch it with 'spottrain status {job.name} --watch'"
        )
    if not job.journal.exists() or uid_of(job) != uid:
        check_name(job.name)
        return
    _, newest = stored.newest_claim()
    if newest is not None and newest.folder == folder_mark(job):
        raise ConfigError(
            f"job {job.name} is on this machine, and no newer copy exists; continue it with "
            f"'spottrain resume {job.name}'"
        )


def _check_trusted(
    job: JobDir,
    draft: JobDir,
    stored: StoredJob,
    trusted: str,
    say: Callable[[str], None],
) -> None:
    """Check that the user knows what the job runs; show it where not."""
    is_here = job.journal.exists() and uid_of(job) == stored.uid
    if is_here and trust.digest_of(job) == trust.digest_of(draft):
        return
    try:
        trust.check(draft, stored.url, trusted)
    except ConfigError:
        say(f"{stored.url} would run, here and on VMs:")
        for line in trust.what_runs(draft.config()):
            say(f"  {line}")
        raise


def _restore_journal(
    draft: JobDir,
    stored: StoredJob,
    found: Newest,
    say: Callable[[str], None],
    steps: int | None,
) -> State:
    """Copy the journal here and claim the job.

    Most is read before the claim: an unreadable copy must not end a working manager.
    """
    warnings = dict[str, None]()
    with (
        closing(Journal(draft.journal)) as journal,
        closing(Measurements(draft.measurements)) as measured,
    ):
        stored.fetch_journal(journal, measured, warnings.setdefault)
        if not journal.last_seq():
            why = "; ".join(warnings) or "it is empty"
            raise StoredJobError(f"{stored.url}: the journal cannot be used: {why}")
        _check_whose(draft, stored, journal, found)
        state = journal.replay()
        _check_goes_on(stored, state, steps)
        journal.save_snapshot(journal.last_seq(), state)
        epoch = stored.claim(folder_mark(draft), take_over=True)
        stored.fetch_journal(journal, measured, warnings.setdefault)
        measured.await_blocks(stored.blocks())
        moved = JobMoved(at_s=time.time(), epoch=epoch, host=platform.node())
        state = journal.record(moved)
        last = journal.last_seq()
        # At once: what the previous manager writes from now on no longer counts.
        stored.put(Segment(last, last, epoch), journal.rows(last, last))
        say(f"{counted(last - 1, 'event')} found in {stored.url}, the last of {clock(state.now_s)}")
        if measured.pending():
            say("measurements of its mini-batches follow while the job runs")
    for line in warnings:
        say(f"warning: {line}")
    return state


def _check_whose(draft: JobDir, stored: StoredJob, journal: Journal, found: Newest) -> None:
    """Check that all files belong to the same job: its name and id become paths."""
    _, first = next(journal.read())
    same = isinstance(first, JobSubmitted) and first.settings.uid == found.uid
    if not same or draft.config().name != found.name:
        raise StoredJobError(f"{stored.url}: the files there do not all belong to job {found.name}")


def _check_goes_on(stored: StoredJob, state: State, steps: int | None) -> None:
    if steps is not None:
        check_steps(state, steps)
    elif state.outcome is not None and state.outcome.kind == "succeeded":
        raise ConfigError(
            f"{stored.url}: job {state.job.spec.name} has finished; its weights are there"
        )


def _say_state(job: JobDir, state: State, say: Callable[[str], None]) -> None:
    steps, spent = state.job.spec.steps, spent_usd(state, state.now_s)
    say(
        f"job {job.name}: {state.history.progress.step} of {steps} mini-batches, "
        f"{spent:.4f} USD spent"
    )
    say(
        "its keys are on the other machine: VMs that still run are returned and new ones "
        "rented; training continues from the newest checkpoint"
    )
