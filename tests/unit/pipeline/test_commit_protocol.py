"""Every interleaving of commits, deaths and recoveries, over the very agreement code.

``commit_world`` says what can happen; here is what must hold whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import pytest
from tests.tiers import first_always
from tests.unit.pipeline import commit_world
from tests.unit.pipeline.commit_world import (
    Content,
    Copy,
    Judge,
    Op,
    Shape,
    Slot,
    World,
    advance,
    base_of,
    compute,
    holders_of,
    new_generations,
    plan,
    put,
    receive,
    with_slot,
)

from spottrain.pipeline.state.agreement import Agreement


def reach(shape: Shape, slots: Iterable[Slot], section: int) -> set[Content]:
    """Return the contents that these slots can bring the section to."""
    found = set()
    for slot in slots:
        copy = slot.copies[section]
        if copy is not None and copy.content is not None:
            found.add(copy.content)
            # By its number, too: two versions may have the same one before.
            fits = copy.mark is not None and copy.mark[1] == len(copy.content)
            if copy.mark and fits and copy.base == base_of(shape, copy.content):
                found.add((*copy.content, (*copy.mark, copy.attempt)))
        found.update(one.content for one in slot.kept if one.section == section)
    return found


def expect(
    shape: Shape, world: World, present: Mapping[int, Slot], agreement: Agreement
) -> Content:
    """Compare an agreement with what a look at all contents says; return the content."""
    sections = range(shape.num_sections)
    common = set.intersection(*(reach(shape, present.values(), k) for k in sections))
    best = max(common, key=lambda c: (len(c), c), default=None)
    if best is None or len(best) < len(world.checkpoint):
        assert agreement.outcome == "restored", "gives up what can be reached"
        best = world.checkpoint
    assert agreement.step == len(best), "a higher common state can be reached"
    members = {i: s for i, s in present.items() if world.slots[i].generation == world.generation}
    if all(
        any(c[: len(world.committed)] == world.committed for c in reach(shape, owning, k))
        for p in range(shape.stages)
        for k in shape.sections_of(p)
        for owning in [[s for i, s in members.items() if world.slots[i].stage == p]]
    ):
        assert agreement.step >= len(world.committed), "a committed step is lost"
    return best


def check(shape: Shape, world: World, can_move: bool) -> None:
    """Assert what holds in every state."""
    contents: dict[tuple[int, int], Content] = {}
    for slot in world.slots:
        for one in slot.kept:
            known = contents.setdefault(one.state, one.content)
            assert known == one.content, "one name, two contents"
        for copy in slot.copies:
            if copy is not None and copy.content is not None:
                name = (copy.version, copy.origin)
                known = contents.setdefault(name, copy.content)
                assert known == copy.content, "one name, two contents"
    members = [s for s in world.slots if s.generation == world.generation]
    if shape.copies and all(s.alive and not s.program for s in members):
        check_copies(shape, members)
    if not can_move and all(s.alive for s in members):
        assert all(s.step == shape.steps and not s.program for s in members if s.stage is not None)


def check_copies(shape: Shape, members: list[Slot]) -> None:
    """Assert that what the first slot to know tells the manager is there twice."""
    trains = [s for s in members if s.stage is not None]
    state = max((s.copied for s in trains if s.copied is not None), default=None)
    for k in range(shape.num_sections if state else 0):
        have = [s for s in trains if any(one[:2] == (k, state) for one in s.kept)]
        assert len(have) > 1, "one loss takes a section's only copy"


def first_world(shape: Shape) -> World:
    slots = []
    owners = plan(shape, frozenset())
    assert owners is not None
    holders = holders_of(shape, owners)
    for i in range(shape.stages * shape.replicas + shape.spares):
        stage, copies = i // shape.replicas, [None] * shape.num_sections
        holds = tuple(k for k, ranks in holders.items() if i in ranks)
        slot = Slot(
            stage=stage if stage < shape.stages else None, holds=holds, copies=tuple(copies)
        )
        for k in holds:
            slot = put(slot, k, Copy(0, 0, ()))
        slots.append(slot)
    nothing: Content = ()
    return World(tuple(slots), 0, (0,) * shape.num_sections, nothing, nothing, shape.faults)


def events(shape: Shape, world: World, judge: Judge) -> Iterator[World]:
    for i, slot in enumerate(world.slots):
        if world.faults_left and slot.alive:
            dead = slot._replace(alive=False, copies=(), decision=None, undo=None, kept=())
            yield with_slot(world, i, dead)._replace(faults_left=world.faults_left - 1)
    if world.generation < shape.generations:
        yield from new_generations(shape, world, judge)
    # A generation loads the checkpoint it was begun with: none is put meanwhile.
    is_training = not any(slot.program for slot in world.slots)
    if shape.checkpoints and is_training and len(world.committed) > len(world.checkpoint):
        yield world._replace(checkpoint=world.committed)


def walk(shape: Shape) -> int:
    """Visit every state of the world and return how many there are.

    Only hashes of states seen are kept: two of a million would have to share 64 bits
    for one to be missed.
    """
    start = first_world(shape)
    seen, frontier = {hash(start)}, [start]
    judge = partial(expect, shape)
    while frontier:
        world = frontier.pop()
        moved = [
            move(shape, world, i) for i in range(len(world.slots)) for move in (advance, compute)
        ]
        steps = [after for after in moved if after is not None]
        if shape.copies:
            for i in range(len(world.slots)):
                steps += receive(shape, world, i)
        check(shape, world, can_move=bool(steps))
        for after in (*steps, *events(shape, world, judge)):
            if (name := hash(after)) not in seen:
                seen.add(name)
                frontier.append(after)
    return len(seen)


COPIES = Shape(2, 1, generations=1, faults=1, copies=True)
SHAPES = {
    "one slot, a donor, a checkpoint": Shape(1, 1, spares=1, checkpoints=True),
    "one slot of two sections, a donor": Shape(1, 1, sections_per_stage=2, spares=1),
    "two stages": Shape(2, 1, generations=4, faults=3),
    "two stages of two sections": Shape(2, 1, sections_per_stage=2, generations=2),
    "two stages, a donor": Shape(2, 1, spares=1, faults=1, steps=1),
    "copies": COPIES,
    "copies, again and again": Shape(2, 1, steps=1, faults=1, generations=2, copies=True),
    "copies, a donor": Shape(2, 1, spares=1, steps=1, generations=1, faults=1, copies=True),
    "three stages": Shape(3, 1, faults=1, steps=1),
    "two replicas, a checkpoint": Shape(1, 2, generations=2, checkpoints=True),
    "three replicas": Shape(1, 3, generations=2, faults=1, steps=1),
    "two by two": Shape(2, 2, generations=1, faults=1, steps=1),
    "two stages, one out of range": Shape(2, 1, generations=3, out_of_range=0),
    "two replicas, out of range": Shape(1, 2, generations=2, out_of_range=0),
    "two by two, one out of range": Shape(2, 2, generations=1, faults=1, steps=1, out_of_range=1),
    "two by two, memory stays": Shape(2, 2, generations=2, faults=0, steps=1),
    "shared, two sections": Shape(1, 2, sections_per_stage=2, generations=2, slots_per_vm=2),
    "shared, one holds nothing": Shape(1, 2, generations=2, slots_per_vm=2),
    "shared, a checkpoint and a donor": Shape(
        1, 2, 2, spares=1, steps=1, generations=2, faults=1, checkpoints=True, slots_per_vm=2
    ),
    "shared, beside another VM": Shape(
        1, 3, sections_per_stage=2, generations=1, faults=1, slots_per_vm=2
    ),
    "shared, two stages": Shape(
        2, 2, sections_per_stage=2, generations=1, faults=1, steps=1, slots_per_vm=2
    ),
    "shared, out of range": Shape(
        1, 2, sections_per_stage=2, generations=2, faults=1, out_of_range=0, slots_per_vm=2
    ),
    "stale, one slot, a donor": Shape(1, 1, spares=1, stale=True),
    "stale, two stages": Shape(2, 1, generations=3, faults=1, stale=True),
    "stale, two stages of two sections": Shape(
        2, 1, sections_per_stage=2, generations=2, faults=1, stale=True
    ),
    "stale, two replicas": Shape(1, 2, generations=2, faults=1, stale=True),
    "stale, two stages, one out of range": Shape(2, 1, generations=3, out_of_range=0, stale=True),
}


@pytest.mark.parametrize("name", first_always(SHAPES))
def test_no_interleaving_splits_loses_or_blocks(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    num_states = walk(SHAPES[name])
    record_property("states", num_states)
    assert num_states > 10_000


def forget_to_roll_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(commit_world, "mapped", lambda slot: slot._replace(undo=None))


def forget_to_store_the_decision(patch: pytest.MonkeyPatch) -> None:
    def programs_of(*args: Any) -> dict[int, tuple[Op, ...]]:
        programs = commit_world_programs_of(*args)
        return {
            rank: tuple(op for op in program if op.kind != "decide" or applying)
            for rank, program in programs.items()
            for applying in [any(op.kind == "half" for op in program)]
        }

    commit_world_programs_of = commit_world.programs_of
    patch.setattr(commit_world, "programs_of", programs_of)


def forget_to_take_marks_back(patch: pytest.MonkeyPatch) -> None:
    def train(shape: Shape, world: World, i: int) -> Slot | None:
        slot, after = world.slots[i], commit_world_train(shape, world, i)
        if after is not None and slot.phase == commit_world.START:
            spoilt = [c and c._replace(base=None) for c in slot.copies]
            after = after._replace(copies=tuple(spoilt))
        return after

    commit_world_train = commit_world.train
    patch.setattr(commit_world, "train", train)


def forget_the_origin(patch: pytest.MonkeyPatch) -> None:
    def flip(slot: Slot, section: int) -> Slot:
        after, before = commit_world_flip(slot, section), slot.copies[section]
        assert before is not None
        changed = commit_world.held(after, section)._replace(origin=before.origin)
        return commit_world.put(after, section, changed)

    commit_world_flip = commit_world.flip
    patch.setattr(commit_world, "flip", flip)


def forget_to_take_marks_back_for_a_retry(patch: pytest.MonkeyPatch) -> None:
    def train(shape: Shape, world: World, i: int) -> Slot | None:
        slot, after = world.slots[i], commit_world_train(shape, world, i)
        if after is not None and slot.phase == commit_world.START and slot.attempt:
            after = after._replace(copies=slot.copies)
        return after

    commit_world_train = commit_world.train
    patch.setattr(commit_world, "train", train)


def forget_which_copies_are_whole(patch: pytest.MonkeyPatch) -> None:
    def free_room(slot: Slot, section: int) -> Slot:
        return slot._replace(kept=tuple(k for k in slot.kept if k.section != section))

    patch.setattr(commit_world, "free_room", free_room)


def forget_to_hear_whether_all_have_copies(patch: pytest.MonkeyPatch) -> None:
    def heard_by(world: World, i: int) -> tuple[int, int, tuple[bool, bool]]:
        return (*commit_world_heard_by(world, i)[:2], (True, True))

    commit_world_heard_by = commit_world.heard_by
    patch.setattr(commit_world, "heard_by", heard_by)


def forget_that_weights_are_kept(patch: pytest.MonkeyPatch) -> None:
    def weights(slot: Slot, section: int, version: int) -> Content:
        copy = commit_world.held(slot, section)
        return commit_world_weights(slot, section, max(copy.version, version))

    commit_world_weights = commit_world.weights
    patch.setattr(commit_world, "weights", weights)


def forget_to_wait_for_the_commit(patch: pytest.MonkeyPatch) -> None:
    """What is computed ahead takes back the mark of what is committed."""

    def compute_early(shape: Shape, world: World, i: int) -> World | None:
        after = commit_world.compute(shape, world, i)
        if after is None or not world.slots[i].phase:
            return after
        spoilt = [c and c._replace(mark=None, base=None) for c in after.slots[i].copies]
        slot = after.slots[i]._replace(copies=tuple(spoilt))
        return commit_world.with_slot(after, i, slot)

    patch.setitem(globals(), "compute", compute_early)


def forget_to_get_copies_when_a_generation_begins(patch: pytest.MonkeyPatch) -> None:
    def recover(shape: Shape, world: World, slot: Slot) -> Slot | None:
        after = commit_world_recover(shape, world, slot)
        if after is not None and slot.program[0].kind == "borrow":
            after = after._replace(borrowed=slot.borrowed)
        return after

    commit_world_recover = commit_world.recover
    patch.setattr(commit_world, "recover", recover)


def forget_to_give_copies(patch: pytest.MonkeyPatch) -> None:
    def borrow(shape: Shape, world: World, i: int) -> Slot:
        return commit_world.next_step(world.slots[i])

    patch.setattr(commit_world, "borrow", borrow)


SHARED = Shape(1, 2, sections_per_stage=2, generations=1, slots_per_vm=2)


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("forget", "shape"),
    [
        (forget_to_get_copies_when_a_generation_begins, SHARED),
        (forget_to_give_copies, SHARED),
        (forget_that_weights_are_kept, Shape(2, 1, generations=1, stale=True)),
        (forget_to_wait_for_the_commit, Shape(2, 1, generations=1, stale=True)),
        (forget_which_copies_are_whole, COPIES),
        (forget_to_hear_whether_all_have_copies, COPIES),
        (
            forget_to_take_marks_back_for_a_retry,
            Shape(2, 1, steps=1, generations=2, out_of_range=0),
        ),
        (forget_to_roll_back, Shape(1, 1, faults=0)),
        (forget_to_store_the_decision, Shape(2, 1, spares=1, steps=1)),
        (forget_to_take_marks_back, Shape(2, 2, faults=1, steps=1)),
        (forget_the_origin, Shape(1, 2)),
    ],
)
def test_the_walk_finds_the_hole_that_a_missing_rule_leaves(
    forget: Callable[[pytest.MonkeyPatch], None],
    shape: Shape,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forget(monkeypatch)
    with pytest.raises(AssertionError):
        walk(shape)
