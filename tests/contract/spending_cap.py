"""Keeps a run of the contract suite against a real account below a cap in dollars."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from spottrain.cloud.port.errors import (
    AuthError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
)
from spottrain.cloud.port.provider import (
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    Vm,
)

MAX_VM_S = 1800.0
"""No VM lasts longer, whatever becomes of us: it ends itself a quarter of an hour after
its start, since it never hears from a manager, or its cloud's hard stop ends it."""
MIN_BILLED_S = 60.0
"""Every cloud bills a minute at least."""
MAX_VMS = 4
"""At the same time."""
_NOTHING_RENTED = (
    AuthError,
    MisconfiguredError,
    NoCapacityError,
    PriceTooHighError,
    QuotaExceededError,
)


class CapError(AssertionError):
    """Something would cost more than was agreed to."""


@dataclass
class _Launch:
    """VMs of one launch, and what they may cost yet or have cost."""

    usd_per_hour: float
    since_s: float
    alive: int
    spent_usd: float = 0.0

    @property
    def max_usd(self) -> float:
        """Maximum cost."""
        return self.spent_usd + self.alive * self.usd_per_hour * MAX_VM_S / 3600


class SpendingCap:
    """The spending cap, and what was spent.

    A VM counts as if it lasted ``MAX_VM_S`` until it is terminated, so whatever happens the
    sum stays below the cap.

    Args:
        cap_usd: The most that all VMs together may cost.
        clock: Seconds, never going back.
    """

    def __init__(self, cap_usd: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._cap_usd = cap_usd
        self._clock = clock
        self._lock = threading.Lock()
        self._holds: dict[str, _Launch] = {}
        self._vms: dict[str, str] = {}

    @property
    def max_usd(self) -> float:
        """Maximum cost of all launches."""
        return sum(hold.max_usd for hold in self._holds.values())

    def hold(self, request: LaunchRequest) -> None:
        """Agree to a launch; the same token counts once.

        Raises:
            CapError: it would cost too much, or be too many VMs.
        """
        offer, count = request.offer, request.count
        with self._lock:
            if request.token in self._holds:
                return
            new = _Launch(offer.usd_per_hour, self._clock(), count)
            alive = sum(hold.alive for hold in self._holds.values())
            if alive + count > MAX_VMS:
                raise CapError(f"{alive} VMs are there, {count} more are too many")
            if self.max_usd + new.max_usd > self._cap_usd:
                raise CapError(
                    f"{count} {offer.instance_type} may cost {new.max_usd:.2f} USD, "
                    f"all before {self.max_usd:.2f} USD: above the cap of "
                    f"{self._cap_usd:g} USD"
                )
            self._holds[request.token] = new

    def rented(self, token: str, vms: Collection[Vm]) -> None:
        """Note what came of a launch; nothing: it was refused."""
        with self._lock:
            self._holds[token].alive = len(vms)
            self._vms |= {vm.vm_id: token for vm in vms}

    def returned(self, vm_ids: Collection[str]) -> None:
        """Note VMs that were given back."""
        with self._lock:
            for vm_id in vm_ids:
                token = self._vms.pop(vm_id, None)
                if token is not None:
                    hold = self._holds[token]
                    lasted_s = max(MIN_BILLED_S, self._clock() - hold.since_s)
                    hold.spent_usd += hold.usd_per_hour * lasted_s / 3600
                    hold.alive -= 1


class Capped(CloudProvider):
    """A provider that checks the spending cap before it rents; its cheapest offer comes first.

    Args:
        inner: The real one.
        spending_cap: Shared by all providers.
    """

    def __init__(self, inner: CloudProvider, spending_cap: SpendingCap) -> None:
        self.name = inner.name
        self._inner = inner
        self._spending_cap = spending_cap

    def offers(self) -> Sequence[Offer]:
        """See ``CloudProvider``."""
        return sorted(self._inner.offers(), key=lambda offer: offer.usd_per_hour)

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """See ``CloudProvider``.

        Raises:
            CapError: the launch would exceed the cap.
        """
        self._spending_cap.hold(request)
        try:
            result = self._inner.launch(request)
        except _NOTHING_RENTED:
            self._spending_cap.rented(request.token, ())
            raise
        self._spending_cap.rented(request.token, result.vms)
        return result

    def list_vms(self, job: str) -> Sequence[Vm]:
        """See ``CloudProvider``."""
        return self._inner.list_vms(job)

    def terminate(self, vm_ids: Collection[str]) -> None:
        """See ``CloudProvider``."""
        self._inner.terminate(vm_ids)
        self._spending_cap.returned(vm_ids)

    def release(self, job: str) -> None:
        """See ``CloudProvider``."""
        self._inner.release(job)
