"""What changes jobs, for the command line and for Python: launch, resume; and how jobs end."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from typing import NamedTuple

from spottrain.cloud.port.provider import Offer
from spottrain.errors import ConfigError, SpottrainError
from spottrain.storage.store import is_url
from spottrain.units import counted
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.format import size
from spottrain.varuna_manager.jobs import trust
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.launch import control, submit
from spottrain.varuna_manager.launch.changes import Changes, change

Say = Callable[[str], None]


class ManagerGoneError(SpottrainError):
    """The manager is gone, and the job has not ended."""


class Submitted(NamedTuple):
    """A job that lacks only its manager."""

    job: JobDir
    offers: Sequence[Offer] | None
    """Of its clouds; None: the job file names machines."""


def submit_checked(
    config: JobConfig, say: Say, *, on_vm: bool = False, adopt: bool = False
) -> Submitted:
    """Run all checks of a launch and put the job on disk.

    Args:
        say: Called with lines for people.
        on_vm: Its manager will run on a VM of its own.
        adopt: It takes over the checkpoints of another job.

    Raises:
        SpottrainError: It cannot be launched; the first thing that is missing.
    """
    # Not above: they import the planner, which nothing else here needs.
    from spottrain.varuna_manager.offers.checks import check_all
    from spottrain.varuna_manager.offers.feasibility import check_deadline

    checked = check_all(config, say, on_vm=on_vm, adopt=adopt)
    config, facts, offers = checked.config, checked.facts, checked.offers
    if forecast := check_deadline(config, facts, offers, say):
        say(forecast)
    job, packed_bytes = submit.submit(config, facts, checked.data_bytes, say, adopt=adopt)
    say(
        f"{facts.num_parameters:,} parameters in {counted(len(facts.sections), 'section')}; "
        f"workdir packed: {size(packed_bytes)}"
    )
    return Submitted(job, offers)


def resume(
    name: str, changes: Changes, say: Say, *, from_scratch: bool = False, trusted: str = ""
) -> tuple[JobDir, subprocess.Popen[bytes]]:
    """Start the manager of a job again, after changes.

    Args:
        name: Of the job, or the URL of its checkpoints.
        changes: What is different from now on.
        say: Called with lines for people.
        from_scratch: It may begin again if no checkpoint of it can be used.
        trusted: With a URL: the digest of what the job may run.

    Returns:
        The job and its manager's process, which may still be starting.

    Raises:
        SpottrainError: It cannot be resumed, or not with these changes.
    """
    if trusted and not is_url(name):
        raise ConfigError("--trust: goes with the URL of a job's checkpoints")
    if changes.workdir is not None and not changes.code:
        raise ConfigError("--workdir: goes with --update-code")
    if is_url(name):
        # Not above: no other command uses it.
        from spottrain.varuna_manager.launch.takeover import take_over

        job = take_over(name, say, changes.steps, trusted)
    else:
        job = find(name)
    if changes:
        change(job, changes, say)
    if changes.code or is_url(name):
        say_how_to_move(job, say)
    if from_scratch:
        control.allow_from_scratch(job)
    return job, control.resume_job(job)


def say_how_to_move(job: JobDir, say: Say) -> None:
    """Say how a job goes on on another machine, if its checkpoints can be read there."""
    path = job.config().checkpoint.path
    if path is not None and is_url(path):
        say(f"on another machine: {trust.how_to_move(job)}")


def outcome_of(job: JobDir, state: State) -> Outcome:
    """Return how a job ended that has no manager any more.

    Raises:
        ManagerGoneError: It has not ended.
    """
    if state.phase is JobPhase.ENDED and state.outcome is not None:
        return state.outcome
    name = job.name
    raise ManagerGoneError(
        f"job {name}: its manager is gone; VMs keep training until their lease ends: "
        f"'spottrain resume {name}' continues, 'spottrain down {name}' returns "
        f"the VMs, 'spottrain logs {name}' may say why"
    )
