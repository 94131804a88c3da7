"""What the parts of the daemon need of the manager's loop: a leaf that they all import."""

from __future__ import annotations

import asyncio
from typing import Protocol

from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import State
from spottrain.wire import Registration, ReportBatch


class EventSink(Protocol):
    """Where errands leave what they found out."""

    @property
    def state(self) -> State:
        """The state of now."""

    def now_s(self) -> float:
        """Seconds since the epoch, as the manager's clock tells it."""

    def feed(self, event: Event) -> asyncio.Future[None]:
        """Queue an event; the future is done once it is journalled."""


class ChannelHandler(Protocol):
    """Who answers: the manager's shell. Every method returns once it is journalled."""

    async def register(self, registration: Registration) -> None:
        """Take note of a VM's agent."""

    async def receive(self, batch: ReportBatch) -> int:
        """Take reports; return how many of this VM's there are by now.

        Raises:
            OutOfStepError: reports before this batch are missing.
        """

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        """Take note of a person's wish to stop the job."""

    async def change_limits(
        self, *, by: str, limits: tuple[Limit, ...], sure: bool
    ) -> None:
        """Take note of other limits.

        Raises:
            LimitsRefusedError: they would end the job, and the person is not sure.
        """
