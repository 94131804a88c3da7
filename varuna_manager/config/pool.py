"""The pool file: what several jobs share, validated before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from spottrain.errors import ConfigError
from spottrain.gpus.find import own_gpus
from spottrain.machine import memory_bytes
from spottrain.varuna_manager.config.base import JobName, LocalPath, Section
from spottrain.varuna_manager.config.clouds import (
    AwsConfig,
    AzureConfig,
    CloudName,
    GcpConfig,
    provider_of,
)
from spottrain.varuna_manager.config.files import read_job_file, validate
from spottrain.varuna_manager.config.job import JobConfig, load_config
from spottrain.varuna_manager.config.local import LocalConfig
from spottrain.varuna_manager.config.overrides import NO_OVERRIDES, Overrides
from spottrain.varuna_manager.config.sections import Dollars
from spottrain.varuna_manager.config.slurm import SlurmConfig, check_cluster

Policy = Literal[
    "fair",
    "priority",
    "makespan",
    "finish_time_fairness",
    "fifo",
    "shortest_first",
    "cheapest",
    "hierarchical",
]
_PLACES = ("local", "aws", "azure", "gcp", "slurm")
_SHARED = ("seed", "zones", "return_after_s", "price_volatility")
"""Keys of the pool's ``local`` section that its jobs take over; events are a job's own."""


Seconds = Annotated[float, Field(gt=0, le=1e7)]
Weight = Annotated[float, Field(ge=1e-3, le=1e6)]
"""Of a job or a team against others; beyond that linear programs lose their precision."""


class PoolBudgetConfig(Section):
    """What all jobs of the pool may spend together; by default without limit."""

    max_usd: Dollars | None = None
    """Dollars of the whole pool; with `per`, in each of these times."""
    max_usd_per_hour: Dollars | None = None
    """Dollars per hour for all VMs together."""
    per: Literal["month"] | None = None
    """`month`: `max_usd` counts anew with each calendar month (UTC)."""

    @model_validator(mode="after")
    def _of_something(self) -> Self:
        if self.per is not None and self.max_usd is None:
            raise ValueError("per needs max_usd: the dollars of a month")
        return self


class TeamConfig(Section):
    """A team's part of the pool, and its own caps."""

    weight: Weight = 1.0
    """Its part, against those of the other teams; under the policy `hierarchical`."""
    order: Literal["fair", "fifo"] = "fair"
    """Under `hierarchical` its part goes to its jobs by their priorities (`fair`), or to the one
    that came first, and what it cannot use to the next (`fifo`)."""
    max_vms: PositiveInt | None = None
    """VMs that its jobs hold at most, together."""
    max_usd: Dollars | None = None
    """Dollars that its jobs spend at most; with `budget.per`, in each of these times."""
    max_usd_per_hour: Dollars | None = None
    """Dollars per hour for the VMs of its jobs."""


class PoolJobConfig(Section):
    """A job that is submitted with the pool."""

    file: LocalPath
    """Its job file, relative to the pool file."""
    priority: Weight = 1.0
    """Its weight against other jobs, from 0.001 to 1,000,000."""
    team: str = ""
    """The team that it belongs to."""
    after_steps: NonNegativeInt = 0
    """Submitted once the job before it in the file has trained so many steps, or has ended."""


class PoolConfig(Section):
    """A whole pool file."""

    name: JobName
    """Name of the pool, unique on this machine."""
    clouds: Annotated[
        Literal["local", "slurm"] | CloudName | tuple[CloudName, ...],
        BeforeValidator(provider_of),
    ] = "local"
    """Where VMs come from: `local` simulates a spot market on this machine, `slurm` are nodes of
    a cluster; else one cloud, or several as a list."""
    max_vms: PositiveInt
    """VMs of all jobs together."""
    kinds: dict[str, PositiveInt] = {}  # noqa: RUF012 - pydantic copies it
    """VMs of an instance type at most, by its name; others as `max_vms` says. The types
    are those of the cloud's section."""
    budget: PoolBudgetConfig = PoolBudgetConfig()
    policy: Policy = "fair"
    """How the pool is divided; see docs/pool.md."""
    teams: dict[JobName, TeamConfig] = {}  # noqa: RUF012 - pydantic copies it
    """Teams by name."""
    allow_on_demand: bool = False
    """Jobs may also rent on demand, as `resources.allow_on_demand` says."""
    lease_s: Seconds = 600.0
    """Largest `manager.lease_s` of a job: so long its VMs may cost without a manager."""
    min_stay_s: Seconds = 60.0
    """Time between two changes of sizes that are only for more throughput."""
    round_s: Seconds = 360.0
    """How long a job keeps VMs that others wait for, where not all fit together."""
    jobs: tuple[PoolJobConfig, ...] = ()
    """Jobs that are submitted with the pool."""
    local: LocalConfig = LocalConfig()
    aws: AwsConfig = AwsConfig()
    azure: AzureConfig = AzureConfig()
    gcp: GcpConfig = GcpConfig()
    slurm: SlurmConfig = SlurmConfig()

    @property
    def providers(self) -> tuple[str, ...]:
        """Names of all providers; usually one."""
        return (self.clouds,) if isinstance(self.clouds, str) else self.clouds

    @model_validator(mode="after")
    def _within(self) -> Self:
        if self.clouds == "slurm":
            capped = (self.budget.max_usd or self.hourly_cap) is not None
            check_cluster(self.slurm, needs_price=capped)
        for name, team in self.teams.items():
            for key, value, cap in (
                ("max_vms", team.max_vms, self.max_vms),
                ("max_usd", team.max_usd, self.budget.max_usd),
                ("max_usd_per_hour", team.max_usd_per_hour, self.hourly_cap),
            ):
                if value is not None and cap is not None and value > cap:
                    raise ValueError(
                        f"teams.{name}.{key}: must be at most the pool's, {cap:g}: got {value:g}"
                    )
        return self

    @property
    def hourly_cap(self) -> float | None:
        """Dollars per hour for all VMs together."""
        return self.budget.max_usd_per_hour


def load_pool(path: Path) -> PoolConfig:
    """Return the pool file at ``path``, with its paths made absolute.

    Raises:
        ConfigError: The file is missing, unreadable or wrong.
    """
    data, lines = read_job_file(path)
    config = validate(PoolConfig, data, path.name, lines, path.resolve().parent)
    if config.clouds != "local":
        return config
    return config.model_copy(update={"local": config.local.on(own_gpus(), memory_bytes())})


def parse_pool(data: Any, source: str) -> PoolConfig:
    """Return a pool's configuration from parsed data; see ``files.validate``."""
    return validate(PoolConfig, data, source)


def weight_of(value: object, source: str) -> float:
    """Return a weight that somebody gives.

    Raises:
        ConfigError: It is none; one line.
    """
    try:
        return TypeAdapter(Weight).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(
            f"{source}: must be a number from 0.001 to 1,000,000: got {value}"
        ) from error


def load_job_of(pool: PoolConfig, path: Path, overrides: Overrides = NO_OVERRIDES) -> JobConfig:
    """Return a job file for a pool: where and how many VMs come from the pool.

    Args:
        overrides: Values of the command line that replace the file's.

    Raises:
        ConfigError: The file is wrong, or says something else than its pool.
    """
    config = load_config(
        path, change=lambda data: _in_pool(data, pool, path.name), overrides=overrides
    )
    if config.manager.lease_s > pool.lease_s:
        raise ConfigError(
            f"{path.name}: manager.lease_s: must be at most the pool's lease_s, "
            f"{pool.lease_s:g}: got {config.manager.lease_s:g}"
        )
    return config


def _in_pool(data: Any, pool: PoolConfig, source: str) -> Any:
    """Return a job file's plain data with what its pool says in place."""
    if not isinstance(data, dict):
        return data  # refused as any job file
    for place in _PLACES[1:]:
        if place in data:
            raise ConfigError(f"{source}: {place}: the pool {pool.name} says it; remove it")
    own = data.get("resources") or {}
    if not isinstance(own, Mapping):
        return data
    provider = pool.clouds if isinstance(pool.clouds, str) else list(pool.clouds)
    if own.get("provider", provider) != provider:
        raise ConfigError(
            f"{source}: resources.provider: the pool {pool.name} rents from "
            f"{', '.join(pool.providers)}: got {own['provider']}; remove it"
        )
    least = own.get("min_vms")
    if isinstance(least, int) and least > pool.max_vms:
        raise ConfigError(
            f"{source}: resources.min_vms: must be at most the VMs of pool {pool.name}, "
            f"{pool.max_vms}: got {least}"
        )
    asked = own.get("max_vms", pool.max_vms)
    most = min(asked, pool.max_vms) if isinstance(asked, int) else asked
    resources = {
        "allow_on_demand": pool.allow_on_demand,
        **own,
        "provider": provider,
        "max_vms": most,
    }
    sections = {
        name: getattr(pool, name).model_dump(mode="json", exclude_unset=True)
        for name in pool.providers
        if name != "local"
    }
    if pool.clouds == "local":
        local = data.get("local") or {}
        shared = pool.local.model_dump(mode="json")
        sections["local"] = {**local, **{key: shared[key] for key in _SHARED}}
    return {**data, "resources": resources, **sections}


def microusd(usd: float | None) -> float:
    """Return dollars as whole micro-dollars that may be spent; infinite for no limit."""
    return math.inf if usd is None else math.floor(round(usd * 1e6, 3))
