"""What jobs of a pool ask for, and what a policy gives them.

A job may run in any of several options: so many VMs of each kind, and what it trains there.
One option for each kind is Gavel's job of a fixed scale factor; the corners of the concave hull
of throughput over VMs make the job elastic. The programs also take options over two kinds
(VirtualFlow, section 6.5.2), of which a pool makes none. A share is the part of the time spent in an option,
which for a hull is the same as a size between two corners.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spottrain.errors import ConfigError
from spottrain.pricing.sharing.solver import Floats
from spottrain.units import HOUR_S

THIN = 0.005
"""What corners of a hull may be left out for: a column each in every linear program."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way of running a job.

    Raises:
        ConfigError: no VMs, a negative number of them, or no throughput.
    """

    vms: tuple[int, ...]
    """Held at once, by kind in the pool's order."""
    examples_per_s: float
    """At the job's constant mini-batch."""

    def __post_init__(self) -> None:
        if not any(self.vms) or min(self.vms) < 0:
            raise ConfigError(f"option: VMs: got {self.vms}; give at least one")
        if not 0 < self.examples_per_s < math.inf:
            raise ConfigError(f"option: throughput: got {self.examples_per_s}; give more than 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDemand:
    """A job of a pool, as the policies see it.

    Raises:
        ConfigError: no option, or a number out of its range.
    """

    name: str
    options: tuple[Configuration, ...]
    examples: float
    """Left to do."""
    weight: float = 1.0
    """Of the job in its team, and under ``priority`` its priority."""
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    """From now."""
    team: str = ""
    age_s: float = 0.0
    """Time since it arrived."""
    isolated_age_s: float = 0.0
    """Time that what it has done so far would have taken on its own part of the pool."""
    running: bool = False
    """Holds VMs now."""

    def __post_init__(self) -> None:
        if not self.options:
            raise ConfigError(f"{self.name}: it fits no kind of VM; add one that it fits")
        for what, value in (
            ("examples", self.examples),
            ("weight", self.weight),
            ("deadline", self.deadline_s),
        ):
            if not value > 0 or math.isnan(value):
                raise ConfigError(f"{self.name}: {what}: got {value}; give more than 0")

    @property
    def best(self) -> float:
        """Its highest throughput, examples per second."""
        return max(option.examples_per_s for option in self.options)


@dataclass(frozen=True, slots=True)
class Constraint:
    """A limit on what several jobs hold together, such as a team's VMs or USD per hour."""

    jobs: frozenset[int]
    """Indices of the demands that it counts."""
    per_vm: tuple[float, ...]
    """What a VM counts, by kind."""
    at_most: float


@dataclass(frozen=True, kw_only=True)
class AllocationProblem:
    """A pool and the jobs that share it; options larger than the pool are left out.

    Raises:
        ConfigError: no kinds, an invalid number of VMs, a job larger than the pool, or
            options for another number of kinds.
    """

    kinds: tuple[str, ...]
    vms: tuple[int, ...]
    """That may be held at once, by kind."""
    demands: tuple[JobDemand, ...]
    usd_per_hour: tuple[float, ...] = ()
    """Of one VM, by kind; none where money plays no part."""
    teams: Mapping[str, float] | None = None
    """Weights of teams; 1 for one that is not named."""
    fifo_teams: frozenset[str] = frozenset()
    """Teams inside which the first job to arrive comes first."""
    caps: tuple[Constraint, ...] = ()
    """Further limits."""

    def __post_init__(self) -> None:
        if not self.kinds or len(self.vms) != len(self.kinds) or min(self.vms) < 0:
            raise ConfigError(
                f"pool: got {len(self.vms)} numbers of VMs for {len(self.kinds)} kinds; "
                "give each kind one, 0 or more"
            )
        for demand in self.demands:
            if any(len(option.vms) != len(self.kinds) for option in demand.options):
                raise ConfigError(
                    f"{demand.name}: options: give VMs of {len(self.kinds)} kinds each"
                )
            if not any(self.fits(option) for option in demand.options):
                raise ConfigError(
                    f"{demand.name}: larger than the pool of "
                    f"{', '.join(f'{n} {k}' for k, n in zip(self.kinds, self.vms, strict=True))}"
                    "; give it a smaller size or enlarge the pool"
                )

    def fits(self, option: Configuration) -> bool:
        """Return whether the whole pool is enough for an option."""
        return all(need <= have for need, have in zip(option.vms, self.vms, strict=True))

    @cached_property
    def columns(self) -> list[tuple[int, Configuration]]:
        """Job and option of each column of the programs."""
        return [
            (m, option)
            for m, demand in enumerate(self.demands)
            for option in demand.options
            if self.fits(option)
        ]

    @cached_property
    def options_of(self) -> list[list[Configuration]]:
        """By job: its options that fit the pool."""
        found: list[list[Configuration]] = [[] for _ in self.demands]
        for m, option in self.columns:
            found[m].append(option)
        return found

    @cached_property
    def best(self) -> Floats:
        """[job]: the highest throughput that fits the pool, examples per second."""
        best = np.zeros(len(self.demands))
        for m, option in self.columns:
            best[m] = max(best[m], option.examples_per_s)
        return best

    @cached_property
    def weights(self) -> Floats:
        """[job]"""
        return np.array([demand.weight for demand in self.demands])

    @cached_property
    def needed(self) -> Floats:
        """[job]: examples per second that deadlines need, at most what the job can do."""
        needed = [demand.examples / demand.deadline_s for demand in self.demands]
        return np.minimum(needed, self.best)

    def usd_per_s(self, option: Configuration) -> float:
        """Return the price of an option, USD per second."""
        prices = self.usd_per_hour or (0.0,) * len(self.kinds)
        return sum(n * usd for n, usd in zip(option.vms, prices, strict=True)) / HOUR_S


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a policy gives each job while nothing changes."""

    shares: tuple[tuple[tuple[Configuration, float], ...], ...]
    """By job: the options that it runs in, each with its part of the time."""
    examples_per_s: tuple[float, ...]
    """By job, on average."""
    levels: tuple[float, ...] = ()
    """Of water filling: the objective of each round."""

    def vms(self, job: int, kinds: int) -> Floats:
        """Return the VMs of each kind that a job holds on average."""
        held = np.zeros(kinds)
        for option, share in self.shares[job]:
            held += np.array(option.vms) * share
        return held


def hull(throughputs: Mapping[int, float]) -> list[tuple[int, float]]:
    """Return the corners of the concave hull of throughput over VMs, 0 VMs left out.

    Credited is at most ``T(n) <= n/k * T(k)`` for the smallest size k, and never less than
    at fewer VMs: measurements are jagged and at places more than linear.

    Args:
        throughputs: Examples per second by number of VMs, as measured or planned.
    """
    sizes = sorted(n for n, rate in throughputs.items() if rate > 0)
    if not sizes:
        return []
    first, credited = sizes[0], 0.0
    corners: list[tuple[int, float]] = []
    for n in sizes:
        linear = throughputs[first] * n / first
        rate = max(credited, min(throughputs[n], linear))
        if rate == credited:
            continue
        credited = rate
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) < _slope(
            corners[-2], (n, rate)
        ):
            corners.pop()
        corners.append((n, rate))
    return corners


def thinned(corners: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return as few of a hull's corners as leave no size more than ``THIN`` lower."""
    if len(corners) < 3:
        return list(corners)
    sizes, rates = np.array(corners, dtype=float).T
    kept = [0]
    while kept[-1] < len(corners) - 1:
        first, last = kept[-1], kept[-1] + 1
        while last + 1 < len(corners):
            chord = np.interp(
                sizes[first : last + 1],
                sizes[[first, last + 1]],
                rates[[first, last + 1]],
            )
            if (chord < rates[first : last + 1] * (1 - THIN)).any():
                break
            last += 1
        kept.append(last)
    return [corners[i] for i in kept]


def elastic_configurations(throughputs: Sequence[Mapping[int, float]]) -> tuple[Configuration, ...]:
    """Return the options of an elastic job.

    Args:
        throughputs: By kind: examples per second by number of VMs.
    """
    return tuple(
        Configuration(tuple(n if k == kind else 0 for k in range(len(throughputs))), rate)
        for kind, table in enumerate(throughputs)
        for n, rate in thinned(hull(table))
    )


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
