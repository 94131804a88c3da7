from __future__ import annotations

import os
import queue
import socket
import threading

import pytest

from spottrain.pipeline.comm.groups import (
    Connections,
    GenerationBrokenError,
    connect_rendezvous,
    release_rendezvous,
    serve_rendezvous,
)

BOUND_S = 600.0


def connect() -> tuple[socket.socket, socket.socket, socket.socket]:
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    return listener, ours, theirs


def close(*sockets: socket.socket) -> None:
    for one in sockets:
        one.close()


def test_cutting_ends_both_ends_of_connections_opened_since() -> None:
    before = connect()
    connections = Connections()
    since = connect()

    connections.cut()

    assert since[1].recv(1) == since[2].recv(1) == b""
    before[1].sendall(b"x")
    assert before[2].recv(1) == b"x"
    close(*before, *since)


def test_connections_opened_after_sealing_are_left_alone() -> None:
    connections = Connections()
    ours = connect()
    connections.seal()
    others = connect()

    connections.cut()

    assert ours[2].recv(1) == b""
    others[1].sendall(b"x")
    assert others[2].recv(1) == b"x"
    close(*ours, *others)


def test_connections_are_taken_in_while_they_are_watched_for() -> None:
    connections = Connections()
    first = connect()
    connections.seal()
    others = connect()
    connections.watch()
    second = connect()
    connections.seal()

    connections.cut()

    assert first[2].recv(1) == second[2].recv(1) == b""
    others[1].sendall(b"x")
    assert others[2].recv(1) == b"x"
    close(*first, *others, *second)


@pytest.mark.parametrize("who", [1, 2], ids=["cut here", "closed by the peer"])
def test_the_end_of_a_sealed_connection_is_noticed_without_waiting(who: int) -> None:
    connections = Connections()
    ours = connect()
    connections.seal()
    other = connect()
    connections.check()

    close(*other)
    connections.check()
    if who == 1:
        connections.cut()
    else:
        ours[2].close()
    with pytest.raises(GenerationBrokenError, match="a peer is gone"):
        connections.check()
    close(*ours)


def test_listeners_go_on_listening() -> None:
    connections = Connections()
    listener, *pair = connect()

    connections.cut()

    again = socket.create_connection(listener.getsockname())
    close(listener, *pair, again)


def test_a_connection_that_its_owner_closes_meanwhile_does_not_save_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections = Connections()
    pairs = [connect() for _ in range(2)]
    duplicate = os.dup

    def close_first(fd: int) -> int:
        monkeypatch.undo()
        next(one for pair in pairs for one in pair if one.fileno() == fd).close()
        return duplicate(fd)

    monkeypatch.setattr(os, "dup", close_first)

    connections.cut()

    for _, ours, theirs in pairs:
        for one in (ours, theirs):
            assert one.fileno() < 0 or one.recv(1) == b""
    close(*(one for pair in pairs for one in pair))


def test_a_descriptor_that_was_used_again_is_not_cut() -> None:
    connections = Connections()
    listener, ours, theirs = connect()
    connections.seal()
    fd = ours.fileno()
    ours.close()
    stranger, end = socket.socketpair()
    while stranger.fileno() != fd and end.fileno() != fd:
        stranger, end = socket.socketpair()

    connections.cut()

    stranger.sendall(b"x")
    assert end.recv(1) == b"x"
    close(listener, theirs, stranger, end)


@pytest.mark.parametrize("how", ["cut", "peer", "closed", "stop"])
def test_the_end_of_a_connection_or_a_stop_ends_the_wait(how: str) -> None:
    connections = Connections()
    pair = connect()
    connections.seal()
    stop, stopped = socket.socketpair()
    waiting = threading.Thread(target=connections.wait_for_end, args=(stopped,))
    if how == "closed":
        pair[1].close()
    waiting.start()
    assert how == "closed" or waiting.is_alive()

    if how == "cut":
        connections.cut()
    elif how == "peer":
        pair[2].shutdown(socket.SHUT_RDWR)
    elif how == "stop":
        stop.close()

    waiting.join(600)
    assert not waiting.is_alive()
    close(*pair, stop, stopped)


def test_only_connections_of_the_network_count() -> None:
    """A thread that waits for them must not hold open what is to wake it."""
    connections = Connections()
    ours = connect()
    stop, stopped = socket.socketpair()
    connections.seal()
    waiting = threading.Thread(target=connections.wait_for_end, args=(stopped,), daemon=True)
    waiting.start()

    stop.close()

    waiting.join(600)
    assert not waiting.is_alive()
    close(stopped, *ours)


def test_a_store_listens_on_its_address_alone_until_all_have_released_it() -> None:
    ports = queue.SimpleQueue[int]()
    serving = threading.Thread(target=serve_rendezvous, args=("127.0.0.1", ports.put), daemon=True)
    serving.start()
    port = ports.get(timeout=BOUND_S)
    ranks = [connect_rendezvous("127.0.0.1", port, BOUND_S) for _ in range(2)]

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port))
    release_rendezvous(ranks[0], 2)
    ranks[1].set("nonce", "x")
    assert ranks[0].get("nonce") == b"x"
    release_rendezvous(ranks[1], 2)

    serving.join(BOUND_S)
    assert not serving.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
