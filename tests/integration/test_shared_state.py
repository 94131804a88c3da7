"""Ranks in one VM that share the state of their stage train to the bits of one rank alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.builders import a_plan
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, Host, Zygote
from tests.integration.struck_runs import (
    NUM_SECTIONS,
    RUNTIMES,
    STEP_OF,
    Blow,
    Runtime,
    Undisturbed,
    can_reach,
    job_spec,
)
from tests.integration.test_hooks import SERIES, VM_HOOKS

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Reduction
from spottrain.wire.plan import Plan, Slot

SIZES = (5, 3, 2, 1)
"""Of sections: those of two ranks in one VM are not every other one."""


def plan_on(
    spec: JobSpec,
    vms: str,
    depth: int,
    runtime: Runtime = RUNTIMES[0],
    *,
    chunks: int = 1,
    shares: bool = True,
) -> Plan:
    """Return a plan whose ranks are in these VMs, of which each has as many slots as that takes."""
    seen: Counter[str] = Counter()
    slots = []
    for vm in vms:
        slots.append(Slot(vm_id=vm, index=seen[vm]))
        seen[vm] += 1
    return a_plan(
        depth,
        len(vms) // depth,
        num_sections=NUM_SECTIONS,
        virtual_nodes=spec.minibatch_size // spec.microbatch_size,
        microbatch_size=spec.microbatch_size,
        slots=tuple(slots),
        step_s=0.1,
        state=runtime.state,
        segments=runtime.segments,
        chunks=chunks,
        shared_state=SIZES if shares else (),
    )


def train(
    zygote: Zygote,
    folder: Path,
    vms: str,
    depth: int = 1,
    blows: Sequence[Blow] = (),
    runtime: Runtime = RUNTIMES[0],
    reduction: Reduction = "exact",
    entrypoint: str = "tiny_job:job",
    *,
    chunks: int = 1,
    shares: bool = True,
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end; after a VM is lost, on what is left, in one stage."""
    spec = job_spec(
        folder,
        reduction,
        precision=runtime.precision,
        network=runtime.network,
        entrypoint=entrypoint,
    )
    marks = [folder / f"mark-{number}" for number in range(len(blows))]
    script = [
        {
            "hook": one.hook,
            "rank": one.rank,
            "action": one.action,
            "step": one.step,
            "mark": str(mark),
        }
        for one, mark in zip(blows, marks, strict=True)
    ]
    # One VM more than the plan takes, so that losing one leaves somebody.
    hosts = {vm: Host(num_slots=count, device=runtime.device) for vm, count in Counter(vms).items()}
    hosts |= {"z": Host(num_slots=2, device=runtime.device)} if len(hosts) == 1 else {}

    def choose(left: Sequence[str]) -> Plan:
        if {*vms} <= {*left}:
            return plan_on(spec, vms, depth, runtime, chunks=chunks, shares=shares)
        rest = "".join(vm for vm in left for _ in range(hosts[vm].num_slots))
        return plan_on(spec, rest, 1, runtime)

    names = tuple(hosts)
    with Fleet(spec, names, folder / "log", zygote, environment_of(script), hosts=hosts) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())
    for mark, blow in zip(marks, blows, strict=True):
        assert mark.exists(), f"{blow} did not strike"
    return weights, fleet


def test_two_replicas_that_share_a_vm_and_its_state_train_to_the_bits_of_one_alone(
    zygote: Zygote, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    weights, fleet = train(zygote, tmp_path, "aa")

    assert weights == undisturbed
    held = [
        (r.slot, r.sections) for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)
    ]
    assert {*held} == {(0, (0, 3)), (1, (1, 2))}


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("vms", "depth"),
    [("aaaa", 2), ("aabb", 1), ("aab", 1), ("abab", 2), ("abaaab", 2), ("a" * 8, 4)],
)
def test_replicas_of_any_shape_that_share_state_train_to_the_bits_of_one_alone(
    zygote: Zygote, tmp_path: Path, undisturbed: dict[str, bytes], vms: str, depth: int
) -> None:
    assert train(zygote, tmp_path, vms, depth)[0] == undisturbed


KILLS = [
    pytest.param(
        vms,
        depth,
        hooks,
        runtime,
        id=f"{vms}-{depth}-{hooks[0]}-{runtime}",
        marks=() if k == number and k % 2 == shape else pytest.mark.nightly,
    )
    for k, hooks in enumerate(SERIES)
    for shape, (vms, depth) in enumerate([("aa", 1), ("aaaa", 2)])
    for number, runtime in enumerate(RUNTIMES)
]
"""All series on both shapes in every runtime: each series and runtime once before nightly."""


@pytest.mark.rotated
@pytest.mark.parametrize(("vms", "depth", "hooks", "runtime"), KILLS)
def test_workers_that_share_state_killed_at_any_hook_change_no_bit(
    zygote: Zygote,
    undisturbed_in: Undisturbed,
    tmp_path: Path,
    vms: str,
    depth: int,
    hooks: Sequence[Hook],
    runtime: Runtime,
) -> None:
    last = len(vms) - 1
    blows = [
        Blow(hook, 0 if hook is Hook.RECOMPUTE else last, Action.KILL_WORKER, STEP_OF.get(hook, k))
        for k, hook in enumerate(hooks, 1)
        if can_reach(hook, depth)
    ]

    weights, fleet = train(zygote, tmp_path, vms, depth, blows, runtime)

    assert weights == undisturbed_in(runtime.precision)
    if runtime.outlives_workers:
        assert fleet.committed_twice() == []


LOSSES = [
    pytest.param(
        vms,
        depth,
        hook,
        id=f"{vms}-{depth}-{hook}",
        marks=() if number % 3 == shape else pytest.mark.nightly,
    )
    for number, hook in enumerate(VM_HOOKS)
    for shape, (vms, depth) in enumerate([("aa", 1), ("aabb", 1), ("aabb", 2)])
]


@pytest.mark.rotated
@pytest.mark.parametrize(("vms", "depth", "hook"), LOSSES)
def test_a_vm_that_shares_state_lost_at_a_hook_costs_a_checkpoint_only_with_the_last_copy(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    vms: str,
    depth: int,
    hook: Hook,
) -> None:
    blow = Blow(hook, len(vms) - 1, Action.KILL_VM, STEP_OF.get(hook, 3))

    weights, fleet = train(zygote, tmp_path, vms, depth, [blow])

    assert weights == undisturbed
    plan = plan_on(job_spec(tmp_path), vms, depth)
    if plan.copies > 1:
        assert fleet.committed_twice() == []


@pytest.mark.rotated
def test_stages_of_several_runs_share_their_state(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    blow = Blow(Hook.FLIPPED, 2, Action.KILL_WORKER, 2)
    assert train(zygote, tmp_path, "aaaa", 2, [blow], chunks=2)[0] == undisturbed


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("entrypoint", "runtime"),
    [
        ("running_jobs:odd", RUNTIMES[0]),
        ("running_jobs:odd", RUNTIMES[5]),
        ("odd_jobs:frozen_job", RUNTIMES[0]),
        ("odd_jobs:frozen_job", RUNTIMES[5]),
        ("odd_jobs:bfloat16_job", RUNTIMES[0]),
    ],
    ids=str,
)
def test_other_models_that_share_state_train_to_the_same_bits(
    zygote: Zygote, tmp_path: Path, entrypoint: str, runtime: Runtime
) -> None:
    whole, shared = tmp_path / "whole", tmp_path / "shared"
    for folder in (whole, shared):
        folder.mkdir()
    expected, _ = train(zygote, whole, "aa", runtime=runtime, entrypoint=entrypoint, shares=False)
    blow = Blow(Hook.FLIPPED, 1, Action.KILL_WORKER, 2)
    weights, _ = train(zygote, shared, "aa", 1, [blow], runtime, entrypoint=entrypoint)
    assert weights == expected


@pytest.mark.rotated
@pytest.mark.parametrize("vms", ["aa", "aabb"])
def test_in_fast_mode_shared_state_trains_to_the_same_within_round_off(
    zygote: Zygote, tmp_path: Path, vms: str
) -> None:
    runs = []
    for shares in (False, True):
        folder = tmp_path / str(shares)
        folder.mkdir()
        runs.append(train(zygote, folder, vms, reduction="fast", shares=shares)[0])
    whole, shared = runs
    for name in (name for name in whole if "//" not in name):
        a, b = (torch.frombuffer(bytearray(w[name]), dtype=torch.float32) for w in (whole, shared))
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


@pytest.mark.rotated
@pytest.mark.parametrize("first", [True, False])
def test_state_is_shared_from_a_morph_on_or_until_one(
    zygote: Zygote, undisturbed: dict[str, bytes], tmp_path: Path, first: bool
) -> None:
    spec = job_spec(tmp_path)
    hosts = {"a": Host(num_slots=2)}
    with Fleet(spec, ["a"], tmp_path / "log", zygote, hosts=hosts) as fleet:
        fleet.ready()
        fleet.run(plan_on(spec, "aa", 1, shares=first), fleet.initialise())
        fleet.wait_for_step(2)
        fleet.stop()
        fleet.wait_for_end({"a"})
        weights = fleet.train(lambda _: plan_on(spec, "aa", 1, shares=not first), "")
    assert weights == undisturbed
    started = [r for _, r in fleet.history if isinstance(r, messages.GenerationStarted)]
    assert sum(r.sections_loaded for r in started if r.generation > 1) == 0
