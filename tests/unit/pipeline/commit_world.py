"""A world of slots, workers and generations, in steps that are atomic.

The world is a pool of slots whose memory outlives their workers. Each slot takes one
atomic step at a time: of a mini-batch (send its share of the reduction, mark prepared
and offer, decide, half apply, flip) or of recovery (store the decision, apply, wipe,
copy). At any moment a VM may die with its memory, and the manager may begin another
generation, which stops every worker where it stands: so a new generation is also the
death of any set of workers, and of those that recover. Slots may be left out of a
generation (silent VMs); they wake, run on in the old one as far as messages already
sent carry them, are fenced, and may come back later. A spare slot is a donor.

Content is modelled as the tuple of (generation of the gradients, step, attempt) applied
so far. Where a shape says so, the next stage's slot keeps copies of each section: all slots
copy their own after the same mini-batch, receive those of others at any later moment, and
let go of the ones before once a gather has shown that all have received. Gradients of some stage, where a shape says so, are out of range at the first
attempt of a mini-batch: that stage marks nothing, and after the gather all compute again.
Where gradients are stale by one mini-batch, a slot computes each before its commit begins, at
any moment from when the one before the one before is applied: on the weights of then, which
are committed beside the present ones. What is computed ahead ends with the worker.
Where slots share a VM, each holds some of their stage's sections and works with copies of the
others, which end with the worker: it gets them when a generation begins, and after each
mini-batch once all who hold one have flipped it.
Atomic here, since the difference is not visible: marking prepared and offering;
flipping the last section and reporting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

from spottrain.pipeline.state.agreement import (
    Agreement,
    Contribution,
    MinibatchDecision,
    RankRecord,
    SectionRecord,
    agree,
    applies,
    kept_state,
    moves,
)

Content = tuple[tuple[int, int, int], ...]
START, SENT, PREPARED, DECIDED = range(4)  # then half and flip of each section
PHASES = 100  # progress = step * PHASES + attempt * ATTEMPT + phase
ATTEMPT = 50
FAR = 10**9


@dataclass(frozen=True)
class Shape:
    """How large a world to walk, and how much may go wrong in it."""

    stages: int
    replicas: int
    sections_per_stage: int = 1
    spares: int = 0
    steps: int = 2
    generations: int = 3
    faults: int = 2
    checkpoints: bool = False
    out_of_range: int | None = None  # the stage that is, at each first attempt
    copies: bool = False  # on the next stage's slot
    stale: bool = False  # gradients are of the weights one mini-batch before
    slots_per_vm: int = 1  # of a stage, which share the sections of it

    @property
    def shares(self) -> bool:
        return self.slots_per_vm > 1

    @property
    def num_sections(self) -> int:
        return self.stages * self.sections_per_stage

    def sections_of(self, stage: int) -> range:
        first = stage * self.sections_per_stage
        return range(first, first + self.sections_per_stage)


class Copy(NamedTuple):
    """A section in a slot's memory; content is None while half written."""

    version: int
    origin: int
    content: Content | None
    mark: tuple[int, int] | None = None  # (generation, step)
    base: Content | None = None  # what the prepared gradients were computed on
    attempt: int = 0  # which attempt's they are


class Kept(NamedTuple):
    """A section's copy beside what is trained; one that is half written is not there."""

    section: int
    state: tuple[int, int]  # version and origin
    content: Content


class Op(NamedTuple):
    """One step of recovery."""

    kind: str  # decide, half, flip, wipe, copy, keep, back, release, borrow
    section: int = -1
    source: int | None = None  # None: the checkpoint
    state: tuple[int, int] = (-1, -1)  # the decision; or version and origin to copy
    states: tuple[tuple[int, int] | None, ...] = ()  # of which kept copies stay


class Slot(NamedTuple):
    """Memory and program counter of one slot."""

    generation: int = 0
    stage: int | None = None  # None: a donor
    holds: tuple[int, ...] = ()  # sections
    program: tuple[Op, ...] = ()  # what is left to do of recovery
    step: int = 0
    attempt: int = 0
    phase: int = START
    alive: bool = True
    copies: tuple[Copy | None, ...] = ()  # of each section
    decision: tuple[int, int] | None = None
    undo: tuple[int, Copy] | None = None  # a section as it was before its update
    kept: tuple[Kept, ...] = ()
    whole: tuple[int, int] | None = None  # state of copies that are not overwritten
    ahead: tuple[int, Content] | None = None  # mini-batch computed, on which weights
    entered: Content = ()  # weights on which the one that is committed was computed
    borrowed: Content = ()  # of the sections of its stage that it does not hold
    pending: tuple[int, int] | None = None  # state of copies that are being made
    copied: tuple[int, int] | None = None  # state that this generation has copies of
    told: tuple[bool, bool] = (False, False)  # whether they are; by parity of the step
    # When left out: how far the others were, in its reduction and in the gather, and
    # whether they had told that their copies are made.
    heard: tuple[int, int, tuple[bool, bool]] | None = None


class World(NamedTuple):
    """Everything there is."""

    slots: tuple[Slot, ...]
    generation: int
    reported: tuple[int, ...]  # version of each section, in this generation
    committed: Content
    checkpoint: Content
    faults_left: int


# --- A slot's memory ------------------------------------------------------------------


def put(slot: Slot, section: int, copy: Copy) -> Slot:
    copies = list(slot.copies)
    copies[section] = copy
    return slot._replace(copies=tuple(copies))


def held(slot: Slot, section: int) -> Copy:
    copy = slot.copies[section]
    assert copy is not None
    return copy


@cache
def mapped(slot: Slot) -> Slot:
    """Return the slot as a new worker finds it: an unfinished update rolled back."""
    if slot.undo is None:
        return slot
    section, before = slot.undo
    if held(slot, section).version == before.version:
        slot = put(slot, section, before)
    return slot._replace(undo=None)


@cache
def record_of(
    rank: int,
    copies: tuple[Copy | None, ...],
    decision: tuple[int, int] | None,
    kept: tuple[Kept, ...],
) -> RankRecord:
    records = []
    for section, copy in enumerate(copies):
        if copy is not None:
            generation, step = copy.mark or (None, None)
            share = Contribution(section, 0.0, 0.0, 1.0, False) if copy.mark else None
            records.append(
                SectionRecord(section, copy.version, copy.origin, generation, step, share)
            )
    records += [
        SectionRecord(one.section, *one.state, None, None, None, is_copy=True) for one in kept
    ]
    stored = MinibatchDecision(*decision, 0.0, 0.0, 0.0, False, False) if decision else None
    return RankRecord(rank, tuple(records), stored)


def half(shape: Shape, slot: Slot, section: int) -> Slot:
    before = held(slot, section)
    assert before.content is not None
    assert before.mark == slot.decision, "applies other gradients than were decided"
    assert before.base == base_of(shape, before.content), "gradients are of another content"
    return put(slot, section, before._replace(content=None))._replace(undo=(section, before))


def flip(slot: Slot, section: int) -> Slot:
    assert slot.undo is not None
    assert slot.decision is not None
    before, (generation, step) = slot.undo[1], slot.decision
    assert before.content is not None
    content = (*before.content, (*slot.decision, before.attempt))
    assert len(content) == step + 1 == before.version + 1
    after = before._replace(version=step + 1, origin=generation, content=content)
    return put(slot, section, after)


Judge = Callable[[World, Mapping[int, Slot], Agreement], Content]
"""Gets the participants of an agreement; returns the content agreed on."""


# --- One step of one slot ---------------------------------------------------------------


def progress(slot: Slot) -> int:
    now = slot.step * PHASES + slot.attempt * ATTEMPT + slot.phase
    return -1 if slot.program else now


def heard_by(world: World, i: int) -> tuple[int, int, tuple[bool, bool]]:
    """Return how far the others are in slot i's reduction and in the gather, and whether
    all have told that their copies are made."""
    me = world.slots[i]
    if me.heard is not None:
        return me.heard
    ring = gather = FAR
    even = odd = True
    for j, other in enumerate(world.slots):
        if j != i and other.generation == me.generation and other.stage is not None:
            gather = min(gather, progress(other))
            even, odd = even and other.told[0], odd and other.told[1]
            if other.stage == me.stage:
                ring = min(ring, progress(other))
    return ring, gather, (even, odd)


def advance(shape: Shape, world: World, i: int) -> World | None:
    """Return the world after slot i's next step, None if it has none or must wait."""
    slot = world.slots[i]
    if not slot.alive:
        return None
    after = recover(shape, world, slot) if slot.program else train(shape, world, i)
    if after is None:
        return None
    if slot.program or after.phase != slot.phase + 1:
        return report(shape, world, i, after)
    return with_slot(world, i, after)


def train(shape: Shape, world: World, i: int) -> Slot | None:
    slot = world.slots[i]
    if slot.stage is None or slot.step >= shape.steps:
        return None
    now = slot.step * PHASES + slot.attempt * ATTEMPT
    own, is_retry = slot.holds, slot.attempt > 0
    after = slot._replace(phase=slot.phase + 1)
    if slot.phase == START:
        return enter(shape, slot, after)
    if slot.phase == SENT:
        ring, everybody, _ = heard_by(world, i)
        if ring < now + SENT:
            return None
        # Gradients pass through every stage of every replica in the ring: none are
        # complete before all have begun, which takes their marks of attempts before back.
        if is_retry and everybody < now + SENT:
            return None
        if slot.heard is None:
            check_same_weights(world, slot)
        after = after._replace(told=telling(shape, slot))
        if shape.out_of_range == slot.stage and not is_retry:
            return after
        for k in own:
            mark = (slot.generation, slot.step)
            copy = held(slot, k)._replace(mark=mark, base=slot.entered, attempt=slot.attempt)
            after = put(after, k, copy)
        return after
    if slot.phase == PREPARED:
        _, everybody, told_by_all = heard_by(world, i)
        if everybody < now + PREPARED:
            return None
        parity = slot.step % 2
        if slot.pending and slot.told[parity] and told_by_all[parity]:
            after = after._replace(whole=slot.pending, copied=slot.pending, pending=None)
        if shape.out_of_range is not None and not is_retry:
            # What was computed ahead goes the way of this one.
            return after._replace(attempt=1, phase=START, ahead=None)
        return after._replace(decision=(slot.generation, slot.step))
    if slot.phase == given(shape):
        return borrow(shape, world, i)
    index, is_flip = divmod(slot.phase - DECIDED, 2)
    if index == len(own):  # it holds none
        return after._replace(phase=given(shape))
    if not is_flip:
        return half(shape, after, own[index])
    after = flip(after, own[index])
    if own[index] == own[-1]:
        return after._replace(phase=given(shape)) if shape.shares else next_step(after)
    return after


def next_step(slot: Slot) -> Slot:
    return slot._replace(step=slot.step + 1, attempt=0, phase=START)


def given(shape: Shape) -> int:
    """Return the phase in which a slot that shares has flipped all that it holds."""
    return DECIDED + 2 * shape.sections_per_stage


def borrow(shape: Shape, world: World, i: int) -> Slot | None:
    """Get the next weights of what others hold, once these have flipped them."""
    slot = world.slots[i]
    ring, _, _ = heard_by(world, i)
    if ring < slot.step * PHASES + slot.attempt * ATTEMPT + given(shape):
        return None
    assert slot.decision is not None
    return next_step(slot._replace(borrowed=(*slot.entered, (*slot.decision, slot.attempt))))


def check_same_weights(world: World, slot: Slot) -> None:
    """Assert that all of a stage have computed a mini-batch on the same weights."""
    now = slot.step * PHASES + slot.attempt * ATTEMPT
    for other in world.slots:
        together = (other.generation, other.stage) == (slot.generation, slot.stage)
        if together and SENT <= progress(other) - now < ATTEMPT:
            assert other.entered == slot.entered, "replicas compute on other weights"


def enter(shape: Shape, slot: Slot, after: Slot) -> Slot | None:
    """Take marks back, and let what was computed be reduced."""
    assert slot.stage is not None
    if shape.stale:
        if slot.ahead is None:
            return None
        assert slot.ahead[0] == slot.step
        after = after._replace(ahead=None, entered=slot.ahead[1])
    else:
        contents = {held(slot, k).content for k in slot.holds}
        if len(slot.holds) < shape.sections_per_stage:
            contents.add(slot.borrowed)
        assert len(contents) == 1, "computes on the weights of several mini-batches"
        (content,) = contents
        assert content is not None
        after = after._replace(entered=content)
    after = after._replace(undo=None)
    for k in slot.holds:
        after = put(after, k, held(slot, k)._replace(mark=None, base=None, attempt=0))
    return copying(shape, after) if shape.copies else after


def compute(shape: Shape, world: World, i: int) -> World | None:
    """Compute a mini-batch whose weights are there: the next, or the one after it while
    that is committed."""
    slot = world.slots[i]
    if not shape.stale or not slot.alive or slot.program or slot.stage is None:
        return None
    step = slot.step + (slot.phase != START)
    if slot.ahead is not None or step >= shape.steps:
        return None
    own = shape.sections_of(slot.stage)
    (base,) = {weights(slot, k, max(0, step - 1)) for k in own}
    return with_slot(world, i, slot._replace(ahead=(step, base)))


def weights(slot: Slot, section: int, version: int) -> Content:
    """Return a version of a section's weights: the present one or the one before."""
    copy = held(slot, section)
    if copy.content is None:  # an update writes over neither before it is complete
        assert slot.undo is not None
        copy = slot.undo[1]
    assert copy.content is not None
    assert copy.version - version in (0, 1), "its weights are not there"
    return copy.content[:version]


def base_of(shape: Shape, content: Content) -> Content:
    """Return what gradients must have been computed on to be applied to a content."""
    return content[:-1] if shape.stale else content


def copying(shape: Shape, slot: Slot) -> Slot:
    """Copy a slot's own sections, unless copies are still being made."""
    if slot.pending is not None:
        return slot
    assert slot.stage is not None
    own = shape.sections_of(slot.stage)
    state = held(slot, own[0])[:2]
    slot = slot._replace(pending=state)
    for k in own:
        copy = held(slot, k)
        assert copy.content is not None
        slot = keep(free_room(slot, k), Kept(k, state, copy.content))
    return slot


def keep(slot: Slot, copy: Kept) -> Slot:
    return slot._replace(kept=tuple(sorted({*slot.kept, copy})))


def free_room(slot: Slot, section: int) -> Slot:
    """Overwrite what is not of the state that all slots have."""
    stays = (k for k in slot.kept if k.section != section or k.state == slot.whole)
    return slot._replace(kept=tuple(stays))


def kept_for(shape: Shape, stage: int) -> range:
    """Return the sections of the stage before, whose copies a stage's slot keeps."""
    return shape.sections_of((stage - 1) % shape.stages)


def has_received(shape: Shape, slot: Slot) -> bool:
    assert slot.stage is not None
    states = {(one.section, one.state) for one in slot.kept}
    return all((k, slot.pending) in states for k in kept_for(shape, slot.stage))


def telling(shape: Shape, slot: Slot) -> tuple[bool, bool]:
    """Return what a slot has told once it enters the gather of this mini-batch."""
    even, odd = slot.told
    received = has_received(shape, slot)
    return (even, received) if slot.step % 2 else (received, odd)


def receive(shape: Shape, world: World, i: int) -> Iterator[World]:
    """Receive a section's copy: its room is overwritten, then it is whole."""
    slot = world.slots[i]
    if not slot.alive or slot.program or slot.pending is None or slot.heard is not None:
        return
    assert slot.stage is not None
    for k in kept_for(shape, slot.stage):
        if any(one[:2] == (k, slot.pending) for one in slot.kept):
            continue
        if (emptied := free_room(slot, k)) != slot:
            yield with_slot(world, i, emptied)
            continue
        yield from (
            with_slot(world, i, keep(slot, one))
            for other in world.slots
            if other.alive and other.generation == slot.generation
            if other.stage is not None and k in shape.sections_of(other.stage)
            for one in other.kept
            if one[:2] == (k, slot.pending)
        )


def recover(shape: Shape, world: World, slot: Slot) -> Slot | None:
    op, after = slot.program[0], slot._replace(program=slot.program[1:])
    if op.kind == "decide":
        return after._replace(decision=op.state)
    if op.kind == "half":
        return half(shape, after, op.section)
    if op.kind == "flip":
        return flip(after, op.section)
    if op.kind == "keep":
        stays = tuple(one for one in slot.kept if one.state in op.states)
        return after._replace(kept=stays)
    if op.kind == "release":
        if world.generation != slot.generation or not is_past_moves(world):
            return None
        stays = tuple(one for one in slot.kept if one.state in op.states)
        whole = max((one.state for one in stays), default=None)
        return after._replace(kept=stays, whole=whole)
    if op.kind == "borrow":
        if world.generation != slot.generation or not is_past_moves(world):
            return None
        owners = [
            s for s in world.slots if s.generation == slot.generation and op.section in s.holds
        ]
        content = held(owners[0], op.section).content
        assert content is not None
        return after._replace(borrowed=content)
    if op.kind == "back":
        (found,) = (one for one in slot.kept if one[:2] == (op.section, op.state))
        return put(after, op.section, Copy(*op.state, found.content))
    if op.kind == "wipe":
        return put(after._replace(undo=None), op.section, Copy(-1, -1, None))
    if op.source is None:
        content = world.checkpoint
        assert len(content) == op.state[0]
        return put(after, op.section, Copy(*op.state, content))
    source = world.slots[op.source]
    if not source.alive or source.generation != slot.generation:
        return None
    for one in source.kept:
        if one[:2] == (op.section, op.state):
            return put(after, op.section, Copy(*op.state, one.content))
    copy = source.copies[op.section]
    if copy is None or copy[:2] != op.state or copy.content is None:
        return None
    return put(after, op.section, copy._replace(mark=None, base=None, attempt=0))


def is_past_moves(world: World) -> bool:
    """Return whether all of the newest generation have every section that they need."""
    return all(
        slot.alive and all(op.kind in ("release", "borrow") for op in slot.program)
        for slot in world.slots
        if slot.generation == world.generation
    )


def with_slot(world: World, i: int, slot: Slot) -> World:
    slots = list(world.slots)
    slots[i] = slot
    return world._replace(slots=tuple(slots))


def report(shape: Shape, world: World, i: int, slot: Slot) -> World:
    """Tell the manager what slot i has applied; one of an old generation is fenced."""
    world = with_slot(world, i, slot)
    if not slot.holds or slot.program or slot.generation != world.generation:
        return world
    reported = list(world.reported)
    for k in slot.holds:
        reported[k] = max(reported[k], slot.step)
    version = min(reported)
    content = held(slot, slot.holds[0]).content
    world = world._replace(reported=tuple(reported))
    if version > len(world.committed):
        assert content is not None
        world = world._replace(committed=content[:version])
    return world


# --- A new generation -------------------------------------------------------------------


def subsets(items: list[int], at_most: int) -> Iterator[tuple[int, ...]]:
    for size in range(min(len(items), at_most) + 1):
        yield from combinations(items, size)


def new_generations(shape: Shape, world: World, judge: Judge) -> Iterator[World]:
    """Begin the next generation with every choice of whom to leave out or take back."""
    numbered = [(i, s) for i, s in enumerate(world.slots) if s.alive]
    inside = [i for i, s in numbered if s.generation == world.generation]
    outside = [i for i, s in numbered if s.generation != world.generation]
    for left, back in product(subsets(inside, world.faults_left), subsets(outside, len(outside))):
        absent = frozenset({*left, *outside} - {*back})
        owners = plan(shape, absent)
        if owners is not None:
            yield begin(shape, world, left, absent, owners, judge)


@cache
def plan(shape: Shape, absent: frozenset[int]) -> tuple[tuple[int, ...], ...] | None:
    """Return the slots of each stage: those at home there, else a spare."""
    homes = shape.stages * shape.replicas
    spares = [i for i in range(homes, homes + shape.spares) if i not in absent]
    owners = []
    for stage in range(shape.stages):
        first = stage * shape.replicas
        own = [i for i in range(first, first + shape.replicas) if i not in absent]
        if not own and not spares:
            return None
        owners.append(tuple(own or [spares.pop()]))
    return tuple(owners)


def holders_of(shape: Shape, owners: tuple[tuple[int, ...], ...]) -> dict[int, tuple[int, ...]]:
    """Return the slots that hold each section: one of each VM of its stage."""
    holders = {}
    for stage, own in enumerate(owners):
        vms: dict[int, list[int]] = {}
        for i in own:
            vms.setdefault(i // shape.slots_per_vm, []).append(i)
        for index, k in enumerate(shape.sections_of(stage)):
            holders[k] = tuple(slots[index % len(slots)] for slots in vms.values())
    return holders


def survivors(shape: Shape, world: World, absent: frozenset[int]) -> dict[int, Slot]:
    """Return the slots that are present as new workers find them, lost VMs replaced."""
    fresh = Slot(copies=(None,) * shape.num_sections)
    return {
        i: mapped(slot) if slot.alive else fresh
        for i, slot in enumerate(world.slots)
        if i not in absent
    }


def begin(
    shape: Shape,
    world: World,
    left: tuple[int, ...],
    absent: frozenset[int],
    owners: tuple[tuple[int, ...], ...],
    judge: Judge,
) -> World:
    """Have all who are present agree, and give each what to do before it trains."""
    present = survivors(shape, world, absent)
    records = tuple(record_of(i, s.copies, s.decision, s.kept) for i, s in present.items())
    generation = world.generation + 1
    agreement = agree(shape.num_sections, records, generation, len(world.checkpoint))
    content = judge(world, present, agreement)
    slots = list(world.slots)
    for i in left:
        slots[i] = slots[i]._replace(heard=heard_by(world, i))
    holders = holders_of(shape, owners)
    programs = programs_of(shape, records, agreement, owners)
    for i, slot in present.items():
        stage = next((p for p, ranks in enumerate(owners) if i in ranks), None)
        holds = tuple(k for k, ranks in holders.items() if i in ranks)
        begun_slot = Slot(generation, stage, holds, programs[i], agreement.step)
        slots[i] = begun_slot._replace(copies=slot.copies, decision=slot.decision, kept=slot.kept)
    is_kept = content[: len(world.committed)] == world.committed
    begun = World(
        slots=tuple(slots),
        generation=generation,
        reported=(0,) * shape.num_sections,
        committed=world.committed if is_kept else content,
        checkpoint=world.checkpoint,
        faults_left=world.faults_left - len(left),
    )
    for i in present:
        begun = report(shape, begun, i, begun.slots[i])
    return begun


@cache
def programs_of(
    shape: Shape,
    records: tuple[RankRecord, ...],
    agreement: Agreement,
    owners: tuple[tuple[int, ...], ...],
) -> dict[int, tuple[Op, ...]]:
    """Return what each rank does before it trains."""
    programs: dict[int, list[Op]] = {record.rank: [] for record in records}
    decision, state = agreement.decision, (agreement.step, agreement.origin)
    lasts = kept_state(shape.num_sections, records)
    wanted = holders_of(shape, owners)
    for record in records:
        program = programs[record.rank]
        if shape.copies:
            program.append(Op("keep", states=(lasts, state)))
        if decision is not None:
            program.append(Op("decide", state=(decision.generation, decision.step)))
        for k in applies(record, agreement):
            program += Op("half", k), Op("flip", k)
        own = {k for k, ranks in wanted.items() if record.rank in ranks}
        there = {
            c.section for c in record.sections if (c.version, c.origin) == state and not c.is_copy
        }
        there.update(applies(record, agreement))
        program += [
            Op("back", c.section, state=state)
            for c in record.sections
            if c.is_copy and (c.version, c.origin) == state
            if c.section in own - there
        ]
    for move in moves(shape.num_sections, records, agreement, wanted):
        assert (move.source is None) == (agreement.outcome == "restored")
        program = programs[move.target]
        program += (
            Op("wipe", move.section),
            Op("copy", move.section, move.source, state),
        )
    if shape.copies:
        for program in programs.values():
            program.append(Op("release", states=(lasts,)))
    for p, ranks in enumerate(owners):
        for k, rank in product(shape.sections_of(p), ranks):
            if rank not in wanted[k]:
                programs[rank].append(Op("borrow", k))
    return {rank: tuple(program) for rank, program in programs.items()}
