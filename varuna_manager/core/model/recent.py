"""The newest events and what came of them, kept to explain an internal error."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from spottrain.eventlog.changed import replace
from spottrain.varuna_manager.core.model.events import Event, ReportReceived

KEPT_EVENTS = 10


@dataclass(frozen=True, slots=True)
class PhaseChange:
    """The job, a VM, a generation or a rank went from one phase to another."""

    before: StrEnum | None
    """None: it did not exist before."""
    after: StrEnum | None
    """None: it does not exist any more."""
    decided: bool
    """Whether a decision did it, rather than the event itself."""

    def __str__(self) -> str:
        name = type(self.before or self.after).__name__.removesuffix("Phase").lower()
        return f"{name} {self.before or 'new'} -> {self.after or 'gone'}"


@dataclass(frozen=True, kw_only=True)
class RecentEvent:
    """One of the newest events."""

    seq: int
    """Its number in the journal."""
    at_s: float
    kind: str
    """Class of the event, or of the report that it brought."""
    vm_id: str = ""
    news: str = ""
    changes: tuple[PhaseChange, ...] = ()
    repeats: int = 0
    """Events right before it of the same kind, with the same news and changes."""


def with_event(
    recent: tuple[RecentEvent, ...], event: Event, first: int = 1
) -> tuple[RecentEvent, ...]:
    """Append ``event`` to the newest ones; merge what only repeats itself.

    Args:
        recent: Events before it.
        event: The newest.
        first: Its number if there are none before.
    """
    if len(recent) > 1:
        one, two = recent[-2:]
        if (one.kind, one.changes, one.news) == (two.kind, two.changes, two.news):
            recent = (*recent[:-2], replace(two, repeats=one.repeats + 1))
    what = event.report if isinstance(event, ReportReceived) else event
    newest = RecentEvent(
        seq=recent[-1].seq + 1 if recent else first,
        at_s=event.at_s,
        kind=type(what).__name__,
        vm_id=getattr(event, "vm_id", ""),
    )
    return (*recent[1 - KEPT_EVENTS :], newest)
