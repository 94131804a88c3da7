"""Buffers that forwards change: the plain loop's values, and the same bits on any machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults import Action, environment_of
from tests.integration import family_jobs, running_jobs
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import RUNTIMES, Blow, Runtime, job_spec, train

from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.weights.export import export
from spottrain.storage.open import open_store
from spottrain.wire import messages
from spottrain.wire.model import Reduction

KILL = Blow(Hook.UPDATED, 3, Action.KILL_WORKER, 3)


def entrypoint(job: str) -> str:
    return f"running_jobs:{job}"


def on(
    zygote: Zygote, folder: Path, job: str, depth: int, width: int, **changes: Any
) -> dict[str, bytes]:
    """Train on a plan of some shape, undisturbed; return all that is committed."""
    folder.mkdir()
    spec = job_spec(folder, entrypoint=entrypoint(job))
    with Fleet(spec, "abcd"[: depth * width], folder / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, depth, width, "abcd", running_jobs.BLOCKS, **changes)
        return fleet.train(lambda _: plan, fleet.initialise())


def struck(
    zygote: Zygote, folder: Path, job: str, blow: Blow = KILL, **how: Any
) -> tuple[dict[str, bytes], Fleet]:
    """Train at 2x2 with a fault."""
    folder.mkdir()
    return train(zygote, folder, 2, 2, [blow], entrypoint=entrypoint(job), **how)


def exported(folder: Path, job: str) -> torch.nn.Module:
    """Return a new model that has loaded what the newest checkpoint is exported as."""
    made = getattr(running_jobs, job)()
    newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
    written = export(made, open_store(folder / "checkpoints"), newest, "torch", folder)
    model: torch.nn.Module = made.model()
    state = torch.load(folder / written.files[0], weights_only=True)
    model.load_state_dict(state, strict=True)
    return model


def plain_loop(folder: Path) -> torch.nn.Module:
    """Train the ResNet by hand at the same micro-batches."""
    job, spec = running_jobs.resnet(), job_spec(folder)
    source = MicrobatchSource(job, spec.seed, spec.minibatch_size, spec.microbatch_size)
    model = materialise(job, spec.seed).train()
    optimizer = job.optimizer(list(model.named_parameters()))
    for step in range(spec.steps):
        optimizer.zero_grad()
        for node in range(spec.minibatch_size // spec.microbatch_size):
            loss, _ = job.loss(model, source.training(step, range(node, node + 1)))  # type: ignore[misc]
            (loss / spec.minibatch_size).backward()
        optimizer.step()
    return model


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("reduction", ["exact", pytest.param("fast", marks=pytest.mark.rotated)])
def test_a_resnet_has_the_statistics_of_the_plain_loop_through_a_kill(
    zygote: Zygote, tmp_path: Path, reduction: Reduction
) -> None:
    folder = tmp_path / "2x2"
    _, fleet = struck(zygote, folder, "resnet", reduction=reduction)

    model, expected = exported(folder, "resnet"), plain_loop(folder).state_dict()
    assert model.state_dict().keys() == expected.keys()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=2e-6, atol=2e-6, msg=name)
    # Evaluations use the committed statistics, as the exported model does.
    heldout = running_jobs.Pictures(running_jobs.HELDOUT)
    with torch.no_grad():
        examples = running_jobs.collate([heldout[k] for k in range(len(heldout))])
        loss, weight = running_jobs.loss(model.eval(), examples)
    found = [r.loss for _, r in fleet.history if isinstance(r, messages.Evaluated)]
    assert found[-1] == pytest.approx(float(loss) / weight, rel=1e-5)


@pytest.mark.rotated
@pytest.mark.parametrize("job", ["resnet", "odd"])
def test_changing_buffers_have_the_same_bits_on_every_shape(
    zygote: Zygote, tmp_path: Path, job: str
) -> None:
    reference = on(zygote, tmp_path / "1x1", job, 1, 1)

    assert on(zygote, tmp_path / "4x1", job, 4, 1) == reference
    assert on(zygote, tmp_path / "uneven", job, 2, 2, replica_bounds=(0, 1, 4)) == reference
    assert on(zygote, tmp_path / "chunks", job, 2, 2, chunks=2) == reference
    assert on(zygote, tmp_path / "segments", job, 2, 1, segments=2) == reference


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("hook", "action"),
    [
        (Hook.BACKWARD, Action.KILL_WORKER),
        (Hook.UPDATED, Action.KILL_WORKER),
        (Hook.GATHERED, Action.KILL_VM),
    ],
)
def test_a_fault_changes_no_bit_of_a_buffer(
    zygote: Zygote, tmp_path: Path, hook: Hook, action: Action
) -> None:
    reference = on(zygote, tmp_path / "1x1", "odd", 1, 1)

    assert struck(zygote, tmp_path / "2x2", "odd", Blow(hook, 3, action, 3))[0] == reference


@pytest.mark.rotated
@pytest.mark.parametrize("runtime", RUNTIMES[1:], ids=str)
def test_changing_buffers_have_the_same_bits_in_every_runtime(
    zygote: Zygote, tmp_path: Path, runtime: Runtime
) -> None:
    (tmp_path / "1x1").mkdir()
    plain = Runtime(precision=runtime.precision)
    where = tmp_path / "1x1"
    reference, _ = train(zygote, where, 1, 1, runtime=plain, entrypoint=entrypoint("odd"))

    assert struck(zygote, tmp_path / "2x2", "odd", runtime=runtime)[0] == reference


@pytest.mark.nightly
def test_a_resnet_50_has_the_same_bits_after_50_minibatches_with_a_kill(
    zygote: Zygote, tmp_path: Path
) -> None:
    trained = []
    mark = tmp_path / "mark"
    blow = {
        "hook": Hook.UPDATED,
        "rank": 3,
        "action": Action.KILL_WORKER,
        "step": 20,
        "mark": str(mark),
    }
    for depth, width in ((1, 1), (2, 2)):
        folder = tmp_path / f"{depth}x{width}"
        folder.mkdir()
        family = family_jobs.entrypoint("ResNet-50 by hand, BatchNorm")
        spec = job_spec(folder, steps=50, entrypoint=family)
        plan = make_plan(spec, depth, width, "abcd", num_sections=16)
        machines = "abcd"[: depth * width]
        with Fleet(spec, machines, folder / "log", zygote, environment_of([blow])) as fleet:
            fleet.ready()
            trained.append(fleet.train(lambda _, plan=plan: plan, fleet.initialise()))  # type: ignore[misc]

    assert mark.exists(), "no worker was killed"
    assert sum("running_var" in name for name in trained[0]) == 53
    assert trained[0] == trained[1]
