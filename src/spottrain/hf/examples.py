"""Examples for models of Hugging Face transformers: conversations, and packed rows."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from spottrain.errors import UserCodeError
from spottrain.hf.losses import IGNORED


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
