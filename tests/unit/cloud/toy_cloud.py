"""A cloud in memory that can be down, for what is built on clouds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from tests.builders import a_vm, an_offer

from spottrain.cloud.port.errors import CloudError, NoCapacityError, VmNotFoundError
from spottrain.cloud.port.provider import (
    AgentBootstrap,
    CloudProvider,
    LaunchRequest,
    LaunchResult,
    Offer,
    Quota,
    SpotPool,
    SshTarget,
    StartStep,
    Vm,
    VmState,
)


class ToyCloud(CloudProvider):
    """Rents machines of one kind; VMs end at once.

    Args:
        name: Of the cloud.
        capacity: Machines that it has.
    """

    def __init__(self, name: str, capacity: int = 3) -> None:
        self.name = name
        self.down = False
        self.vms: dict[str, Vm] = {}
        self.tokens: dict[str, tuple[str, ...]] = {}
        self.released: list[str] = []
        self.closed = False
        self._capacity = capacity

    def _answer(self) -> None:
        if self.down:
            raise CloudError(f"{self.name}: does not answer")

    def offers(self) -> Sequence[Offer]:
        self._answer()
        offer = an_offer(
            cloud=self.name,
            region=f"{self.name}-r",
            zone=f"{self.name}-z",
            gpu_memory_bytes=1 << 34,
        )
        return (offer,)

    def launch(self, request: LaunchRequest) -> LaunchResult:
        self._answer()
        if request.token not in self.tokens:
            alive = sum(vm.state is VmState.RUNNING for vm in self.vms.values())
            given = min(request.count, self._capacity - alive)
            if given <= 0:
                raise NoCapacityError(f"{self.name}: nothing left")
            ids = tuple(f"{self.name}.v.{len(self.vms) + i}" for i in range(given))
            for vm_id in ids:
                self.vms[vm_id] = a_vm(
                    vm_id,
                    request.offer,
                    job=request.job,
                    intent=request.intent,
                    launched_at_s=1.0,
                )
            self.tokens[request.token] = ids
        vms = tuple(self.vms[vm_id] for vm_id in self.tokens[request.token])
        return LaunchResult(vms=vms)

    def list_vms(self, job: str) -> Sequence[Vm]:
        self._answer()
        return tuple(vm for vm in self.vms.values() if vm.job == job)

    def terminate(self, vm_ids: Collection[str]) -> None:
        self._answer()
        for vm_id in vm_ids:
            if vm_id in self.vms:
                gone = replace(self.vms[vm_id], state=VmState.TERMINATED, ended_at_s=2.0)
                self.vms[vm_id] = gone

    def release(self, job: str) -> None:
        self._answer()
        self.released.append(job)

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> Sequence[StartStep]:
        self._answer()
        if vm_id not in self.vms:
            raise VmNotFoundError(f"{self.name}: no {vm_id}")
        return ()

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        self._answer()
        if vm_id not in self.vms:
            raise VmNotFoundError(f"{self.name}: no {vm_id}")
        return SshTarget(host=vm_id, user="u", host_keys=())

    def list_all(self) -> Sequence[Vm]:
        self._answer()
        return tuple(self.vms.values())

    def close(self) -> None:
        self.closed = True


class CountedCloud(ToyCloud):
    """One that knows its quotas and the time, and whose agents can be reached."""

    serving = ""

    def quotas(self) -> Sequence[Quota]:
        self._answer()
        return (Quota(region="r", family="f", spot=True, limit=8.0, unit="vcpu"),)

    def spot_pools(self, count: int) -> Sequence[SpotPool]:
        return (SpotPool(cloud=self.name, region="r", zone="z", instance_type="t"),)

    def time_s(self) -> float | None:
        return 7.0

    def serve(self, manager_url: str) -> None:
        self.serving = manager_url

    def unreachable_vms(self) -> Collection[str]:
        return ("gcp.v.1",)
