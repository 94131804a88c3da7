"""A fixed list of the user's own hosts as a provider; the hosts hold the state.

A claim on the host itself rents it, so that two jobs never share a host, wherever their
managers run. When it is freed, no process and no file is left.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from spottrain.cloud.port import provider as port
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.ssh.hosts.bootstrap import bring_up
from spottrain.cloud.ssh.hosts.memory import HostMemory, HostVm
from spottrain.cloud.ssh.hosts.start_log import AgentStarts, StartLog
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import Host, Payload, UnfitHostError, address_of
from spottrain.cloud.ssh.transport.session import trusted_keys

logger = logging.getLogger(__name__)

CLOUD = "ssh"
"""Name of cloud, region and zone in offers."""
_THREADS = 32
_FIRST_POLL_S, _POLL_S = 40.0, 2.0
_UNSTARTED_S = 1800.0
"""A claim whose agent never started expires after this time."""
_CHECKPOINT_S = 120.0
"""How long an agent may outlive its lease."""


class SshProvider(port.CloudProvider):
    """The user's hosts, as one job sees them.

    Args:
        state_dir: The job's folder for the record and for hosts' logs.
        job: Name of the job.
        hosts: All hosts, with distinct names; those of one type are identical.
        payload: The job's files and settings for each host.
    """

    name = CLOUD

    def __init__(self, state_dir: Path, job: str, hosts: Sequence[Host], payload: Payload) -> None:
        self._job = job
        self._payload = payload
        self._connections = {host.name: HostConnection(host) for host in hosts}
        self._memory = HostMemory(state_dir)
        self._owner = self._memory.read().owner
        self._manager: tuple[str, int] | None = None
        self._threads = ThreadPoolExecutor(_THREADS, "ssh")
        self._polls: dict[str, Future[None]] = {}
        self._starts = AgentStarts(CLOUD)
        self._seen: dict[str, str | None] = {}
        """The VM of each host when it was last polled."""
        self._lock = threading.Lock()

    # --- The cloud port ------------------------------------------------------------

    def offers(self) -> Sequence[port.Offer]:
        """Return one offer per type of host, with the number of free ones."""
        if not self._polls:
            self._poll_hosts()
        now_s = time.time()
        types: dict[str, list[HostConnection]] = {}
        for connection in self._connections.values():
            types.setdefault(connection.host.instance_type, []).append(connection)
        return tuple(
            replace(
                connections[0].host.offer(CLOUD, CLOUD, connections[0].host.instance_type, now_s),
                gpu=next((x.gpu for x in connections if x.gpu), ""),
                available=sum(x.free for x in connections),
            )
            for connections in types.values()
        )

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Claim free hosts; see ``CloudProvider.launch``.

        Raises:
            NoCapacityError: no host of the type is free.
        """
        self._poll_hosts()
        known = self._memory.read().tokens.get(request.token)
        if known is None:
            known = self._take(request)
        with self._memory.edit() as record:
            record.tokens[request.token] = known
            vms = tuple(record.rented[vm_id].vm for vm_id in known)
        return port.LaunchResult(vms=vms)

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return all VMs that ``job`` ever had, in their last known state."""
        if job != self._job:
            return ()
        self._poll_hosts()
        return tuple(rented.vm for rented in self._memory.read().rented.values())

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Kill all processes of some VMs, fetch their logs, free their hosts.

        Raises:
            CloudError: a host is unreachable, and an agent may still run there.
        """
        rented = self._memory.read().rented
        wanted = [rented[i] for i in vm_ids if i in rented and rented[i].is_alive]
        ends = [self._threads.submit(self._terminate, vm) for vm in wanted]
        wait_for(ends)
        for end in ends:
            end.result()

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """Bootstrap a host and start the agent there, detached.

        Returns:
            The steps that it took; none if the agent runs already.

        Raises:
            VmNotFoundError: the VM has ended, or its host is unsuitable.
            SetupError: the user's setup failed there.
            CloudError: it is not ready yet, and is waited for, or is unreachable.
        """
        connection = self._connection_of(vm_id)
        return self._starts.wait_for(
            vm_id, connection.host.place, partial(self._start, connection, vm_id, bootstrap)
        )

    # --- What else a manager needs --------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Forward agents' calls to the manager from now on; see ``CloudProvider``."""
        self._manager = address_of(manager_url)

    def ssh_target(self, vm_id: str) -> port.SshTarget | None:
        """Return how to log in to a VM's host.

        Raises:
            VmNotFoundError: the VM has ended.
            HostKeyError: the configured host key is not a public key.
        """
        host = self._connection_of(vm_id).host
        keys = (f"{key.get_name()} {key.get_base64()}" for key in trusted_keys(host))
        return port.SshTarget(
            host=host.address, user=host.user, host_keys=tuple(keys), port=host.port
        )

    def close(self) -> None:
        """Close all connections; VMs keep running."""
        self._starts.close(wait=False)
        self._threads.shutdown(wait=False, cancel_futures=True)
        for connection in self._connections.values():
            connection.hang_up()
        self._starts.close()
        self._threads.shutdown()

    # --- The state of the hosts -----------------------------------------------------

    def _poll_hosts(self) -> None:
        """Poll every host, without waiting long for slow ones."""
        with self._lock:
            first = not self._polls
            for name, connection in self._connections.items():
                if name not in self._polls or self._polls[name].done():
                    self._polls[name] = self._threads.submit(self._poll_host, connection)
            polls = list(self._polls.values())
        wait_for(polls, _FIRST_POLL_S if first else _POLL_S)
        for status in polls:
            if status.done():
                status.result()

    def _poll_host(self, connection: HostConnection) -> None:
        """Record a host's claim; free it if its VM has ended."""
        try:
            with connection.lock:
                claim, state = connection.status()
                if connection.gpu is None:
                    connection.gpu = _gpu_of(connection)
                if claim is not None and not self._is_ours(claim):
                    ours, connection.taken_by = None, f"job {claim['job']}"
                    if state == "over":
                        connection.taken_by = ""  # the next to claim it cleans it up
                else:
                    ours, connection.taken_by = claim, ""
                    if ours is not None:
                        ours = self._clear_up(connection, ours, state)
                self._record_claim(connection, ours)
            if ours is not None and state == "running" and self._manager is not None:
                connection.forward_calls(ours["vm_id"], self._manager)
        except CloudError as error:
            logger.debug("%s", error)
            self._count_as_ended(connection)

    def _is_ours(self, claim: dict[str, Any]) -> bool:
        return bool(claim["owner"] == self._owner and claim["job"] == self._job)

    def _clear_up(
        self, connection: HostConnection, claim: dict[str, Any], state: str
    ) -> dict[str, Any] | None:
        """Free a host whose VM has ended or counts as ended; return the claim."""
        known = self._memory.read().rented.get(claim["vm_id"])
        if state != "over" and (known is None or known.is_alive):
            connection.taken_by = f"VM {claim['vm_id']}"
            return claim
        self._memory.keep_logs(claim["vm_id"], connection.end(claim["vm_id"]))
        return None

    def _record_claim(self, connection: HostConnection, claim: dict[str, Any] | None) -> None:
        """Record the VM of a host, and that its earlier VMs have ended."""
        here = None if claim is None else claim["vm_id"]
        if self._seen.get(connection.host.name, "") == here:
            return
        with self._memory.edit() as record:
            for vm_id, rented in tuple(record.rented.items()):
                if rented.host == connection.host.name and vm_id != here:
                    record.end(vm_id)
            if claim is not None and here not in record.rented:
                record.rented[claim["vm_id"]] = vm_from_claim(connection.host, claim)
        self._seen[connection.host.name] = here

    def _count_as_ended(self, connection: HostConnection) -> None:
        """Count VMs as ended once their host is unreachable beyond their lease."""
        if connection.unreachable_since_s is None:
            return
        away_s = time.monotonic() - connection.unreachable_since_s
        with self._memory.edit() as record:
            for vm_id, rented in tuple(record.rented.items()):
                lived_s = rented.lease_s + _CHECKPOINT_S
                if rented.host == connection.host.name and away_s > lived_s:
                    record.end(vm_id)

    # --- Claiming and freeing hosts ---------------------------------------------------

    def _take(self, request: port.LaunchRequest) -> list[str]:
        """Claim hosts; those that the same launch claimed before count."""
        kind = request.offer.instance_type
        fitting = [x for x in self._connections.values() if x.host.instance_type == kind]
        if not fitting or request.count < 1:
            raise CloudError(
                f"launch needs a type of host and a count of at least 1: got "
                f"{request.count} of {kind}"
            )
        taken = self._taken_by(request.intent)
        while len(taken) < request.count:
            free = [connection for connection in fitting if connection.free]
            free = free[: request.count - len(taken)]
            if not free:
                break
            claims = [self._threads.submit(self._claim, x, request) for x in free]
            taken += [vm_id for claim in claims if (vm_id := claim.result())]
        if not taken:
            raise NoCapacityError(self._no_capacity_reason(kind))
        return taken

    def _taken_by(self, intent: str) -> list[str]:
        rented = self._memory.read().rented
        return [i for i, x in rented.items() if x.vm.intent == intent and x.is_alive]

    def _claim(self, connection: HostConnection, request: port.LaunchRequest) -> str | None:
        """Claim a host; return the VM's id, None if another job was faster."""
        host, now_s = connection.host, time.time()
        try:
            with connection.lock:
                session = connection.session()
                offer = replace(
                    host.offer(CLOUD, CLOUD, host.instance_type, now_s), gpu=connection.gpu or ""
                )
                claim_wanted = {
                    "vm_id": f"{host.name}-{uuid.uuid4().hex[:8]}",
                    "owner": self._owner,
                    "job": request.job,
                    "intent": request.intent,
                    "launched_at": now_s,
                    "expires_at": now_s + _UNSTARTED_S + self._payload.limit_s,
                    "lease_s": request.lease_s,
                    "private_address": session.private_address,
                    "offer": dataclasses.asdict(offer),
                }
                claim = session.call("claim", claim=claim_wanted)
                if claim["vm_id"] != claim_wanted["vm_id"]:
                    connection.taken_by = f"job {claim['job']}"
                    return None
                connection.taken_by = f"VM {claim['vm_id']}"
                self._record_claim(connection, claim)
                return str(claim["vm_id"])
        except CloudError as error:
            logger.warning("%s", error)
            connection.hang_up()
            return None

    def _no_capacity_reason(self, kind: str) -> str:
        reasons = []
        for connection in self._connections.values():
            if connection.host.instance_type == kind and not connection.free:
                last_error = connection.unfit_error or connection.last_error
                taken = f"{connection.host.name}: taken by {connection.taken_by}"
                reasons.append(str(last_error) if last_error else taken)
        return f"no host of type {kind} is free: {'; '.join(reasons)}"

    def _terminate(self, rented: HostVm) -> None:
        vm_id, connection = rented.vm.vm_id, self._connections.get(rented.host)
        if connection is not None:
            with connection.lock:
                self._memory.keep_logs(vm_id, connection.end(vm_id))
                connection.taken_by = ""
        with self._memory.edit() as record:
            record.end(vm_id)

    # --- Starting agents ------------------------------------------------------------

    def _connection_of(self, vm_id: str) -> HostConnection:
        rented = self._memory.read().rented.get(vm_id)
        if rented is None or not rented.is_alive or rented.host not in self._connections:
            raise VmNotFoundError(f"VM {vm_id} {'has ended' if rented else 'is unknown'}")
        return self._connections[rented.host]

    def _start(
        self, connection: HostConnection, vm_id: str, bootstrap: port.AgentBootstrap
    ) -> tuple[port.StartStep, ...]:
        def announce() -> None:
            connection.forward_calls(vm_id, address_of(bootstrap.manager_url))

        try:
            memory, log = self._memory, StartLog()
            started = bring_up(connection, vm_id, bootstrap, announce, self._payload, memory, log)
        except UnfitHostError as error:
            connection.unfit_error = error
            self._terminate(self._memory.read().rented[vm_id])
            raise VmNotFoundError(str(error)) from error
        return log.take() if started else ()


def _gpu_of(connection: HostConnection) -> str:
    """Return the name of a host's GPUs that its slots use: as declared, else as found."""
    host = connection.host
    if not host.uses_gpus:
        return ""
    return host.gpu or str(connection.session().call("probe")["gpu"])


def vm_from_claim(host: Host, claim: dict[str, Any]) -> HostVm:
    """Return the VM that a claim on a host describes."""
    vm = port.Vm(
        vm_id=claim["vm_id"],
        job=claim["job"],
        intent=claim["intent"],
        state=port.VmState.RUNNING,
        offer=port.Offer(**claim["offer"]),
        private_address=claim["private_address"],
        launched_at_s=claim["launched_at"],
    )
    return HostVm(vm, host.name, claim["lease_s"])
