"""A fake Kubernetes cluster under contract: pods are processes of this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.account import Account
from tests.contract.ssh_account import empty_workdir
from tests.fakes.kubernetes import IMAGE, NAMESPACE, FakeCluster, a_cluster

from spottrain.cloud.kubernetes.provider import KubernetesProvider
from spottrain.cloud.kubernetes.settings import KubernetesSettings
from spottrain.cloud.ssh.transport.hosts import Payload

CAPACITY = 3
SETTINGS = KubernetesSettings(
    namespace=NAMESPACE,
    image=IMAGE,
    python=sys.executable,
    requests={"cpu": "1", "memory": "1Gi"},
    grace_s=300,
    slot_memory_bytes=4_000_000_000,
    usd_per_hour=1.0,
)


class Here:
    """A cluster with one job's account."""

    def __init__(self, cluster: FakeCluster, folder: Path) -> None:
        self.cluster = cluster
        self._folder = folder
        self._payload = Payload(workdir=empty_workdir(folder))
        self._clients: list[KubernetesProvider] = []
        self.account = Account(
            self.connect,
            "job",
            CAPACITY,
            wire=cluster,
            left=lambda: sorted(cluster.pods),
            markets=frozenset({True}),
        )

    def connect(self, **changed: object) -> KubernetesProvider:
        """Return one more client, with other settings if given."""
        settings = replace(SETTINGS, **changed)  # type: ignore[arg-type]
        folder = self._folder / "cloud"
        self._clients.append(KubernetesProvider(folder, "uid", settings, self._payload))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Set up a cluster whose kubeconfig is this process's."""
    with a_cluster(folder / "cluster") as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        cluster.quota = CAPACITY
        found = Here(cluster, folder)
        try:
            yield found
        finally:
            found.close()


def kubernetes(request: pytest.FixtureRequest) -> Iterator[Account]:
    folder: Path = request.getfixturevalue("tmp_path")
    for found in here(folder, request.getfixturevalue("monkeypatch")):
        yield found.account
