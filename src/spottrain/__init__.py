"""spottrain: train large models on preemptible VMs.

A user's entrypoint returns a ``TrainingJob``; ``CutPoint`` marks cuts by hand in models
without repeated blocks, ``Helper`` a frozen model beside the trained one; ``data_path`` leads to the data that the job file names,
``Shards`` reads more of it than a machine can hold, ``step`` tells which mini-batch is
being trained. ``hf`` and ``lightning`` take over what is
written for these, ``optim`` and ``schedules`` are parameter groups and learning-rate schedules
that many jobs need.

``launch`` starts jobs, ``job`` and ``jobs`` find them (docs/python.md). Importing this package
imports neither torch nor the manager; types are in ``__init__.pyi``.
"""

from __future__ import annotations

import importlib
from itertools import chain

__version__ = "0.1.0"

_MODULES = ("hf", "lightning", "optim", "schedules")
_PLACES = {
    "spottrain.cloud.data.shards": ("Shards",),
    "spottrain.datasets": ("data_path",),
    "spottrain.errors": ("SpottrainError",),
    "spottrain.pipeline.model.job": (
        "CallbackInfo",
        "Callbacks",
        "CutPoint",
        "Helper",
        "TrainingJob",
    ),
    "spottrain.steps": ("step",),
    "spottrain.varuna_manager.api.job": ("Job", "JobFailedError", "job", "jobs", "launch"),
}

__all__ = ["__version__", *_MODULES, *chain.from_iterable(_PLACES.values())]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    """Import what a user asks for, and torch only with it (PEP 562)."""
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    for module, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return what this package offers, for completion in shells and notebooks."""
    return __all__
