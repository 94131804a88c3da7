"""Floating-point operations of training, and the share of peak that they come to.

A FLOP is one addition or multiplication, whatever its precision. Only those of matrix
multiplications count, a multiplication of m x k by k x n as 2mkn, and attention over the
whole square even where a mask hides half of it (Narayanan's dissertation, 4.5.1). So
they are a lower bound that is close.

- Model FLOPs: forward and backward, the latter as twice the former; of a model whose
  parameters are partly frozen that is an upper bound.
- Hardware FLOPs: the forwards that recompute runs again as well.
- Model FLOPs utilisation (MFU): model FLOPs per second over the devices' published peak
  at the precision of the matrix multiplications, without sparsity. It is of these that
  Varuna gives TFLOP/s: without the cost of recompute, so that only useful work is
  captured (section 7.1). Hardware FLOPs utilisation (HFU): the same of hardware FLOPs;
  the dissertation's percentages are these, for its equation 4.2 counts the recomputed
  forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.wire.model import ModelFacts

MODEL_PASSES = 3
"""Model FLOPs in forwards: the forward, and the backward by inputs and by weights."""


def model_flops_per_example(facts: ModelFacts) -> int | None:
    """Return the model FLOPs of training on one example.

    Returns:
        None if the facts of a section do not have them.
    """
    forward = 0
    for section in facts.sections:
        if section.flops_per_example is None:
            return None
        forward += section.flops_per_example
    return MODEL_PASSES * forward


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeUse:
    """FLOPs that devices computed, and that they could have at their peak."""

    flops: float
    """Model or hardware FLOPs."""
    device_s: float
    """Time that it took, summed over devices; above 0."""
    peak_flops: float | None
    """Of those devices in that time; ``None``: the peak of one is not published."""

    def __add__(self, other: ComputeUse) -> ComputeUse:
        peaks = self.peak_flops, other.peak_flops
        return ComputeUse(
            flops=self.flops + other.flops,
            device_s=self.device_s + other.device_s,
            peak_flops=None if None in peaks else sum(p or 0.0 for p in peaks),
        )

    def times(self, number: int) -> ComputeUse:
        """Return the use of so many equal pieces of work; ``number`` is above 0."""
        peak = self.peak_flops
        return ComputeUse(
            flops=self.flops * number,
            device_s=self.device_s * number,
            peak_flops=None if peak is None else peak * number,
        )

    @property
    def flops_per_s(self) -> float:
        """Of each device."""
        return self.flops / self.device_s

    @property
    def utilisation(self) -> float | None:
        """Share of peak: MFU of model FLOPs, HFU of hardware FLOPs."""
        return None if self.peak_flops is None else self.flops / self.peak_flops


def training_use(
    facts: ModelFacts,
    examples: float,
    seconds: float,
    peaks_per_s: Sequence[float | None],
) -> ComputeUse | None:
    """Return the model FLOPs of training on examples.

    Args:
        facts: The model.
        examples: That all devices together trained on.
        seconds: Time that it took; above 0.
        peaks_per_s: Peak FLOP/s of each device; None: not published.

    Returns:
        None if the model's FLOPs are not known, or there are no devices.
    """
    flops = model_flops_per_example(facts)
    if flops is None or not peaks_per_s:
        return None
    known = [peak for peak in peaks_per_s if peak is not None]
    return ComputeUse(
        flops=flops * examples,
        device_s=seconds * len(peaks_per_s),
        peak_flops=seconds * sum(known) if len(known) == len(peaks_per_s) else None,
    )
