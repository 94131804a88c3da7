from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.base.blank import blank_of, signature_of


def batch_of(examples: int, length: int) -> dict[str, Any]:
    return {
        "tokens": torch.ones(examples, length, dtype=torch.int64),
        "positions": (torch.ones(length), torch.ones(length, examples + 1)),
    }


@given(examples=st.integers(1, 9), length=st.integers(1, 9), other=st.integers(1, 9))
def test_a_stand_in_has_the_signature_of_batches_of_its_shapes_alone(
    examples: int, length: int, other: int
) -> None:
    blank = blank_of(batch_of(1, length), batch_of(2, length))
    assert blank is not None
    made = signature_of(blank.make(examples))

    assert 0 < made < 1 << 63
    assert made == signature_of(batch_of(examples, length))
    assert (made == signature_of(batch_of(examples, other))) == (length == other)
    assert made != signature_of(batch_of(examples + 1, length))
    assert made != signature_of({**batch_of(examples, length), "more": torch.ones(1)})


@pytest.mark.parametrize(
    "changed",
    [
        {"length": 3},
        {"sparse": torch.eye(2).to_sparse()},
        {"trained": torch.ones(1, requires_grad=True)},
    ],
)
def test_nothing_stands_in_for_what_is_no_ordinary_tensor(
    changed: dict[str, Any],
) -> None:
    one, two = batch_of(1, 4) | changed, batch_of(2, 4) | changed
    assert blank_of(one, two) is None
    assert signature_of(one) == 0


def test_nothing_stands_in_for_batches_of_several_structures() -> None:
    assert blank_of([torch.ones(1)], [torch.ones(2)] * 2) is None
    assert blank_of([torch.ones(1)], [torch.ones(2, 1)]) is None
    assert blank_of([torch.ones(1)], [torch.ones(2).double()]) is None
