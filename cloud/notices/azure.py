"""Azure's notices: Scheduled Events that end all processes on a VM.

A preemption is announced at most 30 s ahead, maintenance 15 minutes.

The first request enables the service for the VM, so the agent polls from its start.
VMs of one availability set see each other's events. Standard library only; the
agent carries this module.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from spottrain.cloud.notices import source

URL = "http://169.254.169.254"
EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"
NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_HEADERS = {"Metadata": "true"}
_ENDS = ("Preempt", "Terminate", "Redeploy", "Reboot")
"""Types of events that end all processes; a Freeze only pauses them for seconds."""


@dataclass(frozen=True, slots=True)
class EndingEvent:
    """A scheduled event that ends a VM or all its processes."""

    event_id: str
    not_before: str
    """Empty once the event has begun."""
    lead_s: float


class AzureSource(source.NoticeSource):
    """Notices of an Azure VM.

    Args:
        metadata: Its metadata service.
    """

    every_s = 1.0  # the lead time is short

    def __init__(self, metadata: source.Metadata) -> None:
        self._metadata = metadata
        self._name = ""
        self._current: tuple[EndingEvent, ...] = ()

    def ask(self) -> source.VmOutlook:
        """Return the current state; see ``NoticeSource``."""
        self._name = self._name or self._metadata.ask("GET", NAME, _HEADERS).text()
        answer = self._metadata.ask("GET", EVENTS, _HEADERS)
        self._current = ending_events(answer.text(), self._name, answer.at_s)
        if not self._current:
            return source.VmOutlook()
        first = min(self._current, key=lambda one: one.lead_s)
        return source.VmOutlook(
            source.PreemptionNotice(f"{first.event_id} {first.not_before}", first.lead_s)
        )

    def acknowledge(self) -> None:
        """Approve the start of this VM's pending events; see ``NoticeSource``."""
        waiting = [one.event_id for one in self._current if one.not_before]
        if waiting:
            approval = {"StartRequests": [{"EventId": event_id} for event_id in waiting]}
            body = json.dumps(approval).encode()
            self._metadata.ask("POST", EVENTS, _HEADERS, body=body)


def ending_events(text: str, name: str, now_s: float) -> tuple[EndingEvent, ...]:
    """Return the events that end a VM or all its processes.

    An unreadable event does not hide others; one without a time has begun.

    Args:
        text: A document of Scheduled Events.
        name: Name of the VM; case does not matter.
        now_s: Seconds since the epoch.

    Raises:
        NoAnswerError: the text is invalid.
    """
    try:
        events = list(json.loads(text)["Events"])
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise source.NoAnswerError(f"scheduledevents: got {text[:200]!r}") from error
    return tuple(_ending(event, now_s) for event in events if _ends(event, name))


def _ends(event: Any, name: str) -> bool:
    """Return True for an event that ends the processes of a VM."""
    if not isinstance(event, dict) or event.get("EventType") not in _ENDS:
        return False
    concerned = event.get("Resources")
    return isinstance(concerned, list) and name.casefold() in [
        str(one).casefold() for one in concerned
    ]


def _ending(event: dict[str, Any], now_s: float) -> EndingEvent:
    not_before = str(event.get("NotBefore") or "")
    try:
        lead_s = max(0.0, source.http_date_s(not_before) - now_s)
    except ValueError:
        lead_s = 0.0
    return EndingEvent(str(event.get("EventId", "")), not_before, lead_s)
