"""spottrain: train large models on preemptible VMs.

A user's entrypoint returns a ``TrainingJob``; ``CutPoint`` marks cuts by hand in models
without repeated blocks; ``data_path`` leads to the data that the job file names,
``step`` tells which mini-batch is being trained. ``hf``, ``optim`` and ``schedules`` are
losses, parameter groups and learning-rate schedules that many jobs need.

``launch`` starts jobs, ``job`` and ``jobs`` find them (docs/python.md). Importing this package
imports neither torch nor the manager; types are in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib

__version__ = "0.1.0"

__all__ = [
    "CutPoint",
    "Job",
    "JobFailedError",
    "SpottrainError",
    "TrainingJob",
    "__version__",
    "data_path",
    "hf",
    "job",
    "jobs",
    "launch",
    "optim",
    "schedules",
    "step",
]

_PLACES = {
    "spottrain.datasets": ("data_path",),
    "spottrain.errors": ("SpottrainError",),
    "spottrain.pipeline.model.job": ("CutPoint", "TrainingJob"),
    "spottrain.steps": ("step",),
    "spottrain.varuna_manager.api.job": ("Job", "JobFailedError", "job", "jobs", "launch"),
}


def __getattr__(name: str) -> object:
    """Import what a user asks for, and torch only with it (PEP 562)."""
    if name in ("hf", "optim", "schedules"):
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what this package offers, for completion in shells and notebooks."""
    return __all__
