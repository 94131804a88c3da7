"""Estimates in a plan: of a job's model, what they rest on, and what would change them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from spottrain.pricing.prices.catalogue import catalogue
from spottrain.pricing.ranking.estimate import estimated_profile, rests_on
from spottrain.pricing.ranking.gpu_speed import peak_flops
from spottrain.pricing.ranking.rank import RankedOffer, Ranking, RankingTerms, worth_of
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.units import HOUR_S
from spottrain.varuna_manager.config.job import JobConfig
from spottrain.varuna_manager.format import dollars, duration
from spottrain.wire.model import ModelFacts, Profile

NO_END = 1e15
"""Examples of a job without an end: what is paid once does not count."""
ERROR = 1.3
"""By how much published runs took longer or shorter than estimated, at most:
docs/estimates.md."""
MORE_LOSSES = 10
"""How many times as often an offer may be lost, to show what its losses matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """What training may cost and take; None: no limit."""

    max_usd: float | None = None
    max_hours: float | None = None

    def exceeded(self, usd: float, hours: float, steps: int) -> list[str]:
        """Return which of them something exceeds, each in one line.

        Args:
            usd: What it costs.
            hours: What it takes.
            steps: Mini-batches of the whole job.
        """
        found = []
        if self.max_usd is not None and usd > self.max_usd:
            found.append(f"{money_ends(self.max_usd, usd, steps)}; spend more or train fewer steps")
        if self.max_hours is not None and hours > self.max_hours:
            found.append(
                f"time ends at step {int(steps * self.max_hours / hours):,} of {steps:,}: it takes "
                f"{duration(hours * HOUR_S)}, longer than {duration(self.max_hours * HOUR_S)}; give "
                "it more time, more GPUs or fewer steps"
            )
        return found


def money_ends(max_usd: float, usd: float, steps: int) -> str:
    """Return in words at which step a budget is spent."""
    return (
        f"the money ends at step {int(steps * max_usd / usd):,} of {steps:,}: the plan costs "
        f"{dollars(usd)}, more than {dollars(max_usd)}"
    )


NO_LIMITS = PlanLimits()


def estimate(config: JobConfig, facts: ModelFacts) -> Profile:
    """Return the estimated profile of a model on the GPUs that its job may rent.

    On any of them: ``priced_offer`` knows how fast the others are.

    Raises:
        ConfigError: The peak of none is published at the job's precision.
    """
    gpus = [kind.gpu for cloud in config.clouds for kind in cloud.machines()]
    known = [gpu for gpu in gpus if peak_flops(gpu, facts, config.precision)]
    profile = estimated_profile(
        facts, (known or gpus)[0], config.precision, config.microbatch_sizes, config.loader_spec
    )
    return replace(profile, sequence_parallel=config.runtime.sequence_parallel)


def doubts(
    profile: Profile,
    gpu: str,
    best: RankedOffer,
    ranking: Ranking,
    throughputs: ThroughputCache,
    terms: RankingTerms,
) -> dict[str, Any]:
    """Return what an estimate rests on, and what would change it; nothing if measured.

    Args:
        profile: Of the model.
        gpu: What the best offer computes on.
        best: Its row.
        throughputs: Of fleets.
        terms: What they were ranked by.
    """
    if profile.origin != "estimated" or terms.examples >= NO_END:
        return {}
    priced, fleet, machine = best.priced, best.throughput, best.priced.machine
    assert machine is not None
    assert fleet is not None
    kind = priced.offer.cloud, priced.offer.instance_type
    slower = replace(terms, corrections={kind: 1 / ERROR})
    cases = [
        (f"{ERROR - 1:.0%} slower than estimated", fleet, priced, slower),
        (
            f"{MORE_LOSSES} times as many losses",
            fleet,
            replace(priced, losses_per_hour=MORE_LOSSES * priced.losses_per_hour),
            terms,
        ),
    ]
    on_demand = [
        row.priced
        for row in ranking.rows
        if (row.priced.offer.cloud, row.priced.offer.instance_type) == kind
        and not row.priced.offer.spot
    ]
    if priced.offer.spot and on_demand:
        cheapest = min(on_demand, key=lambda one: one.offer.usd_per_hour)
        cases.append(("on demand", fleet, cheapest, terms))
    for name, vms in (("half", best.vms // 2), ("twice", 2 * best.vms)):
        larger = throughputs.of(machine, vms) if vms else None
        if larger is not None and not larger.why_not and larger.examples_per_s:
            cases.append((f"{name} as many VMs ({vms})", larger, priced, terms))
    rows = [(words, worth_of(of, at, by)) for words, of, at, by in cases]
    within_vm = throughputs.profile_on([machine]).within_vm if machine.gpus > 1 else None
    return {
        "rests_on": list(rests_on(catalogue().gpus[gpu], within_vm)),
        "changes": [
            {
                "change": words,
                "hours": terms.examples / worth.net_examples_per_s / HOUR_S,
                "usd": worth.usd,
            }
            for words, worth in rows
        ],
    }
