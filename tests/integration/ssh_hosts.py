"""Hosts of a user's own for jobs of tests: each an sshd with a home of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from tests.fakes.sshd import Sshd, keygen
from tests.integration.jobs import Job, until

from spottrain.cloud.port.provider import AgentBootstrap
from spottrain.varuna_manager.jobs.identity import ensure_identity


class SshJob(Job):
    """A job on hosts that share nothing but the folder of its checkpoints."""

    def __init__(self, folder: Path, name: str, hosts: list[Sshd], **settings: Any) -> None:
        listed = [{"address": "127.0.0.1", "port": h.port, "host_key": h.host_key} for h in hosts]
        ssh = {
            "hosts": listed,
            "key_file": str(hosts[0].key_file),
            "python": sys.executable,
        }
        settings = {
            "resources": {"provider": "ssh", "max_vms": len(hosts)},
            "checkpoint": {"every_steps": 10, "path": str(folder / "checkpoints")},
            "env": {"PACE_FILE": str(folder / name / "pace")},
            **settings,
            "ssh": {**ssh, **settings.pop("ssh", {})},
        }
        super().__init__(folder, name, **settings)
        self.hosts = hosts

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        kill_vms(self.hosts)


def vm_processes(hosts: list[Sshd]) -> list[int]:
    """Return the pids of all processes of VMs on some hosts."""
    homes = [f"HOME={host.home}".encode() for host in hosts]
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            pid = int(folder.name)
            environment = (folder / "environ").read_bytes().split(b"\0")
            marked = any(x.startswith(b"SPOTTRAIN_VM=") for x in environment)
            if marked and any(home in environment for home in homes):
                found.append(pid)
    return found


def kill_vms(hosts: list[Sshd]) -> None:
    """Kill every process of VMs on some hosts, as a power cut would."""

    def none_left() -> bool:
        for pid in vm_processes(hosts):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not vm_processes(hosts)

    until("all processes of the hosts are gone", none_left)


@contextlib.contextmanager
def ssh_hosts(folder: Path, count: int, *options: str) -> Iterator[list[Sshd]]:
    """Run some hosts that one key opens."""
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "key"
    keygen(key_file)
    hosts = [Sshd(folder / f"host-{n}", key_file, options) for n in range(count)]
    try:
        for host in hosts:
            host.start()
        yield hosts
    finally:
        kill_vms(hosts)
        for host in hosts:
            host.stop()


def unanswered(token: str = "secret") -> AgentBootstrap:
    """Return what agents are told of a manager that does not answer: they ask on."""
    with TemporaryDirectory() as folder:
        ca_pem = ensure_identity(Path(folder), ("127.0.0.1",)).ca_pem
    return AgentBootstrap(manager_url="https://127.0.0.1:1", ca_pem=ca_pem, token=token)
