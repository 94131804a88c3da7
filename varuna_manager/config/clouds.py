"""The parts of a job file that say where and how clouds rent machines."""

from __future__ import annotations

import getpass
import ipaddress
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spottrain.cloud.aws.settings import IMAGE_NAME, AwsSettings
from spottrain.cloud.azure.settings import IMAGE as AZURE_IMAGE
from spottrain.cloud.azure.settings import (
    MANAGEMENT_URL,
    PRICES_URL,
    PRICES_VARIABLE,
    AzureSettings,
)
from spottrain.cloud.gcp.settings import IMAGE as GCP_IMAGE
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.ssh.transport.hosts import Host
from spottrain.errors import ConfigError
from spottrain.pricing.prices.catalogue import InstanceType, catalogue
from spottrain.pricing.ranking.cooldowns import Span
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.base import Section
from spottrain.varuna_manager.config.ssh import Folder

CloudName = Literal["aws", "azure", "gcp"]
Provider = Literal["local", "ssh"] | CloudName | tuple[CloudName, ...]
Name = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


def provider_of(value: Any) -> Any:
    """Return a job file's provider; several clouds as a tuple, a list of one as that one.

    Raises:
        ValueError: it is none.
    """
    clouds = get_args(CloudName)
    if value in ("local", "ssh", *clouds):
        return value
    if isinstance(value, list | tuple) and value and all(v in clouds for v in value):
        if len(set(value)) < len(value):
            raise ValueError(f"must name each cloud once: got {', '.join(value)}")
        return tuple(value) if len(value) > 1 else value[0]
    raise ValueError(
        "must be local, ssh, aws, azure or gcp, or a list of clouds such as [aws, gcp]: "
        f"got {value!r}"
    )


def _network(text: str) -> str:
    network = ipaddress.ip_network(text)
    if network.version != 4:
        raise ValueError(
            f"must be an IPv4 network such as 198.51.100.7/32, VMs have no IPv6 "
            f"address: got {text}"
        )
    return str(network)


Network = Annotated[str, AfterValidator(_network)]


class BastionConfig(Section):
    """The host through which VMs without a public address are reached."""

    address: Name
    """Name or IP address."""
    port: Port = 22
    """Port of its SSH server."""
    user: str | None = None
    """Who logs in; by default your own name here."""
    host_key: str | None = None
    """Its public key as `ssh-keyscan` prints it without the name; by default
    `known_hosts` must have it."""
    known_hosts: str = "~/.ssh/known_hosts"
    """Relative to the job file. Nothing is ever added."""
    key_file: str | None = None
    """Private key; by default those of your SSH agent and of ~/.ssh. Relative to the
    job file."""

    def absolute(self, base: Path) -> BastionConfig:
        """Return this with its paths made absolute."""
        paths = {"known_hosts": self.known_hosts, "key_file": self.key_file}
        return self.model_copy(
            update={
                name: str((base / Path(path).expanduser()).resolve())
                for name, path in paths.items()
                if path is not None
            }
        )

    def host(self) -> Host:
        """Return it as sessions know it."""
        return Host(
            name="bastion",
            address=self.address,
            port=self.port,
            user=self.user or getpass.getuser(),
            host_key=self.host_key,
            known_hosts=Path(self.known_hosts).expanduser(),
            key_file=None if self.key_file is None else Path(self.key_file),
        )


class CloudConfig(Section):
    """What all clouds are told alike."""

    regions: tuple[Name, ...]
    """Where machines may be rented."""
    zones: tuple[Name, ...] = ()
    """Only these zones; by default all of the regions."""
    instance_types: tuple[Name, ...] = ()
    """What may be rented; `spottrain prices` knows the names."""
    gpus: tuple[Name, ...] = ()
    """Rent whatever has these GPUs, such as A100 (any memory) or A100-80GB."""
    disk_gib: PositiveInt = 200
    """Size of a VM's disk."""
    python: Name = "python3"
    """Python 3.11 or newer of the image, with torch, numpy and safetensors, or with
    what `setup` installs."""
    folder: Folder = ".spottrain"
    """spottrain's own folder on a VM, relative to the home folder."""
    ssh_port: Port = 22
    """Where the image's SSH server listens."""
    ssh_from: tuple[Network, ...] = ()
    """IPv4 networks from which SSH is let in, such as 198.51.100.7/32; by default this
    machine's own public address, as `https://checkip.amazonaws.com` sees it."""
    public_addresses: bool = True
    """Whether VMs get a public address; without one they are reached from inside the
    network, or through `bastion`."""
    bastion: BastionConfig | None = None
    """The host through which VMs are entered."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        try:
            self.kinds()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def cloud(self) -> str:
        """The cloud's name."""
        raise NotImplementedError

    @property
    def has_own_network(self) -> bool:
        """Whether VMs are put into a network of the user's."""
        raise NotImplementedError

    def kinds(self) -> tuple[str, ...]:
        """Return what may be rented: the types named, and all with the GPUs named.

        Raises:
            ConfigError: the catalogue does not know a name.
        """
        found: list[InstanceType] = []
        if self.instance_types:
            found += catalogue().matching(
                clouds=(self.cloud,), names=self.instance_types
            )
        if self.gpus:
            found += catalogue().matching(clouds=(self.cloud,), gpus=self.gpus)
        return tuple(dict.fromkeys(kind.name for kind in found))

    def absolute(self, base: Path) -> Self:
        """Return this with its paths made absolute."""
        if self.bastion is None:
            return self
        return self.model_copy(update={"bastion": self.bastion.absolute(base)})

    def _shared(self, public_key: str, ssh_from: tuple[str, ...]) -> dict[str, Any]:
        """Return what every adapter's settings have."""
        return {
            "instance_types": self.kinds(),
            "regions": self.regions,
            "zones": self.zones,
            "disk_gib": self.disk_gib,
            "ssh_port": self.ssh_port,
            "ssh_from": self.ssh_from or ssh_from,
            "public_addresses": self.public_addresses,
            "public_key": public_key,
        }


class AwsConfig(CloudConfig):
    """Amazon Web Services, for `provider: aws`; see docs/clouds.md."""

    regions: tuple[Name, ...] = Field(default=("us-east-1",), min_length=1)
    """Where machines may be rented."""
    profile: str = ""
    """Name of a profile in ~/.aws; by default what boto3 finds: the environment, the
    profile `default`, SSO, a role."""
    image: Name = IMAGE_NAME
    """Id (`ami-…`), or a name with wildcards, of which the newest is taken."""
    image_owner: Name = "amazon"
    """Whose image counts when it is found by name."""
    user: Name = "ubuntu"
    """Whom SSH logs in as on that image."""
    subnets: dict[str, str] = Field(default_factory=dict)
    """Existing subnet by zone; by default the zone's default one, else our own."""
    security_groups: tuple[Name, ...] = ()
    """Existing groups by id; by default one of our own."""
    instance_profile: str = ""
    """Name of an instance profile (role) that VMs are given."""
    interruption_role: str = ""
    """ARN of a role with which the Fault Injection Service may interrupt VMs."""
    endpoint_url: str | None = None
    """Another address than AWS's own."""

    @property
    def cloud(self) -> str:
        """The cloud's name."""
        return "aws"

    @property
    def has_own_network(self) -> bool:
        """Whether VMs are put into a network of the user's."""
        return bool(self.subnets)

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> AwsSettings:
        """Return what the adapter is told."""
        return AwsSettings(
            **self._shared(public_key, ssh_from),
            profile=self.profile,
            image=self.image,
            image_owner=self.image_owner,
            user=self.user,
            subnets=self.subnets,
            security_groups=self.security_groups,
            instance_profile=self.instance_profile,
            interruption_role=self.interruption_role,
            endpoint_url=self.endpoint_url,
        )


class AzureConfig(CloudConfig):
    """Microsoft Azure, for `provider: azure`; see docs/clouds.md."""

    regions: tuple[Name, ...] = Field(default=("eastus",), min_length=1)
    """Where machines may be rented."""
    subscription: str = ""
    """Id of the subscription that pays; by default AZURE_SUBSCRIPTION_ID."""
    resource_group: str = ""
    """An existing one; by default one for each job, removed at its end."""
    image: Name = AZURE_IMAGE
    """`publisher:offer:sku:version`, or an image's resource id."""
    user: Name = "spottrain"
    """Whom SSH logs in as; the account is made at boot."""
    subnets: dict[str, str] = Field(default_factory=dict)
    """Resource id of an existing subnet by region; by default our own."""
    max_usd_per_hour: PositiveFloat | None = None
    """Above this price a spot VM is neither made nor kept; by default the on-demand
    price."""
    identity: str = ""
    """Resource id of a managed identity that may delete the VMs; by default our own."""
    self_delete: bool = True
    """Whether a VM that hears no manager deletes itself, which takes an identity."""
    endpoint_url: Name = MANAGEMENT_URL
    """Another address than the public cloud's, such as that of a national one."""
    authority_url: str = ""
    """Where tokens are had; by default where Azure's SDK does."""

    @property
    def cloud(self) -> str:
        """The cloud's name."""
        return "azure"

    @property
    def has_own_network(self) -> bool:
        """Whether VMs are put into a network of the user's."""
        return bool(self.subnets)

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> AzureSettings:
        """Return what the adapter is told."""
        return AzureSettings(
            **self._shared(public_key, ssh_from),
            subscription=self.subscription,
            resource_group=self.resource_group,
            image=self.image,
            user=self.user,
            subnets=self.subnets,
            max_usd_per_hour=self.max_usd_per_hour,
            identity=self.identity,
            self_delete=self.self_delete,
            endpoint_url=self.endpoint_url,
            authority_url=self.authority_url,
            prices_url=os.environ.get(PRICES_VARIABLE) or PRICES_URL,
        )


class GcpConfig(CloudConfig):
    """Google Cloud, for `provider: gcp`; see docs/clouds.md."""

    regions: tuple[Name, ...] = Field(default=("us-central1",), min_length=1)
    """Where machines may be rented."""
    project: str = ""
    """Id of the project; needed."""
    image: Name = GCP_IMAGE
    """`projects/P/global/images/NAME`, or `…/images/family/FAMILY` for the newest."""
    user: Name = "spottrain"
    """Whom SSH logs in as; the account is made at boot."""
    network: str = ""
    """Name of an existing network; by default one of our own."""
    subnetworks: dict[str, str] = Field(default_factory=dict)
    """Name of an existing subnet by region."""
    network_tags: tuple[Name, ...] = ()
    """Tags that existing firewall rules let through; by default rules of our own."""
    service_account: str = ""
    """Email of the VMs' service account; one that may delete instances lets a VM that
    hears no manager delete itself."""
    max_run_s: Annotated[float, Field(ge=30, le=120 * DAY_S)] = 7 * DAY_S
    """Google deletes a VM so long after its start, whatever happens."""
    endpoint: str = ""
    """Another address than Compute Engine's own."""

    @property
    def cloud(self) -> str:
        """The cloud's name."""
        return "gcp"

    @property
    def has_own_network(self) -> bool:
        """Whether VMs are put into a network of the user's."""
        return bool(self.network)

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> GcpSettings:
        """Return what the adapter is told."""
        return GcpSettings(
            **self._shared(public_key, ssh_from),
            project=self.project,
            image=self.image,
            user=self.user,
            network=self.network,
            subnetworks=self.subnetworks,
            network_tags=self.network_tags,
            service_account=self.service_account,
            max_run_s=self.max_run_s,
            endpoint=self.endpoint,
        )


AnyCloud = AwsConfig | AzureConfig | GcpConfig


def check_cloud(cloud: AnyCloud, checkpoint_path: str | None, span: Span) -> None:
    """Check what the rest of a job file must be like with a cloud as its provider.

    Raises:
        ValueError: it is not.
    """
    name = cloud.cloud
    if not (cloud.instance_types or cloud.gpus):
        raise ValueError(
            f"resources.provider {name} needs {name}.instance_types or {name}.gpus: "
            "what may be rented"
        )
    if isinstance(cloud, GcpConfig) and not cloud.project:
        raise ValueError("resources.provider gcp needs gcp.project: who pays")
    if checkpoint_path is None:
        raise ValueError(
            f"resources.provider {name} needs a checkpoint.path that all VMs and this "
            "machine reach, such as s3://bucket/prefix; VMs share nothing else"
        )
    if span != "region" and not cloud.has_own_network:
        raise ValueError(
            f"resources.span {span} needs a network of your own whose regions reach "
            f"each other, named in {name}; or leave it at region"
        )
