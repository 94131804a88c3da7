"""The journal of a job."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.database import Kind
from spottrain.eventlog import journal as eventlog
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model.events import EVENT_TYPES, Event
from spottrain.varuna_manager.core.model.recent import (
    KEPT_EVENTS,
    RecentEvent,
    with_event,
)
from spottrain.varuna_manager.core.model.state import State

Step = eventlog.Step[State, Event, c.Command]
"""An event of a job, and what followed from it."""


class Journal(eventlog.Journal[State, Event, c.Command]):
    """The events of one job; its manager, or a command that holds ``manager.lock``,
    writes."""

    KIND = Kind.JOB
    STATE = State
    EVENTS = EVENT_TYPES
    REMEDY = "restore a copy of it, or end the job with 'spottrain down' (checkpoints are kept)"

    @staticmethod
    def step(state: State, event: Event) -> tuple[State, Sequence[c.Command]]:
        """See ``core.step``."""
        from spottrain.varuna_manager.core.step import step  # not above: readers do without

        return step(state, event)

    @classmethod
    def step_alone(cls, state: State, event: Event) -> tuple[State, Sequence[c.Command]]:
        """Rent nothing: nobody would ask the cloud."""
        from spottrain.varuna_manager.core.step import step  # not above: readers do without

        return step(state, event, rents=False)

    @classmethod
    def asked(cls, commands: Sequence[c.Command]) -> list[list[str]]:
        """Return the kind of each command, and the ids that it names.

        A message to several VMs is one entry.
        """
        asked: dict[tuple[str, ...], list[str]] = {}
        for command in commands:
            kind = (type(command).__name__,)
            match command:
                case c.LaunchVms():
                    asked.setdefault((*kind, command.intent, str(command.count)), [])
                case c.StartAgent() | c.AskProvider() | c.ReserveVm():
                    asked.setdefault(kind, []).append(command.vm_id)
                case c.AcquireVm():
                    asked.setdefault(kind, []).append(command.order.name)
                case c.TerminateVms():
                    asked.setdefault(kind, []).extend(command.vm_ids)
                case c.Send(vm_id=vm_id, command=message):
                    number = getattr(message, "generation", "")
                    named = (*kind, type(message).__name__, str(number))
                    asked.setdefault(named, []).append(vm_id)
                case c.ComputePlan():
                    asked.setdefault((*kind, command.inputs_hash), [])
                case c.ReleaseJob() | c.ListCheckpoints() | c.Finish():
                    asked.setdefault(kind, [])
                case c.KeepProfile() | c.SetTimer():
                    pass  # nothing in the job's life depends on them
        return [[*named, *ids] for named, ids in asked.items()]

    def recent(self) -> tuple[RecentEvent, ...]:
        """Return the newest events as a state keeps them, without what came of them.

        Raises:
            JournalError: The file is damaged.
        """
        recent: tuple[RecentEvent, ...] = ()
        last = self.last_seq()
        for row in self.rows(last - KEPT_EVENTS + 1, last):
            recent = with_event(recent, self.event_of(row), row.seq)
        return recent
