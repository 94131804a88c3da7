"""``spottrain ssh``: open a shell on a VM of a job."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from typing import Annotated, NoReturn

import typer

from spottrain.cloud.kubernetes.pods import kubectl
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import CloudProvider, SshTarget, cloud_of
from spottrain.cloud.slurm.settings import HERE
from spottrain.cloud.ssh.transport.proxy import through_jump
from spottrain.cloud.ssh_keys import key_file
from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.arguments import NameArgument
from spottrain.varuna_manager.config.clouds import AnyCloud
from spottrain.varuna_manager.config.kubernetes import KubernetesConfig
from spottrain.varuna_manager.config.slurm import SlurmConfig
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.launch.ssh_command import argv_to, ssh_program

VmArgument = Annotated[
    str | None,
    typer.Argument(help="Id of a VM or its beginning; not needed for one VM."),
]
CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(help="After --: a command to run instead of a shell."),
]


def ssh(name: NameArgument, vm: VmArgument = None, command: CommandArgument = None) -> None:
    """Open a shell on a VM, or run a command there: spottrain ssh JOB VM -- nvidia-smi.

    The VM must prove its identity with its host key. The exit code is that of ssh.
    """
    job = find(name)
    vm_id = choose_vm(job, vm)
    cluster = job.config().cluster
    if isinstance(cluster, SlurmConfig):
        _exec_srun(cluster.login, vm_id, command or [])
    if isinstance(cluster, KubernetesConfig):
        _exec_kubectl(cluster, vm_id, command or [])
    os.execv(ssh_program(), ssh_argv(job, vm_id, command or []))


def _exec_srun(login: str, vm_id: str, command: list[str]) -> NoReturn:
    """Become a step of a batch job, with a terminal."""
    job_id = vm_id.removeprefix("slurm.")
    step = ["srun", "--overlap", f"--jobid={job_id}", "--nodes=1", "--ntasks=1", "--mem=0"]
    terminal = ["--pty"] if sys.stdin.isatty() else []
    argv = [*step, *terminal, *(command or ["bash", "-l"])]
    if login != HERE:
        shell = ["ssh", "-t" if terminal else "-T", "--", login, shlex.join(argv)]
        os.execv(ssh_program(), shell)
    if (program := shutil.which("srun")) is None:
        raise ConfigError("no srun command found; run this on a login node of the cluster")
    os.execv(program, argv)


def _exec_kubectl(cluster: KubernetesConfig, vm_id: str, command: list[str]) -> NoReturn:
    """Become a shell in a pod."""
    if (program := shutil.which("kubectl")) is None:
        raise ConfigError("no kubectl command found; install it, it is Kubernetes' own")
    begin = kubectl(cluster.settings(), terminal=sys.stdin.isatty())
    pod = vm_id.removeprefix("kubernetes.")
    os.execv(program, [*begin, pod, "--", *(command or ["sh"])])


def choose_vm(job: JobDir, wanted: str | None) -> str:
    """Return the id of the VM that the user means: by its beginning, or without its cloud.

    Raises:
        ConfigError: No VM fits, or several do.
    """
    vms = sorted(read_state(job).fleet.vms)
    fitting = [vm_id for vm_id in vms if f".{wanted or ''}" in f".{vm_id}"]
    if wanted in fitting:
        return wanted
    if len(fitting) == 1:
        return fitting[0]
    if not vms:
        raise ConfigError(f"job {job.name} has no VMs now; see 'spottrain status'")
    got = "none" if wanted is None else wanted
    raise ConfigError(f"VM must be one of {', '.join(fitting or vms)}: got {got}")


def ssh_argv(job: JobDir, vm_id: str, command: list[str]) -> list[str]:
    """Return the ssh command line for a VM.

    Raises:
        ConfigError: The job's VMs are not reached by SSH.
        CloudError: The VM is gone or still boots, or its cloud does not answer.
    """
    config = job.config()
    if config.clouds:
        cloud = next(cloud for cloud in config.clouds if cloud.cloud == cloud_of(vm_id))
        vm = read_state(job).fleet.vms.get(vm_id)
        key = key_file(job.cloud, "" if vm is None else vm.intent)
        target = _rented(cloud, vm_id)
        proxy = cloud.proxy_argv(vm_id, target.port) if cloud.ssh_proxy else ()
        return argv_to(job, target, key, cloud.bastion, command, proxy)
    if config.resources.provider == "ssh":
        host = next(h for h in config.ssh.fleet() if _is_on(vm_id, h.name))
        proxy = through_jump(host) if host.proxy_jump else ()
        return argv_to(job, _own(job, vm_id), host.key_file, None, command, proxy)
    raise ConfigError(
        f"job {job.name}: its VMs are processes on this machine; see 'spottrain logs {job.name}'"
    )


def _is_on(vm_id: str, host: str) -> bool:
    return vm_id.rpartition("-")[0] == host


def _own(job: JobDir, vm_id: str) -> SshTarget:
    from spottrain.varuna_manager.launch.machines import open_provider

    return _there(open_provider(job), vm_id)


def _rented(cloud: AnyCloud, vm_id: str) -> SshTarget:
    from spottrain.varuna_manager.launch.providers import open_cloud

    provider = open_cloud(cloud)
    try:
        return _there(provider, vm_id)
    finally:
        provider.close()


def _there(provider: CloudProvider, vm_id: str) -> SshTarget:
    target = provider.ssh_target(vm_id)
    if target is None:
        raise CloudError(f"VM {vm_id} is still booting; try again in a minute")
    return target
