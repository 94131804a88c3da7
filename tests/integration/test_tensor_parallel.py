"""Ranks that divide the matrices of a stage: what one rank alone would train."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import a_plan
from tests.faults import Action, environment_of
from tests.integration.fleet import Fleet, FleetError, Host, Zygote, read_weights
from tests.integration.struck_runs import RUNTIMES, Runtime, job_spec
from tests.integration.test_hooks import SERIES, series_of_blows

from spottrain.pipeline.base.faults import Hook
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Network, Reduction, StateHome
from spottrain.wire.plan import Plan, Slot

STEPS = 5
SHAPES = [(p, d, t) for p in (1, 2) for d in (1, 2) for t in (1, 2)]
"""Pipeline depth, width, and ranks that divide matrices."""
SECTIONS = {"gpt": 2, "dropped": 2, "uneven": 2, "qwen3": 2, "without_norms": 2}


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    heldout: float
    weights: dict[str, bytes]

    def assert_close(self, other: Trained) -> None:
        """Equal within round-off."""
        assert self.losses == pytest.approx(other.losses, rel=1e-5)
        assert self.norms == pytest.approx(other.norms, rel=1e-4)
        assert self.heldout == pytest.approx(other.heldout, rel=1e-5)
        assert self.weights.keys() == other.weights.keys()
        for name, own in self.weights.items():
            if "//" not in name:
                a, b = (
                    torch.frombuffer(bytearray(w), dtype=torch.float32)
                    for w in (own, other.weights[name])
                )
                torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def tensor_spec(folder: Path, name: str, reduction: Reduction = "fast") -> JobSpec:
    return job_spec(folder, reduction, STEPS, entrypoint=f"tensor_jobs:{name}")


def shape_plan(
    spec: JobSpec, shape: tuple[int, int, int], sections: int, *, together: bool = False
) -> Plan:
    """A VM for each stage of each replica; or one for each stage, of all replicas."""
    depth, width, size = shape
    slots = tuple(
        Slot(vm_id=f"{stage}0", index=replica * size + index)
        if together
        else Slot(vm_id=f"{stage}{replica}", index=index)
        for replica in range(width)
        for index in range(size)
        for stage in range(depth)
    )
    return a_plan(
        depth,
        width,
        num_sections=sections,
        virtual_nodes=spec.minibatch_size // spec.microbatch_size,
        microbatch_size=spec.microbatch_size,
        slots=slots,
        tensor_parallel=size,
    )


def train(
    zygote: Zygote,
    folder: Path,
    name: str,
    shape: tuple[int, int, int],
    reduction: Reduction = "fast",
    environment: Mapping[str, str] | None = None,
    runtime: Runtime = RUNTIMES[0],
    *,
    sequence: bool = False,
    selective: bool = False,
    sizes: tuple[int, ...] = (),
    together: bool = False,
) -> Trained:
    """Train to the end.

    Args:
        sizes: Of sections, by which ranks share them; by default all are equal.
        together: Whether replicas are in the same VMs.
    """
    folder.mkdir(exist_ok=True)
    precision, network = runtime.precision, runtime.network
    spec = replace(
        tensor_spec(folder, name, reduction),
        precision=precision,
        network=network,
        sequence_parallel=sequence,
        selective_recompute=selective,
    )
    changes: dict[str, Any] = {
        "state": runtime.state,
        "segments": runtime.segments,
        "shared_state": sizes or ((1,) * SECTIONS[name] if shape[2] > 1 else ()),
    }
    plan = replace(shape_plan(spec, shape, SECTIONS[name], together=together), **changes)
    slots = Counter(slot.vm_id for slot in plan.slots)
    names = tuple(slots)
    hosts = {vm: Host(num_slots=slots[vm], device=runtime.device) for vm in names}
    with Fleet(spec, names, folder / "log", zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        smaller = replace(shape_plan(spec, (1, 1, shape[2]), SECTIONS[name]), **changes)
        weights = fleet.train(
            lambda left: plan if len(left) == len(names) else smaller, fleet.initialise()
        )
    return outcome_of(fleet, weights)


def outcome_of(fleet: Fleet, weights: dict[str, bytes]) -> Trained:
    committed = {r.step: r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)}
    evaluated, *again = (r.loss for _, r in fleet.history if isinstance(r, messages.Evaluated))
    assert again in ([], [evaluated])  # a rank that dies once it has reported repeats it
    in_order = [committed[step] for step in sorted(committed)]
    return Trained([r.loss for r in in_order], [r.grad_norm for r in in_order], evaluated, weights)


@pytest.fixture(scope="module")
def alone(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(zygote, tmp_path_factory.mktemp("alone"), "gpt", (1, 1, 1))


def test_ranks_of_two_stages_that_divide_their_matrices_train_what_one_rank_does(
    zygote: Zygote, tmp_path: Path, alone: Trained
) -> None:
    train(zygote, tmp_path, "gpt", (2, 1, 2)).assert_close(alone)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", [*SHAPES[1:], (1, 1, 4)], ids=str)
def test_ranks_of_any_shape_train_what_one_rank_does(
    zygote: Zygote, tmp_path: Path, alone: Trained, shape: tuple[int, int, int]
) -> None:
    train(zygote, tmp_path, "gpt", shape).assert_close(alone)


@pytest.mark.rotated
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 1, 2), (2, 1, 2)])
def test_a_transformers_model_is_divided_by_its_own_plan(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int, int]
) -> None:
    alone = train(zygote, tmp_path / "alone", "qwen3", (1, 1, 1))
    train(zygote, tmp_path / "divided", "qwen3", shape).assert_close(alone)


@pytest.mark.rotated
def test_the_same_ranks_train_to_the_same_bits_through_any_other_shape_and_a_kill(
    zygote: Zygote, tmp_path: Path
) -> None:
    undisturbed = train(zygote, tmp_path / "undisturbed", "gpt", (1, 1, 2), "exact")
    blows = [((2, 1, 2), 1, Action.KILL_WORKER), ((1, 2, 2), 3, Action.KILL_VM)]
    for shape, rank, action in blows:
        folder = tmp_path / action
        blow = {"hook": Hook.UPDATED, "rank": rank, "step": 2, "action": action}
        script = [blow | {"mark": str(folder / "mark")}]
        struck = train(zygote, folder, "gpt", shape, "exact", environment_of(script))
        assert (folder / "mark").exists()
        assert struck.weights == undisturbed.weights


@pytest.fixture(scope="module")
def divided(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("divided")
    return train(zygote, folder, "gpt", (1, 1, 2), "exact")


@pytest.mark.rotated
@pytest.mark.parametrize("hooks", SERIES, ids=lambda hooks: hooks[0])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[2] == 2], ids=str)
def test_a_rank_of_a_group_killed_at_any_hook_changes_no_bit(
    zygote: Zygote,
    tmp_path: Path,
    divided: Trained,
    shape: tuple[int, int, int],
    hooks: Sequence[Hook],
) -> None:
    plan = shape_plan(tensor_spec(tmp_path, "gpt", "exact"), shape, SECTIONS["gpt"])
    # Who holds nothing passes no hook of an update.
    blows = series_of_blows(hooks, shape[0], max(plan.holders_of(plan.num_sections - 1)))
    script = [
        {**asdict(blow), "mark": str(tmp_path / f"mark-{number}")}
        for number, blow in enumerate(blows)
    ]
    struck = train(zygote, tmp_path, "gpt", shape, "exact", environment_of(script))
    assert struck.weights == divided.weights
    for number, blow in enumerate(blows):
        assert (tmp_path / f"mark-{number}").exists(), f"{blow} did not strike"


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "rank", "hook", "action", "runtime"),
    [
        ((1, 1, 2), 0, Hook.FLIPPED, Action.KILL_WORKER, RUNTIMES[0]),
        ((2, 1, 2), 0, Hook.FLIPPED, Action.KILL_WORKER, RUNTIMES[0]),
        ((1, 2, 2), 3, Hook.FLIPPED, Action.KILL_VM, RUNTIMES[0]),
        ((1, 1, 2), 1, Hook.FLIPPED, Action.KILL_WORKER, RUNTIMES[2]),
        # It holds nothing.
        ((2, 1, 2), 3, Hook.APPLIED, Action.KILL_WORKER, RUNTIMES[0]),
    ],
    ids=str,
)
def test_ranks_that_divide_matrices_train_to_the_same_bits_through_a_kill_on_any_device(
    zygote: Zygote,
    tmp_path: Path,
    shape: tuple[int, int, int],
    rank: int,
    hook: Hook,
    action: Action,
    runtime: Runtime,
) -> None:
    folder = tmp_path / "undisturbed"
    undisturbed = train(zygote, folder, "gpt", (1, 1, 2), "exact", runtime=runtime, sizes=(1, 2))
    blow = {"hook": hook, "rank": rank, "step": 2, "action": action}
    environment = environment_of([blow | {"mark": str(tmp_path / "mark")}])
    folder = tmp_path / "shared"
    shared = train(zygote, folder, "gpt", shape, "exact", environment, runtime)
    assert (tmp_path / "mark").exists()
    assert shared.weights == undisturbed.weights


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "sizes"), [((1, 1, 2), (1, 2)), ((1, 2, 2), (1, 1)), ((1, 2, 2), (1, 2))], ids=str
)
def test_who_in_a_vm_holds_a_section_changes_no_bit(
    zygote: Zygote,
    tmp_path: Path,
    divided: Trained,
    shape: tuple[int, int, int],
    sizes: tuple[int, ...],
) -> None:
    other = train(zygote, tmp_path, "gpt", shape, "exact", sizes=sizes, together=True)
    assert other.weights == divided.weights


@pytest.mark.rotated
@pytest.mark.parametrize("runtime", RUNTIMES[1:4:2], ids=str)
def test_ranks_that_divide_round_as_one_alone_in_16_bits(
    zygote: Zygote, tmp_path: Path, runtime: Runtime
) -> None:
    alone, divided = (
        train(
            zygote,
            tmp_path / str(size),
            "gpt",
            (1, 1, size),
            "exact",
            runtime=runtime,
        )
        for size in (1, 2)
    )
    assert divided.losses == pytest.approx(alone.losses, rel=2e-3)


@pytest.mark.rotated
def test_a_plan_that_leaves_out_what_gets_a_part_is_refused(zygote: Zygote, tmp_path: Path) -> None:
    with pytest.raises(FleetError, match=r"self_attn\.[qk]_norm.*replicated_with_grad_allreduce"):
        train(zygote, tmp_path, "without_norms", (1, 1, 2))


@pytest.mark.rotated
@pytest.mark.parametrize("network", ["nccl", "gloo"])
@pytest.mark.parametrize("state", ["device", "host"])
def test_ranks_on_gpus_sum_there_or_in_their_vms_memory(
    zygote: Zygote, tmp_path: Path, alone: Trained, network: Network, state: StateHome
) -> None:
    runtime = Runtime("tests.fakes.deferred:3", state, network=network)
    train(zygote, tmp_path, "gpt", (2, 2, 2), runtime=runtime).assert_close(alone)


def _commits(generation: int, _: str, report: object) -> bool | None:
    if isinstance(report, messages.MinibatchCommitted) and report.generation == generation:
        return True
    return None


@pytest.mark.rotated
@pytest.mark.parametrize("turn", range(4))
def test_what_one_shape_has_trained_any_other_goes_on_with(
    zygote: Zygote, tmp_path: Path, alone: Trained, turn: int
) -> None:
    shapes = [*SHAPES[2 * turn :], *SHAPES[: 2 * turn]]
    walk = [shapes[0], shapes[7], shapes[2], shapes[5], shapes[3]][:STEPS]
    spec = tensor_spec(tmp_path, "gpt")
    names = tuple(f"{stage}{replica}" for stage in range(2) for replica in range(2))
    hosts = {name: Host(num_slots=2) for name in names}
    with Fleet(spec, names, tmp_path / "log", zygote, hosts=hosts) as fleet:
        fleet.ready()
        checkpoint, held = fleet.initialise(), tuple[Slot, ...]()
        plans = [shape_plan(spec, shape, SECTIONS["gpt"]) for shape in walk]
        for plan in plans:
            donors = [slot for slot in held if slot not in plan.slots]
            fleet.run(plan, checkpoint, donors)
            if plan is not plans[-1]:
                fleet.stop()  # once a mini-batch is over
                # A slot of a VM may be a donor, which ends before the other has trained.
                fleet.wait_for("a commit", partial(_commits, fleet.generation))
            fleet.wait_for_end({slot.vm_id for slot in (*plan.slots, *donors)})
            checkpoint, held = "", plan.slots
    committed = [r for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)]
    assert len({r.generation for r in committed}) == len(walk)
    outcome_of(fleet, read_weights(Path(spec.checkpoint_path))).assert_close(alone)
