"""The sections of a job file about clouds."""

from __future__ import annotations

import getpass
import ipaddress
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from spottrain.cloud.aws.requests import split_vm_id
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
from spottrain.cloud.port.tags import check_tags
from spottrain.cloud.ssh.transport.hosts import FIND_PYTHON, Host
from spottrain.cloud.ssh.transport.proxy import PORT, ProxyCommand, through_port
from spottrain.errors import ConfigError
from spottrain.gpus.builds import UnfitBuildError, check_precision
from spottrain.pricing.prices.catalogue import InstanceType, catalogue
from spottrain.pricing.ranking.cooldowns import Span
from spottrain.units import DAY_S
from spottrain.varuna_manager.config.base import LocalPath, Section
from spottrain.varuna_manager.config.ssh import Folder
from spottrain.wire.messages import DeviceChoice
from spottrain.wire.model import Precision

CloudName = Literal["aws", "azure", "gcp"]
OwnMachines = Literal["ssh", "slurm", "kubernetes"]
"""Providers of machines that people have, and do not rent."""
OWN_MACHINES: frozenset[str] = frozenset(get_args(OwnMachines))
Provider = Literal["local"] | OwnMachines | CloudName | tuple[CloudName, ...]
DISK_GIB = 200
"""Size of a VM's disk where the job file gives none."""
Name = Annotated[str, Field(min_length=1)]
Port = Annotated[int, Field(ge=1, le=65535)]


def provider_of(value: Any) -> Any:
    """Return a job file's provider; several clouds as a tuple, a list of one as its item.

    Raises:
        ValueError: It is not a provider.
    """
    clouds = get_args(CloudName)
    if value in ("local", *OWN_MACHINES, *clouds):
        return value
    if isinstance(value, list | tuple) and value and all(v in clouds for v in value):
        if len(set(value)) < len(value):
            raise ValueError(f"must name each cloud once: got {', '.join(value)}")
        return tuple(value) if len(value) > 1 else value[0]
    raise ValueError(
        "must be local, ssh, slurm, kubernetes, aws, azure or gcp, or a list of clouds such as "
        f"[aws, gcp]: got {value!r}"
    )


def _network(text: str) -> str:
    network = ipaddress.ip_network(text)
    if network.version != 4:
        raise ValueError(
            f"must be an IPv4 network such as 198.51.100.7/32, as VMs have no IPv6 "
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
    """Login name; by default your own on this machine."""
    host_key: str | None = None
    """Its public key as printed by `ssh-keyscan`, without the name; by default it must
    be in `known_hosts`."""
    known_hosts: LocalPath = "~/.ssh/known_hosts"
    """File with known host keys, relative to the job file. It is never changed."""
    key_file: LocalPath | None = None
    """Private key file, relative to the job file; by default the keys of your SSH agent
    and of ~/.ssh."""

    def host(self) -> Host:
        """Return it as an SSH host."""
        return Host(
            name="bastion",
            address=self.address,
            port=self.port,
            user=self.user or getpass.getuser(),
            host_key=self.host_key,
            known_hosts=Path(self.known_hosts).expanduser(),
            key_file=None if self.key_file is None else Path(self.key_file),
        )


def _bastion_id(text: str) -> str:
    if text and not _BASTION_ID.fullmatch(text):
        raise ValueError(
            "must be the resource id of a Bastion, /subscriptions/…/resourceGroups/…"
            f"/providers/Microsoft.Network/bastionHosts/NAME: got {text}"
        )
    return text


_BASTION_ID = re.compile(
    r"/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft\.Network/"
    r"bastionHosts/[^/]+",
    re.IGNORECASE,
)


def _http_url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"must be a URL such as https://example.org: got {text}")
    return text


HttpUrl = Annotated[str, AfterValidator(_http_url)]


class CloudConfig(Section):
    """Keys that all clouds have."""

    cloud: ClassVar[str]
    network_key: ClassVar[str] = "subnets"
    """The key that names an existing network of the user."""

    regions: tuple[Name, ...]
    """Regions in which machines may be rented."""
    zones: tuple[Name, ...] = ()
    """Use only these zones; by default all zones of the regions."""
    instance_types: tuple[Name, ...] = ()
    """Instance types that may be rented; `spottrain prices` lists them."""
    gpus: tuple[Name, ...] = ()
    """Rent any type with these GPUs, such as A100 (any memory) or A100-80GB."""
    owner: Annotated[str, Field(pattern=r"^[^\x00-\x1f]*$", max_length=256)] = ""
    """Who rents, as VMs' tags say and `spottrain gc` asks; by default the principal of
    your credentials: an ARN on AWS, object and tenant id on Azure, an email on GCP."""
    tags: dict[str, str] = Field(default_factory=dict)
    """Your own tags (on GCP: labels) on all that is created, such as a cost centre."""
    disk_gib: PositiveInt = DISK_GIB
    """Size of a VM's disk."""
    python: Name = FIND_PYTHON
    """Python 3.11 or newer of the image, with torch, numpy and safetensors unless
    `setup` installs them. `auto`: the image's Python that has torch, else python3."""
    folder: Folder = ".spottrain"
    """spottrain's folder on a VM, relative to the home folder."""
    ssh_port: Port = 22
    """Port of the image's SSH server."""
    ssh_from: tuple[Network, ...] = ()
    """IPv4 networks that may connect by SSH, such as 198.51.100.7/32; by default this
    machine's public address, as reported by `https://checkip.amazonaws.com`."""
    public_addresses: bool = True
    """Give VMs a public address; without one they are reached from inside their network
    or through `bastion`."""
    bastion: BastionConfig | None = None
    """The host through which VMs are reached."""
    ssh_proxy: str = ""
    """A tool of the cloud through which VMs are reached, instead of their addresses:
    `ssm` on AWS, `iap` on GCP, on Azure the resource id of a Bastion."""
    proxy_tools: ClassVar[tuple[str, ...]] = ()
    """Commands that ``ssh_proxy`` needs."""
    moves_vms: ClassVar[bool] = False
    """A VM can go from one job to another; see ``CloudProvider.move``."""
    proxy_networks: ClassVar[tuple[str, ...]] = ()
    """Networks from which that tool's connections reach VMs."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.ssh_proxy and self.bastion is not None:
            raise ValueError("name ssh_proxy or bastion, not both")
        return self

    def proxy_argv(self, vm_id: str, port: int) -> list[str]:
        """Return the command line that connects to a VM's SSH server, for ``ssh_proxy``.

        Args:
            vm_id: As this cloud's provider names it.
            port: Of the SSH server.
        """
        raise NotImplementedError

    def proxy(self) -> ProxyCommand | None:
        """Return how VMs are reached through ``ssh_proxy``, if they are."""
        if not self.ssh_proxy:
            return None
        return lambda host: self.proxy_argv(host.name, host.port)

    @model_validator(mode="after")
    def _tagged(self) -> Self:
        check_tags(self.cloud, self.tags)
        return self

    @model_validator(mode="after")
    def _known(self) -> Self:
        _check_places(self.cloud, self.regions, self.zones)
        try:
            kinds = self.kinds()
        except ConfigError as error:
            raise ValueError(str(error)) from error
        wanted = ", ".join((*self.instance_types, *self.gpus))
        if wanted and not kinds:
            raise ValueError(
                f"nothing can be rented: {self.cloud} has no {wanted}; 'spottrain prices "
                f"--cloud {self.cloud}' lists what it has"
            )
        return self

    @model_validator(mode="after")
    def _reached(self) -> Self:
        ways = self.bastion, self.ssh_proxy, self.has_own_network
        if not self.public_addresses and not any(ways):
            raise ValueError(
                f"public_addresses: false needs {self.network_key} of yours, bastion or "
                "ssh_proxy: in a network that spottrain creates VMs could not be reached"
            )
        return self

    @property
    def has_own_network(self) -> bool:
        """True if VMs are put into an existing network of the user."""
        return bool(getattr(self, self.network_key))

    def not_joined(self) -> str:
        """Return what is missing for VMs of all our regions to reach each other; empty if
        a network of the user joins them, as far as the job file shows."""
        return "" if self.has_own_network else f"{self.cloud}.{self.network_key}"

    def kinds(self) -> tuple[str, ...]:
        """Return the instance types that may be rented, by name or by GPU.

        Raises:
            ConfigError: The catalogue does not know a name.
        """
        return tuple(dict.fromkeys(kind.name for kind in self.machines()))

    def machines(self) -> tuple[InstanceType, ...]:
        """Return the same, with what the catalogue knows of them.

        Raises:
            ConfigError: The catalogue does not know a name.
        """
        found: list[InstanceType] = []
        if self.instance_types:
            found += catalogue().matching(clouds=(self.cloud,), names=self.instance_types)
        if self.gpus:
            found += catalogue().matching(clouds=(self.cloud,), gpus=self.gpus)
        return tuple(found)

    def slow_in(self, precision: Precision) -> dict[str, str]:
        """Return the instance types whose GPUs have not a precision, and why.

        Raises:
            ConfigError: The catalogue does not know a name.
        """
        why: dict[str, str] = {}
        for kind in self.machines():
            try:
                if kind.device == "gpu":
                    check_precision(precision, kind.gpu.compute_capability, kind.gpu.name)
            except UnfitBuildError as error:
                why[kind.name] = str(error)
        return why

    def fast_in(self, precision: Precision) -> Self:
        """Return this without the instance types whose GPUs have not a precision.

        If none would be left, all: the job file is refused then, with the reason.
        """
        slow = self.slow_in(precision)
        left = tuple(name for name in self.kinds() if name not in slow)
        if not slow or not left:
            return self
        return self.model_copy(update={"instance_types": left, "gpus": ()})

    def attached_usd_per_hour(self) -> float:
        """Return the price of a VM's disk and public address per hour."""
        return catalogue().attached_usd_per_hour(
            self.cloud, self.disk_gib, public_address=self.public_addresses
        )

    def _values(self, settings: type, public_key: str, ssh_from: tuple[str, ...]) -> dict[str, Any]:
        """Return the values of an adapter's settings, which are named as here."""
        names = {one.name for one in fields(settings)} & type(self).model_fields.keys()
        return {
            **{name: getattr(self, name) for name in names},
            "instance_types": self.kinds(),
            "ssh_from": self.ssh_from or ssh_from,
            "public_key": public_key,
            "attached_usd_per_hour": self.attached_usd_per_hour(),
        }


class AwsConfig(CloudConfig):
    """Amazon Web Services, for `provider: aws`; see docs/clouds/aws.md."""

    cloud: ClassVar[str] = "aws"
    moves_vms: ClassVar[bool] = True
    regions: tuple[Name, ...] = Field(default=("us-east-1",), min_length=1)
    """Regions in which machines may be rented."""
    profile: str = ""
    """Name of a profile in ~/.aws; by default boto3 chooses: the environment, the
    profile `default`, SSO, a role."""
    image: Name = IMAGE_NAME
    """Image id (`ami-…`), or a name with wildcards; the newest match at the first launch is used."""
    image_owner: Name = "amazon"
    """Owner of images that are found by name."""
    user: Name = "ubuntu"
    """Login name of the image."""
    subnets: dict[str, str] = Field(default_factory=dict)
    """Existing subnet by zone; by default the zone's default subnet, else one that
    spottrain creates."""
    security_groups: tuple[Name, ...] = ()
    """Ids of existing security groups; by default spottrain creates one."""
    instance_profile: str = ""
    """Name of an instance profile (role) for the VMs."""
    endpoint_url: HttpUrl | None = None
    """Endpoint instead of AWS's own."""
    ssh_proxy: Literal["", "ssm"] = ""
    """`ssm`: reach VMs through Systems Manager's Session Manager, with `aws ssm
    start-session`; `instance_profile` must allow that."""
    proxy_tools: ClassVar[tuple[str, ...]] = ("aws", "session-manager-plugin")

    @model_validator(mode="after")
    def _enters(self) -> Self:
        if self.ssh_proxy and not self.instance_profile:
            raise ValueError(
                "ssh_proxy: ssm needs an instance_profile with the policy "
                "AmazonSSMManagedInstanceCore, without which VMs do not register"
            )
        for zone in self.subnets:
            if zone in self.regions:
                raise ValueError(f"subnets: are given by zone, such as {zone}a: got {zone}")
        _check_keys("subnets", self.subnets, self.regions, f"{self.regions[0]}a")
        return self

    def proxy_argv(self, vm_id: str, port: int) -> list[str]:
        """Return ``aws ssm start-session`` with the document for SSH.

        Source: AWS Systems Manager User Guide, "Allow and control permissions for SSH
        connections through Session Manager".
        """
        region, instance = split_vm_id(vm_id)
        argv = ["aws", "ssm", "start-session", "--target", instance]
        argv += ["--region", region, "--document-name", "AWS-StartSSHSession"]
        argv += ["--parameters", f"portNumber={port}"]
        return [*argv, "--profile", self.profile] if self.profile else argv

    def not_joined(self) -> str:
        """Return what is missing for VMs of all our regions to reach each other."""
        for region in self.regions:
            if not any(zone.startswith(region) for zone in self.subnets):
                return f"aws.subnets in {region}"
        # Our own group admits its members only, and a group is of one region.
        return "" if self.security_groups else "aws.security_groups"

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> AwsSettings:
        """Return the adapter's settings."""
        return AwsSettings(**self._values(AwsSettings, public_key, ssh_from))


class AzureConfig(CloudConfig):
    """Microsoft Azure, for `provider: azure`; see docs/clouds/azure.md."""

    cloud: ClassVar[str] = "azure"
    regions: tuple[Name, ...] = Field(default=("eastus",), min_length=1)
    """Regions in which machines may be rented."""
    subscription: str = ""
    """Id of the subscription; by default AZURE_SUBSCRIPTION_ID."""
    resource_group: str = ""
    """Existing resource group; by default one per job, removed at its end."""
    image: Name = AZURE_IMAGE
    """`publisher:offer:sku:version`, or an image's resource id."""
    user: Name = "spottrain"
    """Login name; the account is created at boot."""
    subnets: dict[str, str] = Field(default_factory=dict)
    """Resource id of an existing subnet by region; by default spottrain creates one."""
    max_usd_per_hour: PositiveFloat | None = None
    """Maximum spot price; above it a VM is neither created nor kept. By default the
    on-demand price."""
    identity: str = ""
    """Resource id of a managed identity that may delete the VMs; by default spottrain
    creates one."""
    self_delete: bool = True
    """Let VMs without contact to a manager delete themselves, which needs an
    identity."""
    endpoint_url: HttpUrl = MANAGEMENT_URL
    """Endpoint instead of the public cloud's, such as a national cloud's."""
    authority_url: str = ""
    """Token authority; by default that of Azure's SDK."""
    ssh_proxy: Annotated[str, AfterValidator(_bastion_id)] = ""
    """Resource id of an Azure Bastion (SKU Standard or above, with native clients) through
    which VMs are reached, with `az network bastion tunnel`."""
    proxy_tools: ClassVar[tuple[str, ...]] = ("az",)

    @model_validator(mode="after")
    def _enters(self) -> Self:
        if self.ssh_proxy and not self.subnets:
            raise ValueError("ssh_proxy needs subnets: those that the Bastion's network reaches")
        _check_keys("subnets", self.subnets, self.regions, self.regions[0])
        for key, ids in (
            ("subnets", self.subnets.values()),
            ("identity", [self.identity]),
        ):
            for each in ids:
                if each and not each.startswith("/subscriptions/"):
                    raise ValueError(f"{key}: must be a resource id, /subscriptions/…: got {each}")
        return self

    def proxy_argv(self, vm_id: str, port: int) -> list[str]:
        """Return ``az network bastion tunnel``, joined with stdin and stdout.

        Source: "Connect to a VM using Bastion and a Linux native client".
        """
        _, name, group = vm_id.split(".", 2)
        _, _, subscription, _, bastion_group, *_, bastion = self.ssh_proxy.split("/")
        own = self.subscription or os.environ.get("AZURE_SUBSCRIPTION_ID", "")
        vm = (
            f"/subscriptions/{own}/resourceGroups/{group}/providers/Microsoft.Compute"
            f"/virtualMachines/{name}"
        )
        argv = ["az", "network", "bastion", "tunnel", "--name", bastion]
        argv += ["--resource-group", bastion_group, "--subscription", subscription]
        argv += ["--target-resource-id", vm, "--resource-port", str(port)]
        return through_port([*argv, "--port", PORT])

    def not_joined(self) -> str:
        """Return what is missing for VMs of all our regions to reach each other."""
        missing = [region for region in self.regions if region not in self.subnets]
        return f"azure.subnets in {missing[0]}" if missing else ""

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> AzureSettings:
        """Return the adapter's settings."""
        return AzureSettings(
            **self._values(AzureSettings, public_key, ssh_from),
            prices_url=os.environ.get(PRICES_VARIABLE) or PRICES_URL,
        )


class GcpConfig(CloudConfig):
    """Google Cloud, for `provider: gcp`; see docs/clouds/gcp.md."""

    cloud: ClassVar[str] = "gcp"
    network_key: ClassVar[str] = "network"
    regions: tuple[Name, ...] = Field(default=("us-central1",), min_length=1)
    """Regions in which machines may be rented."""
    project: str = ""
    """Id of the project; required."""
    image: Name = GCP_IMAGE
    """`projects/P/global/images/NAME`, or `…/images/family/FAMILY` for the newest at the first launch."""
    user: Name = "spottrain"
    """Login name; the account is created at boot."""
    network: str = ""
    """Name of an existing network; by default spottrain creates one."""
    subnetworks: dict[str, str] = Field(default_factory=dict)
    """Name of an existing subnet by region."""
    network_tags: tuple[Name, ...] = ()
    """Tags that existing firewall rules admit; by default spottrain creates rules."""
    service_account: str = ""
    """Email of the VMs' service account; if it may delete instances, VMs without
    contact to a manager delete themselves."""
    max_run_s: Annotated[float, Field(ge=30, le=120 * DAY_S)] = 7 * DAY_S
    """Google deletes a VM this long after its start in any case."""
    endpoint: str = ""
    """Endpoint instead of Compute Engine's own."""
    ssh_proxy: Literal["", "iap"] = ""
    """`iap`: reach VMs through Identity-Aware Proxy, with `gcloud compute
    start-iap-tunnel`."""
    proxy_tools: ClassVar[tuple[str, ...]] = ("gcloud",)
    # "Using IAP for TCP forwarding": all its connections come from there.
    proxy_networks: ClassVar[tuple[str, ...]] = ("35.235.240.0/20",)

    @model_validator(mode="after")
    def _named(self) -> Self:
        _check_keys("subnetworks", self.subnetworks, self.regions, self.regions[0])
        if self.subnetworks and not self.network:
            raise ValueError("subnetworks needs network: the one that they are of")
        if self.service_account and "@" not in self.service_account:
            raise ValueError(
                "service_account: must be an email, such as NAME@PROJECT.iam."
                f"gserviceaccount.com: got {self.service_account}"
            )
        return self

    def proxy_argv(self, vm_id: str, port: int) -> list[str]:
        """Return ``gcloud compute start-iap-tunnel`` on stdin and stdout.

        Source: "Using IAP for TCP forwarding".
        """
        _, name, zone = vm_id.split(".")
        argv = ["gcloud", "compute", "start-iap-tunnel", name, str(port)]
        argv += ["--listen-on-stdin", f"--project={self.project}", f"--zone={zone}"]
        return [*argv, "--verbosity=warning"]

    def settings(self, public_key: str, ssh_from: tuple[str, ...]) -> GcpSettings:
        """Return the adapter's settings."""
        return GcpSettings(**self._values(GcpSettings, public_key, ssh_from))


AnyCloud = AwsConfig | AzureConfig | GcpConfig


_COMPUTE = {"aws": "c7i.4xlarge", "azure": "Standard_F16s_v2", "gcp": "c3-standard-8"}
"""Of each cloud, a type without GPUs."""


def check_named(clouds: Sequence[AnyCloud], checkpoint_path: str | None) -> None:
    """Check that a job file names all that nobody can choose for it.

    Raises:
        ValueError: Something is missing; all of it is named.
    """
    missing = []
    for cloud in clouds:
        if not (cloud.instance_types or cloud.gpus):
            what = f"{cloud.cloud}.instance_types or {cloud.cloud}.gpus"
            missing.append(f"{what}: name what may be rented")
        if isinstance(cloud, GcpConfig) and not cloud.project:
            missing.append("gcp.project, the project that pays")
    if checkpoint_path is None:
        missing.append(
            "a checkpoint.path that all VMs and this machine can access, such as "
            "s3://bucket/prefix; VMs share nothing else"
        )
    if missing:
        names = ", ".join(cloud.cloud for cloud in clouds)
        raise ValueError(f"resources.provider {names} needs {'; and '.join(missing)}")


def check_cloud(
    cloud: AnyCloud,
    span: Span,
    device: DeviceChoice,
    precision: Precision,
) -> None:
    """Check the rest of a job file whose provider is a cloud.

    Raises:
        ValueError: It is wrong.
    """
    name = cloud.cloud
    slow = cloud.slow_in(precision)
    if slow and len(slow) == len(set(cloud.kinds())):
        raise ValueError(f"{name}.{next(iter(slow))}: {next(iter(slow.values()))}")
    for kind in cloud.machines():
        if device == "cpu" and kind.device == "gpu":
            raise ValueError(
                f"resources.device cpu rents machines without GPUs: {name} names "
                f"{kind.name}, which has {kind.gpu.name}; name others, such as "
                f"{_COMPUTE[name]}, or leave resources.device out"
            )
        if device != "cpu" and kind.device == "cpu":
            raise ValueError(
                f"{name} names {kind.name}, which has no GPU; set resources.device to cpu "
                "to train on CPUs, or name types with GPUs"
            )
    if span != "region" and (missing := cloud.not_joined()):
        raise ValueError(
            f"resources.span {span} needs a network of your own that joins all regions, "
            f"as VMs send each other unencrypted data there: name {missing}; or keep "
            "resources.span at region"
        )


# --- Names of places ---

_REGIONS = {
    "aws": (re.compile(r"[a-z]{2}(-[a-z]+)+-\d+"), "us-east-1"),
    "azure": (re.compile(r"[a-z]+\d*"), "eastus"),
    "gcp": (re.compile(r"[a-z]+-[a-z]+\d+"), "us-central1"),
}


def _check_places(cloud: str, regions: Sequence[str], zones: Collection[str]) -> None:
    """Check the form of regions, and that some of the zones are in them.

    Raises:
        ValueError: nothing could be rented there; with what to write instead.
    """
    form, example = _REGIONS[cloud]
    for region in regions:
        if not form.fullmatch(region):
            raise ValueError(
                f"regions: must be names of {cloud}'s regions, such as {example}: got {region}"
            )
    if zones and not any(zone.startswith(region) for zone in zones for region in regions):
        raise ValueError(f"zones: {', '.join(zones)}: none is in the regions {', '.join(regions)}")


def _check_keys(key: str, given: Collection[str], regions: Sequence[str], example: str) -> None:
    """Check that what is given by region or zone is of use.

    Raises:
        ValueError: nothing is given for a region, and something for none of them: a name
            is misspelt, and the region's VMs would be somewhere else.
    """
    stray = [name for name in given if not name.startswith(tuple(regions))]
    bare = [each for each in regions if not any(name.startswith(each) for name in given)]
    if stray and bare:
        raise ValueError(
            f"{key}: {stray[0]} is none of the job's; {bare[0]} has none: give names such "
            f"as {example}"
        )
