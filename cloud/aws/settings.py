"""Settings of an AWS account."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spottrain.cloud.port.settings import CloudSettings

IMAGE_NAME = "Deep Learning OSS Nvidia Driver AMI GPU PyTorch 2.10 (Ubuntu 24.04) *"
"""AWS's own image with NVIDIA's driver, CUDA and torch; the newest one is used.

Of one minor version of torch: all VMs of a job need the same. Source: DLAMI release notes
of October 2026 (driver 595.91.07, torch in /opt/pytorch/bin/python).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsSettings(CloudSettings):
    """Settings of the account and of VMs."""

    regions: tuple[str, ...] = ("us-east-1",)
    """Regions of offers and VMs; empty: all enabled regions."""
    profile: str = ""
    """Name of a profile in ~/.aws; empty: boto3's default."""
    image: str = IMAGE_NAME
    """An id (``ami-...``) or a name with wildcards, of which the newest is used."""
    image_owner: str = "amazon"
    """Owner of an image that is given by name."""
    user: str = "ubuntu"
    """SSH user on that image."""
    subnets: Mapping[str, str] = field(default_factory=dict)
    """Subnet by zone; by default the zone's default one, else our own."""
    security_groups: tuple[str, ...] = ()
    """Ids of existing groups, all in the subnets' VPC; empty: our own."""
    instance_profile: str = ""
    """Name of an instance profile (role) for the VMs."""
    endpoint_url: str | None = None
    """Another endpoint than AWS's own, like AWS_ENDPOINT_URL."""
    tries: int = 5
    """Attempts per call, including the first."""
