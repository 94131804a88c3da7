"""How to keep a deadline within a budget, cheaply: one pure decision, asked again and again.

After "Can't Be Late" (Wu et al., NSDI 2024): spot VMs while there is time, on-demand VMs
when there is none. Added here: fleets that grow and shrink a VM at a time, several places
with prices that move, a budget, and what an example is worth (``promise_outlook``) in
place of a fixed pace.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from spottrain.pricing.deadline.candidates import Candidate, candidates_of, units
from spottrain.pricing.deadline.fallback import OnDemandFallback, on_demand_fallback
from spottrain.pricing.deadline.model import (
    Fleet,
    FleetDecision,
    Holdings,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import MarketOutlook, market_of, spot_path
from spottrain.units import HOUR_S

PATIENCE = 0.0
"""Share by which on-demand VMs must be worth more than they cost before they are rented
ahead of the edge: spot VMs may come."""
DROP = 0.25
"""Share by which VMs that are held may be dearer than examples are worth."""
CALM = 1.0
"""Losses that are to pass before more on-demand VMs are needed near the deadline."""
IN_A_ROW = 3
"""Losses one after the other that the edge must bear: replacements may go as well."""
CHURN = 2.0
"""Times that the losses to expect may eat up the slack before the deadline: they often
come together, and slack may grow."""
AGAIN = 3.0
"""On-demand VMs of a job in haste stay until slack is so many times what called them."""
ENDGAME = 3.0
"""No VMs are rented that would train for less than so many boot times."""


def decide(
    status: JobStatus,
    fleet: Fleet,
    supplies: Sequence[Supply],
    holdings: Sequence[Holdings],
    outlook: MarketOutlook,
    *,
    cost_optimal: bool = True,
) -> FleetDecision:
    """Return what to have rented from now on.

    Args:
        status: Work, time and money that are left.
        fleet: What fleets train, and what changes cost.
        supplies: What can be had now, those that are held included.
        holdings: What is rented. A supply of theirs that is missing above is given back.
        outlook: What the market has been, see ``promise_outlook.look``.
        cost_optimal: Whether to be done for as little as can be; else as soon as spot VMs
            permit, with no more on-demand VMs than the promise needs.
    """
    return _Case(status, fleet, supplies, holdings, outlook, cost_optimal).decide()


class _Case:
    """One decision."""

    def __init__(
        self,
        status: JobStatus,
        fleet: Fleet,
        supplies: Sequence[Supply],
        holdings: Sequence[Holdings],
        outlook: MarketOutlook,
        cost_optimal: bool,
    ) -> None:
        self.status, self.fleet, self.outlook = status, fleet, outlook
        self.cost_optimal = cost_optimal
        self.supplies = supplies
        self.holdings = {vms.name: vms for vms in holdings}
        self.fallback: OnDemandFallback = on_demand_fallback(
            status, fleet, supplies, holdings
        )
        examples = status.examples_left
        self.size = self.fallback.fastest(examples, status.usd_left)
        train_s = self.fallback.train_s(self.size, examples)
        self.spare_s = status.left_s - train_s
        """Time that is left over if on-demand VMs trained from now on."""
        self.slack_s = self.spare_s - self.fallback.start_s()
        self.jolt_s = 2 * fleet.morph_s + fleet.lost_s
        """What a loss takes: the pause, the replacement's pause, lost work."""
        self.margin_s = 2 * self.jolt_s + status.review_s
        """With less slack nothing is left to chance."""
        self.slack_usd = self._slack_usd()

    def decide(self) -> FleetDecision:
        status = self.status
        if status.examples_left <= 0:
            return self._answer((), "done", "nothing is left to do")
        if status.deadline_s is None:
            return self._without_deadline()
        if not self.size:
            return self._without_net()
        short = self.slack_s < self.margin_s
        if short or self.slack_usd < 2 * self._jolt_usd():
            return self._edge()
        return self._pace() if self.cost_optimal else self._haste()

    # --- How many spot VMs may be lost at once ---

    def _slack_usd(self) -> float:
        """Return what is left over if on-demand VMs finish, those booted that lack."""
        usd_left, examples = self.status.usd_left, self.status.examples_left
        if usd_left is None:
            return math.inf
        if not self.size:
            return -math.inf
        size = self._net_size(self.fallback.start_s() + self.margin_s)
        return usd_left - self.fallback.usd(size, examples)

    def _net_size(self, start_s: float) -> int:
        """Return the cheapest size on demand that is in time."""
        within_s = self.status.left_s - start_s
        return self.fallback.cheapest(self.status.examples_left, within_s) or self.size

    def _jolt_usd(self) -> float:
        """Return what a loss costs with the whole fleet on demand."""
        return sum(self.fallback.prices[: self.size]) * self.jolt_s / HOUR_S

    def _least_on_demand(self) -> int:
        """Return the fewest on-demand VMs with which all others may be lost at once.

        While their replacements boot, those that are left train on. A few more are taken
        than just enough, and kept until far fewer would do: every change is a pause.
        """
        rates = self.fleet.rates
        full = rates[self.size]
        spot = sum(candidate.count for candidate in self._lots(on_demand=False))
        at_risk = max(1, min(IN_A_ROW, spot))

        def least(spare_s: float) -> int:
            for kept in range(self.size):
                share = 1 - rates[kept] / full
                losses = min(at_risk, self.size - kept)
                if losses * self.jolt_s + self.fallback.start_s() * share <= spare_s:
                    return kept
            return self.size

        cold = not any(vms.ready for vms in self.holdings.values())
        if cold and self.slack_s < self.fallback.start_s() + self.margin_s:
            return self.size  # there is no time for a boot in vain
        now = self.fallback.paid
        spare_s = self.spare_s - self.fleet.morph_s  # a pause may have begun just now
        must, calm = least(spare_s), least(spare_s - CALM * self.jolt_s)
        return min(now, calm) if must <= now else calm

    def _bearable(self, candidates: Sequence[Candidate], most: int) -> list[Candidate]:
        """Return the lots without the spot VMs whose loss would break the promise.

        All of them may be lost at once, those that boot without having trained at all:
        the money for on-demand VMs must be left then, a new boot included.

        Args:
            candidates: What there is, the best first.
            most: Spot VMs at the most.
        """
        boot_h = self.fleet.boot_s / HOUR_S
        held_usd = self.slack_usd - self._jolt_usd()
        for supply in self.supplies:
            if supply.spot and supply.name in self.holdings and held_usd < math.inf:
                booting = self.holdings[supply.name].booting
                held_usd -= booting * supply.usd_per_hour * boot_h
        new_usd = held_usd - self._jolt_usd()
        again_usd = self.fallback.prices[-1] * boot_h if self.fallback.prices else 0.0
        unpaid = self.size - min(self.size, self.fallback.paid)
        kept = []
        for candidate in candidates:
            if not candidate.spot:
                kept.append(candidate)
                continue
            usd = 0.0 if candidate.is_held else candidate.usd_per_hour * boot_h
            count = 0
            while count < min(candidate.count, most):
                costs = usd + (0.0 if unpaid > 0 else again_usd)
                if costs > (held_usd if candidate.is_held else new_usd):
                    break
                held_usd -= costs
                new_usd -= costs
                unpaid -= 1
                count += 1
            most -= count
            if count:
                kept.append(
                    candidate
                    if count == candidate.count
                    else replace(candidate, count=count)
                )
        return kept

    def _calm_enough(self, candidates: Sequence[Candidate], size: int) -> int:
        """Return how many of the best spot VMs lose less time than there is to lose."""
        if self.status.left_s <= 0:
            return 0
        allowed = self.spare_s / self.status.left_s * CHURN
        spot = (candidate for candidate in units(candidates) if candidate.spot)
        count = 0
        for candidate in itertools.islice(spot, size):
            allowed -= candidate.losses_per_hour / HOUR_S * self.jolt_s
            if allowed < 0:
                break
            count += 1
        return count

    # --- Modes ---

    def _without_deadline(self) -> FleetDecision:
        candidates = self._lots(on_demand=self._needs_rate())
        return self._hasten(candidates, 0, "there is no deadline")

    def _haste(self) -> FleetDecision:
        if not self._has_bargains():
            candidates = self._bearable(self._lots(on_demand=True), self.fleet.most)
            taken = self._take(candidates, max(self.size, self._rate_size()))
            return self._answer(taken, "net", "no spot VM costs less than on demand")
        kept = self.fallback.paid if self.slack_s < AGAIN * self.margin_s else 0
        candidates = self._lots(on_demand=kept > 0 or self._needs_rate())
        candidates = self._bearable(candidates, max(0, self.fleet.most - kept))
        return self._hasten(candidates, kept, f"slack {self.slack_s:.0f} s")

    def _has_bargains(self) -> bool:
        """Whether spot VMs may come that cost less than on-demand VMs."""
        dear = self.fallback.prices[0] if self.fallback.prices else math.inf
        return any(s.spot and s.usd_per_hour < dear for s in self.supplies)

    def _hasten(
        self, candidates: Sequence[Candidate], kept: int, why: str
    ) -> FleetDecision:
        spot = sum(candidate.count for candidate in candidates if candidate.spot)
        wanted = min(self.fleet.most, max(spot + kept, self._rate_size()))
        if not wanted:
            return self._answer((), "wait", f"{why}: there are no spot VMs")
        taken = self._take(candidates, wanted)
        return self._answer(taken, "spot", f"{why}: all the spot VMs that there are")

    def _without_net(self) -> FleetDecision:
        why = "there are no on-demand VMs"
        if self.fallback.prices:
            why = "on-demand VMs alone cannot finish within the budget"
        return self._answer(
            self._take(self._lots(on_demand=False), self.fleet.most),
            "late" if self.fallback.prices else "spot",
            f"{why}: nothing can be promised; all the spot VMs that there are",
        )

    def _edge(self) -> FleetDecision:
        size = self.size
        least = self._least_on_demand()
        if not self.cost_optimal:
            least = max(least, min(size, self.fallback.paid))
        candidates = self._lots(on_demand=True)
        spot = min(size - least, self._calm_enough(candidates, size))
        candidates = self._bearable(candidates, spot)
        spot = min(
            spot, sum(candidate.count for candidate in candidates if candidate.spot)
        )
        if spot <= 0:
            start_s = (
                self.fallback.start_s() if self.fallback.ready < self.size else 0.0
            )
            size = max(self._net_size(start_s), self.fallback.paid)
        taken = self._take(candidates, size)
        mode = "late" if self.spare_s < 0 else ("edge" if spot > 0 else "net")
        return self._answer(
            taken,
            mode,
            f"slack {self.slack_s:.0f} s, ${self.slack_usd:.2f}: at most {spot} spot VMs",
        )

    def _pace(self) -> FleetDecision:
        status, fleet = self.status, self.fleet
        rented = {n: vms.ready + vms.booting for n, vms in self.holdings.items()}
        present = market_of(fleet, self.supplies, rented)
        left_s = status.left_s - self.fallback.start_s() - 2 * self.jolt_s
        candidates = self._lots(on_demand=True)
        worth = spot_path(
            self.outlook,
            present,
            fleet,
            self.fallback.prices,
            status.examples_left,
            left_s * (1 - self._paused_share(candidates)),
        ).usd_per_example
        most = (
            fleet.most if worth < math.inf else self._calm_enough(candidates, self.size)
        )
        candidates = self._bearable(candidates, most)
        wanted = max(self._worth_renting(candidates, worth), self._rate_size())
        mode = "pace" if wanted else "wait"
        return self._answer(
            self._take(candidates, wanted),
            mode,
            f"slack {self.slack_s:.0f} s; an example is worth ${worth:.3g}",
        )

    def _paused_share(self, candidates: Sequence[Candidate]) -> float:
        """Return the share of time that losses of the best fleet will take."""
        best = itertools.islice(units(candidates), self.size)
        losses_per_hour = sum(candidate.losses_per_hour for candidate in best)
        return min(0.5, losses_per_hour / HOUR_S * self.jolt_s)

    def _worth_renting(self, candidates: Sequence[Candidate], worth: float) -> int:
        """Return the largest size whose last step costs no more than it is worth."""
        best = list(itertools.islice(units(candidates), self.fleet.most))
        ready = sum(vms.ready for vms in self.holdings.values())
        rate = self.fleet.rates[min(ready, self.fleet.most)]
        left = self.status.examples_left
        ending = rate > 0 and left / rate < ENDGAME * self.fleet.boot_s
        size = 0
        for few, many in itertools.pairwise(self.fleet.sizes):
            step = best[few:many]
            if len(step) < many - few:
                break
            if ending and not all(candidate.is_held for candidate in step):
                break
            usd = sum(self._asked(candidate) for candidate in step) / HOUR_S
            if usd > worth * (self.fleet.rates[many] - self.fleet.rates[few]):
                break
            size = many
        return size

    def _asked(self, candidate: Candidate) -> float:
        """Return the price that a VM must be worth."""
        if candidate.is_held:
            return candidate.usd_per_hour / (1 + DROP)
        return candidate.usd_per_hour * (1 if candidate.spot else 1 + PATIENCE)

    # --- The least rate ---

    def _needs_rate(self) -> bool:
        """Whether on-demand VMs are needed for, or kept by, the least rate."""
        least = self.status.min_examples_per_s
        recent = self.status.recent_examples_per_s
        if least is None:
            return False
        return self.fallback.paid > 0 or (recent is not None and recent < least)

    def _rate_size(self) -> int:
        """Return the size that the least rate asks for; 0 if it is kept anyway."""
        least = self.status.min_examples_per_s
        if least is None or not self._needs_rate():
            return 0
        rates = enumerate(self.fleet.rates)
        return next((n for n, rate in rates if rate >= least), self.fleet.most)

    # --- What to take ---

    def _lots(self, *, on_demand: bool) -> list[Candidate]:
        """Return the VMs that may be had or are held, the best first."""
        wanted = [supply for supply in self.supplies if supply.spot or on_demand]
        return candidates_of(wanted, self.holdings, self.fleet)

    def _take(self, candidates: Sequence[Candidate], size: int) -> dict[str, int]:
        """Return the best VMs by supply, as many as the cap of an hour's price bears."""
        cap = self.status.usd_per_hour_cap
        prices = {supply.name: supply.usd_per_hour for supply in self.supplies}
        taken: dict[str, int] = {}
        usd_per_hour = 0.0
        for candidate in itertools.islice(units(candidates), size):
            usd_per_hour += prices[candidate.name]
            if cap is not None and usd_per_hour > cap * (1 + 1e-9):
                break
            taken[candidate.name] = taken.get(candidate.name, 0) + 1
        return self._keep_until_ready(taken, size, usd_per_hour)

    def _keep_until_ready(
        self, taken: dict[str, int], size: int, usd_per_hour: float
    ) -> dict[str, int]:
        """Keep VMs that train until those that replace them do so too."""
        ready = sum(
            min(count, self.holdings[name].ready)
            for name, count in taken.items()
            if name in self.holdings
        )
        cap = self.status.usd_per_hour_cap
        limit = math.inf if cap is None else cap * (1 + 1e-9)
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
    ) -> FleetDecision:
        return FleetDecision(
            wanted=tuple(sorted(dict(taken).items())),
            mode=mode,
            reason=reason,
            slack_s=self.slack_s,
            slack_usd=self.slack_usd,
        )
