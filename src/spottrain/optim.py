"""Helpers for ``optimizer`` of a ``TrainingJob``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spottrain.errors import UserCodeError

EMA = "ema"
"""Name of the average in the state of a parameter."""
LOW_BITS = "low_bits"
"""Name of the rest of a master in the state of a parameter."""


def decay_groups(
    named: Iterable[tuple[str, nn.Parameter]],
    weight_decay: float,
    *,
    no_decay: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay.

    Matrices and everything of more dimensions decay; vectors and scalars, which are biases
    and the weights of norms, do not (as in nanoGPT, ``configure_optimizers``).

    Args:
        named: (name, parameter) pairs, as ``optimizer`` gets them.
        weight_decay: Of the first group.
        no_decay: Patterns of further names that do not decay, such as ``"*embed*"``.

    Returns:
        Two groups, which may be empty, so that all sections have the same ones.
    """
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
    for name, parameter in named:
        spared = any(fnmatchcase(name, pattern) for pattern in no_decay)
        groups[parameter.dim() < 2 or spared].append(parameter)
    decayed, others = groups
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def keep_ema(optimizer: Optimizer, decay: float = 0.999) -> Optimizer:
    """Have an optimizer keep an exponential moving average of the weights.

    After the first step the average is the weights, after each further one ``decay *
    average + (1 - decay) * weights``, in fp32 (as ``torch.optim.swa_utils.AveragedModel``
    with ``get_ema_avg_fn``). It is state of the optimizer, ``state[parameter]["ema"]``, and
    so kept when machines are lost, moved, and saved in checkpoints; it takes the memory of
    the weights once more. ``spottrain export --ema`` writes it in place of the weights.
    A mini-batch that is skipped changes nothing.

    Args:
        optimizer: Any that a job may have.
        decay: From 0 to 1.

    Returns:
        ``optimizer``.
    """
    if not 0 <= decay <= 1:
        raise UserCodeError(f"decay of keep_ema must be from 0 to 1: got {decay}")

    @torch.no_grad()
    def update(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, weights = optimizer.state[parameter], parameter.detach().float()
                if EMA in state:
                    state[EMA].lerp_(weights, 1 - decay)
                else:
                    state[EMA] = weights.clone()

    optimizer.register_step_post_hook(update)
    return optimizer


def keep_masters(optimizer: Optimizer) -> Optimizer:
    """Have an optimizer update parameters in bf16 as if they were in fp32.

    A step of usual size is less than half of the last place of a bf16 parameter, and would
    be lost. So the sixteen bits of a master in fp32 that its parameter lacks are kept:
    ``state[parameter]["low_bits"]``, int16. Both together are the master to the last bit, for two bytes
    an element where a master of its own takes four (as ``store_param_remainders`` of Apex's
    ``DistributedFusedAdam``). In a step the optimizer sees masters and gradients in fp32 and
    makes its state in that type; the parameter becomes the master rounded to nearest, halves
    away from zero. Parameters of other types are left alone. As state of the optimizer masters are kept
    when machines are lost, moved, and saved in checkpoints. During the step of a section its masters
    and gradients in fp32 take 8 bytes an element.

    Args:
        optimizer: Any that a job may have.

    Returns:
        ``optimizer``.
    """
    widened: dict[nn.Parameter, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    """Weights, gradients and low bits of parameters that are in fp32 now."""

    @torch.no_grad()
    def widen(optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                weights, gradient = parameter.data, parameter.grad
                if gradient is None or weights.dtype is not torch.bfloat16:
                    continue
                # Optimizers take it from an empty state that they have to make theirs.
                low = optimizer.state[parameter].pop(LOW_BITS, None)
                if low is None:
                    low = torch.zeros_like(weights, dtype=torch.int16)
                widened[parameter] = weights, gradient, low
                master = weights.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
                parameter.grad = None  # a gradient has its parameter's type
                parameter.data = master.view(torch.float32)
                parameter.grad = gradient.float()

    @torch.no_grad()
    def narrow(optimizer: Optimizer, *_: object) -> None:
        for parameter, (weights, gradient, low) in widened.items():
            master = parameter.data.view(torch.int32)
            high = master.add(1 << 15).bitwise_right_shift_(16)
            weights.view(torch.int16).copy_(high)
            low.copy_(master.sub_(high.bitwise_left_shift_(16)))
            parameter.grad = None
            parameter.data = weights
            parameter.grad = gradient
            optimizer.state[parameter][LOW_BITS] = low
        widened.clear()

    optimizer.register_step_pre_hook(widen)
    optimizer.register_step_post_hook(narrow)
    return optimizer
