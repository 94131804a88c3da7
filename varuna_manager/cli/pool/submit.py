"""Submits a job to a pool: all checks, then the job on disk, then the pool's answer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from spottrain.codec import to_data
from spottrain.errors import ConfigError, SpottrainError
from spottrain.storage.store import StorageError
from spottrain.varuna_manager.config.job import JobConfig, SloConfig
from spottrain.varuna_manager.config.overrides import NO_OVERRIDES, Overrides
from spottrain.varuna_manager.config.pool import load_job_of, microusd, weight_of
from spottrain.varuna_manager.jobs.follow import uid_of
from spottrain.varuna_manager.launch import inspect, ownership, submit
from spottrain.varuna_manager.launch.workdir import fingerprint, packed_files
from spottrain.varuna_manager.offers.checks import check_all
from spottrain.varuna_manager.offers.feasibility import own_offers
from spottrain.varuna_manager.offers.fleets import first_throughputs
from spottrain.varuna_manager.pool.core.model import JobRequest, Limits
from spottrain.varuna_manager.pool.report.document import read_pool
from spottrain.varuna_manager.pool.store.client import PoolUnreachableError, ask_pool
from spottrain.varuna_manager.pool.store.folder import PoolDir
from spottrain.wire.model import ModelFacts, Profile

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job that has passed all checks but those of its pool."""

    config: JobConfig
    facts: ModelFacts
    profile: Profile | None
    data_bytes: Mapping[str, float]
    request: JobRequest
    adopt: bool
    """Take over the checkpoints of another job."""


def find_open(name: str) -> PoolDir:
    """Return a pool that jobs may be submitted to.

    Raises:
        ConfigError: There is none of this name, or it was taken down.
    """
    pool = PoolDir.find(name)
    if pool.is_down:
        raise ConfigError(f"pool {pool.name} was taken down; create it again")
    return pool


def prepare(
    pool: PoolDir,
    file: Path,
    priority: float,
    team: str,
    say: Say,
    *,
    adopt: bool = False,
    overrides: Overrides = NO_OVERRIDES,
) -> PreparedJob:
    """Check a job for a pool, and find out what it trains there.

    Args:
        priority: Its weight against other jobs.
        team: The team that it belongs to; empty: none.
        say: Called with lines for people.
        adopt: Take over the checkpoints of another job.
        overrides: Values of the command line that replace the file's.

    Raises:
        SpottrainError: It cannot run there; says why, and what to do.
    """
    config, deadline_s = _checked(pool, file, priority, overrides)
    checked = check_all(config, say, adopt=adopt)
    config = checked.config
    facts, offers, data_bytes = checked.facts, checked.offers, checked.data_bytes
    profile = None
    if not config.clouds:
        say(f"measuring {config.entrypoint} on this machine, unless it was before")
        profile = inspect.calibrate(config)
        offers = own_offers(config, time.time())
    kinds = [supply.name for supply in read_pool(pool).supplies]
    throughputs = first_throughputs(config, facts, kinds, offers or (), profile, data_bytes)
    request = JobRequest(
        name=config.name,
        throughputs=throughputs,
        examples=float(config.steps * config.minibatch_size),
        team=team,
        weight=priority,
        machine=machine_of(config),
        deadline_s=math.inf if deadline_s is None else deadline_s,
        limits=Limits(
            max_vms=config.resources.max_vms,
            max_microusd=microusd(config.budget.max_usd),
            max_microusd_per_hour=microusd(config.budget.max_usd_per_hour),
        ),
    )
    return PreparedJob(config, facts, profile, data_bytes, request, adopt)


def _checked(
    pool: PoolDir, file: Path, priority: float, overrides: Overrides
) -> tuple[JobConfig, float | None]:
    """Return the job file and its deadline, checked as far as no model is needed.

    Raises:
        SpottrainError: The job cannot run in this pool; says why, and what to do.
    """
    weight_of(priority, "--priority")
    config = load_job_of(pool.config(), file, overrides)
    if config.slo.min_examples_per_s is not None:
        raise ConfigError(
            f"{file.name}: slo.min_examples_per_s: a pool keeps deadlines only; remove it"
        )
    ask_pool(pool, "ping")
    deadline_s = config.slo.deadline_s(time.time())
    config = config.model_copy(update={"slo": SloConfig()})
    return config, deadline_s


def machine_of(config: JobConfig) -> str:
    """Return what a job's VMs are made of: jobs of the same can take them over.

    Empty where VMs are returned and rented anew. A local VM is whoever runs the pool's, and
    has no image, setup or network of its own. On a cloud owner, image, role and network are
    the pool's; a VM ends by itself after the lease that it was made with. The parts are
    named as ``document.apart`` tells them.
    """
    if config.resources.provider == "local":
        return "local"
    if len(config.clouds) != 1 or not config.clouds[0].moves_vms:
        return ""
    found = "none"
    if config.setup:
        workdir = Path(config.workdir)
        files = packed_files(workdir, config.checkpoint.path)
        given = [config.setup, fingerprint(workdir, files), config.env, config.secrets]
        found = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
    lease = f"{config.manager.lease_s:g}"
    return f"{config.clouds[0].cloud} setup:{found} manager.lease_s:{lease}"


def plan(pool: PoolDir, prepared: PreparedJob) -> dict[str, Any]:
    """Return what would come of a job; it is not submitted.

    Raises:
        SpottrainError: The pool would refuse it.
    """
    asked = {"request": to_data(prepared.request)}
    answer: dict[str, Any] = ask_pool(pool, "plan", asked)
    return answer


def submit_job(pool: PoolDir, prepared: PreparedJob, say: Say) -> dict[str, Any]:
    """Put a job on disk and submit it: all of it or nothing.

    Raises:
        SpottrainError: The pool refuses it, or its name is in use.
    """
    plan(pool, prepared)
    config = prepared.config
    os.environ.update(config.env)  # it is that of the job prepared last
    job, _ = submit.submit(
        config,
        prepared.facts,
        prepared.data_bytes,
        say,
        pool=pool.name,
        profile=prepared.profile,
        adopt=prepared.adopt,
    )
    uid = uid_of(job)
    asked = {
        "request": to_data(replace(prepared.request, uid=uid)),
        "secrets": {name: os.environ[name] for name in config.secrets},
    }
    try:
        answer: dict[str, Any] = ask_pool(pool, "submit", asked)
    except PoolUnreachableError:
        raise  # it may have taken the job
    except SpottrainError:
        shutil.rmtree(job.path, ignore_errors=True)
        if (place := config.checkpoint.path) is not None:
            with suppress(StorageError):  # the refusal is what is reported
                ownership.unmark(place, uid)
        raise
    when = "starts" if answer["starts"] else "is queued"
    say(
        f"job {config.name} {when} in pool {pool.name}; watch it with 'spottrain pool "
        f"status {pool.name} --watch'"
    )
    return answer
