"""Starts and ends the processes of the local cloud's VMs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from spottrain import spawn, version
from spottrain.cloud.local.folder import LocalFolder, LocalRecord, marker
from spottrain.cloud.local.image import AGENT_ARGV, VmImage
from spottrain.cloud.local.market import MarketEvent, stream
from spottrain.cloud.local.state import AgentSoftware, LocalCloud, LocalNotice
from spottrain.cloud.port import provider as port
from spottrain.cloud.port.clock import Clock
from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.cloud.process import die_with_parent, tree
from spottrain.files import PRIVATE, write_whole

_log = logging.getLogger(__name__)

_PERIOD_S = 0.02
"""Period in which a slowed VM runs for a part of the time."""
_SCAN_S = 1.0
"""Time between two scans for new processes of a slowed VM."""


@dataclass(frozen=True, slots=True)
class _Agent:
    """A VM's agent, the leader of a session."""

    pid: int
    handle: int
    """A descriptor of the process."""
    process: subprocess.Popen[bytes] | None
    """``None``: the image has forked it, and reaps it."""


class LocalVms:
    """The processes of the cloud's VMs; methods run on one event loop, in the main
    thread.

    Args:
        folder: For state, logs and work folders.
        cloud: The state, changed only by this class.
        tasks: Runs background tasks; a failure ends the process.
    """

    def __init__(self, folder: LocalFolder, cloud: LocalCloud, tasks: asyncio.TaskGroup) -> None:
        self.cloud = cloud
        self.closing = False
        """True while the process ends: nothing may be launched any more."""
        self._folder = folder
        times = [vm.ended_at_s or vm.launched_at_s for vm in cloud.vms.values()]
        self._clock = Clock(max(times, default=0.0))
        self._clock.settle()  # this cloud's clock is the machine's
        self._tasks = tasks
        self._agents: dict[str, _Agent] = {}
        self.image = VmImage(cloud.settings.job)
        self._places: dict[str, int] = {}
        self._versions: dict[str, str] = {}
        """Of the agents' software."""
        self._endings: dict[str, asyncio.Task[None]] = {}
        self._slowing: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._last_call_s = time.monotonic()

    # --- Requests of clients -------------------------------------------------------

    def now_s(self) -> float:
        """Seconds since the epoch: no VM ends before it was launched."""
        return self._clock.now_s()

    def touch(self) -> None:
        """Record that a client needs the cloud."""
        self._last_call_s = time.monotonic()

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Rent machines; see ``LocalCloud.launch``."""
        before = set(self.cloud.vms)
        result = self.cloud.launch(request, self.now_s(), lambda: f"vm-{uuid.uuid4().hex[:8]}")
        for vm in result.vms:
            if vm.vm_id not in before and vm.state == port.VmState.STARTING:
                self._later(self.cloud.boot_s(vm.vm_id), self._boot, vm.vm_id)
        self._commit()
        return result

    async def clear(self, vm_id: str, lease_s: float) -> None:
        """End a VM's processes and remove its files; it ends itself after a lease.

        Raises:
            VmNotFoundError: it has ended, or is ending.
            CloudError: some processes of it are left.
        """
        if vm_id in self.cloud.cleared:
            self.cloud.vm(vm_id)
            return
        if vm_id in self._endings or self.cloud.vm(vm_id).state != port.VmState.RUNNING:
            raise VmNotFoundError(f"VM {vm_id} is not running")
        if vm_id in self.cloud.silent:
            raise CloudError(f"VM {vm_id} does not answer")
        self._stop_slowing([vm_id])
        agent = self._agents.pop(vm_id, None)
        sessions = [] if agent is None else [agent.pid]
        name = marker(self.cloud.settings.job, vm_id)
        try:
            await asyncio.to_thread(tree.kill_all, [name], sessions)
        except CloudError:
            if agent is not None:
                self._agents[vm_id] = agent
            raise
        await asyncio.to_thread(tree.clear_folder, self._folder.vm(vm_id))
        self.cloud.vm(vm_id)  # raises if it ended meanwhile
        self.cloud.cleared.add(vm_id)
        self._later(lease_s, self._end_cleared, vm_id)

    def _end_cleared(self, vm_id: str) -> None:
        """End a VM that nobody has returned or taken."""
        if vm_id in self.cloud.alive:
            _log.info("VM %s: nobody has taken it", vm_id)
            self._end(vm_id)

    def give(self, vm_id: str, order: str, until_s: float) -> port.Vm:
        """Give a cleared VM to another job; see ``LocalCloud.give``."""
        if vm_id in self._endings and vm_id in self.cloud.alive:
            raise VmNotFoundError(f"VM {vm_id} is ending")
        vm = self.cloud.give(vm_id, order, until_s, self.now_s())
        self._commit()
        return vm

    def receive(self, given: port.Vm, order: str, until_s: float) -> port.Vm:
        """Take a VM over from another job; see ``LocalCloud.receive``."""
        vm = self.cloud.receive(given, order, until_s, self.now_s())
        self._commit()
        return vm

    async def start_agent(
        self, vm_id: str, bootstrap: port.AgentBootstrap, software: AgentSoftware
    ) -> None:
        """Start the VM's agent, once for each software; waits while the VM boots.

        An agent of other software is ended before, with all processes of the VM.

        Raises:
            VmNotFoundError: the VM is unknown or has ended.
            CloudError: the processes of the agent before cannot be ended.
        """
        while self.cloud.vm(vm_id).state == port.VmState.STARTING:
            await self._changed.wait()
        ours = software.version == version.software_version()
        from_image = ours and software.argv == AGENT_ARGV and await self.image.ready()
        self.cloud.vm(vm_id)  # raises if it ended meanwhile
        before = self._versions.get(vm_id)
        if before == software.version or vm_id in self.cloud.silent:
            return
        self._versions[vm_id] = software.version
        if (agent := self._agents.pop(vm_id, None)) is not None:
            _log.info("VM %s: agent %s is replaced", vm_id, before)
            try:
                await asyncio.to_thread(
                    tree.kill_all,
                    [marker(self.cloud.settings.job, vm_id)],
                    [agent.pid],
                )
            except CloudError:
                self._agents[vm_id], self._versions[vm_id] = agent, before or ""
                raise
            await asyncio.to_thread(tree.clear_folder, self._folder.vm(vm_id))
            self.cloud.vm(vm_id)  # raises if it ended meanwhile
        agent = self._spawn_agent(vm_id, bootstrap, software, from_image)
        self._agents[vm_id] = agent
        asyncio.get_running_loop().add_reader(agent.handle, self._agent_exited, vm_id, agent)

    def _spawn_agent(
        self,
        vm_id: str,
        bootstrap: port.AgentBootstrap,
        software: AgentSoftware,
        from_image: bool,
    ) -> _Agent:
        """Start the agent from the main thread: it dies with that thread."""
        folder = self._folder.vm(vm_id)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        agent_json = self._write_agent(vm_id, bootstrap)
        shim = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid())]
        name = marker(self.cloud.settings.job, vm_id)
        environment = {**os.environ, tree.VARIABLE: name, "OMP_NUM_THREADS": "1"}
        if software.path != version.PATH:
            paths = (software.path, os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        argv = [*software.argv, str(agent_json)]
        with (folder / "agent.log").open("ab") as log:
            if from_image:
                program = spawn.Program(argv, str(folder), environment)
                if (booted := self.image.boot(program, log)) is not None:
                    return _Agent(*booted, None)
            process = subprocess.Popen(
                [*shim, *argv],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return _Agent(process.pid, os.pidfd_open(process.pid), process)

    def _write_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Path:
        """Write the agent's settings; the cloud is its metadata service."""
        vm = self.cloud.vm(vm_id)
        notices = {"kind": "local", "socket": str(self._folder.socket), "vm_id": vm_id}
        path = self._folder.vm(vm_id) / "agent.json"
        facts = {
            **asdict(bootstrap),
            "vm_id": vm_id,
            "private_address": vm.private_address,
            "num_slots": vm.offer.gpus,
            "slot_memory_bytes": vm.offer.gpu_memory_bytes,
            "place": self._place(vm_id),
            "notices": notices,
        }
        write_whole(path, json.dumps(facts), mode=PRIVATE)
        return path

    def _place(self, vm_id: str) -> int:
        """Return a VM's number among those alive: the lowest that is free, then its own."""
        alive = self.cloud.alive
        self._places = {k: n for k, n in self._places.items() if k in alive}
        taken = set(self._places.values())
        free = next(number for number in itertools.count() if number not in taken)
        return self._places.setdefault(vm_id, free)

    async def terminate(self, vm_ids: Collection[str]) -> None:
        """End VMs; returns when all their processes have ended."""
        known = [vm_id for vm_id in self.cloud.alive if vm_id in vm_ids]
        self._end(*known)
        if known:  # continues even if the client disconnects
            await asyncio.wait({self._endings[vm_id] for vm_id in known})

    async def interruption(self, vm_id: str, after: int, wait_s: float) -> LocalNotice | None:
        """Return the VM's notice with a number above ``after``.

        Returns:
            None if there is none within ``wait_s``.

        Raises:
            VmNotFoundError: the VM is unknown or has ended.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while True:
                    self.cloud.vm(vm_id)
                    notice = self.cloud.notices.get(vm_id)
                    if notice is not None and notice.number > after:
                        return notice
                    await self._changed.wait()
        return None

    # --- The market ----------------------------------------------------------------

    async def play(self) -> None:
        """Play the market; it opens now."""
        opened_s = time.monotonic()
        for event in stream(self.cloud.settings.market):
            await asyncio.sleep(opened_s + event.at_s - time.monotonic())
            await self.apply(event)

    async def apply(self, event: MarketEvent) -> tuple[str, ...]:
        """Apply a market event now; return the affected VMs."""
        victims = self.cloud.apply(event, self.now_s())
        self._commit()
        for vm_id in victims:
            if event.return_after_s is not None:
                self._later(event.return_after_s, self.cloud.restore_capacity, vm_id)
            if event.kind == "notice":
                self._later(event.lead_s, self._end, vm_id)
        if event.kind == "kill":
            await self.terminate(victims)
        for vm_id in victims if event.factor is not None else ():
            self._slowing[vm_id] = self._tasks.create_task(
                self._slow_down(vm_id, event.factor or 1.0)
            )
        if event.kind == "silence":
            self._stop_slowing(victims)
            try:
                await asyncio.to_thread(tree.stop_all, *self._markers_and_sessions(victims))
            except CloudError:
                _log.exception("VMs %s are silenced except for some processes", victims)
        return victims

    async def _slow_down(self, vm_id: str, factor: float) -> None:
        """Let a VM's processes run for 1 / ``factor`` of the time, until cancelled."""
        while True:
            found = await asyncio.to_thread(tree.groups, *self._markers_and_sessions([vm_id]))
            next_scan_s = time.monotonic() + _SCAN_S
            while time.monotonic() < next_scan_s:
                tree.signal_groups(found, signal.SIGSTOP)
                await asyncio.sleep(_PERIOD_S * (1 - 1 / factor))
                tree.signal_groups(found, signal.SIGCONT)
                await asyncio.sleep(_PERIOD_S / factor)

    def _stop_slowing(self, vm_ids: Collection[str]) -> None:
        """Stop slowing VMs down: they end or are silenced."""
        for vm_id in vm_ids:
            if vm_id in self._slowing:
                self._slowing.pop(vm_id).cancel()

    def _boot(self, vm_id: str) -> None:
        self.cloud.booted(vm_id)
        self._commit()

    # --- Ending VMs ----------------------------------------------------------------

    def _agent_exited(self, vm_id: str, agent: _Agent) -> None:
        asyncio.get_running_loop().remove_reader(agent.handle)
        os.close(agent.handle)
        if agent.process is not None:
            agent.process.wait()
        if self._agents.get(vm_id) is agent:  # else it was replaced
            self._end(vm_id)

    def _end(self, *vm_ids: str) -> None:
        """Begin to end VMs in parallel, unless they are already ending."""
        new = [vm_id for vm_id in vm_ids if vm_id not in self._endings]
        if new:
            ending = self._tasks.create_task(self._finish(new))
            self._endings.update(dict.fromkeys(new, ending))

    async def _finish(self, vm_ids: Collection[str]) -> None:
        self._stop_slowing(vm_ids)
        for vm_id in vm_ids:
            self.cloud.stopping(vm_id)
        self._commit()
        try:
            await asyncio.to_thread(tree.kill_all, *self._markers_and_sessions(vm_ids))
        except CloudError:
            _log.exception("VMs %s ended except for some processes", vm_ids)
        for vm_id in vm_ids:
            await asyncio.to_thread(tree.clear_folder, self._folder.vm(vm_id))
            self.cloud.ended(vm_id, self.now_s())
        self._commit()

    def _markers_and_sessions(self, vm_ids: Collection[str]) -> tuple[list[str], list[int]]:
        """Return the markers of the VMs' processes and the sessions of their agents."""
        agents = [self._agents[vm_id].pid for vm_id in vm_ids if vm_id in self._agents]
        return [marker(self.cloud.settings.job, vm_id) for vm_id in vm_ids], agents

    # --- Life of the process -------------------------------------------------------

    async def until_idle(self) -> None:
        """Return, and accept no more requests, once nobody needs the cloud."""
        while self.cloud.alive or not self.closing:
            rest_s = self._last_call_s + self.cloud.settings.idle_s - time.monotonic()
            if not self.cloud.alive and rest_s <= 0:
                self.closing = True
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.cloud.alive else rest_s):
                    await self._changed.wait()

    async def close(self) -> None:
        """End all VMs and accept no more requests."""
        self.closing = True
        await self.terminate(self.cloud.alive)
        self._announce()

    def _later(self, delay_s: float, act: Callable[[str], object], vm_id: str) -> None:
        """Call ``act`` for a VM after a delay."""

        async def wait_and_act() -> None:
            await asyncio.sleep(delay_s)
            act(vm_id)

        self._tasks.create_task(wait_and_act())

    def _commit(self) -> None:
        """Save the state and wake up waiting requests."""
        record = LocalRecord(tuple(self.cloud.vms.values()), self.cloud.tokens)
        try:
            self._folder.save(record)
        except OSError:
            # A full disk must not end VMs; the next change is saved again.
            _log.exception("cannot save the state of the local cloud")
        self._announce()

    def _announce(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
