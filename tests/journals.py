"""What tests know of how a journal keeps what was decided."""

from __future__ import annotations

import json
from typing import TypeVar

from spottrain.eventlog.difference import apply, difference
from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.journal import Step

T = TypeVar("T")


def decision(before: object, after: object) -> str:
    """Return what leads from one state to the next, as a journal keeps it."""
    return json.dumps(difference(before, after))


def decided(before: T, text: str) -> T:
    """Return the state that a decision leads to."""
    return apply(before, json.loads(text))


def noted(*events: Event) -> list[Step]:
    """Return events of which nothing follows."""
    return [Step(State(), event, State()) for event in events]
