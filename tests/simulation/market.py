"""A simulated cloud: what it rents, what it takes away, and what it bills."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.builders import a_vm, an_offer

from spottrain.cloud.port.provider import Offer, Vm, VmState

GIB = 1 << 30


def offer(zone: str, usd_per_hour: float, *, spot: bool = True) -> Offer:
    """An offer of two slots."""
    return an_offer(
        cloud="simulated",
        zone=zone,
        instance_type="box",
        spot=spot,
        usd_per_hour=usd_per_hour,
        gpu_memory_bytes=4 * GIB,
        available=0,
    )


@dataclass
class SimulatedVm:
    """The cloud's own view of a machine."""

    vm_id: str
    intent: str
    offer: Offer
    launched_at_s: float
    ended_at_s: float | None = None
    frozen: bool = False
    """Silent: nothing on it runs any more, though the cloud says it does."""
    kept: bool = False
    """Nothing of its job is on it: it waits for another one."""
    given: str = ""
    """The order by which another job has got it."""
    agent: bool = False
    slowness: float = 1.0
    """How many times longer everything takes on it."""
    doomed: bool = False
    """Already chosen by the market."""
    reports: int = 0
    memory: dict[int, tuple[int, frozenset[int]]] = field(default_factory=dict)
    """Slot to (version, sections) that the VM's memory holds."""
    _listed: Vm | None = None

    @property
    def alive(self) -> bool:
        return self.ended_at_s is None and not self.frozen and not self.kept

    def listed(self) -> Vm:
        """As ``list_vms`` shows it."""
        ended = self.ended_at_s is not None
        if self._listed is not None and self._listed.ended_at_s == self.ended_at_s:
            return self._listed
        self._listed = a_vm(
            self.vm_id,
            self.offer,
            intent=self.intent,
            state=VmState.TERMINATED if ended else VmState.RUNNING,
            launched_at_s=self.launched_at_s,
            ended_at_s=self.ended_at_s,
        )
        return self._listed


@dataclass
class Cloud:
    """Zones with a capacity each; launches are idempotent by token."""

    capacity: dict[str, int]
    prices: dict[str, float]
    vms: dict[str, SimulatedVm] = field(default_factory=dict)
    by_token: dict[str, list[str]] = field(default_factory=dict)
    prefix: str = ""
    """Of the names of its VMs."""

    def free(self, zone: str) -> int:
        used = sum(vm.ended_at_s is None and vm.offer.zone == zone for vm in self.vms.values())
        return max(0, self.capacity[zone] - used)

    def offers(self) -> tuple[Offer, ...]:
        spot = [
            replace(offer(zone, self.prices[zone]), available=self.free(zone))
            for zone in self.capacity
        ]
        dear = [offer(zone, 3.0, spot=False) for zone in self.capacity]
        return (*spot, *dear)

    def launch(self, token: str, intent: str, wanted: Offer, count: int, at_s: float) -> list[Vm]:
        if token not in self.by_token:
            given = min(count, self.free(wanted.zone))
            if given == 0:
                return []
            ids = [f"{self.prefix}vm-{len(self.vms) + i}" for i in range(given)]
            for vm_id in ids:
                self.vms[vm_id] = SimulatedVm(vm_id, intent, wanted, at_s)
            self.by_token[token] = ids
        return [self.vms[vm_id].listed() for vm_id in self.by_token[token]]

    def bill_usd(self, at_s: float) -> float:
        return sum(
            vm.offer.usd_per_hour * ((vm.ended_at_s or at_s) - vm.launched_at_s) / 3600
            for vm in self.vms.values()
        )
