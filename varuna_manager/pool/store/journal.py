"""The journal of a pool."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.database import Kind
from spottrain.eventlog import journal as eventlog
from spottrain.varuna_manager.pool.core.model import (
    POOL_EVENTS,
    PoolCommand,
    PoolEvent,
    PoolState,
)
from spottrain.varuna_manager.pool.core.step import step

PoolStep = eventlog.Step[PoolState, PoolEvent, PoolCommand]
"""An event of a pool, and what followed from it."""


class PoolJournal(eventlog.Journal[PoolState, PoolEvent, PoolCommand]):
    """The events of one pool; the command that creates it and then its daemon writes."""

    KIND = Kind.POOL
    STATE = PoolState
    EVENTS = POOL_EVENTS
    REMEDY = (
        "restore a copy of it; its jobs are in their own journals, 'spottrain down JOB' ends them"
    )

    @staticmethod
    def step(state: PoolState, event: PoolEvent) -> tuple[PoolState, Sequence[PoolCommand]]:
        """See ``pool.core.step``."""
        return step(state, event)
