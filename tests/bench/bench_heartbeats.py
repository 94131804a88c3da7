"""What heartbeats cost the manager's server, over HTTPS on loopback, kept alive.

The server is the manager's own: uvicorn on uvloop, TLS, token check, long poll. Agents
are connections of a client process. Every heartbeat is answered after a wait, as where
there are no commands, and followed by the next: an answer is as late as it comes after that
wait. Then the server is killed and another takes its place, to which all agents connect
again. Only the server's CPU time counts; that of the client process is told beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import resource
import socket
import ssl
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import uvloop
from tests.bench.processes import cpu_s, status_bytes
from tests.builders import a_spec

from spottrain.codec import encode
from spottrain.varuna_manager.daemon.requests import Requests
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
from spottrain.wire import messages

FLEET = 10_000
LIMIT_S = 120.0
"""Of all agents' connecting."""
BEAT_S = 5.0
MB = 1e6


class Deaf(Requests):
    """A manager that has nothing to do: nobody but heartbeats call."""

    def __init__(self) -> None:
        pass


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
    spec = a_spec(
        name="beats",
        entrypoint="none:none",
        seed=0,
        steps=1,
        minibatch_size=1,
        microbatch_size=1,
        checkpoint_path="none",
        checkpoint_every_steps=1,
        checkpoint_keep=1,
        heartbeat_s=wait_s,
    )
    channel = ControlChannel(Deaf(), sessions, spec, Path("none"), "admin", "metrics")
    server = make_server(channel, identity.path)
    uvloop.run(server.serve(sockets=[listener]))


class Counts(NamedTuple):
    """What agents have seen so far."""

    connected: int
    """First answers on a connection."""
    beats: int
    median_s: float
    """Wait for an answer, since this was asked for last."""
    p99_s: float


class Agents:
    """Many agents in one process.

    Args:
        port: The server's.
        context: Trusts the server.
        tokens: Token of every agent, by VM.
    """

    def __init__(self, port: int, context: ssl.SSLContext, tokens: dict[str, str]) -> None:
        self._port = port
        self._context = context
        self._tokens = tokens
        self._handshakes = asyncio.Semaphore(64)
        self.connected = 0
        self.beats = 0
        self.waits_s: list[float] = []
        """Until the answer of each heartbeat, since they were asked for."""

    async def run(self, pipe: Connection) -> None:
        """Beat; answer whatever is received with the counts so far."""
        loop = asyncio.get_running_loop()

        def answer() -> None:
            pipe.recv()
            waits_s = sorted(self.waits_s) or [0.0]
            self.waits_s = []
            half, most = (waits_s[int(len(waits_s) * share)] for share in (0.5, 0.99))
            pipe.send(Counts(self.connected, self.beats, half, most))

        loop.add_reader(pipe.fileno(), answer)
        await asyncio.gather(*(self._live(vm, t) for vm, t in self._tokens.items()))

    async def _live(self, vm_id: str, token: str) -> None:
        """Beat, also if the server is replaced."""
        while True:
            try:
                await self._beat(vm_id, token)
            except (OSError, asyncio.IncompleteReadError):
                await asyncio.sleep(random.uniform(0.5, 1.5))

    async def _beat(self, vm_id: str, token: str) -> None:
        async with self._handshakes:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", self._port, ssl=self._context
            )
        sequence = 0
        while True:
            began_s = time.monotonic()
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
            self.waits_s.append(time.monotonic() - began_s)
            self.connected += not sequence
            self.beats += 1
            sequence += 1


def be_agents(port: int, identity: Identity, agents: Sequence[str], pipe: Connection) -> None:
    tokens = {vm_id: identity.vm_token(vm_id) for vm_id in agents}
    context = client_context(identity.ca_pem)
    # All agents share a core here, which must not be what is measured.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    async def run() -> None:
        await Agents(port, context, tokens).run(pipe)

    uvloop.run(run())


def count(pipe: Connection) -> Counts:
    """Return what the agents have seen."""
    pipe.send(None)
    counts: Counts = pipe.recv()
    return counts


def wait_for(pipe: Connection, connected: int) -> float:
    """Wait until so many connections were answered; return how long it took, in seconds.

    Raises:
        SystemExit: It takes longer than ``LIMIT_S``.
    """
    began_s = time.monotonic()
    while (now := count(pipe).connected) < connected:
        time.sleep(0.1)
        if time.monotonic() - began_s > LIMIT_S:
            raise SystemExit(f"{now} of {connected} after {LIMIT_S:g} s")
    return time.monotonic() - began_s


def measure(
    server_pid: int, client_pid: int, pipe: Connection, wait_s: float, seconds: float
) -> None:
    """Print what heartbeats cost, and how late they are answered."""
    beats, at = count(pipe).beats, time.monotonic()
    used_s, theirs_s = cpu_s([server_pid]), cpu_s([client_pid])
    time.sleep(seconds)
    after = count(pipe)
    beats = after.beats - beats
    used_s, theirs_s = cpu_s([server_pid]) - used_s, cpu_s([client_pid]) - theirs_s
    seconds = time.monotonic() - at
    beat_s = used_s / beats
    print(
        f"{'heartbeats/s':>14}{'us/heartbeat':>14}{'core now':>10}{'of agents':>11}{'RSS, MB':>9}"
    )
    print(
        f"{beats / seconds:>14.0f}{beat_s * 1e6:>14.0f}{used_s / seconds:>10.3f}"
        f"{theirs_s / seconds:>11.3f}{status_bytes(server_pid, 'VmHWM') / MB:>9.0f}"
    )
    half_s, most_s = after.median_s - wait_s, after.p99_s - wait_s
    print(
        f"answers late by {half_s * 1e3:.0f} ms (median), {most_s * 1e3:.0f} ms (p99); "
        "goal below 200 ms"
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
        port, number = listener.getsockname()[1], arguments.agents
        ours, theirs = multiprocessing.Pipe()
        clients = multiprocessing.Process(target=be_agents, args=(port, identity, agents, theirs))

        def start() -> multiprocessing.Process:
            server = multiprocessing.Process(
                target=serve, args=(listener, identity, agents, arguments.wait)
            )
            server.start()
            return server

        server = start()
        clients.start()
        try:
            assert server.pid is not None
            assert clients.pid is not None
            pids = server.pid, clients.pid
            connect_s = wait_for(ours, number) - arguments.wait
            used = [f"{cpu_s([pid]):.1f} s" for pid in pids]
            print(
                f"{number:,} agents connected in {connect_s:.1f} s ({used[0]} of CPU, "
                f"agents {used[1]})"
            )
            measure(*pids, ours, arguments.wait, arguments.seconds)
            server.kill()
            server.join()
            theirs_s = cpu_s([clients.pid])
            server = start()
            again_s = wait_for(ours, 2 * number) - arguments.wait
            assert server.pid is not None
            used = [f"{s:.1f} s" for s in (cpu_s([server.pid]), cpu_s([clients.pid]) - theirs_s)]
            print(
                f"connected again in {again_s:.1f} s ({used[0]} of CPU, agents "
                f"{used[1]}); goal below 20 s"
            )
        finally:
            clients.kill()
            server.kill()


if __name__ == "__main__":
    main()
