"""Remembers VMs that a cloud lists no more, for clouds that tell elsewhere when they ended.

Such a cloud drops a VM from its lists at once when it is gone. Whoever saw it before asks
what the cloud keeps of the past, and goes on listing it for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from spottrain.cloud.port.provider import LaunchRequest, Offer, Vm, VmState

KEEP_S = 3600.0
"""How long an ended VM is listed, and how long one that is missing is asked about."""
TimedVms = dict[str, tuple[float, Vm]]


class EndedVms:
    """VMs that were listed, and those of them that have ended.

    Args:
        recall: Returns the VMs of a job that ended before this process looked, None if
            that cannot be told now.
        look_up: Returns, of a job's VMs that are missing from a list, those that have
            ended.
        clock: Seconds, never going back.
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
                    self._ended.pop(vm.vm_id, None)  # of that name there is another now
                    self._seen[vm.vm_id] = (now_s, vm)

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return what is listed of a job and what was, of late.

        Raises:
            CloudError: whatever ``recall`` and ``look_up`` raise.
        """
        self.note(listed)
        if job not in self._recalled:
            self._recall(job)
        there = {vm.vm_id for vm in listed}
        with self._lock:
            missing = [
                vm
                for _, vm in self._seen.values()
                if vm.job == job and vm.vm_id not in there
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
        """Return whether a VM has ended, whatever a list that lags behind says."""
        _, past = self._ended.get(vm.vm_id, (0.0, None))
        return past is not None and vm.launched_at_s <= (past.ended_at_s or 0.0)

    def _recall(self, job: str) -> None:
        past, now_s = self._ask_recall(job), self._clock()
        if past is None:
            return
        with self._lock:
            for vm in past:
                if vm.vm_id not in self._seen:  # of those more is known
                    self._ended.setdefault(vm.vm_id, (now_s, vm))
            self._recalled.add(job)


def as_terminated(vm: Vm, at_s: float) -> Vm:
    """Return a VM that is gone."""
    return replace(vm, state=VmState.TERMINATED, ended_at_s=at_s)


def terminated_stub(
    cloud: str, region: str, zone: str, vm_id: str, job: str, at_s: float
) -> Vm:
    """Return a VM of which no more is known than that it was a job's and has ended."""
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


def terminated_from_launch(
    request: LaunchRequest, vm_id: str, from_s: float, at_s: float
) -> Vm:
    """Return a VM of a launch that was taken back before anybody saw it."""
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
