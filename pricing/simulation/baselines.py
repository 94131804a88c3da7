"""What the promise's policy is compared with, and the policy itself in the same harness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spottrain.pricing.deadline.fallback import on_demand_fallback
from spottrain.pricing.deadline.model import FleetDecision, JobStatus, Supply
from spottrain.pricing.deadline.outlook import MarketOutlook, observe
from spottrain.pricing.deadline.policy import decide
from spottrain.pricing.simulation.replay import ON_DEMAND, REVIEW_S, MarketView


def job_status(view: MarketView) -> JobStatus:
    """Return where the job of a replay stands."""
    return JobStatus(
        now_s=view.now_s,
        deadline_s=view.scenario.deadline_s,
        examples_left=view.examples_left,
        usd_left=view.usd_left,
        review_s=REVIEW_S,
    )


class CostOptimal:
    """``promise.decide``."""

    name = "promise"
    cost_optimal = True

    def __init__(self) -> None:
        self.outlook = MarketOutlook()
        self.decision: FleetDecision | None = None

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return what the policy wants."""
        fleet = view.scenario.fleet
        rented = {vms.name: vms.ready + vms.booting for vms in view.holdings}
        self.outlook = observe(self.outlook, view.now_s, fleet, view.supplies, rented)
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
    """``promise.decide`` for a job that is to be done soon."""

    name = "promise, in haste"
    cost_optimal = False


class OnDemandOnly:
    """The cheapest fleet of on-demand VMs that is in time."""

    name = "on-demand only"

    def __init__(self) -> None:
        self.size: int | None = None

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the same size throughout."""
        if self.size is None:
            base = on_demand_fallback(
                job_status(view), view.scenario.fleet, view.supplies, ()
            )
            within_s = view.scenario.deadline_s - base.start_s()
            self.size = base.cheapest(view.examples_left, within_s) or base.most
        return {ON_DEMAND: self.size}


class SpotOnlyWait:
    """Spot VMs, as many as may be, in the cheapest places; else it waits."""

    name = "spot only, wait"

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return what is held, and what is free up to the most."""
        return _fill(view, view.supplies)


class GreedyFailover(SpotOnlyWait):
    """Today's tools: what spot lacks is rented on demand at once, spot is tried first.

    An on-demand VM is kept: managed jobs go back to spot only when they are interrupted.
    """

    name = "greedy failover"

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return spot VMs, and on-demand VMs for the rest."""
        kept = {vms.name: vms.ready + vms.booting for vms in view.holdings}
        most = view.scenario.fleet.most - kept.get(ON_DEMAND, 0)
        spot = _fill(view, view.supplies, most)
        missing = most - sum(spot.values())
        return spot | {ON_DEMAND: kept.get(ON_DEMAND, 0) + missing}


class UniformProgress:
    """ "Can't Be Late" (NSDI 2024, section 4.3) for the whole fleet at once.

    Spot while it is there; on demand while it is not and the job is behind an even pace,
    until it is ahead by two changeovers; on demand to the end when time runs out.
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
        missing = fleet.most - sum(spot.values())
        if self.last:
            return {ON_DEMAND: fleet.most}
        ahead_s = 2 * change_s if self.behind else 0.0
        self.behind = missing > 0 and done < pace * (view.now_s + ahead_s)
        return spot | {ON_DEMAND: missing if self.behind else 0}


def _fill(
    view: MarketView, supplies: Sequence[Supply], most: int | None = None
) -> dict[str, int]:
    """Return what is held of spot, and more of it, the cheapest first."""
    holdings = {vms.name: vms.ready + vms.booting for vms in view.holdings}
    spot = sorted((s for s in supplies if s.spot), key=lambda s: s.usd_per_hour)
    wanted = {supply.name: holdings.get(supply.name, 0) for supply in spot}
    missing = (view.scenario.fleet.most if most is None else most) - sum(
        wanted.values()
    )
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
)
"""Ours first: thrifty, and in haste."""
