"""How the fake makes a VM: what Azure refuses, and what comes with one."""

from __future__ import annotations

import base64
import json
import uuid
from copy import deepcopy
from datetime import datetime
from typing import Any

from tests.fakes.azure_world import ADDRESSES, CARDS, DISKS, VMS, Item, World

SkuNotAvailable = (409, "SkuNotAvailable", "is currently not available in location")
_LATE = "Allocation failed. We do not have sufficient capacity in this zone."


class RefusedError(Exception):
    """ARM says no.

    Args:
        status: HTTP's.
        code: ARM's.
        message: One line.
    """

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.status, self.code, self.message = status, code, message


def create(world: World, group: str, name: str, body: dict[str, Any]) -> str:
    """Make a VM that was not there; return the operation.

    Raises:
        RefusedError: it cannot be made.
    """
    _check_policy(world, name, body)
    _check_there(world, body)
    _check_quota(world, body)
    _check_addresses(world, body)
    told = body["properties"]
    zone = body.get("zones", [""])[0]
    sold_out = world.free(body["location"], zone, told["hardwareProfile"]["vmSize"]) < 1
    if sold_out and not world.late:
        raise RefusedError(*SkuNotAvailable)
    item = _build(world, group, name, body)
    now_s = datetime.fromisoformat(item.told["properties"]["timeCreated"]).timestamp()
    row = {
        "name": name,
        "group": group.lower(),
        "instance_type": told["hardwareProfile"]["vmSize"],
        "zone": f"{body['location']}-{zone}" if zone else body["location"],
        "spot": told["priority"] == "Spot",
        "tags": body["tags"],
        "made_s": world.now(),
        "launched_at": now_s,
        "ended_at": now_s if sold_out else None,
    }
    if name in world.ledger:
        world.past.append(world.ledger.pop(name))
    world.ledger[name] = row
    state = "Failed" if sold_out else "Succeeded"
    change_id = str(uuid.uuid4())
    world.happened(item, "write", "Accepted", change_id)

    def finish() -> None:
        world.happened(item, "write", state, change_id)
        if item.told["properties"]["provisioningState"] != "Deleting":
            item.told["properties"]["provisioningState"] = state

    code = "ZonalAllocationFailed" if zone else "AllocationFailed"
    error = (code, _LATE) if sold_out else None
    return world.begin(world.create_s, finish, error)


def _check_policy(world: World, name: str, body: dict[str, Any]) -> None:
    """Refuse a VM without the tags that a policy demands (microsoft/AzureTRE 2890)."""
    for tag in world.due_tags - body["tags"].keys():
        which = json.dumps({"policyAssignment": {"name": f"Require {tag}"}})
        told = f"Resource '{name}' was disallowed by policy. Policy identifiers: '[{which}]'"
        raise RefusedError(403, "RequestDisallowedByPolicy", f"{told}.")


def _check_addresses(world: World, body: dict[str, Any]) -> None:
    """Refuse one address too many (MicrosoftDocs/azure-docs 106096)."""
    card = body["properties"]["networkProfile"]["networkInterfaceConfigurations"][0]
    address = card["properties"]["ipConfigurations"][0]["properties"]
    region = body["location"]
    limits = [n for (where, _), n in world.addresses.items() if where == region]
    public = "publicIPAddressConfiguration" in address
    if public and limits and world.public_addresses(region) >= min(limits):
        told = f"Cannot create more than {min(limits)} public IP addresses for this"
        told += " subscription in this region."
        raise RefusedError(400, "PublicIPCountLimitReached", told)


def _check_there(world: World, body: dict[str, Any]) -> None:
    """Refuse what names something that does not exist."""
    told = body["properties"]
    kind = told["hardwareProfile"]["vmSize"]
    size = world.sizes.get((body["location"], kind))
    if size is None:
        raise RefusedError(400, "InvalidParameter", f"the size {kind} is not valid")
    zone = body.get("zones", [""])[0]
    if zone not in (size.zones or ("",)):
        raise RefusedError(409, "SkuNotAvailable", f"{kind} is not in zone {zone!r}")
    if told["priority"] == "Spot" and not size.spot:
        code = "AzureSpotIsNotSupportedForThisVMSize"
        raise RefusedError(409, code, f"{kind} cannot be spot")
    image = told["storageProfile"]["imageReference"]
    urn = ":".join(image.get(k, "") for k in ("publisher", "offer", "sku"))
    versions = world.images.get(urn, [])
    if not versions or image["version"] not in ("latest", *versions):
        raise RefusedError(404, "PlatformImageNotFound", f"no image {urn}")
    card = told["networkProfile"]["networkInterfaceConfigurations"][0]
    subnet = card["properties"]["ipConfigurations"][0]["properties"]["subnet"]["id"]
    if world.get(subnet.rpartition("/subnets/")[0]) is None:
        raise RefusedError(400, "InvalidResourceReference", f"no subnet {subnet}")
    for identity in body.get("identity", {}).get("userAssignedIdentities", {}):
        if world.get(identity) is None:
            raise RefusedError(400, "InvalidResourceReference", f"no {identity}")
    bid = told.get("billingProfile", {}).get("maxPrice", -1)
    price = min(i["retailPrice"] for i in world.retail.azure if i["armSkuName"] == kind)
    if bid not in (-1, None) and bid < price:
        code = "SpotPriceGreaterThanProvidedMaxPrice"
        raise RefusedError(409, code, f"the price is {price}")


def told_to_boot(data: str) -> dict[str, Any]:
    """Return what custom data tells cloud-init.

    Raises:
        ValueError: it is not for cloud-init.
    """
    first, _, rest = base64.b64decode(data, validate=True).decode().partition("\n")
    if first != "#cloud-config":
        raise ValueError(first)
    told: dict[str, Any] = json.loads(rest)
    return told


def _check_quota(world: World, body: dict[str, Any]) -> None:
    told, region = body["properties"], body["location"]
    size = world.sizes[region, told["hardwareProfile"]["vmSize"]]
    family = "lowPriorityCores" if told["priority"] == "Spot" else size.family
    limit = world.quotas.get((region, family), 10**6)
    if world.used(region, family) + size.vcpus > limit:
        raise RefusedError(
            409,
            "OperationNotAllowed",
            f"Operation could not be completed as it results in exceeding approved "
            f"{family} Cores quota. Current Limit: {limit}",
        )


def _build(world: World, group: str, name: str, body: dict[str, Any]) -> Item:
    """Keep the VM with its disk, card and address."""
    told = deepcopy(body)
    inner = told["properties"]
    boot = told_to_boot(inner["osProfile"].pop("customData"))
    keys = boot["ssh_keys"]["ed25519_private"], boot["ssh_keys"]["ed25519_public"]
    inner |= {
        "provisioningState": "Creating",
        "vmId": str(uuid.uuid4()),
        "timeCreated": world.moment(),
    }
    image = inner["storageProfile"]["imageReference"]
    urn = ":".join(image[part] for part in ("publisher", "offer", "sku"))
    newest = image["version"] == "latest"
    image["exactVersion"] = world.images[urn][-1] if newest else image["version"]
    disk = inner["storageProfile"]["osDisk"]
    world.put(DISKS, group, disk["name"], {"location": body["location"], "tags": {}})
    (asked,) = inner["networkProfile"].pop("networkInterfaceConfigurations")
    inner["networkProfile"].pop("networkApiVersion")
    item = world.put(VMS, group, name, told)
    (entry,) = inner["osProfile"]["linuxConfiguration"]["ssh"]["publicKeys"]
    where = ""
    if world.machines is not None:
        where = world.machines.boot(name, entry["keyData"], keys)
    card = _card(world, item, asked, where)
    inner = item.told["properties"]
    inner["networkProfile"]["networkInterfaces"] = [
        {
            "id": card.resource_id,
            "properties": {"primary": True, "deleteOption": "Delete"},
        }
    ]
    for identity in item.told.get("identity", {}).get("userAssignedIdentities", {}):
        ids = {"principalId": str(uuid.uuid4()), "clientId": str(uuid.uuid4())}
        item.told["identity"]["userAssignedIdentities"][identity] = ids
    return item


def _card(world: World, vm: Item, asked: dict[str, Any], where: str) -> Item:
    """Keep a network card, which Azure names after what was asked for.

    Args:
        world: Where.
        vm: Whose.
        asked: What was asked for.
        where: Its address, if it is a machine that can be reached.
    """
    number = next(world.numbers)
    (wish,) = asked["properties"]["ipConfigurations"]
    address: dict[str, Any] = {
        "privateIPAddress": where or f"10.79.{number // 256}.{number % 256}",
        "privateIPAllocationMethod": "Dynamic",
        "primary": True,
        "subnet": wish["properties"]["subnet"],
    }
    public = wish["properties"].get("publicIPAddressConfiguration")
    if public is not None:
        place = {"location": vm.told["location"], "tags": public["tags"]}
        ip = {"ipAddress": where or f"203.0.113.{number % 256}"}
        ip |= {"publicIPAllocationMethod": "Static"}
        kept = world.put(ADDRESSES, vm.group, public["name"], {**place, "properties": ip})
        address["publicIPAddress"] = {"id": kept.resource_id}
    inner = {
        "provisioningState": "Succeeded",
        "enableAcceleratedNetworking": asked["properties"]["enableAcceleratedNetworking"],
        "ipConfigurations": [{"name": wish["name"], "properties": address}],
        "virtualMachine": {"id": vm.resource_id},
    }
    told = {"location": vm.told["location"], "tags": asked["tags"]}
    name = f"{asked['name']}-{uuid.uuid4().hex[:8]}"
    return world.put(CARDS, vm.group, name, {**told, "properties": inner})
