"""Fake clouds whose VMs are machines on loopback, for managers that die."""

from __future__ import annotations

import getpass
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.aws_vms import free_port

from spottrain.cloud.ssh_keys import ensure_key

FAKES = ("aws", "azure", "gcp")


def client(known: Mapping[str, Any]) -> Any:
    """Return a fake cloud as another process knows it; imports its SDK only."""
    if known["cloud"] == "aws":
        from tests.fakes.aws import FakeAws

        return FakeAws(known["port"])
    if known["cloud"] == "azure":
        from tests.fakes.azure import FakeAzure

        return FakeAzure(known["port"], Path(known["ca_file"]))
    from tests.fakes.gcp import FakeGcp

    return FakeGcp(known["port"])


@contextmanager
def _running(name: str) -> Iterator[Any]:
    if name == "aws":
        from tests.fakes.aws import running as running_aws

        with running_aws() as aws:
            yield aws
    elif name == "azure":
        from tests.fakes.azure import running as running_azure

        with running_azure() as azure:
            yield azure
    else:
        from tests.fakes.gcp import running as running_gcp

        with running_gcp() as gcp:
            yield gcp


@dataclass(frozen=True)
class CloudVms:
    """An empty account whose VMs can be logged in to."""

    name: str
    fake: Any
    settings: dict[str, Any]
    """What a provider must know of these VMs."""
    key_file: Path

    def known(self) -> dict[str, Any]:
        """Return what a manager must know, as JSON."""
        return {
            "cloud": self.name,
            "port": int(self.fake.url.rpartition(":")[2]),
            "ca_file": getattr(self.fake, "ca_file", ""),
            "settings": self.settings,
            "key_file": str(self.key_file),
        }


@contextmanager
def cloud_vms(name: str, folder: Path, state: Path) -> Iterator[CloudVms]:
    """Open an account.

    Args:
        name: Which cloud's.
        folder: Where the VMs' disks lie.
        state: Where the job keeps its key.
    """
    key_file, public_key = ensure_key(state)
    port = free_port()
    settings = {
        "public_key": public_key,
        "user": getpass.getuser(),
        "ssh_port": port,
    }
    with _running(name) as fake:
        fake.reset()
        fake.ask("rent_machines", folder=str(folder / "disks"), port=port)
        try:
            yield CloudVms(name, fake, settings, key_file)
        finally:
            fake.reset()
