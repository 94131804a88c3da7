"""The chain of causes that led to an event of a journal.

The journal keeps with each event what was asked for because of it. An event that answers
one of these commands has the event of that command as its cause; a timer has the event
that set it. What comes from outside, such as a preemption, has none.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from spottrain.eventlog.journal import Row
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.jobs.journal import Journal, Step

MAX_LINKS = 12
"""Events in a chain: what is further back hardly explains anything."""
_ASKED_BY_REPORT = {
    "SupervisorReady": ("StartAgent",),
    "StoreOpened": ("Send", "OpenStore"),
    "Calibrated": ("Send", "Calibrate"),
    "GenerationStarted": ("Send", "RunGeneration"),
    "GenerationStopped": ("Send", "StopGeneration"),
    "WorkersInspected": ("Send", "InspectWorkers"),
}
"""The command that a report answers."""


def chain(journal: Journal, seq: int) -> list[int]:
    """Return the numbers of the events that led to event ``seq``, and it, in order.

    Raises:
        JournalError: The file is damaged.
    """
    found = [seq]
    while len(found) < MAX_LINKS and (before := cause(journal, found[-1])) is not None:
        found.append(before)
    return found[::-1]


def cause(journal: Journal, seq: int) -> int | None:
    """Return the number of the event because of which event ``seq`` came; None: it came
    from outside, or the journal does not know.

    Raises:
        JournalError: The file is damaged.
    """
    rows = journal.rows(seq, seq)
    if not rows:
        return None
    event = journal.event_of(rows[0])
    match event:
        case e.TimerFired():
            return _timer_set(journal, seq)
        case e.VmsLaunched(intent=intent) | e.LaunchRefused(intent=intent):
            return _asked(journal, seq, "LaunchVms", intent)
        case (
            e.AgentStarted(vm_id=vm_id)
            | e.AgentRegistered(vm_id=vm_id)
            | e.AgentRefused(vm_id=vm_id)
        ):
            return _asked(journal, seq, "StartAgent", vm_id)
        case e.ProviderAnswered(vm_id=vm_id):
            return _asked(journal, seq, "AskProvider", vm_id)
        case e.VmsReturned(vm_ids=(vm_id, *_)):
            return _asked(journal, seq, "TerminateVms", vm_id)
        case e.PlanComputed(inputs_hash=inputs_hash):
            return _asked(journal, seq, "ComputePlan", inputs_hash)
        case e.JobReleased():
            return _asked(journal, seq, "ReleaseJob")
        case e.ReportReceived(vm_id=vm_id, report=report):
            command = _ASKED_BY_REPORT.get(type(report).__name__)
            return _asked(journal, seq, *command, vm_id) if command else None
        case _:
            return None


def _asked(journal: Journal, seq: int, *names: str) -> int | None:
    """Return the newest event before ``seq`` that asked for a command with these names."""
    wanted = set(names)
    # As text: the first name is the command's, so it opens the entry.
    for row in journal.search(f'["{names[0]}"', before=seq):
        if any(wanted.issubset(entry) for entry in asked_of(row)):
            return row.seq
    return None


def asked_of(row: Row) -> list[list[str]]:
    """Return what was asked for because of an event, as the journal keeps it."""
    asked: list[list[str]] = row.parts().get("asked", [])
    return asked


def _timer_set(journal: Journal, seq: int) -> int | None:
    for row in journal.search('"timer_at_s":', before=seq):
        change = row.parts().get("changes", {}).get("timer_at_s")
        if change and change[1] is not None:
            return row.seq
    return None


def begun(journal: Journal, vm_id: str) -> list[int]:
    """Return the events by which the job learned of a VM, by which it became ready, and by
    which the cloud said that it takes it.

    Empty if the job never had it.
    """
    found: dict[str, int] = {}
    seen = None
    for row in journal.search(json.dumps(vm_id, ensure_ascii=False), in_event=True):
        if row.kind in ("VmsLaunched", "VmsListed"):
            found["learned"] = seen = row.seq
        elif '"kind":"supervisor_ready"' in row.body:
            found["ready"] = row.seq
        elif '"kind":"interruption_noticed"' in row.body:
            found["noticed"] = row.seq
    return [] if seen is None else sorted(found.values())


def left(journal: Journal, vm_id: str) -> int | None:
    """Return the event because of which a VM was returned, or by which it was gone."""
    asked = gone = None
    for row in journal.search(json.dumps(vm_id)):
        parts = row.parts()
        for kind, *names in parts.get("asked", ()):
            if kind == "TerminateVms" and vm_id in names:
                asked = row.seq
        vms: Any = parts.get("changes", {}).get("fleet", {}).get("vms")
        if vms and vms[0] == "map":
            # Keys that are moved to the end are taken out and put in again.
            _, put, out = vms
            if vm_id in out and vm_id not in (key for key, _ in put):
                gone = row.seq
    return gone if asked is None else asked


class Message(NamedTuple):
    """What an event told people."""

    seq: int
    """Number of the event."""
    at_s: float
    text: str


def messages(journal: Journal) -> Iterator[Message]:
    """Yield the messages for people, the newest first, without folding the journal.

    Raises:
        JournalError: The file is damaged.
    """
    for row in journal.search('"last_message":'):
        match row.parts().get("changes", {}).get("last_message"):
            case ["=", str(text)] if text:
                yield Message(row.seq, row.at_s, text)


def newest_message(journal: Journal) -> int | None:
    """Return the newest event that has a message for people."""
    return next((row.seq for row in journal.search('"last_message":')), None)


def newest_change(journal: Journal, field: str, part: str = "") -> int | None:
    """Return the newest event because of which a field of the state got another value.

    Args:
        journal: Of the job.
        field: Name of the field.
        part: The part of the state that has it; empty: it is in none.
    """
    for row in journal.search(f'"{field}":'):
        changes = row.parts().get("changes", {})
        if field in (changes.get(part, {}) if part else changes):
            return row.seq
    return None


def steps_of(journal: Journal, wanted: Collection[int]) -> Iterator[tuple[Row, Step]]:
    """Yield events of the journal with the states before and after them, in order.

    Raises:
        JournalError: The file is damaged.
    """
    if not wanted:
        return
    for seq, step in journal.steps(min(wanted) - 1):
        if seq in wanted:
            (row,) = journal.rows(seq, seq)
            yield row, step
        if seq == max(wanted):
            return
