"""A fake AWS whose VMs are machines on loopback, and what a job knows of it."""

from __future__ import annotations

import getpass
import socket
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.builders import a_launch
from tests.contract.ssh_account import empty_workdir
from tests.fakes.aws import CPU_KIND, REGION, FakeAws, running
from tests.fakes.machines import processes_of

from spottrain.cloud.port.provider import LaunchRequest, Vm
from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload
from spottrain.cloud.ssh_keys import ensure_key


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


@dataclass
class AwsVms:
    """The account, and the providers that rent there."""

    folder: Path
    fake: FakeAws
    port: int = field(default_factory=free_port)
    """Where the SSH servers of VMs listen."""
    metadata_url: str = ""
    """Of a fake metadata service for the VMs."""
    providers: list[RentedVmProvider] = field(default_factory=list)

    @property
    def section(self) -> dict[str, Any]:
        """The part of a job file or pool file about it."""
        return {
            "regions": [REGION],
            "instance_types": [CPU_KIND],
            "endpoint_url": self.fake.url,
            "user": self.settings()["user"],
            "ssh_port": self.port,
            "ssh_from": ["192.0.2.0/24"],
            "python": sys.executable,
        }

    @property
    def disks(self) -> Path:
        """Folder of the VMs' own folders."""
        return self.folder / "disks"

    def home(self, vm: Vm) -> Path:
        """Return the home on a VM's disk."""
        return self.disks / vm.vm_id.split(".")[1] / "home"

    def processes(self, vm: Vm) -> list[int]:
        """Return the pids of what runs on a VM."""
        return processes_of(self.home(vm))

    def switch_on(self) -> None:
        """Begin with an empty account whose VMs can be logged in to."""
        self.fake.reset()
        machines = {"folder": str(self.disks), "port": self.port}
        self.fake.ask("rent_machines", **machines, metadata_url=self.metadata_url)

    def evict(self, vm: Vm) -> None:
        """Take a VM back as AWS does."""
        _, instance_id, region = vm.vm_id.split(".", 2)
        self.fake.ask("interrupt", region=region, instance_id=instance_id)

    def settings(self) -> dict[str, Any]:
        """Return what an AWS provider must know of these VMs."""
        return {
            "public_key": ensure_key(self.folder / "cloud")[1],
            "user": getpass.getuser(),
            "ssh_port": self.port,
        }

    def provider(self, access: dict[str, Any] | None = None, **payload: Any) -> RentedVmProvider:
        """Return one more client of the account."""
        state = self.folder / "cloud"
        known = {"key_file": ensure_key(state)[0], "python": sys.executable}
        made = RentedVmProvider(
            self.fake.provider(**self.settings()),
            state,
            "job",
            Payload(workdir=empty_workdir(self.folder), **payload),
            VmAccess(**{**known, **(access or {})}),
        )
        self.providers.append(made)
        return made

    def close(self) -> None:
        """Leave; the VMs end."""
        for provider in self.providers:
            provider.close()
        self.fake.reset()


@contextmanager
def aws_vms(folder: Path, fake: FakeAws | None = None, metadata_url: str = "") -> Iterator[AwsVms]:
    """Open an account, of a fake of its own unless one is given."""
    if fake is None:
        with running() as started, aws_vms(folder, started, metadata_url) as account:
            yield account
        return
    account = AwsVms(folder, fake, metadata_url=metadata_url)
    account.switch_on()
    try:
        yield account
    finally:
        account.close()


def wish(provider: RentedVmProvider, count: int = 1) -> LaunchRequest:
    """Return a wish for VMs of the first offer."""
    return a_launch(
        provider.offers()[0],
        count,
        token=uuid.uuid4().hex,
        intent=f"intent-{uuid.uuid4().hex[:8]}",
        lease_s=60.0,
    )


__all__ = ["REGION", "AwsVms", "aws_vms", "free_port", "wish"]
