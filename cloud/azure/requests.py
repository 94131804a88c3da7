"""Requests to Azure Resource Manager and interpretation of its answers; pure."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.facts import CloudFacts, make_offer
from spottrain.cloud.port.provider import LaunchRequest, Vm, VmState

CLOUD = "azure"
HOST_KEY = "spottrain-host-key"
"""Tag with the VM's public SSH host key, ``type base64``."""
SPOT_QUOTA = "lowPriorityCores"
"""The quota of a region for all spot VMs."""
VM_ACTIONS = (
    "Microsoft.Compute/virtualMachines/read",
    "Microsoft.Compute/virtualMachines/delete",
)
"""What the role of VMs allows, on the VMs of the job's group. No built-in role is as
small: "Virtual Machine Contributor" may also run commands as root on all of them."""
_NAMESPACE = uuid.UUID("0ef5b4b0-6a4d-4f6c-9b8e-2a9f1f6c7a11")
_AUTHORIZATION = "providers/Microsoft.Authorization"
GRANT_VERSION = "2022-04-01"
"""API version of roles and their grants."""
_NETWORK_VERSION = "2022-11-01"
_OWN_NETWORK = "10.79.0.0/16"
_METADATA = "http://169.254.169.254"
_DELETE_ITSELF = """\
ask() {{ curl -sf --noproxy '*' -H Metadata:true "{metadata}/metadata/$1"; }}
        token=$(ask 'identity/oauth2/token?api-version=2018-02-01&resource={audience}' |
            sed -n 's/.*"access_token" *: *"\\([^"]*\\)".*/\\1/p')
        vm=$(ask 'instance/compute/resourceId?api-version=2021-02-01&format=text')
        printf 'Authorization: Bearer %s' "$token" | curl -sf -H @- -X DELETE \\
            "{management}$vm?api-version=2024-07-01&forceDeletion=true"
"""


@dataclass(frozen=True, slots=True)
class AzurePlacement:
    """Subnet and identity of VMs."""

    subnet_id: str
    identity_id: str
    """Id of the managed identity that may delete them; empty: none."""
    accelerated: bool
    """True if the size supports accelerated networking."""


# --- names ----------------------------------------------------------------------------


def prefix(job: str, settings: AzureSettings) -> str:
    """Return the prefix of the names of all resources of a job."""
    return f"st-{_digest(tags.key_of(job, settings.uid), 10)}-"


def group_of(job: str, settings: AzureSettings) -> str:
    """Return the name of a job's resource group, in lower case."""
    uid = f"-{settings.uid[:8]}" if settings.uid else ""
    return settings.resource_group.lower() or f"spottrain-{job}{uid}"


def vm_names(request: LaunchRequest, settings: AzureSettings) -> list[str]:
    """Return the names of a launch's VMs, derived from its token."""
    first = f"{prefix(request.job, settings)}{_digest(request.token, 16)}"
    return [f"{first}-{number}" for number in range(request.count)]


def vm_id_of(group: str, name: str) -> str:
    """Return our id of a VM; Azure's names are unique per group."""
    return f"{CLOUD}.{name}.{group.lower()}"


def split_vm_id(vm_id: str) -> tuple[str, str]:
    """Return (group, name); the group is empty if the id is not ours."""
    cloud, _, rest = vm_id.partition(".")
    name, _, group = rest.partition(".")
    return (group if cloud == CLOUD else ""), name


def split_resource_id(resource_id: str) -> tuple[str, str]:
    """Return (group, name) of an ARM resource id; the group in lower case, since
    Azure's case varies.
    """
    found = re.search(r"/resourcegroups/([^/]+)/", resource_id, re.IGNORECASE)
    return (found[1].lower() if found else ""), resource_id.rpartition("/")[2]


def zone_of(region: str, number: str) -> str:
    """Return our name of a zone; the region itself if it has no zones."""
    return f"{region}-{number}" if number else region


def zone_number(zone: str, region: str) -> str:
    """Return Azure's number of a zone, empty for none."""
    return zone.removeprefix(region).removeprefix("-")


def _digest(text: str, characters: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:characters]


# --- a launch -------------------------------------------------------------------------


def virtual_machine(
    request: LaunchRequest,
    name: str,
    placement: AzurePlacement,
    host_key: tuple[str, str],
    settings: AzureSettings,
) -> dict[str, Any]:
    """Return a VM with its disk, network card and address, which are deleted with it.

    Args:
        name: Name of the VM.
        placement: Subnet and identity.
        host_key: (private, public) in OpenSSH's format.
        settings: The user's settings.
    """
    offer, vm_tags = request.offer, _launch_tags(request, settings)
    number = zone_number(offer.zone, offer.region)
    machine: dict[str, Any] = {
        "location": offer.region,
        "tags": {**vm_tags, HOST_KEY: host_key[1]},
        "properties": {
            "hardwareProfile": {"vmSize": offer.instance_type},
            "priority": "Spot" if offer.spot else "Regular",
            "storageProfile": _storage(name, request.image, settings),
            "osProfile": _system(request, name, placement, host_key, settings),
            "networkProfile": {
                "networkApiVersion": _NETWORK_VERSION,
                "networkInterfaceConfigurations": [_interface(name, vm_tags, placement, settings)],
            },
        },
    }
    if number:
        machine["zones"] = [number]
    if placement.identity_id:
        machine["identity"] = {
            "type": "UserAssigned",
            "userAssignedIdentities": {placement.identity_id: {}},
        }
    if offer.spot:
        bid = settings.max_usd_per_hour
        machine["properties"] |= {
            "evictionPolicy": "Delete",
            "billingProfile": {"maxPrice": -1 if bid is None else bid},
        }
    return machine


def _launch_tags(request: LaunchRequest, settings: AzureSettings) -> dict[str, str]:
    return {
        **tags.of_job(request.job, settings),
        **({tags.OWNER: settings.owner} if settings.owner else {}),
        tags.INTENT: request.intent,
        tags.EXPIRES: str(math.ceil(request.lease_s)),
        tags.PRICE: repr(request.offer.usd_per_hour),
        tags.ATTACHED: repr(request.offer.attached_usd_per_hour),
    }


def _storage(name: str, named: str, settings: AzureSettings) -> dict[str, Any]:
    return {
        "imageReference": image(named or settings.image),
        "osDisk": {
            "name": f"{name}-disk",
            "createOption": "FromImage",
            "deleteOption": "Delete",
            "diskSizeGB": settings.disk_gib,
            "managedDisk": {"storageAccountType": "StandardSSD_LRS"},
        },
    }


def image(named: str) -> dict[str, str]:
    """Return the reference of ``publisher:offer:sku:version`` or a resource id."""
    if named.startswith("/"):
        return {"id": named}
    parts = ("publisher", "offer", "sku", "version")
    return dict(zip(parts, named.split(":"), strict=True))


def _system(
    request: LaunchRequest,
    name: str,
    placement: AzurePlacement,
    host_key: tuple[str, str],
    settings: AzureSettings,
) -> dict[str, Any]:
    end = lease.SWITCH_OFF
    if placement.identity_id:
        end = delete_itself(settings.endpoint_url)
    script = lease.boot_script(request.lease_s, end)
    key = {
        "path": f"/home/{settings.user}/.ssh/authorized_keys",
        "keyData": settings.public_key,
    }
    return {
        "computerName": name,
        "adminUsername": settings.user,
        "customData": custom_data(host_key, script),
        "linuxConfiguration": {
            "disablePasswordAuthentication": True,
            "ssh": {"publicKeys": [key]},
        },
    }


def custom_data(host_key: tuple[str, str], script: str) -> str:
    """Return the cloud-init data: the host key, and a script that root runs once.

    Custom data cannot be read back from Azure, and on the VM only by root. JSON is
    valid YAML.
    """
    private, public = host_key
    config = {
        "ssh_deletekeys": True,
        "ssh_keys": {"ed25519_private": private, "ed25519_public": public},
        "runcmd": [["/bin/sh", "-c", script]],
    }
    return base64.b64encode(f"#cloud-config\n{json.dumps(config)}\n".encode()).decode()


def delete_itself(management_url: str, metadata_url: str = _METADATA) -> str:
    """Return the shell command by which a VM with an identity deletes itself.

    Its token is passed in a pipe, not in argv.
    """
    management = management_url.rstrip("/")
    return _DELETE_ITSELF.format(
        metadata=metadata_url,
        management=management,
        audience=quote(f"{management}/", safe=""),
    )


def _interface(
    name: str,
    vm_tags: Mapping[str, str],
    placement: AzurePlacement,
    settings: AzureSettings,
) -> dict[str, Any]:
    address: dict[str, Any] = {"primary": True, "subnet": {"id": placement.subnet_id}}
    if settings.public_addresses:
        address["publicIPAddressConfiguration"] = {
            "name": f"{name}-address",
            "tags": vm_tags,
            "sku": {"name": "Standard", "tier": "Regional"},
            "properties": {
                "deleteOption": "Delete",
                "publicIPAllocationMethod": "Static",
            },
        }
    return {
        "name": f"{name}-card",
        "tags": vm_tags,
        "properties": {
            "primary": True,
            "deleteOption": "Delete",
            "enableAcceleratedNetworking": placement.accelerated,
            "ipConfigurations": [{"name": "address", "properties": address}],
        },
    }


# --- what VMs share -------------------------------------------------------------------


def group(job: str, region: str, settings: AzureSettings) -> dict[str, Any]:
    """Return a job's own resource group."""
    return {"location": region, "tags": tags.of_job(job, settings)}


def rules(job: str, region: str, settings: AzureSettings) -> dict[str, Any]:
    """Return a security group that allows SSH from ``ssh_from``."""
    ssh = {
        "name": "ssh",
        "properties": {
            "priority": 100,
            "direction": "Inbound",
            "access": "Allow",
            "protocol": "Tcp",
            "sourceAddressPrefixes": list(settings.ssh_from),
            "sourcePortRange": "*",
            "destinationAddressPrefix": "*",
            "destinationPortRange": str(settings.ssh_port),
        },
    }
    return {
        "location": region,
        "tags": tags.of_job(job, settings),
        "properties": {"securityRules": [ssh] if settings.ssh_from else []},
    }


def network(job: str, region: str, rules_id: str, settings: AzureSettings) -> dict[str, Any]:
    """Return a network with one subnet, named ``vms``."""
    subnet = {
        "name": "vms",
        "properties": {
            "addressPrefix": _OWN_NETWORK,
            "networkSecurityGroup": {"id": rules_id},
        },
    }
    return {
        "location": region,
        "tags": tags.of_job(job, settings),
        "properties": {
            "addressSpace": {"addressPrefixes": [_OWN_NETWORK]},
            "subnets": [subnet],
        },
    }


def identity_id(subscription: str, group: str, job: str, settings: AzureSettings) -> str:
    """Return the id of a job's managed identity."""
    kind = "Microsoft.ManagedIdentity/userAssignedIdentities"
    return f"{_group_id(subscription, group)}/providers/{kind}/{prefix(job, settings)}vms"


def role(subscription: str) -> tuple[str, dict[str, Any]]:
    """Return (id, body) of the role by which VMs delete themselves; all jobs of a
    subscription share it, since a tenant holds 5000 roles of its own at most.

    Source: Azure RBAC, "Azure custom roles" and "Role Definitions - Create Or Update".
    """
    body = {
        "properties": {
            "roleName": f"spottrain VM {subscription}",  # unique in the tenant
            "description": "Lets VMs of spottrain's jobs delete themselves",
            "type": "CustomRole",
            "permissions": [{"actions": list(VM_ACTIONS)}],
            "assignableScopes": [f"/subscriptions/{subscription}"],
        }
    }
    name = uuid.uuid5(_NAMESPACE, f"{subscription}/{' '.join(VM_ACTIONS)}")
    return (
        f"/subscriptions/{subscription}/{_AUTHORIZATION}/roleDefinitions/{name}",
        body,
    )


def grant(subscription: str, group: str, principal: str) -> tuple[str, dict[str, Any]]:
    """Return (id, body) of the grant of ``role`` to an identity, for the VMs of a
    group.
    """
    role_id, _ = role(subscription)
    name = uuid.uuid5(_NAMESPACE, f"{role_id}/{group}/{principal}")
    body = {
        "properties": {
            "roleDefinitionId": role_id,
            "principalId": principal,
            # Without it a new principal may be refused as unknown.
            "principalType": "ServicePrincipal",
        }
    }
    scope = _group_id(subscription, group)
    return f"{scope}/{_AUTHORIZATION}/roleAssignments/{name}", body


def _group_id(subscription: str, group: str) -> str:
    return f"/subscriptions/{subscription}/resourceGroups/{group}"


# --- answers --------------------------------------------------------------------------

_STATES = {
    "Creating": VmState.STARTING,
    "Deleting": VmState.STOPPING,
    "Failed": VmState.STOPPING,  # it was never created: it will be deleted
    "Canceled": VmState.STOPPING,
}


def vm_of(resource: Mapping[str, Any], facts: CloudFacts, private_address: str = "") -> Vm:
    """Return a VM of Azure as a ``Vm``."""
    group_name, name = split_resource_id(resource["id"])
    vm_tags, properties = resource.get("tags") or {}, resource["properties"]
    made_at = datetime.fromisoformat(properties["timeCreated"]).timestamp()
    region = resource["location"]
    zones: Sequence[str] = resource.get("zones") or ("",)
    spot = properties.get("priority") == "Spot"
    offer = make_offer(
        facts,
        cloud=CLOUD,
        region=region,
        zone=zone_of(region, zones[0]),
        instance_type=properties["hardwareProfile"]["vmSize"],
        spot=spot,
        family=SPOT_QUOTA if spot else "",
        usd_per_hour=float(vm_tags.get(tags.PRICE, "0")),
        attached_usd_per_hour=float(vm_tags.get(tags.ATTACHED, "0")),
        observed_at_s=made_at,
    )
    return Vm(
        vm_id=vm_id_of(group_name, name),
        job=vm_tags.get(tags.JOB, ""),
        intent=vm_tags.get(tags.INTENT, ""),
        uid=vm_tags.get(tags.UID, ""),
        owner=vm_tags.get(tags.OWNER, ""),
        image=_image_of(properties),
        state=_STATES.get(properties.get("provisioningState", ""), VmState.RUNNING),
        offer=offer,
        private_address=private_address,
        launched_at_s=made_at,
    )


def _image_of(properties: Mapping[str, Any]) -> str:
    """Return the image of a VM with its version; empty if it is a resource."""
    reference = properties.get("storageProfile", {}).get("imageReference", {})
    keys = ("publisher", "offer", "sku", "exactVersion")
    parts = [reference.get(key, "") for key in keys]
    return ":".join(parts) if all(parts) else ""


def has_failed(resource: Mapping[str, Any]) -> bool:
    """Return True if the creation of a VM failed, although Azure still lists it."""
    return resource["properties"].get("provisioningState") in ("Failed", "Canceled")


def is_leaving(resource: Mapping[str, Any]) -> bool:
    """Return True if a VM is being deleted."""
    return bool(resource["properties"].get("provisioningState") == "Deleting")
