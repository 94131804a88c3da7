"""Interpretation of Compute Engine's answers; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from spottrain.cloud.gcp import requests
from spottrain.cloud.gcp.requests import CLOUD, IMAGE, TYPE
from spottrain.cloud.port import tags
from spottrain.cloud.port.facts import CloudFacts, make_offer
from spottrain.cloud.port.provider import Vm, VmState

_STATES = {
    "PROVISIONING": VmState.STARTING,
    "STAGING": VmState.STARTING,
    "PENDING": VmState.STARTING,
    "RUNNING": VmState.RUNNING,
    "REPAIRING": VmState.STOPPING,  # its host failed, and automatic restart is off
    "PENDING_STOP": VmState.STOPPING,
    "STOPPING": VmState.STOPPING,
    "SUSPENDING": VmState.STOPPING,
    "SUSPENDED": VmState.STOPPING,
    "DEPROVISIONING": VmState.STOPPING,
    "STOPPED": VmState.STOPPING,  # shut down: its disk exists until it is deleted
    "TERMINATED": VmState.STOPPING,
}
_HOST_KEYS = "hostkeys"
RETURNED_PER_HOUR = 0.05
"""How often owners are taken to end a spot VM of their own: after 20 hours on the average.
An assumption: Google publishes which share of ended VMs was preempted, not how long they
ran."""
_MAX_SHARE = 0.95


def last_part(url: str) -> str:
    """Return the name at the end of a resource URL."""
    return url.rpartition("/")[2]


def parse_time_s(text: str) -> float:
    """Return a timestamp of Google as seconds since the epoch."""
    return datetime.fromisoformat(text).timestamp()


def losses_per_hour(history: Mapping[str, Any]) -> float | None:
    """Return the hazard of a spot VM, from the history of its type in its zone.

    A preemption rate is the share of preempted VMs among all that stopped on a day
    ("View the preemption rate and pricing for Spot VMs"). Of two competing causes with
    constant rates p and r that share is p / (p + r).

    Args:
        history: A ``CapacityHistoryResponse``.

    Returns:
        Losses per hour; None if there is no history.
    """
    days = history.get("preemption_history", ())
    if not days:
        return None
    shares = [float(day.get("preemption_rate", 0.0)) for day in days]
    share = min(_MAX_SHARE, sum(shares) / len(shares))
    return RETURNED_PER_HOUR * share / (1 - share)


def obtainability(advice: Mapping[str, Any]) -> float | None:
    """Return the score of the first recommendation, from 0 to 1; None: there is none."""
    for each in advice.get("recommendations", ())[:1]:
        score = each.get("scores", {}).get("obtainability")
        return None if score is None else float(score)
    return None


def vm_of(instance: Mapping[str, Any], facts: CloudFacts) -> Vm:
    """Return an instance as a ``Vm``."""
    metadata = _metadata(instance)
    labels = instance.get("labels", {})
    zone, name = last_part(instance["zone"]), instance["name"]
    launched_at_s = parse_time_s(instance["creation_timestamp"])
    machine_type = last_part(instance.get("machine_type", ""))
    instance_type = metadata.get(TYPE, machine_type)
    scheduling = instance.get("scheduling", {})
    return Vm(
        vm_id=requests.vm_id_of(zone, name),
        job=metadata.get(tags.JOB, labels.get(tags.JOB, "")),
        intent=metadata.get(tags.INTENT, labels.get(tags.INTENT, "")),
        uid=labels.get(tags.UID, ""),
        owner=metadata.get(tags.OWNER, labels.get(tags.OWNER, "")),
        image=metadata.get(IMAGE, ""),
        state=_STATES.get(instance.get("status", ""), VmState.STARTING),
        offer=make_offer(
            facts,
            cloud=CLOUD,
            region=requests.region_of(zone),
            family=family_of(instance_type),
            zone=zone,
            instance_type=instance_type,
            spot=scheduling.get("provisioning_model") == "SPOT",
            usd_per_hour=float(metadata.get(tags.PRICE, "0")),
            attached_usd_per_hour=float(metadata.get(tags.ATTACHED, "0")),
            observed_at_s=launched_at_s,
        ),
        private_address=_interface(instance).get("network_i_p", ""),
        launched_at_s=launched_at_s,
    )


def public_address(instance: Mapping[str, Any]) -> str:
    """Return the public address of a VM, empty if it has none (yet)."""
    for config in _interface(instance).get("access_configs", ()):
        if address := config.get("nat_i_p", ""):
            return str(address)
    return ""


def host_keys(attributes: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the SSH host keys that a VM's guest agent reported.

    They are read over Google's authenticated API, so no key is trusted on first use,
    and no secret is in metadata.
    """
    items = attributes.get("query_value", {}).get("items", ())
    return tuple(
        f"{item['key']} {item['value']}"
        for item in items
        if item.get("namespace") == _HOST_KEYS and item.get("value")
    )


def created(operation: Mapping[str, Any]) -> int:
    """Return how many VMs a bulk insert created and did not delete again."""
    metadata = operation.get("instances_bulk_insert_operation_metadata", {})
    places: Iterable[Mapping[str, Any]] = metadata.get("per_location_status", {}).values()
    return sum(
        int(placement.get("created_vm_count", 0)) - int(placement.get("deleted_vm_count", 0))
        for placement in places
    )


def _interface(instance: Mapping[str, Any]) -> Mapping[str, Any]:
    interfaces = instance.get("network_interfaces", ())
    found: Mapping[str, Any] = interfaces[0] if interfaces else {}
    return found


def _metadata(instance: Mapping[str, Any]) -> dict[str, str]:
    items = instance.get("metadata", {}).get("items", ())
    return {item["key"]: item.get("value", "") for item in items}


# --- quotas ---------------------------------------------------------------------------

_QUOTAS = {
    "c3-standard": "C3_CPUS",
    "a2-highgpu": "NVIDIA_A100_GPUS",
    "a2-megagpu": "NVIDIA_A100_GPUS",
    "a2-ultragpu": "NVIDIA_A100_80GB_GPUS",
    "a3-highgpu": "NVIDIA_H100_GPUS",
    "a3-megagpu": "NVIDIA_H100_MEGA_GPUS",
    "a3-ultragpu": "NVIDIA_H200_GPUS",
    "a4-highgpu": "NVIDIA_B200_GPUS",
    "g2-standard": "NVIDIA_L4_GPUS",
    "g4-standard": "NVIDIA_RTX_PRO_6000_GPUS",
    "n2-standard": "N2_CPUS",
}
ALL_REGIONS = "GPUS_ALL_REGIONS"
"""The project's quota for all regions."""


def family_of(instance_type: str) -> str:
    """Return the quota of an instance type, for spot and on demand."""
    kind = requests.kind_of(instance_type)
    if kind.accelerator:
        gpu = kind.accelerator.removeprefix("nvidia-tesla-")
        return f"NVIDIA_{gpu.upper()}_GPUS"
    series = "-".join(kind.machine_type.split("-")[:2])
    return _QUOTAS.get(series, instance_type)
