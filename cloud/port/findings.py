"""Finding out, without renting, whether one thing is as a job needs it."""

from __future__ import annotations

from collections.abc import Callable

from spottrain.cloud.port.provider import Finding
from spottrain.errors import SpottrainError


def run_check(what: str, ask: Callable[[], str], one_of: str = "") -> Finding:
    """Return what ``ask`` tells, or the error that it raises; see ``Finding``."""
    try:
        return Finding(what=what, ok=True, told=ask(), one_of=one_of)
    except SpottrainError as error:
        return Finding(what=what, ok=False, told=str(error), one_of=one_of)
