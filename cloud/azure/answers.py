"""Interpretation of the answers of Azure Resource Manager; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spottrain.cloud.azure import requests
from spottrain.cloud.port import tags
from spottrain.cloud.port.facts import CloudFacts, make_offer
from spottrain.cloud.port.provider import Vm, VmState

_STATES = {
    "Creating": VmState.STARTING,
    "Deleting": VmState.STOPPING,
    "Failed": VmState.STOPPING,  # it was never created: it will be deleted
    "Canceled": VmState.STOPPING,
}


def vm_of(
    resource: Mapping[str, Any], facts: CloudFacts, private_address: str = ""
) -> Vm:
    """Return a VM of Azure as a ``Vm``."""
    group_name, name = requests.split_resource_id(resource["id"])
    vm_tags, properties = resource.get("tags") or {}, resource["properties"]
    made_at = datetime.fromisoformat(properties["timeCreated"]).timestamp()
    region = resource["location"]
    zones: Sequence[str] = resource.get("zones") or ("",)
    spot = properties.get("priority") == "Spot"
    offer = make_offer(
        facts,
        cloud=requests.CLOUD,
        region=region,
        zone=requests.zone_of(region, zones[0]),
        instance_type=properties["hardwareProfile"]["vmSize"],
        spot=spot,
        family=requests.SPOT_QUOTA if spot else "",
        usd_per_hour=float(vm_tags.get(tags.PRICE, "0")),
        observed_at_s=made_at,
    )
    return Vm(
        vm_id=requests.vm_id_of(group_name, name),
        job=vm_tags.get(tags.JOB, ""),
        intent=vm_tags.get(tags.INTENT, ""),
        state=_STATES.get(properties.get("provisioningState", ""), VmState.RUNNING),
        offer=offer,
        private_address=private_address,
        launched_at_s=made_at,
    )


def has_failed(resource: Mapping[str, Any]) -> bool:
    """Return True if the creation of a VM failed, although Azure still lists it."""
    return resource["properties"].get("provisioningState") in ("Failed", "Canceled")


def is_leaving(resource: Mapping[str, Any]) -> bool:
    """Return True if a VM is being deleted."""
    return bool(resource["properties"].get("provisioningState") == "Deleting")
