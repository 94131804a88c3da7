"""Numbers that are contents of a section, beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spottrain.pipeline.base.loss_scale import FIRST, LossScale

EXPONENTS, LOSS_SCALE = "//exponents", "//loss_scale"
EVALUATION = "//evaluation"
"""Their names in checkpoints: of no single parameter."""


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """What is remembered from one evaluation of held-out sets to the next."""

    step: int = 0
    """Of the newest one; 0: there was none yet."""
    best: float = 0.0
    """Best value of the decisive metric."""
    best_step: int = 0
    """Step of its weights; 0: none yet."""
    without_improvement: int = 0
    """Evaluations since then."""


class SectionNumbers:
    """Numbers of a section's contents, in host memory wherever its tensors are.

    They move, are undone and saved with the parameters, all but ``prepared``, which
    belongs to the gradients. All zeros mean that there are none yet.

    Args:
        memory: At least ``size`` bytes.
        num_gradients: Parameters of the section that are trained.
    """

    _HAS_STATE, _SCALE, _GOOD_STEPS, _EVALUATION = range(4)
    _EXPONENTS = 7
    _BIAS = 1 << 12
    """Added to exponents, so that they are above zero."""

    def __init__(self, memory: torch.Tensor, num_gradients: int) -> None:
        every = memory[: self.size(num_gradients)].view(torch.int64).data
        committed = self._EXPONENTS + num_gradients
        self._every = every
        self.contents = every[:committed].view(torch.uint8)
        self._flags = every[: self._EXPONENTS]
        self._committed = every[self._EXPONENTS : committed]
        self._prepared = every[committed:]

    @classmethod
    def size(cls, num_gradients: int) -> int:
        """Return the bytes of all numbers."""
        return (cls._EXPONENTS + 2 * num_gradients) * torch.int64.itemsize

    @property
    def has_state(self) -> bool:
        """True if the optimizer has made its state, which its first update does."""
        return bool(self._flags[self._HAS_STATE])

    @has_state.setter
    def has_state(self, has_state: bool) -> None:
        self._flags[self._HAS_STATE] = has_state

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale after the last update, where losses are scaled."""
        exponent, good_steps = self._flags[self._SCALE : self._EVALUATION].tolist()
        if not exponent:
            return FIRST
        return LossScale(exponent - self._BIAS, good_steps)

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        values = scale.exponent + self._BIAS, scale.good_steps
        self._flags[self._SCALE : self._EVALUATION] = torch.tensor(values)

    @property
    def evaluation(self) -> EvaluationRecord:
        """What the evaluations up to here have shown."""
        values = self._flags[self._EVALUATION :]
        step, _, best_step, without = values.tolist()
        best = float(values[1:2].view(torch.float64))
        return EvaluationRecord(step, best, best_step, without)

    @evaluation.setter
    def evaluation(self, record: EvaluationRecord) -> None:
        best = torch.tensor([record.best], dtype=torch.float64).view(torch.int64)
        values = record.step, int(best), record.best_step, record.without_improvement
        self._flags[self._EVALUATION :] = torch.tensor(values)

    @property
    def exponents(self) -> list[int | None]:
        """Of the gradients' fixed point after the last update, where there are any."""
        return [one - self._BIAS if one else None for one in self._committed.tolist()]

    def prepare(self, exponents: Sequence[int | None]) -> None:
        """Keep the exponents that the prepared gradients lead to."""
        values = [0 if one is None else one + self._BIAS for one in exponents]
        self._prepared.copy_(torch.tensor(values, dtype=torch.int64))

    def update(self, *, overflow: bool, changes: bool, scaled: bool) -> None:
        """Commit what a decided mini-batch leads to.

        Args:
            overflow: As in the decision.
            changes: Whether the mini-batch changes parameters.
            scaled: Whether its losses were scaled.
        """
        if scaled:
            self.loss_scale = self.loss_scale.after(overflow)
        if changes:
            self._committed.copy_(self._prepared)

    def copy_from(self, other: SectionNumbers) -> None:
        """Take over all numbers of the same section."""
        self._every.copy_(other._every)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the numbers that a checkpoint must hold, by name."""
        return {name: values for name, values in self._kept().items() if values.any()}

    def _kept(self) -> dict[str, torch.Tensor]:
        return {
            EXPONENTS: self._committed,
            LOSS_SCALE: self._flags[self._SCALE : self._EVALUATION],
            EVALUATION: self._flags[self._EVALUATION :],
        }

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Set all numbers to those of a checkpoint; without any they are as if new.

        Raises:
            ValueError: There are more or fewer of them.
        """
        self.contents.zero_()
        for name, values in self._kept().items():
            if (given := tensors.get(name)) is not None:
                if given.shape != values.shape or given.dtype != values.dtype:
                    raise ValueError(name)
                values.copy_(given)
