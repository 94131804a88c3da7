"""Addresses of this machine; and the network between VMs, as gloo and NCCL are told of it."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


def network_environment(cloud: str, address: str, interface: str) -> Mapping[str, str]:
    """Return the variables by which gloo and NCCL find the network between VMs.

    NCCL itself knows how many sockets AWS and GCP need; anywhere else it takes one, which
    fills no fast network (``net_socket.cc``), hence what its documentation names for
    networks of 100 Gb/s (NCCL_SOCKET_NTHREADS, NCCL_NSOCKS_PERTHREAD). It would choose
    RDMA where it sees a device of it, as on Azure's VMs with accelerated networking, whose
    network carries none (NCCL_IB_DISABLE).

    Args:
        cloud: The VM's; ``local`` for the local provider, empty for own hosts.
        address: Of the VM for the other VMs.
        interface: The network interface with that address; empty: not known.
    """
    names = {"NCCL_IB_DISABLE": "1"}
    if address.startswith("127."):
        interface = "lo"
    if interface:
        # An equals sign means exactly this one; else it would be a prefix. Without the
        # second one a host's own name would count, which often is that of its loopback.
        names["NCCL_SOCKET_IFNAME"] = f"={interface}"
        names["GLOO_SOCKET_IFNAME"] = interface
    if cloud not in ("aws", "gcp", "local"):
        names |= {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
    return names


def address_towards(host: str) -> str:
    """Return this machine's address in the network that leads to another.

    Raises:
        OSError: None does.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address of this VM; empty if none has."""
    for _, name in socket.if_nameindex():
        with suppress(OSError):
            if _address_of(name) == address:
                return name
    return ""


def _address_of(interface: str) -> str:
    """Return an interface's IPv4 address.

    Raises:
        OSError: It has none.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        request = struct.pack("256s", interface.encode()[:15])
        answer = fcntl.ioctl(plain.fileno(), _SIOCGIFADDR, request)
    return socket.inet_ntoa(answer[20:24])
