"""When VMs ended that Compute Engine no longer lists.

A deleted instance is gone from every list at once; what ended it is remembered for two
weeks as an operation: our deletion, a preemption, or the hard stop. So a manager that was
restarted still learns what ended while nobody looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.answers import last_part, parse_time_s
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.lag.ended import EndedVms, as_terminated, terminated_stub
from spottrain.cloud.port.provider import Vm

CLOCK_TOLERANCE_S = 60.0
"""What two of Google's moments may be apart, though the one was before the other."""
_ENDINGS = (
    "delete",
    "compute.instances.preempted",
    "compute.instances.terminateOnDeadline",
)


class GcpEndTimes:
    """Finds out when VMs ended, and remembers it.

    Args:
        clients: Whom to ask.
        settings: Whose project.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        clients: GcpClients,
        settings: GcpSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._known = EndedVms(self._recall, self._look_up, clock)

    def note(self, vms: Iterable[Vm]) -> None:
        """Note VMs that exist."""
        self._known.note(vms)

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return what is listed of a job and what was, of late.

        Of a VM that ended before this process ever saw it little more is known than that.

        Raises:
            CloudError: Google cannot be asked when VMs ended.
        """
        return self._known.add(job, listed)

    def find(
        self, zone: str, names: Collection[str], since_s: float
    ) -> dict[str, float]:
        """Return when VMs ended, by name; those that have not are left out.

        Two weeks of operations may be thousands: the newest are read first, and none
        that is older than the VMs.

        Args:
            zone: Where they were.
            names: Google's own.
            since_s: When the first of them was made, in seconds since the epoch.

        Raises:
            CloudError: Google cannot be asked.
        """
        arguments = self._arguments | {
            "zone": zone,
            "order_by": "creationTimestamp desc",
        }
        with translating_errors(f"asking when VMs in {zone} ended"):
            operations = self._clients.all("zone_operations", "list", arguments)
            ends = _ends(_until(operations, since_s - CLOCK_TOLERANCE_S))
        return {name: at_s for name, at_s in ends.items() if name in names}

    @property
    def _arguments(self) -> dict[str, Any]:
        return {
            "project": self._settings.project,
            "filter": requests.any_of("operationType", _ENDINGS),
        }

    def _recall(self, job: str) -> list[Vm]:
        """Return the VMs of a job that ended before this process looked."""
        prefix = requests.vm_prefix(job)
        with translating_errors("asking when VMs ended"):
            zones = list(self._clients.scopes("global_operations", self._arguments))
        return [
            terminated_stub(
                requests.CLOUD,
                requests.region_of(zone),
                zone,
                requests.vm_id_of(zone, name),
                job,
                at_s,
            )
            for zone, operations in zones
            for name, at_s in _ends(operations.get("operations", ())).items()
            if name.startswith(prefix)
        ]

    def _look_up(self, job: str, missing: Sequence[Vm]) -> list[Vm]:
        """Return those that have ended; of the others the lists lag behind."""
        by_zone: dict[str, dict[str, Vm]] = {}
        for vm in missing:
            zone, name = requests.split_vm_id(vm.vm_id)
            by_zone.setdefault(zone, {})[name] = vm
        return [
            as_terminated(vms[name], at_s)
            for zone, vms in by_zone.items()
            for name, at_s in self.find(zone, vms, _first(vms.values())).items()
        ]


def _first(vms: Iterable[Vm]) -> float:
    return min(vm.launched_at_s for vm in vms)


def _until(
    operations: Iterable[Mapping[str, Any]], since_s: float
) -> Iterator[Mapping[str, Any]]:
    """Yield operations, newest first, until they are too old."""
    for operation in operations:
        if parse_time_s(operation["insert_time"]) < since_s:
            return
        yield operation


def _ends(operations: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return when VMs ended, by name."""
    ends: dict[str, float] = {}
    for operation in operations:
        name = last_part(operation.get("target_link", ""))
        if operation["status"] == "DONE" and not operation.get("error"):
            at_s = parse_time_s(operation["end_time"])
            ends[name] = min(at_s, ends.get(name, at_s))
    return ends
