"""Measures a job's model on one rented VM of a type: a job that ends once it is measured.

So the VM is rented, metered, capped and returned as any other. The profile that remains
takes the place of the type's roofline in ``plan``, in rankings and in later launches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.errors import CapacityError, ConfigError
from spottrain.morphing.plan.profiles import knows_sizes
from spottrain.pricing.billing.budget import reserve_s
from spottrain.pricing.billing.money import Rate, is_amount
from spottrain.pricing.prices.catalogue import InstanceType, catalogue
from spottrain.storage.store import child_url
from spottrain.units import HOUR_S
from spottrain.varuna_manager.config.clouds import OWN_MACHINES
from spottrain.varuna_manager.config.job import (
    EvaluationConfig,
    JobConfig,
    SloConfig,
)
from spottrain.varuna_manager.config.local import LocalConfig
from spottrain.varuna_manager.config.manager_vm import ManagerVmConfig
from spottrain.varuna_manager.config.notify import NotifyConfig
from spottrain.varuna_manager.config.sections import BudgetConfig
from spottrain.varuna_manager.config.ssh import SshConfig
from spottrain.varuna_manager.config.track import TrackConfig
from spottrain.varuna_manager.core.model.events import KnownProfile
from spottrain.varuna_manager.jobs.profiles import known_profiles
from spottrain.varuna_manager.launch.calibrate import devices_here
from spottrain.varuna_manager.offers.market import BOOT_S
from spottrain.wire.model import ModelFacts

MEASURING_S = 120.0
"""Typical time from a VM that is ready to the profile: the user's code starts, then rounds
of seconds for each micro-batch size."""
MAX_PAID_S = HOUR_S
"""Without a cap from the user, a probe may cost what the VM does in that time."""
NO_CAPACITY_S = 900.0
"""A probe gives up after so long without a VM."""
_MAX_NAME = 63


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeCost:
    """What a probe costs, as shown before anything is rented."""

    what: str
    """The cheapest VM that it may rent."""
    usd_per_hour: float
    seconds: float
    """To expect, the job's setup and data not counted."""
    usd: float
    """For these seconds."""
    max_usd: float
    """It never costs more."""


def probe_job(config: JobConfig, kind: str) -> JobConfig:
    """Return the job that measures a job's model on one VM.

    Args:
        kind: A GPU or instance type of the catalogue; of the user's own machines, a type
            or GPU that the job file names.

    Raises:
        ConfigError: No provider of the job has it.
    """
    name = f"{config.name}-on-{re.sub('[^a-z0-9]+', '-', kind.lower()).strip('-')}"
    changes: dict[str, Any] = {
        "name": name[:_MAX_NAME].rstrip("-"),
        "init_from": None,
        "profile": None,
        "budget": BudgetConfig(),
        "slo": SloConfig(),
        "evaluation": EvaluationConfig(),
        "track": TrackConfig(),
        "notify": NotifyConfig(),
        "manager_vm": ManagerVmConfig(),
    }
    if config.checkpoint.path is not None:
        # Its journal must not take the place of the job's own there.
        path = child_url(config.checkpoint.path, changes["name"])
        changes["checkpoint"] = config.checkpoint.model_copy(update={"path": path})
    alone: dict[str, Any]
    alone = {"min_vms": 1, "max_vms": 1, "capacity_wait_s": NO_CAPACITY_S}
    (provider, *_) = config.resources.providers
    if provider == "local":
        changes["local"] = _own_zones(config.local, kind)
    elif provider == "ssh":
        changes["ssh"] = _own_hosts(config.ssh, kind)
    elif config.cluster is None:  # its VMs are all of one type
        clouds = _rented(config, kind)
        changes |= clouds
        alone["provider"] = next(iter(clouds)) if len(clouds) == 1 else tuple(clouds)
    changes["resources"] = config.resources.model_copy(update=alone)
    return config.model_copy(update=changes)


def _own_zones(local: LocalConfig, kind: str) -> LocalConfig:
    """Return the local market's zones of a type; its script is for the job."""
    zones = tuple(zone for zone in local.zones if zone.instance_type == kind)
    if not zones:
        raise _none_of(kind, "local.zones", (zone.instance_type for zone in local.zones))
    return local.model_copy(update={"zones": zones, "events": ()})


def _own_hosts(ssh: SshConfig, kind: str) -> SshConfig:
    hosts = tuple(host for host in ssh.hosts if kind in (host.type, host.gpu))
    if not hosts:
        raise _none_of(kind, "ssh.hosts", (host.type for host in ssh.hosts))
    return ssh.model_copy(update={"hosts": hosts})


def _none_of(kind: str, key: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"--on: no machine of {key} is of type {kind}; take one of {', '.join(sorted(set(known)))}"
    )


def _rented(config: JobConfig, kind: str) -> dict[str, Any]:
    """Return the sections of the clouds that have a type, with its smallest machines."""
    found: dict[str, Any] = {}
    is_machine = any(kind == one.name for one in catalogue().types.values())
    names, gpus = ((kind,), ()) if is_machine else ((), (kind,))
    for cloud in config.clouds:
        machines = catalogue().matching(clouds=(cloud.cloud,), names=names, gpus=gpus)
        if machines:
            update = {"instance_types": _smallest(machines), "gpus": ()}
            found[cloud.cloud] = cloud.model_copy(update=update)
    if not found:
        clouds = ", ".join(config.resources.providers)
        raise ConfigError(
            f"--on: no machine with {kind} at {clouds}; 'spottrain prices' lists what "
            "each cloud has"
        )
    return found


def _smallest(machines: Sequence[InstanceType]) -> tuple[str, ...]:
    """Return the names of the machines with the fewest GPUs: one GPU is measured."""
    fewest = min(machine.gpus for machine in machines)
    return tuple(machine.name for machine in machines if machine.gpus == fewest)


def measured_before(config: JobConfig, probe: JobConfig, facts: ModelFacts) -> KnownProfile | None:
    """Return the newest kept profile that makes a probe unnecessary.

    Args:
        probe: See ``probe_job``.
    """
    known = known_profiles(facts, config.job_spec(""))
    if not OWN_MACHINES.isdisjoint(config.resources.providers):
        return None  # what its hosts compute on is not known from here
    gpus = {machine.gpu.name for cloud in probe.clouds for machine in cloud.machines()}
    here = "" if probe.clouds else devices_here(config).name
    for one in known:
        gpu = catalogue().gpu_of(one.profile.device)
        is_known = gpu is not None and gpu.name in gpus
        is_same = one.profile.device == here if here else is_known
        if is_same and knows_sizes(one.profile, config.microbatch_sizes):
            return one
    return None


def cost_of(probe: JobConfig, offers: Sequence[Offer] | None, max_usd: float | None) -> ProbeCost:
    """Return what a probe costs.

    Args:
        probe: See ``probe_job``.
        offers: What a cloud rents now; None: the job file names machines.
        max_usd: The user's cap; None: an hour of the cheapest VM, and what is kept back for
            its return.

    Raises:
        CapacityError: Nothing of that type is on offer.
    """
    on_demand = probe.resources.allow_on_demand
    if offers is None:
        found = [
            (zone.spot_usd_per_hour, f"{zone.instance_type} ({zone.name})") for zone in probe.zones
        ]
        boot_s = max(zone.boot_s for zone in probe.zones)
    else:
        found = [
            (one.usd_per_hour, f"{one.instance_type} in {one.zone}")
            for one in offers
            if (one.spot or on_demand) and is_amount(one.usd_per_hour)
        ]
        boot_s = BOOT_S
    if not found:
        raise CapacityError("--on: nothing of that type is on offer now; try again later")
    usd_per_hour, what = min(found)
    rate = Rate.of(usd_per_hour)
    seconds = boot_s + MEASURING_S
    kept_s = reserve_s(probe.manager.lease_s)
    return ProbeCost(
        what=what,
        usd_per_hour=usd_per_hour,
        seconds=seconds,
        usd=rate.over(seconds).usd,
        max_usd=max_usd or rate.over(MAX_PAID_S + kept_s).usd,
    )


def capped(probe: JobConfig, max_usd: float) -> JobConfig:
    """Return a probe that never costs more; of free machines, without a cap."""
    if not max_usd:
        return probe
    return probe.model_copy(update={"budget": BudgetConfig(max_usd=max_usd)})
