"""Settings of an AWS account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE_NAME = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Ubuntu 24.04) *"
"""AWS's own image with NVIDIA's driver, CUDA and torch; the newest one is used.

Of one minor version of torch: all VMs of a job need the same. Source: DLAMI release notes
of October 2026 (driver 595.91.07, torch in /opt/pytorch/bin/python).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """Settings of the account and of VMs."""

    instance_types: tuple[str, ...]
    """Types that may be rented, such as ``g5.xlarge``."""
    regions: tuple[str, ...] = ("us-east-1",)
    """Regions of offers and VMs; empty: all enabled regions."""
    profile: str = ""
    """Name of a profile in ~/.aws; empty: boto3's default."""
    zones: tuple[str, ...] = ()
    """Zones to use; empty: all of the regions."""
    image: str = IMAGE_NAME
    """An id (``ami-...``) or a name with wildcards, of which the newest is used."""
    image_owner: str = "amazon"
    """Owner of an image that is given by name."""
    user: str = "ubuntu"
    """SSH user on that image."""
    ssh_port: int = 22
    """Port of the SSH server on that image."""
    disk_gib: int = 200
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Subnet by zone; by default the zone's default one, else our own."""
    security_groups: tuple[str, ...] = ()
    """Ids of existing groups, all in the subnets' VPC; empty: our own."""
    public_key: str = ""
    """Public key of the job's key pair, in OpenSSH's format; empty: no key pair."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own group allows SSH, such as the manager's."""
    public_addresses: bool = True
    """VMs get public addresses; False: they are reached inside the network."""
    inside: bool = False
    """The manager is in the VMs' network and uses their private addresses."""
    instance_profile: str = ""
    """Name of an instance profile (role) for the VMs."""
    attached_usd_per_hour: float = 0.0
    """Price of a VM's disk and public address, added to that of the machine."""
    uid: str = ""
    """Unique id of the job; empty: only resources without one are looked for."""
    owner: str = ""
    """Who rents, as VMs' tags say; empty: the principal of the credentials."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """The user's own tags, on all resources."""
    endpoint_url: str | None = None
    """Another endpoint than AWS's own, like AWS_ENDPOINT_URL."""
    tries: int = 5
    """Attempts per call, including the first."""
    answer_s: float = 30.0
    """Timeout of an answer."""
