"""Values of parameter groups come back as they were, to the last bit."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.values import Encoder, GroupValues, decode, tensors_of

CPU = torch.device("cpu")
BITS = st.binary(min_size=8, max_size=8)
FLOATS = BITS.map(lambda data: struct.unpack("<d", data)[0])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
TENSORS = st.builds(
    lambda shape, dtype: torch.randn(shape).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    DTYPES,
)
NUMPY = st.one_of(
    FLOATS.map(np.float64),
    st.integers(-9, 9).map(np.int32),
    st.lists(st.integers(0, 9), max_size=3).map(np.array),
)
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3))
LEAVES = st.one_of(PLAIN, FLOATS, TENSORS, NUMPY)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=2), st.integers()), inner, max_size=2),
    ),
    max_leaves=6,
)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        flat = [t.reshape(-1).view(torch.uint8) for t in (one, other)]
        kinds = [(t.dtype, t.shape) for t in (one, other)]
        return kinds[0] == kinds[1] and torch.equal(*flat)
    if isinstance(one, np.ndarray | np.generic):
        return bool(one.dtype == other.dtype and one.tobytes() == other.tobytes())
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    return bool(one == other)


@given(VALUES)
def test_a_value_is_decoded_as_it_was_encoded(value: Any) -> None:
    encoder = Encoder(CPU)
    encoded = encoder.encode(value)

    assert encoder.lossless
    assert same(decode(encoded, CPU), value)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


@given(VALUES, VALUES)
def test_what_a_step_changes_is_kept_and_restored(before: Any, after: Any) -> None:
    one, successor = optimizer(), optimizer()
    for each in (one, successor):
        each.param_groups[0]["value"] = before
    values = GroupValues(one)

    one.param_groups[0]["value"] = after
    text = values.text()
    GroupValues(successor).restore(text)

    assert same(successor.param_groups[0]["value"], after)
    assert bool(text) != same(before, after)


def test_values_that_were_removed_stay_removed_and_rates_are_none_of_them() -> None:
    one, successor = optimizer(), optimizer()
    values = GroupValues(one)

    one.param_groups[0]["lr"] = 0.7
    del one.param_groups[0]["nesterov"]
    GroupValues(successor).restore(values.text())

    assert "nesterov" not in successor.param_groups[0]
    assert successor.param_groups[0]["lr"] == 0.1


def test_a_value_that_changed_once_is_kept_though_it_came_back() -> None:
    one = optimizer()
    one.param_groups[0]["count"] = 0
    values = GroupValues(one)
    one.param_groups[0]["count"] = 1
    values.text()

    one.param_groups[0]["count"] = 0

    assert values.text() == b'[[0,"count",0]]'


def test_changed_groups_are_refused() -> None:
    one = optimizer()
    values = GroupValues(one)
    one.add_param_group({"params": [nn.Parameter(torch.ones(1))]})

    with pytest.raises(UserCodeError, match="adds or drops parameter groups"):
        values.text()


def test_tensors_of_groups_are_found_wherever_they_are() -> None:
    parameter, a, b = nn.Parameter(torch.ones(2)), torch.ones(3), torch.ones(4)
    group = {
        "params": [parameter],
        "lr": torch.ones(()),
        "x": [a, {"y": (b, parameter)}],
    }

    assert [t.numel() for t in tensors_of(group)] == [3, 4]


def test_nothing_of_torchs_own_is_told_apart_by_what_it_holds() -> None:
    encoder = Encoder(CPU)

    encoder.encode(nn.Parameter(torch.tensor(math.nan)))

    assert not encoder.lossless
