"""Input and output of the allocation policies: offer types, jobs, hours and shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spottrain.errors import BudgetError, ConfigError
from spottrain.pricing.sharing.solver import Floats
from spottrain.units import HOUR_S

_SMALLEST, _LARGEST = 1e-30, 1e30
"""Range of numbers that a linear program in double precision can hold."""


class InfeasibleError(BudgetError):
    """No allocation meets the limits.

    Args:
        message: One line: which limit, and the nearest one that can be met.
        min_usd: The smallest sufficient budget, where the budget is too small.
        min_deadline_h: By job, the earliest deadlines that can be met.
    """

    def __init__(
        self,
        message: str,
        *,
        min_usd: float | None = None,
        min_deadline_h: dict[str, float] | None = None,
    ) -> None:
        super().__init__(message)
        self.min_usd = min_usd
        self.min_deadline_h = min_deadline_h or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferType:
    """One kind of machine, and how many of it may be held at once.

    Raises:
        ConfigError: an invalid price, or a negative quota.
    """

    name: str
    usd_per_hour: float
    """Of one machine."""
    quota: float = math.inf
    """Machines at once, over all jobs."""

    def __post_init__(self) -> None:
        _check(f"{self.name}: price", self.usd_per_hour, "USD per hour, 0 or more")
        if not self.quota >= 0:
            raise ConfigError(f"{self.name}: quota: got {self.quota}; give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one job.

    Raises:
        ConfigError: an invalid number, such as no work or a deadline of 0.
    """

    name: str
    examples: float
    """Left to do."""
    examples_per_s: tuple[float, ...]
    """On each offer type, in the market's order; 0 where the job cannot run."""
    deadline_h: float = math.inf
    """Hours from now."""
    weight: float = 1.0
    """Its weight in `fairest`, and in the sum of `max_throughput`."""
    machines: int = 1
    """Held at once, all of one type; ``examples_per_s`` is of all of them together."""

    def __post_init__(self) -> None:
        for what, value in (("examples", self.examples), ("weight", self.weight)):
            if not _SMALLEST < value < _LARGEST:
                raise ConfigError(f"{self.name}: {what}: got {value}; give more than 0")
        if not self.deadline_h > _SMALLEST:
            raise ConfigError(
                f"{self.name}: deadline: got {self.deadline_h} h from now; give one in the future"
            )
        if not isinstance(self.machines, int) or self.machines < 1:
            raise ConfigError(
                f"{self.name}: machines: got {self.machines}; give a whole number, >= 1"
            )
        for rate in self.examples_per_s:
            _check(f"{self.name}: throughput", rate, "examples per second, 0 or more")


def _check(what: str, value: float, wanted: str) -> None:
    if not 0 <= value < _LARGEST:
        raise ConfigError(f"{what}: got {value}; give {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hours:
    """Hours per (job, offer type): what to rent for how long."""

    hours: tuple[tuple[float, ...], ...]
    """[job][offer type]: how long the job runs there; times its machines for VM hours."""
    usd: float
    makespan_h: float
    """The shortest time in which these hours fit the quotas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of time per (job, offer type) while nothing changes (Gavel's X)."""

    shares: tuple[tuple[float, ...], ...]
    """[job][offer type], each job's sum at most 1. Often one optimum of many."""
    objective: float


@dataclass(frozen=True, slots=True)
class Arrays:
    """A market as arrays; hours for the whole job, infinite where it cannot run."""

    types: Sequence[OfferType]
    jobs: Sequence[Demand]
    rates: Floats
    """[job, type], examples per second."""
    whole_h: Floats
    """[job, type], hours for all of the job's work on that type alone."""
    usd: Floats
    """[job, type], dollars for all of the job's work on that type alone."""
    machines: Floats
    """[job]"""
    quotas: Floats
    """[type]"""


def arrays(types: Sequence[OfferType], jobs: Sequence[Demand]) -> Arrays:
    """Return the market as arrays; where no quota suffices, a job cannot run.

    Raises:
        ConfigError: no types, no jobs, or throughputs for another number of types.
        InfeasibleError: a job that can run on no type.
    """
    if not types or not jobs:
        raise ConfigError("nothing to allocate: give at least one offer type and job")
    for job in jobs:
        if len(job.examples_per_s) != len(types):
            raise ConfigError(
                f"{job.name}: throughputs: got {len(job.examples_per_s)} for "
                f"{len(types)} offer types; give one for each"
            )
    machines = np.array([job.machines for job in jobs], dtype=float)
    quotas = np.array([kind.quota for kind in types], dtype=float)
    rates = np.array([job.examples_per_s for job in jobs], dtype=float)
    rates = np.where(machines[:, None] <= quotas, rates, 0.0)
    for job, row in zip(jobs, rates, strict=True):
        if not row.any():
            raise InfeasibleError(
                f"{job.name}: no offer type has a throughput for it and quota for its "
                f"{job.machines} machines; raise a quota or add an offer type"
            )
    examples = np.array([job.examples for job in jobs])
    prices = np.array([kind.usd_per_hour for kind in types])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        whole_h = examples[:, None] / (rates * HOUR_S)
        usd = np.where(rates > 0, whole_h * machines[:, None] * prices, np.inf)
    return Arrays(types, jobs, rates, whole_h, usd, machines, quotas)
