"""What the promise of a deadline is decided over: the job, its fleet, what can be rented.

All VMs are of one kind; supplies differ in place, market and price. Which kind is the
business of the ranking of offers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property

from spottrain.errors import ConfigError
from spottrain.units import HOUR_S


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What a fleet does by its size, and what changing it costs.

    Raises:
        ConfigError: a rate or a time that cannot be, or no size that trains.
    """

    examples_per_s: tuple[float, ...]
    """By number of VMs, from 0 to the most that the job may have."""
    boot_s: float = 180.0
    """From paying for a VM to training on it."""
    morph_s: float = 30.0
    """For how long training stands still when VMs join or leave."""
    lost_s: float = 30.0
    """Training time that is lost with a VM that goes without notice."""

    def __post_init__(self) -> None:
        for rate in self.examples_per_s:
            if not 0 <= rate < math.inf:
                raise ConfigError(
                    f"examples_per_s: got {rate}; give 0 or more for every size"
                )
        if not any(self.examples_per_s):
            raise ConfigError("examples_per_s: got no size that trains; give one")
        for name in ("boot_s", "morph_s", "lost_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name}: got {getattr(self, name)}; give 0 or more seconds"
                )

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Examples per second by size; VMs too many are left idle, so it never falls."""
        best, rates = 0.0, []
        for rate in (0.0, *self.examples_per_s[1:]):
            best = max(best, rate)
            rates.append(best)
        return tuple(rates)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Sizes on the upper concave hull of the rates, from 0: no mix of others beats
        them, so each step up trains less for a VM than the step before."""
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
    def most(self) -> int:
        """The most VMs that the job may have."""
        return len(self.examples_per_s) - 1

    def _slope(self, few: int, many: int) -> float:
        return (self.rates[many] - self.rates[few]) / (many - few)


@dataclass(frozen=True, slots=True, kw_only=True)
class Supply:
    """One way to get VMs now.

    Raises:
        ConfigError: a price, a count or a hazard that cannot be.
    """

    name: str
    spot: bool
    usd_per_hour: float
    """Of one VM."""
    available: int | None = None
    """VMs to be had beside those that are held; None: as many as are wanted."""
    losses_per_hour: float = 0.0
    """Interruptions of one VM to expect; 0 on demand."""

    def __post_init__(self) -> None:
        for name in ("usd_per_hour", "losses_per_hour"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{self.name}: {name}: got {getattr(self, name)}; give 0 or more"
                )
        if self.available is not None and self.available < 0:
            raise ConfigError(
                f"{self.name}: available: got {self.available}; give 0 or more"
            )

    def effective_usd_per_hour(self, fleet: Fleet) -> float:
        """Return the price of an hour's training: what interruptions waste is in it."""
        wasted_s = fleet.boot_s + fleet.lost_s
        return self.usd_per_hour * (1 + self.losses_per_hour * wasted_s / HOUR_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """VMs that are rented of one supply; those that were said to go do not count."""

    name: str
    """Of the supply."""
    ready: int
    """Training, or able to."""
    booting: int = 0
    """Asked for, or not ready yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """Where the job stands.

    Raises:
        ConfigError: a number that cannot be.
    """

    now_s: float
    deadline_s: float | None
    """On the clock of ``now_s``."""
    examples_left: float
    ending_s: float = 0.0
    """From the last example to the end of the job, which must be over by the deadline."""
    usd_left: float | None = None
    """Of the budget."""
    kept_s: float = 0.0
    """For so long the budget must bear the fleet beside its work: what a fleet may cost
    that has been told to end."""
    usd_per_hour_cap: float | None = None
    min_examples_per_s: float | None = None
    recent_examples_per_s: float | None = None
    """Over the window that ``min_examples_per_s`` is promised for; None: too early."""
    review_s: float = 60.0
    """Until this is asked again at the latest; a loss, or a VM that is ready, asks at
    once."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"{field.name}: got {value}; give a number")

    @property
    def left_s(self) -> float:
        """Seconds in which to train; infinite without a deadline."""
        if self.deadline_s is None:
            return math.inf
        return self.deadline_s - self.ending_s - self.now_s


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetDecision:
    """What to have rented; the caller rents what is missing and returns the rest."""

    wanted: tuple[tuple[str, int], ...]
    """VMs by supply, those that boot counted; a supply that is not here: none."""
    mode: str
    """``spot``, ``pace``, ``edge``, ``fallback``, ``wait`` or ``late``; see docs/promise.md."""
    reason: str
    slack_s: float
    """By how much on-demand VMs alone would be early; infinite without a deadline."""
    slack_usd: float
    """What would be left of the budget with on-demand VMs alone; infinite without one."""

    def count(self, name: str) -> int:
        """Return how many VMs of a supply are wanted."""
        return dict(self.wanted).get(name, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A number that is not known yet, and between what it lies with a chance of 90 %."""

    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What is to be expected of the job from now on."""

    finish_s: Interval
    """On the clock of the standing."""
    usd: Interval
    """Still to be spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feasibility:
    """Whether a promise can be made, and else what would do."""

    possible: bool
    reason: str
    least_usd: float | None
    """The least budget with which the deadline can be promised; None: no budget does."""
    earliest_finish_s: float | None
    """The nearest deadline that can be promised within the budget; None: there is none."""
