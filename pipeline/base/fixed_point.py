"""Fixed point for sums of gradients: exact, hence the same in any order.

A gradient ``g`` becomes the integer ``round(g * 2**exponent)``, one exponent per tensor.
Sums of 64-bit integers have the same bits for every order, schedule and plan, and take
the same memory however many virtual nodes there are. An exponent is a pure function of
the committed one and the attempt, so that whoever computes a mini-batch again rounds as
before. Whether a tensor is in range depends on the single virtual nodes, never on a sum,
hence not on the plan. A tensor that is out of range is no error: the mini-batch is
computed again with the next attempt's exponents.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable

import torch

SUM_BITS = 62
"""Magnitude of a sum of all virtual nodes: two bits below overflow."""
HEADROOM_BITS = 12
"""How much larger than in the mini-batch before a gradient may be at the first try."""
FIRST_BITS = 8
"""Magnitude of gradients that the first mini-batch allows for at its first try."""
ATTEMPT_BITS = 16
"""Magnitude that each attempt adds."""
MAX_ATTEMPTS = 9
"""The last one takes any finite gradient."""
MAX_EXPONENT = 800
"""Bound on exponents: no finite float32 times 2**800 overflows a float64."""
ZERO, NOT_FINITE = -(1 << 20), 1 << 20
"""Magnitudes of tensors that are all zeros, or hold an infinity or no number."""

_PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements converted at a time: temporaries stay in a processor's cache, or small."""


def limit_bits(virtual_nodes: int) -> int:
    """Return the magnitude that one virtual node's integers may have.

    Args:
        virtual_nodes: Of a mini-batch.
    """
    return SUM_BITS - (virtual_nodes - 1).bit_length()


def exponent(committed: int | None, attempt: int, virtual_nodes: int, dtype: torch.dtype) -> int:
    """Return the exponent of a tensor.

    Args:
        committed: Its exponent after the mini-batch before; ``None``: there is none.
        attempt: From 0 up to ``MAX_ATTEMPTS``, exclusive.
        virtual_nodes: Of a mini-batch.
        dtype: Of its gradients.
    """
    limit = limit_bits(virtual_nodes)
    if attempt == MAX_ATTEMPTS - 1:
        return limit - math.frexp(torch.finfo(dtype).max)[1]
    begin = limit - FIRST_BITS if committed is None else committed
    return begin - ATTEMPT_BITS * attempt


def next_exponent(committed: int | None, magnitude: int, virtual_nodes: int) -> int | None:
    """Return the exponent to commit after a mini-batch.

    Args:
        committed: The exponent committed before.
        magnitude: ``magnitudes`` of the tensor, the highest of all virtual nodes.
        virtual_nodes: Of a mini-batch.
    """
    if magnitude == ZERO:
        return committed
    wanted = limit_bits(virtual_nodes) - HEADROOM_BITS - magnitude
    return min(wanted, MAX_EXPONENT)


def in_range(magnitude: int, used: int, virtual_nodes: int) -> bool:
    """Return whether integers of a tensor can be summed; True if it is not finite."""
    return magnitude == NOT_FINITE or magnitude + used <= limit_bits(virtual_nodes)


def magnitudes(peaks: torch.Tensor) -> torch.Tensor:
    """Return the least integers e with ``peak < 2**e``, of any shape, as int64.

    Args:
        peaks: Largest absolute values, as float64; nan: not a number was among them.
    """
    _, exponents = torch.frexp(peaks)
    found = exponents.to(torch.int64)
    found = torch.where(peaks == 0, ZERO, found)
    return torch.where(torch.isfinite(peaks), found, NOT_FINITE)


def peak(gradient: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value as a float64 scalar; nan if there is one."""
    if not gradient.numel():
        return torch.zeros((), dtype=torch.float64, device=gradient.device)
    low, high = torch.aminmax(gradient)
    return torch.maximum(-low, high).double()


def add_quantised(total: torch.Tensor, gradient: torch.Tensor, used: int) -> None:
    """Add a gradient to a sum; one that is out of range leaves it undefined.

    Args:
        total: Flat int64 sum.
        gradient: As many elements, in the same order.
        used: The exponent.
    """
    elements = _PIECE_ELEMENTS[gradient.device.type]
    pieces = torch.split(gradient.detach().reshape(-1), elements)
    for part, piece in zip(torch.split(total, elements), pieces, strict=True):
        part.add_(piece.to(torch.float64, copy=True).mul_(2.0**used).round_().long())


Adder = Callable[[torch.Tensor, torch.Tensor, int, torch.Tensor], None]
"""``add``, or what gives the same bits."""


def add(total: torch.Tensor, gradient: torch.Tensor, used: int, highest: torch.Tensor) -> None:
    """Add a gradient to a sum, and note its peak.

    Args:
        total: As for ``add_quantised``.
        gradient: To be added.
        used: The exponent.
        highest: Largest ``peak`` so far, a float64 scalar.
    """
    torch.maximum(highest, peak(gradient), out=highest)
    add_quantised(total, gradient, used)


@functools.cache
def adder(device: torch.device, dtype: torch.dtype) -> Adder:
    """Return what adds gradients of a type on a device: one kernel if there is one and it
    gives the bits of ``add`` on this very device, else ``add``."""
    if device.type != "cuda":
        return add
    try:
        fused: Adder = importlib.import_module("spottrain.pipeline.base.triton_sums").add
        return fused if agrees(fused, device, dtype) else add
    except Exception:  # noqa: BLE001 - whatever keeps a compiler from working, sums are the same
        return add


def agrees(one: Adder, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether an adder gives the bits of ``add`` for gradients of a type."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-18, 12, (5000,), generator=generator)
    values = torch.ldexp(torch.randn(5000, generator=generator), exponents).to(dtype)
    halves = torch.arange(-8, 9) / 2
    for used in (-10, 0, 3, 40):
        ties = torch.ldexp(halves, torch.tensor(-used)).to(dtype)
        gradient = torch.cat([values, ties, -values.new_zeros(1)]).to(device)
        sums = torch.arange(2 * len(gradient), device=device).view(2, -1)
        sums[1] = sums[0]
        peaks = torch.zeros(2, dtype=torch.float64, device=device)
        for adds, total, highest in zip((add, one), sums, peaks, strict=True):
            for _ in range(2):
                adds(total, gradient, used, highest)
        if not (torch.equal(*sums) and torch.equal(*peaks)):
            return False
    for value in (math.inf, -math.inf, math.nan):
        gradient = torch.tensor([1.0, value, 0.0], dtype=dtype, device=device)
        highest = torch.zeros((), dtype=torch.float64, device=device)
        one(torch.zeros(3, dtype=torch.int64, device=device), gradient, 0, highest)
        if torch.isfinite(highest):
            return False
    return True


def dequantise(total: torch.Tensor, used: int, target: torch.Tensor) -> None:
    """Write a sum into ``target``, rounded to its type.

    Args:
        total: Flat int64 sum.
        used: The exponent.
        target: As many elements; it may begin where ``total`` does in memory, whose first
            pieces are then written over once they are read.
    """
    elements = _PIECE_ELEMENTS[total.device.type]
    for part, piece in zip(
        torch.split(target.view(-1), elements),
        torch.split(total, elements),
        strict=True,
    ):
        part.copy_(piece.double().mul_(2.0**-used))
