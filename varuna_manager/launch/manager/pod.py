"""``launch --manager-vm`` on Kubernetes: the manager is a pod.

    python -P -m spottrain.varuna_manager.launch.manager.pod JOB_FOLDER

starts it in that pod, once the job is there; its input is one JSON object: the manager's
environment. The pod's program becomes what keeps the manager running, and ends with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from spottrain.cloud.kubernetes.on_pod import FOLDER_VARIABLE
from spottrain.cloud.kubernetes.pods import BEGIN
from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.port.provider import VmState
from spottrain.cloud.ssh.transport.shell import Shell
from spottrain.errors import ConfigError
from spottrain.files import write_whole
from spottrain.varuna_manager.config.kubernetes import KubernetesConfig
from spottrain.varuna_manager.jobs import manager_location
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.manager_location import RemoteManager
from spottrain.varuna_manager.launch.manager import vm as manager_vm
from spottrain.varuna_manager.launch.manager.batch_job import keeper, write_environment
from spottrain.varuna_manager.launch.submit import end_of

if TYPE_CHECKING:
    from spottrain.cloud.kubernetes.manager import ManagerPod

_REQUESTS = {"cpu": "1", "memory": "2Gi"}
"""Enough for a manager of hundreds of pods."""
_LOOK_S = 1.0
_START_S = 600.0
"""How long the manager may take until it serves."""
_ROOT = f'"${FOLDER_VARIABLE}"/manager'

Say = Callable[[str], None]


def pod_of(job: JobDir) -> ManagerPod | None:
    """Return the pod of a job's manager, whether it is there or not; None: it has none.

    Raises:
        MisconfiguredError: Kubernetes' client is not installed.
    """
    config = job.config()
    cluster = config.cluster
    if not isinstance(cluster, KubernetesConfig):
        return None
    # Not above: an extra brings what it imports.
    try:
        from spottrain.cloud.kubernetes.manager import ManagerPod
    except ModuleNotFoundError as error:
        raise MisconfiguredError(
            f"kubernetes: {error}; install its client: pip install 'spottrain[kubernetes]'"
        ) from error
    settings = replace(
        cluster.settings(uses_gpus=False),
        service_account=config.manager_vm.identity,
        image=config.manager_vm.image or cluster.image or "",
        requests=_REQUESTS,
        node_selector=cluster.manager_node_selector,
        tolerations=(),
        volumes={},
        priority_class="",
    )
    return ManagerPod(settings, uid_of(job))


def start(job: JobDir, pod: ManagerPod, say: Say) -> None:
    """Create the pod of a job's manager and start the manager there; safe to repeat.

    Raises:
        CloudError: The cluster does not take it, or it cannot start.
        ConfigError: This machine lacks something.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "--manager-vm: no kubectl command found; install it, it is Kubernetes' own"
        )
    config = job.config()
    cluster = config.cluster
    assert isinstance(cluster, KubernetesConfig), "it was checked before the launch"
    manager = RemoteManager(requests=(), vm_id=f"kubernetes.{pod.name}")
    manager_location.write(job, manager)
    pod.begin(job.name)
    _await(pod, say)
    inside = cluster.model_copy(update={"context": ""})  # it uses its service account
    site = manager_vm.Site(
        name=f"pod {pod.name}",
        root=_ROOT,
        state=f"{_ROOT}/state",
        python=cluster.python,
        extras=("kubernetes",),
        config=config.model_copy(update={"kubernetes": inside}),
        files={},
        keeper=__name__,
        is_ours=False,
    )
    shell = Shell(site.name, pod.argv)
    manager_vm.start_at(job, manager, site, shell, say)


def command_in_pod(argv: Sequence[str]) -> str:
    """Return the shell command that runs one of our commands in a manager's pod."""
    return manager_vm.command_at(_ROOT, f"{_ROOT}/state", argv)


def _await(pod: ManagerPod, say: Say) -> None:
    """Wait until a pod runs.

    Raises:
        CloudError: It cannot, or does not in time.
    """
    give_up_s, said = time.monotonic() + manager_vm.ANSWER_S, ""
    while (found := pod.look()) is None or found.state is not VmState.RUNNING:
        why = f": {found.why}" if found and found.why else ""
        if found is None or found.is_stuck or time.monotonic() > give_up_s:
            raise CloudError(f"pod {pod.name} does not run{why}")
        if why != said and found.state is VmState.QUEUED:
            say(f"pod {pod.name} waits for a node{why}")
            said = why
        time.sleep(_LOOK_S)


# --- In the pod ---------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Start the manager of the job in folder ``argv[0]``; return 0 once it serves."""
    job = JobDir(Path(argv[0]).absolute())
    file = write_environment(job, json.load(sys.stdin))
    begin = Path(os.environ[FOLDER_VARIABLE]) / BEGIN
    script = f"#!/bin/sh\nset -a\n. {file}\nset +a\nexec {keeper(job)}\n"
    write_whole(begin, script, mode=0o700)
    give_up_s = time.monotonic() + _START_S
    while job.manager() is None and not end_of(job):
        if time.monotonic() > give_up_s:
            last = job.last_words() if job.log.exists() else "it did not begin"
            sys.stderr.write(f"the manager does not serve: {last}\n")
            return 1
        time.sleep(_LOOK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
