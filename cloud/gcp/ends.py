"""When VMs ended that Compute Engine no longer lists.

A deleted instance is gone from every list at once; what ended it is remembered for two
weeks as an operation: our deletion, a preemption, or the hard stop. So a manager that was
restarted still learns what ended while nobody looked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.answers import ended, gone, last_part, moment
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
        self._recalled: set[str] = set()

    def note(self, vms: Iterable[Vm]) -> None:
        """Note VMs that exist."""
        now_s = self._clock()
        with self._lock:
            self._seen |= {
                vm.vm_id: (now_s, vm) for vm in vms if vm.vm_id not in self._ended
            }

    def add(self, job: str, listed: Sequence[Vm]) -> tuple[Vm, ...]:
        """Return what is listed of a job and what was, of late.

        Of a VM that ended before this process ever saw it little more is known than that.

        Raises:
            CloudError: Google cannot be asked when VMs ended.
        """
        self.note(listed)
        if job not in self._recalled:
            self._recall(job)
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
            past = [vm for _, vm in self._ended.values() if vm.job == job]
            ids = set(self._ended)
        return (*(vm for vm in listed if vm.vm_id not in ids), *past)

    def find(self, zone: str, names: Collection[str]) -> dict[str, float]:
        """Return when VMs ended, by name; those that have not are left out.

        Raises:
            CloudError: Google cannot be asked.
        """
        with explained(f"asking when VMs in {zone} ended"):
            asked = self._asked | {"zone": zone}
            ends = _ends(self._clients.all("zone_operations", "list", asked))
        return {name: at_s for name, at_s in ends.items() if name in names}

    @property
    def _asked(self) -> dict[str, Any]:
        return {
            "project": self._settings.project,
            "filter": requests.any_of("operationType", _ENDINGS),
        }

    def _recall(self, job: str) -> None:
        """Note the VMs of a job that ended before this process looked."""
        now_s, prefix = self._clock(), requests.vm_prefix(job)
        with explained("asking when VMs ended"):
            zones = list(self._clients.scopes("global_operations", self._asked))
        past = [
            gone(job, zone, name, at_s)
            for zone, told in zones
            for name, at_s in _ends(told.get("operations", ())).items()
            if name.startswith(prefix)
        ]
        with self._lock:
            for vm in past:
                if vm.vm_id not in self._seen:  # of those more is known
                    self._ended.setdefault(vm.vm_id, (now_s, vm))
            self._recalled.add(job)

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


def _ends(operations: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return when VMs ended, by name."""
    ends: dict[str, float] = {}
    for operation in operations:
        name = last_part(operation.get("target_link", ""))
        if operation["status"] == "DONE" and not operation.get("error"):
            at_s = moment(operation["end_time"])
            ends[name] = min(at_s, ends.get(name, at_s))
    return ends


def _younger(noted: Noted, than_s: float) -> Noted:
    return {key: (at_s, vm) for key, (at_s, vm) in noted.items() if at_s > than_s}
