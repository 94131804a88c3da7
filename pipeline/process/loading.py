"""Loads the user's job and derives from it all that workers need."""

from __future__ import annotations

from pathlib import Path

from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import section_state_spec
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.tracer import trace
from spottrain.pipeline.process.worker import LoadedJob
from spottrain.pipeline.state.arena import ParameterSpec
from spottrain.wire import JobSpec


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
        specs=[parameter_specs(job, layout, k) for k in range(layout.num_sections)],
    )


def parameter_specs(
    job: TrainingJob, layout: ModelLayout, section: int
) -> tuple[ParameterSpec, ...]:
    """Return what it takes to keep and train the parameters of one section."""
    state = section_state_spec(job, layout, section)
    return tuple(
        ParameterSpec(
            name,
            layout.specs[name].shape,
            layout.specs[name].dtype,
            layout.specs[name].requires_grad,
            state.get(name, {}),
        )
        for name in layout.parameters[section]
    )
