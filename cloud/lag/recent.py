"""Remembers what we just asked of a cloud whose lists lag behind.

A cloud may not list a VM for seconds after it was made, and list it as running for a
minute after it was deleted. Whoever asked knows better.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace

from spottrain.cloud.port.provider import Vm, VmState

KEEP_S = 180.0
"""How long our own memory outweighs a list."""


class RecentCalls:
    """What was launched and terminated of late, by VM.

    Args:
        keep_s: How long a list may lag behind.
        clock: Seconds, never going back.
    """

    def __init__(
        self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._lock = threading.Lock()
        self._launched: dict[str, tuple[float, Vm]] = {}
        self._terminated: dict[str, float] = {}

    def launched(self, vms: Iterable[Vm]) -> None:
        """Note VMs that a launch returned."""
        with self._lock:
            for vm in vms:
                self._launched.setdefault(vm.vm_id, (self._clock(), vm))

    def terminated(self, vm_ids: Collection[str]) -> None:
        """Note VMs that the cloud agreed to end."""
        with self._lock:
            for vm_id in vm_ids:
                self._terminated.setdefault(vm_id, self._clock())

    def expects(self, vm_id: str) -> bool:
        """Return whether a VM must exist though the cloud may not know it yet."""
        with self._lock:
            self._forget()
            return vm_id in self._launched and vm_id not in self._terminated

    def reconcile(
        self,
        job: str,
        listed: Sequence[Vm],
        look: Callable[[Vm], Vm | None] = lambda vm: vm,
    ) -> tuple[Vm, ...]:
        """Return what a list would say if it did not lag.

        VMs of ``job`` launched of late and not listed yet are added; what was
        terminated of late and is listed as alive is stopping.

        Args:
            job: Whose VMs.
            listed: What the cloud lists.
            look: Returns an unlisted VM as it is now, None if it is gone: where a VM
                that is taken leaves the list at once, but can be asked for by name.
        """
        with self._lock:
            self._forget()
            ids = {vm.vm_id for vm in listed}
            unlisted = [
                vm
                for _, vm in self._launched.values()
                if vm.job == job
                and vm.vm_id not in ids
                and vm.vm_id not in self._terminated
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
            vm_id: (at_s, vm)
            for vm_id, (at_s, vm) in self._launched.items()
            if at_s > oldest_s
        }
        self._terminated = {
            vm_id: at_s for vm_id, at_s in self._terminated.items() if at_s > oldest_s
        }
