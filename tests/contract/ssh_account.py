"""Own hosts under contract: three sshd on loopback."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account
from tests.fakes.sshd import WHY_NOT
from tests.integration.ssh_hosts import ssh_hosts

from spottrain.cloud.ssh.hosts.provider import SshProvider
from spottrain.cloud.ssh.transport.hosts import Payload


def empty_workdir(folder: Path) -> Path:
    """Return a packed workdir with nothing in it."""
    path = folder / "workdir.tar.gz"
    buffer = io.BytesIO()
    tarfile.open(fileobj=buffer, mode="w:gz").close()
    path.write_bytes(buffer.getvalue())
    return path


def ssh(request: pytest.FixtureRequest) -> Iterator[Account]:
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    folder: Path = request.getfixturevalue("tmp_path")
    payload = Payload(workdir=empty_workdir(folder))
    clients: list[SshProvider] = []

    def connect() -> SshProvider:
        clients.append(SshProvider(folder / "cloud", "job", fleet, payload))
        return clients[-1]

    def left() -> list[str]:
        return [name for host in hosts for name in host.left()]

    with ssh_hosts(folder / "hosts", 3) as hosts:
        fleet = [host.host(f"h{n}", usd_per_hour=1.0) for n, host in enumerate(hosts)]
        try:
            yield Account(connect, "job", 3, left=left, markets=frozenset({True}))
        finally:
            for client in clients:
                client.close()
