"""The memory format in which activations and their gradients go from section to section.

It decides on kernels, hence on bits: within a worker they are laid out as if they were sent.
"""

from __future__ import annotations

import torch

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions."""


def format_of(tensor: torch.Tensor) -> torch.memory_format:
    """Return the format that a tensor keeps: channels last, or contiguous."""
    last = _CHANNELS_LAST.get(tensor.dim())
    if last is None or tensor.is_contiguous() or not tensor.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as whoever receives it has it."""
    return tensor.contiguous(memory_format=format_of(tensor))
