"""What this project's requests must have beyond the SDK's models, which require next to
nothing: whatever is dropped or means something else is refused.
"""

from __future__ import annotations

import re
from typing import Any

from tests.fakes.azure_model import DriftError
from tests.fakes.azure_vms import told_to_boot
from tests.fakes.azure_world import SUBSCRIPTION, VMS
from tests.fakes.paths import has

_TAGGED = "tags.spottrain-job"
_LAUNCHED = (
    "spottrain-job",
    "spottrain-owner",
    "spottrain-intent",
    "spottrain-expires",
    "spottrain-usd-per-hour",
    "spottrain-attached-usd-per-hour",
)
_CARD = "properties.networkProfile.networkInterfaceConfigurations"
_ADDRESS = f"{_CARD}.properties.ipConfigurations"
_RULE = "properties.securityRules"

REQUIRED: dict[str, tuple[str, ...]] = {
    "PUT virtualMachines": (
        "location",
        *(f"tags.{mark}" for mark in (*_LAUNCHED, "spottrain-host-key")),
        "properties.hardwareProfile.vmSize",
        "properties.priority",
        "properties.storageProfile.imageReference",
        "properties.storageProfile.osDisk.name",
        "properties.storageProfile.osDisk.createOption",
        "properties.storageProfile.osDisk.deleteOption",
        "properties.storageProfile.osDisk.diskSizeGB",
        "properties.storageProfile.osDisk.managedDisk.storageAccountType",
        "properties.osProfile.computerName",
        "properties.osProfile.adminUsername",
        "properties.osProfile.customData",
        "properties.osProfile.linuxConfiguration.disablePasswordAuthentication",
        "properties.osProfile.linuxConfiguration.ssh.publicKeys.path",
        "properties.osProfile.linuxConfiguration.ssh.publicKeys.keyData",
        "properties.networkProfile.networkApiVersion",
        f"{_CARD}.name",
        *(f"{_CARD}.tags.{mark}" for mark in _LAUNCHED),
        f"{_CARD}.properties.primary",
        f"{_CARD}.properties.deleteOption",
        f"{_CARD}.properties.enableAcceleratedNetworking",
        f"{_ADDRESS}.name",
        f"{_ADDRESS}.properties.primary",
        f"{_ADDRESS}.properties.subnet.id",
    ),
    "PUT networkSecurityGroups": (
        "location",
        _TAGGED,
        f"{_RULE}.name",
        *(
            f"{_RULE}.properties.{name}"
            for name in (
                "priority",
                "direction",
                "access",
                "protocol",
                "sourceAddressPrefixes",
                "sourcePortRange",
                "destinationAddressPrefix",
                "destinationPortRange",
            )
        ),
    ),
    "PUT virtualNetworks": (
        "location",
        _TAGGED,
        "properties.addressSpace.addressPrefixes",
        "properties.subnets.name",
        "properties.subnets.properties.addressPrefix",
        "properties.subnets.properties.networkSecurityGroup.id",
    ),
    "PUT resourceGroups": ("location", _TAGGED),
    "PUT userAssignedIdentities": ("location", _TAGGED),
    "PUT roleDefinitions": (
        "properties.roleName",
        "properties.type",
        "properties.permissions.actions",
        "properties.assignableScopes",
    ),
    "PUT roleAssignments": (
        "properties.roleDefinitionId",
        "properties.principalId",
        "properties.principalType",
    ),
}
"""By operation: what must be there, in every item of the lists on the way."""

QUERY: dict[str, frozenset[str]] = {
    "DELETE virtualMachines": frozenset({"forceDeletion"}),
    "GET networkInterfaces": frozenset({"$expand"}),
    "LIST skus": frozenset({"$filter"}),
    "DELETE resourceGroups": frozenset({"forceDeletionTypes"}),
    "LIST events": frozenset({"$filter", "$select"}),
}
"""By operation: parameters of the URL beside api-version, all needed."""
_VALUES = {
    "forceDeletion": {"true"},
    "$expand": {"IPConfigurations/PublicIPAddress"},
    "forceDeletionTypes": {"Microsoft.Compute/virtualMachines"},
}
_OPEN_BODIES = {
    "PUT userAssignedIdentities": {"location", "tags"},
    "PUT roleAssignments": {"properties"},
    "PUT roleDefinitions": {"properties"},
    "POST resources": {"query", "options", "subscriptions"},
}
"""Bodies of which the SDK has no model, and what they may hold."""


def check_query(operation: str, query: dict[str, str]) -> None:
    """Check the parameters of a URL.

    Raises:
        DriftError: one is missing, unknown or odd.
    """
    wanted = set(QUERY.get(operation, ()))
    given = set(query) - {"api-version", "$skiptoken", "$skipToken"}
    if given != wanted:
        raise DriftError(f"{operation}: parameters {sorted(given)}, not {wanted}")
    for name in given & _VALUES.keys():
        if query[name] not in _VALUES[name]:
            raise DriftError(f"{operation}: {name}={query[name]}")
    skus = operation == "LIST skus"
    if skus and not re.fullmatch(r"location eq '\w+'", query["$filter"]):
        raise DriftError(f"{operation}: $filter={query['$filter']}")


def check_body(operation: str, body: dict[str, Any]) -> None:
    """Check a body that fits the model already.

    Raises:
        DriftError: something is missing or contradicts itself.
    """
    missing = [p for p in REQUIRED.get(operation, ()) if not has(body, p)]
    if missing:
        raise DriftError(f"{operation}: missing: {missing}")
    known = _OPEN_BODIES.get(operation)
    if known is not None and set(body) - known:
        raise DriftError(f"{operation}: unknown: {sorted(set(body) - known)}")
    if operation == "PUT virtualMachines":
        _check_vm(body)
    if operation == "PUT roleAssignments":
        _check_grant(body["properties"])
    if operation == "PUT roleDefinitions":
        _check_role(body["properties"])
    if "tags" in body and operation != "PUT virtualMachines":
        _check_tags(operation, body["tags"], {"spottrain-job"})


def _check_vm(body: dict[str, Any]) -> None:
    told, operation = body["properties"], "PUT virtualMachines"
    _check_tags(operation, body["tags"], {*_LAUNCHED, "spottrain-host-key"})
    spot = {"evictionPolicy", "billingProfile"} & told.keys()
    due = {"evictionPolicy", "billingProfile"} if told["priority"] == "Spot" else set()
    if spot != due or (due and told["evictionPolicy"] != "Delete"):
        raise DriftError(f"{operation}: half a spot VM: {sorted(spot)}")
    if due and "maxPrice" not in told["billingProfile"]:
        raise DriftError(f"{operation}: no maxPrice")
    reference = told["storageProfile"]["imageReference"]
    if reference.keys() not in ({"id"}, {"publisher", "offer", "sku", "version"}):
        raise DriftError(f"{operation}: half an image: {reference}")
    (card,) = told["networkProfile"]["networkInterfaceConfigurations"]
    _check_tags(operation, card["tags"], set(_LAUNCHED))
    (address,) = card["properties"]["ipConfigurations"]
    _check_address(address["properties"])
    script = _first_script(told["osProfile"]["customData"])
    if "identity/oauth2" in script:
        identity = body.get("identity", {})
        ids = identity.get("userAssignedIdentities")
        if identity.get("type") != "UserAssigned" or not ids:
            raise DriftError(f"{operation}: deletes itself without an identity")
    if "zones" in body and not re.fullmatch(r"\d", "".join(body["zones"])):
        raise DriftError(f"{operation}: zones {body['zones']}")


def _check_address(told: dict[str, Any]) -> None:
    """A VM in a network of the job's own must have an address: it is no other way in."""
    public = told.get("publicIPAddressConfiguration")
    if public is None:
        if told["subnet"]["id"].endswith("/subnets/vms"):
            raise DriftError("PUT virtualMachines: no way to reach it")
        return
    paths = (
        "name",
        *(f"tags.{mark}" for mark in _LAUNCHED),
        "sku.name",
        "sku.tier",
        "properties.deleteOption",
        "properties.publicIPAllocationMethod",
    )
    missing = [path for path in paths if not has(public, path)]
    if missing:
        raise DriftError(f"PUT virtualMachines: address lacks {missing}")
    _check_tags("PUT virtualMachines", public["tags"], set(_LAUNCHED))


_ROLE = {
    "type": "CustomRole",
    "permissions": [{"actions": [f"{VMS}/read", f"{VMS}/delete"]}],
    "assignableScopes": [f"/subscriptions/{SUBSCRIPTION}"],
}


def _check_role(told: dict[str, Any]) -> None:
    """A VM may read and delete VMs, by a role that one subscription knows."""
    fits = (
        set(told) == {*_ROLE, "roleName", "description"}
        and {key: told[key] for key in _ROLE} == _ROLE
        and all(isinstance(told[key], str) for key in ("roleName", "description"))
    )
    if not fits:
        raise DriftError(f"PUT roleDefinitions: {told}")


def _check_grant(told: dict[str, Any]) -> None:
    role = r"/subscriptions/[\w-]+/providers/Microsoft\.Authorization/roleDefinitions/"
    fits = (
        told.keys() == {"roleDefinitionId", "principalId", "principalType"}
        and re.fullmatch(role + r"[\w-]+", str(told["roleDefinitionId"]))
        and re.fullmatch(r"[0-9a-f-]{36}", str(told["principalId"]))
        and told["principalType"] == "ServicePrincipal"
    )
    if not fits:
        raise DriftError(f"PUT roleAssignments: {told}")


def _check_tags(operation: str, tags: dict[str, str], due: set[str]) -> None:
    ours = {name for name in tags if name.startswith("spottrain-")}
    if not due <= tags.keys() or not ours <= due | {"spottrain-uid"}:
        raise DriftError(f"{operation}: tags {sorted(tags)}, not {sorted(due)}")


def _first_script(data: str) -> str:
    """Return what root runs at the first boot."""
    try:
        given = told_to_boot(data)
        keys = {"ed25519_private", "ed25519_public"}
        assert given.keys() == {"ssh_deletekeys", "ssh_keys", "runcmd"}
        assert given["ssh_keys"].keys() == keys
        ((_, _, script),) = given["runcmd"]
    except (ValueError, AssertionError, TypeError) as error:
        raise DriftError(f"customData: {error!r}") from None
    return str(script)
