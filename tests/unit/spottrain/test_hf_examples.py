"""Conversations and packed rows, as ``spottrain.hf`` makes examples of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain import hf
from spottrain.errors import UserCodeError
from spottrain.hf.examples import best_fit

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|> {% if m.role == 'assistant' %}"
    "{%- generation %}{{ m.content }} <|end|>{% endgeneration %} "
    "{% else %}{{ m.content }} <|end|> {% endif %}{% endfor %}"
)
SHORTENED = (
    "{% for m in messages %}<|{{ m.role }}|> "
    "{% if m.role == 'assistant' and not loop.last %}…{% else %}{{ m.content }}{% endif %}"
    " <|end|> {% endfor %}{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
TALK = [
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "how are you"},
    {"role": "assistant", "content": "well"},
    {"role": "user", "content": "how short"},
    {"role": "assistant", "content": "you are short"},
]


def tokenizer(template: str) -> Any:
    words = "? be short how are you well <|system|> <|user|> <|assistant|> <|end|> …"
    vocabulary = {word: number for number, word in enumerate(words.split())}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="?")
    made.chat_template = template
    return made


def texts(made: Any, example: dict[str, torch.Tensor]) -> tuple[str, str]:
    """Return a conversation, and what of it is to be predicted."""
    ids, labels = example["input_ids"], example["labels"]
    assert torch.equal(labels[labels != hf.IGNORED], ids[labels != hf.IGNORED])
    return made.decode(ids), made.decode(labels[labels != hf.IGNORED])


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_only_what_the_assistant_says_is_predicted(template: str) -> None:
    made = tokenizer(template)
    said, predicted = texts(made, hf.chat_example(made, TALK))
    assert said.startswith("<|system|> be short <|end|> <|user|> how are you <|end|>")
    assert predicted == "well <|end|> you are short <|end|>"


def test_an_answer_that_is_written_otherwise_later_is_refused() -> None:
    made = tokenizer(SHORTENED)
    with pytest.raises(UserCodeError, match=r"message 2 in another way once others follow"):
        hf.chat_example(made, TALK)
    _, predicted = texts(made, hf.chat_example(made, TALK[:3]))
    assert predicted == "well <|end|>"


@given(st.lists(st.integers(0, 12), max_size=40))
def test_every_example_is_in_one_row_that_has_room_for_it(lengths: list[int]) -> None:
    rows = best_fit(lengths, 12)
    assert Counter(x for row in rows for x in row) == Counter(range(len(lengths)))
    assert all(sum(lengths[x] for x in row) <= 12 for row in rows)
    # Two rows that would fit into one are not left (best fit, longest first).
    halves = [sum(lengths[x] for x in row) for row in rows]
    assert all(a + b > 12 for i, a in enumerate(halves) for b in halves[i + 1 :] if a and b)


def test_a_hundred_thousand_examples_fill_their_rows() -> None:
    lengths = [1 + (i * 7919) % 600 for i in range(100_000)]
    rows = best_fit(lengths, 2048)
    assert len(rows) <= 1.001 * sum(lengths) / 2048 + 1


def test_a_packed_row_has_the_loss_of_its_examples() -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    examples = [
        {"input_ids": ids, "labels": ids.where(torch.arange(len(ids)) > 1, hf.IGNORED)}
        for ids in (torch.randint(61, (n,)) for n in (5, 9, 3, 7, 16))
    ]
    rows = hf.Packed(examples, 16)
    assert len(rows) == 3
    batch = {x: torch.stack([rows[i][x] for i in range(len(rows))]) for x in rows[0]}
    assert batch["input_ids"].shape == (3, 16)
    found = hf.causal_lm_loss(model, batch)
    alone = [
        hf.causal_lm_loss(model, {name: tensor[None] for name, tensor in example.items()})
        for example in examples
    ]
    torch.testing.assert_close(found[0], torch.stack([x[0] for x in alone]).sum())
    assert found[1] == sum(x[1] for x in alone)


def test_examples_longer_than_a_row_are_cut_and_rows_are_filled_up() -> None:
    rows = hf.Packed([{"input_ids": torch.arange(1, 10)}, {"input_ids": torch.arange(3)}], 6, pad=9)
    assert [row["input_ids"].tolist() for row in (rows[0], rows[1])] == [
        [1, 2, 3, 4, 5, 6],
        [0, 1, 2, 9, 9, 9],
    ]
    assert rows[1]["labels"].tolist() == [hf.IGNORED, 1, 2] + [hf.IGNORED] * 3
    assert rows[1]["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
