"""Numbers that are contents of a section, beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from spottrain.errors import UserCodeError
from spottrain.pipeline.base.loss_scale import FIRST, LossScale

EXPONENTS, LOSS_SCALE, GROUPS = "//exponents", "//loss_scale", "//param_groups"
EVALUATION, DELAYED_EXPONENTS = "//evaluation", "//delayed_exponents"
NAMES = frozenset({EXPONENTS, DELAYED_EXPONENTS, LOSS_SCALE, GROUPS, EVALUATION})
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

    They move, are undone and saved with the parameters, all but what is prepared, which
    belongs to the gradients. All zeros mean that there are none yet.

    Args:
        memory: At least ``size`` bytes.
        num_gradients: Parameters of the section that are trained.
        group_bytes: Of the tensors in its optimizer's parameter groups.
        versions: Of the exponents, as of the parameters.
    """

    _SCALE, _GOOD_STEPS, _EVALUATION = range(3)
    _GROUPS_LENGTH, _EXPONENTS = 6, 7
    _BIAS = 1 << 12
    """Added to exponents, so that they are above zero."""

    def __init__(
        self,
        memory: torch.Tensor,
        num_gradients: int,
        group_bytes: int,
        versions: int = 1,
    ) -> None:
        size = self.size(num_gradients, group_bytes, versions)
        every = memory[:size].view(torch.int64).data
        delayed = self._EXPONENTS + num_gradients
        with_state = self._EXPONENTS + versions * num_gradients
        groups = with_state + num_gradients
        committed = groups + self._groups_words(num_gradients, group_bytes)
        self._every = every
        self.contents = every[:committed].view(torch.uint8)
        self._flags = every[: self._EXPONENTS]
        self._scale = every[self._SCALE : self._EVALUATION]
        self._evaluation = every[self._EVALUATION : self._GROUPS_LENGTH]
        self._committed = every[self._EXPONENTS : delayed]
        self._delayed = every[delayed:with_state]
        """Exponents of the version before; empty where one only is kept."""
        self._with_state = every[with_state:groups]
        self._groups = every[groups:committed].view(torch.uint8)
        self._prepared = every[committed : committed + num_gradients]
        self._lacking = every[committed + num_gradients :]

    @staticmethod
    def _groups_words(num_gradients: int, group_bytes: int) -> int:
        """Return the words for what steps change of parameter groups, as text.

        It is some hundred bytes for each group, of which there are seldom more than
        parameters, and tensors in base64. Not more is known before training.
        """
        return 2048 + 512 * num_gradients + group_bytes // 4

    @classmethod
    def size(cls, num_gradients: int, group_bytes: int, versions: int = 1) -> int:
        """Return the bytes of all numbers."""
        groups = cls._groups_words(num_gradients, group_bytes)
        exponents = (versions + 1) * num_gradients
        flags = 2 * num_gradients
        return (cls._EXPONENTS + exponents + flags + groups) * torch.int64.itemsize

    @property
    def with_state(self) -> list[bool]:
        """Whether the optimizer has made its state for each parameter that is trained,
        which it does when a parameter has its first gradient."""
        return [bool(flag) for flag in self._with_state.tolist()]

    @with_state.setter
    def with_state(self, flags: Sequence[bool]) -> None:
        self._with_state.copy_(torch.tensor(flags, dtype=torch.int64))

    @property
    def lacking(self) -> list[bool]:
        """Whether no backward of the prepared mini-batch gave a parameter a gradient."""
        return [bool(flag) for flag in self._lacking.tolist()]

    @lacking.setter
    def lacking(self, flags: Sequence[bool]) -> None:
        self._lacking.copy_(torch.tensor(flags, dtype=torch.int64))

    @property
    def loss_scale(self) -> LossScale:
        """The loss scale after the last update, where losses are scaled."""
        exponent, good_steps = self._scale.tolist()
        if not exponent:
            return FIRST
        return LossScale(exponent - self._BIAS, good_steps)

    @loss_scale.setter
    def loss_scale(self, scale: LossScale) -> None:
        values = scale.exponent + self._BIAS, scale.good_steps
        self._scale[:] = torch.tensor(values)

    @property
    def evaluation(self) -> EvaluationRecord:
        """What the evaluations up to here have shown."""
        step, _, best_step, without = self._evaluation.tolist()
        best = float(self._evaluation[1:2].view(torch.float64))
        return EvaluationRecord(step, best, best_step, without)

    @evaluation.setter
    def evaluation(self, record: EvaluationRecord) -> None:
        best = torch.tensor([record.best], dtype=torch.float64).view(torch.int64)
        values = record.step, int(best), record.best_step, record.without_improvement
        self._evaluation[:] = torch.tensor(values)

    @property
    def group_values(self) -> bytes:
        """What steps have changed of the optimizer's parameter groups.

        Raises:
            UserCodeError: It is set to more than there is room for.
        """
        return self._groups_text().numpy().tobytes()

    @group_values.setter
    def group_values(self, text: bytes) -> None:
        if len(text) > self._groups.numel():
            raise UserCodeError(
                "values in param_groups that the optimizer changes must not grow: got "
                f"{len(text)} bytes, more than {self._groups.numel()}; keep large tensors "
                "in optimizer.state"
            )
        if text:
            encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self._groups[: len(text)] = encoded
        self._flags[self._GROUPS_LENGTH] = len(text)

    def _groups_text(self) -> torch.Tensor:
        return self._groups[: int(self._flags[self._GROUPS_LENGTH])]

    @property
    def exponents(self) -> list[int | None]:
        """Of the gradients' fixed point after the last update, where there are any."""
        return self._read(self._committed)

    @property
    def delayed_exponents(self) -> list[int | None]:
        """The same of the version before, where two are kept."""
        return self._read(self._delayed)

    def _read(self, exponents: torch.Tensor) -> list[int | None]:
        return [one - self._BIAS if one else None for one in exponents.tolist()]

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
        if self._delayed.numel():
            self._delayed.copy_(self._committed)
        if changes:
            self._committed.copy_(self._prepared)

    def copy_from(self, other: SectionNumbers) -> None:
        """Take over all numbers of the same section."""
        self._every.copy_(other._every)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the numbers that a checkpoint must hold, by name."""
        kept = {**self._kept(), GROUPS: self._groups_text()}
        return {name: values for name, values in kept.items() if values.any()}

    def _kept(self) -> dict[str, torch.Tensor]:
        return {
            EXPONENTS: self._committed,
            DELAYED_EXPONENTS: self._delayed,
            LOSS_SCALE: self._scale,
            EVALUATION: self._evaluation,
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
        if (given := tensors.get(GROUPS)) is not None:
            if given.dtype != torch.uint8 or given.numel() > self._groups.numel():
                raise ValueError(GROUPS)
            self.group_values = given.numpy().tobytes()
