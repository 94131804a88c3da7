"""A model that cannot be cut is one section, and the tracer says why."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.chains import batch_of, run_chain, same_bits, seeds, tensors_of
from tests.unit.pipeline.blocks import WIDTH, Blocks, Forward, linear, make_job, plain
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import transformers as hf

from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.data import seed_everything
from spottrain.pipeline.model.inspect import model_facts
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.tracer import trace


def in_order(*order: int) -> Forward:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        for index in order:
            x = self.blocks[index](x)
        return x

    return body


def residual_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Under two names."""
    x = self.embed(x)
    first = x
    for block in self.blocks:
        x += block(x * 2)
    return x + first


def looping(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As ALBERT does."""
    for _ in range(3):
        x = self.blocks[0](x)
    return x


class Leaving(nn.Module):
    """Leaves something behind that it does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left = self.inner(x)
        return self.left * 2  # type: ignore[no-any-return]


def gathering(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        x = block(x)
    return x + self.blocks[0].left  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None])[0]  # type: ignore[no-any-return]


class Dropping(Blocks):
    """Leaves blocks out at random."""

    def __init__(self) -> None:
        super().__init__(dropping, linear)
        self.layerdrop = 0.5


def dropping(self: Any, x: torch.Tensor) -> torch.Tensor:
    for block in self.blocks:
        if not self.training or torch.rand([]) > self.layerdrop:
            x = block(x)
    return self.head(x)  # type: ignore[no-any-return]


def with_penalty(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    given = batch.clone().requires_grad_()
    loss = model(given).square().sum()
    (slope,) = torch.autograd.grad(loss, given, create_graph=True)
    return loss + slope.square().sum(), len(batch)


JOBS: dict[str, tuple[TrainingJob, str]] = {
    "residuals in place": (
        make_job(residual_in_place),
        r"changed in place under another name: .* \(x = x \+ y in place of",
    ),
    "what a block does not return": (make_job(gathering, Leaving), "let the block return it"),
    "blocks called twice": (make_job(in_order(0, 1, 1, 2, 3)), "run all blocks once each"),
    "one block in a loop": (make_job(looping), "run all blocks once each"),
    "blocks that never run": (make_job(in_order(0, 1)), "run each once"),
    "layers left out at random": (make_job(plain, model=Dropping), "set layerdrop to 0"),
    "no blocks": (make_job(plain, model=linear), "no repeated blocks and no CutPoint"),
    "an LSTM": (make_job(plain, model=Recurrent), "no repeated blocks and no CutPoint"),
    "a gradient penalty": (make_job(plain, loss=with_penalty), "desired behavior; a loss may"),
}


@pytest.mark.parametrize("kind", JOBS)
def test_what_cannot_be_cut_is_one_section_that_trains_as_torch_does(kind: str) -> None:
    job, reason = JOBS[kind]

    layout = whole(job, reason)

    assert rehearse(job, layout) == ()
    batch, tensors = batch_of(job, 3), tensors_of(job, layout)
    with torch.random.fork_rng():
        _, _, gradients = run_chain(job, layout, [0, 1], batch, tensors)
        model = materialise(job, seed=1).train()
        seed_everything(seeds(0))
        job.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        assert same_bits(gradients[0, name], parameter.grad), name


def whole(job: TrainingJob, reason: str) -> ModelLayout:
    layout = trace(job)
    assert (layout.num_sections, layout.cuts, layout.tied) == (1, (), ())
    assert re.search(reason, layout.uncut), layout.uncut
    assert "\n" not in layout.uncut
    assert model_facts(job, layout).uncut == layout.uncut
    return layout


def test_a_model_that_is_cut_has_no_reason_not_to_be() -> None:
    assert trace(make_job(plain)).uncut == ""


# --- Real models ---------------------------------------------------------------------------


def hugging_face_job(model: Callable[[], nn.Module]) -> TrainingJob:
    def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
        return model(input_ids=batch, labels=batch).loss, 1.0

    return make_job(plain, model=model, dataset=[torch.arange(8)], loss=loss)


def test_losses_over_the_routers_of_all_blocks_make_one_section() -> None:
    config = hf.MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, vocab_size=32,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True,
    )  # fmt: skip
    whole(hugging_face_job(lambda: hf.MixtralForCausalLM(config)), "let the block return it")
