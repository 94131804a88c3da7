"""Checks of an Azure subscription, without renting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial

from spottrain.cloud.azure import requests
from spottrain.cloud.azure.clients import AzureClients
from spottrain.cloud.azure.market import AzureMarket
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.azure.translate import get_or_none, translating_errors
from spottrain.cloud.port.errors import AuthError, CloudError, MisconfiguredError
from spottrain.cloud.port.facts import check_offered
from spottrain.cloud.port.provider import Finding, run_check
from spottrain.units import counted

_QUOTAS_URL = "https://portal.azure.com/#view/Microsoft_Azure_Capacity/QuotaMenuBlade"
_PERMISSIONS_VERSION = "2022-04-01"
ACTIONS = (
    "Microsoft.Compute/skus/read",
    "Microsoft.Compute/locations/usages/read",
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/write",
    "Microsoft.Compute/virtualMachines/delete",
    "Microsoft.Compute/disks/write",
    "Microsoft.Compute/disks/delete",
    "Microsoft.Network/networkInterfaces/read",
    "Microsoft.Network/networkInterfaces/write",
    "Microsoft.Network/networkInterfaces/join/action",
    "Microsoft.Network/networkInterfaces/delete",
    "Microsoft.Network/publicIPAddresses/read",
    "Microsoft.Network/publicIPAddresses/write",
    "Microsoft.Network/publicIPAddresses/join/action",
    "Microsoft.Network/publicIPAddresses/delete",
    "Microsoft.Network/virtualNetworks/subnets/read",
    "Microsoft.Network/virtualNetworks/subnets/join/action",
    "Microsoft.Resources/subscriptions/resourceGroups/read",
)
"""Required by every job."""
OWN_GROUP_ACTIONS = (
    "Microsoft.Resources/subscriptions/resourceGroups/write",
    "Microsoft.Resources/subscriptions/resourceGroups/delete",
)
"""Also required if no resource group is named."""
NAMED_GROUP_ACTIONS = ("Microsoft.Resources/subscriptions/resourceGroups/resources/read",)
"""Also required if one is named."""
OWN_NETWORK_ACTIONS = (
    "Microsoft.Network/networkSecurityGroups/read",
    "Microsoft.Network/networkSecurityGroups/write",
    "Microsoft.Network/networkSecurityGroups/join/action",
    "Microsoft.Network/networkSecurityGroups/delete",
    "Microsoft.Network/virtualNetworks/read",
    "Microsoft.Network/virtualNetworks/write",
    "Microsoft.Network/virtualNetworks/delete",
)
"""Also required if a region has no subnet of the user's."""
OWN_IDENTITY_ACTIONS = (
    "Microsoft.ManagedIdentity/userAssignedIdentities/read",
    "Microsoft.ManagedIdentity/userAssignedIdentities/write",
    "Microsoft.ManagedIdentity/userAssignedIdentities/delete",
    "Microsoft.Authorization/roleAssignments/read",
    "Microsoft.Authorization/roleAssignments/write",
    "Microsoft.Authorization/roleDefinitions/read",
)
"""Also required if VMs delete themselves by the job's own identity."""
ROLE_ACTIONS = ("Microsoft.Authorization/roleDefinitions/write",)
"""Also required until the subscription has the role of VMs."""
IDENTITY_ACTIONS = ("Microsoft.ManagedIdentity/userAssignedIdentities/assign/action",)
"""Also required if VMs delete themselves."""
LOG_ACTIONS = ("Microsoft.Insights/eventtypes/values/read",)
"""Optional: exact end times of VMs."""
MARKET_ACTIONS = (
    "Microsoft.Network/locations/usages/read",
    "Microsoft.ResourceGraph/resources/read",
)
"""Optional: quotas of public addresses; eviction rates of sizes and regions."""
OTHER_ACTIONS = (
    "Microsoft.Authorization/permissions/read",
    "Microsoft.Compute/locations/publishers/artifacttypes/offers/skus/versions/read",
)
"""Used by ``check``; no job needs them."""


class AzureChecks:
    """Checks what a job needs, one item after the other."""

    def __init__(self, clients: AzureClients, settings: AzureSettings, market: AzureMarket) -> None:
        self._clients = clients
        self._settings = settings
        self._market = market

    def run(self) -> Iterator[Finding]:
        """Yield findings; stop if credentials are refused."""
        first = run_check("credentials", self._credentials)
        yield first
        if not first.ok:
            return
        yield run_check("permissions", self._permissions)
        yield run_check("activity log", self._activity_log)
        for region in self._settings.regions:
            yield run_check(f"types {region}", partial(self._types, region), "types")
            yield run_check(f"image {region}", partial(self._image, region))
            yield run_check(f"quota {region} spot", partial(self._quota, region), "quota")

    def _credentials(self) -> str:
        subscription = self._clients.subscription
        with translating_errors("logging in"):
            groups = list(self._clients.resources.resource_groups.list())
        return f"access to {subscription} works; it has {counted(len(groups), 'resource group')}"

    def _permissions(self) -> str:
        """Check that all needed actions are allowed.

        Raises:
            AuthError: some are not.
        """
        due = needed_actions(self._settings)
        if set(OWN_IDENTITY_ACTIONS) <= set(due) and not self._has_role():
            due += ROLE_ACTIONS
        if missing := self._denied(due):
            raise AuthError(f"Azure does not allow {', '.join(missing)}; ask an owner")
        return f"all {len(due)} actions are allowed"

    def _has_role(self) -> bool:
        """Return True if somebody has made the role of VMs in this subscription."""
        role_id, _ = requests.role(self._clients.subscription)
        with translating_errors("looking for the role of VMs"):
            found = get_or_none(
                self._clients.resources.resources.get_by_id,
                role_id,
                api_version=requests.GRANT_VERSION,
            )
        return found is not None

    def _activity_log(self) -> str:
        """Report whether the Activity Log can be read; it is optional."""
        if missing := self._denied(LOG_ACTIONS):
            return (
                "cannot be read, so a preempted VM is billed until it is missing "
                f"from a list; for exact end times allow {', '.join(missing)}"
            )
        return "can be read; it reports when VMs ended"

    def _denied(self, due: Sequence[str]) -> list[str]:
        """Return the actions that the account is not allowed."""
        scope = f"/subscriptions/{self._clients.subscription}"
        if self._settings.resource_group:
            scope += f"/resourceGroups/{self._settings.resource_group}"
        with translating_errors("asking for permissions"):
            permissions = self._clients.resources.resources.get_by_id(
                f"{scope}/providers/Microsoft.Authorization/permissions",
                api_version=_PERMISSIONS_VERSION,
            ).as_dict()
        return [action for action in due if not _allowed(action, permissions["value"])]

    def _types(self, region: str) -> str:
        wanted = self._settings.instance_types
        return check_offered(region, wanted, self._market.sizes(region))

    def _image(self, region: str) -> str:
        """Return the image's name.

        Raises:
            MisconfiguredError: it does not exist.
        """
        named = self._settings.image
        if "id" not in requests.image(named):
            found = self._market.image_versions(region, named)
        else:
            with translating_errors(f"looking for image {named} in {region}"):
                self._clients.resources.resources.get_by_id(named, api_version="2024-03-03")
            return named
        if not found:
            raise MisconfiguredError(f"{region} has no image {named}; give azure.image")
        return named

    def _quota(self, region: str) -> str:
        """Return the spot quota.

        Raises:
            CloudError: it is 0.
        """
        for quota in self._market.quotas(region):
            if quota.spot and quota.limit > 0:
                return f"{quota.limit:g} virtual CPUs, {quota.used or 0:g} in use"
        raise CloudError(
            f"0 virtual CPUs: nothing can be rented; ask Azure for more at {_QUOTAS_URL}"
        )


def needed_actions(settings: AzureSettings) -> tuple[str, ...]:
    """Return the actions that the account must be allowed."""
    due: tuple[str, ...] = ACTIONS
    due += NAMED_GROUP_ACTIONS if settings.resource_group else OWN_GROUP_ACTIONS
    if any(region not in settings.subnets for region in settings.regions):
        due += OWN_NETWORK_ACTIONS
    if settings.self_delete or settings.identity:
        due += IDENTITY_ACTIONS
        if not settings.identity:
            due += OWN_IDENTITY_ACTIONS
    return due


def _allowed(action: str, permissions: list[dict[str, list[str]]]) -> bool:
    """Return True if a permission includes an action, ignoring case."""
    action = action.lower()

    def named(patterns: list[str]) -> bool:
        return any(fnmatchcase(action, pattern.lower()) for pattern in patterns)

    return any(
        named(each.get("actions", [])) and not named(each.get("notActions", []))
        for each in permissions
    )
