"""What 1,000 ranks cost the manager that all report each mini-batch, and how soon it decides.

The manager is a real one, with its journal, its watches and its server: HTTPS on loopback.
It begins in the middle of a generation of 125 VMs with 8 ranks each. Agents are connections
of a client process: each posts what its ranks have measured once a second, and beats. Then
workers die, one VM after the other: a loss is decided on once its report is answered, as it
is journalled with the decision by then. Only the manager's CPU time is counted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import ssl
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import closing
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop
from tests.bench.bench_journal import committed
from tests.bench.processes import cpu_s, status_bytes
from tests.builders import a_plan, slots_of
from tests.unit.varuna_manager.stored_jobs import submit
from tests.unit.varuna_manager.story import OFFER, SPEC, Story

from spottrain.cloud.port.provider import CloudProvider, LaunchRequest, LaunchResult, Offer, Vm
from spottrain.codec import decode, encode
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.daemon.loop import ManagerLoop
from spottrain.varuna_manager.daemon.server import (
    listen,
    make_server,
    tune_for_many_agents,
)
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.identity import (
    Identity,
    client_context,
    ensure_identity,
)
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.wire import messages

VMS, SLOTS = 125, 8
STEP_S = 1.0
LOSSES = 5
MB = 1e6


class Fleet(Story):
    """A generation of all ranks that trains."""

    def __init__(self) -> None:
        ranks = VMS * SLOTS
        spec = replace(SPEC, steps=10**6, minibatch_size=ranks)
        super().__init__(max_vms=VMS, spec=spec)
        self.now_s = time.time()
        ids = [f"vm-{number:03d}" for number in range(VMS)]
        self.start()
        (intent,) = (self.launch().intent,)
        self.rented = tuple(self.listed(vm_id, intent) for vm_id in ids)
        self.tell(e.VmsLaunched, intent=intent, vms=self.rented)
        for vm_id in ids:
            self.ready(vm_id, SLOTS)
        self.prepare()
        slots = slots_of(x for x in ids for _ in range(SLOTS))
        plan = a_plan(2, ranks // 2, virtual_nodes=ranks, slots=slots, step_s=STEP_S)
        self.tell(e.PlanComputed, inputs_hash=self.plan_asked, plan=plan)
        self.open()
        for slot in slots:
            self.report(slot.vm_id, replace(self.started(0), slot=slot.index))


class Cloud(CloudProvider):
    """What is rented stays; there is no more."""

    name = "local"

    def __init__(self, vms: Sequence[Vm]) -> None:
        self._vms = vms

    def offers(self) -> Sequence[Offer]:
        return [replace(OFFER, available=0)]

    def launch(self, request: LaunchRequest) -> LaunchResult:
        return LaunchResult(vms=())

    def list_vms(self, job: str) -> Sequence[Vm]:
        return self._vms

    def terminate(self, vm_ids: Collection[str]) -> None:
        pass


def manage(job: JobDir, identity: Identity, vms: Sequence[Vm]) -> None:
    """Be the manager."""
    tune_for_many_agents()

    async def run() -> None:
        listener = listen(job.path, "127.0.0.1")
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        with (
            closing(Journal(job.journal)) as journal,
            closing(Measurements(job.measurements)) as measurements,
        ):
            loop = ManagerLoop(journal, measurements, Cloud(vms), identity, url, job.workdir)
            server = make_server(loop.channel, identity.path)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            (job.path / "port.open").touch()
            await asyncio.gather(loop.run(), serving)

    uvloop.run(run())


class Agent:
    """One VM's agent."""

    def __init__(
        self, port: int, context: ssl.SSLContext, vm_id: str, token: str, facts: int
    ) -> None:
        self._address = port, context
        self._vm_id, self._token = vm_id, token
        self._facts, self._measured = facts, 0

    async def post(
        self,
        links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
        call: str,
        body: str,
    ) -> str:
        """Post on a connection of its own."""
        if not links:
            port, context = self._address
            links.append(await asyncio.open_connection("127.0.0.1", port, ssl=context))
        reader, writer = links[0]
        writer.write(
            f"POST /v1/{call} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer "
            f"{self._token}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length:")[2].split()[0])
        answer = (await reader.readexactly(length)).decode()
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{call} refused: {answer}")
        return answer

    async def beat(self) -> None:
        links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        received = 0
        for sequence in range(10**9):
            beat = messages.Heartbeat(vm_id=self._vm_id, sequence=sequence, received=received)
            text = await self.post(links, "heartbeat", encode(beat))
            received += len(decode(messages.HeartbeatAnswer, text).commands)

    async def report(self, dies: asyncio.Event) -> float:
        """Report every mini-batch until a worker dies; return how long that took to be
        decided on, in seconds."""
        links: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for step in range(1, 10**9):
            if dies.is_set():
                break
            found = tuple(
                messages.Measured(
                    after=self._facts,
                    report=replace(committed(step, rank, STEP_S), slot=rank),
                )
                for rank in range(SLOTS)
            )
            batch = messages.ReportBatch(
                vm_id=self._vm_id,
                first=self._facts,
                reports=(),
                first_measurement=self._measured,
                oldest_measurement=0 if step == 1 else self._measured,
                measurements=found,
            )
            due_s = time.monotonic() + STEP_S
            await self.post(links, "reports", encode(batch))
            self._measured += len(found)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        died = messages.WorkerDied(generation=1, slot=0, reason="killed")
        batch = messages.ReportBatch(
            vm_id=self._vm_id,
            first=self._facts,
            reports=(died,),
            first_measurement=self._measured,
            oldest_measurement=self._measured,
        )
        began_s = time.monotonic()
        answer = decode(messages.ReportAnswer, await self.post(links, "reports", encode(batch)))
        assert answer.received == self._facts + 1
        return time.monotonic() - began_s


def be_agents(
    port: int,
    identity: Identity,
    facts: dict[str, int],
    seconds: float,
    pipe: Connection,
) -> None:
    """Be the agents of all VMs; send how soon each loss was decided on."""
    context = client_context(identity.ca_pem)

    async def run() -> None:
        agents = [
            Agent(port, context, vm_id, identity.vm_token(vm_id), number)
            for vm_id, number in facts.items()
        ]
        deaths = [asyncio.Event() for _ in agents]
        beating = [asyncio.create_task(agent.beat()) for agent in agents]
        reporting = [
            asyncio.create_task(agent.report(death))
            for agent, death in zip(agents, deaths, strict=True)
        ]
        await asyncio.sleep(seconds)
        found = []
        for death, task in zip(deaths[:LOSSES], reporting, strict=False):
            death.set()
            found.append(await task)
            await asyncio.sleep(0.5)
        for beats in beating:
            beats.cancel()
        for reports in reporting:
            reports.cancel()
        pipe.send(found)

    uvloop.run(run())


def main() -> None:
    """Print what the reports cost, and how soon losses were decided on."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SPOTTRAIN_HOME"] = folder
        job = submit(Path(folder), f"{folder}/checkpoints")
        job.journal.unlink()
        identity = ensure_identity(job.path, ("127.0.0.1",))
        fleet = Fleet()
        with closing(Journal(job.journal)) as journal:
            journal.append(*fleet.steps)
        manager = multiprocessing.Process(target=manage, args=(job, identity, fleet.rented))
        manager.start()
        while not (job.path / "port.open").exists():
            time.sleep(0.05)
        port = int((job.path / "port").read_text())
        ours, theirs = multiprocessing.Pipe()
        args = (port, identity, fleet.reports, seconds + 5.0, theirs)
        agents = multiprocessing.Process(target=be_agents, args=args)
        agents.start()
        assert manager.pid is not None
        try:
            time.sleep(5.0)
            used_s, at = cpu_s([manager.pid]), time.monotonic()
            time.sleep(seconds - 1.0)
            share = (cpu_s([manager.pid]) - used_s) / (time.monotonic() - at)
            took_s = ours.recv() if ours.poll(60.0) else []
            with closing(Journal(job.journal, read_only=True)) as journal:
                events = journal.last_seq() - len(fleet.steps)
            with closing(Measurements(job.measurements, read_only=True)) as measurements:
                rows = len(measurements.minibatches())
            memory = status_bytes(manager.pid, "VmHWM") / MB
        finally:
            agents.kill()
            manager.kill()
    print(
        f"{VMS} VMs of {SLOTS} ranks, a mini-batch every {STEP_S:g} s: {share:.3f} of a "
        f"core, {memory:.0f} MB; {rows} mini-batches and {events} events journalled"
    )
    told = ", ".join(f"{one * 1e3:.0f}" for one in took_s)
    print(f"losses decided on after {told} ms; goal below 1,000 ms")


if __name__ == "__main__":
    main()
