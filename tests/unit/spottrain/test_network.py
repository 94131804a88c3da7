"""What gloo and NCCL are told of the network."""

from __future__ import annotations

import socket

import pytest

from spottrain import network
from spottrain.network import interface_of, network_environment


@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure", "local", "none"])
def test_nccl_knows_the_sockets_of_two_clouds_by_itself(cloud: str) -> None:
    found = network_environment(cloud, "10.0.0.4", "eth0")
    assert found["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    threads = found.get("NCCL_SOCKET_NTHREADS")
    assert (threads is None) == (cloud in ("aws", "gcp", "local"))
    if threads is not None:
        assert int(threads) * int(found["NCCL_NSOCKS_PERTHREAD"]) <= 64


def test_an_unknown_interface_is_left_to_the_libraries() -> None:
    assert network_environment("aws", "10.0.0.4", "") == {"NCCL_IB_DISABLE": "1"}
    assert network_environment("local", "127.3.0.1", "") == {
        "NCCL_IB_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "=lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def test_the_interface_of_an_address_is_found() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") == interface_of("no address") == ""


def test_interfaces_without_an_address_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for _, name in socket.if_nameindex()]

    def address_of(name: str) -> str:
        if name != names[-1]:
            raise OSError("no address")
        return "10.0.0.4"

    monkeypatch.setattr(network, "_address_of", address_of)
    assert interface_of("10.0.0.4") == names[-1]
