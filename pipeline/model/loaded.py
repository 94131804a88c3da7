"""The user's job, loaded and traced: everything a worker derives from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch

from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import section_state_spec
from spottrain.pipeline.model.sections import ModelLayout, TensorSpec
from spottrain.pipeline.model.state import Forms
from spottrain.pipeline.model.tracer import trace
from spottrain.wire.messages import JobSpec


class ParameterSpec(NamedTuple):
    """One parameter of one section, and what training it takes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    state: Mapping[str, TensorSpec]
    group_bytes: int = 0
    """Of tensors in its parameter group; zero but for one parameter of each group."""
    forms: Forms = MappingProxyType({})
    """How ``state`` is nested."""


@dataclass(frozen=True, slots=True)
class LoadedJob:
    """The user's job and all that is derived from it."""

    spec: JobSpec
    job: TrainingJob
    layout: ModelLayout
    fingerprint: str
    """Of the model, as in ``ModelFacts``."""
    specs: Sequence[tuple[ParameterSpec, ...]]
    """Of every section."""


def load(spec: JobSpec, workdir: Path) -> LoadedJob:
    """Import the user's module, build the job, trace the model.

    Raises:
        UserCodeError: Any of it failed.
    """
    job = load_job(spec.entrypoint, workdir)
    layout = trace(job)
    return LoadedJob(
        spec=spec,
        job=job,
        layout=layout,
        fingerprint=model_facts(job, layout).fingerprint,
        specs=[_parameter_specs(job, layout, k) for k in range(layout.num_sections)],
    )


def _parameter_specs(
    job: TrainingJob, layout: ModelLayout, section: int
) -> tuple[ParameterSpec, ...]:
    """Return what it takes to keep and train the parameters of one section."""
    kept = section_state_spec(job, layout, section)
    return tuple(
        ParameterSpec(
            name,
            layout.specs[name].shape,
            layout.specs[name].dtype,
            layout.specs[name].requires_grad,
            kept.state.get(name, {}),
            kept.group_bytes.get(name, 0),
            kept.forms.get(name, {}),
        )
        for name in layout.parameters[section]
    )
