"""What the parts of the daemon need of the manager's loop."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from spottrain.varuna_manager.core.model.events import Event
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.traces import TraceSet
from spottrain.wire.messages import (
    LogTails,
    Registration,
    ReportAnswer,
    ReportBatch,
    TraceContent,
    TraceWritten,
)


class EventSink(Protocol):
    """Takes the events that effects, pollers and watches have found."""

    @property
    def state(self) -> State:
        """The current state."""

    def now_s(self) -> float:
        """Seconds since the epoch, by the manager's clock."""

    def feed(self, event: Event) -> asyncio.Future[Any]:
        """Queue an event; the future is done once it is journalled."""


class ChannelHandler(Protocol):
    """Handles requests on the control channel; each method returns once it is journalled."""

    async def register(self, registration: Registration) -> None:
        """Register a VM's agent."""

    async def refuse(self, vm_id: str, software_version: str) -> None:
        """Note that an agent of other software than the manager's cannot register."""

    async def receive(self, batch: ReportBatch) -> ReportAnswer:
        """Take reports; return what this manager has of the VM's.

        Raises:
            OutOfStepError: reports before this batch are missing.
        """

    async def stop(self, *, by: str, checkpoint: bool, now: bool) -> None:
        """Record that a person wants the job to stop."""

    async def change_limits(self, *, by: str, limits: tuple[Limit, ...], sure: bool) -> None:
        """Record new limits.

        Raises:
            LimitsRefusedError: they would end the job, and the person has not confirmed.
        """

    async def receive_grant(self, grant: PoolGrant) -> None:
        """Record what the job's pool grants it."""

    def metrics_text(self) -> bytes:
        """Return the job's metrics in Prometheus' text format."""

    async def trouble(self) -> str:
        """Return why the manager cannot do its work now, in one line; empty if it can."""

    async def trace(self, minibatches: int, content: TraceContent) -> TraceSet:
        """Have the next mini-batches recorded; returns before that is done.

        Raises:
            TracesRefusedError: nothing trains now.
        """

    async def receive_logs(self, tails: LogTails) -> None:
        """Keep the ends of a VM's logs."""

    async def receive_trace(self, vm_id: str, trace: TraceWritten, content: bytes) -> None:
        """Keep a rank's trace.

        Raises:
            TracesRefusedError: it is not expected from this VM.
        """
