"""Losses and examples for models of Hugging Face transformers, for a ``TrainingJob``.

Labels are not passed to the model: it returns logits, of which the sum is taken here, so
that a model cut into stages and any mini-batch come to the model's own mean loss
(``transformers.loss.loss_utils.ForCausalLMLoss``).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from spottrain.errors import UserCodeError

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


def chat_example(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], **template: Any
) -> dict[str, torch.Tensor]:
    """Tokenise a conversation, of which only what the assistant says is to be predicted.

    Args:
        tokenizer: Has a chat template.
        messages: Each with ``role`` and ``content``, as ``apply_chat_template`` takes them.
        template: Further arguments of ``apply_chat_template``, such as ``tools``.

    Returns:
        ``input_ids`` and ``labels`` (tokens), for ``causal_lm_loss``. Labels are -100 but
        for the assistant's tokens: those that the template marks with ``{% generation %}``,
        else what each answer adds to the conversation before it.

    Raises:
        UserCodeError: The template marks nothing, and writes what was said before an answer
            in another way after it, so that the answer cannot be found.
    """

    def tokens(until: int | None, **more: Any) -> Any:
        return tokenizer.apply_chat_template(
            list(messages[:until]), tokenize=True, return_dict=True, **template, **more
        )

    if "{% generation" in tokenizer.get_chat_template().replace("{%-", "{%"):
        marked = tokens(None, return_assistant_tokens_mask=True)
        ids = torch.tensor(marked["input_ids"])
        return {
            "input_ids": ids,
            "labels": ids.where(torch.tensor(marked["assistant_masks"]) == 1, IGNORED),
        }
    whole = tokens(None)["input_ids"]
    labels = [IGNORED] * len(whole)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            before = tokens(number, add_generation_prompt=True)["input_ids"]
            after = tokens(number + 1)["input_ids"]
            if before != whole[: len(before)] or after != whole[: len(after)]:
                raise UserCodeError(
                    f"chat_example: the template writes message {number} in another way once "
                    "others follow; mark answers in it with {% generation %}, or give the "
                    "conversation up to one answer at a time"
                )
            labels[len(before) : len(after)] = whole[len(before) : len(after)]
    return {"input_ids": torch.tensor(whole), "labels": torch.tensor(labels)}


class Examples(Protocol):
    """A map-style data set of ``input_ids`` and, where there are any, ``labels``."""

    def __len__(self) -> int:
        """Return the number of examples."""

    def __getitem__(self, index: int, /) -> Mapping[str, torch.Tensor]:
        """Return one: 1-dimensional tensors of one length."""


class Packed:
    """A data set whose rows hold several examples, none of which sees another.

    Positions begin anew with each example: transformers (from version 4.53) builds from them
    the mask that keeps examples apart, as long as no ``attention_mask`` is given. Which
    examples share a row follows from their lengths alone (best fit, longest first), so it is
    the same on every machine.

    Args:
        dataset: The examples. What is longer than a row is cut.
        length: Tokens in a row.
        lengths: Of all examples, in tokens; by default each example is made once to count
            them, in every process that loads the job.
        pad: The token that fills rows up; nothing is predicted there.
    """

    def __init__(
        self, dataset: Examples, length: int, lengths: Iterable[int] | None = None, pad: int = 0
    ) -> None:
        if lengths is None:
            lengths = (len(dataset[index]["input_ids"]) for index in range(len(dataset)))
        self._dataset, self._length, self._pad = dataset, length, pad
        self.rows = best_fit([min(x, length) for x in lengths], length)
        """The examples in each row."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a row: ``input_ids``, ``labels`` and ``position_ids``, each (length,)."""
        ids, labels, positions = [], [], []
        for number in self.rows[index]:
            example = self._dataset[number]
            ids.append(example["input_ids"][: self._length])
            labels.append(example.get("labels", example["input_ids"])[: self._length].clone())
            labels[-1][:1] = IGNORED  # nothing of this example comes before
            positions.append(torch.arange(len(ids[-1])))
        rest = self._length - sum(map(len, ids))
        ids.append(torch.full((rest,), self._pad))
        labels.append(torch.full((rest,), IGNORED))
        positions.append(torch.arange(rest))
        return {
            "input_ids": torch.cat(ids),
            "labels": torch.cat(labels),
            "position_ids": torch.cat(positions),
        }


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which items share a bin, each in the fullest bin that holds it, longest first.

    Args:
        lengths: Of the items, at most ``room``.
        room: Of a bin.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, in order
    for item in sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)):
        place = bisect.bisect_left(rooms, lengths[item])
        if place == len(rooms):
            chosen, left = len(bins), room
            bins.append([])
        else:
            left = rooms[place]
            chosen = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        bins[chosen].append(item)
        left -= lengths[item]
        if left not in by_room:
            by_room[left] = []
            bisect.insort(rooms, left)
        by_room[left].append(chosen)
    return bins
