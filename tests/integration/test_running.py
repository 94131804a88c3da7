"""Buffers that forwards change are committed: the plain loop's values, the same bits anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults import Action
from tests.integration import running_jobs
from tests.integration.fleet import Fleet, Zygote, make_plan
from tests.integration.struck_runs import Blow, job_spec
from tests.integration.struck_runs import train as train_struck

from spottrain.pipeline.base.faults import Hook
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.weights.export import export
from spottrain.storage.open import open_store
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Reduction

SHAPES = ((1, 1), (2, 2))


def spec_of(folder: Path, job: str, reduction: Reduction = "exact", steps: int = 5) -> JobSpec:
    return replace(job_spec(folder, reduction, steps=steps), entrypoint=f"running_jobs:{job}")


def weights(
    zygote: Zygote, folder: Path, spec: JobSpec, shape: tuple[int, int], **changes: Any
) -> dict[str, bytes]:
    with Fleet(spec, "abcd"[: shape[0] * shape[1]], folder / "log", zygote) as fleet:
        fleet.ready()
        plan = make_plan(spec, *shape, "abcd", running_jobs.BLOCKS, **changes)
        return fleet.train(lambda _: plan, fleet.initialise())


def exported(folder: Path, spec: JobSpec) -> dict[str, torch.Tensor]:
    """Return what a new model loads of the newest checkpoint."""
    store = open_store(spec.checkpoint_path)
    job = getattr(running_jobs, spec.entrypoint.partition(":")[2])()
    name = max(path.name for path in Path(spec.checkpoint_path).glob("step-*"))
    written = export(job, store, name, "torch", folder)
    state: dict[str, torch.Tensor] = torch.load(folder / written.files[0], weights_only=True)
    job.model().load_state_dict(state, strict=True)
    return state


def plain_loop(spec: JobSpec) -> dict[str, torch.Tensor]:
    """Train by hand at the same micro-batches; return the state dict."""
    job = getattr(running_jobs, spec.entrypoint.partition(":")[2])()
    source = MicrobatchSource(job, spec.seed, spec.minibatch_size, spec.microbatch_size)
    model = materialise(job, spec.seed).train()
    optimizer = job.optimizer(list(model.named_parameters()))
    for step in range(spec.steps):
        optimizer.zero_grad()
        for node in range(spec.minibatch_size // spec.microbatch_size):
            loss, _ = job.loss(model, source.training(step, node))
            (loss / spec.minibatch_size).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_a_resnet_has_the_statistics_of_the_plain_loop(
    zygote: Zygote, tmp_path: Path, reduction: Reduction
) -> None:
    spec = spec_of(tmp_path, "resnet", reduction)

    weights(zygote, tmp_path, spec, (2, 2))

    expected, got = plain_loop(spec), exported(tmp_path, spec)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("job", ["resnet", "odd"])
def test_buffers_have_the_same_bits_on_every_shape_and_through_a_kill(
    zygote: Zygote, tmp_path: Path, job: str
) -> None:
    spec = spec_of(tmp_path / "1x1", job)
    reference = weights(zygote, tmp_path, spec, (1, 1))

    for name, shape, changes in (
        ("4x1", (4, 1), {}),
        ("uneven", (2, 2), {"replica_bounds": (0, 1, 4)}),
        ("segments", (2, 1), {"segments": 2}),
        ("chunks", (2, 2), {"chunks": 2}),
    ):
        there = spec_of(tmp_path / name, job)
        assert weights(zygote, tmp_path, there, shape, **changes) == reference, name


@pytest.mark.parametrize("job", ["resnet", "odd"])
@pytest.mark.parametrize(
    ("hook", "action"),
    [
        (Hook.UPDATED, Action.KILL_WORKER),
        (Hook.GATHERED, Action.KILL_VM),
        (Hook.BACKWARD, Action.KILL_WORKER),
    ],
)
def test_a_kill_changes_no_bit_of_a_buffer(
    zygote: Zygote, tmp_path: Path, job: str, hook: Hook, action: Action
) -> None:
    spec = spec_of(tmp_path / "1x1", job)
    reference = weights(zygote, tmp_path, spec, (1, 1))
    (tmp_path / "2x2").mkdir()
    blow = Blow(hook, 3, action, 3)
    trained, _ = train_struck(
        zygote, tmp_path / "2x2", 2, 2, [blow], entrypoint=f"running_jobs:{job}"
    )
    assert trained == reference
