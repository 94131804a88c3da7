"""A rank dies at every named place of a mini-batch and of a morph; no bit changes.

Dropout, clipping, tied weights and recompute are on (see tiny_job). Every case asserts
that its fault struck, and that the weights at the end are those of an undisturbed run.
Workers compute on the CPU or on the stand-in for a GPU, with both homes of state, in every
precision: so that each shape and each hook meets each of these at least once. Under ``--all``
every hook strikes every shape with all of them, and VMs are lost in every shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.faults import Action, environment_of
from tests.integration.fleet import (
    Fleet,
    Zygote,
    make_plan,
    read_weights,
)
from tests.integration.struck_runs import (
    NUM_SECTIONS,
    RUNTIMES,
    STEP_OF,
    STEPS,
    Blow,
    Runtime,
    Undisturbed,
    can_reach,
    job_spec,
    train,
)

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages

SHAPES = ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3))
SERIES = (
    (Hook.JOINED, Hook.AGREED, Hook.MOVED),
    (Hook.FORWARD, Hook.RECOMPUTE, Hook.BACKWARD),
    (Hook.REDUCE, Hook.REDUCED, Hook.PREPARED),
    (Hook.GATHERED, Hook.DECIDED, Hook.UNDO_SAVED),
    (Hook.UPDATED, Hook.FLIPPED, Hook.APPLIED),
    (Hook.REPORTED, Hook.SNAPSHOT, Hook.CHECKPOINT_WRITTEN, Hook.EVALUATED),
)
"""All hooks: a run is struck at each hook of a series, one mini-batch after the other.
Those of a hand-over strike the first three."""


def series_of_blows(hooks: Sequence[Hook], depth: int, last: int) -> list[Blow]:
    """Return the blows of a run; the last rank dies, if it passes the hook."""
    return [
        Blow(
            hook,
            0 if hook is Hook.RECOMPUTE else last,
            Action.KILL_WORKER,
            STEP_OF.get(hook, number),
        )
        for number, hook in enumerate(hooks, 1)
        if can_reach(hook, depth)
    ]


SERIES_ON: tuple[dict[tuple[int, int], int], ...] = (
    {(1, 1): 0, (2, 1): 1, (2, 2): 5, (1, 3): 2},
    {(1, 1): 1, (3, 1): 0, (2, 2): 2, (1, 2): 3},
    {(1, 1): 2, (2, 1): 3, (2, 2): 4, (1, 3): 1},
    {(1, 1): 3, (3, 1): 1, (2, 2): 0, (1, 2): 2},
    {(1, 1): 5, (2, 1): 2, (2, 2): 1, (1, 3): 3},
    {(1, 1): 4, (3, 1): 5, (2, 2): 3, (1, 2): 1},
)
"""For each series, the number of the runtime on each shape: alone, a pipeline, replicas, and
both."""


def is_kept(series: int, shape: tuple[int, int], runtime: Runtime) -> bool:
    """Return whether the gate has a series strike a shape with a runtime."""
    number = SERIES_ON[series].get(shape)
    return number is not None and runtime == RUNTIMES[number]


CASES = [
    pytest.param(
        *shape,
        hooks,
        runtime,
        id=f"{shape[0]}x{shape[1]}-{hooks[0]}-{runtime}",
        marks=() if is_kept(k, shape, runtime) else (pytest.mark.nightly,),
    )
    for k, hooks in enumerate(SERIES)
    for shape, runtime in itertools.product(SHAPES, RUNTIMES)
]


def test_every_hook_is_in_a_series() -> None:
    assert sorted(hook for hooks in SERIES for hook in hooks) == sorted(Hook)


def test_every_series_and_every_shape_meets_all_that_a_runtime_may_be() -> None:
    kinds = {(one.device == "cpu", one.state, one.precision) for one in RUNTIMES}
    wanted = [set(values) for values in zip(*kinds, strict=True)]
    met: dict[object, list[Runtime]] = {}
    for series, runs in enumerate(SERIES_ON):
        for shape, number in runs.items():
            met.setdefault(series, []).append(RUNTIMES[number])
            met.setdefault(shape, []).append(RUNTIMES[number])
    assert met.keys() == {*range(len(SERIES)), *SHAPES}
    for runtimes in met.values():
        kinds = {(one.device == "cpu", one.state, one.precision) for one in runtimes}
        assert [set(values) for values in zip(*kinds, strict=True)] == wanted


@pytest.mark.rotated
@pytest.mark.parametrize(("depth", "width", "hooks", "runtime"), CASES)
def test_workers_killed_at_any_hook_change_no_bit(
    zygote: Zygote,
    undisturbed_in: Undisturbed,
    tmp_path: Path,
    depth: int,
    width: int,
    hooks: Sequence[Hook],
    runtime: Runtime,
) -> None:
    blows = series_of_blows(hooks, depth, depth * width - 1)

    weights, fleet = train(zygote, tmp_path, depth, width, blows, runtime=runtime)

    assert weights == undisturbed_in(runtime.precision)
    if runtime.outlives_workers or width > 1:
        assert fleet.committed_twice() == []


@pytest.mark.rotated
@pytest.mark.parametrize("hooks", SERIES, ids=str)
def test_workers_of_an_interleaved_pipeline_killed_at_hooks_cost_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hooks: Sequence[Hook],
) -> None:
    blows = series_of_blows(hooks, 2, 3)

    weights, fleet = train(zygote, tmp_path, 2, 2, blows, chunks=2)

    assert weights == undisturbed
    assert fleet.committed_twice() == []


@pytest.mark.rotated
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=str)
def test_workers_whose_blocks_recompute_selectively_are_killed_and_train_the_same_bits(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path, shape: tuple[int, int]
) -> None:
    depth, width = shape
    blows = series_of_blows(SERIES[1], depth, depth * width - 1)

    weights, fleet = train(zygote, tmp_path, depth, width, blows, selective=True)

    assert weights == undisturbed
    assert fleet.committed_twice() == []


VM_HOOKS = (
    Hook.BACKWARD,
    Hook.PREPARED,
    Hook.DECIDED,
    Hook.UPDATED,
    Hook.APPLIED,
    Hook.CHECKPOINT_WRITTEN,
    Hook.MOVED,
)


def kept_shapes(number: int) -> Sequence[tuple[int, int]]:
    """Return a shape without and one with a second copy: other ones for each hook."""
    alone = [shape for shape in SHAPES if shape[1] == 1]
    copied = [shape for shape in SHAPES if shape[1] > 1]
    return alone[number % len(alone)], copied[number % len(copied)]


VM_CASES = [
    pytest.param(
        *shape,
        hook,
        id=f"{shape[0]}x{shape[1]}-{hook}",
        marks=() if shape in kept_shapes(number) else (pytest.mark.nightly,),
    )
    for number, hook in enumerate(VM_HOOKS)
    for shape in SHAPES
]


@pytest.mark.rotated
@pytest.mark.parametrize(("depth", "width", "hook"), VM_CASES)
def test_a_vm_lost_at_a_hook_costs_a_checkpoint_only_with_the_last_copy(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    depth: int,
    width: int,
    hook: Hook,
) -> None:
    rank = depth * width - 1

    weights, fleet = train(
        zygote,
        tmp_path,
        depth,
        width,
        [Blow(hook, rank, Action.KILL_VM, STEP_OF.get(hook, 3))],
    )

    assert weights == undisturbed
    if width > 1:
        assert fleet.committed_twice() == []


@pytest.mark.rotated
@pytest.mark.parametrize("hook", [Hook.JOINED, Hook.AGREED, Hook.MOVED])
@pytest.mark.parametrize("first", [Hook.REDUCE, Hook.PREPARED, Hook.DECIDED])
def test_a_second_death_within_the_recovery_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    first: Hook,
    hook: Hook,
) -> None:
    blows = [
        Blow(first, 3, Action.KILL_WORKER, 3),
        Blow(hook, 0, Action.KILL_WORKER, 3),
    ]

    weights, fleet = train(zygote, tmp_path, 2, 2, blows)

    assert weights == undisturbed
    assert fleet.committed_twice() == []


def test_a_death_in_the_first_evaluation_changes_neither_its_loss_nor_the_weights(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    spec = job_spec(tmp_path)
    mark = str(tmp_path / "mark")
    blow = {"hook": "evaluated", "rank": 1, "step": 0, "action": "kill_worker"}
    script = [{**blow, "mark": mark}]
    environment = environment_of(script)
    with Fleet(spec, "ab", tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        checkpoint = fleet.initialise()
        plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
        fleet.run(plan, checkpoint, evaluate=True)
        assert not fleet.wait_for_end({"a", "b"})
        assert not [r for _, r in fleet.history if isinstance(r, messages.Evaluated)]
        fleet.run(make_plan(spec, 1, 2, "ba", NUM_SECTIONS), checkpoint, evaluate=True)
        assert fleet.wait_for_end({"a", "b"})
        # All steps are done: nothing is trained, but measured.
        fleet.run(plan, checkpoint, evaluate=True)
        assert fleet.wait_for_end({"a", "b"})

    losses = [(r.step, r.loss) for _, r in fleet.history if isinstance(r, messages.Evaluated)]
    assert [step for step, _ in losses] == [0, STEPS, STEPS]
    assert losses[0][1] > losses[1][1] == losses[2][1]
    assert read_weights(Path(spec.checkpoint_path)) == undisturbed
