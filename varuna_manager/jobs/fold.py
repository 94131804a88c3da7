"""The fold of a job's events into its state, in whatever form a journal has them.

Earlier versions journalled every rank's report of every mini-batch. What such a report
means for the state is derived as it is for reports that are not journalled any more: by the
watches, which then tell of each mini-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.model.commands import Command
from spottrain.varuna_manager.core.model.events import Event, ReportReceived
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.watch.watches import EACH, Watches
from spottrain.wire.messages import MinibatchCommitted


class Folded(NamedTuple):
    """One step of the fold."""

    before: State
    event: Event
    """As in the journal, or what follows from it."""
    after: State
    commands: tuple[Command, ...]


class Fold:
    """The state of a job, brought forward event by event.

    Args:
        state: To begin with.
    """

    def __init__(self, state: State | None = None) -> None:
        self.state = State() if state is None else state
        self._watches = Watches(EACH)

    def take(self, event: Event) -> list[Folded]:
        """Fold an event; return the steps that it takes, the first one with itself."""
        before = self.state
        folded = [self._step(event)]
        report = event.report if isinstance(event, ReportReceived) else None
        if isinstance(event, ReportReceived) and isinstance(report, MinibatchCommitted):
            vm = before.vms.get(event.vm_id)
            if vm is not None and event.number >= vm.reports_received:
                follows = self._watches.observe(
                    self.state, event.vm_id, report, event.at_s
                )
                folded += map(self._step, follows)
        return folded

    def take_all(self, events: Iterator[tuple[int, Event]]) -> Iterator[Folded]:
        """Fold numbered events; yield every step."""
        for _, event in events:
            yield from self.take(event)

    def _step(self, event: Event) -> Folded:
        before = self.state
        self.state, commands = step.step(before, event)
        return Folded(before, event, self.state, commands)
