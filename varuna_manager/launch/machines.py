"""The machines of a job: who provides them, and whether it can get them."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from spottrain.cloud.data.request import to_json
from spottrain.cloud.kubernetes.pods import ClusterNode
from spottrain.cloud.local.provider import LocalProvider
from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.port.provider import (
    CloudProvider,
    Offer,
    Vm,
)
from spottrain.cloud.ssh.transport.hosts import Payload, Published
from spottrain.pricing.prices.catalogue import catalogue
from spottrain.storage.store import child_url, is_object_url, is_url
from spottrain.varuna_manager.config.data import data_requests
from spottrain.varuna_manager.config.job import AnyCluster, JobConfig
from spottrain.varuna_manager.config.slurm import SlurmConfig
from spottrain.varuna_manager.config.ssh import environment_of
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.launch.submit import (
    check_budget,
)


@runtime_checkable
class ShutsDown(Protocol):
    """A provider with a process of its own on this machine, which can be shut down."""

    def shut_down(self) -> None:
        """End all VMs and the process; return when both are gone."""


def open_provider(job: JobDir) -> CloudProvider:
    """Return the provider that a job rents from."""
    config = job.config()
    if config.resources.provider == "local":
        return LocalProvider(job.cloud, job.name, config.local.market())
    payload = Payload(
        workdir=job.workdir,
        setup=config.setup,
        setup_limit_s=config.setup_limit_s,
        data=to_json(data_requests(config.data)) if config.data else "",
        data_limit_s=config.data_limit_s,
        buckets=_uses_buckets(config),
        wheels=_wheels(config),
        published=Published(job.cloud / "published"),
        environment=environment_of(config.env, config.secrets),
    )
    # Not above: paramiko takes longer to import than most commands run.
    if config.clouds:
        from spottrain.varuna_manager.launch import providers

        return providers.rent(job, config.clouds, config.resources.span, payload)
    if config.cluster is not None:
        payload = replace(payload, notices={"kind": "file"})
        uses_gpus = config.device != "cpu"
        return open_cluster(config.cluster, job.cloud, uid_of(job), payload, uses_gpus=uses_gpus)
    from spottrain.cloud.ssh.hosts.provider import SshProvider

    return SshProvider(
        job.cloud, job.name, config.ssh.fleet(uses_gpus=config.device != "cpu"), payload
    )


def open_cluster(
    cluster: AnyCluster,
    folder: Path,
    uid: str,
    payload: Payload | None = None,
    *,
    uses_gpus: bool = True,
) -> CloudProvider:
    """Return a cluster as a provider.

    Args:
        cluster: Its section of the job file.
        folder: The job's cloud folder.
        uid: The job's unique id.
        payload: What each VM gets; None: nothing is launched.
        uses_gpus: False: slots are CPU slots.
    """
    # Not above: paramiko takes longer to import than most commands run.
    payload = payload or Payload(workdir=Path(os.devnull))
    if isinstance(cluster, SlurmConfig):
        from spottrain.cloud.slurm.provider import SlurmProvider

        return SlurmProvider(folder, uid, cluster.settings(uses_gpus=uses_gpus), payload)
    try:
        from spottrain.cloud.kubernetes.provider import KubernetesProvider
    except ModuleNotFoundError as error:
        raise MisconfiguredError(
            f"kubernetes: {error}; install its client: pip install 'spottrain[kubernetes]'"
        ) from error
    settings = cluster.settings(uses_gpus=uses_gpus)
    return KubernetesProvider(folder, uid, settings, payload, node_price)


def node_price(node: ClusterNode, slots: int) -> float | None:
    """Return the published price per hour of so many slots of a node; None: unknown."""
    kind = catalogue().find(node.cloud, node.instance_type)
    place = node.cloud, node.region, node.instance_type, node.is_spot
    for price in catalogue().published():
        if kind is not None and place == (
            price.cloud,
            price.region,
            price.instance_type,
            price.spot,
        ):
            return price.usd_per_hour * slots / kind.gpus
    return None


def _wheels(config: JobConfig) -> str:
    """Return where VMs leave for later ones what setup has downloaded; empty: nowhere."""
    path = config.checkpoint.path
    if path is None or not is_url(path):
        return ""
    return child_url(path, "wheels")


def _uses_buckets(config: JobConfig) -> bool:
    """Return whether machines use an object store, for checkpoints or data."""
    places = (config.checkpoint.path, *(data.url for data in config.data.values()))
    return any(is_object_url(place) for place in places if place is not None)


def check_machines(
    config: JobConfig, *, on_vm: bool = False
) -> tuple[list[str], tuple[Offer, ...] | None]:
    """Check that a job can get its machines.

    Args:
        on_vm: Its manager will run on a VM.

    Returns:
        Messages about them, and a cloud's offers; ``None``: the job file names machines.

    Raises:
        CloudError: A host is unfit or not what the job file says, a cloud does not let
            the job rent what it names, or GPUs here cannot be used.
        ConfigError: The torch that setup installs does not run on GPUs that are named.
        CapacityError: Too few hosts answer, or the cloud offers nothing suitable.
        BudgetError: The budget does not pay for the cheapest machine.
    """
    from spottrain.varuna_manager.launch import preflight

    if config.resources.provider == "local":
        return [preflight.check_here(config)], None
    if config.clouds:
        lines = preflight.check_build(config) + preflight.check_bucket_access(config)
        offers, found = preflight.before_launch(config.clouds, config.resources.max_vms)
        check_budget(config, offers)
        return [*found, *lines, _when_asleep(config, on_vm)], tuple(offers)
    if isinstance(config.cluster, SlurmConfig):
        return [*_check_slurm(config.cluster, on_vm), _when_asleep(config, on_vm)], None
    if config.cluster is not None:
        return [*_check_pods(config, config.cluster), _when_asleep(config, on_vm)], None
    from spottrain.cloud.ssh.hosts.bootstrap import check_hosts

    lines = check_hosts(
        config.ssh.fleet(),
        min_hosts=config.resources.min_vms,
        needs_software=not config.setup,
        buckets=_uses_buckets(config),
        device=config.device,
    )
    return [*lines, _when_asleep(config)], None


def _check_pods(config: JobConfig, cluster: AnyCluster) -> list[str]:
    """Return what a cluster says of the job's pods.

    Raises:
        MisconfiguredError: It would not take them, or may not be asked.
    """
    provider = open_cluster(cluster, Path(os.devnull), "", uses_gpus=config.device != "cpu")
    try:
        found = provider.check()
    finally:
        provider.close()
    for one in found:
        if not one.ok:
            raise MisconfiguredError(f"{one.what}: {one.message}")
    return [f"{one.what}: {one.message}" for one in found if one.message != "allowed"]


def _check_slurm(slurm: SlurmConfig, on_vm: bool) -> list[str]:
    """Return what a cluster says of its partitions.

    Raises:
        CloudError: None of them would take the job's batch jobs; the first one's error. Or
            that for the manager would not take that.
    """
    from spottrain.cloud.slurm.login import Login

    found, wrong = list[str](), list[CloudError]()
    with contextlib.closing(Login(slurm.settings())) as login:
        login.address()
        for name in slurm.partitions:
            try:
                found.append(f"partition {name}: {login.would_take(name)}")
            except CloudError as error:
                wrong.append(error)
        if not found:
            raise wrong[0]
        if on_vm and slurm.manager_partition is not None:
            said = login.would_take(slurm.manager_partition)
            found.append(f"partition {slurm.manager_partition}, for the manager: {said}")
    return [*map(str, wrong), *found]


def _when_asleep(config: JobConfig, on_vm: bool = False) -> str:
    """Return what will happen when this machine sleeps."""
    if on_vm:
        return "this machine may sleep or go offline: the job's manager runs elsewhere"
    lease_s, place = config.manager.lease_s, config.checkpoint.path
    anywhere = (
        f", on any other machine 'spottrain resume {place}',"
        if place is not None and is_url(place)
        else ""
    )
    return (
        f"if this machine sleeps or goes offline, VMs keep training for {lease_s:g} s "
        "(manager.lease_s), then save a checkpoint and end themselves; "
        f"'spottrain resume {config.name}'{anywhere} continues from there"
    )


def live_vms(provider: CloudProvider, job: JobDir) -> list[Vm]:
    """Return the VMs that are not ending yet."""
    return [vm for vm in provider.list_vms(job.name) if vm.state.is_alive]
