"""The core's invariants under any events in any order."""

from __future__ import annotations

from dataclasses import fields as fields_of
from dataclasses import replace
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.story import OFFER, ON_DEMAND, PROFILE, Story
from tests.view import View

from spottrain.cloud.port.provider import VmState
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.core.model.state import JobPhase, State, spent_usd
from spottrain.wire import messages

IDS = tuple("abcdef")
VM_IDS = st.sampled_from(IDS)
STEPS = st.integers(0, 120)
NUMBERS = st.integers(0, 6)
ROUNDS = st.integers(-3, -1)
SLOTS = st.integers(0, 1)
REASONS = st.just("reason")

REPORTS: st.SearchStrategy[messages.Report] = st.one_of(
    st.builds(
        messages.SupervisorReady,
        num_slots=st.integers(1, 2),
        torch_version=st.just("2"),
    ),
    st.builds(messages.Calibrated, profile=st.just(PROFILE), generation=ROUNDS),
    st.builds(
        messages.CalibrationProgress,
        generation=ROUNDS,
        done=st.integers(1, 2),
        total=st.just(3),
        what=st.just("sections"),
    ),
    st.builds(
        messages.StoreOpened,
        generation=st.one_of(NUMBERS, ROUNDS),
        host=st.just("h"),
        port=st.just(1),
    ),
    st.builds(
        messages.GenerationStarted,
        generation=NUMBERS,
        slot=SLOTS,
        pid=st.just(1),
        step=STEPS,
        outcome=st.just("same"),
        sections_moved=st.just(0),
        sections_loaded=st.just(0),
    ),
    st.builds(
        messages.MinibatchCommitted,
        generation=NUMBERS,
        slot=SLOTS,
        step=STEPS,
        sections=st.lists(st.integers(0, 3), max_size=3).map(tuple),
        loss=st.just(1.0),
        grad_norm=st.just(1.0),
        step_s=st.floats(0.1, 2.0),
        peak_bytes=st.just(1),
    ),
    st.builds(
        messages.OutOfMemory,
        generation=NUMBERS,
        slot=SLOTS,
        section=st.none() | st.integers(0, 1),
        microbatch_size=st.just(1),
        requested_bytes=st.integers(0, 10),
        device_bytes=st.just(1 << 30),
        during=st.sampled_from(get_args(messages.MemoryUse)),
    ),
    st.builds(messages.NcclFailed, generation=NUMBERS, slot=SLOTS, reason=REASONS),
    st.builds(
        messages.SectionPrepared,
        generation=st.one_of(NUMBERS, ROUNDS),
        section=st.integers(0, 3),
    ),
    st.builds(messages.Evaluated, generation=NUMBERS, step=STEPS, loss=st.just(1.0)),
    st.builds(
        messages.GenerationStopped,
        generation=NUMBERS,
        slot=SLOTS,
        step=STEPS,
        done=st.booleans(),
    ),
    st.builds(
        messages.GenerationBroken,
        generation=st.one_of(NUMBERS, ROUNDS),
        slot=SLOTS,
        reason=REASONS,
    ),
    st.builds(
        messages.WorkerDied,
        generation=st.one_of(NUMBERS, ROUNDS),
        slot=SLOTS,
        reason=REASONS,
    ),
    st.builds(messages.CheckpointSaved, name=st.sampled_from(["x", "y"]), step=STEPS),
    st.builds(messages.CheckpointDamaged, name=st.sampled_from(["x"]), reason=REASONS),
    st.builds(messages.CheckpointFailed, step=st.just(5), reason=REASONS),
    st.builds(messages.InterruptionNoticed, lead_s=st.floats(0.0, 200.0)),
    st.builds(messages.InterruptionCancelled),
    st.builds(messages.InterruptionLikely),
)

VMS = st.builds(
    lambda vm_id, intent, state: replace(Story().listed(vm_id, intent), state=state),
    VM_IDS,
    st.sampled_from(["intent-0", "intent-1", "intent-9"]),
    st.sampled_from(VmState),
)
VM_TUPLES = st.lists(VMS, max_size=4, unique_by=lambda vm: vm.vm_id).map(tuple)
INTENTS = st.sampled_from(["intent-0", "intent-1", "intent-2"])
AT = st.just(0.0)
LIMITS = st.one_of(
    st.builds(
        Limit,
        name=st.just("max_usd_per_hour"),
        value=st.sampled_from([None, 1.0, 2.5, 100.0]),
    ),
    st.builds(Limit, name=st.just("deadline_s"), value=st.sampled_from([None, 1e4, 1e9])),
    st.builds(Limit, name=st.just("min_examples_per_s"), value=st.just(1.0)),
)

EVENTS: st.SearchStrategy[e.Event] = st.one_of(
    st.builds(e.ManagerStarted, at_s=AT, software_version=st.just("1"), pid=st.just(1)),
    st.builds(
        e.StopRequested,
        at_s=AT,
        by=st.just("x"),
        checkpoint=st.booleans(),
        now=st.booleans(),
    ),
    st.builds(e.JobMoved, at_s=AT, epoch=st.sampled_from([2, 3]), host=st.just("here")),
    st.builds(e.TimerFired, at_s=AT),
    st.builds(
        e.LimitsChanged,
        at_s=AT,
        by=st.just("x"),
        limits=st.lists(LIMITS, max_size=2).map(tuple),
    ),
    st.builds(
        e.GrantReceived,
        at_s=AT,
        grant=st.builds(
            PoolGrant,
            pool=st.just("lab"),
            serial=st.integers(1, 9),
            vms=st.sampled_from([(), (("local/t", 1),), (("local/t", 3),)]),
            until_s=st.sampled_from([0.0, 5e3, 1e12]),
            max_microusd=st.sampled_from([0, 3_000_000, 10**12]),
        ),
    ),
    st.builds(e.ClockSet, at_s=AT, by_s=st.sampled_from([-3600.0, 9000.0])),
    st.builds(
        e.FolderSeen,
        at_s=AT,
        trouble=st.sampled_from(["", "it is read-only"]),
        is_gone=st.booleans(),
    ),
    st.builds(
        e.ProfilesListed,
        at_s=AT,
        profiles=st.sampled_from([(), (e.KnownProfile(profile=PROFILE, measured_at_s=0.0),)]),
    ),
    st.builds(
        e.OffersSeen,
        at_s=AT,
        offers=st.sampled_from([(), (OFFER,), (OFFER, ON_DEMAND)]),
    ),
    st.builds(e.VmsLaunched, at_s=AT, intent=INTENTS, vms=VM_TUPLES),
    st.builds(
        e.LaunchRefused,
        at_s=AT,
        intent=INTENTS,
        reason=REASONS,
        refusal=st.sampled_from(["no_capacity", "unknown", "throttled", "quota"]),
    ),
    st.builds(e.VmsListed, at_s=AT, asked_at_s=st.sampled_from([0.0, 1e9]), vms=VM_TUPLES),
    st.builds(
        e.ProviderAnswered,
        at_s=AT,
        vm_id=VM_IDS,
        state=st.one_of(st.none(), st.sampled_from(VmState)),
    ),
    st.builds(e.VmsReturned, at_s=AT, vm_ids=st.tuples(VM_IDS)),
    st.builds(e.VmLost, at_s=AT, vm_id=VM_IDS, reason=REASONS),
    st.builds(
        e.AgentRegistered,
        at_s=AT,
        vm_id=VM_IDS,
        num_slots=st.integers(1, 2),
        private_address=st.just("h"),
    ),
    st.builds(e.AgentRefused, at_s=AT, vm_id=VM_IDS, reason=REASONS),
    st.builds(e.VmSilent, at_s=AT, vm_id=VM_IDS),
    st.builds(e.VmHeard, at_s=AT, vm_id=VM_IDS),
    st.builds(
        e.CommandFailed,
        at_s=AT,
        command=st.sampled_from(["start_agent", "terminate_vms", "ask_provider"]),
        vm_ids=st.tuples(VM_IDS),
        reason=REASONS,
    ),
    st.builds(e.ReportReceived, at_s=AT, vm_id=VM_IDS, number=st.just(0), report=REPORTS),
)

DELAYS = st.sampled_from([0.0, 0.1, 3.0, 20.0, 70.0, 1000.0])
HISTORY = st.lists(st.tuples(EVENTS, DELAYS), max_size=25)


def play(story: Story, history: list[tuple[e.Event, float]]) -> None:
    """Tell a history; reports get the numbers of their turn and of their generation."""
    for event, delay_s in history:
        story.now_s += delay_s
        before = story.state
        if isinstance(event, e.ReportReceived):
            story.report(event.vm_id, aimed(story, event.report))
        else:
            fields = {one.name: getattr(event, one.name) for one in fields_of(event)}
            del fields["at_s"]
            story.tell(type(event), **fields)
        check_commands(before, story)


def aimed(story: Story, report: messages.Report) -> messages.Report:
    """Most reports are about the generation that runs: 0 to 3 stand for that."""
    number = getattr(report, "generation", None)
    generation = story.current_generation
    if number is None or number > 3 or generation is None:
        return report
    return replace(report, generation=generation.number)  # type: ignore[arg-type]


def check_commands(before: State, story: Story) -> None:
    was = View(before)
    assert story.next_generation >= was.next_generation
    assert story.highest_step >= was.highest_step
    for command in story.commands:
        match command:
            case c.Send(vm_id=vm_id, command=messages.RunGeneration() as order):
                assert story.generation.number == order.generation
                assert vm_id in story.vms
            case c.Send(vm_id=vm_id) | c.StartAgent(vm_id=vm_id):
                assert vm_id in story.vms, "no orders to VMs that are gone"
            case c.LaunchVms(intent=intent):
                assert intent in story.intents, "nothing is rented without an intent"
            case c.TerminateVms(vm_ids=vm_ids):
                assert vm_ids
            case _:
                pass


def behave(story: Story) -> None:
    """From now on the cloud does what it is asked to."""
    for _ in range(200):
        commands, pending = (
            story.commands,
            list[tuple[type[e.Event], dict[str, object]]](),
        )
        for command in commands:
            if isinstance(command, c.TerminateVms):
                pending.append((e.VmsReturned, {"vm_ids": command.vm_ids}))
            elif isinstance(command, c.LaunchVms):
                pending.append((e.VmsLaunched, {"intent": command.intent, "vms": ()}))
        collected: list[c.Command] = []
        for event_type, fields in pending:
            collected += story.tell(event_type, **fields)
        story.commands = tuple(collected)
        if story.state.phase is JobPhase.ENDED:
            return
        if not pending:
            timer_at_s = story.state.timer_at_s
            assert timer_at_s is not None, "the core waits for nothing"
            story.wait(max(0.0, timer_at_s - story.now_s))


@given(
    history=HISTORY,
    trained=st.booleans(),
    objective=st.sampled_from(["throughput", "examples_per_dollar"]),
)
def test_any_history_keeps_the_invariants_and_replays_to_the_same_state(
    history: list[tuple[e.Event, float]], trained: bool, objective: str
) -> None:
    story = Story(max_vms=5, objective=objective)
    if trained:
        story.training("a", "b", "c", "d")
    play(story, history)
    state = State()
    for event in story.events:
        state, _ = step.step(state, event)
    assert state == story.state


@given(history=HISTORY, trained=st.booleans())
def test_after_any_history_a_stop_returns_every_vm(
    history: list[tuple[e.Event, float]], trained: bool
) -> None:
    story = Story(max_vms=5)
    if trained:
        story.training("a", "b", "c", "d")
    play(story, history)
    if story.state.phase is not JobPhase.ENDED:
        story.tell(e.ManagerStarted, software_version="1", pid=2)
        repeated = story.commands
        story.tell(e.StopRequested, by="x", now=True)
        story.commands = (*repeated, *story.commands)
        behave(story)
    assert story.state.phase is JobPhase.ENDED
    assert not story.vms


@given(history=HISTORY, max_usd=st.floats(0.7, 3.0), prices=st.lists(st.floats(0.1, 5.0)))
def test_an_active_job_has_never_spent_more_than_its_budget(
    history: list[tuple[e.Event, float]], max_usd: float, prices: list[float]
) -> None:
    story = Story(max_vms=5, max_usd=max_usd)
    story.start()
    for (event, delay_s), price in zip(history, prices, strict=False):
        offer = replace(OFFER, usd_per_hour=price)
        story.tell(e.OffersSeen, offers=(offer,))
        play(story, [(event, min(delay_s, 5.0))])
        while (at_s := story.state.timer_at_s) is not None and at_s <= story.now_s:
            story.tell(e.TimerFired)
        if story.state.phase is JobPhase.ACTIVE:
            assert spent_usd(story.state, story.now_s) <= max_usd
