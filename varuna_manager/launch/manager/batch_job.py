"""``launch --manager-vm`` on Slurm: the manager is a batch job, and found again as one.

    python -P -m spottrain.varuna_manager.launch.manager.batch_job JOB_FOLDER

submits it; its input is one JSON object: the manager's environment. Nothing about the batch
job is kept on disk: its comment has the job's unique id. Login node and nodes share the job's
folder, so what does not ask the manager is read there whether it runs or not.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spottrain.cloud.port.provider import VmState
from spottrain.cloud.slurm import queue
from spottrain.cloud.slurm.login import Login
from spottrain.cloud.slurm.settings import SlurmSettings
from spottrain.database import SHARED
from spottrain.errors import SpottrainError
from spottrain.eventlog.folder import home
from spottrain.files import PRIVATE, write_whole
from spottrain.varuna_manager.config.slurm import SlurmConfig
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.manager_location import RemoteManager
from spottrain.varuna_manager.launch.asking import ManagerUnreachableError
from spottrain.varuna_manager.launch.submit import end_of

MANAGER = "spottrain-manager"
"""Tag of a manager's batch job: the unique id of its job."""
_LEAVE_S = 120
"""How long before its time limit the batch job is queued again."""
_LOOK_S = 1.0
_QUEUE_S = 20.0
"""How long a launch waits for a batch job that waits in the queue."""
_END_S = 180.0
"""How long a batch job may take to end: KillWait (slurm.conf) and an epilog."""
_KEEPER = (sys.executable, "-P", "-m", "spottrain.varuna_manager.daemon.watchdog")
_SCRIPT = """\
#!/bin/bash -l
{before}
set -a
. {environment}
set +a
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
{keeper} &
keeper=$!
until wait $keeper; code=$?; ! kill -0 $keeper 2>/dev/null; do :; done
exit $code
"""
"""A signal for which there is a trap ends a ``wait`` (bash(1), SIGNALS)."""

Say = Callable[[str], None]


def slurm_of(job: JobDir) -> SlurmConfig | None:
    """Return the section of a job's Slurm cluster, if it is on one."""
    cluster = job.config().cluster
    return cluster if isinstance(cluster, SlurmConfig) else None


def find(job: JobDir) -> queue.BatchJob | None:
    """Return the batch job of a job's manager, unless there is none or it has ended.

    Raises:
        CloudError: Slurm does not answer.
    """
    with contextlib.closing(_login(job)) as login:
        return _found(login, uid_of(job))


def start(job: JobDir, environment: Mapping[str, str], say: Say) -> None:
    """Submit the manager of a job, unless it is there; return once it serves, or waits.

    Safe to repeat: what has begun is recorded before it begins.

    Args:
        environment: Of the manager, secrets included; kept in a file of the user's alone.

    Raises:
        CloudError: Slurm refuses it, or does not answer.
        ManagerUnreachableError: It ended before it served.
    """
    manager_location.write(job, RemoteManager(requests=()))
    with contextlib.closing(_login(job)) as login:
        slurm, uid = slurm_of(job), uid_of(job)
        assert slurm is not None, "it was checked before the launch"
        if (found := _found(login, uid)) is not None:
            number = found.number
        else:
            said = login.run(_argv(slurm, job, uid), _script(slurm, job, environment))
            number = int(said.partition(";")[0])  # a cluster's name may follow
        _await(job, login, uid, number, say)
    manager_location.write(job, RemoteManager(requests=(), started=True))


def end(job: JobDir) -> None:
    """End the batch job of a job's manager; return when it has ended.

    Raises:
        CloudError: Slurm does not answer.
        ManagerUnreachableError: It does not end.
    """
    give_up_s = time.monotonic() + _END_S
    with contextlib.closing(_login(job)) as login:
        while (found := _found(login, uid_of(job))) is not None:
            if found.state is not VmState.STOPPING:
                login.run(["scancel", str(found.number)])
            if time.monotonic() > give_up_s:
                raise ManagerUnreachableError(
                    f"job {job.name}: its manager, batch job {found.number}, does not end; try "
                    "again in a few minutes"
                )
            time.sleep(_LOOK_S)


def step_argv(number: int, command: Sequence[str], *, terminal: bool) -> list[str]:
    """Return the command that runs another one within a batch job."""
    step = ["srun", "--overlap", f"--jobid={number}", "--nodes=1", "--ntasks=1", "--mem=0"]
    return [*step, *(["--pty"] if terminal else []), *command]


def is_within(found: queue.BatchJob) -> bool:
    """Return whether this process is in a batch job."""
    return os.environ.get("SLURM_JOB_ID") == str(found.number)


def _login(job: JobDir) -> Login:
    slurm = slurm_of(job)
    assert slurm is not None, "others have no batch jobs"
    return Login(slurm.settings())


def _found(login: Login, uid: str) -> queue.BatchJob | None:
    listed = queue.parse_queue(login.run(queue.QUEUE_ARGV), MANAGER)
    mine = (one for one in listed if one.tags[MANAGER] == uid)
    return next((one for one in mine if one.state is not VmState.TERMINATED), None)


def write_environment(job: JobDir, environment: Mapping[str, str]) -> str:
    """Write a manager's environment for a shell, with what makes it find this software and the
    job; return the file, as a word for that shell. It is the user's alone.

    Args:
        environment: Secrets included.
    """
    path = os.environ.get("PYTHONPATH")
    own = {"SPOTTRAIN_HOME": str(home()), **({"PYTHONPATH": path} if path else {})}
    lines = [f"{name}={shlex.quote(value)}\n" for name, value in {**environment, **own}.items()]
    file = job.path / "manager.env"
    write_whole(file, "".join(lines), mode=PRIVATE)
    return shlex.quote(str(file))


def keeper(job: JobDir) -> str:
    """Return the shell command that keeps the manager of a job running until the job ends."""
    return shlex.join([*_KEEPER, str(job.path), "--stay"])


def _argv(slurm: SlurmConfig, job: JobDir, uid: str) -> list[str]:
    settings = SlurmSettings(
        partitions=(),
        folder="",
        account=slurm.account,
        qos=slurm.qos,
        notice_s=_LEAVE_S,
        options=("--requeue", "--open-mode=append", *slurm.manager_sbatch),
    )
    name, partition = queue.name_of(f"manager-{job.name}"), slurm.manager_partition or ""
    return queue.launch_argv(settings, str(job.path), partition, name, {MANAGER: uid})


def _script(slurm: SlurmConfig, job: JobDir, environment: Mapping[str, str]) -> str:
    file = write_environment(job, {**environment, SHARED: "yes"})
    return _SCRIPT.format(before=slurm.before, environment=file, keeper=keeper(job))


def _await(job: JobDir, login: Login, uid: str, number: int, say: Say) -> None:
    give_up_s = time.monotonic() + _QUEUE_S
    while not (job.manager() or end_of(job)):
        if (found := _found(login, uid)) is None:
            raise ManagerUnreachableError(
                f"job {job.name}: its manager's batch job {number} ended: {_last_line(job, number)}"
            )
        if found.state is VmState.QUEUED and time.monotonic() > give_up_s:
            say(f"job {job.name}: its manager waits in the queue and begins by itself: {found.why}")
            return
        time.sleep(_LOOK_S)
    say(f"the manager of job {job.name} is batch job {number}")


def _last_line(job: JobDir, number: int) -> str:
    log = job.path / f"{number}.log"
    text = log.read_text(errors="replace").strip() if log.exists() else ""
    return text.rpartition("\n")[2] or "it printed nothing"


def main(argv: Sequence[str]) -> int:
    """Submit the manager of the job in folder ``argv[0]``; return 0 once that is done."""
    try:
        start(JobDir(Path(argv[0]).absolute()), json.load(sys.stdin), print)
    except SpottrainError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
