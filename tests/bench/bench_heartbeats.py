"""What a heartbeat costs the manager's server, over HTTPS on loopback, kept alive.

The server is the manager's own: uvicorn on uvloop, TLS, token check, long poll. Agents
are connections of client processes. Every heartbeat is answered after a wait, as where
there are no commands, and followed by the next. Only the server's CPU time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from tests.bench.processes import cpu_s, status_bytes

from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.daemon.server import (
    ControlChannel,
    listen,
    make_server,
    tune_for_many_agents,
)
from spottrain.varuna_manager.daemon.sessions import AgentSessions
from spottrain.varuna_manager.jobs.identity import (
    Identity,
    client_context,
    ensure_identity,
    token_sha256,
)
from spottrain.varuna_manager.jobs.traces import TraceSet
from spottrain.wire import messages
from spottrain.wire.codec import encode
from spottrain.wire.messages import JobSpec

FLEET = 10_000
BEAT_S = 5.0
MB = 1e6


class Deaf:
    """A shell that has nothing to do: nobody but heartbeats call."""

    async def register(self, registration: messages.Registration) -> None:
        raise NotImplementedError

    async def receive(self, batch: messages.ReportBatch) -> messages.ReportAnswer:
        raise NotImplementedError

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        raise NotImplementedError

    async def change_limits(
        self, *, by: str, limits: tuple[Limit, ...], sure: bool
    ) -> None:
        raise NotImplementedError

    def metrics_text(self) -> bytes:
        raise NotImplementedError

    async def trouble(self) -> str:
        raise NotImplementedError

    async def profile(self, minibatches: int) -> TraceSet:
        raise NotImplementedError

    async def receive_logs(self, tails: messages.LogTails) -> None:
        raise NotImplementedError

    async def receive_trace(
        self, vm_id: str, trace: messages.TraceWritten, content: bytes
    ) -> None:
        raise NotImplementedError


def serve(
    listener: socket.socket,
    identity: Identity,
    agents: Sequence[str],
    wait_s: float,
) -> None:
    """Be the manager's server."""
    tune_for_many_agents()
    sessions = AgentSessions(time.monotonic, lambda vm_id: None)
    for vm_id in agents:
        sessions.admit(vm_id, token_sha256(identity.vm_token(vm_id)))
        sessions.watch(vm_id)
    spec = JobSpec(
        name="beats",
        entrypoint="none:none",
        seed=0,
        steps=1,
        minibatch_size=1,
        microbatch_size=1,
        reduction="fast",
        checkpoint_path="none",
        checkpoint_every_steps=1,
        checkpoint_keep=1,
        lease_s=600.0,
        heartbeat_s=wait_s,
    )
    channel = ControlChannel(Deaf(), sessions, spec, Path("none"), "admin", "metrics")
    server = make_server(channel, identity.path)
    uvloop.run(server.serve(sockets=[listener]))


class Agents:
    """Many agents in one process.

    Args:
        port: The server's.
        context: Trusts the server.
        tokens: Token of every agent, by VM.
    """

    def __init__(
        self, port: int, context: ssl.SSLContext, tokens: dict[str, str]
    ) -> None:
        self._port = port
        self._context = context
        self._tokens = tokens
        self._handshakes = asyncio.Semaphore(64)
        self.connected = 0
        self.beats = 0

    async def run(self, pipe: Connection) -> None:
        """Beat; answer whatever is received with (connected, beats) so far."""
        loop = asyncio.get_running_loop()

        def answer() -> None:
            pipe.recv()
            pipe.send((self.connected, self.beats))

        loop.add_reader(pipe.fileno(), answer)
        await asyncio.gather(*(self._beat(vm, t) for vm, t in self._tokens.items()))

    async def _beat(self, vm_id: str, token: str) -> None:
        async with self._handshakes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self._port, ssl=self._context
            )
        sequence = 0
        while True:
            beat = messages.Heartbeat(vm_id=vm_id, sequence=sequence, received=0)
            body = encode(beat)
            writer.write(
                f"POST /v1/heartbeat HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: "
                f"Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise SystemExit(f"heartbeat refused: {head!r}")
            length = head.lower().partition(b"content-length:")[2].split()[0]
            await reader.readexactly(int(length))
            self.connected += not sequence
            self.beats += 1
            sequence += 1


def be_agents(
    port: int, identity: Identity, agents: Sequence[str], pipe: Connection
) -> None:
    tokens = {vm_id: identity.vm_token(vm_id) for vm_id in agents}
    context = client_context(identity.ca_pem)

    async def run() -> None:
        await Agents(port, context, tokens).run(pipe)

    uvloop.run(run())


def count(pipes: Sequence[Connection]) -> tuple[int, int]:
    """Return (agents that have been answered, heartbeats) over all client processes."""
    for pipe in pipes:
        pipe.send(None)
    rows = [pipe.recv() for pipe in pipes]
    return sum(row[0] for row in rows), sum(row[1] for row in rows)


def measure(
    server_pid: int, pipes: Sequence[Connection], agents: int, seconds: float
) -> None:
    began = time.monotonic()
    while count(pipes)[0] < agents:
        time.sleep(0.1)
    connect_s, connect_cpu_s = time.monotonic() - began, cpu_s([server_pid])
    beats, used_s, at = count(pipes)[1], cpu_s([server_pid]), time.monotonic()
    time.sleep(seconds)
    beats = count(pipes)[1] - beats
    used_s, seconds = cpu_s([server_pid]) - used_s, time.monotonic() - at
    beat_s = used_s / beats
    print(f"{agents} agents connected in {connect_s:.1f} s ({connect_cpu_s:.1f} s CPU)")
    print(f"{'heartbeats/s':>14}{'us/heartbeat':>14}{'core now':>10}{'RSS, MB':>9}")
    print(
        f"{beats / seconds:>14.0f}{beat_s * 1e6:>14.0f}{used_s / seconds:>10.3f}"
        f"{status_bytes(server_pid, 'VmHWM') / MB:>9.0f}"
    )
    print(
        f"{FLEET:,} agents beating every {BEAT_S:g} s: {FLEET / BEAT_S * beat_s:.3f} of "
        "a core; goal below 0.333"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=2000)
    parser.add_argument("--wait", type=float, default=1.0, help="of a long poll, s")
    parser.add_argument("--seconds", type=float, default=15.0)
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    agents = [f"vm-{i}" for i in range(arguments.agents)]
    with tempfile.TemporaryDirectory() as folder:
        identity = ensure_identity(Path(folder), ("127.0.0.1",))
        listener = listen(Path(folder), "127.0.0.1")
        port = listener.getsockname()[1]
        server = multiprocessing.Process(
            target=serve, args=(listener, identity, agents, arguments.wait)
        )
        server.start()
        ours, theirs = multiprocessing.Pipe()
        clients = multiprocessing.Process(
            target=be_agents, args=(port, identity, agents, theirs)
        )
        clients.start()
        assert server.pid is not None
        try:
            measure(server.pid, [ours], arguments.agents, arguments.seconds)
        finally:
            clients.kill()
            server.kill()


if __name__ == "__main__":
    main()
