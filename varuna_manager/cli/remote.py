"""Commands on a job whose manager runs on a VM of its own: they run there, over SSH.

When that VM is gone, this machine reclaims the job: it restores the journal from the
checkpoint store and from then on has the job like any other.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from spottrain.cloud.port.provider import Offer, Vm, VmState
from spottrain.cloud.slurm.settings import HERE
from spottrain.cloud.ssh.transport.hosts import HostKeyError, UnfitHostError
from spottrain.errors import ConfigError, SpottrainError
from spottrain.varuna_manager.cli.console import say
from spottrain.varuna_manager.cli.watch import INTERRUPTED
from spottrain.varuna_manager.config.ssh import environment_of
from spottrain.varuna_manager.core.model.events import VmsListed
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import read_state, uid_of
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.manager_location import RemoteManager
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.replication import stored_job
from spottrain.varuna_manager.launch import control
from spottrain.varuna_manager.launch.manager import batch_job
from spottrain.varuna_manager.launch.manager import pod as manager_pod
from spottrain.varuna_manager.launch.manager import vm as manager_vm
from spottrain.varuna_manager.launch.providers import open_cloud
from spottrain.varuna_manager.launch.ssh_command import argv_to, ssh_program
from spottrain.varuna_manager.launch.submit import end_of

if TYPE_CHECKING:
    from spottrain.cloud.kubernetes.manager import ManagerPod

LOST = manager_vm.SSH_LOST
GONE_S = 180.0
"""How long the manager's VM may take to end after the job is over."""
COPIED_S = 30.0
"""How long the end of a job may take to reach its store."""
POLL_S = 1.0
_LASTING = {"--watch", "-w", "--follow", "-f"}


class ManagerVmError(SpottrainError):
    """The VM of a job's manager does not answer."""


def forward_command(job: JobDir, command: str) -> None:
    """Run a command on the VM of the job's manager; return if it must run on this
    machine, after all.

    Args:
        job: The job that the command is about.
        command: Its name; its arguments are those of this process.

    Raises:
        typer.Exit: It ran there; with its exit code.
        ConfigError: The launch was not completed.
        ManagerVmError: The VM exists but does not answer.
        CloudError: It is unknown whether the VM exists.
    """
    manager = manager_location.read(job)
    if manager is None:
        return
    if _is_batch_job_here(job):
        _forward_to_batch_job(job, command, manager)
        return
    if command == "down":
        _end_there(job, manager)
        return
    if not manager.started:
        _finish_launch(job, command)
    if command == "ssh":
        refresh(job)  # its VMs let this machine in as well
        return
    argv = sys.argv[1:]
    if "--html" in argv:
        raise ConfigError("--html: the page can be written only once the job has ended")
    code = run_there(job, manager, argv)
    ends = command == "stop" or bool(_LASTING.intersection(argv))
    if code == LOST and reclaim(job, manager) and command != "stop":
        return  # this machine has the job now
    if code != LOST and ends and code != INTERRUPTED:
        reclaim(job, manager, ended=True)
    if code == LOST:
        code = 0 if end_of(job) == "stopped" else _outcome(job)
    raise typer.Exit(code)


def begin(job: JobDir, offers: Sequence[Offer]) -> None:
    """Rent the VM of a job's manager and start the manager there.

    Args:
        job: The job as submitted here.
        offers: Offers of its cloud to train on.

    Raises:
        SpottrainError: As ``manager_vm.begin``; the user was told about the VM.
    """
    with launching(job):
        if not _begin_on_cluster(job):
            manager_vm.begin(job, offers, say)


def _begin_on_cluster(job: JobDir) -> bool:
    """Start the manager of a job on its cluster, if it is on one; return whether it is."""
    if (pod := manager_pod.pod_of(job)) is not None:
        manager_pod.start(job, pod, say)
        return True
    if (slurm := batch_job.slurm_of(job)) is None:
        return False
    if slurm.login == HERE:
        config = job.config()
        batch_job.start(job, environment_of(config.env, config.secrets), say)
    else:
        manager_vm.start_on_login_node(job, slurm, say)
    return True


@contextlib.contextmanager
def launching(job: JobDir) -> Iterator[None]:
    """Tell the user about a rented VM when its launch fails within the block.

    A VM that cannot be used is returned; otherwise the launch can be continued.
    """
    try:
        yield
    except (SpottrainError, KeyboardInterrupt) as error:
        useless = isinstance(error, UnfitHostError | HostKeyError)
        if not (useless and _give_up(job)):
            say(
                f"job {job.name}: the launch was not completed, and a VM may be rented: "
                f"'spottrain resume {job.name}' continues it, 'spottrain down "
                f"{job.name}' returns what it rented"
            )
        raise


def _give_up(job: JobDir) -> bool:
    """End a job and return what it rented; return whether that is done."""
    try:
        control.end_job(job)
    except SpottrainError as error:
        say(f"warning: {error}")
        return False
    manager_location.forget(job)
    say(f"job {job.name}: its VM cannot be used and was returned; fix the cause, then launch")
    return True


def watch(job: JobDir) -> int:
    """Watch until the job ends; return its exit code. Ctrl-C only stops watching."""
    manager = manager_location.read(job)
    assert manager is not None, "its manager was just started there"
    if _is_batch_job_here(job):
        return _watch_batch_job(job)
    code = run_there(job, manager, ["status", job.name, "--watch"])
    if code != INTERRUPTED:
        reclaim(job, manager, ended=code != LOST)
    return _outcome(job) if code == LOST else code


def _outcome(job: JobDir) -> int:
    """Return the exit code of a job, as far as it is known here."""
    outcome = read_state(job).outcome
    return ManagerVmError.exit_code if outcome is None else outcome.exit_code


def _finish_launch(job: JobDir, command: str) -> None:
    if command != "resume":
        raise ConfigError(
            f"job {job.name}: its launch was not completed: 'spottrain resume {job.name}' "
            f"continues it, 'spottrain down {job.name}' returns what it rented"
        )
    with launching(job):
        if not _begin_on_cluster(job):
            manager_vm.go_on(job, say)
    raise typer.Exit(0)


def _end_there(job: JobDir, manager: RemoteManager) -> None:
    """Have the manager end at once, if it can be reached, and reclaim the job."""
    if (slurm := batch_job.slurm_of(job)) is not None:
        code = run_there(job, manager, ["down", job.name, "--yes"])
        if code and manager.started:
            raise typer.Exit(code)
        manager_vm.clear_login_node(job, slurm)
    elif manager.started:
        run_there(job, manager, ["stop", job.name, "--now"])
    if (pod := manager_pod.pod_of(job)) is not None:
        pod.end()
    refresh(job)
    manager_location.forget(job)


def run_there(job: JobDir, manager: RemoteManager, argv: Sequence[str]) -> int:
    """Run one of our commands where the manager is; return its exit code, or ``LOST``."""
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if (pod := manager_pod.pod_of(job)) is not None:
        call = pod.argv(manager_pod.command_in_pod(argv), terminal=terminal)
        code = subprocess.run(call, check=False).returncode
        return LOST if code and pod.look() is None else code
    if (slurm := batch_job.slurm_of(job)) is not None:
        command = manager_vm.run_there(job, argv)
        call = manager_vm.login_argv(slurm.login, command, terminal=terminal)
    else:
        call = _call_to_vm(job, manager, argv, terminal=terminal)
    done = subprocess.run([ssh_program(), *call[1:]], check=False)
    return done.returncode if done.returncode >= 0 else LOST


def _call_to_vm(
    job: JobDir, manager: RemoteManager, argv: Sequence[str], *, terminal: bool
) -> list[str]:
    assert manager.target is not None, "the manager was started there"
    cloud = job.config().clouds[0]
    target = manager.target
    proxy = cloud.proxy_argv(manager.vm_id, target.port) if cloud.ssh_proxy else ()
    command = [manager_vm.run_there(job, argv)]
    _, *options = argv_to(job, target, job.cloud / "ssh_key", cloud.bastion, command, proxy)
    quiet = ["-o", "LogLevel=ERROR", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
    return ["ssh", *(["-t"] if terminal else []), *quiet, *options]


# --- A manager that is a batch job ----------------------------------------------------


def _is_batch_job_here(job: JobDir) -> bool:
    """Return whether a job's manager is a batch job that works on the folder here."""
    slurm = batch_job.slurm_of(job)
    return slurm is not None and slurm.login == HERE


def _forward_to_batch_job(job: JobDir, command: str, manager: RemoteManager) -> None:
    """As ``forward_command``: what does not reach a manager runs here, where its folder is."""
    if not manager.started and command != "down":
        _finish_launch(job, command)
    found = batch_job.find(job)
    if found is not None and batch_job.is_within(found):
        return
    if found is not None and found.state is VmState.RUNNING and command != "ssh":
        argv = ["stop", job.name, "--now"] if command == "down" else sys.argv[1:]
        code = run_in_batch_job(job, found.number, argv)
        if command != "down":
            raise typer.Exit(code)
    elif found is not None:
        waits = found.state is VmState.QUEUED
        does = f"waits in the queue: {found.why}" if waits else "is starting or ending"
        if command == "stop":
            raise ConfigError(
                f"job {job.name}: its manager {does}; wait for that, or end the job with "
                f"'spottrain down {job.name}'"
            )
        say(f"job {job.name}: its manager {does}")
    if command == "down":
        batch_job.end(job)
    if command == "down" or found is None:
        manager_location.forget(job)


def run_in_batch_job(job: JobDir, number: int, argv: Sequence[str]) -> int:
    """Run one of our commands in the batch job of a manager; return its exit code."""
    cli = [sys.executable, "-P", "-m", "spottrain.varuna_manager.cli.main", *argv]
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    step = batch_job.step_argv(number, cli, terminal=terminal)
    code = subprocess.run(step, check=False).returncode
    # The end of the manager ends its batch job, and this step with it.
    if code and (end := end_of(job)):
        return 0 if end == "stopped" else _outcome(job)
    return code


def _watch_batch_job(job: JobDir) -> int:
    found = batch_job.find(job)
    if found is None or found.state is not VmState.RUNNING:
        return _outcome(job) if end_of(job) else 0
    return run_in_batch_job(job, found.number, ["status", job.name, "--watch"])


# --- Reclaiming the job ---------------------------------------------------------------


def refresh(job: JobDir) -> State:
    """Copy new events of a job's journal from its checkpoint store, unless the journal here is the
    manager's own; return its state.

    Raises:
        StorageError: The store cannot be read.
    """
    if _is_batch_job_here(job):
        return read_state(job)
    stored = stored_job(job)
    with (
        contextlib.closing(Journal(job.journal)) as journal,
        contextlib.closing(Measurements(job.measurements)) as measured,
    ):
        if stored is not None:
            stored.fetch_journal(journal, measured, say)
        return journal.replay()


def reclaim(job: JobDir, manager: RemoteManager, *, ended: bool = False) -> bool:
    """Reclaim a job if the VM of its manager is gone; return whether it is.

    If the job is over, what its VMs shared is removed: the manager could not do so while
    its own VM used it.

    Args:
        manager: Where its manager ran.
        ended: The job is over: its manager is about to journal that.

    Raises:
        ManagerVmError: The VM exists but did not answer.
        CloudError: It is unknown whether it exists.
    """
    give_up_at_s = time.monotonic() + COPIED_S
    while not (over := refresh(job).phase is JobPhase.ENDED) and ended:
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(POLL_S)
    config = job.config()
    if (slurm := batch_job.slurm_of(job)) is not None:
        if not over:
            raise ManagerVmError(
                f"job {job.name}: the login node does not answer; try again in a few minutes"
            )
        manager_vm.clear_login_node(job, slurm)
        manager_location.forget(job)
        return True
    if (pod := manager_pod.pod_of(job)) is not None:
        return _reclaim_from_pod(job, pod, over=over)
    provider = open_cloud(config.clouds[0], uid=uid_of(job))
    try:
        give_up_at_s = time.monotonic() + GONE_S
        while manager.vm_id in (alive := _alive(vms := provider.list_vms(job.name))):
            if not over:
                raise ManagerVmError(
                    f"job {job.name}: its manager's VM ({manager.vm_id}) runs but does "
                    "not answer; try again in a few minutes"
                )
            if time.monotonic() > give_up_at_s:
                return False
            time.sleep(POLL_S)
        if over:
            _note_end(job, vms)
            if not alive:
                provider.release(job.name)
    finally:
        provider.close()
    _take_back(job, over=over)
    return True


def _take_back(job: JobDir, *, over: bool) -> None:
    manager_location.forget(job)
    if not over:
        url = job.config().checkpoint.path
        say(
            f"job {job.name}: the VM of its manager is gone; continue with 'spottrain "
            f"resume {job.name}' here, or 'spottrain resume {url}' on any machine"
        )


def _reclaim_from_pod(job: JobDir, pod: ManagerPod, *, over: bool) -> bool:
    give_up_at_s = time.monotonic() + GONE_S
    while pod.look() is not None:
        if not over:
            raise ManagerVmError(
                f"job {job.name}: its manager's pod ({pod.name}) runs but does not answer; try "
                "again in a few minutes"
            )
        if time.monotonic() > give_up_at_s:
            return False
        time.sleep(POLL_S)
    pod.end()
    _take_back(job, over=over)
    return True


def _alive(vms: Sequence[Vm]) -> set[str]:
    return {vm.vm_id for vm in vms if vm.state.is_alive}


def _note_end(job: JobDir, vms: Sequence[Vm]) -> None:
    """Journal when the billing of the manager's own VM ended."""
    with contextlib.closing(Journal(job.journal)) as journal:
        now_s = time.time()
        journal.record(VmsListed(at_s=now_s, asked_at_s=now_s, vms=tuple(vms)))
