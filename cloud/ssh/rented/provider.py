"""Rented VMs of any cloud, bootstrapped over SSH.

Adds to a provider that only rents the start of agents and the forwarding of their calls,
in the same way as on the user's own hosts. A VM serves one job and ends with it; a claim
on it says so, as on any host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Concatenate

from spottrain.cloud.port import provider as port
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    VmNotFoundError,
)
from spottrain.cloud.port.wrapper import P, R, Wrapper
from spottrain.cloud.ssh.hosts.bootstrap import bring_up
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.rented.own_address import OwnAddressWatch
from spottrain.cloud.ssh.rented.relays import Relays
from spottrain.cloud.ssh.rented.reserved import ReservedVm, ReservedVms
from spottrain.cloud.ssh.rented.sharing import ArchiveSharing
from spottrain.cloud.ssh.rented.vm import RentedVm, VmAccess
from spottrain.cloud.ssh.transport import hosts
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh_keys import copy_key, key_file
from spottrain.storage.store import is_object_url, parse_url
from spottrain.units import counted

logger = logging.getLogger(__name__)

ANSWER_S = 600.0
"""How long a VM may take from its launch until it accepts our login."""
HOST_KEY_S = 180.0
"""How long the host key that a cloud reports may be another than the VM's."""
_THREADS = 32
_BOOTSTRAPS = 64
"""VMs that are bootstrapped in parallel."""
_PATIENCE_S = 100.0
"""Time limit of one call to start an agent; the next call continues to wait."""
_LOGS_S = 10.0
"""Time limit for fetching the logs of a VM that is terminated."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 5.0
_MAX_UNFIT = 2
"""Consecutive unsuitable VMs of one type after which no more are rented."""
_MAX_UNREACHED = 3
"""Consecutive VMs that ran and never accepted a connection, after which no more are
rented."""


class RentedVmProvider(Wrapper):
    """A job's rented VMs of one cloud, with agents on them.

    VMs can go to other jobs (``clear``, ``take``) where the cloud can move them.

    Args:
        inner: The cloud; its VMs must have an ``ssh_target``.
        state_dir: The job's folder for the record and for VMs' logs.
        job: Name of the job.
        payload: The job's files and settings for each VM.
        access: How to log in to VMs.
        own_networks: Returns the networks from which this machine comes, which VMs let
            in; None: those are fixed.
        moves_at: Returns the moment of a VM's bill, from now on, at which it can go to
            another job and is billed once (VM, now; seconds since the epoch).

    Raises:
        MisconfiguredError: the cloud's VMs are not reachable by SSH.
    """

    def __init__(
        self,
        inner: port.CloudProvider,
        state_dir: Path,
        job: str,
        payload: hosts.Payload,
        access: VmAccess,
        own_networks: Callable[[], tuple[str, ...]] | None = None,
        moves_at: Callable[[port.Vm, float], float] = lambda _, now_s: now_s,
    ) -> None:
        if not inner.can(port.CloudProvider.ssh_target):
            raise MisconfiguredError(f"{inner.name}: its VMs are not reachable by SSH")
        self.name = inner.name
        self._inner = inner
        self._job = job
        self._payload = payload.on_rented()
        self._access = access
        self._dial, self._bastion = access.dial()
        self._memory = HostMemory(state_dir)
        self._reserved = ReservedVms(state_dir)
        self._moves_at = moves_at
        self._threads = ThreadPoolExecutor(_THREADS, "rented")
        self._starters = ThreadPoolExecutor(_BOOTSTRAPS, "rented-start")
        self._lock = threading.Lock()
        self._closing = False
        self._vms: dict[str, RentedVm] = {}
        self._unfit_counts: Counter[tuple[str, str]] = Counter()
        self._unfit: dict[tuple[str, str], CloudError] = {}
        self._bare: CloudError | None = None
        """Why the job's image does not do, for any type."""
        self._unreached: set[str] = set()
        self._relays = Relays(self._running, self._for_each, self._enter, self._note_unreachable)
        self._sharing = ArchiveSharing(self._relays.may_hang_up)
        self._own_address: OwnAddressWatch | None = None
        if own_networks is not None and inner.can(port.CloudProvider.admit):
            self._own_address = OwnAddressWatch(own_networks, partial(inner.admit, job))

    def pass_on(
        self, method: Callable[Concatenate[Any, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return the cloud's answer."""
        answer: R = getattr(self._inner, method.__name__)(*args, **kwargs)
        return answer

    def can(self, ability: Callable[..., object]) -> bool:
        """See ``CloudProvider``."""
        if ability in (port.CloudProvider.clear, port.CloudProvider.take):
            return self._inner.can(port.CloudProvider.move)
        return super().can(ability)

    # --- The cloud port ------------------------------------------------------------

    def launch(self, request: port.LaunchRequest) -> port.LaunchResult:
        """Rent VMs; see ``CloudProvider.launch``.

        Raises:
            MisconfiguredError: VMs rented before were unsuitable, or out of reach.
            CloudError: the cloud's error.
        """
        if len(self._unreached) >= _MAX_UNREACHED:
            raise MisconfiguredError(
                f"{self.name}: {counted(len(self._unreached), 'VM runs', 'VMs run')} and none accepts SSH from "
                "here; nothing more is rented. 'spottrain doctor' tries whether SSH "
                "gets out of this network; see ssh_from and bastion"
            )
        unfit = self._bare or self._unfit.get(_kind(request.offer))
        if unfit is not None:
            raise MisconfiguredError(f"{request.offer.instance_type}: {unfit}")
        result = self._inner.launch(request)
        with self._lock:
            for vm in result.vms:
                self._vms.setdefault(vm.vm_id, RentedVm(vm))
        return result

    def list_vms(self, job: str) -> Sequence[port.Vm]:
        """Return the cloud's list; maintain the connections to running VMs."""
        vms = self._inner.list_vms(job)
        if job == self._job:
            vms = self._reserved.corrected(vms)
            self._sync(vms)
        return vms

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Fetch the logs of reachable VMs, and terminate all but those that others have."""
        vm_ids = [vm_id for vm_id in vm_ids if self._may_end(vm_id)]
        with self._lock:
            known = [self._vms[i] for i in vm_ids if i in self._vms]
        for rented_vm in known:
            rented_vm.mark_terminated()
        self._relays.sync()  # a relay may be one of them
        wait_for(self._for_each(known, self._fetch_logs), _LOGS_S)
        self._inner.terminate(vm_ids)
        self._for_each(known, _hang_up)

    def start_agent(self, vm_id: str, bootstrap: port.AgentBootstrap) -> Sequence[port.StartStep]:
        """Wait for login to a VM, bootstrap it, start the agent there, detached.

        Returns:
            The steps from the VM's launch on; none if the agent runs already.

        Raises:
            VmNotFoundError: the VM has ended, or was unsuitable and terminated.
            SetupError: the user's setup failed there.
            CloudError: it is not ready yet, and is waited for, or is unreachable.
        """
        rented_vm = self._vm(vm_id)
        with self._lock:
            if self._closing:
                raise CloudError(f"{rented_vm.place}: the manager is shutting down")
            start = rented_vm.start
            if start is None or start.done():
                start = self._starters.submit(self._start, rented_vm, bootstrap)
                rented_vm.start = start
        try:
            return start.result(_PATIENCE_S)
        except FutureTimeoutError as error:
            raise CloudError(
                f"{rented_vm.place}: is not ready yet, and is waited for: {rented_vm.log.doing}"
            ) from error

    def release(self, job: str) -> None:
        """Remove what a job's VMs share; not from inside: our own VM uses it.

        Raises:
            CloudError: VMs of the job still use it.
        """
        if not self._access.inside:
            self._inner.release(job)

    # --- VMs from one job to another ---------------------------------------------------

    def clear(self, vm_id: str, lease_s: float) -> None:
        """End all processes of a VM and remove the job's files; see ``CloudProvider``.

        Its lease is that of its boot, and goes on: nobody renews it but who logs in.
        """
        if self._reserved.find(vm_id) is not None:
            return
        rented_vm = self._vm(vm_id)
        rented_vm.is_reserved = True
        self._relays.leave(rented_vm)
        with rented_vm.in_use(lambda _: True):
            connection = self._enter(rented_vm)
            if connection is None:
                raise CloudError(f"{rented_vm.place}: its address is not known")
            self._memory.keep_logs(vm_id, connection.clear(vm_id))
            rented_vm.manager_address = ""
        self._reserved.put(ReservedVm(vm=rented_vm.vm))
        logger.info("%s: cleared for another job", rented_vm.place)

    def take(self, vm_id: str, giver: Path, order: str, until_s: float, image: str = "") -> port.Vm:
        """Take a cleared VM over from another job; see ``CloudProvider``.

        The moment is written down first, then tags change; whoever asks again finds
        either. Without tags it stays the other job's, and on its bill.
        """
        theirs, name = ReservedVms(giver), f"{self._job} {order}"
        intent = tags.ordered(order)
        with theirs.locked(vm_id) as reserved:
            now_s = time.time()
            if reserved is None or reserved.is_returned:
                raise VmNotFoundError(f"VM {vm_id} is not there for others any more")
            is_known = reserved.order == name
            if now_s > until_s + (port.RECEIVE_S if is_known else 0.0):
                vms = self._inner.list_vms(self._job) if is_known else ()
                if all(vm.intent != intent for vm in vms):
                    raise VmNotFoundError(f"VM {vm_id} was asked for too late")
            if not is_known:
                at_s = self._moves_at(reserved.vm, now_s)
                reserved = replace(reserved, order=name, moves_at_s=at_s)
                theirs.put(reserved)
            copy_key(key_file(giver, reserved.vm.intent), key_file(self._memory.folder, intent))
            vm = self._inner.move(
                vm_id, reserved.vm.uid, self._job, intent, reserved.moves_at_s, image
            )
            theirs.put(replace(reserved, has_moved=True))
        target = HostMemory(giver).read().targets.get(vm_id)
        if target is not None:  # a console forgets host keys
            self._memory.keep_target(vm.vm_id, target)
        with self._lock:
            self._vms.setdefault(vm.vm_id, RentedVm(vm))
        return vm

    def _may_end(self, vm_id: str) -> bool:
        """Return whether a VM is still the job's to end; others get it no more then.

        Raises:
            CloudError: whether another job has it is not known.
        """
        with self._reserved.locked(vm_id) as reserved:
            if reserved is None:
                return True
            if reserved.has_moved:
                return False
            if reserved.order and not reserved.is_returned:
                vms = self._inner.list_vms(self._job)
                if all(vm.vm_id != vm_id for vm in vms):
                    return False  # whoever took it has died since
            self._reserved.put(replace(reserved, is_returned=True))
            return True

    # --- What else a manager needs --------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Forward agents' calls to the manager from now on; see ``CloudProvider``."""
        self._relays.serve(hosts.address_of(manager_url))

    def unreachable_vms(self) -> Collection[str]:
        """Return the VMs without a working relay; see ``CloudProvider``."""
        return self._relays.unreachable_vms()

    def close(self) -> None:
        """Close all connections and the cloud; VMs keep running."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            rented_vms = tuple(self._vms.values())
        self._relays.close()
        for rented_vm in rented_vms:
            rented_vm.woken.set()
        wait_for([self._threads.submit(_hang_up, rented_vm) for rented_vm in rented_vms])
        self._starters.shutdown()
        self._threads.shutdown()
        for rented_vm in rented_vms:  # one may have connected meanwhile
            _hang_up(rented_vm)
        if self._bastion is not None:
            self._bastion.close()
        self._inner.close()

    # --- Connections ------------------------------------------------------------------

    def _for_each(
        self, rented_vms: Sequence[RentedVm], do: Callable[[RentedVm], None]
    ) -> list[Future[None]]:
        """Submit a task for each of some VMs; none once we are closing."""
        with self._lock:
            if self._closing:
                return []
            return [self._threads.submit(do, rented_vm) for rented_vm in rented_vms]

    def _vm(self, vm_id: str) -> RentedVm:
        """Return a VM of the job.

        Raises:
            VmNotFoundError: the cloud does not list it as alive.
        """
        if vm_id not in self._vms:  # rented by an earlier process
            self.list_vms(self._job)
        rented_vm = self._vms.get(vm_id)
        if rented_vm is None:
            raise VmNotFoundError(f"VM {vm_id} is unknown or has ended")
        rented_vm.check_not_terminated()
        return rented_vm

    def _sync(self, vms: Sequence[port.Vm]) -> None:
        """Update the set of live VMs, and the forwarding of their agents' calls."""
        with self._lock:
            if self._closing:
                return
            ours = [vm for vm in vms if vm.intent != tags.MANAGER]  # runs no agent
            living = {vm.vm_id: vm for vm in ours if vm.state.is_alive}
            reserved = {each.vm.vm_id for each in self._reserved.all()}
            gone = [self._vms.pop(i) for i in self._vms.keys() - living.keys()]
            for rented_vm in gone:
                rented_vm.mark_terminated()
                self._threads.submit(_hang_up, rented_vm)
            for vm_id, vm in living.items():
                known = self._vms.setdefault(vm_id, RentedVm(vm))
                known.vm, known.is_reserved = vm, known.is_reserved or vm_id in reserved
        self._relays.sync()

    def _running(self) -> list[RentedVm]:
        with self._lock:
            rented_vms = tuple(self._vms.values())
        running = (x for x in rented_vms if not x.is_terminated and not x.is_reserved)
        return [each for each in running if each.vm.state is port.VmState.RUNNING]

    def _enter(self, rented_vm: RentedVm) -> HostConnection | None:
        """Return the connection to a VM, None while its cloud does not know the address
        yet and it was never entered.

        Raises:
            VmNotFoundError: the VM has ended.
            CloudError: the cloud does not answer.
        """
        rented_vm.check_not_terminated()
        vm_id = rented_vm.vm.vm_id
        target = self._inner.ssh_target(vm_id) or self._memory.read().targets.get(vm_id)
        if target is None:
            return None
        rented_vm.target = target
        host = self._access.host(rented_vm.vm, target)
        with self._lock:
            before, connection = rented_vm.connection, rented_vm.enter(host, self._dial)
        if before is not None and before is not connection:
            before.hang_up()
        return connection

    def _fetch_logs(self, rented_vm: RentedVm) -> None:
        """Save the logs of a VM, if there is a connection to it."""
        connection, vm_id = rented_vm.connection, rented_vm.vm.vm_id
        try:
            if connection is not None and (connection.connected or rented_vm.manager_address):
                with rented_vm.in_use(self._relays.may_hang_up):
                    self._memory.keep_logs(vm_id, connection.end(vm_id, _LOGS_S))
        except (CloudError, OSError) as error:
            logger.info("%s: logs are lost: %s", rented_vm.place, error)

    # --- Starting agents ------------------------------------------------------------

    def _start(
        self, rented_vm: RentedVm, bootstrap: port.AgentBootstrap
    ) -> tuple[port.StartStep, ...]:
        try:
            with rented_vm.in_use(self._relays.may_hang_up):
                started = self._bring_up(rented_vm, bootstrap)
        except hosts.UnreachableHostError:
            rented_vm.check_not_terminated()
            self._inner.ssh_target(rented_vm.vm.vm_id)  # raises if the VM has ended
            raise
        except (hosts.UnfitHostError, AuthError) as error:
            self._terminate_unfit(rented_vm, error)
            raise VmNotFoundError(str(error)) from error
        rented_vm.note_poll(runs=True)
        self._unfit_counts.pop(_kind(rented_vm.vm.offer), None)
        return rented_vm.log.take() if started else ()

    def _bring_up(self, rented_vm: RentedVm, bootstrap: port.AgentBootstrap) -> bool:
        """Bring a VM's agent up; return False if it runs already."""
        connection = self._reach(rented_vm)
        rented_vm.log.waited(time.time() - rented_vm.vm.launched_at_s)
        self._claim(connection, rented_vm.vm.vm_id)
        manager = hosts.address_of(bootstrap.manager_url)

        def announce() -> None:
            self._relays.announce_address(rented_vm, connection, manager)

        def deliver(session: hosts.Calls, vm_id: str, name: str, archive: bytes) -> str:
            return self._sharing.deliver(rented_vm, session, name, archive)

        return bring_up(
            connection,
            rented_vm.vm.vm_id,
            bootstrap,
            announce,
            _near(self._payload, rented_vm.vm.offer.region),
            self._memory,
            rented_vm.log,
            deliver,
            has_lease=True,
        )

    def _reach(self, rented_vm: RentedVm) -> HostConnection:
        """Wait until a VM accepts our login.

        Raises:
            VmNotFoundError: it has ended.
            HostKeyError: its host key stays wrong: images may generate it twice while
                they boot, and the cloud report the first one for a moment.
            UnfitHostError: it has no suitable Python.
            AuthError, UnreachableHostError: it refuses us or does not answer in time.
        """
        began_s, pause_s = time.monotonic(), _MIN_PAUSE_S
        while True:
            last_error, rented_vm.log.doing = self._try(rented_vm)
            if isinstance(last_error, HostConnection):
                self._note_reached(rented_vm)
                return last_error
            wrong_key = isinstance(last_error, hosts.HostKeyError)
            if time.monotonic() - began_s > (HOST_KEY_S if wrong_key else ANSWER_S):
                if rented_vm.target and isinstance(last_error, hosts.UnreachableHostError):
                    self._unreached.add(rented_vm.vm.vm_id)
                raise last_error
            rented_vm.woken.wait(pause_s)
            rented_vm.check_not_terminated()
            if self._closing:
                raise hosts.UnreachableHostError(f"{rented_vm.place}: the manager is shutting down")
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _note_reached(self, rented_vm: RentedVm) -> None:
        """Keep how a VM was entered: a console forgets host keys, a manager restarts."""
        self._unreached.clear()
        if rented_vm.target is not None:
            self._memory.keep_target(rented_vm.vm.vm_id, rented_vm.target)

    def _try(self, rented_vm: RentedVm) -> tuple[HostConnection | CloudError, str]:
        """Return (connection or the current error, status text)."""
        try:
            connection = self._enter(rented_vm)
        except VmNotFoundError:
            raise
        except CloudError as error:
            return hosts.UnreachableHostError(str(error)), str(error)
        if connection is None:
            doing = "booting; its cloud has not reported its SSH host key yet"
            return hosts.UnreachableHostError(f"{rented_vm.place}: {doing}"), doing
        try:
            connection.session()
        except hosts.UnfitHostError:
            raise
        except (AuthError, hosts.UnreachableHostError) as error:
            if isinstance(error, hosts.UnreachableHostError):
                self._note_unreachable()
            return error, str(error)
        return connection, "connected"

    def _note_unreachable(self) -> None:
        """Look whether this machine has moved: then VMs no longer let it in."""
        if self._own_address is not None:
            self._own_address.unreachable()

    def _claim(self, connection: HostConnection, vm_id: str) -> None:
        """Write our claim on the VM; again after a restart of the manager."""
        owner = self._memory.read().owner
        claim = {
            "vm_id": vm_id,
            "owner": owner,
            "job": self._job,
            "expires_at": time.time() + ANSWER_S + self._payload.limit_s,
        }
        connection.session().call("claim", claim=claim)

    def _terminate_unfit(self, rented_vm: RentedVm, error: CloudError) -> None:
        """Terminate an unsuitable VM; after several, rent no more of the type.

        All VMs have one image and one setup. So where none was ever suitable, a first VM
        without torch is enough to rent no more of any type.
        """
        logger.warning("%s", error)
        self.terminate([rented_vm.vm.vm_id])
        lacks = isinstance(error, hosts.MissingSoftwareError)
        if lacks and not self._memory.known_software():
            self._bare = error
        kind = _kind(rented_vm.vm.offer)
        self._unfit_counts[kind] += 1
        if self._unfit_counts[kind] >= _MAX_UNFIT:
            self._unfit[kind] = error


def _kind(offer: port.Offer) -> tuple[str, str]:
    """Return the key (region, type) of VMs that share an image."""
    return offer.region, offer.instance_type


def _near(payload: hosts.Payload, region: str) -> hosts.Payload:
    """Return what VMs of a region get: no packages from a bucket that is known to be in
    another one, whose traffic is billed; those of an index are free."""
    if not is_object_url(payload.wheels):
        return payload
    there = parse_url(payload.wheels).options.get("region", region)
    return payload if there == region else replace(payload, wheels="")


def _hang_up(rented_vm: RentedVm) -> None:
    if rented_vm.connection is not None:
        rented_vm.connection.hang_up()
