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
from torch.utils.checkpoint import checkpoint

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


def residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = x + block(x)
    return self.head(x)  # type: ignore[no-any-return]


def recomputed(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.embed(x)
    for block in self.blocks:
        x = x + checkpoint(block, nn.functional.dropout(x), use_reentrant=True)
    return x


def skipping(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As a UNet does."""
    first = self.blocks[0](x)
    second = self.blocks[1](first)
    return self.blocks[3](self.blocks[2](second) + first)  # type: ignore[no-any-return]


def looping(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As ALBERT does."""
    for _ in range(3):
        x = self.blocks[0](x)
    return x


def over_all(self: Any, x: torch.Tensor) -> torch.Tensor:
    outputs = []
    for block in self.blocks:
        x = block(x)
        outputs.append(x)
    return torch.cat(outputs)


class Conditioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        return x * self.scale(condition)  # type: ignore[no-any-return]


def conditioned(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As diffusion models do with a timestep."""
    condition = self.embed(x)
    for block in self.blocks:
        x = block(x, condition)
    return x


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x[:, None])[0]  # type: ignore[no-any-return]


TEACHER = Blocks(plain, lambda: nn.Dropout(0.5)).requires_grad_(False)


class Helped(nn.Module):
    """A model with a frozen one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.student = Blocks(plain, linear)
        self.teacher = Blocks(lambda self, x: self.embed(x), linear)
        self.teacher.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        target = self.teacher(x)
        return self.student(x) - target  # type: ignore[no-any-return]


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


def with_teacher(model: nn.Module, batch: Any) -> Any:
    target = TEACHER(batch.cpu()).to(batch.device)
    return (model(batch) - target).sum(), len(batch)


def with_noise(model: nn.Module, batch: Any) -> Any:
    noise = torch.rand(len(batch), device=batch.device)
    return (model(batch).flatten(1).sum(1) * noise).sum(), len(batch)


def with_two_views(model: nn.Module, batch: Any) -> Any:
    return (model(batch) - model(batch)).square().sum(), len(batch)


def with_penalty(model: Any, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
    given = batch.clone().requires_grad_()
    loss = model(given).square().sum()
    (slope,) = torch.autograd.grad(loss, given, create_graph=True)
    return loss + slope.square().sum(), len(batch)


def dropping_half() -> nn.Module:
    return nn.Sequential(linear(), nn.Dropout(0.5))


ONE_ACTIVATION = "but one activation alone may pass from section to section: add residuals"
JOBS: dict[str, tuple[TrainingJob, str]] = {
    "residuals outside of blocks": (make_job(residual), ONE_ACTIVATION),
    "residuals around checkpoints": (make_job(recomputed, dropping_half), ONE_ACTIVATION),
    "a skip over blocks": (make_job(skipping), ONE_ACTIVATION),
    "a second tensor for all blocks": (make_job(conditioned, Conditioned), ONE_ACTIVATION),
    "outputs of all blocks": (make_job(over_all), "output_router_logits"),
    "blocks called twice": (make_job(in_order(0, 1, 1, 2, 3)), "run all blocks once each"),
    "one block in a loop": (make_job(looping), "run all blocks once each"),
    "blocks in another order": (make_job(in_order(1, 0, 2, 3)), "run all blocks once each"),
    "blocks that never run": (make_job(in_order(0, 1)), "run each once"),
    "reversed blocks": (make_job(in_order(3, 2, 1, 0)), "it ran first; .* in reverse go into"),
    "layers left out at random": (make_job(plain, model=Dropping), "set layerdrop to 0"),
    "no blocks": (make_job(plain, model=linear), "no repeated blocks and no CutPoint"),
    "an LSTM": (make_job(plain, model=Recurrent), "no repeated blocks and no CutPoint"),
    "a teacher with dropout": (make_job(plain, loss=with_teacher), "outputs of helper models"),
    "a frozen module": (make_job(plain, model=Helped), "by the frozen module teacher"),
    "noise before the model": (make_job(plain, loss=with_noise), "dataset or collate draw them"),
    "two forwards": (
        make_job(plain, dropping_half, loss=with_two_views),
        r"run the model once.*one batch, by torch\.cat",
    ),
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


def encoder_decoder(kind: str) -> nn.Module:
    if kind == "t5":
        config: Any = hf.T5Config(
            num_layers=2, d_model=16, d_kv=4, d_ff=16, num_heads=4, vocab_size=32,
            decoder_start_token_id=0,
        )  # fmt: skip
        model: nn.Module = hf.T5ForConditionalGeneration(config)
    else:
        config = hf.BartConfig(
            encoder_layers=2, decoder_layers=2, d_model=16, encoder_ffn_dim=16,
            decoder_ffn_dim=16, encoder_attention_heads=4, decoder_attention_heads=4,
            vocab_size=32, max_position_embeddings=16,
        )  # fmt: skip
        model = hf.BartForConditionalGeneration(config)
    return model


def test_losses_over_the_routers_of_all_blocks_make_one_section() -> None:
    config = hf.MixtralConfig(
        num_hidden_layers=2, hidden_size=16, intermediate_size=16, vocab_size=32,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
        output_router_logits=True,
    )  # fmt: skip
    whole(hugging_face_job(lambda: hf.MixtralForCausalLM(config)), "the model in section 1 uses")


@pytest.mark.rotated
def test_an_encoder_decoder_whose_blocks_share_relative_positions_is_one_section() -> None:
    job = hugging_face_job(lambda: encoder_decoder("t5"))
    whole(job, r"\S*decoder\S+ in section 1 uses .* computed in section 0")


@pytest.mark.rotated
def test_an_encoder_decoder_is_cut_in_its_encoder() -> None:
    layout = trace(hugging_face_job(lambda: encoder_decoder("bart")))
    assert layout.blocks == "model.encoder.layers"
    assert not any("decoder" in name for name in layout.parameters[0])
