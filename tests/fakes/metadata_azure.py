"""Azure's instance metadata service, as far as Scheduled Events go."""

from __future__ import annotations

import json
import uuid
from email.utils import formatdate
from typing import Any

from tests.fakes.metadata_world import (
    RefusedError,
    Reply,
    Request,
    World,
    needs_header,
    needs_query,
)

_EVENTS = "/metadata/scheduledevents"
_OPERATIONS = {
    ("GET", _EVENTS): "events",
    ("POST", _EVENTS): "start",
    ("GET", "/metadata/instance/compute/name"): "name",
}


class AzureWorld(World):
    """The service; all VMs are in one availability set and see all events."""

    def __init__(self) -> None:
        super().__init__(_OPERATIONS)
        self.reset()

    def reset(self) -> None:
        """Know no VM and no event."""
        self.forget_script()
        self.incarnation = 1
        self.events: list[dict[str, Any]] = []
        self.begun: list[str] = []

    def preempt(self, vm: str, lead_s: float, kind: str = "Preempt") -> str:
        """Schedule an event of a VM; return its id."""
        event = {
            "EventId": str(uuid.uuid4()).upper(),
            "EventStatus": "Scheduled",
            "EventType": kind,
            "ResourceType": "VirtualMachine",
            "Resources": [vm],
            "NotBefore": formatdate(self.now() + lead_s, usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        self.events.append(event)
        self.incarnation += 1
        return str(event["EventId"])

    def begin(self, event_id: str) -> None:
        """Let an event begin."""
        for event in self.events:
            if event["EventId"] == event_id:
                event.update(EventStatus="Started", NotBefore="")
        self.incarnation += 1

    def withdraw(self, vm: str) -> None:
        """Take all events of a VM back."""
        self.events = [one for one in self.events if vm not in one["Resources"]]
        self.incarnation += 1

    def acknowledged(self) -> list[str]:
        """Return the events that VMs have let begin."""
        return self.begun

    def carry_out(self, operation: str, request: Request) -> Reply:
        """See ``World``."""
        needs_header(request, "Metadata", "true", 400)
        if operation == "name":
            needs_query(request, api_version="2021-02-01", format="text")
            return Reply(200, request.vm.upper())  # names differ in no letter's case
        needs_query(request, api_version="2020-07-01")
        if operation == "start":
            return self._start(request)
        document = {"DocumentIncarnation": self.incarnation, "Events": self.events}
        return Reply(200, json.dumps(document), {"Content-Type": "application/json"})

    def _start(self, request: Request) -> Reply:
        needs_header(request, "Content-Type", "application/json", 400)
        try:
            body = json.loads(request.body)
            ids = [one["EventId"] for one in body["StartRequests"]]
            exact = body == {"StartRequests": [{"EventId": one} for one in ids]}
        except (ValueError, TypeError, KeyError):
            raise RefusedError(400, f"got {request.body!r}") from None
        known = {one["EventId"] for one in self.events if one["NotBefore"]}
        if not ids or not exact or not known.issuperset(ids):
            raise RefusedError(400, f"got {request.body!r}, events are {known}")
        for event_id in ids:
            self.begin(event_id)
        self.begun += ids
        return Reply(200)
