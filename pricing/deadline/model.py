"""What the deadline policy decides on: the job, its fleet, and what can be rented.

All VMs are of one machine type; supplies differ in place, market and price. The ranking of
offers chooses the type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

from spottrain.errors import ConfigError
from spottrain.pricing.deadline import tuning
from spottrain.units import HOUR_S


def _check(what: str, value: float, unit: str = "") -> None:
    if not 0 <= value < math.inf:
        raise ConfigError(f"{what}: got {value}; give 0 or more{unit}")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Throughput of a fleet by its size, and what changing the fleet costs.

    Raises:
        ConfigError: a rate or a time is invalid, or no size trains.
    """

    examples_per_s: tuple[float, ...]
    """By number of VMs, from 0 to the job's maximum."""
    boot_s: float = 180.0
    """From paying for a VM to training on it."""
    morph_s: float = 30.0
    """How long training pauses when VMs join or leave."""
    lost_s: float = 30.0
    """Training time lost with a VM that is preempted without notice."""

    def __post_init__(self) -> None:
        for rate in self.examples_per_s:
            _check("examples_per_s", rate, " for every size")
        if not any(self.examples_per_s):
            raise ConfigError("examples_per_s: got no size that trains; give one")
        for name in ("boot_s", "morph_s", "lost_s"):
            _check(name, getattr(self, name), " seconds")

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Examples per second by size; surplus VMs idle, so it never falls."""
        best, rates = 0.0, []
        for rate in (0.0, *self.examples_per_s[1:]):
            best = max(best, rate)
            rates.append(best)
        return tuple(rates)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes on the upper concave hull of the rates, from 0: each step up adds less per
        VM than the step before."""
        hull = [0]
        for size, rate in enumerate(self.rates):
            if rate <= self.rates[hull[-1]]:
                continue
            while len(hull) > 1 and self._slope(hull[-2], hull[-1]) < self._slope(
                hull[-1], size
            ) * (1 - 1e-12):
                hull.pop()
            hull.append(size)
        return tuple(hull)

    @property
    def max_vms(self) -> int:
        """The most VMs the job may have."""
        return len(self.examples_per_s) - 1

    @property
    def loss_s(self) -> float:
        """Time that a loss takes: two pauses (the VM leaves, another joins) and lost work."""
        return 2 * self.morph_s + self.lost_s

    @cached_property
    def useful_vms(self) -> int:
        """The fewest VMs that train about as fast as any number of them."""
        enough = (1 - tuning.NO_GAIN) * self.rates[-1]
        return next(size for size, rate in enumerate(self.rates) if rate >= enough)

    def _slope(self, few: int, many: int) -> float:
        return (self.rates[many] - self.rates[few]) / (many - few)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One place and market to rent VMs from now.

    Raises:
        ConfigError: a price, a count or a hazard is invalid.
    """

    name: str
    spot: bool
    usd_per_hour: float
    """Of one VM."""
    available: int | None = None
    """VMs that can be rented beside those held; None: no limit."""
    losses_per_hour: float = 0.0
    """Interruptions of one VM to expect; 0 on demand."""

    def __post_init__(self) -> None:
        _check(f"{self.name}: usd_per_hour", self.usd_per_hour)
        _check(f"{self.name}: losses_per_hour", self.losses_per_hour)
        _check(f"{self.name}: available", self.available or 0)

    def free(self, fleet: Fleet) -> int:
        """Return how many VMs can be rented beside those held."""
        return fleet.max_vms if self.available is None else self.available

    def waste(self, fleet: Fleet) -> float:
        """Return what interruptions waste, as a share of the time that a VM trains."""
        return self.losses_per_hour * (fleet.boot_s + fleet.lost_s) / HOUR_S

    def effective_usd_per_hour(self, fleet: Fleet) -> float:
        """Return the price of an hour of training, waste by interruptions included."""
        return self.usd_per_hour * (1 + self.waste(fleet))


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """VMs rented from one supply, without those that have a preemption notice."""

    name: str
    """Of the supply."""
    ready: int
    """Training, or able to."""
    booting: int = 0
    """Requested, or not ready yet."""
    boots_s: tuple[float, ...] = ()
    """How long the booting ones still boot; a whole boot where it is not listed."""

    def ready_in_s(self, boot_s: float) -> tuple[float, ...]:
        """Return when each VM is ready, ascending: 0 for those that are."""
        known = sorted(self.boots_s)[: self.booting]
        unknown = self.booting - len(known)
        return (*[0.0] * self.ready, *known, *[boot_s] * unknown)

    @property
    def rented(self) -> int:
        """All of them."""
        return self.ready + self.booting


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """When the job, or its limits of now, began, and on-demand VMs could have been rented.

    What they alone would have cost bounds what attempts at spot VMs may waste.
    """

    examples: float
    """Work that was left."""
    usd_spent: float = 0.0
    """Spent since then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Progress, limits and money of the job.

    Raises:
        ConfigError: a number is not finite.
    """

    now_s: float
    deadline_s: float | None
    """On the clock of ``now_s``."""
    examples_left: float
    paused_s: float = 0.0
    """Until training goes on, if it pauses now."""
    examples_unsaved: float | None = None
    """Part of ``examples_left`` that is done, and lost if spot VMs are; None: a loss takes
    ``Fleet.lost_s``."""
    examples_per_checkpoint: float = 0.0
    """Work from one checkpoint to the next."""
    begun: Beginning | None = None
    """None: only the budget bounds what attempts at spot VMs may waste."""
    ending_s: float = 0.0
    """From the last example to the end of the job, which must come before the deadline."""
    usd_left: float | None = None
    """Of the budget."""
    reserve_s: float = 0.0
    """The budget must also pay the fleet for so long after it was told to end."""
    usd_per_hour_cap: float | None = None
    min_examples_per_s: float | None = None
    recent_examples_per_s: float | None = None
    """Over the window of ``min_examples_per_s``; None: too early to tell."""
    review_s: float = 60.0
    """Longest time to the next decision; a loss, or a VM that becomes ready, causes one at
    once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float | int) and not math.isfinite(value):
                raise ConfigError(f"{field.name}: got {value}; give a number")

    @property
    def usd_per_hour_limit(self) -> float:
        """The hourly cap, rounding allowed for; infinite without one."""
        cap = self.usd_per_hour_cap
        return math.inf if cap is None else cap * (1 + tuning.ROUNDING)

    @property
    def usd_limit(self) -> float:
        """What is left of the budget, rounding allowed for; infinite without one."""
        return math.inf if self.usd_left is None else self.usd_left * (1 + tuning.ROUNDING)

    def margin_s(self, fleet: Fleet) -> float:
        """Return the slack with less than which on-demand VMs are rented."""
        return tuning.MARGIN_LOSSES * fleet.loss_s + self.review_s

    @property
    def left_s(self) -> float:
        """Seconds left to train; infinite without a deadline."""
        if self.deadline_s is None:
            return math.inf
        return self.deadline_s - self.ending_s - self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """What to have rented; the caller rents what is missing and returns the rest."""

    wanted: tuple[tuple[str, int], ...]
    """VMs by supply, booting ones included; none of a supply that is not listed."""
    mode: str
    """``spot``, ``pace``, ``wait``, ``edge``, ``fallback``, ``late`` or ``done``; see
    docs/deadlines.md."""
    reason: str
    slack_s: float
    """By how much on-demand VMs alone would be early; infinite without a deadline."""
    slack_usd: float
    """What on-demand VMs alone would leave of the budget; infinite without one."""

    def count(self, name: str) -> int:
        """Return how many VMs of a supply are wanted."""
        return dict(self.wanted).get(name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 90 % interval."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Finish and cost of the job as expected now."""

    finish_s: Interval
    """On the clock of ``JobStatus.now_s``."""
    usd: Interval
    """Still to be spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """Whether deadline and budget can be met, and if not, which ones could."""

    possible: bool
    reason: str
    min_usd: float | None
    """The smallest budget that meets the deadline; None: no budget does."""
    earliest_finish_s: float | None
    """The earliest deadline that the budget can meet; None: there is none."""
