"""A job whose module uses the GPU at import."""

from __future__ import annotations

import torch
from tests.gpu.jobs import tiny

from spottrain import TrainingJob

SCALE = torch.ones(1).cuda()


def job() -> TrainingJob:
    """Return a job."""
    return tiny()
