"""``fixed_point.add`` as one kernel: it reads a gradient once, and reads and writes its sum.

Import it where triton is, as with torch for GPUs.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, unused-ignore]

_BLOCK = 1024
_EXPONENT_BIAS, _MANTISSA_BITS = 1023, 52
"""Of a float64."""


@triton.jit(do_not_specialize=["count", "factor"])  # type: ignore[untyped-decorator, unused-ignore]
def _add(total, gradient, peak, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float64)
    # As integers, magnitudes have the order of their bits.
    is_number = value == value  # noqa: PLR0124
    magnitude = tl.where(is_number, tl.abs(value), float("inf"))
    tl.atomic_max(peak, tl.max(magnitude, axis=0).to(tl.int64, bitcast=True))
    scaled = value * factor.to(tl.float64, bitcast=True)
    # To the nearest integer, half to even: from 2**52 on all are integers.
    shift = tl.where(scaled < 0, -4503599627370496.0, 4503599627370496.0).to(tl.float64)
    whole = tl.abs(scaled) >= 4503599627370496.0
    rounded = tl.where(whole, scaled, (scaled + shift) - shift)
    before = tl.load(total + at, mask=inside, other=0)
    tl.store(total + at, before + rounded.to(tl.int64), mask=inside)


def add(total: torch.Tensor, gradient: torch.Tensor, used: int, peak: torch.Tensor) -> None:
    """See ``fixed_point.add``; a peak that is not a number becomes infinite."""
    flat = gradient.detach().reshape(-1)
    if count := flat.numel():
        factor = (used + _EXPONENT_BIAS) << _MANTISSA_BITS  # a float of Python's would be float32
        blocks = (triton.cdiv(count, _BLOCK),)
        _add[blocks](total, flat, peak.view(torch.int64), count, factor, BLOCK=_BLOCK)
