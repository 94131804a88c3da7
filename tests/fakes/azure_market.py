"""What the fake Azure says of types, quotas, images and permissions."""

from __future__ import annotations

from typing import Any

from tests.fakes.azure_http import Call, Reply
from tests.fakes.azure_model import check
from tests.fakes.azure_vms import RefusedError
from tests.fakes.azure_world import World


def skus(world: World, call: Call) -> Reply:
    """Answer which types a region has."""
    region = call.query["$filter"].split("'")[1]
    told = [
        _sku(region, name, size)
        for (where, name), size in world.sizes.items()
        if where == region
    ]
    disk = {"resourceType": "disks", "name": "Premium_LRS", "locations": [region]}
    for each in (disk, *told):
        check("compute.ResourceSku", each, request=False)
    return Reply(200, {"value": [disk, *told]})


def images(world: World, call: Call) -> Reply:
    """Answer which versions an image has."""
    found = call.found
    urn = f"{found['publisher']}:{found['offer']}:{found['sku']}"
    if urn not in world.images:
        raise RefusedError(404, "NotFound", f"Artifact: VMImage {urn} not found")
    told = [{"name": "24.04.2026", "location": "eastus", "id": call.path}]
    check("compute.VirtualMachineImageResource", told[0], request=False)
    return Reply(200, told)


def usages(world: World, call: Call) -> Reply:
    """Answer how much of each quota is used."""
    region = call.found["region"]
    told = []
    for (where, family), limit in world.quotas.items():
        if where == region:
            used = world.used(region, family)
            # Azure writes some names with stray spaces.
            name = {"value": f"{family} ", "localizedValue": family}
            told.append(
                {
                    "unit": "Count",
                    "currentValue": used,
                    "limit": limit,
                    "name": name,
                }
            )
    for each in told:
        check("compute.Usage", each, request=False)
    return Reply(200, {"value": told})


def permissions(world: World, call: Call) -> Reply:
    """Answer what the caller may do."""
    denied = ["Microsoft.Authorization/*/Write"] * world.denied_grants
    denied += ["Microsoft.Authorization/roleDefinitions/write"] * world.denied_roles
    denied += ["Microsoft.Insights/*"] * world.denied_log
    return Reply(200, {"value": [{"actions": ["*"], "notActions": denied}]})


def _sku(region: str, name: str, size: Any) -> dict[str, Any]:
    restrictions: list[dict[str, Any]] = []
    if size.closed:
        whole = "Location" if "*" in size.closed else "Zone"
        info: dict[str, Any] = {"locations": [region]}
        if whole == "Zone":
            info["zones"] = list(size.closed)
        restrictions.append(
            {
                "type": whole,
                "values": [region],
                "restrictionInfo": info,
                "reasonCode": "NotAvailableForSubscription",
            }
        )
    return {
        "resourceType": "virtualMachines",
        "name": name,
        "family": size.family,
        "locations": [region],
        "locationInfo": [{"location": region, "zones": list(size.zones)}],
        "capabilities": [
            {"name": "vCPUs", "value": str(size.vcpus)},
            {"name": "LowPriorityCapable", "value": str(size.spot)},
            {"name": "AcceleratedNetworkingEnabled", "value": "True"},
        ],
        "restrictions": restrictions,
    }
