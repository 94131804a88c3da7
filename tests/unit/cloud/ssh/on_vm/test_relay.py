from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from spottrain.cloud.ssh.on_vm.relay import PORTS, Relay

HERE = "127.91.0.1"
"""An address of this machine that nothing else listens on."""
WAIT_S = 600.0


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.settimeout(WAIT_S)
        yield listener


@pytest.fixture
def relay(manager: socket.socket) -> Relay:
    return Relay(HERE, manager.getsockname()[1])


def call(relay: Relay) -> socket.socket:
    return socket.create_connection((HERE, relay.port), WAIT_S)


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (chunk := connection.recv(size - len(data))):
        data += chunk
    return data


def test_data_is_forwarded_completely_in_both_directions(
    manager: socket.socket, relay: Relay
) -> None:
    question, answer = b"q" * 1_000_000, b"a" * 1_000_000

    def reply() -> None:
        caller, _ = manager.accept()
        with closing(caller):
            assert read(caller, len(question)) == question
            caller.sendall(answer)

    replying = threading.Thread(target=reply)
    replying.start()
    with closing(call(relay)) as caller:
        caller.sendall(question)
        assert read(caller, len(answer)) == answer
        assert caller.recv(1) == b""
    replying.join(WAIT_S)


def test_closing_a_call_closes_it_for_the_manager(manager: socket.socket, relay: Relay) -> None:
    with closing(call(relay)) as caller:
        caller.sendall(b"x")
        taken, _ = manager.accept()
        taken.settimeout(WAIT_S)
        assert taken.recv(1) == b"x"
    with closing(taken):
        assert taken.recv(1) == b""


def test_without_a_manager_calls_are_closed(manager: socket.socket, relay: Relay) -> None:
    manager.close()
    with closing(call(relay)) as caller:
        assert caller.recv(1) == b""


def test_it_listens_only_at_its_private_address(relay: Relay) -> None:
    assert relay.port in PORTS
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.91.0.2", relay.port), WAIT_S)


def test_a_public_address_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot listen on 8\.8\.8\.8: the address is public"):
        Relay("8.8.8.8", 1)


def test_a_port_in_use_is_skipped(relay: Relay) -> None:
    assert Relay(HERE, 1).port != relay.port
