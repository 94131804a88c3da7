"""Blocks whose ranks have a part of the sequence each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.integration.tensor_jobs import HEADS, WIDTH, Attention, Block, Gpt, dropped, gpt, qwen3
from tests.integration.tiny_job import Tokens, loss
from torch import nn
from torch.nn import functional

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.division import (
    ThreadRank,
    can_divide,
    threads_beside,
    try_divided,
)
from spottrain.pipeline.model.checks.repetition import first_tensors, trial_batch
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.stage import Activations, StageModel
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.model.tensor_ranks import Absent
from spottrain.pipeline.model.tracer import trace


@pytest.mark.parametrize("job", [gpt, qwen3, dropped])
def test_ranks_with_parts_come_to_the_loss_and_gradients_of_one_alone(
    job: Callable[[], TrainingJob],
) -> None:
    try_divided(job(), trace(job()), 2, sequence=True)


def deep() -> TrainingJob:
    def model() -> nn.Module:
        made = Gpt()
        made.blocks = nn.ModuleList(Block() for _ in range(3))
        return made

    return replace(gpt(), model=model)


def kept_bytes(stage: StageModel, received: Activations) -> int:
    """Return the bytes that the block in the middle keeps for its backward at a rank."""
    own = {p.untyped_storage().data_ptr() for _, p in stage.parameters_of(1)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    stage.require_gradients(received)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        stage.forward(trial_batch(deep(), 0), received, int)
    return sum(storage.nbytes() for storage in kept.values())


def test_a_block_keeps_a_part_of_all_that_one_rank_alone_keeps() -> None:
    job, layout = deep(), trace(deep())
    tensors = first_tensors(job, layout)
    whole = torch.randn(layout.cuts[0].crossing[0].shape(len(trial_batch(job, 0))))

    def middle(shards: Shards) -> StageModel:
        parts = {k: shards.own_parts(whole) for k, whole in tensors.items()}
        return StageModel(job, layout, range(1, 2), parts, shards=shards)

    def at_ranks(*, sequence: bool) -> list[int]:
        ranks = ThreadRank.make(2)
        stages = [middle(Shards.of(layout, rank, sequence=sequence)) for rank in ranks]
        given = whole.chunk(2, -2) if sequence else (whole, whole)
        with threads_beside(2) as pool:
            return list(pool.map(kept_bytes, stages, [[one.clone()] for one in given]))

    alone = kept_bytes(middle(ALONE), [whole.clone()])

    assert at_ranks(sequence=True) == [alone // 2] * 2
    assert min(at_ranks(sequence=False)) > 0.6 * alone


def test_ranks_drop_out_parts_of_a_sequence_by_masks_of_their_own() -> None:
    job = dropped()
    layout = trace(job)
    tensors = first_tensors(job, layout)
    masks: dict[tuple[int, str], list[torch.Tensor]] = {}
    for index in range(2):
        shards = Shards.of(layout, Absent(2, index), sequence=True)
        parts = {k: shards.own_parts(whole) for k, whole in tensors.items()}
        stage = StageModel(job, layout, range(layout.num_sections), parts, shards=shards)
        for name in ("dropout", "blocks.0.down.1", "blocks.1.down.1"):
            kept = masks[index, name] = []
            stage.module.get_submodule(name).register_forward_hook(
                lambda _, __, made, kept=kept: kept.append(made == 0)
            )
        stage.forward(trial_batch(job, 0), [], int)

    before, behind = masks[0, "dropout"]
    assert torch.equal(before, masks[1, "dropout"][0])
    assert torch.equal(behind, masks[1, "dropout"][1])
    assert not torch.equal(before, behind)
    for name in ("blocks.0.down.1", "blocks.1.down.1"):
        (one,), (other,) = masks[0, name], masks[1, name]
        assert one.shape == other.shape
        assert not torch.equal(one, other)


class Odd:
    """Sequences of 7 tokens."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return Tokens(50)[index][:-1]


def odd() -> TrainingJob:
    return replace(gpt(), dataset=Odd())


class Beside(Gpt):
    """All blocks get what the embedding has made, too."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embedding(tokens)
        for block in self.blocks:
            x = block(x + first)
        return functional.linear(self.norm(x), self.embedding.weight)


class Counting(Gpt):
    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.count += 1
        made: torch.Tensor = super().forward(tokens)
        return made


class Crossing(Attention):
    """Its keys and values are of something else."""

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        query, key, value = (
            made.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for made in (self.query(x), self.key(other), self.value(other))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        made: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return made


class Conditioned(Block):
    """It normalises what no rank has a part of."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.beside = Crossing(), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = torch.arange(4.0 * WIDTH, device=x.device).view(1, 4, WIDTH).sin()
        x = x + self.attention(self.norm(x), self.beside(other).expand(len(x), 4, WIDTH))
        made: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return made


def twice() -> TrainingJob:
    def both(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, float]:
        (one, weight), (two, _) = loss(model, batch), loss(model, batch)
        return one + two, weight

    return replace(gpt(), loss=both)


def of_model(model: type[Gpt], block: type[Block] = Block) -> Callable[[], TrainingJob]:
    def made() -> nn.Module:
        whole = model()
        whole.blocks = nn.ModuleList(block() for _ in whole.blocks)
        return whole

    return lambda: replace(gpt(), model=made)


@pytest.mark.parametrize(
    ("job", "message"),
    [
        (
            odd,
            r"^runtime.sequence_parallel must have sequences that 2 ranks .* got an activation of shape \(\d, 7, 16\)",
        ),
        (twice, "calls it several times"),
        (of_model(Beside), "embedding#0 passes from block to block beside the activation"),
        (of_model(Counting), "change its buffer count"),
        (of_model(Gpt, Conditioned), r"gradient of blocks\.0\.beside\.weight of norm"),
    ],
)
def test_a_model_that_cannot_divide_the_sequence_is_refused_in_a_line(
    job: Callable[[], TrainingJob], message: str
) -> None:
    with pytest.raises(UserCodeError, match=message):
        try_divided(job(), trace(job()), 2, sequence=True)
    assert not can_divide(job(), trace(job()), 2, sequence=True)
    try_divided(job(), trace(job()), 2)


class Behind(Block):
    """It normalises what its layers have made (Olmo 2), and scales it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.norm(self.attention(x))
        made: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return made


def test_norms_may_be_behind_matrices_and_parameters_in_blocks() -> None:
    job = of_model(Gpt, Behind)
    try_divided(job(), trace(job()), 2, sequence=True)
