"""Carries the calls of a host's agent to the manager, over the connection that is there.

The host's sshd listens on the host's loopback; each connection there becomes a channel,
and this thread moves bytes between channels and the manager's port.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time

import paramiko

_CHUNK_BYTES = 64 * 1024
_SEND_S = 30.0
"""How long one end may refuse to take what the other sent."""


class Tunnel:
    """The way from one host to the manager; ends with its connection.

    Args:
        target: Address and port of the manager.
        name: Of the host.
    """

    def __init__(self, target: tuple[str, int], name: str) -> None:
        self._target = target
        self.heard_s = time.monotonic()
        """When something last came from the host."""
        self._arrived: queue.SimpleQueue[paramiko.Channel | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(
            target=self._pump, name=f"tunnel-{name}", daemon=True
        )
        self._thread.start()

    def take(self, channel: paramiko.Channel) -> None:
        """Take a connection that the host accepted; returns at once."""
        self._arrived.put(channel)
        self._wake.send(b"1")

    def close(self) -> None:
        """Close all connections."""
        self._arrived.put(None)
        with contextlib.suppress(OSError):
            self._wake.send(b"1")
        self._thread.join(_SEND_S)

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.data is not None:
                        if isinstance(key.fileobj, paramiko.Channel):
                            self.heard_s = time.monotonic()
                        if not _move(key.data[0], key.data[1]):
                            _part(selector, key.data)
                    elif not self._accept(selector):
                        for other in tuple(selector.get_map().values()):
                            if other.data is not None:
                                _part(selector, other.data)
                        self._wake.close()
                        self._woken.close()
                        return

    def _accept(self, selector: selectors.BaseSelector) -> bool:
        """Connect what has arrived; return False if there will be no more."""
        self._woken.recv(1)
        channel = self._arrived.get()
        if channel is None:
            return False
        channel.settimeout(_SEND_S)
        try:
            manager = socket.create_connection(self._target, _SEND_S)
        except OSError:
            channel.close()  # the agent tries again
            return True
        selector.register(channel, selectors.EVENT_READ, (channel, manager))
        selector.register(manager, selectors.EVENT_READ, (manager, channel))
        return True


_End = socket.socket | paramiko.Channel


def _move(source: _End, target: _End) -> bool:
    """Move what there is; return False at the end of either."""
    try:
        data = source.recv(_CHUNK_BYTES)
        target.sendall(data)
    except OSError:
        return False
    return bool(data)


def _part(selector: selectors.BaseSelector, pair: tuple[_End, _End]) -> None:
    for end in pair:
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(end)
        end.close()
