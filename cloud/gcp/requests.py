"""Requests to Compute Engine; pure.

Requests are plain dicts with the SDK's field names; ``GcpClients`` adds the project. A launch repeated with its token
must be identical, so nothing here depends on the time.
"""

from __future__ import annotations

import hashlib
import math
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.notices.gcp import LEAD_S
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.provider import LaunchRequest

CLOUD = "gcp"
_LABEL = re.compile(r"[a-z0-9_-]{1,63}")
_VM_ID = re.compile(r"gcp\.(?P<name>[a-z][a-z0-9-]{0,62})\.(?P<zone>[a-z]+-[a-z]+\d+-[a-z])")
_ATTACHED = re.compile(r"(?P<machine>[a-z0-9-]+)\+(?P<count>\d+)x(?P<gpu>[A-Z0-9-]+)")
_HYPERDISK = ("a3-ultragpu", "a4-", "a4x-", "g4-")
"""Machine types that do not support persistent disks."""
_NAMESPACE = uuid.UUID("5f5c7a0e-6f0c-4b6e-9d0c-7a5b1a1d4e11")
_SCOPE = "https://www.googleapis.com/auth/cloud-platform"

DELETE_ITSELF = """\
M=http://metadata.google.internal/computeMetadata/v1/instance
        ask() { curl -sf -H 'Metadata-Flavor: Google' "$M/$1"; }
        token=$(ask service-accounts/default/token |
            sed -n 's/.*"access_token":"\\([^"]*\\)".*/\\1/p')
        printf 'Authorization: Bearer %s' "$token" | curl -sf -H @- -X DELETE \\
            "https://compute.googleapis.com/compute/v1/$(ask zone)/instances/$(ask name)" ||
            systemctl poweroff || poweroff -f"""
"""Shell command by which a VM with a service account ends: its token is passed in a
pipe, not in argv."""


@dataclass(frozen=True, slots=True)
class GcpInstanceKind:
    """An instance type in Compute Engine's terms."""

    machine_type: str
    accelerator: str = ""
    """Type of the attached GPUs; empty if the machine type includes them."""
    accelerators: int = 0


@dataclass(frozen=True, slots=True)
class GcpPlacement:
    """Network of a job's VMs."""

    network: str
    subnetwork: str
    """Empty: the network's automatic subnet."""
    network_tags: tuple[str, ...]
    image: str = ""
    """The image; empty: that of the settings."""


def kind_of(instance_type: str) -> GcpInstanceKind:
    """Parse the catalogue's name of an instance type."""
    attached = _ATTACHED.fullmatch(instance_type)
    if attached is None:
        return GcpInstanceKind(instance_type)
    return GcpInstanceKind(
        attached["machine"],
        f"nvidia-tesla-{attached['gpu'].lower()}",
        int(attached["count"]),
    )


# --- names ----------------------------------------------------------------------------


def label(text: str) -> str:
    """Return a text as a label value: itself if valid, else its digest."""
    return text if _LABEL.fullmatch(text) else f"x{_digest(text, 40)}"


def shared_name(job: str, uid: str) -> str:
    """Return the name of the network and other shared resources of a job."""
    return f"spottrain-{_digest(tags.key_of(job, uid), 20)}"


def vm_names(request: LaunchRequest, uid: str) -> list[str]:
    """Return the names of a launch's VMs, which identify job and launch."""
    first = f"{vm_prefix(request.job, uid)}{_digest(request.token, 16)}"
    return [f"{first}-{number}" for number in range(request.count)]


def vm_prefix(job: str, uid: str) -> str:
    """Return the prefix of the names of a job's VMs: operations have only names."""
    return f"spottrain-{_digest(tags.key_of(job, uid), 10)}-"


def request_id(token: str, attempt: int) -> str:
    """Return the request id of one attempt of a launch; a failed id is not reused."""
    return str(uuid.uuid5(_NAMESPACE, f"{attempt}/{token}"))


def vm_id_of(zone: str, name: str) -> str:
    """Return our id of an instance; Google's names are unique per zone."""
    return f"{CLOUD}.{name}.{zone}"


def split_vm_id(vm_id: str) -> tuple[str, str]:
    """Return (zone, name); both are empty if the id is not ours."""
    found = _VM_ID.fullmatch(vm_id)
    return (found["zone"], found["name"]) if found else ("", "")


def region_of(zone: str) -> str:
    """Return the region that a zone is in."""
    return zone.rpartition("-")[0]


def _digest(text: str, characters: int) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:characters]


# --- a launch -------------------------------------------------------------------------


def bulk_insert(
    request: LaunchRequest, placement: GcpPlacement, settings: GcpSettings, attempt: int
) -> dict[str, Any]:
    """Return BulkInsertInstanceRequest of up to ``request.count`` VMs."""
    return {
        "zone": request.offer.zone,
        "request_id": request_id(request.token, attempt),
        "bulk_insert_instance_resource_resource": {
            "count": request.count,
            "min_count": 1,
            "per_instance_properties": {name: {} for name in vm_names(request, settings.uid)},
            "instance_properties": _properties(request, placement, settings),
        },
    }


def _properties(
    request: LaunchRequest, placement: GcpPlacement, settings: GcpSettings
) -> dict[str, Any]:
    kind = kind_of(request.offer.instance_type)
    arguments: dict[str, Any] = {
        "machine_type": kind.machine_type,
        "scheduling": _scheduling(request, settings),
        "network_interfaces": [_interface(placement, settings)],
        "disks": [_boot_disk(request, kind, placement, settings)],
        "labels": _labels(request, settings),
        "metadata": {"items": _metadata(request, placement, settings)},
        "tags": {"items": list(placement.network_tags)},
    }
    arguments |= _accelerators(kind)
    if settings.service_account:
        arguments["service_accounts"] = [{"email": settings.service_account, "scopes": [_SCOPE]}]
    return arguments


def _scheduling(request: LaunchRequest, settings: GcpSettings) -> dict[str, Any]:
    """Return the scheduling: deletion at the end, at the hard stop at the latest."""
    spot = request.offer.spot
    # Neither spot VMs nor VMs with GPUs support live migration.
    movable = not spot and (request.offer.gpus == 0 or request.offer.device == "cpu")
    notice = {"preemption_notice_duration": {"seconds": round(LEAD_S)}} if spot else {}
    return {
        **notice,
        "provisioning_model": "SPOT" if spot else "STANDARD",
        "instance_termination_action": "DELETE",
        "max_run_duration": {"seconds": math.ceil(settings.max_run_s)},
        "on_host_maintenance": "MIGRATE" if movable else "TERMINATE",
        "automatic_restart": False,
    }


def _interface(placement: GcpPlacement, settings: GcpSettings) -> dict[str, Any]:
    arguments: dict[str, Any] = {"network": placement.network, "nic_type": "GVNIC"}
    if placement.subnetwork:
        arguments["subnetwork"] = placement.subnetwork
    if settings.public_addresses:
        arguments["access_configs"] = [{"name": "External NAT", "type_": "ONE_TO_ONE_NAT"}]
    return arguments


def _boot_disk(
    request: LaunchRequest,
    kind: GcpInstanceKind,
    placement: GcpPlacement,
    settings: GcpSettings,
) -> dict[str, Any]:
    hyperdisk = kind.machine_type.startswith(_HYPERDISK)
    return {
        "boot": True,
        "auto_delete": True,
        "initialize_params": {
            "source_image": placement.image or settings.image,
            "disk_size_gb": settings.disk_gib,
            "disk_type": "hyperdisk-balanced" if hyperdisk else "pd-balanced",
            "labels": _labels(request, settings),
        },
    }


def _labels(request: LaunchRequest, settings: GcpSettings) -> dict[str, str]:
    """Return the labels by which VMs and disks are found."""
    found = tags.of_job(label(request.job), settings)
    if settings.owner:
        found[tags.OWNER] = label(settings.owner)
    return found | {
        tags.INTENT: label(request.intent),
        tags.EXPIRES: str(math.ceil(request.lease_s)),
    }


def _metadata(
    request: LaunchRequest, placement: GcpPlacement, settings: GcpSettings
) -> list[dict[str, str]]:
    """Return metadata: unlabelled values, and settings of the guest agent."""
    own = bool(settings.service_account)
    end = DELETE_ITSELF if own else lease.SWITCH_OFF
    items = {
        tags.JOB: request.job,
        tags.INTENT: request.intent,
        tags.OWNER: settings.owner,
        tags.PRICE: repr(request.offer.usd_per_hour),
        tags.ATTACHED: repr(request.offer.attached_usd_per_hour),
        TYPE: request.offer.instance_type,
        IMAGE: placement.image or settings.image,
        "startup-script": lease.boot_script(request.lease_s, end),
        "block-project-ssh-keys": "TRUE",
        "enable-oslogin": "FALSE",
        "enable-guest-attributes": "TRUE",  # the VM reports its host keys there
    }
    if settings.public_key:
        items["ssh-keys"] = f"{settings.user}:{settings.public_key}"
    return [{"key": key, "value": value} for key, value in items.items()]


TYPE = "spottrain-instance-type"
"""Metadata: the catalogue's name of the instance type."""
IMAGE = "spottrain-image"
"""Metadata: the image, which Compute Engine tells of disks only."""


# --- Other requests -------------------------------------------------------------------


def labelled(key: str, value: str) -> str:
    """Return a filter on one label."""
    return f'labels.{key} = "{label(value)}"'


def any_of(field: str, values: Collection[str]) -> str:
    """Return a filter that matches any of some values."""
    return " OR ".join(f'({field} = "{value}")' for value in sorted(values))


def own_network(job: str, uid: str) -> dict[str, Any]:
    """Return InsertNetworkRequest of a job's network, without any subnet."""
    network = {
        "name": shared_name(job, uid),
        "description": described(job, uid),
        "auto_create_subnetworks": False,
    }
    return {"network_resource": network}


def own_subnet(settings: GcpSettings, job: str, region: str, cidr: str) -> dict[str, Any]:
    """Return InsertSubnetworkRequest of a job's subnet of one region."""
    subnet = {
        "name": shared_name(job, settings.uid),
        "description": described(job, settings.uid),
        "network": network_url(settings.project, shared_name(job, settings.uid)),
        "ip_cidr_range": cidr,
    }
    return {"region": region, "subnetwork_resource": subnet}


def firewalls(settings: GcpSettings, job: str, network: str) -> list[dict[str, Any]]:
    """Return firewall rules: all from the job's VMs, SSH from ``ssh_from``."""
    name = shared_name(job, settings.uid)
    shared = {
        "description": described(job, settings.uid),
        "network": network,
        "direction": "INGRESS",
        "target_tags": [name],
    }
    inside = {
        "name": f"{name}-inside",
        "source_tags": [name],
        "allowed": [{"I_p_protocol": "all"}],
    }
    ssh = {
        "name": f"{name}-ssh",
        "source_ranges": list(settings.ssh_from),
        "allowed": [{"I_p_protocol": "tcp", "ports": [str(settings.ssh_port)]}],
    }
    wanted = [inside, ssh] if settings.ssh_from else [inside]
    return [{"firewall_resource": shared | rule} for rule in wanted]


def described(job: str, uid: str) -> str:
    """Return the description of resources without labels: networks and rules."""
    return f"{tags.JOB}={job}" + (f" {tags.UID}={uid}" if uid else "")


def network_url(project: str, name: str) -> str:
    """Return the path of a network."""
    return f"projects/{project}/global/networks/{name}"


def subnet_url(project: str, region: str, name: str) -> str:
    """Return the path of a subnet."""
    return f"projects/{project}/regions/{region}/subnetworks/{name}"


def advice(kind: GcpInstanceKind, count: int, zone: str) -> dict[str, Any]:
    """Return CapacityAdviceRpcRequest for a number of spot VMs."""
    selection = {"machine_types": [kind.machine_type], **_accelerators(kind)}
    return {
        "region": region_of(zone),
        "capacity_advice_request_resource": {
            "size": count,
            "instance_properties": {"scheduling": {"provisioning_model": "SPOT"}},
            "instance_flexibility_policy": {"instance_selections": {"only": selection}},
            "distribution_policy": {
                "target_shape": "ANY_SINGLE_ZONE",
                "zones": [{"zone": f"zones/{zone}"}],
            },
        },
    }


def preemptions(kind: GcpInstanceKind, zone: str) -> dict[str, Any]:
    """Return CapacityHistoryAdviceRequest for a zone's preemptions of the last 30 days."""
    return {
        "region": region_of(zone),
        "capacity_history_request_resource": {
            "instance_properties": {
                "machine_type": kind.machine_type,
                "scheduling": {"provisioning_model": "SPOT"},
            },
            "location_policy": {"location": f"zones/{zone}"},
            "types": ["PREEMPTION"],
        },
    }


def _accelerators(kind: GcpInstanceKind) -> dict[str, Any]:
    if not kind.accelerators:
        return {}
    attached = {
        "accelerator_type": kind.accelerator,
        "accelerator_count": kind.accelerators,
    }
    return {"guest_accelerators": [attached]}
