"""The user's job, loaded and traced: everything a worker derives from it.

What inspect has derived travels with the user's code (``LAYOUT_FILE``). A supervisor in
the same environment takes it from there: it need not run any operation before it forks.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import pickle
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist

from spottrain.errors import UserCodeError
from spottrain.manifest import DatasetLength
from spottrain.pipeline.model.data import dataset_lengths
from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.optimizer import optimizer_class, section_state_spec
from spottrain.pipeline.model.sections import Attached, ModelLayout, TensorSpec
from spottrain.pipeline.model.state import Forms, OptimizerSpec
from spottrain.pipeline.model.tracer import trace
from spottrain.version import software_version
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import LAYOUT_FILE
from spottrain.wire.plan import Semantics

logger = logging.getLogger(__name__)


class Derived(NamedTuple):
    """What dry runs of a job's code have found out."""

    layout: ModelLayout
    states: tuple[OptimizerSpec, ...]
    """Of every section."""
    fingerprint: str
    """Of the model, as in ``ModelFacts``: a hash of what a checkpoint or a profile of the
    job depends on. That is: sections, names, shapes and types of parameters, the
    optimizer's class and state, the shapes of a batch; not the values of anything."""


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
    versions: int = 1
    """Of its value that are committed: 2 where gradients are stale by one mini-batch, the
    present one and the one before."""
    attached: Attached = Attached()
    running: bool = False
    """True of a buffer that forwards change, which no optimizer sees."""


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
    datasets: tuple[DatasetLength, ...] = ()
    """As they were when the job was loaded."""


def load(spec: JobSpec, workdir: Path) -> LoadedJob:
    """Import the user's module and build the job; trace the model if none has, like here.

    Raises:
        UserCodeError: Any of it failed.
    """
    job = load_job(spec.entrypoint, workdir)
    derived = _kept(workdir / LAYOUT_FILE, spec.entrypoint) or derive(job, trace(job))
    if dist.is_initialized():  # by the loss: its threads would not be there in forks
        dist.destroy_process_group()
    layout = derived.layout
    return LoadedJob(
        spec=spec,
        job=job,
        layout=layout,
        fingerprint=derived.fingerprint,
        specs=[
            parameter_specs(layout, names, kept, spec.semantics)
            for names, kept in zip(layout.parameters, derived.states, strict=True)
        ],
        datasets=dataset_lengths(job),
    )


def derive(job: TrainingJob, layout: ModelLayout) -> Derived:
    """Return what is derived from a traced job.

    Raises:
        UserCodeError: The optimizer raised.
    """
    states = tuple(section_state_spec(job, layout, k) for k in range(layout.num_sections))
    return Derived(layout, states, _fingerprint(layout, optimizer_class(job, layout), states))


def _fingerprint(layout: ModelLayout, optimizer: str, states: Sequence[OptimizerSpec]) -> str:
    facts = {
        "sections": layout.parameters,
        "parameters": {name: _plain(spec) for name, spec in layout.specs.items()},
        "cuts": [
            [one.name, one.shape_of_1, str(one.dtype)]
            for cut in layout.cuts
            for one in cut.crossing
        ],
        "optimizer": optimizer,
        "states": [
            {
                name: {key: _plain(spec) for key, spec in keys.items()}
                for name, keys in kept.state.items()
            }
            for kept in states
        ],
        "batch": [_plain(spec) for spec in layout.batch],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _plain(spec: TensorSpec) -> list[object]:
    return [list(spec.shape), str(spec.dtype), spec.requires_grad]


def parameter_specs(
    layout: ModelLayout,
    names: Sequence[str],
    kept: OptimizerSpec,
    semantics: Semantics,
) -> tuple[ParameterSpec, ...]:
    """Return what it takes to keep and train the parameters of one section.

    Raises:
        UserCodeError: Its forward changes a buffer, and gradients are to be stale.
    """
    stale = semantics == "stale_by_one"
    for name in names if stale else ():
        if layout.specs[name].running is not None:
            raise UserCodeError(
                f"model must not change buffers in forward with semantics stale_by_one: got {name}; "
                "use semantics synchronous, or e.g. GroupNorm in place of BatchNorm"
            )
    return tuple(
        ParameterSpec(
            name,
            layout.specs[name].shape,
            layout.specs[name].dtype,
            layout.specs[name].requires_grad,
            kept.state.get(name, {}),
            kept.group_bytes.get(name, 0),
            kept.forms.get(name, {}),
            2 if stale and layout.specs[name].requires_grad else 1,
            layout.specs[name].attached,
            layout.specs[name].running is not None,
        )
        for name in names
    )


# --- What is kept --------------------------------------------------------------------


def keep(path: Path, entrypoint: str, derived: Derived, imported: Collection[str]) -> None:
    """Write what was derived where ``load`` finds it, if it can be written.

    Args:
        path: Of the file.
        entrypoint: That the job was loaded from.
        derived: What was found out.
        imported: The modules that were imported before the job was traced. Those that
            the dry runs have imported are imported in their place.
    """
    late = [name for name in sys.modules if name not in imported]
    # Weights of helper models are the dry runs' concern only, and large.
    kept = derived._replace(layout=replace(derived.layout, helpers=()))
    try:
        data = pickle.dumps(kept)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        logger.info("the layout is not kept, VMs trace the model: %s", error)
        return
    head = {"made_by": _environment(entrypoint), "imports": late}
    path.write_bytes(json.dumps(head).encode() + b"\n" + data)


def _kept(path: Path, entrypoint: str) -> Derived | None:
    """Return what was derived elsewhere from the same code in the same environment."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    found = json.loads(head)
    if found["made_by"] != _environment(entrypoint):
        return None
    for name in found["imports"]:
        with contextlib.suppress(ImportError):  # made by code, such as torch.ops
            importlib.import_module(name)
    # It comes with the user's code, from the same hands, and is trusted as that is.
    with warnings.catch_warnings():  # of torch, about its own pytree.LeafSpec
        warnings.simplefilter("ignore", FutureWarning)
        derived: Derived = pickle.loads(data)
    return derived


def _environment(entrypoint: str) -> list[str]:
    """Return what the answers of dry runs depend on besides code and data."""
    folders = (Path(entry) for entry in sys.path if Path(entry).is_dir())
    packages = {found.name for one in folders for found in one.glob("*.dist-info")}
    return [entrypoint, software_version(), sys.version, *sorted(packages)]
