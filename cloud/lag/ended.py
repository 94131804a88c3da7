"""Remembers ended VMs for clouds that stop listing them at once.

Such a cloud reports end times elsewhere, in a log of operations. VMs that were listed
before and are missing now are looked up there, and listed as ended for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spottrain.cloud.port.provider import LaunchRequest, Offer, Vm, VmState

KEEP_S = 3600.0
"""How long an ended VM is listed, and how long a missing one is looked up."""
TimedVms = dict[str, tuple[float, Vm]]


class EndedVms:
    """VMs that were listed, and those that have ended since.

    Args:
        recall: Returns the VMs of a job that ended before this process started, None if
            they are unknown now.
        look_up: Returns those of a job's missing VMs that have ended.
        clock: Monotonic clock (seconds).
    """

    def __init__(
        self,
        recall: Callable[[str], Sequence[Vm] | None],
        look_up: Callable[[str, Sequence[Vm]], Sequence[Vm]],
        clock: Callable[[], float],
    ) -> None:
        self._ask_recall = recall
        self._look_up = look_up
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: TimedVms = {}
        self._ended: TimedVms = {}
        self._recalled: set[str] = set()

    def note(self, vms: Iterable[Vm]) -> None:
        """Note VMs that exist."""
        now_s = self._clock()
        with self._lock:
            for vm in vms:
                if not self._has_ended(vm):
                    self._ended.pop(vm.vm_id, None)  # a new VM has the same name
                    self._seen[vm.vm_id] = (now_s, vm)

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return the listed VMs of a job and those that ended recently.

        Raises:
            CloudError: errors of ``recall`` and ``look_up``.
        """
        self.note(listed)
        if job not in self._recalled:
            self._recall(job)
        there = {vm.vm_id for vm in listed}
        with self._lock:
            missing = [
                vm for _, vm in self._seen.values() if vm.job == job and vm.vm_id not in there
            ]
        found = self._look_up(job, missing) if missing else ()
        now_s = self._clock()
        with self._lock:
            for vm in found:
                self._seen.pop(vm.vm_id, None)
                self._ended.setdefault(vm.vm_id, (now_s, vm))
            self._seen = _newer_than(self._seen, now_s - KEEP_S)
            self._ended = _newer_than(self._ended, now_s - KEEP_S)
            past = [vm for _, vm in self._ended.values() if vm.job == job]
            return (*(vm for vm in listed if not self._has_ended(vm)), *past)

    def _has_ended(self, vm: Vm) -> bool:
        """Return True if a VM has ended, even if a list still has it."""
        _, past = self._ended.get(vm.vm_id, (0.0, None))
        return past is not None and vm.launched_at_s <= (past.ended_at_s or 0.0)

    def _recall(self, job: str) -> None:
        past, now_s = self._ask_recall(job), self._clock()
        if past is None:
            return
        with self._lock:
            for vm in past:
                if vm.vm_id not in self._seen:  # more is known of those
                    self._ended.setdefault(vm.vm_id, (now_s, vm))
            self._recalled.add(job)


def as_terminated(vm: Vm, at_s: float) -> Vm:
    """Return a VM as terminated."""
    return replace(vm, state=VmState.TERMINATED, ended_at_s=at_s)


def terminated_stub(cloud: str, region: str, zone: str, vm_id: str, job: str, at_s: float) -> Vm:
    """Return a terminated VM of a job of which nothing else is known."""
    offer = Offer(
        cloud=cloud,
        region=region,
        zone=zone,
        instance_type="",
        spot=True,
        usd_per_hour=0.0,
        observed_at_s=at_s,
        gpus=0,
        gpu_memory_bytes=0,
    )
    return Vm(
        vm_id=vm_id,
        job=job,
        intent="",
        state=VmState.TERMINATED,
        offer=offer,
        private_address="",
        launched_at_s=at_s,
        ended_at_s=at_s,
    )


def terminated_from_launch(request: LaunchRequest, vm_id: str, from_s: float, at_s: float) -> Vm:
    """Return a VM of a launch that ended before it was ever listed."""
    return Vm(
        vm_id=vm_id,
        job=request.job,
        intent=request.intent,
        state=VmState.TERMINATED,
        offer=request.offer,
        private_address="",
        launched_at_s=from_s,
        ended_at_s=at_s,
    )


def _newer_than(noted: TimedVms, than_s: float) -> TimedVms:
    return {key: (at_s, vm) for key, (at_s, vm) in noted.items() if at_s > than_s}
