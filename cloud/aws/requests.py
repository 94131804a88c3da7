"""Requests to EC2 and interpretation of its answers; pure.

A launch repeated with its token must be identical, so nothing here depends on the time.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.port import lease, tags
from spottrain.cloud.port.facts import CloudFacts, make_offer
from spottrain.cloud.port.provider import LaunchRequest, Vm, VmState

CLOUD = "aws"
_STATES = {
    "pending": VmState.STARTING,
    "running": VmState.RUNNING,
    "shutting-down": VmState.STOPPING,
    "stopping": VmState.STOPPING,
    "stopped": VmState.STOPPING,  # we never stop one: it is terminating
    "terminated": VmState.TERMINATED,
}
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d")
_MOMENT = re.compile(r"\((\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (?:GMT|UTC)\)")


@dataclass(frozen=True, slots=True)
class AwsPlacement:
    """Subnet, groups, key pair and image of a VM."""

    subnet_id: str
    group_ids: tuple[str, ...]
    key_name: str
    """Empty: no key pair."""
    image_id: str
    root_device: str
    image: str = ""
    """The image's name, the same in all regions; empty: it is named by id."""
    vpc_id: str = ""
    """Network of the subnet."""


def vm_id_of(region: str, instance_id: str, hops: int = 0) -> str:
    """Return our id of an instance; EC2's ids are unique per region.

    Args:
        hops: How often it has gone from one job to another.
    """
    vm_id = f"{CLOUD}.{instance_id}.{region}"
    return f"{vm_id}.{hops}" if hops else vm_id


def split_vm_id(vm_id: str) -> tuple[str, str]:
    """Return (region, instance id); the region is empty if the id is not ours."""
    cloud, _, rest = vm_id.partition(".")
    instance_id, _, where = rest.partition(".")
    region, _, _ = where.partition(".")
    return (region if cloud == CLOUD and _REGION.fullmatch(region) else ""), instance_id


def hops_of(vm_id: str) -> int:
    """Return how often a VM has gone from one job to another, by our id of it."""
    return int(vm_id.split(".")[3]) if vm_id.count(".") == 3 else 0


def tag_list(pairs: Mapping[str, str]) -> list[dict[str, str]]:
    """Return tags in EC2's format."""
    return [{"Key": key, "Value": value} for key, value in pairs.items()]


def tagged(kind: str, job: str, name: str, settings: AwsSettings) -> list[dict[str, Any]]:
    """Return the TagSpecifications of a shared resource of a job."""
    pairs = {**tags.of_job(job, settings), "Name": name}
    return [{"ResourceType": kind, "Tags": tag_list(pairs)}]


def pairs_of(resource: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a resource by name."""
    return {tag["Key"]: tag["Value"] for tag in resource.get("Tags", ())}


def group_name(job: str, uid: str) -> str:
    """Return the name of a job's security group; two of a network must differ."""
    return f"spottrain-{job}-{uid[:8]}" if uid else f"spottrain-{job}"


def by_tag(key: str, value: str) -> dict[str, Any]:
    """Return a filter on one tag."""
    return {"Name": f"tag:{key}", "Values": [value]}


def client_token(request: LaunchRequest) -> str:
    """Return the launch's token, hashed to EC2's 64 characters."""
    return hashlib.sha256(request.token.encode()).hexdigest()


def run_instances(
    request: LaunchRequest, placement: AwsPlacement, settings: AwsSettings
) -> dict[str, Any]:
    """Return the arguments of RunInstances: up to ``request.count`` instances."""
    arguments: dict[str, Any] = {
        "ClientToken": client_token(request),
        "ImageId": placement.image_id,
        "InstanceType": request.offer.instance_type,
        "MinCount": 1,
        "MaxCount": request.count,
        "NetworkInterfaces": [_interface(placement, settings)],
        "BlockDeviceMappings": [_root_disk(placement, settings)],
        "InstanceInitiatedShutdownBehavior": "terminate",
        # Two hops: the agent may run in a container.
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        "UserData": lease.boot_script(request.lease_s),
        "TagSpecifications": _launch_tags(request, settings),
    }
    if request.offer.spot:
        arguments["InstanceMarketOptions"] = {
            "MarketType": "spot",
            "SpotOptions": {
                "SpotInstanceType": "one-time",
                "InstanceInterruptionBehavior": "terminate",
            },
        }
    if placement.key_name:
        arguments["KeyName"] = placement.key_name
    if settings.instance_profile:
        arguments["IamInstanceProfile"] = {"Name": settings.instance_profile}
    return arguments


def _launch_tags(request: LaunchRequest, settings: AwsSettings) -> list[dict[str, Any]]:
    """Return the tags of all resources of a launch."""
    vm_tags = tag_list(
        {
            **tags.of_job(request.job, settings),
            **({tags.OWNER: settings.owner} if settings.owner else {}),
            tags.INTENT: request.intent,
            tags.EXPIRES: str(math.ceil(request.lease_s)),
            tags.PRICE: repr(request.offer.usd_per_hour),
            tags.ATTACHED: repr(request.offer.attached_usd_per_hour),
            "Name": f"spottrain {request.job}",
        }
    )
    kinds = ["instance", "volume", "network-interface"]
    if request.offer.spot:
        kinds.append("spot-instances-request")
    return [{"ResourceType": kind, "Tags": vm_tags} for kind in kinds]


def _interface(placement: AwsPlacement, settings: AwsSettings) -> dict[str, Any]:
    return {
        "DeviceIndex": 0,
        "SubnetId": placement.subnet_id,
        "Groups": list(placement.group_ids),
        "AssociatePublicIpAddress": settings.public_addresses,
        "DeleteOnTermination": True,
    }


def _root_disk(placement: AwsPlacement, settings: AwsSettings) -> dict[str, Any]:
    disk = {
        "VolumeSize": settings.disk_gib,
        "VolumeType": "gp3",
        "DeleteOnTermination": True,
    }
    return {"DeviceName": placement.root_device, "Ebs": disk}


def vm_of(region: str, instance: Mapping[str, Any], facts: CloudFacts) -> Vm:
    """Return an instance as a ``Vm``."""
    vm_tags = pairs_of(instance)
    launched_at_s = instance["LaunchTime"].timestamp()
    offer = make_offer(
        facts,
        cloud=CLOUD,
        family=family_of(instance["InstanceType"]),
        region=region,
        zone=instance["Placement"]["AvailabilityZone"],
        instance_type=instance["InstanceType"],
        spot=instance.get("InstanceLifecycle") == "spot",
        usd_per_hour=float(vm_tags.get(tags.PRICE, "0")),
        attached_usd_per_hour=float(vm_tags.get(tags.ATTACHED, "0")),
        observed_at_s=launched_at_s,
    )
    state = _STATES[instance["State"]["Name"]]
    hops, since_s = tags.taken_of(vm_tags)
    began_s = max(launched_at_s, since_s)
    end_s = ended_at_s(instance) if state is VmState.TERMINATED else None
    return Vm(
        vm_id=vm_id_of(region, instance["InstanceId"], hops),
        job=vm_tags.get(tags.JOB, ""),
        intent=vm_tags.get(tags.INTENT, ""),
        uid=vm_tags.get(tags.UID, ""),
        owner=vm_tags.get(tags.OWNER, ""),
        state=state,
        offer=offer,
        private_address=instance.get("PrivateIpAddress", ""),
        launched_at_s=began_s,
        ended_at_s=None if end_s is None else max(end_s, began_s),
    )


def moved_tags(
    hops: int, job: str, intent: str, since_s: float, settings: AwsSettings
) -> dict[str, str]:
    """Return what is written on an instance that goes from another job to this one."""
    return {
        **tags.of_job(job, settings),
        tags.INTENT: intent,
        tags.TAKEN: tags.taken(hops, since_s),
        "Name": f"spottrain {job}",
    }


def attached_to(instance: Mapping[str, Any]) -> list[str]:
    """Return the ids of what was made with an instance and has its tags."""
    disks = (each["Ebs"]["VolumeId"] for each in instance["BlockDeviceMappings"])
    cards = (each["NetworkInterfaceId"] for each in instance["NetworkInterfaces"])
    spot = instance.get("SpotInstanceRequestId", "")
    return [*disks, *cards, *([spot] if spot else [])]


def ended_at_s(instance: Mapping[str, Any]) -> float | None:
    """Return when an instance ended, from its StateTransitionReason, if given."""
    found = _MOMENT.search(instance.get("StateTransitionReason", ""))
    if found is None:
        return None
    moment = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return moment.timestamp()


def host_keys(console: str) -> tuple[str, ...]:
    """Return the SSH host keys that cloud-init wrote to a VM's console.

    The console is read over the authenticated API, so no key is trusted on first use,
    and no secret is in user data.
    """
    _, begun, rest = console.partition("-----BEGIN SSH HOST KEY KEYS-----")
    keys, ended, _ = rest.partition("-----END SSH HOST KEY KEYS-----")
    if not begun or not ended:
        return ()
    lines = (line.split() for line in keys.splitlines())
    return tuple(" ".join(words[:2]) for words in lines if len(words) >= 2)


def ssh_rules(group_id: str, networks: Sequence[str], port: int = 22) -> list[dict[str, Any]]:
    """Return a group's ingress rules: SSH from ``networks``, all from itself.

    One for each network: EC2 refuses a rule as a whole if one of its networks is let in.
    """
    inside = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group_id}]}
    ports = {"IpProtocol": "tcp", "FromPort": port, "ToPort": port}
    return [inside, *({**ports, "IpRanges": [{"CidrIp": n}]} for n in networks)]


def stale_rules(
    group: Mapping[str, Any], networks: Sequence[str], port: int
) -> list[dict[str, Any]]:
    """Return the rules of our own group that let SSH in from other networks."""
    found = []
    for rule in group.get("IpPermissions", ()):
        known = {each["CidrIp"] for each in rule.get("IpRanges", ())}
        if rule.get("FromPort") == port and (stale := sorted(known - set(networks))):
            ranges = [{"CidrIp": network} for network in stale]
            ports = {"FromPort": port, "ToPort": port}
            found.append({"IpProtocol": "tcp", **ports, "IpRanges": ranges})
    return found


_QUOTAS = {
    ("G and VT", True): "L-3819A6DF",
    ("P", True): "L-7212CCBC",
    ("G and VT", False): "L-DB2E81BA",
    ("P", False): "L-417A185B",
    ("P5", True): "L-C4BD4855",
    ("P5", False): "L-417A185B",
    ("Standard", True): "L-34B43A08",
    ("Standard", False): "L-1216C47A",
}
DISK_QUOTA = "L-7A658B76"
""""Storage for General Purpose SSD (gp3) volumes, in TiB", of EBS."""
_STANDARD = frozenset("acdhimrtz")
"""Families that one quota bounds: "Standard (A, C, D, H, I, M, R, T, Z)"."""


def quota_codes(instance_types: Sequence[str]) -> dict[tuple[str, bool], str]:
    """Return the quota codes of some types, by (family, spot)."""
    families = {family_of(kind) for kind in instance_types}
    return {key: code for key, code in _QUOTAS.items() if key[0] in families}


def family_of(instance_type: str) -> str:
    """Return the family that one of EC2's quotas bounds."""
    letters = re.match(r"[a-z]+", instance_type)
    name = letters[0] if letters else ""
    if name in _STANDARD:
        return "Standard"
    if instance_type.startswith("p5"):
        return "P5"  # P5, P5e and P5en have a quota of spot VMs of their own
    return "P" if name == "p" else "G and VT" if name in ("g", "gr", "vt") else name
