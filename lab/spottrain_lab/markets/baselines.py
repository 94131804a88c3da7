"""The rules that a replay compares: the deadline policy and its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from spottrain.pricing.deadline.fallback import on_demand_fallback
from spottrain.pricing.deadline.model import (
    Beginning,
    FleetDecision,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import MarketOutlook, observe
from spottrain.pricing.deadline.policy import decide
from spottrain_lab.markets.replay import ON_DEMAND, REVIEW_S, MarketView
from spottrain_lab.markets.scenarios import Scenario
from spottrain_lab.traces import look_ahead


def job_status(view: MarketView) -> JobStatus:
    """Return the status of the job of a replay."""
    return JobStatus(
        now_s=view.now_s,
        deadline_s=view.scenario.deadline_s,
        examples_left=view.examples_left,
        paused_s=view.paused_s,
        begun=Beginning(examples=view.scenario.examples, usd_spent=view.usd_spent),
        usd_left=view.usd_left,
        review_s=REVIEW_S,
    )


class CostOptimal:
    """The deadline policy at the lowest cost."""

    name = "cost-optimal"
    cost_optimal = True

    def __init__(self) -> None:
        self.outlook = MarketOutlook()
        self.decision: FleetDecision | None = None

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the VMs that the policy wants, by supply."""
        fleet = view.scenario.fleet
        self.outlook = observe(self.outlook, view.now_s, fleet, view.supplies, view.holdings)
        decision = decide(
            job_status(view),
            fleet,
            view.supplies,
            view.holdings,
            self.outlook,
            cost_optimal=self.cost_optimal,
        )
        self.decision = decision
        return dict(decision.wanted)


class TimeOptimal(CostOptimal):
    """The deadline policy at the earliest finish."""

    name = "time-optimal"
    cost_optimal = False


class OnDemandOnly:
    """The cheapest on-demand fleet that is in time."""

    name = "on-demand only"

    def __init__(self) -> None:
        self.size: int | None = None

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the same size throughout."""
        if self.size is None:
            base = on_demand_fallback(job_status(view), view.scenario.fleet, view.supplies, ())
            within_s = view.scenario.deadline_s - base.start_s()
            self.size = base.cheapest(view.examples_left, within_s) or base.max_vms
        return {ON_DEMAND: self.size}


class SpotOnlyWait:
    """As many spot VMs as there are, the cheapest first; else it waits."""

    name = "spot only, wait"

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the VMs that are held, and free ones up to the maximum."""
        return _fill(view, view.supplies)


class GreedyFailover(SpotOnlyWait):
    """Spot first, on-demand VMs at once for the rest, as managed jobs of today's tools do.

    An on-demand VM is kept: such jobs go back to spot only when they are interrupted.
    """

    name = "greedy failover"

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return spot VMs, and on-demand VMs for the rest."""
        kept = {vms.name: vms.rented for vms in view.holdings}
        max_vms = view.scenario.fleet.max_vms - kept.get(ON_DEMAND, 0)
        spot = _fill(view, view.supplies, max_vms)
        missing = max_vms - sum(spot.values())
        return spot | {ON_DEMAND: kept.get(ON_DEMAND, 0) + missing}


class UniformProgress:
    """Uniform Progress of "Can't Be Late" (NSDI 2024, section 4.3), for a whole fleet.

    Spot while there is any; on demand while there is none and the job is behind uniform
    progress, until it is ahead by two changeovers; on demand to the end in the end.
    """

    name = "uniform progress"

    def __init__(self) -> None:
        self.behind = self.last = False

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return a fleet of spot VMs, one on demand, or none."""
        scenario, fleet = view.scenario, view.scenario.fleet
        change_s = fleet.boot_s + fleet.morph_s
        rate = fleet.rates[-1]
        pace = scenario.examples / scenario.deadline_s
        done = scenario.examples - view.examples_left
        left_s = scenario.deadline_s - view.now_s
        if left_s < view.examples_left / rate + 2 * change_s + REVIEW_S:
            self.last = True
        spot = _fill(view, view.supplies)
        missing = fleet.max_vms - sum(spot.values())
        if self.last:
            return {ON_DEMAND: fleet.max_vms}
        ahead_s = 2 * change_s if self.behind else 0.0
        self.behind = missing > 0 and done < pace * (view.now_s + ahead_s)
        return spot | {ON_DEMAND: missing if self.behind else 0}


class Redundancy(SpotOnlyWait):
    """Spot only, every VM able to do its neighbour's work, as Bamboo (NSDI 2023) does.

    No work is lost with a VM. A forward, its recomputation and its backward take as long as
    four forwards, and the neighbour's forward is a fifth. To the rule's favour: twice the
    state needs no more VMs, and no two neighbours are lost at once.
    """

    name = "redundancy"
    speed = 4 / 5

    @classmethod
    def scenario(cls, scenario: Scenario) -> Scenario:
        """Return the scenario with the fleet of redundant VMs."""
        fleet = scenario.fleet
        rates = tuple(rate * cls.speed for rate in fleet.examples_per_s)
        fleet = replace(fleet, examples_per_s=rates, lost_s=0.0)
        return replace(scenario, fleet=fleet)


class LookAhead(SpotOnlyWait):
    """Spot only, the fleet that trains most in the next 12 minutes, as Parcae (NSDI 2024).

    The number of VMs that can be had is forecast from that of the last 12 minutes; a VM
    is rented only if it makes up for the pause in which it joins within the next 12.
    """

    name = "12-minute look-ahead"

    def __init__(self) -> None:
        self.counts: list[tuple[float, int]] = []

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the VMs that are held, and as many more as will pay."""
        held = sum(vms.rented for vms in view.holdings)
        ready = sum(vms.ready for vms in view.holdings)
        full = _fill(view, view.supplies)
        possible = sum(full.values())
        if not self.counts or self.counts[-1][1] != possible:
            self.counts.append((view.now_s, possible))
        if possible == held:
            return full
        samples = look_ahead.sampled(self.counts, view.now_s)
        coming = look_ahead.predicted(samples)
        sizes = range(max(held, 1), possible + 1)
        best = max(sizes, key=lambda vms: self._examples(view, coming, ready, vms))
        return _fill(view, view.supplies, best)

    @staticmethod
    def _examples(view: MarketView, coming: Sequence[int], ready: int, vms: int) -> float:
        """Return what a fleet trains while so many VMs are there."""
        fleet, interval_s = view.scenario.fleet, look_ahead.INTERVAL_S
        done = at_s = 0.0
        ready_at_s = 0.0 if vms == ready else fleet.boot_s
        before = vms
        for count in coming:
            at_s += interval_s
            now = min(vms, count)
            trains_s = interval_s
            if ready_at_s > 0 and at_s > ready_at_s >= at_s - interval_s:
                trains_s -= fleet.morph_s
            if now < before:
                trains_s -= fleet.morph_s + fleet.lost_s
            size = now if at_s > ready_at_s else min(ready, now)
            done += fleet.rates[size] * max(0.0, trains_s)
            before = now
        return done


def _fill(
    view: MarketView, supplies: Sequence[Supply], max_vms: int | None = None
) -> dict[str, int]:
    """Return the spot VMs that are held, and more of them, the cheapest first."""
    holdings = {vms.name: vms.rented for vms in view.holdings}
    spot = sorted((s for s in supplies if s.spot), key=lambda s: s.usd_per_hour)
    wanted = {supply.name: holdings.get(supply.name, 0) for supply in spot}
    missing = (view.scenario.fleet.max_vms if max_vms is None else max_vms) - sum(wanted.values())
    for supply in spot:
        more = max(0, min(missing, supply.available or 0))
        wanted[supply.name] += more
        missing -= more
    return wanted


RULES: tuple[type[CostOptimal | OnDemandOnly | SpotOnlyWait | UniformProgress], ...] = (
    CostOptimal,
    TimeOptimal,
    OnDemandOnly,
    SpotOnlyWait,
    GreedyFailover,
    UniformProgress,
    LookAhead,
    Redundancy,
)
"""The deadline policy first: cost-optimal, then time-optimal."""
