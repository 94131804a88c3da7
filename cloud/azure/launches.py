"""One VM at a time: made once, waited for until it is decided, cleared away."""

from __future__ import annotations

from typing import Any

from spottrain.cloud.azure import answers
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import is_missing, status_of, translate
from spottrain.cloud.port.errors import CloudError

Resource = dict[str, Any]
"""A VM as Azure writes it."""
_REFUSED, _EXISTS = 400, 412


class AzureLaunches:
    """Makes and ends VMs of one subscription.

    Args:
        clients: Whom to ask.
        settings: How patient we are.
    """

    def __init__(self, clients: AzureClients, settings: AzureSettings) -> None:
        self._clients = clients
        self._settings = settings

    def make(self, group: str, name: str, body: Resource, doing: str) -> Resource:
        """Return a VM that exists from now on, made by this call or an earlier one.

        Whether there is a machine for it Azure says at once or a minute later; one
        that is still undecided after ``allocation_s`` counts as made.

        Raises:
            CloudError: it was refused, one of the kinds; or it is not known what
                happened, and asking again is safe.
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
            resource = translate(error, doing)
            if 0 < status_of(error) < _REFUSED:  # asked about, and it had failed
                self._clear(group, name)
            raise resource from error
        vm = self.get(group, name)
        if vm is None:
            raise CloudError(f"Azure, {doing}: {name} is gone already; ask again")
        return vm

    def get(self, group: str, name: str) -> Resource | None:
        """Return a VM, None if there is none; unlike a list this does not lag behind."""
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
        """Delete a VM, with all that is its own; one that is gone is no error."""
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
        """Return a poller, or the VM that an earlier call has made."""
        from azure.core import MatchConditions
        from azure.core.exceptions import HttpResponseError

        try:
            return self._clients.compute.virtual_machines.begin_create_or_update(
                group, name, body, match_condition=MatchConditions.IfMissing
            )
        except HttpResponseError as error:
            if status_of(error) != _EXISTS:
                raise
        vm = self.get(group, name)
        if vm is None or answers.is_leaving(vm):
            raise CloudError(f"Azure still removes {name}; ask again")
        if answers.has_failed(vm):
            self._clear(group, name)
            raise CloudError(f"Azure had failed to make {name}; ask again")
        return vm

    def _clear(self, group: str, name: str) -> None:
        """Delete what never came to be, so that it can be asked for again."""
        self.end(group, name, wait=True)
