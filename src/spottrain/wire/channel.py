"""Messages between agent and manager over HTTPS."""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.wire.codec import SCHEMA_VERSION
from spottrain.wire.commands import Command
from spottrain.wire.reports import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """First message of an agent."""

    vm_id: str
    software_version: str
    num_slots: int
    private_address: str
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """An agent is alive; answered at once if commands wait, else after a while."""

    vm_id: str
    sequence: int
    """Grows with every heartbeat of one agent process; a stale one is refused."""
    received: int
    """Number of commands received so far; the manager sends what comes after."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswer:
    """Commands that the agent has not had yet, in order."""

    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportBatch:
    """Reports in the order in which they were made."""

    vm_id: str
    first: int
    """Number of the first report in the batch, from 0, counted over the agent's life;
    the manager drops what it has had already."""
    reports: tuple[Report, ...]
