"""Which VMs a job rents and keeps whose plans divide matrices among the slots of a VM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import a_plan, generation_started, minibatch_committed, slots_of
from tests.unit.varuna_manager.story import OFFER, SPEC, Story

from spottrain.cloud.port.provider import Offer
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import settled_numerics
from spottrain.varuna_manager.core.preparation import BOOT_WAIT_S
from spottrain.wire import messages
from spottrain.wire.model import Reduction
from spottrain.wire.plan import Plan, Slot

SMALL = replace(OFFER, instance_type="small", available=1)
LARGE = replace(OFFER, instance_type="large", gpus=2, available=1)


def divided(*ids: str) -> Plan:
    """One stage, of which the two slots of each VM divide the matrices."""
    slots = tuple(Slot(vm_id=vm_id, index=index) for vm_id in ids for index in range(2))
    bounds = (*range(len(ids)), 8)
    return a_plan(
        1, len(ids), num_sections=2, replica_bounds=bounds, slots=slots, tensor_parallel=2
    )


class Divided(Story):
    """A job that leaves it to plans how many slots divide matrices."""

    def __init__(self, reduction: Reduction = "exact", **settings: Any) -> None:
        spec = replace(SPEC, reduction=reduction)
        super().__init__(spec=spec, max_vms=2, **settings)
        self.start(SMALL, LARGE)
        self.rent(large=LARGE, small=SMALL)
        self.prepare()

    def rent(self, **offers: Offer) -> None:
        """Bring up a VM of each offer."""
        for vm_id, offer in offers.items():
            (intent,) = (name for name, one in self.intents.items() if one.offer == offer)
            vms = (self.listed(vm_id, intent, offer=offer),)
            self.tell(e.VmsLaunched, intent=intent, vms=vms)
            self.ready(vm_id, offer.gpus)

    def train(self, plan: Plan, step: int = 1) -> None:
        """Let a plan commit a mini-batch."""
        assert self.plan_asked is not None, self.state.activity
        self.tell(e.PlanComputed, inputs_hash=self.plan_asked, plan=plan)
        self.open()
        number = self.generation.number
        for slot in plan.slots:
            started = generation_started(step - 1, generation=number, slot=slot.index)
            self.report(slot.vm_id, started)
        for slot in plan.slots:
            committed = minibatch_committed(
                step, generation=number, slot=slot.index, sections=(0, 1)
            )
            self.report(slot.vm_id, committed)

    def lose(self, vm_id: str) -> None:
        self.tell(e.VmLost, vm_id=vm_id, reason="preempted")

    def asks(self) -> int | None:
        """How many slots the planner is asked to divide matrices among."""
        (command,) = self.emitted(c.ComputePlan)
        return command.inputs.tensor_parallel


def test_in_exact_mode_the_first_plan_settles_how_many_slots_divide_matrices() -> None:
    story = Divided()
    assert story.asks() is None
    story.train(divided("large"))
    assert settled_numerics(story.state).tensor_parallel == 2
    assert [one.offer for one in story.intents.values()] == [LARGE]
    story.rent(another=LARGE)
    story.wait(10.0)
    assert story.asks() == 2
    story.lose("large")
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert settled_numerics(story.state).tensor_parallel == 2


def test_vms_that_no_later_plan_can_use_are_returned() -> None:
    story = Divided()
    story.train(divided("large"))
    assert story.vms["small"].phase is VmPhase.RETURNING
    assert story.vms["large"].phase is VmPhase.READY


@pytest.mark.parametrize("plan", [divided("large"), None])
def test_in_fast_mode_every_plan_chooses_anew(plan: Plan | None) -> None:
    story = Divided("fast")
    story.train(plan or a_plan(1, 1, num_sections=2, virtual_nodes=8, slots=slots_of(["small"])))
    assert settled_numerics(story.state).tensor_parallel is None
    assert story.vms["small"].phase is VmPhase.READY


def test_a_job_waits_for_vms_with_as_many_slots_as_its_first_plan_took() -> None:
    story = Divided(capacity_wait_s=100.0)
    story.tell(e.OffersSeen, offers=(SMALL,))
    story.train(divided("large"))
    story.tell(e.VmsReturned, vm_ids=("small",), vms=())
    story.lose("large")
    assert story.intents == {}
    why = (
        "VMs of 2 slots, that divide matrices, which reduction: exact keeps from the first plan on"
    )
    assert story.state.activity.startswith(f"waiting for {why}: what can be had has 1 at most")
    story.now_s += 50.0
    story.tell(e.OffersSeen, offers=(SMALL, LARGE))
    story.rent(second=LARGE)
    story.tell(e.OffersSeen, offers=(SMALL,))
    story.wait(BOOT_WAIT_S)
    assert story.asks() == 2
    story.train(divided("second"), step=2)
    story.lose("second")
    story.wait(100.0)
    assert story.state.outcome is not None
    assert (story.state.outcome.kind, story.state.outcome.exit_code) == ("capacity", 5)
    assert why in story.state.outcome.reason


def test_a_plan_that_needs_too_much_memory_and_has_trained_nothing_settles_nothing() -> None:
    story = Divided()
    story.tell(e.PlanComputed, inputs_hash=story.plan_asked, plan=divided("large"))
    story.open()
    story.report(
        "large",
        messages.OutOfMemory(
            generation=1,
            slot=0,
            section=1,
            microbatch_size=1,
            requested_bytes=2,
            device_bytes=16,
            during="forward",
        ),
    )
    assert settled_numerics(story.state).tensor_parallel is None
