"""Forwards calls of a host's agent to the manager, over the SSH connection.

The host's sshd listens on the host's loopback; each connection there becomes a channel,
and one thread copies data between channels and the manager's port. It never blocks on
one of them: data that an endpoint does not accept yet is kept, and nothing more is read
for it until it has been sent.
"""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from dataclasses import dataclass

import paramiko

_CHUNK_BYTES = 64 * 1024
_SEND_S = 30.0
"""How long one endpoint may block the data of the other."""
_RETRY_S = 0.02
"""Retry interval of a blocked endpoint: channels give no write readiness."""

_Endpoint = socket.socket | paramiko.Channel


@dataclass(eq=False, slots=True)
class _Flow:
    """One direction of a connection."""

    source: _Endpoint
    target: _Endpoint
    pending: bytes = b""
    """Data not sent to the target yet; nothing is read meanwhile."""
    last_sent_s: float = 0.0
    """When data was last sent to the target (monotonic)."""

    def move(self) -> bool:
        """Copy available data; return False once either end has closed."""
        try:
            self.pending = self.source.recv(_CHUNK_BYTES)
        except (BlockingIOError, TimeoutError):
            return True
        except OSError:
            return False
        self.last_sent_s = time.monotonic()
        return bool(self.pending) and self.push()

    def push(self) -> bool:
        """Send pending data; return False once the target has closed or timed out."""
        try:
            while self.pending:
                taken = self.target.send(self.pending)
                if not taken:
                    return False
                self.pending = self.pending[taken:]
                self.last_sent_s = time.monotonic()
        except (BlockingIOError, TimeoutError):
            return time.monotonic() - self.last_sent_s < _SEND_S
        except OSError:
            return False
        return True


class Tunnel:
    """A tunnel from one host to the manager; ends with its connection.

    Args:
        target: Address and port of the manager.
        name: Name of the host.
    """

    def __init__(self, target: tuple[str, int], name: str) -> None:
        self._target = target
        self.last_received_s = time.monotonic()
        """When data last came from the host (monotonic)."""
        self._arrived: queue.SimpleQueue[paramiko.Channel | None] = queue.SimpleQueue()
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._pump, name=f"tunnel-{name}", daemon=True)
        self._thread.start()

    def take(self, channel: paramiko.Channel) -> None:
        """Take over a connection that the host accepted; returns at once."""
        self._arrived.put(channel)
        self._wake.send(b"1")

    def close(self) -> None:
        """Close all connections."""
        self._arrived.put(None)
        with contextlib.suppress(OSError):
            self._wake.send(b"1")
        self._thread.join(_SEND_S)

    def _pump(self) -> None:
        pending: set[_Flow] = set()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(_RETRY_S if pending else None):
                    if key.data is not None:
                        self._move(selector, key.data, pending)
                    elif not self._accept(selector):
                        for flow in (*pending, *_flows(selector)):
                            _close_flow(selector, flow)
                        self._wake.close()
                        self._woken.close()
                        return
                for flow in tuple(pending):
                    _push(selector, flow, pending)

    def _move(self, selector: selectors.BaseSelector, flow: _Flow, pending: set[_Flow]) -> None:
        if isinstance(flow.source, paramiko.Channel):
            self.last_received_s = time.monotonic()
        if not flow.move():
            _close_flow(selector, flow)
        elif flow.pending:
            selector.unregister(flow.source)
            pending.add(flow)

    def _accept(self, selector: selectors.BaseSelector) -> bool:
        """Connect a new channel; return False if the tunnel is closed."""
        self._woken.recv(1)
        channel = self._arrived.get()
        if channel is None:
            return False
        try:
            manager = socket.create_connection(self._target, _SEND_S)
        except OSError:
            _close(channel)  # the agent tries again
            return True
        for flow in (_Flow(channel, manager), _Flow(manager, channel)):
            flow.source.settimeout(0.0)
            selector.register(flow.source, selectors.EVENT_READ, flow)
        return True


def _push(selector: selectors.BaseSelector, flow: _Flow, pending: set[_Flow]) -> None:
    """Retry pending data; resume reading once all is sent."""
    goes_on = flow.push()
    if goes_on and flow.pending:
        return
    pending.remove(flow)
    if goes_on:
        selector.register(flow.source, selectors.EVENT_READ, flow)
    else:
        _close_flow(selector, flow)


def _flows(selector: selectors.BaseSelector) -> list[_Flow]:
    return [key.data for key in selector.get_map().values() if key.data is not None]


def _close_flow(selector: selectors.BaseSelector, flow: _Flow) -> None:
    """Close both endpoints, which ends the other direction too."""
    for end in (flow.source, flow.target):
        with contextlib.suppress(KeyError, ValueError):
            selector.unregister(end)
        _close(end)


def _close(end: _Endpoint) -> None:
    """Close a connection; paramiko tells the host of it, which may be gone."""
    with contextlib.suppress(EOFError, OSError, paramiko.SSHException):
        end.close()
