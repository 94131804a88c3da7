"""Losses that call a model several times, or another one beside it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn


def simcse(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of SimCSE (Gao et al., 2021): a sentence is like itself under another
    dropout, and unlike all others."""
    tokens = batch["input_ids"]
    one, two = (model(input_ids=tokens).pooler_output for _ in range(2))
    likeness = F.cosine_similarity(one[:, None], two[None], dim=-1) / 0.05
    own = torch.arange(len(one), device=one.device)
    return F.cross_entropy(likeness, own, reduction="sum"), float(len(one))


def r_drop(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of R-Drop (Liang et al., 2021): two dropouts are to agree."""
    scores = [model(batch["input_ids"]) for _ in range(2)]
    p, q = (one.log_softmax(-1).flatten(0, 1) for one in scores)
    labels = batch["labels"].flatten()
    likely = [F.nll_loss(one, labels, reduction="sum") for one in (p, q)]
    apart = [
        F.kl_div(one, other, log_target=True, reduction="sum") for one, other in ((p, q), (q, p))
    ]
    return (likely[0] + likely[1]) / 2 + (apart[0] + apart[1]) / 4, float(len(labels))


def siamese(model: nn.Module, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of SimSiam (Chen and He, 2020), without its predictor."""
    pictures = batch["pixel_values"]
    views = [pictures + torch.randn_like(pictures) / 4 for _ in range(2)]
    one, two = (model(view) for view in views)
    likeness = F.cosine_similarity(one, two.detach()) + F.cosine_similarity(two, one.detach())
    return -likeness.sum(), float(len(pictures))


def dpo(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of DPO (Rafailov et al., 2023)."""
    chosen = batch["input_ids"]
    pair = chosen, chosen.flip(1)
    scores = [one(input_ids=tokens).logits for one in (model, model.reference) for tokens in pair]
    likely = [
        logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).sum((1, 2))
        for logits, tokens in zip(scores, pair * 2, strict=True)
    ]
    margin = (likely[0] - likely[1]) - (likely[2] - likely[3])
    return -F.logsigmoid(0.1 * margin).sum(), float(len(chosen))


def distil(model: Any, batch: Any) -> tuple[torch.Tensor, float]:
    """Return the loss of distillation (Hinton et al., 2015)."""
    pictures = batch["pixel_values"]
    wanted = model.teacher(pictures).logits.log_softmax(-1)
    found = model(pictures).logits.log_softmax(-1)
    loss = F.kl_div(found, wanted, log_target=True, reduction="sum")
    return loss + F.nll_loss(found, batch["labels"], reduction="sum"), float(len(pictures))
