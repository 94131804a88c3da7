"""What the user's loss returns: sums that are folded over a mini-batch."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.job import Real

MAX_METRICS = 200
"""The commit record of a mini-batch is one page of memory."""


class LossSums(NamedTuple):
    """Sums over the examples of a micro-batch."""

    loss: torch.Tensor
    """Sum of losses; backwards begin here."""
    weight: Real
    """Sum of weights."""
    metrics: Mapping[str, tuple[Real, Real]]
    """(sum, weight) of everything else that was measured, by name."""

    def values(self, names: Sequence[str]) -> list[Real]:
        """Return loss, weight, then sum and weight of every metric in ``names``.

        One that was not measured has weight 0.

        Raises:
            UserCodeError: There are metrics beside those in ``names``.
        """
        if unknown := sorted(set(self.metrics) - set(names)):
            known = ", ".join(names) or "none"
            raise UserCodeError(
                f"loss returned the metric {unknown[0]}, which it did not return for the "
                f"first example of the data set: {known}; return every metric each time, "
                "with weight 0 where there is nothing to measure"
            )
        pairs = (self.metrics.get(name, (0.0, 0.0)) for name in names)
        return [self.loss.detach(), self.weight, *(x for pair in pairs for x in pair)]


def loss_sums(result: Any) -> LossSums:
    """Check what the user's loss has returned.

    Raises:
        UserCodeError: It is not (scalar tensor, number or scalar tensor), with or without
            a third value, {name: (number or scalar tensor, number or scalar tensor)}.
    """
    parts = result if isinstance(result, tuple) and len(result) in (2, 3) else (None,)
    loss, weight, metrics = (*parts, {}, {})[:3]
    if not (isinstance(loss, torch.Tensor) and loss.dim() == 0 and _is_real(weight)):
        raise UserCodeError(
            "loss must return (sum of losses as a scalar tensor, sum of weights), or "
            "those and {name of a metric: (its sum, its sum of weights)}: got "
            f"{_describe(result)}; of a mean over n examples or tokens, return (mean * n, n)"
        )
    if not isinstance(metrics, Mapping):
        raise UserCodeError(
            "the third value that loss returns must be {name of a metric: (its sum, its "
            f"sum of weights)}}: got {_describe(metrics)}"
        )
    if len(metrics) > MAX_METRICS:
        raise UserCodeError(f"loss may return at most {MAX_METRICS} metrics: got {len(metrics)}")
    pairs = {name: _metric(name, pair) for name, pair in metrics.items()}
    return LossSums(loss, _detached(weight), pairs)


def check_leads_back(loss: torch.Tensor) -> None:
    """Check that a backward can begin at a loss.

    Raises:
        UserCodeError: It depends on no parameter that is trained.
    """
    if not loss.requires_grad:
        raise UserCodeError(
            "loss must return a sum that leads back to the model's parameters: it has "
            "no gradient; return it as it was computed, without .detach(), .item(), "
            "torch.tensor(...) or torch.no_grad() on the way"
        )


def _metric(name: Any, pair: Any) -> tuple[Real, Real]:
    if not isinstance(name, str) or not name or name == "loss":
        raise UserCodeError(
            f"a metric must have a name of its own, which is not 'loss': got {name!r}"
        )
    if not (isinstance(pair, tuple) and len(pair) == 2 and all(map(_is_real, pair))):
        raise UserCodeError(
            f"metric {name} must be (sum, sum of weights), scalar tensors or numbers: got "
            f"{_describe(pair)}"
        )
    return _detached(pair[0]), _detached(pair[1])


def _is_real(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, numbers.Real)


def _detached(value: Real) -> Real:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def _describe(result: Any) -> str:
    """Name the type of a value, of a tuple's parts and of a tensor's shape."""
    if isinstance(result, tuple):
        return f"({', '.join(map(_describe, result))})"
    if isinstance(result, torch.Tensor):
        return f"tensor of shape {tuple(result.shape)}"
    return type(result).__name__
