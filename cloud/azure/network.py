"""Shared resources of a job's VMs: a resource group, a network, and an identity.

Their names derive from the job's and requests are idempotent, so that they are found
again after a crash between any two calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.requests import AzurePlacement
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import get_or_none, translating_errors
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import AuthError, CloudError, MisconfiguredError

_IDENTITY_VERSION = "2023-01-31"
_MACHINES = "Microsoft.Compute/virtualMachines"
_REMOVAL: tuple[dict[str, str], ...] = (
    {"Microsoft.Network/networkInterfaces": "2023-09-01"},
    {
        "Microsoft.Compute/disks": "2023-10-02",
        "Microsoft.Network/publicIPAddresses": "2023-09-01",
        "Microsoft.Network/virtualNetworks": "2023-09-01",
    },
    {"Microsoft.Network/networkSecurityGroups": "2023-09-01"},
)
"""Resources that a job may leave in a shared group, with the API version of each type;
users of a resource come before it."""


class AzureNetwork:
    """The shared resources of each job's VMs."""

    def __init__(self, clients: AzureClients, settings: AzureSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._lock = threading.Lock()
        self._placements: dict[tuple[str, str], tuple[str, str]] = {}

    def placement(self, job: str, region: str, *, accelerated: bool) -> AzurePlacement:
        """Return the placement of a job's VMs in a region; created if needed.

        Args:
            job: Name of the job.
            accelerated: The size supports accelerated networking.

        Raises:
            MisconfiguredError: there is no such group or subnet.
            AuthError: the account may not let VMs delete themselves.
        """
        key = job, region
        with self._lock:  # else parallel launches would create everything twice
            if key not in self._placements:
                group = self._group(job, region)
                self._placements[key] = (
                    self._subnet(job, region, group),
                    self._identity(job, region, group),
                )
            subnet_id, identity_id = self._placements[key]
        return AzurePlacement(subnet_id, identity_id, accelerated)

    def forget(self, job: str) -> None:
        """Check the resources again at the next launch: some may be missing."""
        with self._lock:
            self._placements = {k: v for k, v in self._placements.items() if k[0] != job}

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only, where there are rules of our own."""
        self._settings = replace(self._settings, ssh_from=tuple(networks))
        group, rules = (
            requests.group_of(job, self._settings),
            self._clients.network.network_security_groups,
        )
        for region in self._settings.regions:
            name = f"{requests.prefix(job, self._settings)}{region}"
            if get_or_none(rules.get, group, name) is not None:
                wanted = requests.rules(job, region, self._settings)
                rules.begin_create_or_update(group, name, wanted).result()

    def release(self, job: str) -> None:
        """Remove all resources of a job.

        Raises:
            CloudError: the removal takes longer than ``removal_s``.
        """
        self.forget(job)
        until_s = time.monotonic() + self._settings.removal_s
        with self._lock:
            if self._settings.resource_group:
                self._clear_group(job, until_s)
            else:
                self._remove_group(job, until_s)

    # --- Find or create ---------------------------------------------------------------

    def _group(self, job: str, region: str) -> str:
        """Return the group's name."""
        name = requests.group_of(job, self._settings)
        groups = self._clients.resources.resource_groups
        found = get_or_none(groups.get, name)
        if self._settings.resource_group:
            if found is None:
                raise MisconfiguredError(
                    f"Azure: there is no resource group {name}; correct the job file"
                )
        elif found is None:
            groups.create_or_update(name, requests.group(job, region, self._settings))
        else:
            self._check_own(found.as_dict(), name, job)
        return name

    def _subnet(self, job: str, region: str, group: str) -> str:
        """Return the id of the region's subnet: the named one or our own."""
        network = self._clients.network
        named = self._settings.subnets.get(region)
        if named is not None:
            resource = self._clients.resources.resources.get_by_id
            if get_or_none(resource, named, api_version="2023-09-01") is None:
                raise MisconfiguredError(f"Azure: there is no subnet {named}; correct the job file")
            return named
        name = f"{requests.prefix(job, self._settings)}{region}"
        rules = network.network_security_groups.begin_create_or_update(
            group, name, requests.rules(job, region, self._settings)
        ).result()
        made = network.virtual_networks.begin_create_or_update(
            group, name, requests.network(job, region, rules.id, self._settings)
        ).result()
        return str(made.subnets[0].id)

    def _identity(self, job: str, region: str, group: str) -> str:
        """Return the id of the VMs' identity for deleting themselves; empty for
        none."""
        settings = self._settings
        if settings.identity or not settings.self_delete:
            return settings.identity
        if settings.resource_group:
            raise MisconfiguredError(
                f"Azure: in the shared resource group {group} VMs can delete "
                "themselves only by an identity of yours; give azure.identity, or "
                "self_delete: false (then a VM without a manager keeps billing)"
            )
        subscription = self._clients.subscription
        resources = self._clients.resources.resources
        identity_id = requests.identity_id(subscription, group, job, settings)
        made = resources.begin_create_or_update_by_id(
            identity_id,
            requests.group(job, region, self._settings),
            api_version=_IDENTITY_VERSION,
        ).result()
        principal = made.as_dict()["properties"]["principalId"]
        try:
            with translating_errors(f"letting VMs of {job} delete themselves"):
                self._grant(group, principal)
        except AuthError as error:
            raise AuthError(
                f"{error}; or give azure.identity, or self_delete: false (then a VM "
                "without a manager keeps billing)"
            ) from error
        return identity_id

    def _grant(self, group: str, principal: str) -> None:
        """Let an identity delete VMs of a group; make the role for it if need be."""
        subscription = self._clients.subscription
        resources = self._clients.resources.resources
        role_id, role = requests.role(subscription)
        version = {"api_version": requests.GRANT_VERSION}
        # Reading is allowed to more people than making one.
        if get_or_none(resources.get_by_id, role_id, **version) is None:
            resources.begin_create_or_update_by_id(role_id, role, **version).result()
        grant_id, grant = requests.grant(subscription, group, principal)
        resources.begin_create_or_update_by_id(grant_id, grant, **version).result()

    def _check_own(self, group: Mapping[str, Any], name: str, job: str) -> None:
        """Refuse a group that is not the job's, or is being removed.

        Raises:
            MisconfiguredError: it belongs to something else.
            CloudError: it is being removed.
        """
        if not tags.is_ours(group.get("tags") or {}, job, self._settings):
            raise MisconfiguredError(
                f"Azure: resource group {name} exists and does not belong to job {job}; "
                "give azure.resource_group or rename the job"
            )
        if group.get("properties", {}).get("provisioningState") == "Deleting":
            raise CloudError(f"Azure is still removing resource group {name}; retry")

    # --- Remove -----------------------------------------------------------------------

    def _remove_group(self, job: str, until_s: float) -> None:
        groups = self._clients.resources.resource_groups
        name = requests.group_of(job, self._settings)
        found = get_or_none(groups.get, name)
        if found is not None and tags.is_ours(found.tags or {}, job, self._settings):
            deletion = groups.begin_delete(name, force_deletion_types=_MACHINES)
            _await_all({f"resource group {name}": deletion}, until_s)

    def _clear_group(self, job: str, until_s: float) -> None:
        """Remove resources with our names; the group itself is the user's."""
        group, first = (
            requests.group_of(job, self._settings),
            requests.prefix(job, self._settings),
        )
        machines = self._clients.compute.virtual_machines
        pollers = {
            vm.name: machines.begin_delete(group, vm.name, force_deletion=True)
            for vm in machines.list(group)
            if vm.name.startswith(first)
        }
        _await_all(pollers, until_s)
        resources = self._clients.resources.resources
        found = [
            each for each in resources.list_by_resource_group(group) if each.name.startswith(first)
        ]
        for stage in _REMOVAL:
            versions = {kind.lower(): version for kind, version in stage.items()}
            pollers = {
                each.id: resources.begin_delete_by_id(
                    each.id, api_version=versions[each.type.lower()]
                )
                for each in found
                if each.type.lower() in versions
            }
            _await_all(pollers, until_s)


def _await_all(pollers: Mapping[str, Any], until_s: float) -> None:
    """Wait for removals, given by resource.

    Raises:
        CloudError: one takes longer.
    """
    for what, poller in pollers.items():
        poller.wait(max(0.0, until_s - time.monotonic()))
        if not poller.done():
            raise CloudError(f"Azure is still removing {what}; retry")
