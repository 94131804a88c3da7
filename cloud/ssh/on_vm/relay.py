"""Hands the calls of a region's agents on to the manager, on one of the region's VMs.

Runs on that VM, in the process at the other end of the manager's connection (``host_agent``),
and ends with it; standard library only. It listens at the VM's private address alone and
leads nowhere but to the manager. What passes is TLS from an agent to the manager: nothing
can be read or forged on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import socket
import threading

PORTS = range(30000, 30100)
"""Where relays listen: below the ephemeral range, so that nothing else is there."""
_CHUNK_BYTES = 64 * 1024
_MAX_CALLS = 1024
"""Connections at a time; those beyond are hung up."""
_CONNECT_S = 10.0
_QUIET_S, _PROBE_S, _PROBES = 30, 10, 3
"""A caller whose VM is gone is noticed after that."""


class Relay:
    """A relay that serves until its process ends.

    Args:
        address: Private address of this VM.
        target: Port on this VM's loopback that leads to the manager.

    Raises:
        ValueError: the address is open to the whole world.
        OSError: it is not this machine's, or all ports are taken.
    """

    def __init__(self, address: str, target: int) -> None:
        if ipaddress.ip_address(address).is_global:
            raise ValueError(f"a relay cannot listen on {address}: it is public")
        self._target = target
        self._calls = 0
        self._listener = _listen(address)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(
            target=lambda: asyncio.run(self._serve()), name="relay", daemon=True
        ).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._take, sock=self._listener)
        await server.serve_forever()

    async def _take(
        self, caller: asyncio.StreamReader, to_caller: asyncio.StreamWriter
    ) -> None:
        """Hand a call on until one of its ends hangs up."""
        self._calls += 1
        try:
            if self._calls <= _MAX_CALLS:
                _notice_death(to_caller)
                async with asyncio.timeout(_CONNECT_S):
                    manager, to_manager = await asyncio.open_connection(
                        "127.0.0.1", self._target
                    )
                await asyncio.gather(
                    _pump(caller, to_manager), _pump(manager, to_caller)
                )
        except OSError:
            pass  # the agent tries again
        finally:
            self._calls -= 1
            to_caller.close()


async def _pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Move what comes, then hang up, by which the other direction ends as well."""
    try:
        with contextlib.suppress(OSError):
            while data := await source.read(_CHUNK_BYTES):
                target.write(data)
                await target.drain()
    finally:
        target.close()


def _listen(address: str) -> socket.socket:
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
