"""What this project's requests must hold beyond what the SDK's messages demand.

The messages require next to nothing but what stands in the address. Whatever the
adapter relies on is named here, so that a field that goes missing is refused.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any

from tests.fakes.gcp_schema import DriftError
from tests.fakes.gcp_world import BASE, PROJECT
from tests.fakes.paths import has

LABELS = {
    "spottrain-job",
    "spottrain-owner",
    "spottrain-intent",
    "spottrain-expires",
}
METADATA = {
    "spottrain-owner",
    "spottrain-job",
    "spottrain-intent",
    "spottrain-usd-per-hour",
    "spottrain-attached-usd-per-hour",
    "spottrain-instance-type",
    "spottrain-image",
    "startup-script",
    "block-project-ssh-keys",
    "enable-oslogin",
    "enable-guest-attributes",
    "ssh-keys",
}
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_NAME = re.compile(r"spottrain-[0-9a-f]{10}-[0-9a-f]{16}-\d+")
_KEY = re.compile(r"[a-z][a-z0-9_-]*:ssh-\S+ \S+.*")
_RESOURCE = "bulkInsertInstanceResourceResource"
_PROPERTIES = f"{_RESOURCE}.instanceProperties"
_SPOT = "scheduling.provisioningModel"
_ADVICE = "capacityAdviceRequestResource"
_HISTORY = "capacityHistoryRequestResource"
_ATTACHED = ("guestAccelerators.acceleratorType", "guestAccelerators.acceleratorCount")

_DUE_OF_A_VM = (
    "machineType",
    "scheduling.provisioningModel",
    "scheduling.instanceTerminationAction",
    "scheduling.maxRunDuration.seconds",
    "scheduling.onHostMaintenance",
    "scheduling.automaticRestart",
    "networkInterfaces.network",
    "networkInterfaces.subnetwork",
    "networkInterfaces.nicType",
    "networkInterfaces.accessConfigs.name",
    "networkInterfaces.accessConfigs.type",
    "disks.boot",
    "disks.autoDelete",
    "disks.initializeParams.sourceImage",
    "disks.initializeParams.diskSizeGb",
    "disks.initializeParams.diskType",
    "labels",
    "metadata.items.key",
    "metadata.items.value",
    "tags.items",
)
_FIREWALL = "firewallResource"

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "instances.bulk_insert": (
        "requestId",
        f"{_RESOURCE}.count",
        f"{_RESOURCE}.minCount",
        f"{_RESOURCE}.perInstanceProperties",
        *(f"{_PROPERTIES}.{path}" for path in _DUE_OF_A_VM),
    ),
    "instances.list": ("filter",),
    "instances.aggregated_list": ("filter",),
    "instances.get_guest_attributes": ("queryPath",),
    "networks.insert": (
        "requestId",
        "networkResource.name",
        "networkResource.description",
        "networkResource.autoCreateSubnetworks",
    ),
    "networks.list": ("filter",),
    "subnetworks.insert": (
        "requestId",
        "subnetworkResource.name",
        "subnetworkResource.description",
        "subnetworkResource.network",
        "subnetworkResource.ipCidrRange",
    ),
    "subnetworks.aggregated_list": ("filter",),
    "firewalls.insert": (
        "requestId",
        f"{_FIREWALL}.name",
        f"{_FIREWALL}.description",
        f"{_FIREWALL}.network",
        f"{_FIREWALL}.direction",
        f"{_FIREWALL}.targetTags",
        f"{_FIREWALL}.allowed.IPProtocol",
    ),
    "firewalls.patch": ("requestId", f"{_FIREWALL}.sourceRanges"),
    "firewalls.list": ("filter",),
    "machine_types.aggregated_list": ("filter",),
    "accelerator_types.aggregated_list": ("filter",),
    "zone_operations.list": ("filter",),
    "global_operations.aggregated_list": ("filter",),
    "global_operations.list": ("filter",),
    "region_operations.list": ("filter",),
    "advice.capacity": (
        f"{_ADVICE}.size",
        f"{_ADVICE}.instanceProperties.{_SPOT}",
        f"{_ADVICE}.instanceFlexibilityPolicy.instanceSelections.only.machineTypes",
        f"{_ADVICE}.distributionPolicy.targetShape",
        f"{_ADVICE}.distributionPolicy.zones.zone",
    ),
    "advice.capacity_history": (
        f"{_HISTORY}.instanceProperties.machineType",
        f"{_HISTORY}.instanceProperties.{_SPOT}",
        f"{_HISTORY}.locationPolicy.location",
        f"{_HISTORY}.types",
    ),
}
"""By call: what must be there."""

_REFERENCE = re.compile(
    rf"(?:{BASE}/)?projects/{PROJECT}/(?:global|regions/[a-z0-9-]+)/"
    r"(?:networks|subnetworks)/[a-z][a-z0-9-]*"
)


def check_rules(operation: str, asked: Mapping[str, Any]) -> None:
    """Check a request that fits the messages already.

    Raises:
        DriftError: something is missing or contradicts itself.
    """
    missing = [p for p in REQUIRED.get(operation, ()) if not has(asked, p)]
    if missing:
        raise DriftError(f"{operation}: missing: {missing}")
    _check_machines(asked)
    if "requestId" in asked:
        _check_uuid(operation, asked["requestId"])
    if operation == "instances.bulk_insert":
        _check_launch(asked[_RESOURCE])
    elif operation == "firewalls.insert":
        _check_firewall(asked[_FIREWALL])
    elif operation == "subnetworks.insert":
        _check_reference(asked["subnetworkResource"]["network"])
    elif asked.get("queryPath", "hostkeys/") != "hostkeys/":
        raise DriftError(f"queryPath: {asked['queryPath']}")


def _check_uuid(operation: str, text: str) -> None:
    try:
        uuid.UUID(text)
    except ValueError:
        raise DriftError(f"{operation}: requestId is no UUID: {text!r}") from None


def _check_reference(url: str) -> None:
    if not _REFERENCE.fullmatch(url):
        raise DriftError(f"no address of a network or subnet: {url!r}")


def _check_launch(resource: Mapping[str, Any]) -> None:
    names = resource["perInstanceProperties"]
    if len(names) != int(resource["count"]):
        raise DriftError(f"{len(names)} names for {resource['count']} instances")
    if bad := [name for name in names if not _NAME.fullmatch(name)]:
        raise DriftError(f"no names of instances: {bad}")
    wanted = resource["instanceProperties"]
    (disk,), (interface,) = wanted["disks"], wanted["networkInterfaces"]
    for labels in (wanted["labels"], disk["initializeParams"].get("labels", {})):
        ours = {name for name in labels if name.startswith("spottrain-")}
        if not labels.keys() >= LABELS or not ours <= LABELS | {"spottrain-uid"}:
            raise DriftError(f"labels {sorted(labels)}, not {sorted(LABELS)}")
        if bad := [text for text in labels.values() if not _LABEL.fullmatch(text)]:
            raise DriftError(f"no label can hold {bad}")
    _check_reference(interface["network"])
    _check_reference(interface["subnetwork"])
    told = {each["key"]: each["value"] for each in wanted["metadata"]["items"]}
    _check_metadata(told)
    if ("-X DELETE" in told["startup-script"]) != ("serviceAccounts" in wanted):
        raise DriftError("a VM that deletes itself takes an account, and only it")
    due = ("serviceAccounts.email", "serviceAccounts.scopes")
    notice = {"seconds": "120"} if wanted["scheduling"]["provisioningModel"] == "SPOT" else None
    if wanted["scheduling"].get("preemptionNoticeDuration") != notice:
        raise DriftError("spot VMs, and they alone, are told two minutes before")
    if "serviceAccounts" in wanted and not all(has(wanted, path) for path in due):
        raise DriftError(f"half an account: {wanted['serviceAccounts']}")


def _check_machines(value: Any) -> None:
    """Check that GPUs are attached to the machines that have none, and to no others."""
    if isinstance(value, dict):
        named = value.get("machineType") or value.get("machineTypes", [""])[0]
        whole = all(has(value, path) for path in _ATTACHED)
        half = "guestAccelerators" in value and not whole
        if half or (named and str(named).startswith("n1-") != whole):
            raise DriftError(f"{named}: GPUs: {value.get('guestAccelerators')}")
    inner = value.values() if isinstance(value, dict) else value
    for item in inner if isinstance(value, (dict, list)) else ():
        _check_machines(item)


def _check_metadata(told: Mapping[str, str]) -> None:
    if set(told) != METADATA:
        raise DriftError(f"metadata {sorted(told)}, not {sorted(METADATA)}")
    if not _KEY.fullmatch(told["ssh-keys"]):
        raise DriftError(f"ssh-keys: no user and key: {told['ssh-keys']!r}")
    for name in ("block-project-ssh-keys", "enable-oslogin", "enable-guest-attributes"):
        if told[name] not in ("TRUE", "FALSE"):
            raise DriftError(f"{name}: neither TRUE nor FALSE: {told[name]!r}")


def _check_firewall(rule: Mapping[str, Any]) -> None:
    _check_reference(rule["network"])
    inside = rule["name"].endswith("-inside")
    source = "sourceTags" if inside else "sourceRanges"
    if {"sourceTags", "sourceRanges"} & set(rule) != {source}:
        raise DriftError(f"firewall rule from nowhere or everywhere: {rule}")
    for allowed in rule["allowed"]:
        protocol = allowed["IPProtocol"]
        if protocol not in ("all", "tcp") or (protocol == "tcp") != ("ports" in allowed):
            raise DriftError(f"half a firewall rule: {allowed}")
