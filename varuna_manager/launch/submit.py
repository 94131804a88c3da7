"""From a job file to a running manager: all checks first, then all of it or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spottrain.cloud.port.provider import Offer
from spottrain.cloud.slurm.settings import HERE
from spottrain.errors import BudgetError, ConfigError
from spottrain.eventlog.journal import JournalError
from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing.budget import WORTH_S, reserve_s
from spottrain.pricing.billing.money import Money, Rate, is_amount
from spottrain.storage.open import open_store
from spottrain.storage.store import StorageError, check_writable, is_object_url
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.config.manager_vm import IDENTITY
from spottrain.varuna_manager.config.slurm import SlurmConfig
from spottrain.varuna_manager.core.model.events import (
    CheckpointsListed,
    JobSubmitted,
)
from spottrain.varuna_manager.core.model.parts import (
    FleetState,
    MarketState,
    PreparationState,
)
from spottrain.varuna_manager.core.model.settings import JobSettings, PoolGrant
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.varuna_manager.jobs.folder import JobDir, job_dir
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.journal import Journal
from spottrain.varuna_manager.jobs.measurements import Measurements
from spottrain.varuna_manager.jobs.profiles import given_profile, known_profiles
from spottrain.varuna_manager.launch import ownership, weights
from spottrain.varuna_manager.launch.inspect import kept_layout
from spottrain.varuna_manager.launch.workdir import pack, packed_files
from spottrain.wire.model import ModelFacts, Profile

MAX_VMS_HERE = 128
"""Largest number of rented VMs for a manager on the user's own machine."""
STORE_PATIENCE_S = 10.0
"""How long a checkpoint store that does not answer is retried before a launch fails."""


def end_of(job: JobDir) -> str:
    """Return how a job ended: ``down`` or the kind of its outcome; empty: it has not."""
    if job.is_managed():
        return ""
    if job.is_down:
        return "down"
    try:
        state = read_state(job)
    except JournalError:
        return ""  # it is unknown what it rents: its name must not be reused
    outcome = state.outcome if state.phase is JobPhase.ENDED else None
    return "" if outcome is None else outcome.kind


def can_be_resumed(job: JobDir) -> bool:
    """Return whether a job without a manager can be resumed."""
    return end_of(job) not in ("down", "succeeded")


def has_free_name(job: JobDir) -> bool:
    """Return whether a job's name may be reused: nobody would resume the job."""
    return end_of(job) in ("down", "succeeded", "failed")


def check_name(name: str) -> None:
    """Check that no running or resumable job has this name.

    Raises:
        ConfigError: One has.
    """
    job = job_dir(name)
    if not job.path.exists() or has_free_name(job):
        return
    if job.is_managed():
        what, how = "is running", f"watch it with 'spottrain status {name} --watch'"
    else:
        what, how = "can be resumed", f"continue it with 'spottrain resume {name}'"
    raise ConfigError(
        f"name: a job {name} {what}; {how}, end it with 'spottrain down {name}', "
        "or choose another name"
    )


def check_manager(config: JobConfig, *, on_vm: bool) -> None:
    """Check that a job's manager can run where the user wants it.

    Args:
        on_vm: On a VM of its own; else on this machine.

    Raises:
        ConfigError: It cannot.
    """
    if config.resources.provider == "local" and (system := sys.platform) != "linux":
        raise ConfigError(
            f"resources.provider: local needs Linux, whose processes it takes for VMs: got "
            f"{system}; name a cloud or own hosts, or use a Linux VM or container"
        )
    if not on_vm:
        max_vms = config.resources.max_vms
        if config.clouds and max_vms > MAX_VMS_HERE:
            raise ConfigError(
                f"resources.max_vms: a manager on your own machine handles at most "
                f"{MAX_VMS_HERE} rented VMs: got {max_vms}; launch with "
                "--manager-vm, or lower it"
            )
        return
    if isinstance(config.cluster, SlurmConfig):
        if config.cluster.manager_partition is None:
            raise ConfigError(
                "--manager-vm needs slurm.manager_partition, one that is not preempted; 'sinfo' "
                "lists partitions"
            )
        if config.cluster.address:
            raise ConfigError(
                "--manager-vm: slurm.address is the login node's, and the manager has a node of its "
                f"own, whose address is found: got {config.cluster.address}; leave it out"
            )
        if config.cluster.login == HERE:
            return  # the job's folder stays where it is
        _check_outlives(config)
        return
    if len(config.clouds) != 1 and config.cluster is None:
        raise ConfigError(
            "--manager-vm: the job must rent from exactly one cloud: got "
            f"resources.provider {', '.join(config.resources.providers)}"
        )
    _check_outlives(config)
    if not config.manager_vm.identity:
        name = config.resources.providers[0]
        raise ConfigError(
            "--manager-vm needs manager_vm.identity, the identity under which the VM rents "
            f"({name}.{IDENTITY[name]}); docs/permissions.md lists what it must allow"
        )


def _check_outlives(config: JobConfig) -> None:
    if not is_object_url(config.checkpoint.path or ""):
        raise ConfigError(
            "--manager-vm: checkpoint.path must be in an object store such as "
            "s3://bucket/job, which this machine reaches and which outlives the manager's: got "
            f"{config.checkpoint.path}"
        )


def check_store(config: JobConfig, *, is_new: bool = False, adopt: bool = False) -> None:
    """Check that checkpoints can be written where the job file says.

    Args:
        is_new: The place must be no other job's.
        adopt: Unless the job takes over what is there.

    Raises:
        ConfigError: They cannot, or it is another's.
    """
    if config.checkpoint.path is None:
        return
    try:
        store = open_store(config.checkpoint.path, patience_s=STORE_PATIENCE_S)
        check_writable(store)
        if is_new:
            ownership.check(store, adopt=adopt)
    except StorageError as error:
        raise ConfigError(f"checkpoint.path: {error}") from error


def check_budget(config: JobConfig, offers: Sequence[Offer] = ()) -> None:
    """Check that the budget pays for a step on the fewest and cheapest machines.

    This is a lower bound: what ``resources.min_vms`` machines cost for the shortest time
    that they are rented, and for the reserve until they are returned.

    Args:
        config: The job; its own machines count.
        offers: What a cloud rents, where the job takes its machines from one.

    Raises:
        BudgetError: It does not.
    """
    on_demand_allowed = config.resources.allow_on_demand
    prices = [zone.spot_usd_per_hour for zone in config.zones]
    prices += [o.usd_per_hour for o in offers if o.spot or on_demand_allowed]
    if on_demand_allowed:
        prices += [zone.on_demand_usd_per_hour for zone in config.zones]
    if not prices:
        return  # the cloud is asked later, see machines.check_machines
    cheapest = min(filter(is_amount, prices), default=0.0)
    per_hour, budget = config.budget.max_usd_per_hour, config.budget.max_usd
    min_vms = config.resources.min_vms
    rate = Rate.of(cheapest) * min_vms
    some = "one machine" if min_vms == 1 else f"{min_vms} machines (resources.min_vms)"
    if per_hour is not None and Rate.allowed(per_hour) < rate:
        raise BudgetError(
            f"budget.max_usd_per_hour: {per_hour} does not pay for {some}: the cheapest "
            f"costs {cheapest} per hour; raise it"
        )
    kept_s = reserve_s(config.manager.lease_s)
    hours = config.budget.max_gpu_hours
    gpus = [zone.slots for zone in config.zones] + [o.gpus for o in offers]
    needed = (Rate.of(min(gpus)) * min_vms).over(kept_s + WORTH_S)
    if hours is not None and Money.allowed(hours) < needed:
        raise BudgetError(
            f"budget.max_gpu_hours: {hours} is less than one step takes: {needed.usd:.4f} for "
            f"{some} of the smallest, {WORTH_S:.0f} s and the {kept_s:.0f} s that are reserved "
            "until they are returned; raise it or shorten manager.lease_s"
        )
    needed = rate.over(kept_s + WORTH_S)
    if budget is not None and Money.allowed(budget) < needed:
        raise BudgetError(
            f"budget.max_usd: {budget} is less than one step costs: {needed.usd:.4f} "
            f"for {some} of the cheapest, {WORTH_S:.0f} s and the {kept_s:.0f} s that "
            "are reserved until they are returned; raise it or shorten manager.lease_s"
        )


def job_settings(
    config: JobConfig,
    facts: ModelFacts,
    job: JobDir,
    at_s: float,
    data_bytes: Mapping[str, float] | None = None,
    uid: str = "",
) -> JobSettings:
    """Return the settings for the manager's core of a job launched at ``at_s``.

    Args:
        job: Where it is on disk.
        at_s: Seconds since the epoch.
        data_bytes: As in ``submit``.
        uid: Of the job whose mark is at the place of its checkpoints; empty: there is
            none.
    """
    place = config.checkpoint.path or str(job.checkpoints)
    return JobSettings(
        uid=uid or uuid.uuid4().hex,
        spec=config.job_spec(place, uid),
        facts=facts,
        resources=config.resources,
        budget=config.budget,
        morphing=config.morphing,
        manager=config.manager,
        on_nonfinite=config.on_nonfinite,
        min_examples_per_s=config.slo.min_examples_per_s,
        deadline_s=config.slo.deadline_s(at_s),
        numerics=config.numerics,
        microbatch_sizes=config.microbatch_sizes,
        profile=given_profile(config, facts),
        busy_s=config.setup_limit_s * bool(config.setup) + config.data_limit_s * bool(config.data),
        shares=config.cloud is not None or config.cluster is not None,
        data_bytes=dict(data_bytes or {}),
    )


def state_as_launched(
    config: JobConfig,
    facts: ModelFacts,
    offers: Sequence[Offer],
    profile: Profile | None,
    data_bytes: Mapping[str, float] | None = None,
) -> State:
    """Return the state of a job as if it were launched now, to ask what it could do.

    Args:
        offers: What can be rented.
        profile: Measured of the model, if the job file gives none; None: kept ones serve.
        data_bytes: As in ``submit``.
    """
    now_s = time.time()
    settings = job_settings(config, facts, job_dir(config.name), now_s, data_bytes)
    return State(
        phase=JobPhase.ACTIVE,
        settings=settings,
        now_s=now_s,
        preparation=PreparationState(
            profile=settings.profile or profile,
            known_profiles=known_profiles(facts, config.job_spec("")),
        ),
        fleet=FleetState(reconciled=True),
        market=MarketState(offers=tuple(offers)),
    )


def submit(
    config: JobConfig,
    facts: ModelFacts,
    data_bytes: Mapping[str, float] | None = None,
    say: Callable[[str], None] = lambda line: None,
    *,
    pool: str = "",
    profile: Profile | None = None,
    measures_only: bool = False,
    adopt: bool = False,
) -> tuple[JobDir, int]:
    """Put a job on disk, ready for its manager: all of it or nothing.

    An ended job of the same name is kept beside it as ``<name>.1``, ``<name>.2``, …

    Args:
        facts: What the tracer found out about its model.
        data_bytes: What each VM fetches, by the cloud that holds it.
        say: Called with remarks on the weights that it begins with, and on a former job.
        pool: The pool that it belongs to, which grants it nothing yet.
        profile: Of the model on these machines, if the job file gives none.
        measures_only: End it once its model is measured.
        adopt: Take over the checkpoints of another job.

    Returns:
        The job, and the size of its packed workdir in bytes.

    Raises:
        ConfigError: The name is in use, ``init_from`` does not fit, or the checkpoints are
            another job's, or were computed on what this one does not compute on.
        UserCodeError, ToolError, StorageError: ``init_from`` cannot be read or written.
    """
    # Not above: it imports the clouds, which most commands do without.
    from spottrain.varuna_manager.launch.preflight import check_kernels

    job, uid = job_dir(config.name), uuid.uuid4().hex
    with contextlib.ExitStack() as stack:
        draft = stack.enter_context(job.draft())
        place = config.checkpoint.path or str(draft.checkpoints)
        spec, numerics = config.job_spec(place), config.numerics
        if not measures_only:
            mark = ownership.marked(place, uid, spec, facts.fingerprint, numerics, adopt=adopt)
            numerics = stack.enter_context(mark)
            check_kernels(config, numerics.kernels)
        first = stack.enter_context(weights.first(config, place, uid))
        workdir = Path(config.workdir)
        files = packed_files(workdir, config.checkpoint.path)
        size = pack(workdir, files, draft.workdir, kept_layout(config))
        draft.write(config, facts)
        at_s = time.time()
        journal = Journal(draft.journal)
        Measurements(draft.measurements).close()
        whose = "" if measures_only else uid
        settings = job_settings(config, facts, job, at_s, data_bytes, whose)
        settings = replace(settings, numerics=numerics, measures_only=measures_only)
        if pool:
            grant = PoolGrant(pool=pool, serial=0)
            settings = replace(settings, grant=grant, profile=settings.profile or profile)
        if first is None:
            journal.record(JobSubmitted(at_s=at_s, settings=settings))
        else:
            for line in weights.describe(first):
                say(line)
            spec = replace(settings.spec, init_from=first.sha256)
            step_0 = (CheckpointEntry(name=first.checkpoint, step=0),)
            journal.record(
                JobSubmitted(at_s=at_s, settings=replace(settings, spec=spec)),
                CheckpointsListed(at_s=at_s, checkpoints=step_0),
            )
        journal.close()
        with job.name_lock():
            check_name(config.name)
            if former := job.place(draft):
                say(f"the former job {config.name}, which has ended, is {former} now")
    return job, size
