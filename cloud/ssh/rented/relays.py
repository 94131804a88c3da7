"""Which VM of each region takes the calls of the region's agents: its relay.

The manager keeps one connection a region. The VM at its other end hands the calls of the
others on (``relay``); these are told where it listens over connections of a moment. When
a relay is gone, one of them takes its place, and the rest are told again.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.ssh.rented.vm import RentedVm
from spottrain.cloud.ssh.transport.connection import HostConnection

logger = logging.getLogger(__name__)

_CANDIDATES = 3
"""VMs of a region that are tried at a time while it has no relay."""
_SYNC_S = 1.0
"""From one look around to the next."""
_ELECTION_S = 3.0
"""How long one that is about to become the relay keeps others from it."""
_PING_AFTER_S, _PING_S = 1.0, 4.0
"""A relay that was quiet for so long is asked; so long it may take to answer."""
_SILENT_S = 2.5
"""A relay that was quiet for longer may be gone: its region's silence says nothing."""
OUTAGE_S = 30.0
"""How long a region without a relay excuses the silence of its VMs."""
_SETTLE_S = 20.0
"""How long agents may take to find a new relay."""


@dataclass(eq=False, slots=True)
class Region:
    """How the calls of one region come."""

    relay: RentedVm | None = None
    address: str = ""
    """Where the relay takes calls."""
    changed_s: float = 0.0
    """When it became the relay (monotonic)."""
    down_since_s: float | None = None
    election: threading.Lock = field(default_factory=threading.Lock)
    """Held by who is about to become the relay."""
    ping: Future[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether calls travel, as far as we know."""
        connection = (
            None
            if self.relay is None or self.relay.given_back
            else self.relay.connection
        )
        return connection is not None and connection.forwards_calls

    @property
    def silent_s(self) -> float:
        """For how long nothing has been heard from the relay."""
        connection = None if self.relay is None else self.relay.connection
        return math.inf if connection is None else connection.silent_s

    def may_cause_silence(self, now_s: float) -> bool:
        """Whether silence in this region may be the fault of its relay."""
        if self.is_up and self.silent_s < _SILENT_S:
            self.down_since_s = None
            return now_s - self.changed_s < _SETTLE_S
        if self.down_since_s is None:
            self.down_since_s = now_s
        return now_s - self.down_since_s < OUTAGE_S


class Relays:
    """The relays of one job, by region.

    Args:
        running: Returns the VMs that run.
        submit: Has something done for each of some VMs; nothing once we hang up.
        enter: Returns the line to a VM, if its cloud can say already how to enter it.
    """

    def __init__(
        self,
        running: Callable[[], list[RentedVm]],
        submit: Callable[
            [Sequence[RentedVm], Callable[[RentedVm], None]], list[Future[None]]
        ],
        enter: Callable[[RentedVm], HostConnection | None],
    ) -> None:
        self._running = running
        self._submit = submit
        self._enter = enter
        self._manager: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._sync_lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = threading.Event()

    def serve(self, manager: tuple[str, int]) -> None:
        """Have all agents that run call this manager from now on, until ``close``."""
        self._manager = manager
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="relays", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Care no more."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_SYNC_S):
            self.sync()

    def sync(self) -> None:
        """See that the calls of all agents that run are carried; does not block."""
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

    def unreachable_vms(self) -> list[str]:
        """Return the VMs whose silence may be the fault of their relay."""
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
        """Whether nobody's calls travel over the connection to a VM."""
        region = self._region(rented_vm)
        return rented_vm.manager_address != "" and not (
            region.relay is rented_vm and region.is_up
        )

    def _poll(self, rented_vm: RentedVm) -> None:
        """Have an agent that runs know where to call, be it from before our time."""
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
        rented_vm.note_poll(runs=runs)

    def _region(self, rented_vm: RentedVm) -> Region:
        with self._lock:
            return self._regions.setdefault(rented_vm.vm.offer.region, Region())

    def announce_address(
        self, rented_vm: RentedVm, connection: HostConnection, manager: tuple[str, int]
    ) -> None:
        """Tell a VM's agent where its calls are taken; make the VM the relay if none is.

        Args:
            rented_vm: The VM.
            connection: To it.
            manager: Address and port to which the region's calls shall come.

        Raises:
            CloudError: it cannot be told, or its host forwards nothing.
        """
        region = self._region(rented_vm)
        if is_direct(manager):
            self._send_address(rented_vm, connection, f"{manager[0]}:{manager[1]}")
            return
        # Who takes long to become the relay may never be: then others try as well.
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

    def _send_address(
        self, rented_vm: RentedVm, connection: HostConnection, address: str
    ) -> None:
        connection.session().call(
            "set_manager_address", vm_id=rented_vm.vm.vm_id, address=address
        )
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
            if region.is_up:
                return  # another one was faster
            region.relay, region.address = rented_vm, address
            region.changed_s = time.monotonic()
        logger.info(
            "%s: carries the calls of %s", rented_vm.place, rented_vm.vm.offer.region
        )

    def _to_poll(self) -> list[RentedVm]:
        """Return the VMs to look at now; only the best ones while none is the relay."""
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
        """Return the regions whose relay must be asked whether it is there."""
        with self._lock:
            regions = tuple(self._regions.values())
        return [
            x
            for x in regions
            if x.is_up
            and x.silent_s > _PING_AFTER_S
            and (x.ping is None or x.ping.done())
        ]


def is_direct(manager: tuple[str, int]) -> bool:
    """Whether agents reach the manager by themselves, by its address and port."""
    return manager[0] not in ("localhost", "127.0.0.1")


def _ping(rented_vm: RentedVm) -> None:
    """Ask a relay for a sign of life; without one its connection is given up."""
    try:
        if rented_vm.connection is not None:
            rented_vm.connection.status(_PING_S)
    except CloudError as error:
        logger.warning("%s: carries no calls any more: %s", rented_vm.place, error)


def _rank(rented_vm: RentedVm) -> tuple[bool, bool, float]:
    """Sort by who will be there longest, those in trouble last."""
    last_error = (
        rented_vm.connection is not None and rented_vm.connection.last_error is not None
    )
    return last_error, rented_vm.vm.offer.spot, rented_vm.vm.launched_at_s
