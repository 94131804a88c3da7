"""Relays: one VM of each region forwards the calls of the region's agents.

The manager keeps one connection per region, to the relay (``on_vm.relay``). The other
VMs get the relay's address over short connections. When a relay is lost, another VM
takes its place, and the others get the new address.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.rented.vm import RentedVm
from spottrain.cloud.ssh.transport.connection import HostConnection
from spottrain.cloud.ssh.transport.hosts import UnreachableHostError

logger = logging.getLogger(__name__)

_CANDIDATES = 3
"""VMs that are tried in parallel as relay of a region."""
_SYNC_S = 1.0
"""Time between two synchronisations."""
_ELECTION_S = 3.0
"""How long a candidate may take to become the relay before others try as well."""
_PING_AFTER_S, _PING_S = 1.0, 4.0
"""A relay silent for this long is pinged; time limit of a ping."""
_LEAVE_S = 15.0
"""Longer than a poll or a ping takes."""
_SILENT_S = 2.5
"""A relay silent for longer may be lost: its region's silence proves nothing."""
OUTAGE_S = 30.0
"""How long the loss of a relay explains the silence of its region's VMs."""
_SETTLE_S = 20.0
"""How long agents may take to switch to a new relay."""


@dataclass(eq=False, slots=True)
class Region:
    """The relay of one region and its state."""

    relay: RentedVm | None = None
    address: str = ""
    """Address where the relay accepts calls."""
    changed_s: float = 0.0
    """When it became the relay (monotonic)."""
    down_since_s: float | None = None
    election: threading.Lock = field(default_factory=threading.Lock)
    """Held by the VM that is becoming the relay."""
    ping: Future[None] | None = None

    @property
    def is_up(self) -> bool:
        """True if calls are forwarded, as far as is known."""
        relay = self.relay
        if relay is None or relay.is_terminated or relay.is_reserved or relay.connection is None:
            return False
        return relay.connection.forwards_calls

    @property
    def silent_s(self) -> float:
        """Time since the relay was last heard from."""
        connection = None if self.relay is None else self.relay.connection
        return math.inf if connection is None else connection.silent_s

    def may_cause_silence(self, now_s: float) -> bool:
        """Return True if the relay may be the cause of silence in this region."""
        if self.is_up and self.silent_s < _SILENT_S:
            self.down_since_s = None
            return now_s - self.changed_s < _SETTLE_S
        if self.down_since_s is None:
            self.down_since_s = now_s
        return now_s - self.down_since_s < OUTAGE_S


class Relays:
    """The relays of one job, by region.

    Args:
        running: Returns the running VMs.
        submit: Submits a task for each of some VMs; none once we are closing.
        enter: Returns the connection to a VM, None while its address is unknown.
        unreachable: Called when a running VM cannot be reached.
    """

    def __init__(
        self,
        running: Callable[[], list[RentedVm]],
        submit: Callable[[Sequence[RentedVm], Callable[[RentedVm], None]], list[Future[None]]],
        enter: Callable[[RentedVm], HostConnection | None],
        unreachable: Callable[[], None] = lambda: None,
    ) -> None:
        self._running = running
        self._submit = submit
        self._enter = enter
        self._unreachable = unreachable
        self._manager: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._sync_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def serve(self, manager: tuple[str, int]) -> None:
        """Direct all running agents to this manager until ``close``."""
        self._manager = manager
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="relays", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop maintaining relays."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SYNC_S):
            self.sync()

    def sync(self) -> None:
        """Keep the calls of all running agents forwarded; does not block."""
        if self._manager is None:
            return
        with self._sync_lock:
            for rented_vm in self._to_poll():
                for poll in self._submit([rented_vm], self._poll):
                    rented_vm.poll = poll
            for region in self._silent_regions():
                if region.relay is not None:
                    for ping in self._submit([region.relay], _ping):
                        region.ping = ping

    def leave(self, rented_vm: RentedVm) -> None:
        """Return once nothing is asked of a VM that was just marked as reserved.

        Clearing holds the host's lock, and a ping that waits for that too long breaks the
        connection off.
        """
        self.sync()
        asked = rented_vm.poll, self._region(rented_vm).ping
        wait_for([each for each in asked if each is not None], _LEAVE_S)

    def unreachable_vms(self) -> list[str]:
        """Return the VMs whose silence their relay may cause."""
        if self._manager is None or is_direct(self._manager):
            return []
        now_s = time.monotonic()
        with self._lock:
            may_cause_silence = {
                name: x.may_cause_silence(now_s) for name, x in self._regions.items()
            }
        return [
            rented_vm.vm.vm_id
            for rented_vm in self._running()
            if may_cause_silence.get(rented_vm.vm.offer.region)
        ]

    def may_hang_up(self, rented_vm: RentedVm) -> bool:
        """Return True if no calls are forwarded over the connection to a VM."""
        region = self._region(rented_vm)
        return rented_vm.manager_address != "" and not (region.relay is rented_vm and region.is_up)

    def _poll(self, rented_vm: RentedVm) -> None:
        """Give a running agent the address for its calls, also after our restart."""
        runs = rented_vm.manager_address != ""
        with rented_vm.in_use(self.may_hang_up):
            try:
                connection = self._enter(rented_vm)
                if connection is not None and self._manager is not None:
                    claim, state = connection.status()
                    runs = claim is not None and state == "running"
                    if runs:
                        self.announce_address(rented_vm, connection, self._manager)
            except CloudError as error:
                logger.debug("%s", error)
                if isinstance(error, UnreachableHostError):
                    self._unreachable()
        rented_vm.note_poll(runs=runs)

    def _region(self, rented_vm: RentedVm) -> Region:
        with self._lock:
            return self._regions.setdefault(rented_vm.vm.offer.region, Region())

    def announce_address(
        self, rented_vm: RentedVm, connection: HostConnection, manager: tuple[str, int]
    ) -> None:
        """Give a VM's agent the address for its calls; make the VM the relay if there
        is none.

        Args:
            connection: To the VM.
            manager: Address and port of the manager.

        Raises:
            CloudError: the VM is unreachable, or its host forbids forwarding.
        """
        region = self._region(rented_vm)
        if is_direct(manager):
            self._send_address(rented_vm, connection, f"{manager[0]}:{manager[1]}")
            return
        # A slow candidate may never become the relay: then others try as well.
        mine = region.election.acquire(timeout=_ELECTION_S)
        try:
            if not region.is_up:
                self._make_relay(region, rented_vm, connection, manager)
        finally:
            if mine:
                region.election.release()
        if region.relay is rented_vm:
            rented_vm.manager_address = region.address
        else:
            self._send_address(rented_vm, connection, region.address)

    def _send_address(self, rented_vm: RentedVm, connection: HostConnection, address: str) -> None:
        connection.session().call("set_manager_address", vm_id=rented_vm.vm.vm_id, address=address)
        rented_vm.manager_address = address

    def _make_relay(
        self,
        region: Region,
        rented_vm: RentedVm,
        connection: HostConnection,
        manager: tuple[str, int],
    ) -> None:
        address = connection.forward_calls(rented_vm.vm.vm_id, manager, relay=True)
        with self._lock:
            if region.is_up and region.relay is not rented_vm:
                return  # another VM was faster
            region.relay, region.address = rented_vm, address
            region.changed_s = time.monotonic()
        logger.info("%s: relays the calls of %s", rented_vm.place, rented_vm.vm.offer.region)

    def _to_poll(self) -> list[RentedVm]:
        """Return the VMs to poll now; without a relay the best candidates."""
        manager = self._manager
        direct = manager and is_direct(manager) and f"{manager[0]}:{manager[1]}"
        found: list[RentedVm] = []
        without: dict[str, list[RentedVm]] = {}
        for rented_vm in self._running():
            region = self._region(rented_vm)
            if not rented_vm.poll_is_due:
                continue
            address = direct or (region.address if region.is_up else "")
            if not address:
                without.setdefault(rented_vm.vm.offer.region, []).append(rented_vm)
            elif rented_vm.manager_address != address:
                found.append(rented_vm)
        for waiting in without.values():
            waiting.sort(key=_rank)
            found += waiting[:_CANDIDATES]
        return found

    def _silent_regions(self) -> list[Region]:
        """Return the regions whose relay must be pinged."""
        with self._lock:
            regions = tuple(self._regions.values())
        return [
            x
            for x in regions
            if x.is_up and x.silent_s > _PING_AFTER_S and (x.ping is None or x.ping.done())
        ]


def is_direct(manager: tuple[str, int]) -> bool:
    """Return True if agents can reach the manager's address directly."""
    return manager[0] not in ("localhost", "127.0.0.1")


def _ping(rented_vm: RentedVm) -> None:
    """Ping a relay; its connection is dropped if it does not answer."""
    try:
        if rented_vm.connection is not None:
            rented_vm.connection.status(_PING_S)
    except CloudError as error:
        logger.warning("%s: no longer relays calls: %s", rented_vm.place, error)


def _rank(rented_vm: RentedVm) -> tuple[bool, bool, float]:
    """Sort key: the VMs likely to last longest first, failing ones last."""
    last_error = rented_vm.connection is not None and rented_vm.connection.last_error is not None
    return last_error, rented_vm.vm.offer.spot, rented_vm.vm.launched_at_s
