from __future__ import annotations

import asyncio
import io
import socket
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from tests.builders import a_spec

from spottrain.varuna_manager.agent.client import ManagerClient
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.daemon.requests import Requests
from spottrain.varuna_manager.daemon.server import ControlChannel, listen, make_server
from spottrain.varuna_manager.daemon.sessions import AgentSessions
from spottrain.varuna_manager.jobs.identity import (
    Identity,
    ensure_identity,
    token_sha256,
)
from spottrain.varuna_manager.jobs.traces import TraceSet, TracesRefusedError
from spottrain.varuna_manager.launch.limits import LimitsRefusedError
from spottrain.wire import messages


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the empty state directory that the test has to itself."""
    monkeypatch.setenv("SPOTTRAIN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def place(tmp_path: Path) -> str:
    """Return the store of a job whose journal is copied."""
    return f"file://{tmp_path}/store"


SPEC = a_spec(
    minibatch_size=4,
    reduction="exact",
    checkpoint_path="/tmp/none",
    checkpoint_every_steps=5,
    heartbeat_s=0.2,
)


class RecordingHandler(Requests):
    """A manager's side of the channel that keeps what it hears."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.registrations: list[messages.Registration] = []
        self.refused: list[tuple[str, str]] = []
        self.reports: list[messages.Report] = []
        self.stops: list[tuple[str, bool, bool]] = []
        self.limits: list[tuple[str, tuple[Limit, ...]]] = []
        self.grants: list[PoolGrant] = []
        self.troubles: list[str] = []
        self.logs: dict[str, str] = {}
        self.traces: list[tuple[str, messages.TraceWritten, bytes, int]] = []
        """With the number of reports received before."""

    async def register(self, registration: messages.Registration) -> None:
        with self._changed:
            self.registrations.append(registration)
            self._changed.notify_all()

    async def refuse(self, vm_id: str, software_version: str) -> None:
        self.refused.append((vm_id, software_version))

    async def receive(self, batch: messages.ReportBatch) -> messages.ReportAnswer:
        with self._changed:
            self.reports += batch.reports[len(self.reports) - batch.first :]
            self._changed.notify_all()
            return messages.ReportAnswer(received=len(self.reports))

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        self.stops.append((by, checkpoint, now))

    async def change_limits(self, *, by: str, limits: tuple[Limit, ...], sure: bool) -> None:
        if not sure:
            raise LimitsRefusedError("it would end the job; --yes")
        self.limits.append((by, limits))

    async def receive_grant(self, grant: PoolGrant) -> None:
        self.grants.append(grant)

    def metrics_text(self) -> bytes:
        return b"a_metric 1\n"

    async def trouble(self) -> str:
        return self.troubles.pop() if self.troubles else ""

    async def trace(self, minibatches: int, content: messages.TraceContent) -> TraceSet:
        if minibatches > 9:
            raise TracesRefusedError("nothing trains at the moment")
        return TraceSet(number=4, generation=2, minibatches=minibatches, vm_ids=("vm-1",))

    async def receive_logs(self, tails: messages.LogTails) -> None:
        with self._changed:
            self.logs |= {log.name: log.text for log in tails.logs}
            self._changed.notify_all()

    async def receive_trace(self, vm_id: str, trace: messages.TraceWritten, content: bytes) -> None:
        if trace.number != 4:
            raise TracesRefusedError("was not asked for")
        with self._changed:
            self.traces.append((vm_id, trace, content, len(self.reports)))
            self._changed.notify_all()

    def wait_for(self, met: Callable[[], bool], timeout_s: float = 600.0) -> None:
        with self._changed:
            assert self._changed.wait_for(met, timeout_s), (
                self.registrations,
                self.reports,
            )


class Manager:
    """The real server over real TLS on loopback, in a thread of its own."""

    def __init__(self, job_dir: Path, spec: messages.JobSpec = SPEC) -> None:
        self.job_dir = job_dir
        self.identity: Identity = ensure_identity(job_dir, ("127.0.0.1",))
        self.handler = RecordingHandler()
        self.heard: list[str] = []
        self.sessions = AgentSessions(time.monotonic, self.heard.append)
        archive = job_dir / "workdir.tar.gz"
        if not archive.exists():
            write_workdir(archive, {"train.py": "x = 1\n"})
        self.channel = ControlChannel(
            self.handler,
            self.sessions,
            spec,
            archive,
            self.identity.admin_token(),
            self.identity.metrics_token(),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self.url = ""
        self.clients: list[ManagerClient] = []

    def use(self, spec: messages.JobSpec) -> None:
        """Hand out another job from now on."""
        self.stop()
        self.channel = replace(self.channel, spec=spec)
        self.start()

    def start(self) -> None:
        """Listen; connections are accepted from here on."""
        self._listener = listen(self.job_dir, "127.0.0.1")
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self._server = make_server(self.channel, self.identity.path)
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def _run(self, started: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            started.set()
            assert self._server is not None
            assert self._listener is not None
            await self._server.serve(sockets=[self._listener])

        asyncio.run(serve())

    def stop(self) -> None:
        """End as a manager does; safe to call twice."""
        if self._thread is None:
            return
        assert self._server is not None
        assert self._listener is not None
        self._server.should_exit = True
        self.on_loop(self.sessions.release)
        self._thread.join()
        self._thread = None
        self._listener.close()

    def on_loop(self, call: Callable[[], None]) -> None:
        """Run ``call`` where the server runs, and wait for it."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        assert self._loop is not None
        self._loop.call_soon_threadsafe(run)
        assert done.wait(600)

    def admit(self, vm_id: str) -> str:
        """Let a VM in; return its token."""
        token = self.identity.vm_token(vm_id)
        self.on_loop(lambda: self.sessions.admit(vm_id, token_sha256(token)))
        return token

    def send(self, vm_id: str, command: messages.Command) -> None:
        self.on_loop(lambda: self.sessions.send(vm_id, command))

    def client(self, token: str) -> ManagerClient:
        client = ManagerClient(self.url, self.identity.ca_pem, token)
        self.clients.append(client)
        return client


def write_workdir(path: Path, files: dict[str, str]) -> None:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    job_dir = tmp_path / "job"
    job_dir.mkdir()
    manager = Manager(job_dir)
    manager.start()
    yield manager
    for client in manager.clients:
        client.close()
    manager.stop()
