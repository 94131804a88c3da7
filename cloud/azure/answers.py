"""What the answers of Azure Resource Manager mean; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from spottrain.cloud.azure import requests
from spottrain.cloud.port import tags
from spottrain.cloud.port.facts import CloudFacts
from spottrain.cloud.port.provider import Offer, Vm, VmState

_STATES = {
    "Creating": VmState.STARTING,
    "Deleting": VmState.STOPPING,
    "Failed": VmState.STOPPING,  # it never came to be: on its way out
    "Canceled": VmState.STOPPING,
}


def offer_of(
    facts: CloudFacts,
    *,
    region: str,
    zone: str,
    instance_type: str,
    spot: bool,
    usd_per_hour: float,
    observed_at_s: float,
    family: str = "",
) -> Offer:
    """Return an offer; without GPUs where nobody knows anything about the machine."""
    machine = facts.find(requests.CLOUD, instance_type)
    return Offer(
        cloud=requests.CLOUD,
        region=region,
        zone=zone,
        instance_type=instance_type,
        spot=spot,
        usd_per_hour=usd_per_hour,
        observed_at_s=observed_at_s,
        gpus=0 if machine is None else machine.gpus,
        gpu_memory_bytes=0 if machine is None else machine.gpu.memory_bytes,
        family=requests.SPOT_QUOTA if spot else family,
    )


def vm_of(
    resource: Mapping[str, Any], facts: CloudFacts, private_address: str = ""
) -> Vm:
    """Return a VM as the port knows it."""
    group_name, name = requests.split_resource_id(resource["id"])
    vm_tags, properties = resource.get("tags") or {}, resource["properties"]
    made_at = datetime.fromisoformat(properties["timeCreated"]).timestamp()
    region = resource["location"]
    zones: Sequence[str] = resource.get("zones") or ("",)
    offer = offer_of(
        facts,
        region=region,
        zone=requests.zone_of(region, zones[0]),
        instance_type=properties["hardwareProfile"]["vmSize"],
        spot=properties.get("priority") == "Spot",
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
    """Return whether a VM never came to be, though Azure still keeps it."""
    return resource["properties"].get("provisioningState") in ("Failed", "Canceled")


def is_leaving(resource: Mapping[str, Any]) -> bool:
    """Return whether a VM is being deleted."""
    return bool(resource["properties"].get("provisioningState") == "Deleting")
