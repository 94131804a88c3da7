"""``spottrain.step()`` in the user's code."""

from __future__ import annotations

import torch
from torch import nn

import spottrain
from spottrain import TrainingJob
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.tracer import trace
from spottrain.steps import at_step


class Steps:
    """Examples that hold the step at which they were fetched."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> torch.Tensor:
        step = spottrain.step()
        return torch.full((4,), -1.0 if step is None else float(step))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    step = spottrain.step()
    assert step is not None
    return model(batch).sum() * 0.5**step, len(batch)


JOB = TrainingJob(
    model=Blocks,
    dataset=Steps(),
    heldout=Steps(),
    loss=loss,
    optimizer=lambda named: torch.optim.SGD([p for _, p in named]),
)


def test_examples_are_told_the_mini_batch_that_they_are_for() -> None:
    source = MicrobatchSource(JOB, 1, 8, 2)
    assert [float(source.training(7, range(node, node + 1))[0, 0]) for node in range(4)] == [
        7.0
    ] * 4
    assert float(source.heldout("heldout", 0)[0, 0]) == -1
    assert spottrain.step() is None


def test_inspect_shows_step_0() -> None:
    assert trace(JOB).num_sections == 2


def test_steps_nest() -> None:
    with at_step(3):
        with at_step(4):
            assert spottrain.step() == 4
        assert spottrain.step() == 3
    assert spottrain.step() is None
