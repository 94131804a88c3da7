"""spottrain: train large models on preemptible VMs.

A user's entrypoint returns a ``TrainingJob``; ``CutPoint`` marks cuts by hand in models
without repeated blocks. Importing this package never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from spottrain.pipeline.job import CutPoint, TrainingJob

__all__ = ["CutPoint", "TrainingJob", "__version__"]


def __getattr__(name: str) -> object:
    """Import the torch side only when a user asks for it (PEP 562)."""
    if name in ("CutPoint", "TrainingJob"):
        from spottrain.pipeline import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
