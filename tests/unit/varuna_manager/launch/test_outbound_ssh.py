"""Whether SSH gets out of the network, as doctor tries it."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from spottrain.cloud.port.errors import CloudError
from spottrain.varuna_manager.launch.preflight import outbound_ssh

HOST = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    with socket.create_server((HOST, 0)) as server:
        port: int = server.getsockname()[1]
    return port


def test_a_blocked_port_is_told_from_no_network_at_all(listening: int, closed: int) -> None:
    assert "get out" in outbound_ssh(HOST, listening, closed)
    assert "not tried" in outbound_ssh(HOST, closed, closed)
    with pytest.raises(CloudError, match="lets no connection out to port"):
        outbound_ssh(HOST, closed, listening)
