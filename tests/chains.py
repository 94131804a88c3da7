"""Stages of a model one after another in one process, as the workers of a replica."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel, go_backward
from spottrain.wire.model import Precision

Tensors = dict[int, dict[str, torch.Tensor]]
Gradients = dict[tuple[int, str], torch.Tensor | None]
"""By section and parameter."""


def seeds(section: int) -> int:
    return 7_000 + section


def tensors_of(job: TrainingJob, layout: ModelLayout) -> Tensors:
    """Return what is committed of every section."""
    model = materialise(job, seed=1)
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        section: {
            name: values[name].detach().to(layout.specs[name].dtype, copy=True)
            for name in layout.parameters[section]
        }
        for section in range(layout.num_sections)
    }


def batch_of(job: TrainingJob, examples: int) -> Any:
    """Return a micro-batch of the first examples."""
    return job.collate([job.dataset[i] for i in range(examples)])


def run_chain(
    job: TrainingJob,
    layout: ModelLayout,
    bounds: list[int],
    batch: Any,
    tensors: Tensors,
    precision: Precision = "fp32",
) -> tuple[torch.Tensor, float, Gradients]:
    """Train one micro-batch; return its loss, its weight and all gradients.

    Args:
        job: The job.
        layout: Of its model.
        bounds: Sections at which stages begin, and the number of sections.
        batch: The micro-batch.
        tensors: Parameters of every section.
        precision: Of autocast.
    """
    stages = [
        StageModel(job, layout, range(a, b), tensors, precision=precision)
        for a, b in pairwise(bounds)
    ]
    for stage in stages:
        stage.train()
    received: list[list[torch.Tensor]] = [[]]
    sent: list[list[torch.Tensor]] = []
    for stage, following in pairwise(stages):
        out = stage.forward(batch, received[-1], seeds)
        assert isinstance(out, list)
        sent.append(out)
        received.append([tensor.detach().clone() for tensor in out])
        following.require_gradients(received[-1])
    result = stages[-1].forward(batch, received[-1], seeds)
    assert isinstance(result, tuple)
    result[0].backward()  # type: ignore[no-untyped-call]
    for outputs, came in zip(reversed(sent), reversed(received), strict=False):
        go_backward(outputs, [one.grad for one in came])
    gradients = {
        (section, name): parameter.grad
        for stage in stages
        for section in stage.sections
        for name, parameter in stage.parameters_of(section)
    }
    return result[0].detach(), float(result[1]), gradients


def same_bits(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
