"""Stages of unmodified models give the very loss and gradients of the whole model."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tests.chains import batch_of, run_chain, same_bits, tensors_of
from tests.tiers import first_always
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"  # before the import: nothing is downloaded
import transformers as hf

from spottrain.pipeline.model.job import CutPoint, TrainingJob
from spottrain.pipeline.model.skeleton import materialise
from spottrain.pipeline.model.tracer import trace

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 4, 32, 4, 64, 16

Factory = Callable[[float], nn.Module]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- Model families ------------------------------------------------------------------


def gpt2(dropout: float, **more: Any) -> nn.Module:
    model: nn.Module = hf.GPT2LMHeadModel(
        hf.GPT2Config(
            n_layer=LAYERS,
            n_embd=WIDTH,
            n_head=HEADS,
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            bos_token_id=0,
            eos_token_id=0,
            **more,
        )
    )
    return model


def _llama_like(kind: str, dropout: float, **more: Any) -> nn.Module:
    config = getattr(hf, f"{kind}Config")(
        num_hidden_layers=LAYERS,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        attention_dropout=dropout,
        **more,
    )
    model: nn.Module = getattr(hf, f"{kind}ForCausalLM")(config)
    return model


def bert(dropout: float) -> nn.Module:
    model: nn.Module = hf.BertForMaskedLM(
        hf.BertConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    return model


def vit(dropout: float) -> nn.Module:
    model: nn.Module = hf.ViTForImageClassification(
        hf.ViTConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH,
            image_size=16,
            patch_size=8,
            num_labels=10,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
        )
    )
    return model


def convnext(dropout: float) -> nn.Module:
    """Blocks change the shape; activations and gradients are not contiguous."""
    config = hf.ConvNextConfig(
        image_size=16,
        patch_size=2,
        hidden_sizes=[8, 16, 32, 32],
        depths=[1] * LAYERS,
        num_labels=10,
        drop_path_rate=dropout,
    )
    model: nn.Module = hf.ConvNextForImageClassification(config)
    return model


def opt(dropout: float) -> nn.Module:
    model: nn.Module = hf.OPTForCausalLM(
        hf.OPTConfig(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            ffn_dim=2 * WIDTH,
            num_attention_heads=HEADS,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
            word_embed_proj_dim=WIDTH,
            dropout=dropout,
            attention_dropout=dropout,
        )
    )
    return model


class Plain(nn.Module):
    """No Hugging Face: parameters of the root's own, a mask, cuts by hand."""

    scale: torch.Tensor

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(VOCABULARY, WIDTH))
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.dropout = nn.Dropout(dropout)
        self.widen = nn.Linear(WIDTH, 2 * WIDTH)
        self.first_cut = CutPoint()
        self.middle = nn.LSTM(2 * WIDTH, 2 * WIDTH, batch_first=True)
        self.second_cut = CutPoint()
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        keep = (tokens != 0)[..., None] * self.scale
        x = self.dropout(self.tokens[tokens] + self.positions)
        x = self.first_cut(self.widen(x) * keep.repeat(1, 1, 2))
        x = self.second_cut(self.dropout(self.middle(x)[0]).transpose(0, 1))
        scores: torch.Tensor = (self.narrow(x).transpose(0, 1) * keep) @ self.tokens.T
        return scores


FAMILIES: dict[str, Factory] = {
    "gpt2": gpt2,
    "gpt2-untied": lambda p: gpt2(p, tie_word_embeddings=False),
    "llama": lambda p: _llama_like("Llama", p),
    "llama-tied": lambda p: _llama_like("Llama", p, tie_word_embeddings=True),
    "bert": bert,
    "vit": vit,
    "convnext": convnext,
    "opt": opt,
    "mixtral": lambda p: _llama_like("Mixtral", p, num_local_experts=4),
    "qwen2": lambda p: _llama_like("Qwen2", p, tie_word_embeddings=True),
    "plain": Plain,
}


class Examples:
    """Random tokens, or random pictures with a class."""

    def __init__(self, pictures: bool) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        dice = torch.Generator().manual_seed(index)
        if self.pictures:
            image = torch.randn(3, 16, 16, generator=dice)
            return {"pixel_values": image, "labels": torch.tensor(index % 10)}
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=dice)
        return {"input_ids": tokens, "labels": tokens}


def hugging_face_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    number = len(batch["labels"])
    mean: Any = model(**batch).loss
    return mean * number, float(number)


def plain_loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = model(batch["input_ids"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")
    return loss, (batch["input_ids"] != 0).sum()


def make_job(family: str, dropout: float) -> TrainingJob:
    return TrainingJob(
        model=lambda: FAMILIES[family](dropout),
        dataset=Examples(pictures=family in ("vit", "convnext")),
        loss=plain_loss if family == "plain" else hugging_face_loss,
        optimizer=lambda named: torch.optim.AdamW(p for _, p in named),
    )


# --- Tests -----------------------------------------------------------------------------


@pytest.mark.rotated
@pytest.mark.parametrize("family", first_always(FAMILIES))
def test_any_cut_gives_the_bits_of_one_stage_with_dropout(family: str) -> None:
    job = make_job(family, dropout=0.1)
    layout = trace(job)
    number, tensors = layout.num_sections, tensors_of(job, layout)
    assert number == (3 if family == "plain" else LAYERS)
    batch = batch_of(job, 3)
    loss, weight, gradients = run_chain(job, layout, [0, number], batch, tensors)
    assert all(g is not None for g in gradients.values()) or family == "mixtral"
    for bounds in ([0, 1, number], [0, number - 1, number], list(range(number + 1))):
        got = run_chain(job, layout, bounds, batch, tensors)
        assert torch.equal(got[0], loss)
        assert got[1] == weight
        assert got[2].keys() == gradients.keys()
        different = [k for k in gradients if not same_bits(got[2][k], gradients[k])]
        assert different == []


@pytest.mark.rotated
@pytest.mark.parametrize("family", first_always(FAMILIES))
def test_stages_give_the_bits_of_the_plain_model_without_dropout(family: str) -> None:
    job = make_job(family, dropout=0.0)
    layout = trace(job)
    number, batch = layout.num_sections, batch_of(job, 3)
    model = materialise(job, seed=1).train()
    plain_loss, *_ = job.loss(model, batch)
    torch.autograd.backward(plain_loss)
    tensors = tensors_of(job, layout)
    loss, _, gradients = run_chain(job, layout, list(range(number + 1)), batch, tensors)
    assert torch.equal(loss, plain_loss.detach())
    for name, parameter in model.named_parameters():
        parts = [g for (_, n), g in gradients.items() if n == name and g is not None]
        if parameter.grad is None:
            assert parts == []
        elif len(parts) == 1 and family != "convnext":
            assert torch.equal(parts[0], parameter.grad), name
        else:  # a sum over two sections, or another order of sums by another layout
            torch.testing.assert_close(sum(parts), parameter.grad)
