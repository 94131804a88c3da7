from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from spottrain.pipeline.base import loss_scale
from spottrain.pipeline.base.loss_scale import FIRST, GROWTH_STEPS, LossScale


@given(
    st.lists(st.booleans(), max_size=40),
    st.integers(GROWTH_STEPS - 10, GROWTH_STEPS - 1),
)
def test_the_scale_follows_torchs_grad_scaler(overflows: list[bool], good: int) -> None:
    """Its own update kernel, which runs on the CPU too."""
    ours = LossScale(FIRST.exponent, good)
    scale = torch.tensor(2.0**ours.exponent)
    tracker = torch.tensor(good, dtype=torch.int32)

    for overflow in overflows:
        ours = ours.after(overflow)
        found = torch.tensor(float(overflow))
        torch._amp_update_scale_(scale, tracker, found, 2.0, 0.5, GROWTH_STEPS)
        if not loss_scale.MIN_EXPONENT < ours.exponent < loss_scale.MAX_EXPONENT:
            return
        assert (2.0**ours.exponent, ours.good_steps) == (scale.item(), tracker.item())


@given(st.lists(st.booleans(), max_size=200))
def test_the_scale_keeps_its_bounds(overflows: list[bool]) -> None:
    scale = FIRST
    for overflow in overflows:
        scale = scale.after(overflow)
        assert loss_scale.MIN_EXPONENT <= scale.exponent <= loss_scale.MAX_EXPONENT
