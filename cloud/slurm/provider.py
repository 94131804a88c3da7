"""Slurm as a provider: a VM is a batch job of one node that runs an agent.

``sbatch`` and a folder that the nodes share (``on_node``) are on a login node, which is this
machine or reached by SSH (``login``). Agents call a relay there. What is rented stands in the comments of the
batch jobs, so nothing about it is kept on disk.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from spottrain.cloud.clusters import LOOK_S, OVER, ClusterProvider, names_of
from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.slurm import queue
from spottrain.cloud.slurm.login import Login
from spottrain.cloud.slurm.settings import INSTANCE_TYPE, SlurmSettings
from spottrain.cloud.ssh.hosts.bootstrap import Connection
from spottrain.cloud.ssh.on_vm.package import package
from spottrain.cloud.ssh.transport.hosts import Payload, address_of
from spottrain.cloud.ssh.transport.mailbox import MailboxSession

logger = logging.getLogger(__name__)

CLOUD = "slurm"
"""Name of cloud and region in offers; zones are partitions."""
_LISTED_S = 2.0
"""How old a list may be: administrators ask not to call ``squeue`` all the time. One with a
batch job that starts or ends is soon another."""
_MOVES = (port.VmState.STARTING, port.VmState.STOPPING)
_PARTITIONS_S = 60.0


class SlurmProvider(ClusterProvider[queue.BatchJob]):
    """A Slurm cluster, as one job sees it; arguments as of ``ClusterProvider``."""

    name = CLOUD
    unit, place, instance_type = "batch job", "partition", INSTANCE_TYPE

    def __init__(
        self, state_dir: Path, uid: str, settings: SlurmSettings, payload: Payload
    ) -> None:
        super().__init__(state_dir, uid, settings, payload)
        self._settings = settings
        self._login = Login(settings)
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, MailboxSession] = {}
        self._served = 0
        """Port of the manager whose calls are relayed; 0: of none yet."""
        self._live: set[int] | None = None
        """Batch jobs that had not ended when the queue was last seen; None: it never was."""
        self._past: dict[int, queue.BatchJob] = {}
        """Those that the queue had forgotten by then, as far as accounts are kept."""
        self._said: dict[str, str] = {}
        """How batch jobs ended that failed."""
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
        wanted, usd = self._settings.partitions, self._settings.usd_per_hour
        return tuple(self._offer(name, now_s, usd) for name in wanted if name in self._up[1])

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return a job's VMs, and what waits in the queue to become one.

        Batch jobs that have ended are listed for MinJobAge (slurm.conf), usually 300 s; those
        that ended before are known where Slurm keeps accounts.
        """
        seen_s, seen = self._recently
        bound_s = LOOK_S if any(one.state in _MOVES for one in seen) else _LISTED_S
        if time.monotonic() - seen_s > bound_s:
            self._ours()
            if not self._login.relays:
                self._relay(self._served)
        return tuple(self._vm(one) for one in self._of_job(job))

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Cancel batch jobs; see ``CloudProvider.terminate``."""
        found = names_of(vm_ids, CLOUD)
        live = {str(job.number) for job in self._ours() if job.state not in OVER}
        if numbers := [number for number in found if number in live]:
            self._cancelled |= {f"slurm.{number}" for number in numbers}
            self._login.run(["scancel", *numbers])
            self._recently = -math.inf, []

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

    def release(self, job: str) -> None:
        """End a job's batch jobs, then remove its folder on the shared file system."""
        super().release(job)
        for number, name, text in self._login.call("logs", folder=self._folder):
            self._memory.keep_logs(f"slurm.{number}", {name: text})
        self._login.call("remove", folder=self._folder)

    def close(self) -> None:
        """Wait for no node any more; VMs keep running."""
        for connection in self._connections.values():
            connection.close()
        super().close()
        self._starts.close()  # waits for those that use the login
        self._login.close()

    # --- Slurm ------------------------------------------------------------------------

    def _ours(self) -> list[queue.BatchJob]:
        """Return all batch jobs of this user that are VMs."""
        asked_s = time.monotonic()
        found = queue.parse_queue(self._login.run(queue.QUEUE_ARGV))
        self._recently = asked_s, list(map(self._told, found))
        return self._recently[1]

    def _of_job(self, job: str) -> list[queue.BatchJob]:
        """Return a job's batch jobs in the queue as last seen, and those that it forgot."""
        found = {one.number: one for one in self._recently[1] if self._is_ours(one, job)}
        if self._live is None or self._live - found.keys():
            self._past = {
                one.number: self._told(one)
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
        for job in self._ours():
            token = job.tags.get(queue.TOKEN, "")
            if token.rpartition("/")[0] != request.token:
                continue
            if kept.setdefault(token, job) is not job:
                twice.append(job.vm_id)
        if twice:
            self.terminate(twice)
        return list(kept.values())

    def _submit(self, request: port.LaunchRequest) -> None:
        """Submit the batch jobs of a launch that never were.

        The queue forgets what has ended; the shared folder does not.
        """
        there = {job.tags[queue.TOKEN] for job in self._of_launch(request)}
        if len(there) >= request.count:
            return
        settings, marks = self._settings, queue.marks(request, self._uid)
        known = there | self._submitted | set(self._login.call("ran", folder=self._folder))
        given = {
            "folder": self._folder,
            "scratch": settings.scratch,
            "manager": self._address,
            "unstarted_s": self._unstarted_s,
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

    def _left(self, job: str) -> list[queue.BatchJob]:
        self._ours()
        return [one for one in self._of_job(job) if one.state is not port.VmState.TERMINATED]

    def _remove(self, left: Sequence[queue.BatchJob], since_s: float) -> None:
        self.terminate([one.vm_id for one in left])

    # --- VMs --------------------------------------------------------------------------

    def _told(self, job: queue.BatchJob) -> queue.BatchJob:
        """Return a batch job with what its node says; one of ours starts until that answers."""
        if job.tags.get(tags.UID) != self._uid:
            return job
        address = self._address_of(job.vm_id) if job.state is port.VmState.RUNNING else ""
        starts = job.state is port.VmState.RUNNING and not address
        state = port.VmState.STARTING if starts else job.state
        return replace(job, state=state, address=address, why=self._why(job))

    def _why(self, job: queue.BatchJob) -> str:
        """Return how a batch job ended; of one that failed by what it printed."""
        if job.why != queue.FAILED:
            return job.why
        if job.vm_id not in self._said:
            text = self._login.call("read", path=f"{self._folder}/{job.number}.log") or ""
            self._said[job.vm_id] = queue.failure(text)
        return self._said[job.vm_id]

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

    def _connect(self, one: queue.BatchJob) -> MailboxSession:
        with self._lock:
            if one.vm_id not in self._connections:
                host, shared = self._host(one, one.node), self._shared(one.vm_id)
                self._connections[one.vm_id] = MailboxSession(
                    host, self._login.call, self._folder, shared, one.address
                )
            return self._connections[one.vm_id]

    def _announce(self, connection: Connection, manager_url: str) -> None:
        self.serve(manager_url)

    def _unpacked(self) -> str:
        """Return the folder with our software, from which batch jobs begin."""
        ours = package()
        target = f"{self._folder}/package-{ours.sha256[:12]}"
        if not self._login.call("has", path=target):
            self._login.call("put", ours.archive, path=target, unpacks=True)
        return target
