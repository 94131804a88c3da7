"""Creates and deletes single VMs, each created at most once."""

from __future__ import annotations

from typing import Any

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import is_missing, status_of, translate
from spottrain.cloud.port.errors import CloudError, NoCapacityError, undecided

Resource = dict[str, Any]
"""A VM in Azure's JSON."""
_REFUSED, _EXISTS = 400, 412


class AzureLaunches:
    """Creates and deletes VMs of one subscription."""

    def __init__(self, clients: AzureClients, settings: AzureSettings) -> None:
        self._clients = clients
        self._settings = settings

    def make(self, group: str, name: str, body: Resource, doing: str) -> Resource:
        """Return a VM that this call or an earlier one created.

        Azure reports missing capacity at once or up to a minute later; a VM that is
        still undecided after ``allocation_s`` counts as created.

        Raises:
            CloudError: it was refused (a subclass); or the outcome is unknown, and a
                retry is safe.
        """
        from azure.core.exceptions import AzureError

        try:
            found = self._begin(group, name, body)
        except AzureError as error:
            raise translate(error, doing) from error
        if isinstance(found, dict):
            return found
        try:
            found.wait(self._settings.allocation_s)
        except AzureError as error:
            if 0 < status_of(error) < _REFUSED:  # the allocation failed
                self._clear(group, name)
                raise translate(error, doing) from error
            with undecided():
                raise translate(error, doing) from error
        vm = self._look(group, name)
        if vm is None:
            raise CloudError(f"Azure, {doing}: {name} has already ended; retry")
        return vm

    def get(self, group: str, name: str) -> Resource | None:
        """Return a VM, None if it does not exist; unlike a list this does not lag."""
        from azure.core.exceptions import AzureError

        try:
            found = self._clients.compute.virtual_machines.get(group, name)
        except AzureError as error:
            if is_missing(error):
                return None
            raise translate(error, f"looking at {name}") from error
        resource: Resource = found.as_dict()
        return resource

    def end(self, group: str, name: str, *, wait: bool = False) -> None:
        """Delete a VM and its own resources; a missing one is not an error."""
        from azure.core.exceptions import AzureError

        try:
            poller = self._clients.compute.virtual_machines.begin_delete(
                group, name, force_deletion=True, polling=wait
            )
            if wait:
                poller.wait(self._settings.allocation_s)
        except AzureError as error:
            if not is_missing(error):
                raise translate(error, f"deleting {name}") from error

    def _begin(self, group: str, name: str, body: Resource) -> Any:
        """Return a poller, or the VM that an earlier call created."""
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        try:
            return self._clients.compute.virtual_machines.begin_create_or_update(
                group, name, body, match_condition=MatchConditions.IfMissing
            )
        except HttpResponseError as error:
            if status_of(error) != _EXISTS:
                raise
        vm = self._look(group, name)
        if vm is None or requests.is_leaving(vm):
            raise CloudError(f"Azure is still removing {name}; retry")
        if requests.has_failed(vm):
            self._clear(group, name)
            raise NoCapacityError(f"Azure failed to create {name}")
        return vm

    def _look(self, group: str, name: str) -> Resource | None:
        """Return a VM that was asked for.

        Raises:
            CloudError: the outcome is unknown; a retry is safe.
        """
        with undecided():
            return self.get(group, name)

    def _clear(self, group: str, name: str) -> None:
        """Delete a VM that could not be made."""
        self.end(group, name, wait=True)
