"""Money in whole numbers: the one place that calculates with dollars.

Prices come from APIs as decimal dollars per hour. They are rounded once, here, to whole
nano-dollars per hour; times to whole microseconds. Price times time is then a whole number,
and a sum of such products does not depend on the order of its terms. Nothing is rounded
again until an amount is shown.

Rounding is never in our favour: what we owe is rounded up, what we may spend down.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from fractions import Fraction

from spottrain.errors import SpottrainError
from spottrain.units import GB_BYTES

HOUR_US = 3_600_000_000
MAX_USD = 1e12
"""More is nobody's, and what it is multiplied with would be no float any more."""
_NANO = Decimal(10) ** 9
_MICRO = Decimal(10) ** 6
_GRAINS_PER_MICROUSD = 1000 * HOUR_US
"""A grain is a nano-dollar per hour over a microsecond."""


class MoneyError(SpottrainError):
    """A price or an amount is not a number of dollars."""


def _decimal(usd: float) -> Decimal:
    """Return the decimal number as people and APIs wrote it.

    Raises:
        MoneyError: It is negative, infinite or not a number.
    """
    if not is_amount(usd):
        raise MoneyError(f"must be dollars, 0 to {MAX_USD:,.0f}: got {usd!r}; fix the price")
    return Decimal(repr(usd))


def is_amount(usd: float) -> bool:
    """Return whether a number can be a price or an amount: 0 to ``MAX_USD``."""
    return 0 <= usd <= MAX_USD


@dataclass(frozen=True, slots=True, order=True)
class Money:
    """An exact amount; convert it to dollars only to show it."""

    grains: int = 0

    @classmethod
    def allowed(cls, usd: float) -> Money:
        """Return an amount that we may spend: rounded down to a micro-dollar.

        Raises:
            MoneyError: It is invalid.
        """
        micro = (_decimal(usd) * _MICRO).to_integral_value(ROUND_FLOOR)
        return cls(int(micro) * _GRAINS_PER_MICROUSD)

    @classmethod
    def of_microusd(cls, microusd: int) -> Money:
        """Return a number of micro-dollars."""
        return cls(microusd * _GRAINS_PER_MICROUSD)

    @classmethod
    def of_bytes(cls, usd_per_gb: float, num_bytes: int) -> Money:
        """Return the price of data, rounded up to a grain.

        Raises:
            MoneyError: The price is invalid.
        """
        nano = Rate.of(usd_per_gb).nanousd_per_hour  # of a gigabyte instead
        return cls(-(-nano * num_bytes * HOUR_US // GB_BYTES))

    def __add__(self, other: Money) -> Money:
        return Money(self.grains + other.grains)

    def __sub__(self, other: Money) -> Money:
        return Money(self.grains - other.grains)

    def __mul__(self, times: int) -> Money:
        return Money(self.grains * times)

    @property
    def microusd(self) -> int:
        """In micro-dollars, rounded up."""
        return -(-self.grains // _GRAINS_PER_MICROUSD)

    @property
    def usd(self) -> float:
        """In dollars, to be shown, not to calculate with."""
        return self.microusd / 1e6

    def share(self, fraction: float) -> Money:
        """Return a part of it, such as 0.8, rounded up to a grain."""
        return Money(math.ceil(self.grains * Fraction(repr(fraction))))


NOTHING = Money()


def total(amounts: Iterable[Money]) -> Money:
    """Return the sum of amounts."""
    return Money(sum(amount.grains for amount in amounts))


@dataclass(frozen=True, slots=True, order=True)
class Rate:
    """Money per time."""

    nanousd_per_hour: int = 0

    @classmethod
    def of(cls, usd_per_hour: float) -> Rate:
        """Return a price that we pay: rounded up to a nano-dollar per hour.

        Raises:
            MoneyError: The price is invalid.
        """
        nano = (_decimal(usd_per_hour) * _NANO).to_integral_value(ROUND_CEILING)
        return cls(int(nano))

    @classmethod
    def allowed(cls, usd_per_hour: float) -> Rate:
        """Return a bound on prices: rounded down to a nano-dollar per hour.

        Raises:
            MoneyError: The price is invalid.
        """
        nano = (_decimal(usd_per_hour) * _NANO).to_integral_value(ROUND_FLOOR)
        return cls(int(nano))

    @classmethod
    def every(cls, amount: Money, period_s: float) -> Rate:
        """Return the rate of an amount paid once in each period, rounded up."""
        return cls(-(-amount.grains // max(1, floor_us(period_s))))

    def __add__(self, other: Rate) -> Rate:
        return Rate(self.nanousd_per_hour + other.nanousd_per_hour)

    def __sub__(self, other: Rate) -> Rate:
        return Rate(self.nanousd_per_hour - other.nanousd_per_hour)

    def __mul__(self, times: int) -> Rate:
        return Rate(self.nanousd_per_hour * times)

    def __floordiv__(self, other: Rate) -> int:
        """Return how often ``other`` fits into it."""
        return self.nanousd_per_hour // other.nanousd_per_hour

    @property
    def usd_per_hour(self) -> float:
        """In dollars per hour, to be shown, not to calculate with."""
        return self.nanousd_per_hour / 1e9

    def over_us(self, duration_us: int) -> Money:
        """Return the amount over so many microseconds."""
        return Money(self.nanousd_per_hour * duration_us)

    def over(self, duration_s: float) -> Money:
        """Return the amount over so many seconds, rounded up to a microsecond."""
        return self.over_us(ceil_us(duration_s))

    def lasts_s(self, amount: Money) -> float:
        """Return how long an amount lasts; infinite if the rate is 0."""
        if self.nanousd_per_hour <= 0:
            return math.inf
        return amount.grains / self.nanousd_per_hour / 1e6


FREE = Rate()


def total_rate(rates: Iterable[Rate]) -> Rate:
    """Return the sum of rates."""
    return Rate(sum(rate.nanousd_per_hour for rate in rates))


def floor_us(at_s: float) -> int:
    """Return a moment in microseconds, rounded down: where billing begins.

    Raises:
        MoneyError: It is infinite or not a number.
    """
    try:
        return math.floor(at_s * 1e6)
    except (OverflowError, ValueError) as error:
        raise _no_time(at_s) from error


def ceil_us(at_s: float) -> int:
    """Return a moment or a time in microseconds, rounded up: where billing ends.

    Raises:
        MoneyError: It is infinite or not a number.
    """
    try:
        return math.ceil(at_s * 1e6)
    except (OverflowError, ValueError) as error:
        raise _no_time(at_s) from error


def _no_time(at_s: float) -> MoneyError:
    return MoneyError(f"must be seconds: got {at_s!r}; fix the time")


def cost_usd(usd_per_hour: float, seconds: float) -> float:
    """Return dollars for a time at a price, for estimates.

    Raises:
        MoneyError: The price is invalid.
    """
    return Rate.of(usd_per_hour).over(seconds).usd
