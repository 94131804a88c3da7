"""End times of VMs that Compute Engine no longer lists.

A deleted instance leaves every list at once; the operation that ended it (our deletion,
a preemption, or the hard stop) is kept for two weeks. So a restarted manager still
learns what ended in the meantime.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.answers import last_part, parse_time_s
from spottrain.cloud.gcp.clients import GcpClients
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.gcp.translate import translating_errors
from spottrain.cloud.lag.ended import EndedVms, as_terminated, terminated_stub
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm

logger = logging.getLogger(__name__)

CLOCK_TOLERANCE_S = 60.0
"""Tolerance when comparing timestamps of Google."""
_ENDINGS = (
    "delete",
    "compute.instances.preempted",
    "compute.instances.terminateOnDeadline",
)
_ENDED = requests.any_of("operationType", _ENDINGS)


class GcpEndTimes:
    """Looks up and remembers when VMs ended."""

    def __init__(
        self,
        clients: GcpClients,
        settings: GcpSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self.vms = EndedVms(self._recall, self._look_up, clock)
        """Of a VM that ended before this process saw it, only the end is known."""

    def find(self, zone: str, names: Collection[str], since_s: float) -> dict[str, float]:
        """Return when VMs ended, by name; VMs that have not ended are left out.

        All operations of two weeks that ended VMs are read: Google sorts no list that
        has a filter.

        Args:
            zone: Zone of the VMs.
            since_s: When the first was created, in seconds since the epoch; a name may
                have been another VM's before.

        Raises:
            CloudError: Google does not answer.
        """
        arguments = {"zone": zone, "filter": _ENDED}
        with translating_errors(f"asking when VMs in {zone} ended"):
            operations = self._clients.all("zone_operations", "list", arguments)
            ends = _ends(operations, since_s - CLOCK_TOLERANCE_S)
        return {name: at_s for name, at_s in ends.items() if name in names}

    def _recall(self, job: str) -> list[Vm]:
        """Return the VMs of a job that ended before this process started."""
        prefix = requests.vm_prefix(job, self._settings.uid)
        with translating_errors("asking when VMs ended"):
            zones = list(self._clients.scopes("global_operations", {"filter": _ENDED}))
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
        """Return those that have ended; the lists lag behind on the others.

        The list of VMs does not wait for it: what happens to those that exist matters
        more.
        """
        by_zone: dict[str, dict[str, Vm]] = {}
        for vm in missing:
            zone, name = requests.split_vm_id(vm.vm_id)
            by_zone.setdefault(zone, {})[name] = vm
        found: list[Vm] = []
        for zone, vms in by_zone.items():
            try:
                ends = self.find(zone, vms, _first(vms.values()))
            except CloudError as error:
                logger.warning("end times of VMs are unknown for now: %s", error)
                continue
            found += (as_terminated(vms[name], at_s) for name, at_s in ends.items())
        return found


def _first(vms: Iterable[Vm]) -> float:
    return min(vm.launched_at_s for vm in vms)


def _ends(operations: Iterable[Mapping[str, Any]], since_s: float = 0.0) -> dict[str, float]:
    """Return when VMs ended, by name, as operations since a time say."""
    ends: dict[str, float] = {}
    for operation in operations:
        name = last_part(operation.get("target_link", ""))
        late = parse_time_s(operation["insert_time"]) >= since_s
        if late and operation["status"] == "DONE" and not operation.get("error"):
            at_s = parse_time_s(operation["end_time"])
            ends[name] = min(at_s, ends.get(name, at_s))
    return ends
