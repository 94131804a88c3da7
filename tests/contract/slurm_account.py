"""A real Slurm under contract: four nodes on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account
from tests.contract.ssh_account import empty_workdir
from tests.fakes.slurm import LOGIN, NODES, WHY_NO_SLURM, Slurm, a_login_node
from tests.fakes.sshd import WHY_NOT

from spottrain.cloud.slurm.provider import SlurmProvider
from spottrain.cloud.slurm.settings import HERE, SlurmSettings
from spottrain.cloud.ssh.transport.hosts import Payload


def slurm_over_ssh(request: pytest.FixtureRequest) -> Iterator[Account]:
    """The manager is elsewhere; this machine's sshd is that of the login node."""
    if why := WHY_NO_SLURM or WHY_NOT:
        pytest.skip(why)
    cluster: Slurm = request.getfixturevalue("cluster")
    folder: Path = request.getfixturevalue("tmp_path")
    with a_login_node(folder, cluster) as sshd:
        path = f"{sshd.known_to_ssh(LOGIN)}:{os.environ['PATH']}"
        request.getfixturevalue("monkeypatch").setenv("PATH", path)
        yield from account_on(cluster, folder, LOGIN)


def slurm(request: pytest.FixtureRequest) -> Iterator[Account]:
    if WHY_NO_SLURM:
        pytest.skip(WHY_NO_SLURM)
    cluster: Slurm = request.getfixturevalue("cluster")
    request.getfixturevalue("monkeypatch").setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
    yield from account_on(cluster, request.getfixturevalue("tmp_path"), HERE)


def account_on(
    cluster: Slurm, folder: Path, login: str = HERE, options: tuple[str, ...] = ()
) -> Iterator[Account]:
    """Set up the account of a user of a cluster.

    Args:
        options: Of ``sbatch``.
    """
    clients: list[SlurmProvider] = []
    settings = SlurmSettings(
        partitions=("preempt",),
        login=login,
        options=options,
        python=sys.executable,
        folder=str(folder / "shared"),
        scratch=str(folder / "node's own"),
        slot_memory_bytes=4_000_000_000,
        usd_per_hour=1.0,
        time_limit="2:00:00",
    )
    payload = Payload(workdir=empty_workdir(folder))

    def connect() -> SlurmProvider:
        clients.append(SlurmProvider(folder / "cloud", folder.name, settings, payload))
        return clients[-1]

    def left() -> list[str]:
        return [*cluster.jobs(), *map(str, folder.glob("shared/*"))]

    try:
        yield Account(connect, "job", NODES, left=left, markets=frozenset({True}))
    finally:
        for client in clients:
            client.close()
        cluster.cancel_all()
