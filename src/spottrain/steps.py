"""The mini-batch that the user's code works for; standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_step: int | None = None
"""Of the process, not of a thread: backwards on a GPU run in threads of autograd's."""


def step() -> int | None:
    """Return the number of the mini-batch that is being trained; 0 is the first.

    For ``dataset``, ``collate`` and ``loss`` of a ``TrainingJob``, e.g. to lengthen sequences
    as training goes on. The same in every plan, and again when a mini-batch is repeated.
    ``spottrain inspect`` shows them step 0; shapes of activations must not depend on it.

    Returns:
        ``None`` in evaluations and outside of training.
    """
    return _step


@contextmanager
def at_step(number: int) -> Iterator[None]:
    """Let ``step`` return ``number`` within."""
    global _step
    before, _step = _step, number
    try:
        yield
    finally:
        _step = before
