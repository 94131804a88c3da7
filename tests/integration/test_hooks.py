"""A rank dies at every named place of a mini-batch and of a morph; no bit changes.

Dropout, clipping, tied weights and recompute are on (see tiny_job). Every case asserts
that its fault struck, and that the weights at the end are those of an undisturbed run.
Workers compute on the CPU or on the stand-in for a GPU, with both homes of state, in every
precision: so that each shape and each hook meets each of these at least once. With
``SPOTTRAIN_EVERY_RUNTIME=1`` every case runs with all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from tests.integration.fleet import (
    Fleet,
    FleetError,
    Host,
    Zygote,
    make_plan,
    read_weights,
)

from spottrain.pipeline.base.faults import ENVIRONMENT_VARIABLE, Action, Hook
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import (
    Network,
    Plan,
    Precision,
    Reduction,
    StateHome,
    WireType,
)

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
class Runtime:
    """What workers compute on, and how."""

    device: str = "cpu"
    state: StateHome = "host"
    precision: Precision = "fp32"
    network: Network = "auto"
    """Without gloo, stand-ins sum on their device."""

    def __str__(self) -> str:
        name = f"{self.device.partition(':')[0]}-{self.state}-{self.precision}"
        return name if self.network == "auto" else f"{name}-{self.network}"

    @property
    def outlives_workers(self) -> bool:
        return self.device == "cpu" or self.state == "host"


RUNTIMES = (
    Runtime(),
    Runtime("deferred:3", "host", "bf16", "nccl"),
    Runtime("deferred:9", "device", "fp32", "gloo"),
    Runtime("cpu", "host", "fp16"),
    Runtime("deferred:1", "host", "fp32", "gloo"),
    Runtime("deferred:2", "device", "fp16", "nccl"),
)


@dataclass(frozen=True)
class Blow:
    hook: Hook
    rank: int
    action: Action
    step: int


def job_spec(
    folder: Path,
    reduction: Reduction = "exact",
    steps: int = STEPS,
    precision: Precision = "fp32",
    entrypoint: str = "tiny_job:job",
    network: Network = "auto",
) -> JobSpec:
    return JobSpec(
        name="tiny",
        entrypoint=entrypoint,
        precision=precision,
        network=network,
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
    runtime: Runtime = RUNTIMES[0],
    entrypoint: str = "tiny_job:job",
    reduction: Reduction = "exact",
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end on the given shape, on a smaller one after a VM is lost."""
    spec = job_spec(
        folder,
        reduction,
        precision=runtime.precision,
        entrypoint=entrypoint,
        network=runtime.network,
    )
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
        home = {"state": runtime.state}
        if len(machines) < depth * width:
            return make_plan(spec, 1, 1, machines, NUM_SECTIONS, **home)
        return make_plan(
            spec, depth, width, machines, NUM_SECTIONS, chunks=chunks, **home
        )

    # One machine more than the plan takes, so that losing one leaves somebody.
    names = NAMES[: depth * width + (1 if depth * width == 1 else 0)]
    environment = {ENVIRONMENT_VARIABLE: json.dumps(script)}
    hosts = {name: Host(device=runtime.device) for name in names}
    with Fleet(spec, names, folder / "log", zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        weights = fleet.train(choose, fleet.initialise())
    for number, blow in enumerate(blows):
        assert (folder / f"mark-{number}").exists(), f"{blow} did not strike"
    return weights, fleet


Undisturbed = Callable[[Precision], dict[str, bytes]]


@pytest.fixture(scope="module")
def undisturbed_in(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """Return the weights of an undisturbed run on one CPU, in a precision."""

    @cache
    def weights(precision: Precision) -> dict[str, bytes]:
        folder = tmp_path_factory.mktemp(f"undisturbed-{precision}")
        runtime = Runtime(precision=precision)
        return train(zygote, folder, 1, 1, runtime=runtime)[0]

    return weights


@pytest.fixture(scope="module")
def undisturbed(undisturbed_in: Undisturbed) -> dict[str, bytes]:
    return undisturbed_in("fp32")


def can_reach(hook: Hook, depth: int) -> bool:
    return hook is not Hook.RECOMPUTE or depth > 1


def runtimes(shape: int, hook: int) -> Sequence[Runtime]:
    """Return the runtimes of a case; those of a shape, or of a hook, are all."""
    if os.environ.get("SPOTTRAIN_EVERY_RUNTIME"):
        return RUNTIMES
    return (RUNTIMES[(shape + hook) % len(RUNTIMES)],)


CASES = [
    pytest.param(*shape, hook, runtime, id=f"{shape[0]}x{shape[1]}-{hook}-{runtime}")
    for n, shape in enumerate(SHAPES)
    for k, hook in enumerate(Hook)
    if can_reach(hook, shape[0])
    for runtime in runtimes(n, k)
]


@pytest.mark.parametrize(("depth", "width", "hook", "runtime"), CASES)
def test_a_worker_killed_at_any_hook_changes_no_bit(
    zygote: Zygote,
    undisturbed_in: Undisturbed,
    tmp_path: Path,
    depth: int,
    width: int,
    hook: Hook,
    runtime: Runtime,
) -> None:
    last = depth * width - 1
    rank = 0 if hook is Hook.RECOMPUTE else last
    step = STEP_OF.get(hook, 3)

    blow = Blow(hook, rank, Action.KILL_WORKER, step)

    weights, fleet = train(zygote, tmp_path, depth, width, [blow], runtime=runtime)

    assert weights == undisturbed_in(runtime.precision)
    if runtime.outlives_workers or width > 1:
        assert fleet.committed_twice() == []


@pytest.mark.parametrize("shape", [(1, 1), (1, 2)], ids=["1x1", "1x2"])
@pytest.mark.parametrize(
    "hook",
    [
        Hook.MOVED,
        Hook.BACKWARD,
        Hook.REDUCED,
        Hook.PREPARED,
        Hook.GATHERED,
        Hook.DECIDED,
        Hook.UNDO_SAVED,
        Hook.UPDATED,
        Hook.FLIPPED,
        Hook.APPLIED,
    ],
)
def test_a_worker_that_ends_itself_brings_the_state_of_its_device_to_safety(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    shape: tuple[int, int],
) -> None:
    """Every worker does, so that there is no other copy."""
    width = shape[0] * shape[1]
    step = STEP_OF.get(hook, 3)
    blows = [Blow(hook, rank, Action.END_ITSELF, step) for rank in range(width)]

    weights, fleet = train(
        zygote, tmp_path, *shape, blows, runtime=Runtime("deferred:3", "device")
    )

    assert weights == undisturbed
    assert fleet.committed_twice() == []
    deaths = [r for _, r in fleet.history if isinstance(r, messages.WorkerDied)]
    assert len(deaths) == width
    assert all("its state is in the VM's memory" in death.reason for death in deaths)


@pytest.mark.parametrize(
    ("hook", "peers", "ranks", "state", "outcome"),
    [
        # The first stage is the last to come to its reductions.
        (Hook.REDUCE, Hook.REDUCE, (1, 0), "host", "its state is in the VM's memory"),
        (Hook.GATHERED, Hook.REPORTED, (0, 3), "device", "in the VM's memory"),
        (
            Hook.UPDATED,
            Hook.REPORTED,
            (0, 3),
            "device",
            "its copy of the state is lost",
        ),
    ],
)
def test_a_worker_that_hangs_when_a_peer_is_gone_ends_itself_in_time(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    peers: Hook,
    ranks: tuple[int, int],
    state: StateHome,
    outcome: str,
) -> None:
    """In the middle of an update nothing can be copied: the replica has the state."""
    hangs, raises = ranks
    blows = [Blow(hook, hangs, Action.HANG, 3), Blow(peers, raises, Action.RAISE, 3)]

    weights, fleet = train(
        zygote, tmp_path, 2, 2, blows, runtime=Runtime("deferred:3", state)
    )

    assert weights == undisturbed
    assert fleet.committed_twice() == []
    (death,) = [r for _, r in fleet.history if isinstance(r, messages.WorkerDied)]
    assert "a communicator could not be left in 2.5 s" in death.reason
    assert outcome in death.reason


def test_a_library_that_cannot_sum_here_is_refused_in_a_line(
    zygote: Zygote, tmp_path: Path
) -> None:
    runtime = Runtime(network="nccl")

    with pytest.raises(
        FleetError, match="nccl is impossible: rank 0 computes on a CPU"
    ):
        train(zygote, tmp_path, 1, 2, runtime=runtime)


@pytest.mark.parametrize("device", ["deferred:3", "cpu"])
@pytest.mark.parametrize("hook", [Hook.REDUCE, Hook.GATHERED])
def test_an_error_aborts_groups_on_devices_and_no_worker_ends(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    device: str,
) -> None:
    runtime = Runtime(device, "host")

    weights, fleet = train(
        zygote, tmp_path, 1, 3, [Blow(hook, 1, Action.RAISE, 3)], runtime=runtime
    )

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())


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


@pytest.mark.parametrize(
    ("hook", "during"),
    [
        (Hook.FORWARD, "forward"),
        (Hook.RECOMPUTE, "recompute"),
        (Hook.BACKWARD, "backward"),
        (Hook.UNDO_SAVED, "update"),
    ],
)
def test_a_device_without_memory_left_is_reported_and_costs_nothing(
    zygote: Zygote,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    hook: Hook,
    during: messages.MemoryUse,
) -> None:
    weights, fleet = train(
        zygote, tmp_path, 2, 1, [Blow(hook, 0, Action.OUT_OF_MEMORY, 3)]
    )

    assert weights == undisturbed
    assert all(len(pids) == 1 for pids in fleet.pids().values())
    (found,) = [r for _, r in fleet.history if isinstance(r, messages.OutOfMemory)]
    assert (found.during, found.microbatch_size) == (during, 2)
    assert found.requested_bytes == 1.5 * 2**30
    assert found.section in (0, 1)


@pytest.mark.parametrize("runtime", RUNTIMES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=["1x1", "2x2"])
def test_gradients_that_leave_their_range_are_computed_again_to_the_same_bits(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int], runtime: Runtime
) -> None:
    """One example in nine weighs a billion times as much as the others."""
    (alone := tmp_path / "alone").mkdir()
    (together := tmp_path / "together").mkdir()
    plain = Runtime(precision=runtime.precision)
    expected, _ = train(
        zygote, alone, 1, 1, runtime=plain, entrypoint="tiny_job:jumping_job"
    )
    rank = shape[0] * shape[1] - 1
    blows = [Blow(Hook.GATHERED, rank, Action.KILL_WORKER, 2)]

    weights, _ = train(
        zygote,
        together,
        *shape,
        blows,
        runtime=runtime,
        entrypoint="tiny_job:jumping_job",
    )

    assert weights == expected


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_tensors_that_travel_in_fewer_bits_change_weights_by_rounding_only(
    zygote: Zygote, tmp_path: Path, wire: WireType
) -> None:
    losses = []
    wires: tuple[WireType, ...] = ("own", wire)
    for one in wires:
        (folder := tmp_path / one).mkdir()
        spec = replace(job_spec(folder, "fast"), wire=one)
        with Fleet(spec, "ab", folder / "log", zygote) as fleet:
            fleet.ready()
            plan = make_plan(spec, 2, 1, "ab", NUM_SECTIONS)
            fleet.train(lambda _, plan=plan: plan, fleet.initialise())  # type: ignore[misc]
            found = {
                r.step: r.loss
                for _, r in fleet.history
                if isinstance(r, messages.MinibatchCommitted) and r.loss
            }
        losses.append([loss for _, loss in sorted(found.items())])

    assert len(losses[0]) == STEPS
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_fast_mode_has_the_same_bits_on_every_device(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int], precision: Precision
) -> None:
    """Two replicas at most: the sum of two gradients has no order."""
    found = []
    for runtime in (
        Runtime("cpu", "host", precision),
        Runtime("deferred:3", "host", precision),
        Runtime("deferred:3", "device", precision),
    ):
        (folder := tmp_path / str(runtime)).mkdir()
        weights, _ = train(zygote, folder, *shape, runtime=runtime, reduction="fast")
        found.append(weights)

    assert found[0] == found[1] == found[2]
