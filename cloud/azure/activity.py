"""VM lifetimes from Azure's Activity Log; pure.

The log has every change of a resource, minutes later, for 90 days. Source:
"Activity Logs - List" of Azure's REST reference, api-version 2015-04-01.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from spottrain.cloud.azure import requests
from spottrain.units import DAY_S

VERSION = "2015-04-01"
FIELDS = (
    "correlationId",
    "eventDataId",
    "eventTimestamp",
    "operationName",
    "resourceId",
    "status",
)
"""Requested fields of each event."""
_MAX_SPAN_S = 89 * DAY_S
"""Maximum span of a query; the log has one day more."""
_VM = "microsoft.compute/virtualmachines"
_MADE = f"{_VM}/write"
_ENDS = frozenset({f"{_VM}/delete", f"{_VM}/deallocate/action", f"{_VM}/evictspotvm/action"})


@dataclass(frozen=True, slots=True)
class ActivityEvent:
    """One step of one change of a VM."""

    event_id: str
    change: str
    """Id shared by all steps of one change."""
    at_s: float
    vm_id: str
    ends: bool
    """True if the change ends the VM, False if it creates it."""
    step: str
    """Such as ``Started``, ``Accepted``, ``Succeeded`` or ``Failed``."""


@dataclass(frozen=True, slots=True)
class VmLifetime:
    """Lifetime of an ended VM, in seconds since the epoch."""

    from_s: float | None
    """When it was requested; None: before the queried span."""
    until_s: float


@dataclass(frozen=True, slots=True)
class History:
    """What has become of VMs, by our ids."""

    ended: Mapping[str, VmLifetime] = field(default_factory=dict)
    """The last lifetime of each."""
    failed: frozenset[str] = frozenset()
    """VMs that Azure accepted but could not make."""


def events_url(subscription: str, group: str, since_s: float, until_s: float) -> str:
    """Return path and query of the events of a group.

    Args:
        subscription: Id of the subscription.
        group: Name of a resource group.
        since_s: Start of the span, in seconds since the epoch.
        until_s: Its end; the log may refuse one in the future.
    """
    wanted = (
        f"eventTimestamp ge '{_iso_time(since_s)}' and "
        f"eventTimestamp le '{_iso_time(min(until_s, since_s + _MAX_SPAN_S))}' and "
        f"resourceGroupName eq '{group}'"
    )
    query = {"api-version": VERSION, "$filter": wanted, "$select": ",".join(FIELDS)}
    path = f"/subscriptions/{subscription}/providers/Microsoft.Insights"
    return f"{path}/eventtypes/management/values?{urlencode(query, quote_via=quote)}"


def event_of(entry: Mapping[str, Any]) -> ActivityEvent | None:
    """Parse an event of Azure; None if it neither creates nor ends a VM.

    Azure's case of names varies; ours are lower case.
    """
    change = str(entry.get("operationName", {}).get("value", "")).lower()
    resource = str(entry.get("resourceId", ""))
    if change != _MADE and change not in _ENDS:
        return None
    return ActivityEvent(
        event_id=str(entry.get("eventDataId", "")),
        change=str(entry.get("correlationId", "")),
        at_s=datetime.fromisoformat(entry["eventTimestamp"]).timestamp(),
        vm_id=requests.vm_id_of(*requests.split_resource_id(resource.lower())),
        ends=change in _ENDS,
        step=str(entry.get("status", {}).get("value", "")),
    )


def history(events: Iterable[ActivityEvent]) -> History:
    """Return which VMs have ended, and which were never made.

    The eviction counts as the end of a VM that was evicted and then deleted.
    """
    begun: dict[str, ActivityEvent] = {}
    over: dict[str, VmLifetime] = {}
    never: set[str] = set()
    for event in sorted(events, key=lambda one: one.at_s):
        name, begin = event.vm_id, begun.get(event.vm_id)
        if not event.ends and event.step in ("Started", "Accepted"):
            if begin is None:
                begun[name] = event
                over.pop(name, None)
                never.discard(name)
        elif not event.ends:
            if event.step == "Failed" and begin and begin.change == event.change:
                del begun[name]
                never.add(name)
        elif event.step == "Succeeded" and name not in over and name not in never:
            over[name] = VmLifetime(begin.at_s if begin else None, event.at_s)
            begun.pop(name, None)
    return History(over, frozenset(never))


def _iso_time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
