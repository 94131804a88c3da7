"""Calls over one SSH connection: none of them waits for another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import paramiko
import pytest

from spottrain.cloud.ssh.transport import tunnel as module
from spottrain.cloud.ssh.transport.tunnel import Tunnel

WAIT_S = 600.0
LARGE = bytes(range(256)) * 80_000
"""More than both ends and all that is between them hold."""


class AnyHost(paramiko.ServerInterface):
    """A server that lets everybody do everything."""

    def check_auth_none(self, username: str) -> int:
        return paramiko.common.AUTH_SUCCESSFUL

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return paramiko.common.OPEN_SUCCEEDED


class Manager:
    """Answers ``l`` with much, and everything else with the same."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.hung_up = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(caller,), daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        with closing(caller):
            try:
                while asked := caller.recv(1 << 16):
                    caller.sendall(LARGE if asked == b"l" else asked)
            except OSError:
                pass  # hung up within an answer
        self.hung_up.set()


@pytest.fixture
def manager() -> Iterator[Manager]:
    manager = Manager()
    yield manager
    manager.listener.shutdown(socket.SHUT_RDWR)
    manager.listener.close()


class Host:
    """One SSH connection; calls are accepted at its other end."""

    def __init__(self, tunnel: Tunnel) -> None:
        ours, theirs = socket.socketpair()
        self.tunnel = tunnel
        self.far = paramiko.Transport(theirs)
        self.far.add_server_key(paramiko.ECDSAKey.generate())
        self.far.start_server(threading.Event(), AnyHost())
        self.near = paramiko.Transport(ours)
        self.near.start_client(timeout=WAIT_S)
        self.near.auth_none("anybody")

    def call(self) -> paramiko.Channel:
        """Return the agent's end of a new call."""
        self.tunnel.take(self.near.open_session())
        channel = self.far.accept(WAIT_S)
        assert channel is not None
        channel.settimeout(WAIT_S)
        return channel


@pytest.fixture
def host(manager: Manager) -> Iterator[Host]:
    tunnel = Tunnel(manager.listener.getsockname(), "host")
    host = Host(tunnel)
    yield host
    tunnel.close()
    host.near.close()
    host.far.close()


def read(channel: paramiko.Channel, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (chunk := channel.recv(size - len(data))):
        data += chunk
    return bytes(data)


def test_a_slow_reader_blocks_nobody_and_loses_nothing(host: Host) -> None:
    late, other = host.call(), host.call()
    late.sendall(b"l")
    assert read(late, 1) == LARGE[:1]  # the answer is on its way, and not read
    for _ in range(20):
        other.sendall(b"x")
        assert read(other, 1) == b"x"
    assert read(late, len(LARGE) - 1) == LARGE[1:]
    late.sendall(b"x")
    assert read(late, 1) == b"x"


def test_a_reader_that_never_reads_is_disconnected(
    host: Host, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SEND_S", 0.2)
    never = host.call()
    never.sendall(b"l")
    assert manager.hung_up.wait(WAIT_S)
    assert len(read(never, len(LARGE))) < len(LARGE)


def test_data_of_an_agent_arrives_even_if_the_manager_reads_slowly(host: Host) -> None:
    agent = host.call()
    sending = threading.Thread(target=agent.sendall, args=(b"x" * 5_000_000,))
    sending.start()
    assert read(agent, 5_000_000) == b"x" * 5_000_000
    sending.join(WAIT_S)


def test_closing_a_call_closes_it_for_the_manager(host: Host, manager: Manager) -> None:
    agent = host.call()
    agent.sendall(b"x")
    assert read(agent, 1) == b"x"
    agent.close()
    assert manager.hung_up.wait(WAIT_S)


def test_closing_the_tunnel_closes_all_calls(host: Host, manager: Manager) -> None:
    stuck = host.call()
    stuck.sendall(b"l")
    assert read(stuck, 1) == LARGE[:1]
    host.tunnel.close()
    assert manager.hung_up.wait(WAIT_S)
    assert len(read(stuck, len(LARGE))) < len(LARGE)


def test_without_a_manager_calls_are_closed(host: Host, manager: Manager) -> None:
    manager.listener.shutdown(socket.SHUT_RDWR)
    manager.listener.close()
    assert host.call().recv(1) == b""
    manager.listener = socket.create_server(("127.0.0.1", 0))


def test_a_host_that_is_gone_when_a_call_is_closed_ends_no_other_call(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """paramiko tells the host, and raises EOFError where there is no connection any more
    (packet.py, write_all)."""
    first, second = host.call(), host.call()
    close, raised = paramiko.Channel.close, threading.Event()

    def gone(channel: paramiko.Channel) -> None:
        close(channel)
        raised.set()
        raise EOFError

    monkeypatch.setattr(paramiko.Channel, "close", gone)
    first.shutdown_write()
    assert raised.wait(WAIT_S)
    monkeypatch.undo()
    for call in (second, host.call()):
        call.sendall(b"x")
        assert call.recv(1) == b"x"
