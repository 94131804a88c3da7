"""The state of the local cloud and its transitions; no I/O, no clock.

Methods get the time as an argument, in seconds since the epoch.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spottrain.cloud.local.market import MarketEvent, MarketSpec, ZoneSpec
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.provider import (
    LaunchRequest,
    LaunchResult,
    Offer,
    Vm,
    VmState,
)

CLOUD = "local"
"""Name of cloud and region in offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Settings of a cloud process."""

    job: str
    market: MarketSpec
    idle_s: float
    """How long the process outlives its last VM and the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSoftware:
    """The software of whoever has an agent started; the cloud's process may be older."""

    version: str
    argv: tuple[str, ...]
    """Command of an agent; the path of its ``agent.json`` is appended."""
    path: str
    """Folder of the package ``spottrain``."""


@dataclass(slots=True)
class _Zone:
    spec: ZoneSpec
    capacity: int
    spot_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNotice:
    """The notice that a VM will be preempted."""

    number: int
    """Increases over the life of the cloud."""
    kill_at_s: float
    """Seconds since the epoch."""


class LocalCloud:
    """Zones, prices and VMs of one job.

    A VM uses its zone's capacity from its launch to its end. An event that takes a VM
    back (notice, kill, silence) lowers the capacity at once; the VM no longer uses
    capacity, although a noticed or silent one still runs.

    Args:
        settings: Settings of the cloud process.
        vms: VMs of earlier cloud processes of the job, all terminated.
        tokens: Launches of earlier cloud processes: token to VM ids.
    """

    def __init__(
        self,
        settings: LocalSettings,
        vms: tuple[Vm, ...] = (),
        tokens: dict[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.settings = settings
        self.vms = {vm.vm_id: vm for vm in vms}
        """By id, in order of launch."""
        self.tokens = dict(tokens or {})
        self.notices: dict[str, LocalNotice] = {}
        """Notices by VM id."""
        self.silent: set[str] = set()
        """VMs whose processes are stopped for good."""
        self.cleared: set[str] = set()
        """VMs with nothing of the job on them, for other jobs."""
        self._taken: set[str] = set()
        self._slowed: set[str] = set()
        self._hits = 0
        self._zones = {
            zone.name: _Zone(zone, zone.capacity, zone.spot_usd_per_hour)
            for zone in settings.market.zones
        }

    def vm(self, vm_id: str) -> Vm:
        """Return a VM that has not ended.

        Raises:
            VmNotFoundError: it is unknown or has ended.
        """
        vm = self.vms.get(vm_id)
        if vm is None or not vm.state.is_alive:
            raise VmNotFoundError(f"VM {vm_id} is {vm.state if vm else 'unknown'}")
        return vm

    @property
    def alive(self) -> tuple[str, ...]:
        """VMs that have not ended yet."""
        return tuple(i for i, v in self.vms.items() if v.state != VmState.TERMINATED)

    def offers(self, now_s: float) -> tuple[Offer, ...]:
        """Return a spot and an on-demand offer for each zone."""
        return tuple(
            self._offer(zone, spot, now_s)
            for zone in self._zones.values()
            for spot in (True, False)
        )

    def _offer(self, zone: _Zone, spot: bool, now_s: float) -> Offer:
        spec = zone.spec
        usd = zone.spot_usd_per_hour if spot else spec.on_demand_usd_per_hour
        return Offer(
            cloud=CLOUD,
            region=CLOUD,
            zone=spec.name,
            instance_type=spec.instance_type,
            spot=spot,
            usd_per_hour=usd,
            observed_at_s=now_s,
            gpus=spec.slots,
            gpu_memory_bytes=spec.slot_memory_bytes,
            gpu_speed=spec.slot_speed,
            shared_cores=len(os.sched_getaffinity(0)),
            available=self._available(zone) if spot else None,
        )

    def _available(self, zone: _Zone) -> int:
        """Return how many more spot VMs a zone has."""
        used = sum(
            vm.offer.zone == zone.spec.name
            and vm.offer.spot
            and vm.state != VmState.TERMINATED
            and vm_id not in self._taken
            for vm_id, vm in self.vms.items()
        )
        return max(0, zone.capacity - used)

    def launch(
        self, request: LaunchRequest, now_s: float, new_id: Callable[[], str]
    ) -> LaunchResult:
        """Rent machines at the current price; the same token yields the same VMs.

        Raises:
            NoCapacityError: the zone has no machine left; the token stays unused.
            CloudError: there is no such offer.
        """
        if request.token not in self.tokens:
            self.tokens[request.token] = self._rent(request, now_s, new_id)
        vms = tuple(self.vms[vm_id] for vm_id in self.tokens[request.token])
        return LaunchResult(vms=vms)

    def _rent(
        self, request: LaunchRequest, now_s: float, new_id: Callable[[], str]
    ) -> tuple[str, ...]:
        zone = self._zones.get(request.offer.zone)
        if zone is None or zone.spec.instance_type != request.offer.instance_type:
            raise CloudError(
                f"the local market has no {request.offer.instance_type} in zone "
                f"{request.offer.zone}; choose one of its offers"
            )
        if request.count < 1 or request.job != self.settings.job:
            raise CloudError(
                f"launch needs a count of at least 1 for job {self.settings.job}: "
                f"got {request.count} for {request.job}"
            )
        count, spot = request.count, request.offer.spot
        if spot:
            count = min(count, self._available(zone))
        if count == 0:
            raise NoCapacityError(
                f"zone {zone.spec.name} has no {zone.spec.instance_type} left; "
                "try again later or in another zone"
            )
        offer = self._offer(zone, spot, now_s)
        vms = [
            Vm(
                vm_id=new_id(),
                job=request.job,
                intent=request.intent,
                state=VmState.STARTING if zone.spec.boot_s else VmState.RUNNING,
                offer=offer,
                private_address="127.0.0.1",
                launched_at_s=now_s,
            )
            for _ in range(count)
        ]
        self.vms.update({vm.vm_id: vm for vm in vms})
        return tuple(vm.vm_id for vm in vms)

    def give(self, vm_id: str, order: str, until_s: float, now_s: float) -> Vm:
        """End a cleared VM for another job, which has it from now on; return it as it was.

        The same order may ask again, later too.

        Raises:
            VmNotFoundError: it has ended, is not cleared, or the order is late.
        """
        token = f"given {order}"
        if self.tokens.get(token) == (vm_id,):
            return self.vms[vm_id]
        is_there = self.vm(vm_id).state is VmState.RUNNING and vm_id in self.cleared
        if not is_there or vm_id in self._taken or now_s > until_s:
            raise VmNotFoundError(f"VM {vm_id} is not there for others any more")
        self.ended(vm_id, now_s)
        self.tokens[token] = (vm_id,)
        return self.vms[vm_id]

    def receive(self, given: Vm, order: str, until_s: float, now_s: float) -> Vm:
        """Add a VM that another job has given, running, from when that job's bill ended.

        The same order gets it once.

        Raises:
            VmNotFoundError: it is too late, or its zone is not here, or is full: the
                machine has ended.
        """
        intent = tags.ordered(order)
        if intent not in self.tokens:
            zone = self._zones.get(given.offer.zone)
            is_full = zone is not None and given.offer.spot and not self._available(zone)
            if zone is None or is_full or now_s > until_s:
                why = "came too late" if now_s > until_s else "has no room here"
                raise VmNotFoundError(f"VM {given.vm_id} {why}, and has ended")
            machine, _, hops = given.vm_id.partition(".")
            vm = replace(
                given,
                vm_id=f"{machine}.{int(hops or 0) + 1}",
                job=self.settings.job,
                intent=intent,
                state=VmState.RUNNING,
                launched_at_s=given.ended_at_s or now_s,
                ended_at_s=None,
            )
            self.vms[vm.vm_id] = vm
            self.tokens[intent] = (vm.vm_id,)
        return self.vms[self.tokens[intent][0]]

    def boot_s(self, vm_id: str) -> float:
        """Return how long this VM takes from launch to running."""
        return self._zones[self.vms[vm_id].offer.zone].spec.boot_s

    def booted(self, vm_id: str) -> None:
        """Set a VM to running, if it is still starting."""
        if self.vms[vm_id].state == VmState.STARTING:
            self._set(vm_id, state=VmState.RUNNING)

    def stopping(self, vm_id: str) -> None:
        """Set a VM to stopping."""
        self._set(vm_id, state=VmState.STOPPING)

    def ended(self, vm_id: str, now_s: float) -> None:
        """Set a VM to terminated; its billing ends."""
        self._set(vm_id, state=VmState.TERMINATED, ended_at_s=now_s)
        self.notices.pop(vm_id, None)

    def _set(self, vm_id: str, **changes: Any) -> None:
        self.vms[vm_id] = replace(self.vms[vm_id], **changes)

    def apply(self, event: MarketEvent, now_s: float) -> tuple[str, ...]:
        """Apply a market event; return the affected VMs.

        Raises:
            CloudError: there is no such zone.
        """
        if event.zone is not None and event.zone not in self._zones:
            raise CloudError(
                f"the local market has no zone {event.zone}: got {', '.join(self._zones)}"
            )
        if event.kind == "capacity":
            self._zones[event.zone or ""].capacity = event.count
            return ()
        if event.kind == "price":
            self._zones[event.zone or ""].spot_usd_per_hour = event.usd_per_hour or 0.0
            return ()
        self._hits += 1
        victims = self._victims(event)
        if event.kind == "slow":
            self._slowed.update(victims)
            return victims
        for vm_id in victims:
            self._taken.add(vm_id)
            zone = self._zones[self.vms[vm_id].offer.zone]
            zone.capacity = max(0, zone.capacity - 1)
            if event.kind == "notice":
                at_s = now_s + event.lead_s
                self.notices[vm_id] = LocalNotice(number=self._hits, kill_at_s=at_s)
            if event.kind == "silence":
                self.silent.add(vm_id)
        return victims

    def _victims(self, event: MarketEvent) -> tuple[str, ...]:
        """Choose among running spot VMs that the market has not taken back yet.

        No VM is slowed down twice.
        """
        excluded = self._taken | (self._slowed if event.kind == "slow" else set())
        candidates = [
            vm_id
            for vm_id, vm in self.vms.items()
            if vm.offer.spot
            and vm.state == VmState.RUNNING
            and vm_id not in excluded
            and event.zone in (None, vm.offer.zone)
        ]
        if event.machine is not None:
            return tuple(candidates[event.machine : event.machine + 1])
        rng = random.Random(f"{self.settings.market.seed}/strike/{self._hits}")
        return tuple(rng.sample(candidates, min(event.count, len(candidates))))

    def restore_capacity(self, vm_id: str) -> None:
        """Return the capacity that the market took with this VM."""
        self._zones[self.vms[vm_id].offer.zone].capacity += 1
