"""When VMs ended that Compute Engine no longer lists.

A deleted instance is gone from every list at once; what ended it is remembered for two
weeks as an operation: our deletion, a preemption, or the hard stop.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.answers import ended, last_part, moment
from spottrain.cloud.gcp.clients import Clients
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.gcp.translate import explained
from spottrain.cloud.provider import Vm

KEEP_S = 3600.0
"""How long an ended VM is listed."""
Noted = dict[str, tuple[float, Vm]]
_ENDINGS = (
    "delete",
    "compute.instances.preempted",
    "compute.instances.terminateOnDeadline",
)


class Ends:
    """Remembers VMs that were listed, and finds out when they ended.

    Args:
        clients: Whom to ask.
        settings: Whose project.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        clients: Clients,
        settings: GcpSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: Noted = {}
        self._ended: Noted = {}

    def note(self, vms: Iterable[Vm]) -> None:
        """Note VMs that exist."""
        now_s = self._clock()
        with self._lock:
            self._seen |= {
                vm.vm_id: (now_s, vm) for vm in vms if vm.vm_id not in self._ended
            }

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return what is listed of a job and what was, of late.

        Raises:
            CloudError: Google cannot be asked when VMs ended.
        """
        self.note(listed)
        there = {vm.vm_id for vm in listed}
        with self._lock:
            missing = [
                vm
                for _, vm in self._seen.values()
                if vm.job == job and vm.vm_id not in there
            ]
        found = self._look_up(missing) if missing else []
        now_s = self._clock()
        with self._lock:
            for vm in found:
                self._seen.pop(vm.vm_id, None)
                self._ended.setdefault(vm.vm_id, (now_s, vm))
            self._seen = _younger(self._seen, now_s - KEEP_S)
            self._ended = _younger(self._ended, now_s - KEEP_S)
            gone = [vm for _, vm in self._ended.values() if vm.job == job]
            ids = set(self._ended)
        return (*(vm for vm in listed if vm.vm_id not in ids), *gone)

    def find(self, zone: str, names: Collection[str]) -> dict[str, float]:
        """Return when VMs ended, by name; those that have not are left out.

        Raises:
            CloudError: Google cannot be asked.
        """
        asked = {
            "project": self._settings.project,
            "zone": zone,
            "filter": requests.any_of("operationType", _ENDINGS),
        }
        with explained(f"asking when VMs in {zone} ended"):
            operations = list(self._clients.all("zone_operations", "list", asked))
        ends: dict[str, float] = {}
        for operation in operations:
            name = last_part(operation.get("target_link", ""))
            if name in names and operation["status"] == "DONE":
                if operation.get("error"):
                    continue  # of a deletion that failed: it lives
                at_s = moment(operation["end_time"])
                ends[name] = min(at_s, ends.get(name, at_s))
        return ends

    def _look_up(self, missing: Sequence[Vm]) -> list[Vm]:
        """Return those that have ended; of the others the lists lag behind."""
        by_zone: dict[str, dict[str, Vm]] = {}
        for vm in missing:
            zone, name = requests.split_vm_id(vm.vm_id)
            by_zone.setdefault(zone, {})[name] = vm
        return [
            ended(vms[name], at_s)
            for zone, vms in by_zone.items()
            for name, at_s in self.find(zone, vms).items()
        ]


def _younger(noted: Noted, than_s: float) -> Noted:
    return {key: (at_s, vm) for key, (at_s, vm) in noted.items() if at_s > than_s}
