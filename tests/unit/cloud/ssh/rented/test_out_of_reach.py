"""VMs that run and cannot be entered, and VMs whose cloud forgets their host keys."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.builders import a_launch
from tests.unit.cloud.toy_cloud import ToyCloud

from spottrain.cloud.port.errors import MisconfiguredError
from spottrain.cloud.port.provider import AgentBootstrap, SshTarget
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.rented import provider as rented
from spottrain.cloud.ssh.rented.vm import VmAccess
from spottrain.cloud.ssh.transport.hosts import Payload, UnreachableHostError
from spottrain.cloud.ssh_keys import ensure_key

BOOTSTRAP = AgentBootstrap(manager_url="https://127.0.0.1:1", ca_pem="", token="t")


class Unreachable(ToyCloud):
    """Its VMs have addresses that refuse connections."""

    target: SshTarget | None = None
    admitted: tuple[str, ...] = ()

    def admit(self, job: str, networks: Sequence[str]) -> None:
        assert job == "job"
        self.admitted = tuple(networks)

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        super().ssh_target(vm_id)
        return self.target


@pytest.fixture
def closed() -> SshTarget:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return SshTarget(host="127.0.0.1", user="u", host_keys=("ssh-ed25519 A",), port=port)


@pytest.fixture
def cloud() -> Unreachable:
    return Unreachable("aws", 9)


@pytest.fixture
def provider(
    cloud: Unreachable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[rented.RentedVmProvider]:
    monkeypatch.setattr(rented, "ANSWER_S", 0.0)
    access = VmAccess(key_file=ensure_key(tmp_path)[0])
    payload = Payload(workdir=tmp_path / "none")
    made = rented.RentedVmProvider(
        cloud, tmp_path, "job", payload, access, lambda: ("192.0.2.1/32",)
    )
    yield made
    made.close()


def rent(provider: rented.RentedVmProvider, number: int) -> str:
    (offer,) = provider.offers()
    request = a_launch(offer, token=f"t{number}", intent=f"intent-{number}", lease_s=60)
    return provider.launch(request).vms[0].vm_id


def test_no_more_is_rented_once_three_vms_in_a_row_cannot_be_entered(
    cloud: Unreachable, provider: rented.RentedVmProvider, closed: SshTarget
) -> None:
    cloud.target = closed
    for number in range(3):
        vm_id = rent(provider, number)
        with pytest.raises(UnreachableHostError):
            provider.start_agent(vm_id, BOOTSTRAP)
    with pytest.raises(
        MisconfiguredError, match=r"3 VMs run and none accepts SSH.*spottrain doctor"
    ):
        rent(provider, 3)
    assert len(cloud.vms) == 3
    assert cloud.admitted == ("192.0.2.1/32",)  # perhaps this machine has moved


def test_vms_without_an_address_say_nothing_about_the_network(
    provider: rented.RentedVmProvider,
) -> None:
    for number in range(4):
        vm_id = rent(provider, number)
        with pytest.raises(UnreachableHostError, match="booting"):
            provider.start_agent(vm_id, BOOTSTRAP)


def test_how_a_vm_was_entered_is_known_after_a_restart(
    provider: rented.RentedVmProvider, tmp_path: Path, closed: SshTarget
) -> None:
    vm_id = rent(provider, 0)
    HostMemory(tmp_path).keep_target(vm_id, closed)
    assert HostMemory(tmp_path).read().targets == {vm_id: closed}
    with pytest.raises(UnreachableHostError, match=str(closed.port)):
        provider.start_agent(vm_id, BOOTSTRAP)  # its cloud reports no host key
