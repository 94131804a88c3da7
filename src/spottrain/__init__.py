"""spottrain: train large models on preemptible VMs.

A user's entrypoint returns a ``TrainingJob``; ``CutPoint`` marks cuts by hand in models
without repeated blocks; ``data_path`` leads to the data that the job file names,
``step`` tells which mini-batch is being trained. ``hf``, ``optim`` and ``schedules`` are
losses, parameter groups and learning-rate schedules that many jobs need. Importing this package never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spottrain import hf, optim, schedules
    from spottrain.datasets import data_path
    from spottrain.pipeline.model.job import CutPoint, TrainingJob
    from spottrain.steps import step

__all__ = [
    "CutPoint",
    "TrainingJob",
    "__version__",
    "data_path",
    "hf",
    "optim",
    "schedules",
    "step",
]


def __getattr__(name: str) -> object:
    """Import the torch side only when a user asks for it (PEP 562)."""
    if name in ("CutPoint", "TrainingJob"):
        from spottrain.pipeline.model import job

        return getattr(job, name)
    if name == "data_path":
        from spottrain.datasets import data_path

        return data_path
    if name == "step":
        from spottrain.steps import step

        return step
    if name in ("hf", "optim", "schedules"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
