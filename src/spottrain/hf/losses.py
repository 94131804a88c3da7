"""Losses for models of Hugging Face transformers, as ``loss`` of a ``TrainingJob``.

Labels are not passed to the model: it returns logits, of which the sum is taken here, so
that a model cut into stages and any mini-batch come to the model's own mean loss
(``transformers.loss.loss_utils.ForCausalLMLoss``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

IGNORED = -100
"""Label of a position where nothing is to be predicted, as in transformers."""

TokenLoss = (
    tuple[torch.Tensor, torch.Tensor]
    | tuple[torch.Tensor, torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]
)


def causal_lm_loss(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, accuracy: bool = False
) -> TokenLoss:
    """Return the loss of predicting every next token, for ``AutoModelForCausalLM``.

    Args:
        model: Returns logits (batch, sequence, vocabulary), or an object that has them.
        batch: What the model is called with: ``input_ids`` (batch, sequence) and e.g.
            ``attention_mask``. ``labels`` are those of transformers: tokens not yet
            shifted, -100 where none is to be predicted. Without them all tokens of
            ``input_ids`` that ``attention_mask`` does not hide are predicted.
        accuracy: Whether to measure the share of tokens predicted right; give it as
            ``functools.partial(causal_lm_loss, accuracy=True)``.

    Returns:
        The sum of the cross-entropy in nats, in fp32; the number of predicted tokens; and
        the metric ``accuracy`` if asked for.
    """
    labels = batch.get("labels")
    if labels is None:
        labels = batch["input_ids"]
        if (mask := batch.get("attention_mask")) is not None and mask.dim() == 2:
            labels = labels.masked_fill(mask == 0, IGNORED)
    # Shifted labels instead of shifted logits: those would be copied.
    return _token_loss(model, batch, F.pad(labels[:, 1:], (0, 1), value=IGNORED), accuracy)


def masked_lm_loss(
    model: nn.Module, batch: Mapping[str, torch.Tensor], *, accuracy: bool = False
) -> TokenLoss:
    """Return the loss of predicting masked tokens, for ``AutoModelForMaskedLM``.

    As ``causal_lm_loss``, but ``labels`` must be given and stand where they are
    predicted: the token that was masked, elsewhere -100.
    """
    return _token_loss(model, batch, batch["labels"], accuracy)


def _token_loss(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor],
    labels: torch.Tensor,
    accuracy: bool,
) -> TokenLoss:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    # A cache of keys and values is for generating.
    cache = getattr(getattr(model, "config", None), "use_cache", False)
    output = model(**inputs, **({"use_cache": False} if cache else {}))
    logits = getattr(output, "logits", output).float()
    total = F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    counted = labels != IGNORED
    weight = counted.sum()
    if not accuracy:
        return total, weight
    right = ((logits.detach().argmax(-1) == labels) & counted).sum()
    return total, weight, {"accuracy": (right, weight)}
