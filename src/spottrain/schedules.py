"""Learning-rate schedules, as ``lr_schedule`` of a ``TrainingJob``.

Each function here returns a pure function from a step (0 is the first) to the factor on
every learning rate. The number of steps is the job's, unless given: a job that is resumed
with another number (``spottrain resume --steps``) is asked for its schedule anew.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from spottrain.errors import UserCodeError

STEPS_VARIABLE = "SPOTTRAIN_STEPS"
"""Environment variable with the job's number of mini-batches, where user code runs."""

Schedule = Callable[[int], float]


def cosine(*, warmup_steps: float = 0, final: float = 0.0, steps: int | None = None) -> Schedule:
    """Return a schedule that falls along half a cosine.

    As ``get_cosine_with_min_lr_schedule_with_warmup`` of transformers (Loshchilov and
    Hutter, SGDR, 2017, equation 5, without restarts).

    Args:
        warmup_steps: Steps in which the factor grows linearly from 0 to 1; below 1,
            their share of all steps.
        final: Factor at the end.
        steps: Number of mini-batches; by default the job's.

    Raises:
        UserCodeError: An argument does not suit, or ``steps`` is not known.
    """
    total, warmup = _lengths(steps, warmup_steps, final)

    def fall(progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))

    return _schedule(warmup, warmup, total, fall, final)


def linear(*, warmup_steps: float = 0, final: float = 0.0, steps: int | None = None) -> Schedule:
    """Return a schedule that falls linearly; with ``final`` 0 as
    ``get_linear_schedule_with_warmup`` of transformers.

    Args and errors are those of ``cosine``.
    """
    total, warmup = _lengths(steps, warmup_steps, final)
    return _schedule(warmup, warmup, total, lambda progress: 1 - progress, final)


def wsd(
    *,
    decay_steps: float,
    warmup_steps: float = 0,
    final: float = 0.0,
    steps: int | None = None,
) -> Schedule:
    """Return a schedule that warms up, stays at 1, and falls linearly at the end.

    Warmup-stable-decay (Hu et al., MiniCPM, 2024, section 4), with the linear decay of
    Hägele et al., 2024, section 3; with ``final`` 0 as ``get_wsd_schedule`` of
    transformers with ``decay_type="linear"``.

    Args:
        decay_steps: Steps of the fall, which begins no earlier than the warm-up ends;
            below 1, their share of all steps.
        warmup_steps: As ``final`` and ``steps``, see ``cosine``.
        final: Factor at the end.
        steps: Number of mini-batches; by default the job's.

    Raises:
        UserCodeError: An argument does not suit, or ``steps`` is not known.
    """
    total, warmup = _lengths(steps, warmup_steps, final)
    begin = max(warmup, total - _number("decay_steps", decay_steps, total))
    return _schedule(warmup, begin, total, lambda progress: 1 - progress, final)


def _schedule(
    warmup: int, begin: int, end: int, fall: Callable[[float], float], final: float
) -> Schedule:
    """Return a schedule whose warm-up ends at one step, and that falls from ``begin`` on."""

    def factor(step: int) -> float:
        if step < warmup:
            return step / warmup
        if step < begin:
            return 1.0
        progress = min(1.0, (step - begin) / max(1, end - begin))
        return max(final, final + (1 - final) * fall(progress))

    return factor


def job_steps() -> int:
    """Return the job's number of mini-batches.

    Raises:
        UserCodeError: It is not known here.
    """
    text = os.environ.get(STEPS_VARIABLE)
    if text is None:
        raise UserCodeError(
            f"the number of steps is not known outside of a job: set {STEPS_VARIABLE}, "
            "or give steps= to the schedule"
        )
    return int(text)


def _lengths(steps: int | None, warmup_steps: float, final: float) -> tuple[int, int]:
    """Return the numbers of all steps and of those of the warm-up."""
    if steps is None:
        steps = job_steps()
    if not 0 <= final <= 1:
        raise UserCodeError(f"final must be from 0 to 1: got {final}")
    return steps, _number("warmup_steps", warmup_steps, steps)


def _number(name: str, value: float, steps: int) -> int:
    """Return a number of steps, which below 1 is a share, rounded up."""
    if value < 0 or (value > 1 and value != int(value)):
        raise UserCodeError(
            f"{name} must be a number of steps, or below 1 their share: got {value}"
        )
    return math.ceil(value * steps) if value < 1 else int(value)
