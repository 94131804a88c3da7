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
_CARE_S = 1.0
"""From one look around to the next."""
_TURN_S = 3.0
"""How long one that is about to become the relay keeps others from it."""
_PING_AFTER_S, _PING_S = 1.0, 4.0
"""A relay that was quiet for so long is asked; so long it may take to answer."""
_QUIET_S = 2.5
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
    away_since_s: float | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    """Held by who is about to become the relay."""
    ping: Future[None] | None = None

    @property
    def is_up(self) -> bool:
        """Whether calls travel, as far as we know."""
        connection = (
            None if self.relay is None or self.relay.left else self.relay.connection
        )
        return connection is not None and connection.carries

    @property
    def quiet_s(self) -> float:
        """For how long nothing has been heard from the relay."""
        connection = None if self.relay is None else self.relay.connection
        return math.inf if connection is None else connection.quiet_s

    def excuses(self, now_s: float) -> bool:
        """Whether silence in this region may be the fault of its relay."""
        if self.is_up and self.quiet_s < _QUIET_S:
            self.away_since_s = None
            return now_s - self.changed_s < _SETTLE_S
        if self.away_since_s is None:
            self.away_since_s = now_s
        return now_s - self.away_since_s < OUTAGE_S


class Relays:
    """The relays of one job, by region.

    Args:
        running: Returns the VMs that run.
        set_about: Has something done for each of some VMs; nothing once we hang up.
        enter: Returns the line to a VM, if its cloud can say already how to enter it.
    """

    def __init__(
        self,
        running: Callable[[], list[RentedVm]],
        set_about: Callable[
            [Sequence[RentedVm], Callable[[RentedVm], None]], list[Future[None]]
        ],
        enter: Callable[[RentedVm], HostConnection | None],
    ) -> None:
        self._running = running
        self._set_about = set_about
        self._enter = enter
        self._manager: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._regions: dict[str, Region] = {}
        self._caring = threading.Lock()
        self._thread: threading.Thread | None = None
        self._left = threading.Event()

    def serve(self, manager: tuple[str, int]) -> None:
        """Have all agents that run call this manager from now on, until ``close``."""
        self._manager = manager
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._keep_caring, name="relays", daemon=True
            )
            self._thread.start()

    def close(self) -> None:
        """Care no more."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()

    def _keep_caring(self) -> None:
        while not self._left.wait(_CARE_S):
            self.sync()

    def sync(self) -> None:
        """See that the calls of all agents that run are carried; does not block."""
        if self._manager is None:
            return
        with self._caring:
            for rented_vm in self._untold():
                for look in self._set_about([rented_vm], self._look):
                    rented_vm.look = look
            for region in self._quiet():
                if region.relay is not None:
                    for ping in self._set_about([region.relay], _ping):
                        region.ping = ping

    def out_of_reach(self) -> list[str]:
        """Return the VMs whose silence may be the fault of their relay."""
        if self._manager is None or is_direct(self._manager):
            return []
        now_s = time.monotonic()
        with self._lock:
            excuses = {name: x.excuses(now_s) for name, x in self._regions.items()}
        return [
            rented_vm.vm.vm_id
            for rented_vm in self._running()
            if excuses.get(rented_vm.vm.offer.region)
        ]

    def may_hang_up(self, rented_vm: RentedVm) -> bool:
        """Whether nobody's calls travel over the connection to a VM."""
        region = self._region(rented_vm)
        return rented_vm.told != "" and not (region.relay is rented_vm and region.is_up)

    def _look(self, rented_vm: RentedVm) -> None:
        """Have an agent that runs know where to call, be it from before our time."""
        runs = rented_vm.told != ""
        with rented_vm.in_use(self.may_hang_up):
            try:
                connection = self._enter(rented_vm)
                if connection is not None and self._manager is not None:
                    claim, state = connection.look()
                    runs = claim is not None and state == "running"
                    if runs:
                        self.tell(rented_vm, connection, self._manager)
            except CloudError as error:
                logger.debug("%s", error)
        rented_vm.looked(runs=runs)

    def _region(self, rented_vm: RentedVm) -> Region:
        with self._lock:
            return self._regions.setdefault(rented_vm.vm.offer.region, Region())

    def tell(
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
            self._point(rented_vm, connection, f"{manager[0]}:{manager[1]}")
            return
        # Who takes long to become the relay may never be: then others try as well.
        mine = region.turn.acquire(timeout=_TURN_S)
        try:
            if not region.is_up:
                self._become(region, rented_vm, connection, manager)
        finally:
            if mine:
                region.turn.release()
        if region.relay is rented_vm:
            rented_vm.told = region.address
        else:
            self._point(rented_vm, connection, region.address)

    def _point(
        self, rented_vm: RentedVm, connection: HostConnection, address: str
    ) -> None:
        connection.session().call("point", vm_id=rented_vm.vm.vm_id, address=address)
        rented_vm.told = address

    def _become(
        self,
        region: Region,
        rented_vm: RentedVm,
        connection: HostConnection,
        manager: tuple[str, int],
    ) -> None:
        address = connection.carry(rented_vm.vm.vm_id, manager, relay=True)
        with self._lock:
            if region.is_up:
                return  # another one was faster
            region.relay, region.address = rented_vm, address
            region.changed_s = time.monotonic()
        logger.info(
            "%s: carries the calls of %s", rented_vm.place, rented_vm.vm.offer.region
        )

    def _untold(self) -> list[RentedVm]:
        """Return the VMs to look at now; only the best ones while none is the relay."""
        manager = self._manager
        direct = manager and is_direct(manager) and f"{manager[0]}:{manager[1]}"
        found: list[RentedVm] = []
        without: dict[str, list[RentedVm]] = {}
        for rented_vm in self._running():
            region = self._region(rented_vm)
            if not rented_vm.may_be_looked_at:
                continue
            address = direct or (region.address if region.is_up else "")
            if not address:
                without.setdefault(rented_vm.vm.offer.region, []).append(rented_vm)
            elif rented_vm.told != address:
                found.append(rented_vm)
        for waiting in without.values():
            waiting.sort(key=_rank)
            found += waiting[:_CANDIDATES]
        return found

    def _quiet(self) -> list[Region]:
        """Return the regions whose relay must be asked whether it is there."""
        with self._lock:
            regions = tuple(self._regions.values())
        return [
            x
            for x in regions
            if x.is_up
            and x.quiet_s > _PING_AFTER_S
            and (x.ping is None or x.ping.done())
        ]


def is_direct(manager: tuple[str, int]) -> bool:
    """Whether agents reach the manager by themselves, by its address and port."""
    return manager[0] not in ("localhost", "127.0.0.1")


def _ping(rented_vm: RentedVm) -> None:
    """Ask a relay for a sign of life; without one its connection is given up."""
    try:
        if rented_vm.connection is not None:
            rented_vm.connection.look(_PING_S)
    except CloudError as error:
        logger.warning("%s: carries no calls any more: %s", rented_vm.place, error)


def _rank(rented_vm: RentedVm) -> tuple[bool, bool, float]:
    """Sort by who will be there longest, those in trouble last."""
    trouble = (
        rented_vm.connection is not None and rented_vm.connection.trouble is not None
    )
    return trouble, rented_vm.vm.offer.spot, rented_vm.vm.launched_at_s
