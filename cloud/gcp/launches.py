"""Launches: idempotent bulk inserts, safe across failures.

Google forgets a request's id after an hour, but keeps its operation, with the id, for
two weeks. So a launch first looks for its operation; after a failed one, the next
attempt gets a new id.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

from spottrain.cloud.gcp import answers, requests
from spottrain.cloud.gcp.clients import GcpClients, Message
from spottrain.cloud.gcp.ends import GcpEndTimes
from spottrain.cloud.gcp.requests import GcpPlacement
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.gcp.translate import raise_failed, translating_errors
from spottrain.cloud.lag.ended import terminated_from_launch
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import CloudError, undecided
from spottrain.cloud.port.facts import CloudFacts
from spottrain.cloud.port.provider import LaunchRequest, LaunchResult, Vm

_ATTEMPTS_PER_LISTING = 8
"""Attempts of one launch whose operations are listed in one call."""


class GcpLaunches:
    """Launches VMs."""

    def __init__(
        self,
        clients: GcpClients,
        settings: GcpSettings,
        facts: CloudFacts,
        ends: GcpEndTimes,
    ) -> None:
        self._clients = clients
        self._settings = settings
        self._facts = facts
        self._ends = ends

    def launch(self, request: LaunchRequest, placement: GcpPlacement, owner: str) -> LaunchResult:
        """Return the VMs of a launch, created now or before.

        Args:
            placement: The VMs' network.
            owner: Who rents them.

        Raises:
            NoCapacityError, QuotaExceededError, ...: no VM was created.
            CloudError: the outcome is unknown; retry.
        """
        until_s = time.monotonic() + self._settings.launch_s
        owned = replace(self._settings, owner=owner)
        begun: dict[str, Message] = {}
        for attempt in itertools.count():
            if attempt % _ATTEMPTS_PER_LISTING == 0:
                begun = self._begun(request, attempt)
            operation = begun.get(requests.request_id(request.token, attempt))
            before = operation is not None
            if operation is None:
                arguments = requests.bulk_insert(request, placement, owned, attempt)
                operation = self._clients.call("instances", "bulk_insert_unary", arguments)
            left_s = max(0.0, until_s - time.monotonic())
            with undecided(), translating_errors(f"waiting for VMs in {request.offer.zone}"):
                operation = self._clients.finish(operation, left_s)
                failed = bool(operation.get("error"))
                nothing = failed and not answers.created(operation)
                vms = () if nothing else self._made(request, operation)
            if not failed or any(vm.state.is_alive for vm in vms):
                return LaunchResult(vms=vms)
            if not before:
                raise_failed(operation)
        raise AssertionError("unreachable")

    def _begun(self, request: LaunchRequest, first: int) -> dict[str, Message]:
        """Return the operations of attempts of a launch, by request id.

        Args:
            first: Number of the first of these attempts.
        """
        tries = range(first, first + _ATTEMPTS_PER_LISTING)
        ids = [requests.request_id(request.token, each) for each in tries]
        which = requests.any_of("clientOperationId", ids)
        arguments = {"zone": request.offer.zone, "filter": which}
        found = self._clients.all("zone_operations", "list", arguments)
        return {each.get("client_operation_id", ""): each for each in found}

    def _made(self, request: LaunchRequest, operation: Message) -> tuple[Vm, ...]:
        """Return the VMs of a bulk insert; looked up one by one if the list lags.

        Raises:
            CloudError: not all of them are found yet.
        """
        zone = request.offer.zone
        due = answers.created(operation)
        if not operation.get("error"):
            due = max(due, 1)  # it requires at least one
        which = requests.labelled(tags.INTENT, request.intent)
        arguments = {"zone": zone, "filter": which}
        listed = self._clients.all("instances", "list", arguments)
        named = {each["name"]: answers.vm_of(each, self._facts) for each in listed}
        names = requests.vm_names(request, self._settings.uid)
        found = {name: named[name] for name in names if name in named}
        if len(found) < due:
            for name in names:
                if name not in found and (vm := self._find(zone, name)) is not None:
                    found[name] = vm
        if len(found) < due:
            began_s = answers.parse_time_s(operation["insert_time"])
            for name, at_s in self._ends.find(zone, names, began_s).items():
                vm_id = requests.vm_id_of(zone, name)
                past = terminated_from_launch(request, vm_id, began_s, at_s)
                found.setdefault(name, past)
        if len(found) < due:
            raise CloudError(
                f"GCP: only {len(found)} of {due} VMs created in {zone} are visible "
                "yet; will be retried"
            )
        return tuple(found.values())

    def _find(self, zone: str, name: str) -> Vm | None:
        arguments = {"zone": zone, "instance": name}
        instance = self._clients.find("instances", "get", arguments)
        return None if instance is None else answers.vm_of(instance, self._facts)
