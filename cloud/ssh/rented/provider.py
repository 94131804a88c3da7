"""Rented VMs that are brought up over SSH, whichever cloud they are from.

A provider that only rents (``ReachedBySsh``) gets what a manager needs beside: agents are
brought to its VMs and their calls carried, in the same way as on hosts of the user's own.
A VM serves one job and ends with it; on it our claim says so, as on any host.
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
from pathlib import Path
from typing import Any, Concatenate
from urllib.parse import urlsplit

from spottrain.cloud.port import tags
from spottrain.cloud.port.abilities import ForwardsAbilities, P, R
from spottrain.cloud.port.errors import (
    AuthError,
    CloudError,
    MisconfiguredError,
    VmNotFoundError,
)
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    ReachedBySsh,
    ReleasesJob,
    StartsAgents,
    Vm,
    VmState,
)
from spottrain.cloud.ssh.hosts.bootstrap import bring_up
from spottrain.cloud.ssh.hosts.memory import HostMemory
from spottrain.cloud.ssh.rented.relays import Relays
from spottrain.cloud.ssh.rented.vm import RentedVm, VmAccess
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import (
    HostKeyError,
    Payload,
    UnfitHostError,
    UnreachableHostError,
)

logger = logging.getLogger(__name__)

ANSWER_S = 600.0
"""How long a VM may take from its launch until it lets us in."""
_THREADS = 32
_BOOTSTRAPS = 64
"""VMs that are made ready at the same time."""
_PATIENCE_S = 100.0
"""How long one call may take to start an agent; the next one goes on waiting."""
_LOGS_S = 10.0
"""How long a VM that is given back may take to hand over its logs."""
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.5, 5.0
_MAX_UNFIT = 2
"""VMs of one type that turn out unfit, one after another, before none is rented more."""


class RentedVmProvider(ForwardsAbilities):
    """The VMs that one job rents from a cloud, with agents on them.

    It has every optional ability that the cloud has.

    Args:
        inner: Rents the VMs; must be ``ReachedBySsh``.
        state_dir: The job's own folder for what is remembered and for VMs' logs.
        job: Name of the job.
        payload: What each VM is given.
        access: How VMs are entered.

    Raises:
        MisconfiguredError: the cloud's VMs are not reached by SSH.
    """

    def __init__(
        self,
        inner: CloudProvider,
        state_dir: Path,
        job: str,
        payload: Payload,
        access: VmAccess,
    ) -> None:
        if not isinstance(inner, ReachedBySsh):
            raise MisconfiguredError(f"{inner.name}: its VMs are not reached by SSH")
        self.name = inner.name
        self._inner: CloudProvider = inner
        self._ssh: ReachedBySsh = inner
        self._job = job
        self._payload = payload.on_rented()
        self._access = access
        self._dial, self._bastion = access.dial()
        self._memory = HostMemory(state_dir)
        self._threads = ThreadPoolExecutor(_THREADS, "rented")
        self._starters = ThreadPoolExecutor(_BOOTSTRAPS, "rented-start")
        self._lock = threading.Lock()
        self._closing = False
        self._vms: dict[str, RentedVm] = {}
        self._unfit_counts: Counter[tuple[str, str]] = Counter()
        self._unfit: dict[tuple[str, str], CloudError] = {}
        self._relays = Relays(self._running, self._for_each, self._enter)
        # Our own way starts agents. Inside, our own VM uses what a release would remove.
        own = (StartsAgents, ReleasesJob) if access.inside else (StartsAgents,)
        self._forward_abilities(
            lambda ability: ability not in own and isinstance(inner, ability),
            self._forward,
        )

    def _forward(self, method: Callable[Concatenate[Any, P], R]) -> Callable[P, R]:
        bound: Callable[P, R] = getattr(self._inner, method.__name__)
        return bound

    # --- The cloud port ------------------------------------------------------------

    def offers(self) -> Sequence[Offer]:
        """Return what can be rented now."""
        return self._inner.offers()

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Rent VMs; see ``CloudProvider.launch``.

        Raises:
            MisconfiguredError: those rented before turned out unfit.
            CloudError: as the cloud says.
        """
        unfit = self._unfit.get(_kind(request.offer))
        if unfit is not None:
            raise MisconfiguredError(f"{request.offer.instance_type}: {unfit}")
        result = self._inner.launch(request)
        with self._lock:
            for vm in result.vms:
                self._vms.setdefault(vm.vm_id, RentedVm(vm))
        return result

    def list_vms(self, job: str) -> Sequence[Vm]:
        """Return what the cloud says; see to the connections to VMs that run."""
        vms = self._inner.list_vms(job)
        if job == self._job:
            self._sync(vms)
        return vms

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Fetch the logs of VMs that can be reached, and give all of them back."""
        with self._lock:
            known = [self._vms[i] for i in vm_ids if i in self._vms]
        for rented_vm in known:
            rented_vm.mark_given_back()
        self._relays.sync()  # a relay may be among them
        wait_for(self._for_each(known, self._fetch_logs), _LOGS_S)
        self._inner.terminate(vm_ids)
        self._for_each(known, _hang_up)

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> None:
        """Wait until a VM lets us in, make it ready, start the agent there, detached.

        Raises:
            VmNotFoundError: the VM is gone, or turned out unfit and was given back.
            SetupError: the user's setup failed there.
            CloudError: it is still being made ready, or cannot be reached.
        """
        rented_vm = self._vm(vm_id)
        with self._lock:
            if self._closing:
                raise CloudError(f"{rented_vm.place}: the manager leaves")
            start = rented_vm.start
            if start is None or start.done():
                start = self._starters.submit(self._start, rented_vm, bootstrap)
                rented_vm.start = start
        try:
            start.result(_PATIENCE_S)
        except FutureTimeoutError as error:
            raise CloudError(
                f"{rented_vm.place}: is still being made ready: {rented_vm.doing}"
            ) from error

    # --- What else a manager needs --------------------------------------------------

    def serve(self, manager_url: str) -> None:
        """Carry agents' calls to the manager from now on; see ``CarriesCalls``."""
        self._relays.serve(_address(manager_url))

    def unreachable_vms(self) -> Collection[str]:
        """Return the VMs whose region is without a way to us; see ``ExcusesSilence``."""
        return self._relays.unreachable_vms()

    def close(self) -> None:
        """Hang up everywhere, and leave the cloud; VMs go on."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            rented_vms = tuple(self._vms.values())
        self._relays.close()
        for rented_vm in rented_vms:
            rented_vm.woken.set()
        wait_for(
            [self._threads.submit(_hang_up, rented_vm) for rented_vm in rented_vms]
        )
        self._starters.shutdown()
        self._threads.shutdown()
        for rented_vm in rented_vms:  # who was just connecting has connected
            _hang_up(rented_vm)
        if self._bastion is not None:
            self._bastion.close()
        leave = getattr(self._inner, "close", None)
        if leave is not None:
            leave()

    # --- Connections ------------------------------------------------------------------

    def _for_each(
        self, rented_vms: Sequence[RentedVm], do: Callable[[RentedVm], None]
    ) -> list[Future[None]]:
        """Set about something for each of some VMs; nothing once we hang up."""
        with self._lock:
            if self._closing:
                return []
            return [self._threads.submit(do, rented_vm) for rented_vm in rented_vms]

    def _vm(self, vm_id: str) -> RentedVm:
        """Return a VM of the job.

        Raises:
            VmNotFoundError: the cloud does not list it as alive.
        """
        if vm_id not in self._vms:  # rented before our time
            self.list_vms(self._job)
        rented_vm = self._vms.get(vm_id)
        if rented_vm is None:
            raise VmNotFoundError(f"VM {vm_id} is gone or unknown")
        rented_vm.check_not_given_back()
        return rented_vm

    def _sync(self, vms: Sequence[Vm]) -> None:
        """Know the VMs that live, and see that their agents' calls are carried."""
        with self._lock:
            if self._closing:
                return
            ours = [vm for vm in vms if vm.intent != tags.MANAGER]  # runs no agent
            living = {vm.vm_id: vm for vm in ours if vm.state.is_alive}
            gone = [self._vms.pop(i) for i in self._vms.keys() - living.keys()]
            for rented_vm in gone:
                rented_vm.mark_given_back()
                self._threads.submit(_hang_up, rented_vm)
            for vm_id, vm in living.items():
                self._vms.setdefault(vm_id, RentedVm(vm)).vm = vm
        self._relays.sync()

    def _running(self) -> list[RentedVm]:
        with self._lock:
            rented_vms = tuple(self._vms.values())
        return [
            g for g in rented_vms if g.vm.state is VmState.RUNNING and not g.given_back
        ]

    def _enter(self, rented_vm: RentedVm) -> HostConnection | None:
        """Return the line to a VM, None if its cloud cannot say yet how to enter it.

        Raises:
            VmNotFoundError: the VM is gone.
            CloudError: the cloud does not answer.
        """
        rented_vm.check_not_given_back()
        target = self._ssh.ssh_target(rented_vm.vm.vm_id)
        if target is None:
            return None
        host = self._access.host(rented_vm.vm, target)
        with self._lock:
            before, connection = rented_vm.connection, rented_vm.enter(host, self._dial)
        if before is not None and before is not connection:
            before.hang_up()
        return connection

    def _fetch_logs(self, rented_vm: RentedVm) -> None:
        """Keep the logs of a VM, if there is a connection to it."""
        connection, vm_id = rented_vm.connection, rented_vm.vm.vm_id
        try:
            if connection is not None and (
                connection.connected or rented_vm.manager_address
            ):
                with rented_vm.in_use(self._relays.may_hang_up):
                    self._memory.keep_logs(vm_id, connection.end(vm_id, _LOGS_S))
        except (CloudError, OSError) as error:
            logger.info("%s: its logs are lost: %s", rented_vm.place, error)

    # --- How an agent is brought to life ------------------------------------------------

    def _start(self, rented_vm: RentedVm, bootstrap: AgentBootstrap) -> None:
        try:
            with rented_vm.in_use(self._relays.may_hang_up):
                self._bring_up(rented_vm, bootstrap)
        except UnreachableHostError:
            rented_vm.check_not_given_back()
            self._ssh.ssh_target(rented_vm.vm.vm_id)  # whoever is gone cannot answer
            raise
        except (UnfitHostError, AuthError) as error:
            self._give_back(rented_vm, error)
            raise VmNotFoundError(str(error)) from error
        rented_vm.note_poll(runs=True)
        self._unfit_counts.pop(_kind(rented_vm.vm.offer), None)

    def _bring_up(self, rented_vm: RentedVm, bootstrap: AgentBootstrap) -> None:
        connection = self._reach(rented_vm)
        self._claim(connection, rented_vm.vm.vm_id)
        rented_vm.doing = "software, setup and agent"
        manager = _address(bootstrap.manager_url)

        def announce_address() -> None:
            self._relays.announce_address(rented_vm, connection, manager)

        def report(doing: str) -> None:
            rented_vm.doing = doing

        same = self._memory.same_software
        bring_up(
            connection,
            rented_vm.vm.vm_id,
            bootstrap,
            announce_address,
            self._payload,
            same,
            report,
        )

    def _reach(self, rented_vm: RentedVm) -> HostConnection:
        """Wait until a VM lets us in.

        Raises:
            VmNotFoundError: it is gone.
            HostKeyError: it cannot prove who it is.
            UnfitHostError: it has no suitable Python.
            AuthError, UnreachableHostError: it does not let us in or answer in time.
        """
        deadline_s, pause_s = time.monotonic() + ANSWER_S, _MIN_PAUSE_S
        while True:
            last_error, rented_vm.doing = self._try(rented_vm)
            if isinstance(last_error, HostConnection):
                return last_error
            if time.monotonic() > deadline_s:
                raise last_error
            rented_vm.woken.wait(pause_s)
            rented_vm.check_not_given_back()
            if self._closing:
                raise UnreachableHostError(f"{rented_vm.place}: the manager leaves")
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    def _try(self, rented_vm: RentedVm) -> tuple[HostConnection | CloudError, str]:
        """Return the line to a VM that lets us in, or why it does not yet."""
        try:
            connection = self._enter(rented_vm)
        except VmNotFoundError:
            raise
        except CloudError as error:
            return UnreachableHostError(str(error)), str(error)
        if connection is None:
            doing = "boots; its cloud has not shown its SSH host key yet"
            return UnreachableHostError(f"{rented_vm.place}: {doing}"), doing
        try:
            connection.session()
        except (HostKeyError, UnfitHostError):
            raise
        except (AuthError, UnreachableHostError) as error:
            return error, str(error)
        return connection, "connected"

    def _claim(self, connection: HostConnection, vm_id: str) -> None:
        """Note on the VM whose it is; again after a restart of the manager."""
        owner = self._memory.read().owner
        claim = {
            "vm_id": vm_id,
            "owner": owner,
            "job": self._job,
            "expires_at": time.time() + ANSWER_S + self._payload.limit_s,
        }
        connection.session().call("claim", claim=claim)

    def _give_back(self, rented_vm: RentedVm, error: CloudError) -> None:
        """Return a VM on which no agent can run; after some, rent no more of the kind."""
        logger.warning("%s", error)
        self.terminate([rented_vm.vm.vm_id])
        kind = _kind(rented_vm.vm.offer)
        self._unfit_counts[kind] += 1
        if self._unfit_counts[kind] >= _MAX_UNFIT:
            self._unfit[kind] = error


def _kind(offer: Offer) -> tuple[str, str]:
    """Return what VMs share an image by."""
    return offer.region, offer.instance_type


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or 443


def _hang_up(rented_vm: RentedVm) -> None:
    if rented_vm.connection is not None:
        rented_vm.connection.hang_up()
