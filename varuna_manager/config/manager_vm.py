"""The section of a job file about the manager's VM, for ``launch --manager-vm``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from spottrain.varuna_manager.config.base import Section

Name = Annotated[str, Field(min_length=1)]


IDENTITY: Mapping[str, str] = {
    "aws": "instance_profile",
    "azure": "identity",
    "gcp": "service_account",
    "kubernetes": "service_account",
}
"""Key of a cloud's section that names the identity of VMs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerMachine:
    """The default machine for a manager."""

    instance_type: str
    usd_per_hour: float
    """On-demand price in the most expensive widely used region; the budget assumes it."""
    image: str
    """An image with Python 3.11 or newer."""
    image_owner: str = ""
    """Owner of images that are found by name; AWS only."""


DEFAULTS: Mapping[str, ManagerMachine] = {
    "aws": ManagerMachine(
        instance_type="t3.medium",
        usd_per_hour=0.07,
        image="ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*",
        image_owner="099720109477",  # Canonical
    ),
    "azure": ManagerMachine(
        instance_type="Standard_B2s",
        usd_per_hour=0.08,
        image="Canonical:ubuntu-24_04-lts:server:latest",
    ),
    "gcp": ManagerMachine(
        instance_type="e2-medium",
        usd_per_hour=0.06,
        image="projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    ),
}
"""By cloud: two virtual CPUs and 4 GiB, enough for a manager of thousands of VMs."""


class ManagerVmConfig(Section):
    """The VM of the manager, for `launch --manager-vm`; see docs/clouds.md."""

    identity: str = ""
    """Required: the VM's identity, which is the name of an instance profile on AWS, the
    resource id of a managed identity on Azure, the email of a service account on GCP, or the
    name of one on Kubernetes. Not on Slurm."""
    instance_type: Name | None = None
    """Instance type; by default t3.medium, Standard_B2s or e2-medium."""
    usd_per_hour: PositiveFloat | None = None
    """Its on-demand price per hour, required with `instance_type`; by default the
    default type's price in an expensive region."""
    image: Name | None = None
    """As the cloud's `image`; by default Ubuntu 24.04."""
    python: Name = "python3"
    """Python 3.11 or newer of that image; packages that it lacks are installed into a
    folder of spottrain's."""
    disk_gib: PositiveInt = 30
    """Size of its disk."""
    lease_s: PositiveFloat = 1800.0
    """After this time without a running manager, the VM ends itself."""

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.instance_type is not None and self.usd_per_hour is None:
            raise ValueError("instance_type needs usd_per_hour, its on-demand price per hour")
        return self

    def machine(self, cloud: str, image_owner: str = "") -> ManagerMachine:
        """Return the machine to rent from a cloud.

        Args:
            cloud: Its name.
            image_owner: Owner of the image, if the job file names the image.
        """
        usual = DEFAULTS[cloud]
        own_image = self.image is not None
        return ManagerMachine(
            instance_type=self.instance_type or usual.instance_type,
            usd_per_hour=self.usd_per_hour or usual.usd_per_hour,
            image=self.image or usual.image,
            image_owner=image_owner if own_image else usual.image_owner,
        )
