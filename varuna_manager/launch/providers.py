"""Opens clouds: each SDK runs in a child process; VMs are set up over SSH.

The functions named in ``_FACTORIES`` run in that child; they get an adapter's
settings as JSON and no secrets: credentials are what the SDK itself finds.
"""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
from pydantic import TypeAdapter

from spottrain.cloud.aws.settings import AwsSettings
from spottrain.cloud.azure.settings import AzureSettings
from spottrain.cloud.gcp.settings import GcpSettings
from spottrain.cloud.http import TIMEOUT
from spottrain.cloud.port import tags
from spottrain.cloud.port.provider import CloudProvider, Vm
from spottrain.cloud.process.child import ChildProvider, in_child
from spottrain.errors import ConfigError
from spottrain.pricing.billing.terms import EXACT, TERMS
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.prices.current import CurrentPrices
from spottrain.pricing.prices.refresh import PriceRequest, on_demand_prices
from spottrain.pricing.prices.sources.registry import gcp_prices
from spottrain.pricing.ranking.cooldowns import Span
from spottrain.storage.store import is_object_url
from spottrain.varuna_manager.config.clouds import AnyCloud
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.jobs.manager_location import own_vm
from spottrain.varuna_manager.jobs.vm_history import open_history

if TYPE_CHECKING:
    from spottrain.cloud.ssh.rented.provider import RentedVmProvider
    from spottrain.cloud.ssh.transport.hosts import Payload
    from spottrain.varuna_manager.jobs.folder import JobDir

_OWN_ADDRESS_URL = "https://checkip.amazonaws.com"
_OWN_ADDRESS_S = 10.0
_FACTORIES = {
    "aws": f"{__name__}:make_aws",
    "azure": f"{__name__}:make_azure",
    "gcp": f"{__name__}:make_gcp",
}


def open_cloud(
    cloud: AnyCloud,
    public_key: str = "",
    ssh_from: tuple[str, ...] = (),
    *,
    uid: str = "",
    everywhere: bool = False,
    inside: bool = False,
) -> ChildProvider:
    """Return a cloud's provider in a child process; the caller must ``close`` it.

    Args:
        cloud: Its section of the job file.
        public_key: The key that VMs let in; needed to rent.
        ssh_from: Networks that VMs let in if the job file names none.
        uid: The unique id of the job whose VMs are listed and launched; empty: those
            that belong to no job.
        everywhere: Use all regions of the account, not only those of the
            job file.
        inside: This machine is in the VMs' network.

    Raises:
        CloudError: The settings contradict each other, or the child does not start.
    """
    settings = replace(cloud.settings(public_key, ssh_from), uid=uid, inside=inside)
    if everywhere and isinstance(settings, AwsSettings):
        settings = replace(settings, regions=())
    return in_child(_FACTORIES[cloud.cloud], asdict(settings))


def rent(job: JobDir, clouds: Sequence[AnyCloud], span: Span, payload: Payload) -> CloudProvider:
    """Return the provider of a job's manager: one cloud, or several as one.

    Args:
        clouds: One or more.
        span: How far apart the VMs of a plan may be.
        payload: What each VM gets.

    Raises:
        ConfigError: It is unknown from which networks VMs must let SSH in.
        CloudError: As ``open_cloud``; of several clouds, one that works is enough.
    """
    if len(clouds) == 1:
        return _rent(job, job.cloud, clouds[0], payload)
    from spottrain.cloud.multi import open_clouds

    def opener(cloud: AnyCloud) -> Callable[[], RentedVmProvider]:
        # VMs of several clouds that train together must have the same software.
        folder = job.cloud if span == "any" else job.cloud / cloud.cloud
        return lambda: _rent(job, folder, cloud, payload)

    openers = {cloud.cloud: opener(cloud) for cloud in clouds}
    return open_clouds(openers, openers.keys() - _asked_clouds(job, openers))


def _asked_clouds(job: JobDir, clouds: Collection[str]) -> Collection[str]:
    """Return the clouds that a job has ever asked for VMs; all if that is unknown."""
    from spottrain.eventlog.journal import JournalError
    from spottrain.varuna_manager.jobs.follow import read_state

    try:
        return read_state(job).launches.asked_clouds
    except JournalError:
        return clouds


def _rent(job: JobDir, folder: Path, cloud: AnyCloud, payload: Payload) -> RentedVmProvider:
    """Return a cloud's provider with agents on its VMs.

    Args:
        folder: Where the provider keeps what it rented.
        cloud: Its section of the job file.
        payload: What each VM gets.
    """
    # Not above: paramiko takes longer to import than most commands run.
    from spottrain.cloud.ssh.rented.provider import RentedVmProvider
    from spottrain.cloud.ssh.rented.vm import VmAccess
    from spottrain.cloud.ssh_keys import ensure_key

    key_file, public_key = ensure_key(job.cloud)
    access = VmAccess(
        key_file=key_file,
        python=cloud.python,
        folder=cloud.folder,
        bastion=None if cloud.bastion is None else cloud.bastion.host(),
        proxy=cloud.proxy(),
        inside=own_vm(job) is not None,
    )
    payload = replace(payload, notices={"kind": cloud.cloud})
    if not _is_near(payload.wheels, cloud.cloud):
        payload = replace(payload, wheels="")
    networks = () if cloud.ssh_from else own_network(cloud)
    child = open_cloud(cloud, public_key, networks, uid=uid_of(job), inside=access.inside)
    try:
        return RentedVmProvider(
            child,
            folder,
            job.name,
            payload,
            access,
            None if cloud.ssh_from else lambda: own_network(cloud),
            moves_at,
        )
    except BaseException:
        child.close()
        raise


def moves_at(vm: Vm, now_s: float) -> float:
    """Return the next moment at which a VM can change jobs and is billed once."""
    terms, is_whole = TERMS.get(vm.offer.cloud, EXACT), not tags.order_of(vm.intent)
    return terms.next_end_s(vm.launched_at_s, now_s, is_whole=is_whole)


def _is_near(place: str, cloud: str) -> bool:
    """Return whether VMs of a cloud fetch from a store without paying for its egress."""
    home = {"s3": "aws", "gs": "gcp"}.get(place.partition("://")[0], "azure")
    return not is_object_url(place) or home == cloud


def own_network(cloud: AnyCloud, url: str = _OWN_ADDRESS_URL) -> tuple[str, ...]:
    """Return the networks from which this machine reaches VMs: its public address.

    Empty where VMs have no public address: their own network decides. Through a tool of
    the cloud, those of the tool.

    Raises:
        ConfigError: It cannot be determined, or it is an IPv6 address.
    """
    if cloud.ssh_proxy:
        return cloud.proxy_networks
    if not cloud.public_addresses:
        return ()
    try:
        answer = httpx.get(url, timeout=_OWN_ADDRESS_S).raise_for_status()
        return (str(ipaddress.IPv4Network(answer.text.strip())),)
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"{cloud.cloud}.ssh_from: cannot determine this machine's public address: "
            f"{error}; list the networks that may connect by SSH"
        ) from error


# --- In the child ---------------------------------------------------------------------


def make_aws(settings: Mapping[str, Any]) -> CloudProvider:
    """Return AWS as a provider, in the process that calls this."""
    from spottrain.cloud.aws.provider import AwsProvider

    made = TypeAdapter(AwsSettings).validate_python(settings)
    with open_history() as history:
        on_demand = on_demand_prices(history, catalogue(), "aws", time.time())
    return AwsProvider(made, catalogue(), on_demand)


def make_azure(settings: Mapping[str, Any]) -> CloudProvider:
    """Return Azure as a provider, in the process that calls this."""
    from spottrain.cloud.azure.provider import AzureProvider

    made = TypeAdapter(AzureSettings).validate_python(settings)
    return AzureProvider(made, catalogue())


def make_gcp(settings: Mapping[str, Any]) -> CloudProvider:
    """Return GCP as a provider, in the process that calls this."""
    from spottrain.cloud.gcp.clients import default_project
    from spottrain.cloud.gcp.provider import GcpProvider

    made = TypeAdapter(GcpSettings).validate_python(settings)
    if not made.project:
        made = replace(made, project=default_project())
    facts = catalogue()
    request = PriceRequest(
        kinds=facts.matching(clouds=("gcp",), names=made.instance_types),
        regions=made.regions,
    )
    sources = [gcp_prices(httpx.Client(timeout=TIMEOUT), os.environ)]
    prices = CurrentPrices(open_history, sources, facts, request)
    return GcpProvider(made, facts, prices)
