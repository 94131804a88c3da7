"""Shared resources of a job's VMs: subnets, a security group, a key pair; and the
image.

They are found or created, by name or tag, at the first launch, and removed by
``release``. After a crash between any two calls they are found again.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from spottrain.cloud.aws import requests
from spottrain.cloud.aws.clients import AwsClients
from spottrain.cloud.aws.requests import AwsPlacement
from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.aws.translate import code_of
from spottrain.cloud.port import tags
from spottrain.cloud.port.errors import MisconfiguredError

_OWN_VPC = "10.79.0.0/16"
_ZONE_LETTERS = "abcdefghijklmnop"


class AwsNetwork:
    """The shared resources of each job's VMs."""

    def __init__(self, clients: AwsClients, settings: AwsSettings) -> None:
        self._clients = clients
        self._settings = settings
        self._lock = threading.Lock()
        self._placements: dict[tuple[str, str, str, str], AwsPlacement] = {}

    def placement(self, job: str, region: str, zone: str, image: str = "") -> AwsPlacement:
        """Return the placement of a job's VMs in a zone; created if needed.

        Args:
            job: Name of the job.
            image: Name of the image that is preferred to the newest.

        Raises:
            MisconfiguredError: there is no such image, subnet or zone.
        """
        key = job, region, zone, image
        with self._lock:  # else parallel launches would create everything twice
            if key not in self._placements:
                self._placements[key] = self._make_placement(*key)
            return self._placements[key]

    def knows(self, job: str, region: str) -> bool:
        """Return True if a placement of a job in a region is known."""
        with self._lock:
            return any(key[:2] == (job, region) for key in self._placements)

    def forget(self, job: str) -> None:
        """Check the resources again at the next launch: some may be missing."""
        with self._lock:
            self._placements = {k: v for k, v in self._placements.items() if k[0] != job}

    def admit(self, job: str, region: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks only, now and in groups made later."""
        self._settings = replace(self._settings, ssh_from=tuple(networks))
        ec2 = self._clients.get("ec2", region)
        for group in self._ours(ec2, job, "describe_security_groups", "SecurityGroups"):
            self._set_rules(ec2, group)

    def release(self, job: str, region: str) -> None:
        """Remove a job's shared resources; its VMs must have ended."""
        ec2 = self._clients.get("ec2", region)
        mine = [requests.by_tag(tags.JOB, job)]
        self.forget(job)
        with self._lock:
            for group in self._ours(ec2, job, "describe_security_groups", "SecurityGroups"):
                _ignoring("InvalidGroup.NotFound", ec2.delete_security_group)(
                    GroupId=group["GroupId"]
                )
            for pair in ec2.describe_key_pairs(Filters=mine)["KeyPairs"]:
                if tags.is_ours(requests.pairs_of(pair), job, self._settings):
                    ec2.delete_key_pair(KeyName=pair["KeyName"])
            for vpc in self._ours(ec2, job, "describe_vpcs", "Vpcs"):
                _remove_vpc(ec2, vpc["VpcId"])
            # A gateway that was created but not attached before a crash.
            for gateway in self._ours(ec2, job, "describe_internet_gateways", "InternetGateways"):
                ec2.delete_internet_gateway(InternetGatewayId=gateway["InternetGatewayId"])

    def image(self, region: str, preferred: str = "") -> Mapping[str, Any]:
        """Return the image, as EC2 describes it.

        Args:
            preferred: Name of the image that is taken before the newest one.

        Raises:
            MisconfiguredError: there is none, or it does not fit on the disk.
        """
        ec2 = self._clients.get("ec2", region)
        wanted = self._settings.image
        if wanted.startswith("ami-"):
            images = ec2.describe_images(ImageIds=[wanted])["Images"]
        else:
            images = self._images(ec2, preferred) or self._images(ec2, wanted)
        if not images:
            raise MisconfiguredError(
                f"AWS: no image in {ec2.meta.region_name}: got {wanted!r}; give the id "
                "of one with NVIDIA's driver"
            )
        newest: Mapping[str, Any] = max(
            images, key=lambda image: (image["CreationDate"], image["ImageId"])
        )
        disk_gib, image_gib = self._settings.disk_gib, _size_gib(newest)
        if disk_gib < image_gib:
            raise MisconfiguredError(
                f"AWS: image {newest['ImageId']} of {ec2.meta.region_name} needs a disk of "
                f"{image_gib} GiB: got {disk_gib}; raise aws.disk_gib"
            )
        return newest

    def _images(self, ec2: Any, name: str) -> list[Mapping[str, Any]]:
        """Return the images of a name, which may have wildcards.

        EC2 hides a deprecated one, and launches it all the same ("Deprecate an Amazon EC2
        AMI"): a job that has it keeps it.
        """
        if not name:
            return []
        filters = [
            {"Name": "name", "Values": [name]},
            {"Name": "state", "Values": ["available"]},
        ]
        found = ec2.describe_images(
            Owners=[self._settings.image_owner],
            Filters=filters,
            IncludeDeprecated=name != self._settings.image,
        )
        return list(found["Images"])

    def named_subnet(self, region: str) -> dict[str, Any]:
        """Return one of the subnets that the job file names in the region, empty if none.

        Raises:
            MisconfiguredError: some do not exist.
        """
        wanted = [i for zone, i in self._settings.subnets.items() if zone.startswith(region)]
        if not wanted:
            return {}
        ec2 = self._clients.get("ec2", region)
        return _list_named(ec2, "describe_subnets", "Subnets", wanted)[0]

    def check_groups(self, region: str) -> None:
        """Check that the security groups exist which the job file names.

        Raises:
            MisconfiguredError: some do not.
        """
        if groups := self._settings.security_groups:
            ec2 = self._clients.get("ec2", region)
            _list_named(ec2, "describe_security_groups", "SecurityGroups", groups)

    def _make_placement(self, job: str, region: str, zone: str, image: str) -> AwsPlacement:
        ec2 = self._clients.get("ec2", region)
        subnet = self._subnet(ec2, job, zone)
        groups = self._settings.security_groups
        if groups:
            _list_named(ec2, "describe_security_groups", "SecurityGroups", groups)
        else:
            groups = (self._group(ec2, job, subnet["VpcId"]),)
        found = self.image(region, image)
        return AwsPlacement(
            subnet_id=subnet["SubnetId"],
            group_ids=groups,
            key_name=self._key_pair(ec2, job),
            image_id=found["ImageId"],
            root_device=found["RootDeviceName"],
            image="" if self._settings.image.startswith("ami-") else found["Name"],
            vpc_id=subnet["VpcId"],
        )

    # --- the network ------------------------------------------------------------------

    def _subnet(self, ec2: Any, job: str, zone: str) -> dict[str, Any]:
        """Return the zone's subnet: the named one, the default one, or our own."""
        named = self._settings.subnets.get(zone)
        if named is not None:
            return _list_named(ec2, "describe_subnets", "Subnets", [named])[0]
        in_zone = {"Name": "availability-zone", "Values": [zone]}
        default = {"Name": "default-for-az", "Values": ["true"]}
        for subnet in _list(ec2, "describe_subnets", "Subnets", [in_zone, default]):
            return subnet
        return self._own_subnet(ec2, job, zone)

    def _own_subnet(self, ec2: Any, job: str, zone: str) -> dict[str, Any]:
        vpc_id = self._own_vpc(ec2, job)
        there = (
            {"Name": "vpc-id", "Values": [vpc_id]},
            {"Name": "availability-zone", "Values": [zone]},
        )
        for subnet in self._ours(ec2, job, "describe_subnets", "Subnets", *there):
            return subnet
        number = _ZONE_LETTERS.find(zone[-1]) * 16
        made: dict[str, Any] = ec2.create_subnet(
            VpcId=vpc_id,
            AvailabilityZone=zone,
            CidrBlock=f"10.79.{max(number, 0)}.0/20",
            TagSpecifications=requests.tagged("subnet", job, f"spottrain {job}", self._settings),
        )["Subnet"]
        return made

    def _own_vpc(self, ec2: Any, job: str) -> str:
        """Return the job's own VPC, with an internet gateway."""
        name = f"spottrain {job}"
        vpcs = self._ours(ec2, job, "describe_vpcs", "Vpcs")
        if not vpcs:
            vpcs = [
                ec2.create_vpc(
                    CidrBlock=_OWN_VPC,
                    TagSpecifications=requests.tagged("vpc", job, name, self._settings),
                )["Vpc"]
            ]
        vpc_id = str(vpcs[0]["VpcId"])
        gateways = self._ours(ec2, job, "describe_internet_gateways", "InternetGateways")
        if not gateways:
            kind = "internet-gateway"
            gateways = [
                ec2.create_internet_gateway(
                    TagSpecifications=requests.tagged(kind, job, name, self._settings)
                )["InternetGateway"]
            ]
        gateway_id = gateways[0]["InternetGatewayId"]
        if not gateways[0].get("Attachments"):
            ec2.attach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
        main = [
            {"Name": "vpc-id", "Values": [vpc_id]},
            {"Name": "association.main", "Values": ["true"]},
        ]
        for table in _list(ec2, "describe_route_tables", "RouteTables", main):
            _ignoring("RouteAlreadyExists", ec2.create_route)(
                RouteTableId=table["RouteTableId"],
                DestinationCidrBlock="0.0.0.0/0",
                GatewayId=gateway_id,
            )
        return vpc_id

    def _group(self, ec2: Any, job: str, vpc_id: str) -> str:
        """Return the job's security group, with its rules in place."""
        there = {"Name": "vpc-id", "Values": [vpc_id]}
        groups = self._ours(ec2, job, "describe_security_groups", "SecurityGroups", there)
        if not groups:
            name = requests.group_name(job, self._settings.uid)
            groups = [
                ec2.create_security_group(
                    GroupName=name,
                    Description="VMs of one spottrain job",
                    VpcId=vpc_id,
                    TagSpecifications=requests.tagged("security-group", job, name, self._settings),
                )
            ]
        self._set_rules(ec2, groups[0])
        return str(groups[0]["GroupId"])

    def _set_rules(self, ec2: Any, group: Mapping[str, Any]) -> None:
        """Let in what the settings name, and no longer what they named before."""
        group_id, port = str(group["GroupId"]), self._settings.ssh_port
        networks = self._settings.ssh_from
        for rule in requests.ssh_rules(group_id, networks, port):
            _ignoring("InvalidPermission.Duplicate", ec2.authorize_security_group_ingress)(
                GroupId=group_id, IpPermissions=[rule]
            )
        for rule in requests.stale_rules(group, networks, port):
            # Who may not revoke leaves the old address in.
            _ignoring("UnauthorizedOperation", ec2.revoke_security_group_ingress)(
                GroupId=group_id, IpPermissions=[rule]
            )

    def _ours(
        self, ec2: Any, job: str, call: str, key: str, *filters: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Return what a list has of this job; another's may have its name."""
        return [
            each
            for each in _list(ec2, call, key, [requests.by_tag(tags.JOB, job), *filters])
            if tags.is_ours(requests.pairs_of(each), job, self._settings)
        ]

    def _key_pair(self, ec2: Any, job: str) -> str:
        """Return the name of the job's key pair, which depends on the key."""
        key = self._settings.public_key
        if not key:
            return ""
        name = f"spottrain-{job}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
        _ignoring("InvalidKeyPair.Duplicate", ec2.import_key_pair)(
            KeyName=name,
            PublicKeyMaterial=key.encode(),
            TagSpecifications=requests.tagged("key-pair", job, name, self._settings),
        )
        return name


def _list(ec2: Any, call: str, key: str, filters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all items of a paginated call."""
    pages = ec2.get_paginator(call).paginate(Filters=filters)
    return [item for page in pages for item in page[key]]


def _size_gib(image: Mapping[str, Any]) -> int:
    """Return the size of an image's root device; 0 if it is not told."""
    return max(
        (
            device.get("Ebs", {}).get("VolumeSize", 0)
            for device in image.get("BlockDeviceMappings", ())
            if device["DeviceName"] == image["RootDeviceName"]
        ),
        default=0,
    )


def _list_named(ec2: Any, call: str, key: str, wanted: Sequence[str]) -> list[dict[str, Any]]:
    """Return the resources that the job file names.

    Raises:
        MisconfiguredError: some do not exist.
    """
    name = {"Subnets": "subnet-id", "SecurityGroups": "group-id"}[key]
    found = _list(ec2, call, key, [{"Name": name, "Values": list(wanted)}])
    if len(found) < len(set(wanted)):
        raise MisconfiguredError(
            f"AWS: {name} in {ec2.meta.region_name}: got {', '.join(wanted)}, of which "
            f"{len(found)} exist; correct the job file"
        )
    return found


def _ignoring(code: str, call: Any) -> Any:
    """Return a call that ignores one error code: the work is already done."""
    from botocore.exceptions import ClientError

    def tolerant(**arguments: Any) -> None:
        try:
            call(**arguments)
        except ClientError as error:
            if code_of(error) != code:
                raise

    return tolerant


def _remove_vpc(ec2: Any, vpc_id: str) -> None:
    """Remove our own VPC with all its resources."""
    inside = [{"Name": "vpc-id", "Values": [vpc_id]}]
    attached = [{"Name": "attachment.vpc-id", "Values": [vpc_id]}]
    for subnet in _list(ec2, "describe_subnets", "Subnets", inside):
        ec2.delete_subnet(SubnetId=subnet["SubnetId"])
    for gateway in _list(ec2, "describe_internet_gateways", "InternetGateways", attached):
        gateway_id = gateway["InternetGatewayId"]
        ec2.detach_internet_gateway(InternetGatewayId=gateway_id, VpcId=vpc_id)
        ec2.delete_internet_gateway(InternetGatewayId=gateway_id)
    ec2.delete_vpc(VpcId=vpc_id)
