"""Models of real size whose parameters have no numbers: they take no memory until written to.

For the stand-in that computes nothing (``tests/fakes/timed.py``).
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from tests.fakes.timed import untouched
from tests.gpu.jobs import GPT2_124M, GPT2_1558M, Gpt, Size, make
from torch import nn

from spottrain import TrainingJob

SIZES = {
    "gpt2_124m": GPT2_124M,
    "gpt2_1558m": GPT2_1558M,
    "gpt2_7b": Size(32, 4096, 32),
    "gpt_8b": Size(72, 3072, 24, vocabulary=51200, sequence=2048),
}
"""The last one is Megatron-LM's GPT with 8.3 billion parameters (Shoeybi et al. 2019, table 2)."""


def _blank(size: Size) -> TrainingJob:
    def model() -> nn.Module:
        with torch.device("meta"):
            made = Gpt(dataclasses.replace(size, blocks=1))
        made.blocks.extend(copy.deepcopy(made.blocks[0]) for _ in range(1, size.blocks))
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False):
                memory = untouched(parameter.shape, parameter.dtype)
                setattr(module, name, nn.Parameter(memory))
        return made

    return dataclasses.replace(make(size), model=model)


def _shallow(model: str) -> TrainingJob:
    return _blank(dataclasses.replace(SIZES[model], blocks=4))


def gpt_35m() -> TrainingJob:
    """Return a GPT with 35 million parameters."""
    return _blank(Size(4, 768, 12, vocabulary=8192, sequence=64))


def gpt2_124m() -> TrainingJob:
    """Return GPT-2 with 124 million parameters."""
    return _blank(SIZES["gpt2_124m"])


def gpt2_1558m() -> TrainingJob:
    """Return GPT-2 with 1558 million parameters."""
    return _blank(SIZES["gpt2_1558m"])


def gpt2_7b() -> TrainingJob:
    """Return GPT-2 with 6.6 billion parameters."""
    return _blank(SIZES["gpt2_7b"])


def gpt_8b() -> TrainingJob:
    """Return a GPT with 8.3 billion parameters."""
    return _blank(SIZES["gpt_8b"])


def shallow_gpt2_124m() -> TrainingJob:
    """Return four blocks of ``gpt2_124m``, and so the next ones."""
    return _shallow("gpt2_124m")


def shallow_gpt2_1558m() -> TrainingJob:
    """See above."""
    return _shallow("gpt2_1558m")


def shallow_gpt_8b() -> TrainingJob:
    """See above."""
    return _shallow("gpt_8b")
