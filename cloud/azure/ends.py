"""End times of VMs that Azure no longer lists, from its Activity Log.

The log requires a permission of its own. Without it, and until the log has the event,
an ended VM is simply not listed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spottrain.cloud.azure import activity, requests
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import translating_errors
from spottrain.cloud.lag.ended import EndedVms, as_terminated, terminated_stub
from spottrain.cloud.port.errors import AuthError, CloudError, MisconfiguredError
from spottrain.cloud.port.provider import Vm
from spottrain.units import DAY_S

logger = logging.getLogger(__name__)

RECALL_S = 14 * DAY_S
"""How far back a new process queries."""
LAG_S = 1800.0
"""How late an event may appear in the log."""
RETRY_S = 30.0
"""Time between two queries for the same missing VMs."""
STARTUP_S = 120.0
"""How long after its start a process may be repeating launches of an earlier one."""
_DENIED_S = 3600.0
"""How long no query is made after Azure denied one."""
_PAGES = 100
"""Maximum number of pages per query; the newest come first."""


@dataclass
class _Group:
    """State of one resource group."""

    since_s: float
    events: dict[str, activity.ActivityEvent] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """VMs of the last query."""
    next_s: float = 0.0
    """When they may be queried again, by the clock."""


class AzureEndTimes:
    """Looks up and remembers when VMs ended."""

    def __init__(
        self,
        clients: AzureClients,
        settings: AzureSettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._now = now
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._tried: set[str] = set()
        self._born_s = clock()
        self._denied_until_s = float("-inf")
        self.vms = EndedVms(self._recall, self._look_up, clock)
        """Complete as far as the log answers."""

    def history_of_launch(self, job: str, token: str, names: Iterable[str]) -> activity.History:
        """Return what became of VMs of a launch, by Azure's names.

        Only a repeated launch can have such: repeated by this process, or by a new
        manager after a crash.

        Raises:
            CloudError: the launch is repeated and the log does not answer; retry.
        """
        group = requests.group_of(job, self._settings)
        with self._lock:
            young = self._clock() - self._born_s < STARTUP_S
            repeated = token in self._tried or young
            self._tried.add(token)
        past = (self._ask(group) if repeated else None) or activity.History()
        vm_ids = {name: requests.vm_id_of(group, name) for name in names}
        ended = {name: past.ended[vm_id] for name, vm_id in vm_ids.items() if vm_id in past.ended}
        failed = frozenset(name for name, vm_id in vm_ids.items() if vm_id in past.failed)
        return activity.History(ended, failed)

    def _recall(self, job: str) -> list[Vm] | None:
        """Return the VMs of a job that ended before this process started."""
        group, prefix = (
            requests.group_of(job, self._settings),
            requests.prefix(job, self._settings),
        )
        past, region = self._ask_or_none(group), self._settings.regions[0]
        if past is None:
            return None
        return [
            terminated_stub(requests.CLOUD, region, region, vm_id, job, lifetime.until_s)
            for vm_id, lifetime in past.ended.items()
            if requests.split_vm_id(vm_id)[1].startswith(prefix)
        ]

    def _look_up(self, job: str, missing: Sequence[Vm]) -> list[Vm]:
        """Return those that have ended, as far as the log shows."""
        name, ids = requests.group_of(job, self._settings), {vm.vm_id for vm in missing}
        now_s = self._clock()
        with self._lock:
            group = self._group(name)
            if ids <= group.missing and now_s < group.next_s:
                return []
            group.missing, group.next_s = frozenset(ids), now_s + RETRY_S
        ended = (self._ask_or_none(name) or activity.History()).ended
        return [
            as_terminated(vm, ended[vm.vm_id].until_s)
            for vm in missing
            if vm.vm_id in ended and ended[vm.vm_id].until_s >= vm.launched_at_s
        ]

    def _ask_or_none(self, group: str) -> activity.History | None:
        """Return what became of VMs of a group, None if that is unknown now."""
        try:
            return self._ask(group)
        except CloudError as error:
            logger.info("end times of VMs are unknown for now: %s", error)
            return None

    def _ask(self, name: str) -> activity.History | None:
        """Return what became of VMs of a group, None if the log may not be read.

        Raises:
            CloudError: Azure does not answer.
        """
        with self._lock:
            if self._clock() < self._denied_until_s:
                return None
            group = self._group(name)
            since_s = group.since_s
        try:
            found = self._events(name, since_s)
        except (AuthError, MisconfiguredError) as error:
            logger.info("a VM counts as ended once it is no longer listed: %s", error)
            self._denied_until_s = self._clock() + _DENIED_S
            return None
        with self._lock:
            group.events |= {event.event_id: event for event in found}
            newest_s = max((event.at_s for event in found), default=0.0)
            group.since_s = max(group.since_s, newest_s - LAG_S)
            return activity.history(group.events.values())

    def _group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group(self._now() - RECALL_S))

    def _events(self, group: str, since_s: float) -> list[activity.ActivityEvent]:
        from azure.core.rest import HttpRequest

        url: str | None = activity.events_url(
            self._clients.subscription, group, since_s, self._now()
        )
        found: list[activity.ActivityEvent] = []
        for _ in range(_PAGES):
            with translating_errors(f"asking when VMs of {group} ended"):
                answer = self._clients.resources.send_request(HttpRequest("GET", url))
                answer.raise_for_status()
            page: dict[str, Any] = answer.json()
            found += filter(None, map(activity.event_of, page["value"]))
            url = page.get("nextLink")
            if not url:
                break
        return found
