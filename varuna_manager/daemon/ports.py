"""What the parts of the daemon need of the manager's loop."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.state import State


class EventSink(Protocol):
    """Takes the events that effects, pollers and watches have found."""

    @property
    def state(self) -> State:
        """The current state."""

    def now_s(self) -> float:
        """Seconds since the epoch, by the manager's clock."""

    def feed(self, event: Event) -> asyncio.Future[Any]:
        """Queue an event; the future is done once it is journalled."""
