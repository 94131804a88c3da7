"""VMs of the fake that are real SSH servers, with the host keys that they were given."""

from __future__ import annotations

import getpass
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.azure import FakeAzure
from tests.fakes.sshd import WHY_NOT
from tests.unit.cloud.renting import rent

from spottrain.cloud.port.provider import SshTarget
from spottrain.cloud.ssh.transport.hosts import Host, HostKeyError, UnreachableHostError
from spottrain.cloud.ssh.transport.session import Session
from spottrain.cloud.ssh_keys import ensure_key, new_host_key

pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def host_of(target: SshTarget, key_file: Path) -> Host:
    return Host(
        name="vm",
        address=target.host,
        port=target.port,
        user=target.user,
        host_keys=target.host_keys,
        key_file=key_file,
        python=sys.executable,
    )


def connected(host: Host) -> Session:
    """Return a session once the server answers."""
    deadline_s = time.monotonic() + 600
    while True:
        try:
            return Session(host)
        except UnreachableHostError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)


def test_a_vm_is_verified_by_its_generated_host_key(azure: FakeAzure, tmp_path: Path) -> None:
    key_file, public_key = ensure_key(tmp_path / "cloud")
    port = free_port()
    azure.ask("rent_machines", folder=str(tmp_path / "vms"), port=port)
    provider = azure.provider(public_key=public_key, user=getpass.getuser(), ssh_port=port)
    (vm,) = rent(provider)
    target = provider.ssh_target(vm.vm_id)
    assert target is not None
    host = host_of(target, key_file)
    session = connected(host)
    assert session.alive
    session.close()
    with pytest.raises(HostKeyError):
        Session(replace(host, host_keys=(new_host_key()[1],)))
    provider.terminate([vm.vm_id])
    provider.release("job")
    assert azure.ask("switched_on") == []
