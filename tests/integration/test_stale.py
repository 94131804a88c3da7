"""Gradients that are stale by one mini-batch, in the runtime (PipeDream-2BW)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.builders import slots_of
from tests.faults import environment_of
from tests.integration import stale_jobs
from tests.integration.fleet import Fleet, Host, Zygote, make_plan, read_weights
from tests.integration.struck_runs import job_spec
from tests.integration.test_shares import SharingFleet

from spottrain.pipeline.base import fixed_point
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import use_fused_kernels
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.tracer import trace
from spottrain.wire import messages
from spottrain.wire.messages import EvaluationSpec, JobSpec, TraceMinibatches
from spottrain.wire.model import Network, Reduction
from spottrain.wire.plan import Plan

# The recurrence is computed here.
pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, SECTIONS = 9, {"quadratic_job": 2, "gpt_job": 3}
SHAPES = [(1, 1), (2, 1), (1, 2), (2, 2)]


def stale_spec(folder: Path, job: str = "gpt_job", reduction: Reduction = "exact") -> JobSpec:
    return replace(
        job_spec(folder, reduction, steps=STEPS),
        entrypoint=f"stale_jobs:{job}",
        semantics="stale_by_one",
        checkpoint_every_steps=4,
        evaluation=EvaluationSpec(every_steps=6),
    )


@cache
def recurrence(job: str) -> dict[str, bytes]:
    """Train the whole model as the recurrence says: each step's gradient is that at the
    weights before. Sums of virtual nodes are of integers, as in exact mode."""
    spec = stale_spec(Path("/nowhere"), job)
    made: TrainingJob = getattr(stale_jobs, job)()
    model, sections = materialise(made, spec.seed), trace(made).parameters
    named = list(model.named_parameters())
    optimizer = made.optimizer(named)
    use_fused_kernels(optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [p.detach().clone() for _, p in named]
    exponents: list[list[int | None]] = [[None] * len(named)]
    for step in range(spec.steps):
        now = [p.detach().clone() for _, p in named]
        set_all(named, before)
        used = exponents[max(0, step - 1)]
        weight, following = sum_gradients(made, spec, model, step, used, exponents[-1])
        exponents.append(following)
        set_all(named, now)
        scale = 1.0 / weight
        if made.clip_grad_norm is not None:
            mean = norm(model, sections) / weight
            scale *= min(1.0, made.clip_grad_norm / (mean + 1e-6))
        for _, p in named:
            assert p.grad is not None
            p.grad.mul_(scale)
        factor = 1.0 if made.lr_schedule is None else made.lr_schedule(step)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        optimizer.step()
        before = now
    return {name: bytes_of(p.detach()) for name, p in named}


def sum_gradients(
    job: TrainingJob,
    spec: JobSpec,
    model: torch.nn.Module,
    step: int,
    based_on: Sequence[int | None],
    committed: Sequence[int | None],
) -> tuple[float, list[int | None]]:
    """Leave the sums of all virtual nodes' gradients; return their weight, and the
    exponents that they lead to."""
    sizes = spec.minibatch_size, spec.microbatch_size
    source, count = MicrobatchSource(job, spec.seed, *sizes), sizes[0] // sizes[1]
    parameters = list(model.parameters())
    used = [fixed_point.exponent(e, 0, count, torch.float32) for e in based_on]
    sums = [torch.zeros(p.numel(), dtype=torch.int64) for p in parameters]
    peaks, weight = torch.zeros(len(parameters), dtype=torch.float64), 0.0
    for node in range(count):
        model.zero_grad()
        total, number = job.loss(model, source.training(step, range(node, node + 1)))[:2]
        torch.autograd.backward(total)
        weight += float(number)
        for k, p in enumerate(parameters):
            assert p.grad is not None
            fixed_point.add_quantised(sums[k], p.grad, used[k])
            peaks[k] = max(peaks[k], fixed_point.peak(p.grad))
    found = fixed_point.magnitudes(peaks).tolist()
    for k, p in enumerate(parameters):
        assert fixed_point.in_range(found[k], used[k], count)
        assert p.grad is not None
        fixed_point.dequantise(sums[k], used[k], p.grad)
    pairs = zip(committed, found, strict=True)
    return weight, [fixed_point.next_exponent(e, m, count) for e, m in pairs]


def norm(model: torch.nn.Module, sections: Sequence[Sequence[str]]) -> float:
    """Return the norm of all gradients; rounded as sums of sections are."""
    whole = 0.0
    for names in sections:
        square = 0.0
        for name in names:
            gradient = model.get_parameter(name).grad
            assert gradient is not None
            square += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
        whole += square
    return float(whole**0.5)


def set_all(
    named: Sequence[tuple[str, torch.nn.Parameter]], values: Sequence[torch.Tensor]
) -> None:
    with torch.no_grad():
        for (_, parameter), value in zip(named, values, strict=True):
            parameter.copy_(value)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def parameters_of(found: Mapping[str, bytes]) -> dict[str, bytes]:
    named = {name.partition("/")[2]: data for name, data in found.items()}
    return {name: data for name, data in named.items() if "//" not in name}


def train(
    zygote: Zygote,
    spec: JobSpec,
    sections: int,
    shape: tuple[int, int],
    environment: Mapping[str, str] | None = None,
    device: str = "cpu",
    **changes: Any,
) -> tuple[dict[str, bytes], Fleet]:
    """Train to the end, on one machine once a VM is lost."""
    names, folder = "abcd"[: shape[0] * shape[1]], Path(spec.checkpoint_path).parent
    folder.mkdir(exist_ok=True)
    log, hosts = folder / "log", dict.fromkeys(names, Host(device=device))

    def choose(machines: Sequence[str]) -> Plan:
        now = shape if len(machines) == len(names) else (1, 1)
        return make_plan(spec, *now, machines, sections, **changes)

    with Fleet(spec, names, log, zygote, environment, hosts=hosts) as fleet:
        fleet.ready()
        return fleet.train(choose, fleet.initialise()), fleet


@pytest.mark.rotated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("job", SECTIONS)
def test_every_shape_trains_as_the_recurrence_says_bit_for_bit(
    zygote: Zygote, tmp_path: Path, job: str, shape: tuple[int, int]
) -> None:
    spec = stale_spec(tmp_path, job)

    weights, _ = train(zygote, spec, SECTIONS[job], shape)

    assert parameters_of(weights) == recurrence(job)


BLOWS = [
    ((2, 2), ["forward", "reduce", "prepared", "decided", "updated", "applied"]),
    ((2, 1), ["backward", "reduced", "gathered", "undo_saved", "flipped", "reported"]),
]


@pytest.mark.rotated
@pytest.mark.parametrize(("shape", "hooks"), BLOWS, ids=["2x2", "2x1"])
def test_deaths_anywhere_change_no_bit_and_lose_no_committed_mini_batch(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int], hooks: list[str]
) -> None:
    script = [
        {"hook": hook, "step": 1 + step, "rank": step % 2, "action": "kill_worker"}
        for step, hook in enumerate(hooks)
    ]
    for number, blow in enumerate(script):
        blow["mark"] = str(tmp_path / f"mark-{number}")
    environment = environment_of(script)

    weights, fleet = train(zygote, stale_spec(tmp_path), 3, shape, environment)

    assert all(Path(str(blow["mark"])).exists() for blow in script)
    assert parameters_of(weights) == recurrence("gpt_job")
    assert fleet.committed_twice() == []


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("shape", "changes"), [((2, 2), {}), ((2, 1), {"peer_copies": 1})], ids=str
)
def test_a_lost_vm_changes_no_bit(
    zygote: Zygote, tmp_path: Path, shape: tuple[int, int], changes: dict[str, Any]
) -> None:
    """Replicas go on from what is committed; one alone from copies on another VM."""
    size = shape[0] * shape[1]
    blow = {"hook": "backward", "step": 4, "rank": size - 1, "action": "kill_vm"}
    blow["mark"] = str(tmp_path / "mark")
    environment = environment_of([blow])
    spec = replace(stale_spec(tmp_path), checkpoint_every_steps=100)

    weights, fleet = train(zygote, spec, 3, shape, environment, **changes)

    assert len(fleet.machines) == size - 1
    assert parameters_of(weights) == recurrence("gpt_job")
    started = [r for _, r in fleet.history if isinstance(r, messages.GenerationStarted)]
    assert {r.sections_loaded for r in started if r.generation > 1} == {0}
    if not changes:
        assert fleet.committed_twice() == []


@pytest.mark.rotated
def test_another_share_and_a_timeline_are_waited_for_by_the_pipeline(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec, pace = stale_spec(tmp_path), {"STALE_SLEEP_S": "0.1"}
    bounds = {"replica_bounds": (0, 2, 4)}
    with SharingFleet(spec, "abcd", tmp_path / "log", zygote, pace) as fleet:
        fleet.shares = [(0, 1, 4), (0, 3, 4)]
        fleet.ready()
        plan = make_plan(spec, 2, 2, "abcd", 3, **bounds)
        fleet.run(plan, fleet.initialise())
        asked = TraceMinibatches(generation=1, number=1, minibatches=1, content="timeline")
        for machine in fleet.machines.values():
            machine.send(asked)
        for trace in fleet.wait_for_traces(4):
            Path(trace.path).unlink()
        assert fleet.wait_for_end(set("abcd"))
        weights = read_weights(Path(spec.checkpoint_path))
        counts = {
            r.microbatches
            for name, r in fleet.history
            if name == "a" and isinstance(r, messages.MinibatchCommitted)
        }

    assert 3 in counts
    assert parameters_of(weights) == recurrence("gpt_job")


@pytest.mark.rotated
def test_morphs_and_a_resume_from_a_checkpoint_change_no_bit(
    zygote: Zygote, tmp_path: Path
) -> None:
    spec, pace = stale_spec(tmp_path), {"STALE_SLEEP_S": "0.1"}
    with Fleet(spec, "abcd", tmp_path / "log", zygote, pace) as fleet:
        fleet.ready()
        checkpoint, known = fleet.initialise(), set[str]()
        for number, shape in enumerate([(2, 2), (3, 1)]):
            plan = make_plan(spec, *shape, "abcd", 3)
            planned = {slot.vm_id for slot in plan.slots}
            donors = slots_of(sorted(known - planned))
            fleet.run(plan, checkpoint, donors)
            known |= planned
            fleet.wait_for_step(number + 1)
            fleet.stop(checkpoint=number == 1)
            assert not fleet.wait_for_end(planned | {d.vm_id for d in donors})
        checkpoint = fleet.newest_checkpoint()
        started = [r for _, r in fleet.history if isinstance(r, messages.GenerationStarted)]
    assert [r.sections_loaded for r in started if r.generation > 1] == [0] * 3
    with Fleet(spec, "ef", tmp_path / "log", zygote) as fleet:
        fleet.ready()
        weights = fleet.train(lambda _: make_plan(spec, 2, 1, "ef", 3), checkpoint)

    assert parameters_of(weights) == recurrence("gpt_job")


@pytest.mark.rotated
def test_gradients_out_of_range_are_computed_again_to_the_same_bits(
    zygote: Zygote, tmp_path: Path
) -> None:
    """With tied parameters and dropout, beside the mini-batch that is dropped."""
    found = []
    for one in ((1, 1), (2, 1), (2, 2)):
        spec = stale_spec(tmp_path / str(one))
        spec = replace(spec, entrypoint="tiny_job:jumping_job", evaluation=EvaluationSpec())
        found.append(train(zygote, spec, 4, one)[0])

    assert found[0] == found[1] == found[2]


@pytest.mark.rotated
def test_fast_mode_differs_by_rounding_only(zygote: Zygote, tmp_path: Path) -> None:
    losses = []
    reductions: tuple[Reduction, ...] = ("fast", "exact")
    for reduction in reductions:
        spec = stale_spec(tmp_path / reduction, reduction=reduction)
        _, fleet = train(zygote, spec, 3, (2, 2))
        losses.append(
            {
                r.step: r.loss
                for _, r in fleet.history
                if isinstance(r, messages.MinibatchCommitted) and r.loss
            }
        )

    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.rotated
@pytest.mark.parametrize(("state", "network"), [("host", "gloo"), ("device", "nccl")])
def test_devices_whose_transfers_are_late_change_no_bit(
    zygote: Zygote, tmp_path: Path, state: str, network: Network
) -> None:
    spec = replace(stale_spec(tmp_path), network=network)

    weights, _ = train(zygote, spec, 3, (2, 2), device="tests.fakes.deferred:3", state=state)

    assert parameters_of(weights) == recurrence("gpt_job")


def test_pipelines_do_not_drain_between_mini_batches(zygote: Zygote, tmp_path: Path) -> None:
    """The first stage begins with the next mini-batch before it ends one."""
    spec = replace(stale_spec(tmp_path, "noted_job"), evaluation=EvaluationSpec(), steps=12)
    names, notes = "abc", tmp_path / "notes"
    environment = {"STALE_SLEEP_S": "0.02", "STALE_NOTES": str(notes)}
    notes.touch()
    plan = make_plan(spec, 3, 1, names, 3, recompute=False, schedule="1f1b")
    with Fleet(spec, names, tmp_path / "log", zygote, environment) as fleet:
        fleet.ready()
        fleet.run(plan, fleet.initialise())
        assert fleet.wait_for_end(set(names))

    lines = [line.split() for line in notes.read_text().splitlines()]
    lines = [line for line in lines if line[2] != "None"]  # of the evaluation
    first = {pid for pid, what, _ in lines if what == "backward"}
    begun, ahead = 0, set()
    for pid, what, step in lines:
        if pid in first and what == "forward":
            begun = int(step)
        elif pid in first and int(step) < begun:
            assert int(step) == begun - 1
            ahead.add(begun)
    assert len(first) == 1
    assert ahead
