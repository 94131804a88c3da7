"""VMs that go from one job of a pool to another without a boot.

A job that has no more use for a VM keeps it for a while, if its grant says so: everything of
the job is removed from it (``fleet.release_or_reserve``). The VM is billed to the job, counts as held by
it, and is never used by it again: it is returned in the end, unless the cloud gives it to
another job before that. To which, the pool says with that job's grant: an order for one named
VM. The cloud ends the one job's bill and begins the other's at one moment, and gives a VM
once, so that no word between the jobs is needed and any of them may die.

What came of an order is in the journal of the job that takes the VM; only then does the pool
give its place to another VM, or the VM to another job.
"""

from __future__ import annotations

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.core import launches, spending
from spottrain.varuna_manager.core.fleet import RETRY_S, adopt
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import OrderPhase, OrderRecord
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.core.model.transition import Transition

GIVE_UP_S = 300.0
"""How long after its time a VM is asked for whose cloud does not answer; long after it may
come (``RECEIVE_S``), calls that were given up included."""


def is_asking(state: State) -> bool:
    """Return whether a VM may still come from another job."""
    return any(one.phase is OrderPhase.ASKED for one in state.fleet.orders.values())


def granted(transition: Transition) -> None:
    """Forget what was answered and is not in the newest grant any more."""
    state = transition.state
    grant = state.job.grant
    names = set() if grant is None else {order.name for order in grant.orders}
    left = {
        name: one
        for name, one in state.fleet.orders.items()
        if name in names or one.phase is OrderPhase.ASKED
    }
    if len(left) < len(state.fleet.orders):
        transition.put(replace(state.fleet, orders=left))


def vm_reserved(transition: Transition, vm_id: str) -> None:
    """A VM waits for other jobs from now on."""
    vm = transition.state.fleet.vms.get(vm_id)
    if vm is not None and vm.is_clearing:
        vm = replace(vm, is_clearing=False, reserved_at_s=transition.now_s)
        transition.put_vm(vm)


def order_answered(transition: Transition, event: e.OrderAnswered) -> None:
    """Adopt a VM that has come, with its bill from then on; or note that it never will."""
    record = transition.state.fleet.orders.get(event.order)
    if event.vm is not None:
        spending.listed(transition, (event.vm,))  # it may have ended already
        adopt(transition, event.vm)
        launches.note_image(transition, event.vm)
        transition.log(f"{event.vm.vm_id} comes from another job")
    else:
        transition.log(f"no VM from another job: {event.reason}")
    if record is not None and record.phase is OrderPhase.ASKED:
        phase = OrderPhase.FAILED if event.vm is None else OrderPhase.TAKEN
        transition.put_order(replace(record, phase=phase, retry_at_s=None))


def take_failed(transition: Transition, event: e.CommandFailed) -> None:
    """Ask again after a pause: whether it came is not known, unless it is long too late."""
    transition.log(f"take VM failed: {event.reason}")
    for name in event.vm_ids:
        record = transition.state.fleet.orders.get(name)
        if record is None or record.phase is not OrderPhase.ASKED:
            continue
        if transition.now_s >= record.order.until_s + GIVE_UP_S:
            transition.put_order(replace(record, phase=OrderPhase.FAILED))
        else:
            retry_at_s = transition.now_s + RETRY_S
            transition.put_order(replace(record, retry_at_s=retry_at_s))


def ask_again(transition: Transition) -> None:
    """Repeat what the manager before has asked for, and no answer is known."""
    for record in transition.state.fleet.orders.values():
        if record.phase is OrderPhase.ASKED:
            transition.put_order(replace(record, retry_at_s=None))
            transition.emit(c.AcquireVm(order=record.order))


def advance(transition: Transition) -> None:
    """Ask for the VMs of the grant's orders; return VMs that were kept for long enough."""
    state = transition.state
    grant = state.job.grant
    if grant is not None and state.phase is JobPhase.ACTIVE:
        for order in grant.orders:
            if order.name not in state.fleet.orders and transition.now_s < order.until_s:
                transition.put_order(OrderRecord(order=order))
                transition.emit(c.AcquireVm(order=order))
    for record in transition.state.fleet.orders.values():
        if record.retry_at_s is not None and transition.waited_until(record.retry_at_s):
            transition.put_order(replace(record, retry_at_s=None))
            transition.emit(c.AcquireVm(order=record.order))
    reservation_s = 0.0 if grant is None else grant.reservation_s
    for vm in transition.state.fleet.vms.values():
        if vm.reserved_at_s is None:
            continue
        if reservation_s <= 0 or transition.waited_until(vm.reserved_at_s + reservation_s):
            transition.put_vm(replace(vm, reserved_at_s=None))
            transition.emit(c.TerminateVms(vm_ids=(vm.vm_id,)))
