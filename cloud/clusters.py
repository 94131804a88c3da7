"""Base of the providers of clusters with a queue: what is submitted waits, runs and ends.

An adapter says how a VM is submitted, listed, reached and ended. What is rented is found by
the marks that the cluster keeps with it, so nothing about it is kept on disk.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import (
    CloudError,
    MisconfiguredError,
    NoCapacityError,
    QueuedError,
    VmNotFoundError,
)
from spottrain.cloud.port.settings import SlotSettings
from spottrain.cloud.ssh.hosts.bootstrap import Connection, bring_up
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.hosts.start_log import AgentStarts, StartLog
from spottrain.cloud.ssh.transport.hosts import Host, Payload, UnfitHostError
from spottrain.units import counted

LOOK_S = 0.5
"""Time between two looks at what waits, starts or ends."""
_ASK_AGAIN_S = 30.0
"""Time between two questions for a launch that waits in the queue."""
_GONE_S = 300.0
"""How long what was ended may take to be gone."""
_UNSTARTED_S = 1800.0
"""A VM whose agent was never started ends after this time, besides setup and data."""
OVER = (port.VmState.STOPPING, port.VmState.TERMINATED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """What a cluster has for one VM, such as a batch job or a pod."""

    vm_id: str
    state: port.VmState
    start_s: float | None
    """When it got its node; of one that waits, when it is expected to, if that is known."""
    end_s: float | None
    why: str
    """Of one that waits, ends or has ended: why; else empty."""
    zone: str
    node: str
    address: str = ""
    owner: str
    tags: Mapping[str, str]
    is_stuck: bool = False
    """It will not start without people; ``why`` says why."""


A = TypeVar("A", bound=Allocation)


class ClusterProvider(port.CloudProvider, Generic[A]):
    """A cluster with a queue, as one job sees it.

    Args:
        state_dir: The job's folder for what its VMs have in common, and for their logs.
        uid: The job's unique id.
        settings: Of the machines.
        payload: The job's files and settings for each VM.
    """

    unit: str
    """What is submitted for one VM, for people."""
    place: str
    """What a zone is, for people."""
    instance_type: str
    start_s = 60.0
    """How long a launch waits for its VMs to run; then it says that they are queued."""

    def __init__(self, state_dir: Path, uid: str, settings: SlotSettings, payload: Payload) -> None:
        self._uid = uid
        self._slots = settings
        self._payload = payload
        self._unstarted_s = _UNSTARTED_S + payload.limit_s
        self._memory = HostMemory(state_dir)
        self._lock = threading.Lock()
        self._starts = AgentStarts(self.name)
        self._submitted: set[str] = set()
        """Tokens of what was submitted and may not be listed yet; it is not submitted again."""
        self._cancelled: set[str] = set()
        """The VMs that we ended: why they ended is no question."""
        self._recently: tuple[float, list[A]] = -math.inf, []
        """What there was, and when it was asked for (monotonic)."""
        self._recent_lock = threading.Lock()
        self._closed = threading.Event()

    # --- What an adapter says ---------------------------------------------------------

    @abstractmethod
    def _submit(self, request: port.LaunchRequest) -> None:
        """Submit what of a launch never was."""

    @abstractmethod
    def _of_launch(self, request: port.LaunchRequest) -> list[A]:
        """Return what there is of a launch."""

    @abstractmethod
    def _ours(self) -> list[A]:
        """Return what there is, at least of this job."""

    @abstractmethod
    def _left(self, job: str) -> list[A]:
        """Return what of a job is not gone yet."""

    @abstractmethod
    def _remove(self, left: Sequence[A], since_s: float) -> None:
        """Have what is left of a job end; asked again until all is gone.

        Args:
            since_s: For how long.
        """

    @abstractmethod
    def _connect(self, one: A) -> Connection:
        """Return the connection to a VM that runs.

        Raises:
            CloudError: it does not answer.
        """

    @abstractmethod
    def _announce(self, connection: Connection, manager_url: str) -> None:
        """Give a VM's agent the address for its calls."""

    def _hang_up(self, connection: Connection) -> None:
        """Leave a VM whose agent was started alone."""

    # --- The cloud port -----------------------------------------------------------------

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Submit VMs; see ``CloudProvider.launch``.

        Raises:
            QueuedError: some of them wait in the queue.
            MisconfiguredError: one of them cannot start.
        """
        self._submit(request)
        end_s = time.monotonic() + self.start_s
        while True:
            found = self._of_launch(request)
            if stuck := [one for one in found if one.is_stuck]:
                self.terminate([one.vm_id for one in stuck])
                first = stuck[0]
                raise MisconfiguredError(f"{self.name}: {first.vm_id} cannot start: {first.why}")
            waiting = [one for one in found if one.state is port.VmState.QUEUED]
            starting = any(one.state is port.VmState.STARTING for one in found)
            if not (waiting or starting) or time.monotonic() > end_s or self._closed.is_set():
                break
            self._closed.wait(LOOK_S)
        zone = request.offer.zone
        if waiting:
            why = "; ".join(sorted({one.why for one in waiting}))
            raise QueuedError(
                f"{self.place} {zone}: {counted(len(waiting), self.unit)} in the queue: {why}",
                _ASK_AGAIN_S,
            )
        if not found:
            raise NoCapacityError(f"{self.name}: {zone}: all of {request.intent} has ended")
        return port.LaunchResult(vms=tuple(map(self._vm, found)))

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """Bring the job to a VM and start the agent there.

        Raises:
            VmNotFoundError: the VM has ended, or is unsuitable.
            SetupError: the user's setup failed there.
            CloudError: it is not ready yet, and is waited for.
        """
        return self._starts.wait_for(vm_id, vm_id, partial(self._start, vm_id, bootstrap))

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs, and what waits to become one."""
        return tuple(map(self._vm, self._ours()))

    def release(self, job: str) -> None:
        """End all of a job; return when it is gone."""
        began_s = time.monotonic()
        while left := self._left(job):
            since_s = time.monotonic() - began_s
            if since_s > _GONE_S:
                count = counted(len(left), self.unit)
                raise CloudError(f"{self.name}: {count} of {job} still end")
            self._remove(left, since_s)
            self._closed.wait(LOOK_S)

    def close(self) -> None:
        """Wait for no VM any more; all keep running."""
        self._closed.set()
        self._starts.close(wait=False)

    # --- For adapters -------------------------------------------------------------------

    def _offer(self, zone: str, now_s: float, usd_per_hour: float) -> port.Offer:
        offer = self._slots.offer(self.name, zone, self.instance_type, now_s)
        return replace(offer, gpu=self._slots.gpu, usd_per_hour=usd_per_hour)

    def _vm(self, one: A) -> port.Vm:
        waits = one.state is port.VmState.QUEUED
        began_s = 0.0 if waits else one.start_s or 0.0
        return port.Vm(
            vm_id=one.vm_id,
            job=one.tags[tags.JOB],
            intent=one.tags.get(tags.INTENT, ""),
            state=one.state,
            offer=self._offer(one.zone, began_s, float(one.tags.get(tags.PRICE, 0.0))),
            private_address=one.address,
            uid=one.tags.get(tags.UID, ""),
            owner=one.owner,
            launched_at_s=began_s,
            ended_at_s=one.end_s if one.state is port.VmState.TERMINATED else None,
            why="" if one.vm_id in self._cancelled else one.why,
        )

    def _host(self, one: A, name: str) -> Host:
        return Host(
            name=name,
            address=one.address,
            port=0,
            user=one.owner,
            slots=self._slots.slots,
            uses_gpus=self._slots.uses_gpus,
        )

    def _recent(self) -> list[A]:
        """Return what there was a moment ago: many starts ask at the same time."""
        with self._recent_lock:
            if time.monotonic() - self._recently[0] > LOOK_S:
                self._recently = time.monotonic(), self._ours()
            return self._recently[1]

    def _running(self, vm_id: str) -> A:
        """Return a VM once it runs.

        Raises:
            VmNotFoundError: it has ended, or cannot start.
        """
        while not self._closed.is_set():
            one = next((one for one in self._recent() if one.vm_id == vm_id), None)
            if one is None or one.state in OVER:
                why = f": {one.why}" if one and one.why else ""
                raise VmNotFoundError(f"VM {vm_id} {'has ended' if one else 'is unknown'}{why}")
            if one.is_stuck:
                self.terminate([vm_id])
                raise VmNotFoundError(f"VM {vm_id} cannot start: {one.why}")
            if one.state is port.VmState.RUNNING and one.address:
                return one
            self._closed.wait(LOOK_S)
        raise CloudError(f"VM {vm_id}: the manager is shutting down")

    def _start(self, vm_id: str, bootstrap: port.AgentBootstrap) -> tuple[port.StartStep, ...]:
        connection = self._connect(self._running(vm_id))
        announce = partial(self._announce, connection, bootstrap.manager_url)
        memory, log = self._memory, StartLog()
        try:
            started = bring_up(connection, vm_id, bootstrap, announce, self._payload, memory, log)
        except UnfitHostError as error:
            self.terminate([vm_id])
            raise VmNotFoundError(str(error)) from error
        finally:
            self._hang_up(connection)
        return log.take() if started else ()


def names_of(vm_ids: Collection[str], cloud: str) -> list[str]:
    """Return what a cluster calls its VMs; those of other clouds are left out."""
    return [vm_id.removeprefix(f"{cloud}.") for vm_id in vm_ids if vm_id.startswith(f"{cloud}.")]
