"""Slurm as a provider: a VM is a batch job of one node that runs an agent.

``sbatch`` and a folder that the nodes share (``on_node``) are on a login node, which is this
machine or reached by SSH (``login``). Agents call a relay there. What is rented stands in the comments of the
batch jobs, so nothing about it is kept on disk.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import (
    CloudError,
    NoCapacityError,
    QueuedError,
    VmNotFoundError,
)
from spottrain.cloud.slurm import queue
from spottrain.cloud.slurm.login import Login
from spottrain.cloud.slurm.settings import INSTANCE_TYPE, SlurmSettings
from spottrain.cloud.ssh.hosts.bootstrap import bring_up
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.hosts.start_log import AgentStarts, StartLog
from spottrain.cloud.ssh.on_vm.package import package
from spottrain.cloud.ssh.transport.hosts import Host, Payload, UnfitHostError, address_of
from spottrain.cloud.ssh.transport.mailbox import MailboxSession
from spottrain.units import counted

logger = logging.getLogger(__name__)

CLOUD = "slurm"
"""Name of cloud and region in offers; zones are partitions."""
_LOOK_S = 0.5
_ASK_AGAIN_S = 30.0
"""Time between two questions for a launch that waits in the queue."""
_END_S = 300.0
"""How long batch jobs may take to end: KillWait (slurm.conf) and an epilog."""
_UNSTARTED_S = 1800.0
"""A batch job whose agent was never started ends after this time, besides setup and data."""
_LISTED_S = 2.0
"""How old a list may be: administrators ask not to call ``squeue`` all the time."""
_PARTITIONS_S = 60.0
_NEVER: tuple[float, list[queue.BatchJob]] = -math.inf, []
_ID = re.compile(r"slurm\.(\d+)")


class SlurmProvider(port.CloudProvider):
    """A Slurm cluster, as one job sees it.

    Args:
        state_dir: The job's folder for what its VMs have in common, and for their logs.
        uid: The job's unique id.
        settings: Of the batch jobs.
        payload: The job's files and settings for each VM.
    """

    name = CLOUD
    start_s = 60.0
    """How long a launch waits for its batch jobs to run; then it says that they are queued."""

    def __init__(
        self, state_dir: Path, uid: str, settings: SlurmSettings, payload: Payload
    ) -> None:
        self._uid = uid
        self._settings = settings
        self._payload = payload
        self._login = Login(settings)
        self._memory = HostMemory(state_dir)
        self._lock = threading.Lock()
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, MailboxSession] = {}
        self._starts = AgentStarts(CLOUD)
        self._served = 0
        """Port of the manager whose calls are relayed; 0: of none yet."""
        self._cancelled: set[str] = set()
        """The VMs that we ended: who cancelled them is no question."""
        self._submitted: set[str] = set()
        """Tokens of batch jobs that may not have begun to run yet."""
        self._live: set[int] | None = None
        """Batch jobs that had not ended when the queue was last seen; None: it never was."""
        self._past: dict[int, queue.BatchJob] = {}
        """Those that the queue had forgotten by then, as far as accounts are kept."""
        self._said: dict[str, str] = {}
        """The last lines that batch jobs printed which failed."""
        self._seen: tuple[float, list[queue.BatchJob]] = _NEVER
        """The queue, and when it was asked for (monotonic)."""
        self._up: tuple[float, set[str]] = 0.0, set()
        """The partitions that take jobs, and when that was asked for."""

    # --- The cloud port ------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return one offer per partition that takes jobs.

        How many of its nodes are idle is no bound: who asks for more waits in its queue.
        """
        now_s = time.time()
        if now_s - self._up[0] > _PARTITIONS_S:
            asked = ["sinfo", "--noheader", "--format=%R|%a"]
            rows = (line.split("|") for line in self._login.run(asked).splitlines())
            self._up = now_s, {name for name, state in rows if state == "up"}
        wanted = self._settings.partitions
        return tuple(self._offer(name, now_s) for name in wanted if name in self._up[1])

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Submit batch jobs; see ``CloudProvider.launch``.

        Raises:
            QueuedError: some of them wait in the queue.
        """
        jobs = self._of_launch(request)
        if len(jobs) < request.count:
            self._submit(request, {job.tags[queue.TOKEN] for job in jobs})
        end_s = time.monotonic() + self.start_s
        while True:
            jobs = self._of_launch(request)
            vms = tuple(self._vm(job) for job in jobs)
            waiting = [vm for vm in vms if vm.state is port.VmState.QUEUED]
            starting = any(vm.state is port.VmState.STARTING for vm in vms)
            if not (waiting or starting) or time.monotonic() > end_s:
                break
            time.sleep(_LOOK_S)
        if waiting:
            why = ", ".join(sorted({vm.why for vm in waiting}))
            raise QueuedError(
                f"partition {request.offer.zone}: {counted(len(waiting), 'batch job')} in the "
                f"queue: {why}",
                _ASK_AGAIN_S,
            )
        if not jobs:
            raise NoCapacityError(
                f"slurm: {request.offer.zone}: all jobs of {request.intent} ended"
            )
        return port.LaunchResult(vms=vms)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return a job's VMs, and what waits in the queue to become one.

        Batch jobs that have ended are listed for MinJobAge (slurm.conf), usually 300 s; those
        that ended before are known where Slurm keeps accounts.
        """
        if time.monotonic() - self._seen[0] > _LISTED_S:
            self._queue()
            if not self._login.relays:
                self._relay(self._served)
        return tuple(self._vm(one) for one in self._of_job(job))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Cancel batch jobs; see ``CloudProvider.terminate``."""
        found = [match[1] for vm_id in vm_ids if (match := _ID.fullmatch(vm_id))]
        over = (port.VmState.STOPPING, port.VmState.TERMINATED)
        live = {job.number for job in self._queue() if job.state not in over}
        if numbers := [number for number in found if int(number) in live]:
            self._cancelled |= {f"slurm.{number}" for number in numbers}
            self._login.run(["scancel", *numbers])
            self._seen = _NEVER

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """Bring the job to a node and start the agent there, in its batch job.

        Raises:
            VmNotFoundError: the VM has ended, or its node is unsuitable.
            SetupError: the user's setup failed there.
            CloudError: it is not ready yet, and is waited for.
        """
        return self._starts.wait_for(vm_id, vm_id, partial(self._start, vm_id, bootstrap))

    # --- What else a manager needs --------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Relay agents' calls to the manager from now on; see ``CloudProvider``."""
        _, manager_port = address_of(manager_url)
        with self._lock:
            if self._served != manager_port:
                self._relay(manager_port)

    def check(self) -> Sequence[port.Finding]:
        """Check that the cluster answers, and would take the job's batch jobs."""
        return tuple(
            port.run_check(name, partial(self._login.would_take, name), "partition")
            for name in self._settings.partitions
        )

    def principal(self) -> str:
        """Return the user whose batch jobs these are."""
        return str(self._login.call("user"))

    def list_all(self) -> Sequence[port.Vm]:
        """Return the VMs of all jobs of this user, and what waits to become one."""
        return tuple(self._vm(job) for job in self._queue())

    def release(self, job: str) -> None:
        """Remove the job's folder on the shared file system, once no VM uses it."""
        end_s = time.monotonic() + _END_S
        while left := [vm for vm in self.list_vms(job) if vm.state is not port.VmState.TERMINATED]:
            self.terminate([vm.vm_id for vm in left if vm.state is not port.VmState.STOPPING])
            if time.monotonic() > end_s:
                raise CloudError(f"slurm: {counted(len(left), 'batch job')} of {job} still end")
            time.sleep(_LOOK_S)
        for number, name, text in self._login.call("logs", folder=self._folder):
            self._memory.keep_logs(f"slurm.{number}", {name: text})
        self._login.call("remove", folder=self._folder)

    def close(self) -> None:
        """Wait for no node any more; VMs keep running."""
        for connection in self._connections.values():
            connection.close()
        self._starts.close()
        self._login.close()

    # --- Slurm ------------------------------------------------------------------------

    def _queue(self) -> list[queue.BatchJob]:
        """Return all batch jobs of this user that are VMs of ours."""
        asked_s = time.monotonic()
        found = queue.parse_queue(self._login.run(queue.QUEUE_ARGV))
        self._seen = asked_s, found
        return found

    def _of_job(self, job: str) -> list[queue.BatchJob]:
        """Return a job's batch jobs in the queue as last seen, and those that it forgot."""
        found = {one.number: one for one in self._seen[1] if self._is_ours(one, job)}
        if self._live is None or self._live - found.keys():
            self._past = {
                one.number: one
                for one in self._ask_accounts(job)
                if one.state is port.VmState.TERMINATED and self._is_ours(one, job)
            }
        over = port.VmState.TERMINATED
        self._live = {number for number, one in found.items() if one.state is not over}
        return list({**self._past, **found}.values())

    def _ask_accounts(self, job: str) -> list[queue.BatchJob]:
        """Return a job's batch jobs as Slurm's accounting knows them, if it does."""
        try:
            said = self._login.run(queue.past_argv(job)) if self._has_accounts else ""
        except CloudError as error:
            logger.warning("batch jobs that ended long ago are not known: %s", error)
            return []
        return queue.parse_queue(said)

    @cached_property
    def _has_accounts(self) -> bool:
        said = self._login.run(["scontrol", "show", "config"])
        return "accounting_storage/slurmdbd" in said

    def _is_ours(self, found: queue.BatchJob, job: str) -> bool:
        return found.tags[tags.JOB] == job and found.tags.get(tags.UID) == self._uid

    def _of_launch(self, request: port.LaunchRequest) -> list[queue.BatchJob]:
        """Return the batch jobs of a launch in the queue; what is there twice is cancelled.

        Only an ``sbatch`` whose answer was lost, and which the controller carried out after
        it was asked what there is, leads to that.
        """
        kept: dict[str, queue.BatchJob] = {}
        twice = []
        for job in self._queue():
            token = job.tags.get(queue.TOKEN, "")
            if token.rpartition("/")[0] != request.token:
                continue
            if kept.setdefault(token, job) is not job:
                twice.append(job.vm_id)
        if twice:
            self.terminate(twice)
        return list(kept.values())

    def _submit(self, request: port.LaunchRequest, known: set[str]) -> None:
        """Submit the batch jobs of a launch that never were.

        The queue forgets what has ended; the shared folder does not.
        """
        settings, marks = self._settings, queue.marks(request, self._uid)
        known = known | self._submitted | set(self._login.call("ran", folder=self._folder))
        given = {
            "folder": self._folder,
            "scratch": settings.scratch,
            "manager": self._address,
            "unstarted_s": _UNSTARTED_S + self._payload.limit_s,
            "claim": {"owner": self._uid, "job": request.job, "intent": request.intent},
        }
        package, name = self._unpacked(), queue.name_of(request.job)
        for number in range(request.count):
            token = f"{request.token}/{number}"
            if token in known:
                continue
            comment = {**marks, queue.TOKEN: token}
            argv = queue.launch_argv(settings, self._folder, request.offer.zone, name, comment)
            self._login.run(argv, queue.script(settings, package, {**given, "token": token}))
            self._submitted.add(token)

    def _relay(self, manager_port: int) -> None:
        at = self._login.relay(self._address, manager_port)
        self._login.call("write", path=f"{self._folder}/manager.address", text=at)
        self._served = manager_port

    @cached_property
    def _address(self) -> str:
        """The login node's address for the nodes."""
        return self._login.address()

    # --- VMs --------------------------------------------------------------------------

    def _offer(self, partition: str, now_s: float, usd_per_hour: float | None = None) -> port.Offer:
        offer = self._settings.offer(CLOUD, partition, INSTANCE_TYPE, now_s)
        given_usd = offer.usd_per_hour if usd_per_hour is None else usd_per_hour
        return replace(offer, gpu=self._settings.gpu, usd_per_hour=given_usd)

    def _vm(self, job: queue.BatchJob) -> port.Vm:
        state, address, began_s = job.state, "", job.start_s or 0.0
        if state is port.VmState.QUEUED:
            began_s = 0.0
        elif state is port.VmState.RUNNING:
            address = self._address_of(job.vm_id)
            state = state if address else port.VmState.STARTING
        return port.Vm(
            vm_id=job.vm_id,
            job=job.tags[tags.JOB],
            intent=job.tags.get(tags.INTENT, ""),
            state=state,
            offer=self._offer(job.partition, began_s, float(job.tags.get(tags.PRICE, 0.0))),
            private_address=address,
            uid=job.tags.get(tags.UID, ""),
            owner=job.user,
            launched_at_s=began_s,
            ended_at_s=job.end_s if state is port.VmState.TERMINATED else None,
            why="" if job.vm_id in self._cancelled else self._why(job),
        )

    def _why(self, job: queue.BatchJob) -> str:
        """Return how a batch job ended; of one that failed also the last line that it printed."""
        if job.why != queue.FAILED or job.tags.get(tags.UID) != self._uid:
            return job.why
        if job.vm_id not in self._said:
            text = self._login.call("read", path=f"{self._folder}/{job.number}.log") or ""
            self._said[job.vm_id] = text.strip().rpartition("\n")[2]
        return f"{job.why}: {self._said[job.vm_id] or 'it printed nothing'}"

    def _address_of(self, vm_id: str) -> str:
        """Return a node's address, empty until its program runs."""
        if vm_id not in self._addresses:
            text = self._login.call("read", path=f"{self._shared(vm_id)}/node.json")
            if text is None:
                return ""
            self._addresses[vm_id] = json.loads(text)["address"]
        return self._addresses[vm_id]

    @cached_property
    def _folder(self) -> str:
        """The job's folder on the shared file system."""
        path = f"{self._settings.folder}/{self._uid or 'no-job'}"
        return str(self._login.call("folder", path=path))

    def _shared(self, vm_id: str) -> str:
        return f"{self._folder}/{vm_id.removeprefix('slurm.')}"

    def _connection_of(self, vm_id: str) -> MailboxSession:
        """Return the connection to a VM's node, once its batch script runs.

        Raises:
            VmNotFoundError: it has ended.
        """
        while True:
            job = next((job for job in self._queue() if job.vm_id == vm_id), None)
            if job is None or job.state in (port.VmState.STOPPING, port.VmState.TERMINATED):
                raise VmNotFoundError(f"VM {vm_id} {'has ended' if job else 'is unknown'}")
            if address := self._address_of(vm_id):
                break
            time.sleep(_LOOK_S)
        with self._lock:
            if vm_id not in self._connections:
                settings = self._settings
                host = Host(
                    name=job.node,
                    address=address,
                    port=0,
                    user=job.user,
                    slots=settings.slots,
                    uses_gpus=settings.uses_gpus,
                )
                self._connections[vm_id] = MailboxSession(
                    host, self._login.call, self._folder, self._shared(vm_id), address
                )
            return self._connections[vm_id]

    def _start(self, vm_id: str, bootstrap: port.AgentBootstrap) -> tuple[port.StartStep, ...]:
        def announce() -> None:
            self.serve(bootstrap.manager_url)

        connection = self._connection_of(vm_id)
        try:
            memory, log = self._memory, StartLog()
            started = bring_up(connection, vm_id, bootstrap, announce, self._payload, memory, log)
        except UnfitHostError as error:
            self.terminate([vm_id])
            raise VmNotFoundError(str(error)) from error
        return log.take() if started else ()

    def _unpacked(self) -> str:
        """Return the folder with our software, from which batch jobs begin."""
        ours = package()
        target = f"{self._folder}/package-{ours.sha256[:12]}"
        if not self._login.call("has", path=target):
            self._login.call("put", ours.archive, path=target, unpacks=True)
        return target
