"""VMs that come up and never train: counted, and told with their last words.

Whatever the cause, the next would hardly do better: after a pause that doubles each time
one VM is rented to find out (``FailedStarts``), and after a few the job ends
(``shutdown``), so that they cannot cost more than a stated number of starts.
"""

from __future__ import annotations

from collections.abc import Iterable

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.core.model.records import (
    FailedStarts,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.core.model.transition import Transition

MAX_FAILED = 6
"""In a row, after which a job ends of which nothing trains."""
MAX_FAILED_BESIDE = 12
"""The same while other VMs train."""


def failed(transition: Transition, vm: VmRecord, reason: str) -> None:
    """Count a VM that is lost or returned because it does not work.

    One that has trained, or was ready and never asked to, did not fail to start. Those
    that were rented before the newest one had failed count once with it.
    """
    state, before = transition.state, transition.state.launches.failing
    is_spare = vm.phase is VmPhase.READY and not vm.used_slots
    if vm.has_trained or is_spare or state.phase is not JobPhase.ACTIVE:
        return
    if before is not None and vm.known_at_s <= before.at_s:
        return
    times = 1 + (0 if before is None else before.times)
    failing = FailedStarts(times=times, at_s=transition.now_s, vm_id=vm.vm_id, reason=reason)
    transition.put(replace(state.launches, failing=failing))
    pause_s = failing.opens_at_s - failing.at_s
    row = f" ({times} in a row)" if times > 1 else ""
    transition.log(
        f"{vm.vm_id} never trained{row}: {reason}; the next VM is rented in {pause_s:g} s"
    )


def said(transition: Transition, vm_id: str, words: str) -> None:
    """Name the last line of the newest failed VM's log among the reasons, also that of a
    job that ends because of it: logs are fetched when a VM is gone."""
    failing, outcome = transition.state.launches.failing, transition.state.outcome
    if failing is None or failing.vm_id != vm_id or not words:
        return
    if words in failing.reason or failing.reason in words:
        return
    reason = f"{failing.reason}; the last line of its log: {words}"
    transition.put(replace(transition.state.launches, failing=replace(failing, reason=reason)))
    transition.log(f"{vm_id}: the last line of its log: {words}")
    if outcome is not None and outcome.reason.endswith(failing.reason):
        longer = outcome.reason.removesuffix(failing.reason) + reason
        transition.state = replace(transition.state, outcome=replace(outcome, reason=longer))


def ready(transition: Transition, vm: VmRecord) -> None:
    """A VM is ready: if it was rented after the newest one had failed, so may others be."""
    failing = transition.state.launches.failing
    if failing is not None and vm.known_at_s > failing.at_s and failing.is_probing:
        failing = replace(failing, is_probing=False)
        transition.put(replace(transition.state.launches, failing=failing))


def trained(transition: Transition, vm_ids: Iterable[str]) -> None:
    """VMs have committed a mini-batch: one that never had ends the row of failures."""
    fleet, launches = transition.state.fleet, transition.state.launches
    new = {
        vm_id: replace(vm, has_trained=True)
        for vm_id in dict.fromkeys(vm_ids)
        if (vm := fleet.vms.get(vm_id)) is not None and not vm.has_trained
    }
    if not new:
        return
    transition.put(replace(fleet, vms={**fleet.vms, **new}))
    if launches.failing is not None:
        transition.put(replace(launches, failing=None))
        transition.decides = True
