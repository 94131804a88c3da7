"""Remembers recent calls to a cloud whose lists lag behind.

A cloud may not list a VM for seconds after its launch, and list it as running for a
minute after its deletion.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from spottrain.cloud.port.provider import Vm, VmState

KEEP_S = 180.0
"""How long our own memory takes precedence over a list."""


class RecentCalls:
    """Recent launches and terminations, by VM.

    Args:
        keep_s: How long a list may lag behind.
        clock: Monotonic clock (seconds).
    """

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._launched: dict[str, tuple[float, Vm]] = {}
        self._terminated: dict[str, float] = {}

    def launched(self, vms: Iterable[Vm]) -> None:
        """Record VMs that a launch returned."""
        with self._lock:
            for vm in vms:
                self._launched.setdefault(vm.vm_id, (self._clock(), vm))

    def terminated(self, vm_ids: Collection[str]) -> None:
        """Record VMs that the cloud agreed to end."""
        with self._lock:
            for vm_id in vm_ids:
                self._terminated.setdefault(vm_id, self._clock())

    def expects(self, vm_id: str) -> bool:
        """Return True if a VM must exist although the cloud may not know it yet."""
        with self._lock:
            self._forget()
            return vm_id in self._launched and vm_id not in self._terminated

    def reconcile(
        self,
        job: str,
        listed: Sequence[Vm],
        look: Callable[[Vm], Vm | None] = lambda vm: vm,
    ) -> tuple[Vm, ...]:
        """Return a list corrected for its lag.

        Recently launched VMs of ``job`` that are not listed yet are added; recently
        terminated ones that are listed as alive are stopping.

        Args:
            job: Whose VMs.
            listed: The cloud's list.
            look: Returns the current state of an unlisted VM, None if it has ended; for
                clouds where preempted VMs leave the list at once.
        """
        with self._lock:
            self._forget()
            ids = {vm.vm_id for vm in listed}
            unlisted = [
                vm
                for _, vm in self._launched.values()
                if vm.job == job and vm.vm_id not in ids and vm.vm_id not in self._terminated
            ]
        there = [vm for vm in map(look, unlisted) if vm is not None]
        with self._lock:
            return tuple(self._corrected(vm) for vm in (*listed, *there))

    def _corrected(self, vm: Vm) -> Vm:
        if vm.vm_id in self._terminated and vm.state.is_alive:
            return replace(vm, state=VmState.STOPPING)
        return vm

    def _forget(self) -> None:
        oldest_s = self._clock() - self._keep_s
        self._launched = {
            vm_id: (at_s, vm) for vm_id, (at_s, vm) in self._launched.items() if at_s > oldest_s
        }
        self._terminated = {
            vm_id: at_s for vm_id, at_s in self._terminated.items() if at_s > oldest_s
        }
