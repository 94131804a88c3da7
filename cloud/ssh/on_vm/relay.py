"""Relay on one VM of a region: forwards the calls of the region's agents to the
manager.

Runs in the host agent and ends with it; standard library only. It listens only at the
VM's private address and forwards only to the manager. The traffic is TLS from agent to
manager: the relay can neither read nor forge it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import threading

PORTS = range(30000, 30100)
"""Ports for other VMs of the region: below the ephemeral range, to avoid collisions."""
_CHUNK_BYTES = 64 * 1024
_MAX_CALLS = 1024
"""Maximum number of connections; further ones are closed."""
_CONNECT_S = 10.0
_QUIET_S, _PROBE_S, _PROBES = 30, 10, 3
"""TCP keepalive, which detects callers whose VM has ended."""


class Relay:
    """A relay that serves until its process ends.

    Args:
        address: Private address of this VM.
        target: Port on this VM's loopback that is forwarded to the manager.

    Raises:
        ValueError: the address is public.
        OSError: the address is not this machine's, or all ports are taken.
    """

    def __init__(self, address: str, target: int) -> None:
        self._target = target
        self._calls = 0
        self._listener = listen(address)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="relay", daemon=True
        ).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener)
        await server.serve_forever()

    async def _take(self, caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter) -> None:
        """Forward a connection until one side closes it."""
        self._calls += 1
        try:
            if self._calls <= _MAX_CALLS:
                _notice_death(to_caller)
                async with asyncio.timeout(_CONNECT_S):
                    manager, to_manager = await asyncio.open_connection("127.0.0.1", self._target)
                await asyncio.gather(_pump(caller, to_manager), _pump(manager, to_caller))
        except OSError:
            pass  # the agent tries again
        finally:
            self._calls -= 1
            to_caller.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy data to the end, then close, which ends the other direction too."""
    try:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                target.write(data)
                await target.drain()
    finally:
        target.close()


def listen(address: str) -> socket.socket:
    """Return a socket that listens at a private address, at the first free port.

    Raises:
        ValueError: the address is public.
        OSError: the address is not this machine's, or all ports are taken.
    """
    if ipaddress.ip_address(address).is_global:
        raise ValueError(f"cannot listen on {address}: the address is public")
    for port in PORTS:
        try:
            return socket.create_server((address, port), backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop - 1} is free on {address}")


def _notice_death(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, _QUIET_S),
        (socket.TCP_KEEPINTVL, _PROBE_S),
        (socket.TCP_KEEPCNT, _PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
