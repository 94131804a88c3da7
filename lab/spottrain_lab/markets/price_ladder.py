"""Replay of spot prices: the cost of each strategy of choosing machines.

Narayanan's dissertation, section 6.3.2: Figures 6.5 (the ladder) and 6.6 (the gain of
moving during training), on its own price records and throughputs; then with what it leaves
out: boot, lost work, egress. One GPU's share of an instance is paid, as if others filled
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, timedelta
from enum import StrEnum
from statistics import mean

from spottrain.errors import ConfigError
from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking import switching
from spottrain.units import HOUR_S
from spottrain_lab.markets.price_file import INSTANCES, PriceFile

REFERENCE_GPU = "v100"
THROUGHPUTS: Mapping[str, Mapping[str, float]] = {
    "A3C": {"k80": 3.8291, "p100": 4.7547, "v100": 8.2330},
    "CycleGAN": {"k80": 0.52919, "p100": 2.44707, "v100": 4.91849},
    "LM(80)": {"k80": 7.84656, "p100": 26.36046, "v100": 43.90361},
    "Recommendation(8192)": {"k80": 0.21463, "p100": 0.27660, "v100": 0.60235},
    "ResNet-50(128)": {"k80": 0.29645, "p100": 1.08238, "v100": 2.84598},
    "Transformer(256)": {"k80": 0.51480, "p100": 1.70703, "v100": 1.70703},
}
"""Iterations per second of one GPU, by model(batch size): Figure 6.5's, as published
with the dissertation (behind its Table 6.1)."""
DURATIONS_V100_DAYS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Of Figure 6.6."""
STARTS, MARGIN_DAYS = 30, 5
"""Number of start days: the last 30 but 5 with a price of the baseline."""
DAY_H = 24.0


class Strategy(StrEnum):
    """The rungs of Figure 6.5; each has all choices of those before it."""

    SINGLE = "1xV100"
    """The cheapest instance with one V100 at the start, kept."""
    GPU_TYPE = "+ GPU type"
    """Any GPU, one an instance, kept."""
    MULTI_GPU = "+ multi-GPU"
    """Any instance of the region, kept."""
    MULTI_CLOUD = "+ multi-cloud"
    """Any instance, those of other clouds included, kept."""
    DYNAMIC = "+ dynamic"
    """Any instance, chosen anew every day."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderTerms:
    """Assumptions of a replay; by default the dissertation's."""

    frictions: switching.Frictions = switching.NO_FRICTIONS
    rule: switching.SwitchingRule = switching.CHEAPEST_NOW
    losses_per_day: float = 0.0
    """Expected interruptions of a machine, the same everywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One job under one strategy."""

    usd: float
    hours: float
    """From the first machine's start to the last example."""
    switches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One strategy's runs, one per start day."""

    runs: tuple[Run, ...]

    @property
    def usd(self) -> float:
        """Mean cost."""
        return mean(run.usd for run in self.runs)

    def gain_over(self, other: Rung) -> float:
        """Return the mean over start days of the other's cost over this one's.

        The mean of ratios: Figure 6.6. Figure 6.5 has the ratio of means.
        """
        pairs = zip(other.runs, self.runs, strict=True)
        return mean(theirs.usd / ours.usd for theirs, ours in pairs)

    @property
    def hours(self) -> float:
        """Mean time to the end."""
        return mean(run.hours for run in self.runs)

    @property
    def most_switches(self) -> int:
        """Of any run."""
        return max(run.switches for run in self.runs)


class Ladder:
    """The strategies in one region over a file of prices.

    Args:
        prices: As recorded.
        region: Where all but the multi-cloud strategies stay.

    Raises:
        ConfigError: the region is not in the file, or has too few days of the baseline.
    """

    def __init__(self, prices: PriceFile, region: str) -> None:
        clouds = prices.regions()
        if region not in clouds:
            raise ConfigError(f"region {region} is not in the file; it has {', '.join(clouds)}")
        self.region, self.cloud = region, clouds[region]
        self._prices = prices
        seen = [
            day
            for day, sightings in prices.days.items()
            if any(self._may(Strategy.SINGLE, place) for place in sightings)
        ]
        if len(seen) <= MARGIN_DAYS:
            raise ConfigError(
                f"region {region}: prices of instances with one {REFERENCE_GPU} on "
                f"{len(seen)} days; more than {MARGIN_DAYS} are needed"
            )
        self.starts: Sequence[date] = seen[-STARTS - MARGIN_DAYS : -MARGIN_DAYS]
        self.last = seen[-1]
        """Prices hold from here on."""

    def climb(self, model: str, v100_days: float, terms: LadderTerms) -> dict[Strategy, Rung]:
        """Return every strategy's runs of one model.

        Args:
            model: One of THROUGHPUTS.
            v100_days: The job's length on one V100.
            terms: Assumptions.
        """
        rates = THROUGHPUTS[model]
        examples = v100_days * DAY_H * HOUR_S * rates[REFERENCE_GPU]
        rungs = {}
        for strategy in Strategy:
            sights = self._sights(strategy, rates, terms.losses_per_day / DAY_H)
            runs = [
                self._run(_Job(examples, self.cloud, terms), start, strategy, sights)
                for start in self.starts
            ]
            rungs[strategy] = Rung(runs=tuple(runs))
        return rungs

    def _run(
        self,
        job: _Job,
        start: date,
        strategy: Strategy,
        sights: Mapping[date, Mapping[Place, _Sight]],
    ) -> Run:
        day = start
        while not job.done:
            seen = sights.get(day, {})
            if job.held is None or strategy is Strategy.DYNAMIC:
                job.decide(seen)
            elif sight := seen.get(job.held.place):
                job.held = replace(job.held, usd_per_hour=sight.first_usd)
            job.train(DAY_H if day < self.last else math.inf)
            day += timedelta(days=1)
        return Run(usd=job.usd, hours=job.hours, switches=job.switches)

    def _may(self, strategy: Strategy, place: Place) -> bool:
        """Return whether a strategy may choose a place."""
        gpus = INSTANCES[place.instance_type]
        if place.cloud != self.cloud:
            return strategy in (Strategy.MULTI_CLOUD, Strategy.DYNAMIC)
        if place.region != self.region:
            return False
        if strategy is Strategy.SINGLE:
            return gpus.count == 1 and gpus.gpu == REFERENCE_GPU
        return gpus.count == 1 or strategy is not Strategy.GPU_TYPE

    def _sights(
        self, strategy: Strategy, rates: Mapping[str, float], losses_per_hour: float
    ) -> dict[date, dict[Place, _Sight]]:
        """Return a strategy's choices by day, for one GPU's share."""
        sights: dict[date, dict[Place, _Sight]] = {}
        days = ((d, s) for d, s in self._prices.days.items() if d >= self.starts[0])
        for day, sightings in days:
            for place, seen in sightings.items():
                if not self._may(strategy, place):
                    continue
                gpus = INSTANCES[place.instance_type]
                quote = switching.Quote(
                    place=place,
                    usd_per_hour=min(seen) / gpus.count,
                    examples_per_s=rates[gpus.gpu],
                    losses_per_hour=losses_per_hour,
                )
                sight = _Sight(quote, seen[0] / gpus.count)
                sights.setdefault(day, {})[place] = sight
        return sights


@dataclass(frozen=True, slots=True)
class _Sight:
    """Price of one GPU's share in one place on one day."""

    quote: switching.Quote
    """At the day's lowest price, to choose by."""
    first_usd: float
    """The day's first price in the file, paid by strategies that do not move, as in the
    dissertation's own replay."""


class _Job:
    """A job under way: work left, place, and cost."""

    def __init__(self, examples: float, home: str, terms: LadderTerms) -> None:
        self.terms = terms
        self.held: switching.Quote | None = None
        self.usd = self.hours = 0.0
        self.switches = 0
        self._examples = self._left = examples
        self._boot_h = 0.0
        self._copies = frozenset({home})

    @property
    def done(self) -> bool:
        """Return whether all work is done, rounding aside."""
        return self._left <= self._examples * 1e-12

    def decide(self, seen: Mapping[Place, _Sight]) -> None:
        """Stay or move; a place without a price that day keeps its last one."""
        quotes = [sight.quote for sight in seen.values()]
        held = self.held
        if held is not None and held.place not in seen:
            quotes.append(held)
        here = None if held is None else held.place
        state = switching.SwitchingState(
            examples=self._left, held=here, checkpoint=here, copies=self._copies
        )
        frictions = self.terms.frictions
        decision = switching.decide(quotes, state, frictions, self.terms.rule)
        self.held = decision.quote
        if held is not None and not decision.moves:
            return
        there = decision.quote.place
        self.usd += frictions.dataset_usd(there.cloud, self._copies)
        self._copies |= {there.cloud}
        self._boot_h = frictions.boot_s / HOUR_S
        if held is not None:
            self.switches += 1
            self.usd += frictions.checkpoint_usd(held.place, there)
            again = held.examples_per_s * frictions.move_s
            self._left = min(self._examples, self._left + again)

    def train(self, hours: float) -> None:
        """Train for some hours, or until the end; boot comes first."""
        if self.held is None:
            raise ValueError("nothing was chosen to train on")
        boot_h = min(self._boot_h, hours)
        throughput = self.terms.frictions.throughput(self.held)
        training_h = min(hours - boot_h, self._left / throughput)
        self._boot_h -= boot_h
        self._left -= training_h * throughput
        self.hours += boot_h + training_h
        self.usd += (boot_h + training_h) * self.held.usd_per_hour
