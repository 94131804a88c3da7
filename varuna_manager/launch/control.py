"""Actions on an existing job: stop it, resume it, change its limits, end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import (
    CloudProvider,
    VmState,
)
from spottrain.codec import to_data
from spottrain.errors import ConfigError, SpottrainError
from spottrain.varuna_manager.config.ssh import check_secrets
from spottrain.varuna_manager.core.launches import SETTLE_S
from spottrain.varuna_manager.core.model.events import (
    FromScratchRequested,
    GrantReceived,
    LimitsChanged,
    StopRequested,
    VmsListed,
)
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.launch import data as job_data
from spottrain.varuna_manager.launch.asking import (
    ANSWER_S,
    POLL_S,
    ManagerUnreachableError,
    ask,
    request_stop,
)
from spottrain.varuna_manager.launch.limits import LimitsRefusedError
from spottrain.varuna_manager.launch.limits import check as check_limits
from spottrain.varuna_manager.launch.machines import ShutsDown, live_vms, open_provider
from spottrain.varuna_manager.launch.submit import (
    can_be_resumed,
)

END_S = 30.0
"""How long a manager may take to return its VMs when it must end at once."""
LIST_S = 5.0
"""Between two lists of a cloud that may still begin VMs."""


def change_limits(job: JobDir, limits: tuple[Limit, ...], *, sure: bool) -> None:
    """Change the limits of a job, with or without a running manager.

    Args:
        job: A job that has not ended for good.
        sure: Change them even if that ends the job.

    Raises:
        ConfigError: The job has ended for good.
        LimitsRefusedError: It would end the job, and ``sure`` is not set.
        ManagerUnreachableError: The manager does not answer.
    """
    if job.is_managed():
        request = {"limits": [asdict(limit) for limit in limits], "sure": sure}
        ask(job, "limits", request, LimitsRefusedError)
        return
    if not can_be_resumed(job):
        raise ConfigError(
            f"job {job.name} has ended, its limits cannot be changed; see 'spottrain "
            f"report {job.name}'"
        )
    with manager_lock(job), contextlib.closing(Journal(job.journal)) as journal:
        event = LimitsChanged(at_s=time.time(), by="command line", limits=limits)
        if not sure:
            check_limits(journal.replay(), event)
        journal.record(event)


def allow_from_scratch(job: JobDir) -> None:
    """Let a job without a manager begin again if no checkpoint of it can be used.

    Raises:
        ManagerUnreachableError: Its manager runs.
    """
    with manager_lock(job), contextlib.closing(Journal(job.journal)) as journal:
        journal.record(FromScratchRequested(at_s=time.time(), by="command line"))


def give_grant(job: JobDir, grant: PoolGrant) -> None:
    """Tell a job what its pool grants it, with or without a running manager.

    Raises:
        ManagerUnreachableError: The manager does not answer, or is still starting.
        JournalError: The journal of a job without a manager cannot be written.
    """
    if job.is_managed():
        ask(job, "grant", to_data(grant))
        return
    with manager_lock(job), contextlib.closing(Journal(job.journal)) as journal:
        journal.record(GrantReceived(at_s=time.time(), grant=grant))


def return_vms(job: JobDir) -> int:
    """Return all VMs of a job without a manager; it can be resumed.

    Returns:
        VMs that still run: clouds have not ended them yet.

    Raises:
        CloudError: A cloud refuses, or does not answer.
    """
    with manager_lock(job):
        provider, asked_at_s = open_provider(job), time.time()
        provider.terminate([vm.vm_id for vm in live_vms(provider, job)])
        vms = tuple(provider.list_vms(job.name))
        with contextlib.closing(Journal(job.journal)) as journal:
            listed = VmsListed(at_s=time.time(), asked_at_s=asked_at_s, vms=vms)
            journal.record(listed)
        provider.close()
    return sum(vm.state is not VmState.TERMINATED for vm in vms)


def stop_job(job: JobDir, *, now: bool, by: str = "command line") -> None:
    """Ask a running job to checkpoint and return its VMs; ``by`` says who asks.

    Raises:
        ConfigError: The job has no running manager.
        ManagerUnreachableError: The manager does not answer.
    """
    if not job.is_managed():
        raise ConfigError(
            f"job {job.name} has no running manager; return what it still rents "
            f"with 'spottrain down {job.name}', or 'spottrain resume {job.name}' first"
        )
    request_stop(job, checkpoint=not now, now=now, by=by)


def resume_job(job: JobDir) -> subprocess.Popen[bytes]:
    """Start the manager of a job again; it finds the VMs that still run.

    Raises:
        ConfigError: The job runs, has ended for good, is a pool's, or this machine does not compute
            as it did so far.
        JournalError: Its journal is damaged: no manager is started over it.
    """
    if job.is_managed():
        raise ConfigError(
            f"job {job.name} is running; watch it with 'spottrain status {job.name} --watch'"
        )
    if not can_be_resumed(job):
        raise ConfigError(
            f"job {job.name} has ended; see 'spottrain report {job.name}', and launch "
            "it again to start over"
        )
    state = read_state(job)
    if (grant := state.job.grant) is not None:
        raise ConfigError(
            f"job {job.name} is in pool {grant.pool}: "
            f"'spottrain pool resume {grant.pool} {job.name}' continues it"
        )
    # Not above: it imports the clouds, which most commands do without.
    from spottrain.varuna_manager.launch.preflight import check_kernels

    config = job.config()
    check_kernels(config, state.launches.kernels)
    check_secrets(config.secrets)
    os.environ.update(config.env)
    if config.resources.provider == "local":
        job_data.ensure_data(config)
    return job.start()


def end_job(job: JobDir, say: Callable[[str], None] = lambda _: None) -> int:
    """End a job for good and return everything that it rents.

    Works without a manager, with a stuck manager and with a damaged journal.

    Args:
        say: Called with progress messages.

    Returns:
        How many VMs had to be returned after the manager was gone.

    Raises:
        FencedError: Another machine has taken the job over, with these VMs.
        CloudError: The cloud still lists VMs as running afterwards.
    """
    # Not above: no other command uses it.
    from spottrain.varuna_manager.jobs import replication

    replication.check_here(job)
    if job.is_managed():
        _end_manager(job)
    with manager_lock(job):
        provider = open_provider(job)
        asked_at_s = time.time()
        returned = _return_all(provider, job, say)
        provider.release(job.name)
        if isinstance(provider, ShutsDown):
            provider.shut_down()
        if left := [vm.vm_id for vm in live_vms(provider, job)]:
            raise CloudError(
                f"job {job.name}: VMs are still running after their termination: {', '.join(left)}; "
                f"run 'spottrain down {job.name}' again"
            )
        with contextlib.suppress(SpottrainError):  # a damaged journal must not cost money
            _journal_end(job, asked_at_s, provider)
        provider.close()
        job.mark_down()
        with contextlib.suppress(SpottrainError):  # nothing is rented, here or there
            replication.end_replication(job)
    return returned


def _return_all(provider: CloudProvider, job: JobDir, say: Callable[[str], None]) -> int:
    """Return a job's VMs, also those of launches whose answer its manager never had.

    Returns:
        How many there were.
    """
    returned = _return_live(provider, job)
    # One that can be shut down begins nothing afterwards.
    if isinstance(provider, ShutsDown) or not _may_be_renting(job):
        return returned
    say(f"VMs were being rented: waiting {SETTLE_S:g} s for any that still come")
    until_s, is_last = time.monotonic() + SETTLE_S, False
    while not is_last:
        time.sleep(LIST_S)
        is_last = time.monotonic() >= until_s
        returned += _return_live(provider, job)
    return returned


def _return_live(provider: CloudProvider, job: JobDir) -> int:
    live = live_vms(provider, job)
    provider.terminate([vm.vm_id for vm in live])
    return len(live)


def _may_be_renting(job: JobDir) -> bool:
    """Return whether VMs were asked for without an answer; so they may, if the journal is
    damaged."""
    try:
        with contextlib.closing(Journal(job.journal, read_only=True)) as journal:
            return bool(journal.replay().launches.intents)
    except SpottrainError:
        return True


def _end_manager(job: JobDir) -> None:
    """Ask the manager to end at once; kill it when it does not, or is still starting."""
    with contextlib.suppress(SpottrainError):  # no answer, or a damaged identity
        request_stop(job, checkpoint=False, now=True)
        deadline = time.monotonic() + END_S
        while job.is_managed() and time.monotonic() < deadline:
            time.sleep(POLL_S)
    deadline = time.monotonic() + ANSWER_S
    while job.is_managed() and time.monotonic() < deadline:
        _kill_manager(job)
        time.sleep(POLL_S)


def _kill_manager(job: JobDir) -> None:
    """Kill the manager that holds the job's lock, and no other process.

    The pid in the lock is of a manager that was killed until the next one, which holds
    the lock already, has written its own: it may be anybody's by then.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(ValueError, OSError))
        pid = int(job.lock.read_bytes())
        if sys.platform == "linux":
            # Opened before the checks: it stays theirs, whoever has the pid later.
            pidfd = os.pidfd_open(pid)
            stack.callback(os.close, pidfd)
            if job.is_managed() and _manages(pid, job):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        elif job.is_managed() and _manages(pid, job):
            os.kill(pid, signal.SIGKILL)


def _manages(pid: int, job: JobDir) -> bool:
    """Return whether a process was started for the folder of a job, as managers are."""
    if sys.platform == "linux":
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    else:
        ps = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        arguments = subprocess.run(ps, stdout=subprocess.PIPE, check=False).stdout
    return b" %s " % os.fsencode(job.path) in b" %s " % arguments.strip()


def manager_lock(job: JobDir) -> contextlib.AbstractContextManager[None]:
    """Hold the manager's lock, so that no manager can start."""
    refusal = ManagerUnreachableError(
        f"job {job.name}: its manager does not exit; kill the process by hand"
    )
    return job.locked(refusal, ANSWER_S, as_process=False)


def _journal_end(job: JobDir, asked_at_s: float, provider: CloudProvider) -> None:
    """Journal that the job was ended and its VMs are gone."""
    with contextlib.closing(Journal(job.journal)) as journal:
        if journal.replay().phase is not JobPhase.ENDED:
            stop = StopRequested(at_s=time.time(), by="spottrain down", checkpoint=False, now=True)
            vms = tuple(provider.list_vms(job.name))
            listed = VmsListed(at_s=time.time(), asked_at_s=asked_at_s, vms=vms)
            journal.record(stop, listed)
