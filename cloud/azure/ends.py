"""When VMs ended that Azure no longer lists, as its Activity Log tells.

The log needs a permission that no rental needs. Without it, and until it tells, a VM is
simply listed no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.activity import (
    ActivityEvent,
    VmLifetime,
    event_of,
    events_url,
    lifetimes,
)
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import translating_errors
from spottrain.cloud.lag.ended import EndedVms, as_terminated, terminated_stub
from spottrain.cloud.port.errors import AuthError, CloudError
from spottrain.cloud.port.provider import Vm

logger = logging.getLogger(__name__)

RECALL_S = 14 * 86400.0
"""How far back a new process asks."""
LAG_S = 1800.0
"""How much later than the moment that it tells of an event may appear in the log."""
RETRY_S = 30.0
"""From one question about the same missing VMs to the next."""
STARTUP_S = 120.0
"""For so long a new process may be asked for what an earlier one had begun to launch."""
_DENIED_S = 3600.0
"""How long nothing is asked where Azure does not allow it."""
_PAGES = 100
"""The most that one question reads; the newest come first."""


@dataclass
class _Group:
    """What is known of one resource group."""

    since_s: float
    events: dict[str, ActivityEvent] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    """VMs that were asked about before."""
    next_s: float = 0.0
    """When they may be asked about again, by the clock."""


class AzureEndTimes:
    """Finds out when VMs ended, and remembers it.

    Args:
        clients: Whom to ask.
        settings: Whose subscription.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        clients: AzureClients,
        settings: AzureSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._groups: dict[str, _Group] = {}
        self._tried: set[str] = set()
        self._born_s = clock()
        self._denied_until_s = float("-inf")
        self._known = EndedVms(self._recall, self._look_up, clock)

    def note(self, vms: Iterable[Vm]) -> None:
        """Note VMs that exist."""
        self._known.note(vms)

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return what is listed of a job and what was, of late; without an answer from
        the log what is listed alone.
        """
        return self._known.add(job, listed)

    def lifetimes_of_launch(
        self, job: str, token: str, names: Iterable[str]
    ) -> dict[str, VmLifetime]:
        """Return, by Azure's names, VMs of a launch that were made and are gone.

        Only a launch that may have been tried before can have such: by this process, or
        by one that died, whose launches a new manager repeats at once.

        Raises:
            CloudError: it may have, and the log cannot be asked; ask again.
        """
        group = requests.group_of(job, self._settings)
        with self._lock:
            young = self._clock() - self._born_s < STARTUP_S
            repeated = token in self._tried or young
            self._tried.add(token)
        lifetimes = (self._ask_lifetimes(group) if repeated else None) or {}
        vm_ids = {name: requests.vm_id_of(group, name) for name in names}
        return {
            name: lifetimes[vm_id]
            for name, vm_id in vm_ids.items()
            if vm_id in lifetimes
        }

    def _recall(self, job: str) -> list[Vm] | None:
        """Return the VMs of a job that ended before this process looked."""
        group, prefix = requests.group_of(job, self._settings), requests.prefix(job)
        lifetimes, region = self._lifetimes_or_none(group), self._settings.regions[0]
        if lifetimes is None:
            return None
        return [
            terminated_stub(
                requests.CLOUD, region, region, vm_id, job, lifetime.until_s
            )
            for vm_id, lifetime in lifetimes.items()
            if vm_id.startswith(prefix)
        ]

    def _look_up(self, job: str, missing: Sequence[Vm]) -> list[Vm]:
        """Return those that have ended; about the others the log lags behind."""
        name, ids = requests.group_of(job, self._settings), {vm.vm_id for vm in missing}
        now_s = self._clock()
        with self._lock:
            group = self._group(name)
            if ids <= group.missing and now_s < group.next_s:
                return []
            group.missing, group.next_s = frozenset(ids), now_s + RETRY_S
        lifetimes = self._lifetimes_or_none(name) or {}
        return [
            as_terminated(vm, lifetimes[vm.vm_id].until_s)
            for vm in missing
            if vm.vm_id in lifetimes and lifetimes[vm.vm_id].until_s >= vm.launched_at_s
        ]

    def _lifetimes_or_none(self, group: str) -> dict[str, VmLifetime] | None:
        """Return the VMs of a group that are gone, None if that cannot be told now."""
        try:
            return self._ask_lifetimes(group)
        except CloudError as error:
            logger.info("when VMs ended is asked again later: %s", error)
            return None

    def _ask_lifetimes(self, name: str) -> dict[str, VmLifetime] | None:
        """Return the VMs of a group that are gone, None if we may not know.

        Raises:
            CloudError: Azure cannot be asked.
        """
        with self._lock:
            if self._clock() < self._denied_until_s:
                return None
            group = self._group(name)
            since_s = group.since_s
        try:
            found = self._ask(name, since_s)
        except AuthError as error:
            logger.info("VMs end when a look misses them: %s", error)
            self._denied_until_s = self._clock() + _DENIED_S
            return None
        with self._lock:
            group.events |= {event.event_id: event for event in found}
            newest_s = max((event.at_s for event in found), default=0.0)
            group.since_s = max(group.since_s, newest_s - LAG_S)
            return lifetimes(group.events.values())

    def _group(self, name: str) -> _Group:
        return self._groups.setdefault(name, _Group(time.time() - RECALL_S))

    def _ask(self, group: str, since_s: float) -> list[ActivityEvent]:
        from azure.core.rest import HttpRequest

        url: str | None = events_url(self._clients.subscription, group, since_s)
        found: list[ActivityEvent] = []
        for _ in range(_PAGES):
            with translating_errors(f"asking when VMs of {group} ended"):
                answer = self._clients.resources.send_request(HttpRequest("GET", url))
                answer.raise_for_status()
            page: dict[str, Any] = answer.json()
            found += filter(None, map(event_of, page["value"]))
            url = page.get("nextLink")
            if not url:
                break
        return found
