"""A rank dies at every named place of a mini-batch and of a morph; no bit changes.

Dropout, clipping, tied weights and recompute are on (see tiny_job). Every case asserts
that its fault struck, and that the weights at the end are those of an undisturbed run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.fleet import Fleet, Zygote, make_plan, read_weights

from spottrain.pipeline.base.faults import ENVIRONMENT_VARIABLE, Action, Hook
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Plan, Reduction

NUM_SECTIONS = 4
STEPS = 6
SHAPES = ((1, 1), (2, 1), (1, 2), (3, 1), (2, 2), (1, 3))
NAMES = "abcd"

STEP_OF = {
    Hook.JOINED: 0,
    Hook.AGREED: 0,
    Hook.MOVED: 0,
    Hook.SNAPSHOT: 2,
    Hook.CHECKPOINT_WRITTEN: 2,
}
"""Mini-batches applied when the fault strikes, where it is not 3."""


@dataclass(frozen=True)
class Blow:
    hook: Hook
    rank: int
    action: Action
    step: int


def job_spec(
    folder: Path, reduction: Reduction = "exact", steps: int = STEPS
) -> JobSpec:
    return JobSpec(
        name="tiny",
        entrypoint="tiny_job:job",
        seed=1,
        steps=steps,
        minibatch_size=8,
        microbatch_size=2,
        reduction=reduction,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=2,
        checkpoint_keep=3,
        lease_s=100.0,
        heartbeat_s=1.0,
    )


def train(
    zygote: Zygote,
    folder: Path,
    depth: int,
    width: int,
    blows: Sequence[Blow] = (),
    chunks: int = 1,
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end on the given shape, on a smaller one after a VM is lost."""
    spec = job_spec(folder)
    script = [
        {
            "hook": blow.hook,
            "rank": blow.rank,
            "action": blow.action,
            "step": blow.step,
            "mark": str(folder / f"mark-{number}"),
        }
        for number, blow in enumerate(blows)
    ]

    def choose(machines: Sequence[str]) -> Plan:
        if len(machines) < depth * width:
            return make_plan(spec, 1, 1, machines, NUM_SECTIONS)
        return make_plan(spec, depth, width, machines, NUM_SECTIONS, chunks=chunks)

    # One machine more than the plan takes, so that losing one leaves somebody.
    names = NAMES[: depth * width + (1 if depth * width == 1 else 0)]
    environment = {ENVIRONMENT_VARIABLE: json.dumps(script)}
    with Fleet(spec, names, folder / "log", zygote, environment) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())
    for number, blow in enumerate(blows):
        assert (folder / f"mark-{number}").exists(), f"{blow} did not strike"
    return weights, fleet


@pytest.fixture(scope="module")
def undisturbed(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    return train(zygote, tmp_path_factory.mktemp("undisturbed"), 1, 1)[0]


def can_reach(hook: Hook, depth: int) -> bool:
    return hook is not Hook.RECOMPUTE or depth > 1


CASES = [
    pytest.param(depth, width, hook, id=f"{depth}x{width}-{hook}")
    for depth, width in SHAPES
    for hook in Hook
    if can_reach(hook, depth)
]


@pytest.mark.parametrize(("depth", "width", "hook"), CASES)
def test_a_worker_killed_at_any_hook_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    depth: int,
    width: int,
    hook: Hook,
) -> None:
    last = depth * width - 1
    rank = 0 if hook is Hook.RECOMPUTE else last
    step = STEP_OF.get(hook, 3)

    weights, fleet = train(
        zygote, tmp_path, depth, width, [Blow(hook, rank, Action.KILL_WORKER, step)]
    )

    assert weights == undisturbed
    assert fleet.committed_twice() == []


@pytest.mark.parametrize(
    "hook",
    [
        Hook.MOVED,
        Hook.FORWARD,
        Hook.RECOMPUTE,
        Hook.BACKWARD,
        Hook.REDUCE,
        Hook.PREPARED,
        Hook.DECIDED,
        Hook.UPDATED,
        Hook.APPLIED,
        Hook.CHECKPOINT_WRITTEN,
    ],
)
def test_a_worker_of_an_interleaved_pipeline_killed_at_a_hook_costs_nothing(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path, hook: Hook
) -> None:
    blow = Blow(hook, 3, Action.KILL_WORKER, STEP_OF.get(hook, 3))

    weights, fleet = train(zygote, tmp_path, 2, 2, [blow], chunks=2)

    assert weights == undisturbed
    assert fleet.committed_twice() == []


VM_CASES = [
    pytest.param(depth, width, hook, id=f"{depth}x{width}-{hook}")
    for depth, width in SHAPES
    for hook in (
        Hook.BACKWARD,
        Hook.PREPARED,
        Hook.DECIDED,
        Hook.UPDATED,
        Hook.APPLIED,
        Hook.CHECKPOINT_WRITTEN,
        Hook.MOVED,
    )
]


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
    script = json.dumps([{**blow, "mark": mark}])
    environment = {ENVIRONMENT_VARIABLE: script}
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

    losses = [
        (r.step, r.loss) for _, r in fleet.history if isinstance(r, messages.Evaluated)
    ]
    assert [step for step, _ in losses] == [0, STEPS, STEPS]
    assert losses[0][1] > losses[1][1] == losses[2][1]
    assert read_weights(Path(spec.checkpoint_path)) == undisturbed


@pytest.mark.parametrize(
    "hook",
    [
        Hook.FORWARD,
        Hook.REDUCED,
        Hook.GATHERED,
        Hook.UNDO_SAVED,
        Hook.UPDATED,
        Hook.FLIPPED,
        Hook.CHECKPOINT_WRITTEN,
    ],
)
def test_an_error_leaves_every_process_alive_and_costs_nothing(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path, hook: Hook
) -> None:
    weights, fleet = train(zygote, tmp_path, 2, 2, [Blow(hook, 1, Action.RAISE, 3)])

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())
