"""Blocks that keep little for their backward: the same bits from less memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.tracking import LiveBytes
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.selective import check_selective
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tracer import trace

WIDTH, HEADS, LENGTH = 32, 4, 64


class Block(nn.Module):
    """Its attention is written out: scores, softmax, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        queries, keys, values = (
            one(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for one in (self.queries, self.keys, self.values)
        )
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(WIDTH / HEADS)
        mixed = self.dropout(scores.softmax(-1)) @ values
        x = x + mixed.transpose(1, 2).flatten(2)
        made: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return made


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def job_of(model: Any) -> TrainingJob:
    return TrainingJob(
        model=model,
        dataset=[torch.zeros(LENGTH, WIDTH)] * 3,
        loss=lambda model, batch: (model(batch).square().sum(), 1.0),
        optimizer=lambda named: torch.optim.SGD(p for _, p in named),
    )


def kept_and_gradients(selective: bool) -> tuple[int, list[torch.Tensor]]:
    """Bytes that a forward leaves for its backward, and what that makes of them."""
    job = job_of(Gpt)
    layout, model = trace(job), materialise(job, seed=1)
    sections = range(layout.num_sections)
    tensors = {k: {n: model.get_parameter(n) for n in layout.parameters[k]} for k in sections}
    stage = StageModel(job, layout, sections, tensors, selective=selective)
    live = LiveBytes()
    batch = torch.linspace(-1, 1, 2 * LENGTH * WIDTH).view(2, LENGTH, WIDTH)
    with live:
        made = stage.forward(batch, [], lambda section: section)
    kept = live.now_bytes
    assert isinstance(made, LossSums)
    made.loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for k in sections for _, p in stage.parameters_of(k) if p.grad is not None]
    assert len(gradients) == sum(map(len, layout.parameters))
    return kept, gradients


def test_blocks_keep_what_matrix_products_have_made_and_come_to_the_same_bits() -> None:
    kept, gradients = kept_and_gradients(selective=True)
    whole, expected = kept_and_gradients(selective=False)
    assert all(map(torch.equal, gradients, expected))
    products = 3 * 2 * LENGTH * (3 + 4 + 1) * WIDTH * 4  # what Linear modules make, in fp32
    scores = 3 * 2 * HEADS * LENGTH * LENGTH * 4
    assert products <= kept < products + scores < whole


def test_a_compiled_model_is_refused() -> None:
    def compiled() -> nn.Module:
        model = Gpt()
        for block in model.blocks:
            block.compile()
        return model

    check_selective(job_of(Gpt))
    with pytest.raises(UserCodeError, match=r"recompute must .* got selective, and blocks\.0 is"):
        check_selective(job_of(compiled))
