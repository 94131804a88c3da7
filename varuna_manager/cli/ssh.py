"""``spottrain ssh``: enter a VM of a job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import ReachedBySsh, SshTarget
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.errors import ConfigError
from spottrain.varuna_manager.cli.console import NameArgument
from spottrain.varuna_manager.config.clouds import AnyCloud, BastionConfig
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import read_state

VmArgument = Annotated[
    str | None, typer.Argument(help="Id of a VM, or how it begins; the only one.")
]
CommandArgument = Annotated[
    list[str] | None, typer.Argument(help="After --: what to run there, no shell.")
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command()(ssh)


def ssh(
    name: NameArgument, vm: VmArgument = None, command: CommandArgument = None
) -> None:
    """Enter a VM of a job, or run a command there: spottrain ssh JOB VM -- nvidia-smi.

    The VM has to prove by its own host key who it is. The exit code is that of ssh.
    """
    job = find(name)
    argv = ssh_argv(job, choose(job, vm), command or [])
    program = shutil.which(argv[0])
    if program is None:
        raise ConfigError("there is no ssh command here; install OpenSSH's client")
    os.execv(program, argv)


def choose(job: JobDir, wanted: str | None) -> str:
    """Return the id of the VM that is meant.

    Raises:
        ConfigError: none is, or several are.
    """
    vms = sorted(read_state(job).vms)
    fitting = [vm_id for vm_id in vms if vm_id.startswith(wanted or "")]
    if wanted in fitting:
        return wanted
    if len(fitting) == 1:
        return fitting[0]
    if not vms:
        raise ConfigError(f"job {job.name} has no VMs now; see 'spottrain status'")
    got = "no name" if wanted is None else wanted
    raise ConfigError(f"VM: got {got}; name one of {', '.join(fitting or vms)}")


def ssh_argv(job: JobDir, vm_id: str, command: list[str]) -> list[str]:
    """Return the command line that enters a VM.

    Raises:
        ConfigError: the job's VMs are not entered by SSH.
        CloudError: the VM is gone, boots still, or its cloud does not answer.
    """
    config = job.config()
    if config.clouds:
        cloud, own_id = _cloud_of(config.clouds, vm_id)
        target, key_file = _rented(cloud, own_id), job.cloud / "ssh_key"
        return argv_to(job, target, key_file, cloud.bastion, command)
    if config.resources.provider == "ssh":
        host = next(h for h in config.ssh.fleet() if _is_on(vm_id, h.name))
        return argv_to(job, _own(job, vm_id), host.key_file, None, command)
    raise ConfigError(
        f"job {job.name}: its VMs are processes of this machine; see "
        f"'spottrain logs {job.name}'"
    )


def _is_on(vm_id: str, host: str) -> bool:
    return vm_id.rpartition("-")[0] == host


def _own(job: JobDir, vm_id: str) -> SshTarget:
    from spottrain.varuna_manager.launch.control import open_provider

    provider = open_provider(job)
    assert isinstance(provider, ReachedBySsh)
    return _there(provider, vm_id)


def _cloud_of(clouds: Sequence[AnyCloud], vm_id: str) -> tuple[AnyCloud, str]:
    """Return the cloud that a VM is from, and its id there."""
    if len(clouds) == 1:
        return clouds[0], vm_id
    from spottrain.cloud.multi import split_vm_id

    name, own_id = split_vm_id(vm_id)
    return next(cloud for cloud in clouds if cloud.cloud == name), own_id


def _rented(cloud: AnyCloud, vm_id: str) -> SshTarget:
    from spottrain.varuna_manager.launch.providers import open_cloud

    provider = open_cloud(cloud)
    try:
        if not isinstance(provider, ReachedBySsh):
            raise CloudError(f"{provider.name}: its VMs are not entered by SSH")
        return _there(provider, vm_id)
    finally:
        provider.close()


def _there(provider: ReachedBySsh, vm_id: str) -> SshTarget:
    target = provider.ssh_target(vm_id)
    if target is None:
        raise CloudError(f"VM {vm_id} boots still; try again in a minute")
    return target


def argv_to(
    job: JobDir,
    target: SshTarget,
    key_file: Path | None,
    bastion: BastionConfig | None,
    command: list[str],
) -> list[str]:
    """Return the command line of ``ssh`` that enters a host of a job, or runs something
    there; it accepts no other host keys than those of ``target``.
    """
    known = _known(job.path / "known_hosts", target.host, target.port, target.host_keys)
    argv = ["ssh", "-p", str(target.port), "-l", target.user, *_proof(known, key_file)]
    if bastion is not None:
        argv += ["-o", f"ProxyCommand={_through(job, bastion.host())}"]
    return [*argv, "--", target.host, *command]


def _through(job: JobDir, bastion: Host) -> str:
    """Return the command that leads to a host by a bastion.

    No ProxyJump: that would not be told the bastion's own keys.
    """
    known = bastion.known_hosts
    if bastion.host_key is not None:
        path = job.path / "known_bastion"
        known = _known(path, bastion.address, bastion.port, (bastion.host_key,))
    argv = ["-p", str(bastion.port), "-l", bastion.user]
    argv += [*_proof(known, bastion.key_file), "--", bastion.address]
    return f"ssh -W '[%h]:%p' {shlex.join(argv).replace('%', '%%')}"


def _known(path: Path, host: str, port: int, keys: Sequence[str]) -> Path:
    """Write the file that a host's keys are known from."""
    place = host if port == 22 else f"[{host}]:{port}"
    path.write_text("".join(f"{place} {key}\n" for key in keys))
    return path


def _proof(known: Path, key_file: Path | None) -> list[str]:
    """Return the options by which a host and we prove to each other who we are."""
    options = {
        "UserKnownHostsFile": f'"{known}"',
        "GlobalKnownHostsFile": os.devnull,
        "StrictHostKeyChecking": "yes",
    }
    if key_file is not None:
        options["IdentitiesOnly"] = "yes"
    argv = [] if key_file is None else ["-i", str(key_file)]
    for name, value in options.items():
        argv += ["-o", f"{name}={value}"]
    return argv
