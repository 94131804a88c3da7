"""The tables of phases, compared with what the core does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from tests.builders import (
    checkpoint_name,
    checkpoint_saved,
    generation_started,
    minibatch_committed,
)
from tests.fakes.gpus import facts as gpu_facts
from tests.unit.varuna_manager.invariants import KINDS, Change, newest_changes
from tests.unit.varuna_manager.machines import MACHINES, Machine
from tests.unit.varuna_manager.story import (
    FACTS,
    OFFER,
    PROFILE,
    SETTINGS,
    SPEC,
    Story,
)
from tests.view import changed

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import RankPhase
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant, VmOrder
from spottrain.varuna_manager.core.model.state import (
    MAX_UNFIT,
    JobPhase,
    kind_of,
)
from spottrain.varuna_manager.core.preparation import BOOT_WAIT_S
from spottrain.wire import messages
from spottrain.wire.model import WorkerState

DOCS = Path(__file__).parents[4] / "docs/state-machines.md"


class Watched(Story):
    """A story that notes every event, and every change of phase."""

    def __init__(self) -> None:
        self.seen: set[Change] = set()
        self.told: set[type] = set()
        super().__init__(stop_after=1)

    def take(self, event: e.Event) -> tuple[c.Command, ...]:
        commands = super().take(event)
        self.told.add(KINDS[self.state.recent[-1].kind])
        self.seen.update(newest_changes(self.state))
        return commands


def fork(story: Watched) -> Watched:
    """Return a story that goes on by itself; what is seen is seen by both."""
    twin = object.__new__(Watched)
    twin.__dict__.update(story.__dict__)
    twin.events, twin.steps = [*story.events], [*story.steps]
    twin.reports = {**story.reports}
    twin.watches = copy.deepcopy(story.watches)
    return twin


# --- Where the job may be -------------------------------------------------------------


def bases() -> Iterator[Watched]:
    """A story in every phase of everything."""
    story = Watched()
    yield story
    story.start()
    yield fork(story)
    yield fork(story)
    (intent,) = story.intents
    early = fork(story)
    starting = early.listed("a", intent, state=VmState.STARTING)
    early.tell(e.VmsLaunched, intent=intent, vms=(starting,))
    yield early
    booting = fork(story)
    booting.tell(e.VmsLaunched, intent=intent, vms=(booting.listed("a", intent),))
    yield fork(booting)
    booting.tell(e.AgentRegistered, vm_id="a", num_slots=1, private_address="10.0.0.1")
    yield fork(booting)
    other = fork(booting)
    exact = replace(other.state.job, spec=replace(SPEC, reduction="exact"))
    settled = changed(other.state, kernels="another GPU")
    other.state = replace(settled, settings=exact)
    yield other
    booting.state = changed(booting.state, unfit={kind_of(OFFER): MAX_UNFIT - 1})
    yield booting
    story.boot("a", "b", "c", "d")
    yield fork(story)
    yield from preparing(fork(story))
    story.prepare()
    yield fork(story)
    hopeless = fork(story)
    hopeless.state = changed(hopeless.state, fruitless=7)
    hopeless.plan("a", "b")
    yield hopeless
    story.plan("a", "b")
    yield fork(story)
    story.open()
    yield fork(story)
    yield quiet(fork(story))
    half = fork(story)
    half.report("a", half.started(0))
    yield half
    story.begin(0)
    yield fork(story)
    for step in range(1, 4):
        story.now_s += 1.0
        story.commit(step)
    yield fork(story)
    yield from leaving(story)


def pooled() -> Watched:
    """A job of a pool that has asked for VM e of another job."""
    story, kind = Watched(), kind_of(OFFER)
    order = VmOrder(name="1-e", vm_id="e", kind=kind, by="other", until_s=1e9)
    grant = PoolGrant(
        pool="lab",
        serial=0,
        vms=((kind, 1),),
        until_s=1e9,
        max_microusd=10**9,
        orders=(order,),
    )
    story.state = replace(story.state, settings=replace(story.state.job, grant=grant))
    story.start()
    return story


def quiet(story: Watched) -> Watched:
    """Long after the last mini-batch: VM b has said what it does, VM a is yet to do so."""
    story.wait(40.0)
    story.report("b", replace(HANGS, workers=()))
    return story


def preparing(story: Watched) -> Iterator[Watched]:
    story.state = changed(story.state, failed_preparations=2)
    yield fork(story)
    story.write_first_weights()
    story.wait(BOOT_WAIT_S)
    yield fork(story)
    assert story.round is not None
    only = replace(story.state.job, measures_only=True)
    story.state = replace(story.state, settings=only)
    yield story


def leaving(story: Watched) -> Iterator[Watched]:
    """From a generation that trains to the end of the job."""
    broken = fork(story)
    broken.broken("a")
    yield broken
    yield quiet(fork(story))
    silent = fork(story)
    silent.tell(e.VmSilent, vm_id="a")
    yield fork(silent)
    silent.now_s += 2000.0
    yield silent
    noticed = fork(story)
    noticed.notice("a", 10.0)
    yield fork(noticed)
    noticed.wait(5.0)
    noticed.plan("b", "c")
    yield fork(noticed)
    noticed.stopped(3)
    yield noticed
    partly = fork(story)
    partly.report("a", messages.GenerationStopped(generation=1, slot=0, step=3, done=False))
    yield partly
    ending = fork(story)
    ending.tell(e.StopRequested, by="me")
    yield fork(ending)
    yield quiet(fork(ending))
    ending.tell(e.StopRequested, by="me", now=True)
    yield fork(ending)
    ending.tell(e.VmsReturned, vm_ids=("a", "b", "c", "d"))
    assert ending.state.phase is JobPhase.ENDED
    yield ending
    failed = fork(story)
    failed.report("a", messages.UserCodeFailed(message="x", traceback="y"))
    yield fork(failed)
    failed.broken("a", "b")
    failed.open()
    yield fork(failed)
    failed.begin(3)
    yield failed
    done = fork(story)
    done.report("a", checkpoint_saved(100))
    done.stopped(100, done=True)
    yield fork(done)


# --- What may happen ------------------------------------------------------------------


FAILING: tuple[e.FailedCommand, ...] = (
    "compute_plan",
    "start_agent",
    "terminate_vms",
    "reserve_vm",
    "take_vm",
    "ask_provider",
    "release_job",
)


def everything(story: Watched) -> Iterator[Callable[[Watched], object]]:
    """Every event, and every report of VM a."""

    def told(cls: type[e.Event], **fields: Any) -> Callable[[Watched], object]:
        return lambda one: one.tell(cls, **fields)

    yield told(e.JobSubmitted, settings=SETTINGS)
    yield from (told(e.ManagerStarted, software_version=v, pid=2) for v in "12")
    yield told(e.JobMoved, epoch=2, host="here")
    yield from (told(e.StopRequested, by="me", now=now) for now in (False, True))
    yield told(e.LimitsChanged, by="me", limits=())
    yield told(e.GrantReceived, grant=PoolGrant(pool="lab", serial=1))
    yield told(e.StepsChanged, by="me", steps=200)
    yield told(e.CodeUpdated, by="me", sha256="ab", facts=FACTS)
    yield told(e.ClockSet, by_s=60.0)
    yield from (told(e.FolderSeen, trouble="x", is_gone=g) for g in (False, True))
    yield told(e.TimerFired)
    yield told(e.FromScratchRequested, by="me")
    yield told(e.CheckpointsListed, checkpoints=())
    yield told(e.StoreUnreachable, reason="away")
    yield told(e.ProfilesListed, profiles=())
    yield told(e.OffersSeen, offers=(OFFER,))
    yield told(e.OffersRanked, worths=())
    for state in VmState:
        vms = (story.listed("a", state=state), story.listed("e", state=state))
        yield told(e.VmsLaunched, intent="intent-0", vms=vms)
        yield told(e.VmsListed, asked_at_s=1e9, vms=vms)
        yield told(e.ProviderAnswered, vm_id="a", state=state)
    yield told(e.VmsListed, asked_at_s=1e9, vms=())
    yield told(e.ProviderAnswered, vm_id="a", state=None)
    yield told(e.LaunchRefused, intent="intent-0", reason="no", refusal="misconfigured")
    yield told(e.VmsReturned, vm_ids=("a",))
    for vm in (story.listed("e", "ordered-1-e"), None):
        yield told(e.OrderAnswered, order="1-e", vm=vm)
    yield told(e.VmReserved, vm_id="a")
    yield told(e.VmLost, vm_id="a", reason="gone")
    yield told(e.JobReleased)
    yield told(e.AgentStarted, vm_id="a", steps=())
    yield told(e.AgentRegistered, vm_id="a", num_slots=1, private_address="h")
    yield told(e.AgentRefused, vm_id="a", reason="other software")
    yield from watched(story)
    yield from (told(cls, vm_id="a") for cls in (e.VmSilent, e.VmHeard))
    asked = story.plan_asked or ""
    yield told(e.PlanComputed, inputs_hash=asked, plan=None)
    yield told(e.SetupFailed, vm_id="a", reason="no", output="")
    for command in FAILING:
        yield told(e.CommandFailed, command=command, vm_ids=("a",), reason="no")
    for report in reports(story):
        yield functools.partial(Watched.fact, vm_id="a", report=report)
    for wait_s in (70.0, 1000.0):
        yield functools.partial(Watched.wait, seconds=wait_s)


def watched(story: Watched) -> Iterator[Callable[[Watched], object]]:
    """What the watches beside the core say."""
    for number in {0, story.next_generation - 1}:
        made = e.ProgressMade(
            at_s=story.now_s,
            generation=number,
            step=4,
            committed_at_s=story.now_s,
            loss=1.0,
            step_s=1.0,
            peak_bytes=1,
        )
        stalled = e.ProgressStalled(
            at_s=story.now_s, generation=number, step=4, since_s=0.0, step_s=1.0
        )
        slow = e.StragglerFound(
            at_s=story.now_s,
            generation=number,
            vm_id="a",
            slowness=2.0,
            outlying=21,
            observed=30,
            step_s=1.0,
            saved_s=0.5,
        )
        skipped = replace(made, nonfinite=1, nonfinite_in_row=1, skipped="loss")
        for event in (made, skipped, stalled, slow):
            yield functools.partial(Watched.take, event=event)


OUT_OF_MEMORY = messages.OutOfMemory(
    generation=1,
    slot=0,
    section=0,
    microbatch_size=1,
    requested_bytes=1,
    device_bytes=1,
    during="backward",
)


HANGS = messages.WorkersInspected(
    generation=1,
    number=1,
    workers=(
        WorkerState(
            slot=0,
            tasks=7,
            doing="compute",
            waits_for=None,
            still_s=1e4,
            process="stopped",
        ),
    ),
)


COMMITTED = minibatch_committed(4)


def reports(story: Watched) -> Iterator[messages.Report]:
    numbers = {0}
    if story.current_generation is not None:
        numbers.add(story.generation.number)
    if story.round is not None:
        numbers.add(story.round.number)
    yield messages.SupervisorReady(num_slots=1, torch_version="2")
    yield messages.SupervisorReady(num_slots=1, torch_version="2", gpus=(gpu_facts(),))
    for number in numbers:
        yield messages.CalibrationProgress(generation=number, done=1, total=2, what="x")
        yield messages.Calibrated(generation=number, profile=PROFILE)
        yield messages.StoreOpened(generation=number, host="h", port=1)
        yield generation_started(generation=number)
        committed = replace(COMMITTED, generation=number)
        yield committed
        yield replace(committed, sections=(0, 1, 2, 3), skipped="loss")
        yield messages.GenerationStopped(generation=number, slot=0, step=4, done=False)
        yield messages.GenerationBroken(generation=number, slot=0, reason="lost a peer")
        yield messages.WorkerDied(generation=number, slot=0, reason="killed")
        yield replace(OUT_OF_MEMORY, generation=number)
        yield messages.NcclFailed(generation=number, slot=0, reason="x")
        yield messages.SectionPrepared(generation=number, section=1)
        yield replace(HANGS, generation=number)
        yield messages.Evaluated(generation=number, step=1, loss=1.0)
        yield messages.MinibatchAdopted(generation=number, step=1, loss=1.0, grad_norm=1.0)
    yield messages.UserCodeFailed(message="x", traceback="y")
    yield checkpoint_saved(25)
    yield messages.CheckpointFailed(step=25, reason="full")
    yield messages.CheckpointDamaged(name=checkpoint_name(0), reason="torn")
    yield messages.CheckpointUnreachable(name=checkpoint_name(0), reason="away")
    yield messages.InterruptionNoticed(lead_s=30.0)
    yield messages.InterruptionCancelled()
    yield messages.InterruptionLikely()
    yield messages.VmUnfit(reason="no driver")
    yield messages.VmFailed(reason="its supervisor has ended")
    yield messages.GpuSick(reason="GPU 0 (NVIDIA L4): XID 79")
    yield messages.GpuThrottled(reason="GPU 0 (NVIDIA L4): thermal slowdown")


def variants(story: Watched) -> Iterator[Watched]:
    """A story as it is; with a silent VM; and with one that no cap allows any more."""
    yield story
    silent = fork(story)
    silent.tell(e.VmSilent, vm_id="a")
    yield fork(silent)
    silent.now_s += 2000.0
    yield silent
    capped = fork(story)
    limit = Limit(name="max_usd_per_hour", value=0.5)
    capped.tell(e.LimitsChanged, by="me", limits=(limit,))
    yield capped


@functools.cache
def explored() -> Watched:
    """Tell every event in every phase; return what was seen."""
    every = Watched()
    for base in (pooled(), *bases()):
        for story in variants(base):
            for act in everything(story):
                act(fork(story))
            every.seen |= story.seen
            every.told |= story.told
    return every


@pytest.mark.rotated
def test_phases_change_by_the_events_that_the_tables_name_and_by_no_others() -> None:
    in_tables = {
        (before, after, cause)
        for machine in MACHINES.values()
        for (before, after), entry in machine.items()
        for cause in entry.causes
    }
    by_type = {(type(b or a), b, a, cause) for b, a, cause in explored().seen}
    assert by_type == {(type(b or a), b, a, cause) for b, a, cause in in_tables}


@pytest.mark.rotated
def test_every_event_and_report_was_tried() -> None:
    carriers = {e.ReportReceived}
    of_deadlines = {e.FleetRated}  # it only leads to decisions
    assert explored().told == set(KINDS.values()) - carriers - of_deadlines


def test_every_phase_can_be_reached_and_left() -> None:
    for phases, machine in MACHINES.items():
        afters = {after for _, after in machine}
        befores = {before for before, _ in machine}
        assert set(phases) - afters <= {JobPhase.NEW, RankPhase.INVITED}
        assert set(phases) - befores <= {RankPhase.GONE}


# --- The picture ----------------------------------------------------------------------


def picture(machine: Machine) -> str:
    """Return a table's diagram, and its rows for people."""

    def name(phase: StrEnum | None) -> str:
        return "[*]" if phase is None else phase.value

    arrows = [
        f"    {name(before)} --> {name(after)} : {entry.when}"
        for (before, after), entry in machine.items()
    ]
    rows = [
        f"| {before or '-'} | {after or '-'} | {entry.when} | {', '.join(causes)} |"
        for (before, after), entry in machine.items()
        for causes in [[c if isinstance(c, str) else c.__name__ for c in entry.causes]]
    ]
    return "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            *arrows,
            "```",
            "",
            "| from | to | when | caused by |",
            "|---|---|---|---|",
            *rows,
        ]
    )


@pytest.mark.parametrize("phases", list(MACHINES))
def test_the_docs_show_the_tables(phases: type[StrEnum]) -> None:
    """Print what belongs between the marks where they differ."""
    text = DOCS.read_text()
    _, _, rest = text.partition(f"<!-- {phases.__name__} -->\n")
    assert rest.partition("\n<!-- end -->")[0] == picture(MACHINES[phases])
    for phase in phases:
        assert f"- **{phase.value}**: " in text, "every phase is explained in a line"
