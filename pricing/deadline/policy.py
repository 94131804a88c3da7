"""The deadline policy: which VMs to hold so that a job is done in time and in budget.

One pure decision, made again whenever something changes. After "Can't Be Late" (Wu et al.,
NSDI 2024): spot VMs while there is slack, on-demand VMs when there is none. Added here:
fleets that grow and shrink by single VMs, several places with moving prices, a budget, and
the value of an example (``markets.spot_path``) in place of a fixed pace.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from spottrain.pricing.deadline import model, tuning
from spottrain.pricing.deadline.availability import availability
from spottrain.pricing.deadline.fallback import OnDemandFallback, on_demand_fallback
from spottrain.pricing.deadline.markets import (
    Markets,
    highest_step,
    markets,
    shares,
    spot_path,
)
from spottrain.pricing.deadline.outlook import (
    MarketOutlook,
    sample,
)
from spottrain.pricing.deadline.worst_case import WorstCase
from spottrain.units import HOUR_S

_CHANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Of shares of a full fleet that spot VMs may train, over which prices are averaged."""


def decide(
    status: model.JobStatus,
    fleet: model.Fleet,
    supplies: Sequence[model.Supply],
    holdings: Sequence[model.Holdings],
    outlook: MarketOutlook,
    *,
    cost_optimal: bool = True,
) -> model.FleetDecision:
    """Return what to have rented from now on.

    Args:
        status: Work, time and money that are left.
        fleet: What fleets train, and what changes cost.
        supplies: What can be had now, those that are held included.
        holdings: What is rented. VMs of a supply that is not listed above are returned.
        outlook: Samples of the market so far, see ``outlook.observe``.
        cost_optimal: Finish at the lowest cost; else as early as spot VMs permit, with no
            more on-demand VMs than the deadline needs.
    """
    return _Policy(status, fleet, supplies, holdings, outlook, cost_optimal).decide()


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Interchangeable VMs: of one supply, all held or all to be rented."""

    name: str
    """Of the supply."""
    spot: bool
    count: int
    usd_per_hour: float
    """Effective price of one VM: what interruptions waste is in it."""
    rank: float
    """The effective price, less a discount for what is held; the lowest comes first."""
    losses_per_hour: float
    """Of one VM."""
    is_held: bool


def _units(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield the candidate of every single VM, in the order of ``candidates``."""
    for candidate in candidates:
        yield from itertools.repeat(candidate, candidate.count)


class _Policy:
    """One decision."""

    def __init__(
        self,
        status: model.JobStatus,
        fleet: model.Fleet,
        supplies: Sequence[model.Supply],
        holdings: Sequence[model.Holdings],
        outlook: MarketOutlook,
        cost_optimal: bool,
    ) -> None:
        self.status, self.fleet, self.outlook = status, fleet, outlook
        self.cost_optimal = cost_optimal
        self.supplies = supplies
        self.holdings = {vms.name: vms for vms in holdings}
        self.fallback: OnDemandFallback = on_demand_fallback(status, fleet, supplies, holdings)
        examples = status.examples_left
        self.size = self.fallback.fastest(examples, status.usd_limit)
        train_s = self.fallback.train_s(self.size, examples)
        self.spare_s = status.left_s - train_s
        """Time left over if all on-demand VMs trained from now on."""
        self.slack_s = self.spare_s - self.fallback.start_s()
        self.margin_s = status.margin_s(fleet)
        self.slack_usd = self._slack_usd()
        self.worst_case = WorstCase(status, fleet, supplies, holdings)

    def decide(self) -> model.FleetDecision:
        status = self.status
        if status.examples_left <= 0:
            return self._answer((), "done", "all work is done")
        if status.deadline_s is None:
            return self._without_deadline()
        wanted = self._proposal()
        taken = self._survived(dict(wanted.wanted), self.worst_case.attempts_usd)
        if taken is None:
            # Slower or dearer than expected: what is left of the budget is for on demand.
            names = {supply.name for supply in self.supplies if not supply.spot}
            alone = {name: n for name, n in wanted.wanted if name in names}
            taken = self._survived(alone, status.usd_limit)
        if taken is None or taken == dict(wanted.wanted):
            return wanted
        spot = sum(taken.get(s.name, 0) for s in self.supplies if s.spot)
        return self._answer(
            taken,
            "edge" if spot else ("fallback" if taken else "wait"),
            f"slack {self.slack_s:.0f} s, ${self.slack_usd:.2f}: the loss of at most "
            f"{spot} spot VMs leaves time and money for on-demand VMs",
        )

    def _proposal(self) -> model.FleetDecision:
        """Return what to rent as far as the worst case allows it."""
        if not self.size:
            return self._without_fallback()
        if self.slack_s < self.margin_s:
            return self._near_deadline()
        if self.cost_optimal:
            return self._cost_optimal_fleet()
        return self._time_optimal_fleet()

    def _survived(self, wanted: dict[str, int], usd_limit: float) -> dict[str, int] | None:
        """Return the fleet nearest to this one that survives the worst case.

        Spot VMs are given up, new ones first; then on-demand VMs are added one by one, beside
        as many of the spot VMs as there is room for; else they are taken away. None: there
        is no such fleet, and not even on-demand VMs alone can be sure to keep the limits.
        """
        if not self.fallback.prices:
            return None

        def survives(fleet: dict[str, int]) -> bool:
            return self.worst_case.is_survived(fleet, usd_limit)

        if survives(wanted):
            return wanted
        held, new = self._spot_of(wanted)
        on_demand = sum(wanted.values()) - len(held) - len(new)
        more = range(on_demand, self.fallback.max_vms + 1)
        for count in (*more, *reversed(range(on_demand))):
            base = self.worst_case.on_demand(count)
            if not survives(base):
                continue
            spot = held + new[: max(0, self.fleet.max_vms - count - len(held))]
            few = bisect.bisect_left(
                range(1, len(spot) + 1),
                True,
                key=lambda n: not survives({**base, **Counter(spot[:n])}),
            )
            return {**base, **Counter(spot[:few])}
        return None

    def _spot_of(self, wanted: Mapping[str, int]) -> tuple[list[str], list[str]]:
        """Return the supply of each spot VM of a fleet, cheapest first: held and new ones."""
        held, new = list[str](), list[str]()
        for supply in sorted(self.supplies, key=lambda s: s.usd_per_hour):
            if supply.spot:
                mine = self.holdings.get(supply.name)
                count = wanted.get(supply.name, 0)
                kept = min(count, mine.rented if mine else 0)
                held += [supply.name] * kept
                new += [supply.name] * (count - kept)
        return held, new

    # --- How many spot VMs may be lost at once ---

    def _slack_usd(self) -> float:
        """Return money left over if on-demand VMs finish, boots of missing ones included."""
        usd_left, examples = self.status.usd_left, self.status.examples_left
        if usd_left is None:
            return math.inf
        if not self.size:
            return -math.inf
        size = self._fallback_size(self.fallback.start_s() + self.margin_s)
        return usd_left - self.fallback.usd(size, examples)

    def _fallback_size(self, start_s: float) -> int:
        """Return the cheapest on-demand fleet that is in time."""
        within_s = self.status.left_s - start_s
        return self.fallback.cheapest(self.status.examples_left, within_s) or self.size

    def _min_on_demand(self) -> int:
        """Return the fewest on-demand VMs with which all spot VMs may be lost at once.

        While replacements boot, the remaining VMs train on. A few more are taken than just
        enough, and kept until far fewer would do: every change is a pause.
        """
        rates = self.fleet.rates
        full = rates[self.size]
        spot = sum(candidate.count for candidate in self._candidates(on_demand=False))
        at_risk = max(1, min(tuning.CONSECUTIVE_LOSSES, spot))

        def fewest(spare_s: float) -> int:
            for kept in range(self.size):
                share = 1 - rates[kept] / full
                losses = min(at_risk, self.size - kept)
                if losses * self.fleet.loss_s + self.fallback.start_s() * share <= spare_s:
                    return kept
            return self.size

        trains = any(vms.ready for vms in self.holdings.values())
        if not trains and self.slack_s < self.fallback.start_s() + self.margin_s:
            return self.size  # no time to boot spot VMs that may be lost
        now = self.fallback.paid
        spare_s = self.spare_s - self.fleet.morph_s  # a pause may have begun just now
        needed = fewest(spare_s)
        ahead = fewest(spare_s - tuning.LOSSES_AHEAD * self.fleet.loss_s)
        return min(now, ahead) if needed <= now else ahead

    def _at_most(self, candidates: Sequence[Candidate], max_spot: int) -> list[Candidate]:
        """Return the candidates with so many spot VMs at most, the best."""
        kept = []
        for candidate in candidates:
            if candidate.spot:
                candidate = replace(candidate, count=min(candidate.count, max_spot))
                max_spot -= candidate.count
            if candidate.count:
                kept.append(candidate)
        return kept

    def _max_spot_by_losses(self, candidates: Sequence[Candidate], size: int) -> int:
        """Return how many of the best spot VMs lose no more time than slack allows."""
        if self.status.left_s <= 0:
            return 0
        allowed = self.spare_s / self.status.left_s * tuning.MAX_LOSSES_PER_SLACK
        spot = (candidate for candidate in _units(candidates) if candidate.spot)
        count = 0
        for candidate in itertools.islice(spot, size):
            allowed -= candidate.losses_per_hour / HOUR_S * self.fleet.loss_s
            if allowed < 0:
                break
            count += 1
        return count

    # --- Fleets, by situation ---

    def _without_deadline(self) -> model.FleetDecision:
        candidates = self._candidates(on_demand=self._needs_rate())
        return self._all_spot(candidates, 0, "there is no deadline")

    def _time_optimal_fleet(self) -> model.FleetDecision:
        if not self._has_cheap_spot():
            candidates = self._candidates(on_demand=True)
            taken = self._take(candidates, max(self.size, self._rate_size()))
            why = "no spot VM costs less than on demand"
            return self._answer(taken, "fallback", why)
        released = self.slack_s >= tuning.FALLBACK_RELEASE * self.margin_s
        kept = 0 if released else self.fallback.paid
        candidates = self._candidates(on_demand=kept > 0 or self._needs_rate())
        candidates = self._at_most(candidates, max(0, self.fleet.max_vms - kept))
        return self._all_spot(candidates, kept, f"slack {self.slack_s:.0f} s")

    def _has_cheap_spot(self) -> bool:
        """Return whether any spot supply costs less than on-demand VMs."""
        on_demand = min(self.fallback.prices, default=math.inf)
        return any(s.spot and s.usd_per_hour < on_demand for s in self.supplies)

    def _all_spot(
        self, candidates: Sequence[Candidate], kept: int, why: str
    ) -> model.FleetDecision:
        spot = sum(candidate.count for candidate in candidates if candidate.spot)
        if not kept:
            spot = min(spot, self.fleet.useful_vms)
        wanted = min(self.fleet.max_vms, max(spot + kept, self._rate_size()))
        if not wanted:
            return self._answer((), "wait", f"{why}: there are no spot VMs")
        taken = self._take(candidates, wanted)
        return self._answer(taken, "spot", f"{why}: all spot VMs that make it faster")

    def _without_fallback(self) -> model.FleetDecision:
        why = "there are no on-demand VMs"
        if self.fallback.prices:
            why = "on-demand VMs alone cannot finish within the budget"
        return self._answer(
            self._take(self._candidates(on_demand=False), self.fleet.useful_vms),
            "late" if self.fallback.prices else "spot",
            f"{why}: nothing can be guaranteed; all spot VMs that make it faster",
        )

    def _near_deadline(self) -> model.FleetDecision:
        size = self.size
        on_demand = self._min_on_demand()
        if not self.cost_optimal:
            on_demand = max(on_demand, min(size, self.fallback.paid))
        candidates = self._candidates(on_demand=True)
        spot = min(size - on_demand, self._max_spot_by_losses(candidates, size))
        candidates = self._at_most(candidates, spot)
        spot = sum(candidate.count for candidate in candidates if candidate.spot)
        if spot <= 0:
            all_train = self.fallback.ready >= self.size
            start_s = 0.0 if all_train else self.fallback.start_s()
            size = max(self._fallback_size(start_s), self.fallback.paid)
        taken = self._take(candidates, size)
        mode = "late" if self.spare_s < 0 else ("edge" if spot > 0 else "fallback")
        return self._answer(
            taken,
            mode,
            f"slack {self.slack_s:.0f} s, ${self.slack_usd:.2f}: at most {spot} spot VMs",
        )

    def _cost_optimal_fleet(self) -> model.FleetDecision:
        status, fleet = self.status, self.fleet
        present = sample(fleet, self.supplies, tuple(self.holdings.values()))
        left_s = status.left_s - self.fallback.start_s()
        left_s -= tuning.MARGIN_LOSSES * self.fleet.loss_s
        candidates = self._candidates(on_demand=True)
        seen = markets((*self.outlook.quotes, present), fleet, self.supplies)
        worth = self._worth(seen, left_s * (1 - self._paused_share(candidates)))
        wanted = max(self._worth_renting(candidates, worth), self._rate_size())
        mode = "pace" if wanted else "wait"
        return self._answer(
            self._take(candidates, wanted),
            mode,
            f"slack {self.slack_s:.0f} s; an example is worth ${worth:.3g}",
        )

    def _worth(self, seen: Markets, left_s: float) -> float:
        """Return the value of an example: the price of the last one that is bought.

        That is if the market goes on as it was. With little slack the price counts that is
        expected over how much spot VMs may train, if that is more: the job pays the most where
        they train the least.
        """
        prices, examples = self.fallback.prices, self.status.examples_left

        def worth(share: float | None = None) -> float:
            path = spot_path(seen, self.fleet, prices, examples, left_s, share)
            return path.usd_per_example

        usual = worth()
        if usual == math.inf or self.slack_s > tuning.CAUTION * self.status.left_s:
            return usual
        there = availability(shares(seen, self.fleet), left_s)
        most = highest_step(self.fleet, prices)
        found = [min(most, worth(share)) for share in there.quantiles(_CHANCES)]
        return max(usual, sum(found) / len(found))

    def _paused_share(self, candidates: Sequence[Candidate]) -> float:
        """Return the share of time that losses of the best VMs are expected to take."""
        best = itertools.islice(_units(candidates), self.size)
        losses_per_hour = sum(candidate.losses_per_hour for candidate in best)
        return min(tuning.MAX_PAUSED_SHARE, losses_per_hour / HOUR_S * self.fleet.loss_s)

    def _worth_renting(self, candidates: Sequence[Candidate], worth: float) -> int:
        """Return the largest size whose last step costs no more than its examples' worth."""
        best = list(itertools.islice(_units(candidates), self.fleet.max_vms))
        ready = sum(vms.ready for vms in self.holdings.values())
        rate = self.fleet.rates[min(ready, self.fleet.max_vms)]
        left = self.status.examples_left
        min_s = tuning.MIN_TRAINING_BOOTS * self.fleet.boot_s
        ending = rate > 0 and left / rate < min_s
        size = 0
        for few, many in itertools.pairwise(self.fleet.sizes):
            step = best[few:many]
            if len(step) < many - few:
                break
            if ending and not all(candidate.is_held for candidate in step):
                break
            usd = sum(self._asking_usd(candidate) for candidate in step) / HOUR_S
            limit = worth * (self.fleet.rates[many] - self.fleet.rates[few])
            if self._can_wait(step):
                limit *= 1 - tuning.ROUNDING
            if usd > limit:
                break
            size = many
        return size

    def _can_wait(self, step: Sequence[Candidate]) -> bool:
        """Return whether there is time to wait for spot VMs in place of new on-demand VMs.

        Only if they are just worth their price: waiting then costs nothing if the market
        goes on as it was, and saves money if spot VMs come back.
        """
        is_new = any(not candidate.spot and not candidate.is_held for candidate in step)
        return is_new and self.slack_s > tuning.PATIENCE * self.status.left_s

    def _asking_usd(self, candidate: Candidate) -> float:
        """Return the hourly price that a VM must be worth."""
        held = 1 + tuning.HOLD_PREMIUM if candidate.is_held else 1.0
        return candidate.usd_per_hour / held

    # --- min_examples_per_s ---

    def _needs_rate(self) -> bool:
        """Return whether ``min_examples_per_s`` calls for on-demand VMs, or keeps them."""
        minimum = self.status.min_examples_per_s
        recent = self.status.recent_examples_per_s
        if minimum is None:
            return False
        return self.fallback.paid > 0 or (recent is not None and recent < minimum)

    def _rate_size(self) -> int:
        """Return the size that ``min_examples_per_s`` needs; 0 if it is met anyway."""
        minimum = self.status.min_examples_per_s
        if minimum is None or not self._needs_rate():
            return 0
        rates = enumerate(self.fleet.rates)
        return next((n for n, rate in rates if rate >= minimum), self.fleet.max_vms)

    # --- Which VMs ---

    def _candidates(self, *, on_demand: bool) -> list[Candidate]:
        """Return the VMs that can be had or are held, the best first."""
        candidates = []
        for supply in self.supplies:
            if not (supply.spot or on_demand):
                continue
            usd = supply.effective_usd_per_hour(self.fleet)
            mine = self.holdings.get(supply.name)
            free = min(self.fleet.max_vms, supply.free(self.fleet))
            for count, is_held in ((mine.rented if mine else 0, True), (free, False)):
                if count > 0:
                    candidate = Candidate(
                        name=supply.name,
                        spot=supply.spot,
                        count=count,
                        usd_per_hour=usd,
                        rank=usd * (1 - tuning.SWITCH_DISCOUNT) if is_held else usd,
                        losses_per_hour=supply.losses_per_hour,
                        is_held=is_held,
                    )
                    candidates.append(candidate)
        return sorted(candidates, key=lambda candidate: candidate.rank)

    def _take(self, candidates: Sequence[Candidate], size: int) -> dict[str, int]:
        """Return the best VMs by supply, as many as the hourly cap allows."""
        limit = self.status.usd_per_hour_limit
        prices = {supply.name: supply.usd_per_hour for supply in self.supplies}
        taken: dict[str, int] = {}
        usd_per_hour = 0.0
        for candidate in itertools.islice(_units(candidates), size):
            usd_per_hour += prices[candidate.name]
            if usd_per_hour > limit:
                break
            taken[candidate.name] = taken.get(candidate.name, 0) + 1
        return self._keep_until_ready(taken, size, usd_per_hour)

    def _keep_until_ready(
        self, taken: dict[str, int], size: int, usd_per_hour: float
    ) -> dict[str, int]:
        """Keep VMs that train until their replacements train too."""
        ready = sum(
            min(count, self.holdings[name].ready)
            for name, count in taken.items()
            if name in self.holdings
        )
        limit = self.status.usd_per_hour_limit
        for supply in sorted(self.supplies, key=lambda s: s.usd_per_hour):
            mine = self.holdings.get(supply.name)
            if mine is None:
                continue
            while (
                ready < size
                and taken.get(supply.name, 0) < mine.ready
                and usd_per_hour + supply.usd_per_hour <= limit
            ):
                taken[supply.name] = taken.get(supply.name, 0) + 1
                usd_per_hour += supply.usd_per_hour
                ready += 1
        return taken

    def _answer(
        self, taken: dict[str, int] | tuple[()], mode: str, reason: str
    ) -> model.FleetDecision:
        return model.FleetDecision(
            wanted=tuple(sorted(dict(taken).items())),
            mode=mode,
            reason=reason,
            slack_s=self.slack_s,
            slack_usd=self.slack_usd,
        )
