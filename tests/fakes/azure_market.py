"""What the fake Azure says of types, quotas, images and permissions."""

from __future__ import annotations

import re
from typing import Any

from tests.fakes.azure_http import Call, Reply
from tests.fakes.azure_model import check
from tests.fakes.azure_vms import RefusedError
from tests.fakes.azure_world import World

_EVICTION_RATES = (
    r"SpotResources "
    r"\| where type =~ 'microsoft\.compute/skuspotevictionrate/location' "
    r"\| where sku\.name in~ \((?P<sizes>[^)]+)\) and location in~ "
    r"\((?P<regions>[^)]+)\) "
    r"\| project size = tostring\(sku\.name\), location, "
    r"rate = tostring\(properties\.evictionRate\)"
)


def skus(world: World, call: Call) -> Reply:
    """Answer which types a region has."""
    region = call.query["$filter"].split("'")[1]
    told = [
        _sku(region, name, size) for (where, name), size in world.sizes.items() if where == region
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
    told = [
        {"name": version, "location": "eastus", "id": f"{call.path}/{version}"}
        for version in world.images[urn]
    ]
    for each in told:
        check("compute.VirtualMachineImageResource", each, request=False)
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


def address_usages(world: World, call: Call) -> Reply:
    """Answer how many public addresses of a region are used."""
    region = call.found["region"]
    told = [
        {
            "id": f"{call.path}/{name}",
            "unit": "Count",
            "currentValue": world.public_addresses(region),
            "limit": limit,
            "name": {"value": name, "localizedValue": name},
        }
        for (where, name), limit in world.addresses.items()
        if where == region
    ]
    for each in told:
        check("network.Usage", each, request=False)
    return Reply(200, {"value": told})


def permissions(world: World, call: Call) -> Reply:
    """Answer what the caller may do."""
    denied = ["Microsoft.Authorization/*/Write"] * world.denied_grants
    denied += ["Microsoft.Authorization/roleDefinitions/write"] * world.denied_roles
    denied += ["Microsoft.Insights/*"] * world.denied_log
    return Reply(200, {"value": [{"actions": ["*"], "notActions": denied}]})


def eviction_rates(world: World, call: Call) -> Reply:
    """Answer a query of Resource Graph for eviction rates, the only one it can parse.

    The table is the tenant's: a query within subscriptions finds nothing ("Azure Won't Show
    You Spot Eviction History", caleta.io, 2026). Resource Graph writes sizes as the
    catalogue does, or in lower case.
    """
    text = call.body["query"]
    wanted = re.fullmatch(_EVICTION_RATES, text)
    if wanted is None:
        raise RefusedError(400, "BadRequest", f"ParserFailure: {text}")
    sizes, regions = (
        {name.strip(" '").lower() for name in wanted[part].split(",")}
        for part in ("sizes", "regions")
    )
    rows = [
        {"size": name.lower(), "location": region, "rate": rate}
        for (region, name), rate in world.eviction_rates.items()
        if name.lower() in sizes and region in regions
    ]
    told = [] if call.body.get("subscriptions") else rows
    return Reply(200, {"totalRecords": len(told), "count": len(told), "data": told})


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
