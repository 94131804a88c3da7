"""Parameter groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from spottrain import optim
from spottrain.errors import UserCodeError


def test_matrices_decay_and_vectors_do_not() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    named = list(model.named_parameters())
    decayed, others = optim.decay_groups(named, 0.1)
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4), (3, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (3,)]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    decayed, _ = optim.decay_groups(named, 0.1, no_decay=("0.*",))
    assert [tuple(p.shape) for p in decayed["params"]] == [(3, 4)]


def test_a_section_may_lack_one_of_the_groups() -> None:
    norm = nn.LayerNorm(4)
    optimizer = torch.optim.AdamW(optim.decay_groups(norm.named_parameters(), 0.1))
    norm(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 2]


def test_the_moving_average_is_that_of_torch() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = optim.keep_ema(torch.optim.AdamW(model.parameters(), lr=0.1), 0.9)
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(2, 4)).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
    for ours, expected in zip(model.parameters(), averaged.module.parameters(), strict=True):
        torch.testing.assert_close(optimizer.state[ours]["ema"], expected.detach())


def test_a_decay_beyond_1_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)])
    with pytest.raises(UserCodeError, match="from 0 to 1: got 2"):
        optim.keep_ema(optimizer, 2)


class Sets(torch.optim.Optimizer):
    """Sets its parameters, and notes what they were."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {})
        self.wanted = self.seen = torch.zeros(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (parameter,) = self.param_groups[0]["params"]
        self.seen = parameter.clone()
        parameter.copy_(self.wanted)


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_a_parameter_of_16_bits_and_its_low_bits_are_its_master(numbers: list[float]) -> None:
    parameter = nn.Parameter(torch.zeros(len(numbers), dtype=torch.bfloat16))
    sets = Sets([parameter])
    optimizer = optim.keep_masters(sets)
    sets.wanted = torch.tensor(numbers, dtype=torch.float32)
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    torch.testing.assert_close(sets.seen, sets.wanted, rtol=0, atol=0)
    below = (sets.wanted.double() - parameter.double()).abs()
    nearest = (sets.wanted.double() - sets.wanted.bfloat16().double()).abs()
    assert torch.equal(below, nearest)
    assert parameter.grad is not None
    assert parameter.dtype is parameter.grad.dtype is torch.bfloat16


def test_masters_are_updated_as_parameters_of_fp32_are() -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 30).bfloat16()
    weights = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = optim.keep_masters(torch.optim.AdamW(model.parameters(), lr=1e-5))
    reference = torch.optim.AdamW(weights, lr=1e-5)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(20):
        for parameter, master in zip(model.parameters(), weights, strict=True):
            parameter.grad = torch.randn_like(parameter)
            master.grad = parameter.grad.float()
        optimizer.step()
        reference.step()
    for parameter, master, old in zip(model.parameters(), weights, before, strict=True):
        low = optimizer.state[parameter]["low_bits"]
        high = parameter.detach().view(torch.int16).int() << 16
        assert torch.equal((high + low).view(torch.float32), master)
        assert not torch.equal(parameter, old)  # steps too small for bf16 add up
        assert optimizer.state[parameter]["exp_avg"].dtype is torch.float32


def test_parameters_of_other_types_and_without_gradients_have_no_masters() -> None:
    wide, narrow = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).bfloat16())
    optimizer = optim.keep_masters(torch.optim.SGD([wide, narrow], lr=0.5))
    wide.grad = torch.ones(2)
    optimizer.step()
    assert wide.tolist() == [0.5, 0.5]
    assert narrow.tolist() == [1, 1]
    assert not optimizer.state
