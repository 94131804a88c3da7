"""The ``ssh`` command line for a host of a job."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from spottrain.cloud.port.provider import SshTarget
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.errors import ConfigError
from spottrain.varuna_manager.config.clouds import BastionConfig
from spottrain.varuna_manager.jobs.folder import JobDir


def ssh_program() -> str:
    """Return the path of the ``ssh`` command.

    Raises:
        ConfigError: It is not installed.
    """
    if (program := shutil.which("ssh")) is None:
        raise ConfigError("ssh command not found; install the OpenSSH client")
    return program


def argv_to(
    job: JobDir,
    target: SshTarget,
    key_file: Path | None,
    bastion: BastionConfig | None,
    command: list[str],
    proxy: Sequence[str] = (),
) -> list[str]:
    """Return the ``ssh`` command line that logs in to a host of a job or runs a command
    there; it accepts only the host keys of ``target``.

    Args:
        key_file: The private key; None: those that ``ssh`` finds.
        bastion: The jump host, if there is one.
        command: To be run there; a shell if empty.
        proxy: Command line of a tool that connects to the host.
    """
    known = _known(job.path / "known_hosts", target.host, target.port, target.host_keys)
    argv = ["ssh", "-p", str(target.port), "-l", target.user, *_proof(known, key_file)]
    if bastion is not None:
        argv += ["-o", f"ProxyCommand={_through(job, bastion.host())}"]
    if proxy:
        argv += ["-o", f"ProxyCommand={shlex.join(proxy).replace('%', '%%')}"]
    return [*argv, "--", target.host, *command]


def _through(job: JobDir, bastion: Host) -> str:
    """Return the proxy command that reaches a host through a bastion.

    ProxyJump would not know the bastion's host keys.
    """
    known = bastion.known_hosts
    if bastion.host_key is not None:
        path = job.path / "known_bastion"
        known = _known(path, bastion.address, bastion.port, (bastion.host_key,))
    argv = ["-p", str(bastion.port), "-l", bastion.user]
    argv += [*_proof(known, bastion.key_file), "--", bastion.address]
    return f"ssh -W '[%h]:%p' {shlex.join(argv).replace('%', '%%')}"


def _known(path: Path, host: str, port: int, keys: Sequence[str]) -> Path:
    """Write a known-hosts file with a host's keys; return its path."""
    place = host if port == 22 else f"[{host}]:{port}"
    path.write_text("".join(f"{place} {key}\n" for key in keys))
    return path


def _proof(known: Path, key_file: Path | None) -> list[str]:
    """Return the options for the host's keys and our own."""
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
