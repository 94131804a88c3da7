"""Feeds the core a story, event by event, and keeps the commands that it emits."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, TypeVar

from tests.builders import (
    a_link,
    a_plan,
    a_profile,
    a_spec,
    a_vm,
    an_offer,
    checkpoint_saved,
    generation_started,
    microbatch_profile,
    minibatch_committed,
    model_facts,
    section_facts,
    section_profile,
    slots_of,
)
from tests.journals import decided, decision
from tests.unit.varuna_manager.invariants import check_invariants
from tests.view import View, settings_with

from spottrain.cloud.port.provider import Offer, Vm
from spottrain.codec import to_data
from spottrain.varuna_manager.core import step as core
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import Round
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import State, held_by_kind, kind_of
from spottrain.varuna_manager.core.preparation import BOOT_WAIT_S
from spottrain.varuna_manager.jobs.journal import Step
from spottrain.varuna_manager.watch.watches import ReportThrottle, Watches
from spottrain.wire import messages
from spottrain.wire.model import GpuFacts, Profile
from spottrain.wire.plan import Plan

Emitted = TypeVar("Emitted")
Sent = TypeVar("Sent")

SPEC = a_spec(
    entrypoint="m:f",
    seed=0,
    steps=100,
    microbatch_size=1,
    checkpoint_every_steps=25,
    checkpoint_keep=3,
)

FACTS = model_facts(
    (section_facts(i, param_bytes=1, optimizer_bytes=1, activation_bytes=1) for i in range(2)),
    heldout_len=1,
)

PROFILE = a_profile(
    microbatch_profile(
        section_profile(index, forward_s=0.1, saved_bytes=1, output_bytes=1) for index in range(2)
    ),
    device="cpu",
    between_vms=a_link(latency_s=0.0, bytes_per_s=1.0),
)

OFFER = an_offer()

FOUR = ("a", "b", "c", "d")
"""VMs."""

ON_DEMAND = replace(OFFER, spot=False, usd_per_hour=3.0)

SETTINGS = settings_with(
    JobSettings(uid="uid", spec=SPEC, facts=FACTS), max_vms=4, debounce_s=2.0, alerts=()
)


def plan_over(ids: tuple[str, ...], step_s: float = 1.0) -> Plan:
    """Two stages, as wide as the VMs allow."""
    width = len(ids) // 2
    return a_plan(
        2,
        width,
        replica_bounds=(*range(width), 8),
        slots=slots_of(ids[: 2 * width]),
        step_s=step_s / width,
    )


def _text(state: State) -> str:
    return json.dumps(to_data(state))


EACH = ReportThrottle(share=0.0, least_s=0.0, most_s=0.0, straggler_s=0.0)
"""Every mini-batch is reported to the core."""


class Story(View):
    """A job's life under the test's control.

    Args:
        settings: Of the job.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(State())
        self.watches = Watches(EACH)
        self.now_s = 1000.0
        self.events: list[e.Event] = []
        self.steps: list[Step] = []
        self.commands: tuple[c.Command, ...] = ()
        self.reports: dict[str, int] = {}
        self.devices: dict[str, str] = {}
        """What the supervisors of VMs report that they compute on."""
        self.tell(e.JobSubmitted, settings=settings_with(SETTINGS, **settings))

    # --- Telling ------------------------------------------------------------------------

    def tell(self, cls: type[e.Event], **fields: Any) -> tuple[c.Command, ...]:
        """Feed one event; return the commands that the core emits."""
        return self.take(cls(at_s=self.now_s, **fields))

    def take(self, event: e.Event) -> tuple[c.Command, ...]:
        """Feed an event; return the commands that the core emits."""
        self.events.append(event)
        before = self.state
        self.state, self.commands = core.step(before, event)
        check_invariants(self.state)
        self._check_grant(before)
        step = Step(before, event, self.state, self.commands)
        replayed = decided(before, decision(before, self.state))
        # As data: prices that are not a number do not equal themselves.
        same = replayed == self.state or _text(replayed) == _text(self.state)
        assert same, "a journal would not lead here"
        self.steps.append(step)
        return self.commands

    def _check_grant(self, before: State) -> None:
        """Nothing is rented that the job's pool does not grant."""
        grant = None if self.state.settings is None else self.state.job.grant
        if grant is None:
            return
        granted, held = dict(grant.vms), held_by_kind(self.state)
        for command in self.commands:
            if isinstance(command, c.LaunchVms):
                kind = kind_of(command.offer)
                again = command.intent in before.launches.intents
                assert again or held[kind] <= granted.get(kind, 0)

    def report(self, vm_id: str, report: messages.Report) -> tuple[c.Command, ...]:
        """Let an agent report; return the commands that the core emits."""
        if isinstance(report, messages.Measurement):
            return self._measured(vm_id, report)
        return self.fact(vm_id, report)

    def _measured(self, vm_id: str, report: messages.Measurement) -> tuple[c.Command, ...]:
        commands: tuple[c.Command, ...] = ()
        if isinstance(report, messages.MinibatchCommitted):
            for event in self.watches.observe(self.state, vm_id, report, self.now_s):
                commands += self.take(event)
        self.commands = commands
        return commands

    def fact(self, vm_id: str, report: messages.Report) -> tuple[c.Command, ...]:
        """Journal a report."""
        number = self.reports.get(vm_id, 0)
        self.reports[vm_id] = number + 1
        return self.tell(e.ReportReceived, vm_id=vm_id, number=number, report=report)

    def wait(self, seconds: float) -> tuple[c.Command, ...]:
        """Let time pass, and fire the timer if it comes due."""
        self.now_s += seconds
        if self.state.timer_at_s is None or self.state.timer_at_s > self.now_s:
            return ()
        return self.tell(e.TimerFired)

    # --- Asking -------------------------------------------------------------------------

    def emitted(self, cls: type[Emitted]) -> list[Emitted]:
        """Commands of one kind after the newest event."""
        return [command for command in self.commands if isinstance(command, cls)]

    def sent(self, cls: type[Sent]) -> dict[str, Sent]:
        """Commands of one kind that were sent after the newest event, by VM."""
        return {
            command.vm_id: command.command
            for command in self.emitted(c.Send)
            if isinstance(command.command, cls)
        }

    # --- Chapters -----------------------------------------------------------------------

    def start(self, *offers: Offer) -> None:
        """A manager that has looked around."""
        self.tell(e.ManagerStarted, software_version="1", pid=1)
        self.tell(e.CheckpointsListed, checkpoints=())
        self.tell(e.VmsListed, asked_at_s=self.now_s, vms=())
        self.tell(e.OffersSeen, offers=offers or (OFFER, ON_DEMAND))

    def listed(self, vm_id: str, intent: str = "intent-0", **changes: Any) -> Vm:
        """A VM as its cloud lists it."""
        vm = a_vm(vm_id, OFFER, intent=intent, launched_at_s=self.now_s)
        return replace(vm, **changes)

    def launch(self) -> c.LaunchVms:
        """Return the launch that the core asks for."""
        (command,) = self.emitted(c.LaunchVms)
        return command

    def boot(self, *ids: str) -> None:
        """Launch VMs for the open intent and bring their supervisors up."""
        (intent,) = self.intents
        vms = tuple(self.listed(vm_id, intent) for vm_id in ids)
        self.tell(e.VmsLaunched, intent=intent, vms=vms)
        for vm_id in ids:
            self.ready(vm_id)

    def ready(
        self,
        vm_id: str,
        slots: int = 1,
        gpus: tuple[GpuFacts, ...] = (),
        torch_version: str = "2",
    ) -> None:
        self.tell(
            e.AgentRegistered,
            vm_id=vm_id,
            num_slots=slots,
            private_address="10.0.0.1",
        )
        self.report(
            vm_id,
            messages.SupervisorReady(
                num_slots=slots,
                torch_version=torch_version,
                device=self.devices.get(vm_id, ""),
                gpus=gpus,
            ),
        )

    def prepare(self, profile: Profile = PROFILE) -> None:
        """Write the first weights and measure each type of device, once no VM boots any more."""
        self.write_first_weights()
        if self.round is None:
            self.wait(BOOT_WAIT_S)
        while self.round is not None:
            self.measure(profile)

    def write_first_weights(self) -> None:
        """Go through a round of writing first weights."""
        first = self.open_round().participants[0].vm_id
        self.report(first, checkpoint_saved(0))

    def open_round(self) -> Round:
        """Open the store of the round that the core wants, if it needs one."""
        running = self.round
        assert running is not None, self.state.activity
        if len(running.participants) > 1:
            report = messages.StoreOpened(generation=running.number, host="h", port=1)
            self.report(running.participants[0].vm_id, report)
        return running

    def measure(self, profile: Profile = PROFILE) -> None:
        """Go through a round of measuring."""
        running = self.open_round()
        assert set(self.sent(messages.Calibrate)) == {slot.vm_id for slot in running.participants}
        self.report(
            running.participants[0].vm_id,
            messages.Calibrated(profile=profile, generation=running.number),
        )

    def plan(self, *ids: str, step_s: float = 1.0) -> None:
        """Answer the planner's question with a plan over ``ids``, if any."""
        assert self.plan_asked is not None, self.state.activity
        plan = plan_over(ids, step_s) if ids else None
        self.tell(e.PlanComputed, inputs_hash=self.plan_asked, plan=plan)

    def open(self) -> None:
        generation = self.generation
        self.report(
            generation.plan.slots[0].vm_id,
            messages.StoreOpened(generation=generation.number, host="h", port=1),
        )

    def begin(self, step: int) -> None:
        """Every rank reports that it has its sections."""
        for slot in self.generation.plan.slots:
            self.report(slot.vm_id, self.started(step))

    def started(self, step: int) -> messages.GenerationStarted:
        return generation_started(step, generation=self.generation.number)

    def commit(
        self,
        step: int,
        *,
        only: tuple[str, ...] | None = None,
        skipped: messages.SkipReason = "",
    ) -> None:
        """Ranks report one mini-batch of a second."""
        plan = self.generation.plan
        for rank, slot in enumerate(plan.slots):
            if only is None or slot.vm_id in only:
                self.report(
                    slot.vm_id,
                    minibatch_committed(
                        step,
                        generation=self.generation.number,
                        sections=plan.sections_of(rank % 2),
                        loss=5.0 - step / 100,
                        peak_bytes=step,
                        skipped=skipped,
                    ),
                )

    def stopped(self, step: int, *, done: bool = False, early: str = "") -> None:
        number = self.generation.number
        for slot in self.generation.plan.slots:
            report = messages.GenerationStopped(
                generation=number, slot=0, step=step, done=done, early=early
            )
            self.report(slot.vm_id, report)

    def broken(self, *ids: str) -> None:
        number = self.generation.number
        for vm_id in ids:
            self.report(
                vm_id,
                messages.GenerationBroken(generation=number, slot=0, reason="lost a peer"),
            )

    def notice(self, vm_id: str, lead_s: float) -> tuple[c.Command, ...]:
        return self.report(vm_id, messages.InterruptionNoticed(lead_s=lead_s))

    def training(self, *ids: str, steps: int = 3) -> Story:
        """Up to a generation over ``ids`` that has committed ``steps``."""
        self.start()
        self.boot(*ids)
        self.prepare()
        self.plan(*ids)
        self.open()
        self.begin(0)
        for step in range(1, steps + 1):
            self.now_s += 1.0
            self.commit(step)
        return self
