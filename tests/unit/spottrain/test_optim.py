"""Parameter groups."""

from __future__ import annotations

import pytest
import torch
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
