"""The rules that a replay compares: the deadline policy and its baselines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spottrain.pricing.deadline.fallback import on_demand_fallback
from spottrain.pricing.deadline.model import (
    Beginning,
    FleetDecision,
    JobStatus,
    Supply,
)
from spottrain.pricing.deadline.outlook import MarketOutlook, observe
from spottrain.pricing.deadline.policy import decide
from spottrain.pricing.simulation.replay import ON_DEMAND, REVIEW_S, MarketView


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
        self.outlook = observe(
            self.outlook, view.now_s, fleet, view.supplies, view.holdings
        )
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
            base = on_demand_fallback(
                job_status(view), view.scenario.fleet, view.supplies, ()
            )
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


def _fill(
    view: MarketView, supplies: Sequence[Supply], max_vms: int | None = None
) -> dict[str, int]:
    """Return the spot VMs that are held, and more of them, the cheapest first."""
    holdings = {vms.name: vms.rented for vms in view.holdings}
    spot = sorted((s for s in supplies if s.spot), key=lambda s: s.usd_per_hour)
    wanted = {supply.name: holdings.get(supply.name, 0) for supply in spot}
    missing = (view.scenario.fleet.max_vms if max_vms is None else max_vms) - sum(
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
"""The deadline policy first: cost-optimal, then time-optimal."""
