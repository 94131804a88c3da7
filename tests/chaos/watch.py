"""A job under chaos, as its journal and its measurements tell it while it runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from tests.integration.jobs import Job, TooLateError
from tests.view import View

from spottrain.cloud.local.folder import marker
from spottrain.cloud.process import tree
from spottrain.varuna_manager.core.model.events import ReportReceived
from spottrain.varuna_manager.core.model.records import Generation, GenerationPhase
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.follow import Follower
from spottrain.varuna_manager.jobs.measurements import Cursor, Minibatch
from spottrain.wire import messages

DEADLINE_S = 150.0
POLL_S = 0.01


class Watch:
    """What a job does now.

    Args:
        job: That runs.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._follower = Follower(job.dir)
        self._measurements = self._follower.measurements()
        self._cursor = Cursor()
        self._workers: dict[str, int] = {}
        self.committed_at_s = 0.0
        """When the newest mini-batch was committed, in seconds since the epoch."""

    def close(self) -> None:
        """Close the journal."""
        self._follower.close()

    def until(self, what: str, met: Callable[[], bool], within_s: float = DEADLINE_S) -> None:
        """Take in what is new until ``met``.

        Raises:
            TooLateError: It is not, for too long.
        """
        give_up_at_s = time.monotonic() + within_s
        while not met():
            if time.monotonic() > give_up_at_s:
                why = self.job.tail(self.state)
                raise TooLateError(f"{what}: not in {within_s:g} s\n{why}")
            time.sleep(POLL_S)
            self.advance()

    def advance(self) -> None:
        """Take in what is new."""
        for entry in self._follower.advance():
            event = entry.event
            if isinstance(event, ReportReceived) and isinstance(
                event.report, messages.GenerationStarted
            ):
                self._workers[event.vm_id] = event.report.pid
        page = self._measurements.changes(self._cursor)
        self._cursor = page.cursor
        for row in page.rows:
            if isinstance(row, Minibatch):
                self.committed_at_s = row.at_s

    @property
    def state(self) -> State:
        """What the manager knew when it last wrote."""
        return self._follower.state

    @property
    def generation(self) -> Generation | None:
        """The generation that is open."""
        return View(self.state).current_generation

    @property
    def number(self) -> int:
        """Of the newest generation."""
        return View(self.state).next_generation - 1

    def trains(self) -> bool:
        """Return whether a generation has committed a mini-batch and runs."""
        now = self.generation
        return (
            now is not None
            and now.phase is GenerationPhase.RUNNING
            and now.committed
            and self.job.dir.is_managed()
        )

    def is_whole(self, vms: int) -> bool:
        """Return whether it trains, and so many VMs could."""
        return self.trains() and vms == sum(vm.is_usable for vm in View(self.state).vms.values())

    def vms(self) -> list[str]:
        """Return the VMs that train."""
        now = self.generation
        return [] if now is None else [slot.vm_id for slot in now.plan.slots]

    def worker(self, vm_id: str) -> int:
        """Return the pid of a VM's newest worker.

        Raises:
            ProcessLookupError: It has ended.
        """
        pid = self._workers[vm_id]
        if os.getpgid(pid) not in self.groups(vm_id):
            raise ProcessLookupError(f"the worker of {vm_id} has ended")
        return pid

    def supervisor(self, vm_id: str) -> int:
        """Return the pid of the process that forks a VM's workers."""
        stat = Path(f"/proc/{self.worker(vm_id)}/stat").read_text()
        return int(stat.rpartition(")")[2].split()[1])

    def agent(self, vm_id: str) -> int:
        """Return the pid of a VM's agent, which leads its session."""
        return os.getsid(self.worker(vm_id))

    def groups(self, *vm_ids: str) -> frozenset[int]:
        """Return the process groups of some VMs."""
        return tree.groups([marker(self.job.name, vm_id) for vm_id in vm_ids])
