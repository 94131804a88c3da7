"""The tiny job, at a pace that a test sets while it runs."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch
from tiny_job import job as tiny_job
from torch import nn

from spottrain import TrainingJob


def job() -> TrainingJob:
    """The last stage waits as many seconds as the file ``PACE_FILE`` says."""
    tiny = tiny_job()

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        result = tiny.loss(model, batch)
        time.sleep(float(Path(os.environ["PACE_FILE"]).read_text()))
        return result

    return dataclasses.replace(tiny, loss=loss)


def raising_job() -> TrainingJob:
    """Raises in the seventh mini-batch of four micro-batches, in one worker's loss."""
    tiny = tiny_job()
    calls = itertools.count()

    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        if model.training and next(calls) >= 6 * 4:
            raise RuntimeError("no loss in mini-batch 7")
        return tiny.loss(model, batch)

    return dataclasses.replace(tiny, loss=loss)
