"""A job whose module asks at import whether there is a GPU, as many do."""

from __future__ import annotations

import torch
from tests.gpu.jobs import tiny

from spottrain import TrainingJob

HAS_GPU = torch.cuda.is_available()


def job() -> TrainingJob:
    """Return a job."""
    return tiny()
