"""GCP's rented VMs under contract, with agents brought to them over SSH."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.account import Account, FakeWire
from tests.contract.ssh_account import empty_workdir
from tests.fakes.gcp import FakeGcp
from tests.fakes.sshd import WHY_NOT
from tests.integration.aws_vms import free_port

from spottrain.cloud.ssh.rented.provider import RentedVmProvider
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload
from spottrain.cloud.ssh_keys import ensure_key


def gcp_over_ssh(request: pytest.FixtureRequest) -> Iterator[Account]:
    """VMs that are OpenSSH servers on loopback, agents brought to them."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    fake: FakeGcp = request.getfixturevalue("fake_gcp")
    folder: Path = request.getfixturevalue("tmp_path")
    port, providers = free_port(), []
    fake.reset()
    fake.ask("rent_machines", folder=str(folder / "disks"), port=port)
    key_file, public_key = ensure_key(folder / "cloud")

    def connect() -> RentedVmProvider:
        inner = fake.provider(public_key=public_key, user=getpass.getuser(), ssh_port=port)
        payload = Payload(workdir=empty_workdir(folder))
        access = VmAccess(key_file=key_file, python=sys.executable)
        providers.append(RentedVmProvider(inner, folder / "cloud", "job", payload, access))
        return providers[-1]

    try:
        yield Account(
            connect,
            "job",
            3,
            wire=FakeWire(fake.ask),
            left=lambda: [*fake.ask("left"), *fake.ask("switched_on")],
        )
        assert fake.ask("drifts") == []
    finally:
        for provider in providers:
            provider.close()
        fake.reset()
