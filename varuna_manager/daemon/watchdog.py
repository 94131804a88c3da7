"""Keeps a job's manager running on its own VM, and ends that VM when the job ends.

    python -m spottrain.varuna_manager.daemon.watchdog <job_dir>

Its input is one JSON object: the manager's environment, secrets included, which is kept
in memory only. It returns once the manager serves; a background process keeps it running.
With ``--stay`` it is that process, and there is no input: of a batch job, for instance.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tenacity import (
    RetryError,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    wait_exponential,
)

from spottrain.cloud.port import lease
from spottrain.cloud.port.errors import CloudError
from spottrain.errors import SpottrainError
from spottrain.files import locked
from spottrain.logs import log_to_stderr
from spottrain.varuna_manager.daemon.main import DURABLE_COPY
from spottrain.varuna_manager.jobs.bucket import FencedError
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.manager_location import own_vm
from spottrain.varuna_manager.jobs.replication import check_here
from spottrain.varuna_manager.launch.providers import open_cloud
from spottrain.varuna_manager.launch.submit import end_of

logger = logging.getLogger(__name__)

_ARGV = (sys.executable, "-P", "-m", "spottrain.varuna_manager.daemon.watchdog")
_STAY = "--stay"
_HEARD_S = 5.0
"""Between two renewals of the VM's lease while a manager runs."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""Before a manager that exited is started again."""
_LIVES_S = 60.0
"""After a manager that ran for this long, the next pause is short again."""
_END_S = 600.0
"""How long the cloud is asked to end the VM; after that its lease runs out."""
_FAREWELL_S = 2.0
"""Before the VM ends: a person watching on this VM may see how the job has ended."""
_START_S = 600.0
"""A manager that ends as it starts says so at once: only one that hangs takes so long."""
_POLL_S = 0.1


def keep(job: JobDir, lease_s: float) -> str:
    """Keep starting the manager of a job; return why it is not started again.

    Args:
        lease_s: Give up when no manager has run for this long.
    """
    pause_s = _FIRST_PAUSE_S
    lived_at_s = time.monotonic()
    while not (end := end_of(job)):
        began_at_s = time.monotonic()
        code = _run_manager(job)
        if time.monotonic() - began_at_s > _LIVES_S:
            pause_s, lived_at_s = _FIRST_PAUSE_S, time.monotonic()
        if end_of(job):
            continue
        try:
            check_here(job)
        except FencedError as error:
            return str(error)
        if time.monotonic() - lived_at_s + pause_s > lease_s:
            return f"no manager could run for {lease_s:g} s"
        logger.warning("the manager exited with code %d: starting it again", code)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return f"the job has ended: {end}"


def _run_manager(job: JobDir) -> int:
    """Run a manager until it exits, renewing the VM's lease meanwhile."""
    with open(job.log, "ab") as log:
        manager = subprocess.Popen(
            job.command(DURABLE_COPY),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=job.path,
        )
    while True:
        lease.renew()
        with contextlib.suppress(subprocess.TimeoutExpired):
            return manager.wait(_HEARD_S)


def end_vm(job: JobDir) -> None:
    """End the VM that this runs on: through its cloud, or by giving up its lease."""
    own, cloud = own_vm(job), job.config().cloud
    if own is not None and cloud is not None:
        provider = open_cloud(cloud)
        try:
            Retrying(
                retry=retry_if_exception_type(CloudError),
                stop=stop_after_delay(_END_S),
                wait=wait_exponential(max=_LONGEST_PAUSE_S),
            )(provider.terminate, [own.vm_id])
        except RetryError as error:
            logger.error("%s", error.last_attempt.exception())
        finally:
            provider.close()
    lease.give_up()


def _stay(job: JobDir) -> None:
    """Keep the manager running until the job ends, then end the VM; in one process only."""
    log_to_stderr()
    with locked(job.path / "keeper.lock", wait=False) as held:
        if not held:
            return
        logger.info("%s", keep(job, job.config().manager_vm.lease_s))
        time.sleep(_FAREWELL_S)
        try:
            end_vm(job)
        except SpottrainError as error:
            logger.error("%s", error)
            lease.give_up()


def _start(job: JobDir, environment: dict[str, str]) -> str:
    """Start the background process; return what went wrong, if anything."""
    log_file = job.path / "keeper.log"
    with open(log_file, "ab") as log:
        keeper = subprocess.Popen(
            [*_ARGV, str(job.path), _STAY],
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=job.path,
            start_new_session=True,
        )
    give_up_at_s = time.monotonic() + _START_S
    while job.manager() is None and not end_of(job):
        if keeper.poll() is not None or time.monotonic() > give_up_at_s:
            for file in (job.log, log_file):
                if file.exists() and (text := file.read_text().strip()):
                    return text.rpartition("\n")[2]
            return "the manager did not start"
        time.sleep(_POLL_S)
    return ""


def main(argv: Sequence[str]) -> int:
    """Start the manager of the job in folder ``argv[0]``; return 0 once it serves."""
    job = JobDir(Path(argv[0]).absolute())
    if _STAY in argv:
        _stay(job)
        return 0
    if wrong := lease.await_lease() or _start(job, json.load(sys.stdin)):
        sys.stderr.write(f"{wrong}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
