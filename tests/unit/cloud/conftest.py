"""Fakes of clouds, emptied; and a real local cloud whose agents have unruly children."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.builders import a_launch
from tests.fakes.aws import FakeAws
from tests.fakes.azure import FakeAzure
from tests.fakes.gcp import FakeGcp
from tests.local_cloud import inject
from tests.tiers import first_always

from spottrain.cloud.local.market import EventKind, MarketEvent, MarketSpec, ZoneSpec
from spottrain.cloud.local.provider import LocalProvider
from spottrain.cloud.port.provider import AgentBootstrap, LaunchRequest, Vm

BOOTSTRAP = AgentBootstrap(manager_url="https://manager", ca_pem="ca", token="secret")

MARKET = MarketSpec(
    zones=(
        ZoneSpec(
            name="a",
            capacity=3,
            slot_memory_bytes=10**9,
            spot_usd_per_hour=1.0,
            on_demand_usd_per_hour=3.0,
        ),
    )
)

FAMILY = """
import json, os, signal, subprocess, sys
IDLE = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
pids = [os.getpid()]
def fork(session):
    pid = os.fork()
    if pid == 0:
        if session:
            os.setsid()
        signal.pause()
    pids.append(pid)
fork(session=False)
fork(session=True)
pids.append(subprocess.Popen(IDLE, env={}).pid)  # known by its session only
pids.append(subprocess.Popen(IDLE, env={}, start_new_session=True).pid)  # by its parent
with open(sys.argv[1], "w") as pipe:
    said = {"pids": pids, "cwd": os.getcwd(), "environ": dict(os.environ)}
    pipe.write(json.dumps(said) + "\\n")
signal.pause()
"""
"""A process and four descendants that are hard to find; tells their pids to a pipe."""


class Machine:
    """The machine that the tests run on, seen through /proc."""

    family = FAMILY

    def state(self, pid: int) -> str:
        """The process's state letter; empty if it is gone."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        return stat.rpartition(")")[2].split()[0]

    def runs(self, pid: int) -> bool:
        """Return True if a process exists and is not a zombie."""
        return self.state(pid) not in ("", "Z", "X")

    def marked(self, job: str) -> list[int]:
        """Pids of all processes of all VMs of a job."""
        return [
            pid
            for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
            if f"SPOTTRAIN_VM={job}/".encode() in _read(pid, "environ") and self.runs(pid)
        ]

    def cloud(self, folder: Path) -> int | None:
        """Pid of the cloud process of a folder, if one runs."""
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            argv = _read(pid, "cmdline").split(b"\0")
            if b"spottrain.cloud.local" in argv and str(folder).encode() in argv:
                return pid
        return None

    def await_exit(self, pid: int) -> None:
        """Wait until a process has exited."""
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            return
        try:
            assert select.select([handle], [], [], 600)[0], f"{pid} is still there"
        finally:
            os.close(handle)

    def eventually(self, holds: Callable[[], bool]) -> None:
        """Wait for what sends no event; asking again and again."""
        deadline = time.monotonic() + 600
        while not holds():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.01)


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


@pytest.fixture
def machine() -> Machine:
    """The machine that the tests run on."""
    return Machine()


@dataclass
class Cloud:
    """A local cloud and what is needed to try it."""

    folder: Path
    pipe: Path
    job: str = field(default_factory=lambda: f"job-{uuid.uuid4().hex}")
    idle_s: float = 30.0
    market: MarketSpec = MARKET
    families: list[list[int]] = field(default_factory=list)
    """Pids of agents and their descendants."""

    def client(self) -> LocalProvider:
        """A client of its own."""
        argv = (sys.executable, "-S", "-c", FAMILY, str(self.pipe))
        return LocalProvider(self.folder, self.job, self.market, argv, self.idle_s)

    def request(self, count: int = 1, *, spot: bool = True, token: str = "") -> LaunchRequest:
        """A wish for machines of the first zone."""
        offer = next(o for o in self.client().offers() if o.spot is spot)
        return a_launch(offer, count, token=token or uuid.uuid4().hex, job=self.job, lease_s=60)

    def launch(self, count: int = 1, *, spot: bool = True) -> tuple[Vm, ...]:
        """Rent machines."""
        return self.client().launch(self.request(count, spot=spot)).vms

    def boot(self, vm: Vm) -> dict[str, Any]:
        """Start the VM's agent; returns what it says once all its children run."""
        os.mkfifo(self.pipe)
        self.client().start_agent(vm.vm_id, BOOTSTRAP)
        said: dict[str, Any] = json.loads(self.pipe.read_text())
        self.pipe.unlink()
        self.families.append(said["pids"])
        return said

    def hit(self, kind: EventKind, **fields: Any) -> tuple[str, ...]:
        """Let the market do something to zone a."""
        event = MarketEvent(at_s=0, kind=kind, zone="a", **fields)
        return inject(self.client(), event)

    def vm(self, vm: Vm) -> Vm:
        """The current state of the VM."""
        return next(v for v in self.client().list_vms(self.job) if v.vm_id == vm.vm_id)


@pytest.fixture
def make_cloud(tmp_path: Path, machine: Machine) -> Iterator[Callable[..., Cloud]]:
    """Makes local clouds; afterwards nothing of them may be left."""
    made: list[Cloud] = []

    def make(**settings: Any) -> Cloud:
        cloud = Cloud(tmp_path / f"cloud-{len(made)}", tmp_path / "pipe", **settings)
        made.append(cloud)
        return cloud

    yield make
    for cloud in made:
        cloud.client().shut_down()
        for *family, escaped in cloud.families:
            assert not any(machine.runs(pid) for pid in family)
            if machine.runs(escaped):  # without mark, session and parent: out of reach
                os.kill(escaped, signal.SIGKILL)
        assert machine.cloud(cloud.folder) is None
        assert machine.marked(cloud.job) == []
        assert not (cloud.folder / "cloud.sock").exists()


@pytest.fixture
def cloud(make_cloud: Callable[..., Cloud]) -> Cloud:
    """One local cloud with three machines."""
    return make_cloud()


def emptied(fake: Any) -> Iterator[Any]:
    """Empty a fake at a test's start; nothing may have drifted from its model at the end."""
    fake.reset()
    yield fake
    assert fake.ask("drifts") == []


@pytest.fixture
def aws(fake_aws: FakeAws) -> Iterator[FakeAws]:
    yield from emptied(fake_aws)


@pytest.fixture
def azure(fake_azure: FakeAzure) -> Iterator[FakeAzure]:
    yield from emptied(fake_azure)


@pytest.fixture
def gcp(fake_gcp: FakeGcp) -> Iterator[FakeGcp]:
    yield from emptied(fake_gcp)


@pytest.fixture(params=first_always(["aws", "azure", "gcp"]))
def fake(request: pytest.FixtureRequest) -> Any:
    """Each of the clouds in turn."""
    return request.getfixturevalue(request.param)
