"""What a user may say about their AWS account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

IMAGE_NAME = "Deep Learning Base OSS Nvidia Driver GPU AMI (Ubuntu 24.04) *"
"""AWS's own image with NVIDIA's driver and CUDA; the newest is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings:
    """Where and how machines are rented."""

    instance_types: tuple[str, ...]
    """What may be rented, such as ``g5.xlarge``."""
    regions: tuple[str, ...] = ("us-east-1",)
    """Where offers and VMs are looked for; none: wherever the account may rent."""
    profile: str = ""
    """Name of a profile in ~/.aws; empty: whatever boto3 finds."""
    zones: tuple[str, ...] = ()
    """Only these zones; all of the regions if empty."""
    image: str = IMAGE_NAME
    """An id (``ami-...``) or a name with wildcards, of which the newest is taken."""
    image_owner: str = "amazon"
    """Whose image counts when it is found by name."""
    user: str = "ubuntu"
    """Whom SSH logs in as on that image."""
    ssh_port: int = 22
    """Where that image's SSH server listens."""
    disk_gib: int = 200
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Subnet by zone; else the zone's default one, else one of our own."""
    security_groups: tuple[str, ...] = ()
    """Existing groups by id, all in the subnets' VPC; else one of our own."""
    public_key: str = ""
    """In OpenSSH's format; becomes the job's key pair. No key pair if empty."""
    ssh_from: tuple[str, ...] = ()
    """Networks (CIDR) from which our own group lets SSH in: where the manager is."""
    public_addresses: bool = True
    """Whether VMs get a public address; False: they are reached inside the network."""
    inside: bool = False
    """Whether whoever asks is in the VMs' network: they are entered at their private
    addresses, whatever others they have."""
    instance_profile: str = ""
    """Name of an instance profile (role) for the VMs."""
    interruption_role: str = ""
    """ARN of the role with which the Fault Injection Service may interrupt VMs."""
    endpoint_url: str | None = None
    """Another address than AWS's own; AWS_ENDPOINT_URL does the same."""
    tries: int = 5
    """Calls, the first included, before boto3 gives up on a throttled or lost one."""
    answer_s: float = 30.0
    """How long AWS may take to answer a call."""
