"""The tiny job over examples drawn at random, made by whoever the tests watch."""

from __future__ import annotations

import dataclasses
import importlib
import os
import random
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from spottrain import TrainingJob

if TYPE_CHECKING:
    from tests.integration import tiny_job
else:
    tiny_job = importlib.import_module("tiny_job")


class Drawn(tiny_job.Tokens):
    """Notes the process that makes an example; does to it what the folder says."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if "LOADER_FOLDER" not in os.environ:  # where it is only traced
            return super().__getitem__(index)
        folder = Path(os.environ["LOADER_FOLDER"])
        (folder / f"made-{self.length}-{os.getpid()}").touch()
        if (folder / "raise").exists() and index == 7:
            raise ValueError("example 7 is bad")
        try:
            (folder / f"kill-{index}").unlink()
        except FileNotFoundError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
        shift = random.randrange(32) + int(torch.randint(0, 32, ()))
        return (super().__getitem__(index) + shift) % 32


class Block(tiny_job.Block):
    """Makes no tensor on the CPU by itself, so it is traced without values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.norm(x.cumsum(1))))
        return x + torch.as_tensor(self.dropout(self.down(hidden)))


class Model(tiny_job.Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(tiny_job.BLOCKS))


def unread_job() -> TrainingJob:
    """The sections in the middle use no value of the batch."""
    return dataclasses.replace(job(), model=Model)


def collate_unevenly(examples: list[torch.Tensor]) -> torch.Tensor:
    length = 4 + int(examples[0][0]) % 4
    return torch.stack(examples)[:, :length]


def uneven_job() -> TrainingJob:
    """The same, with micro-batches of several lengths."""
    return dataclasses.replace(unread_job(), collate=collate_unevenly)


def job() -> TrainingJob:
    return dataclasses.replace(
        tiny_job.job(), dataset=Drawn(50), heldout={"a": Drawn(7), "b": Drawn(40)}
    )
