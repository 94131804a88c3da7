"""Ranks offers by examples per dollar, interruptions counted.

The throughput of this very job on a fleet of each offer, divided by what that fleet costs
until the job is done: boot, work that interruptions waste, storage and egress included
(after Narayanan's dissertation, chapter 6, which divides throughput by price alone).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.adapt.checkpointing import PRIOR_COST_S, interval_s
from spottrain.morphing.adapt.policy import slowdown
from spottrain.pricing.billing import egress
from spottrain.pricing.billing.money import FREE, Rate, is_amount
from spottrain.pricing.billing.terms import EXACT as EXACT_BILLING
from spottrain.pricing.billing.terms import TERMS
from spottrain.pricing.prices.hazard import Basis
from spottrain.pricing.prices.place import Place, offer_key, place_of
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.pricing.ranking.order import preference
from spottrain.pricing.ranking.throughput import (
    FleetThroughput,
    ThroughputCache,
)
from spottrain.units import GB_BYTES, HOUR_S, MONTH_H, counted

CAP = "budget.max_usd_per_hour"  # Reasons that name the hourly cap begin so.
LEAST_OBTAINABLE = 0.1
"""The lowest score of EC2; as a probability it bounds the boots in vain."""
EXACT = 6
"""Rows whose plan is computed, unless more are asked for; the others keep bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An offer, its machine as the planner sees it, and how often it is interrupted."""

    offer: Offer
    machine: MachineShape | None
    """None: its speed is unknown."""
    losses_per_hour: float = 0.0
    """Interruptions of one VM to expect."""
    losses_basis: Basis = "assumed"
    """What they rest on."""
    obtainability: float | None = None
    """Likelihood that a request for it is fulfilled, from 0 to 1; None: not known."""
    boot_s: float = 0.0
    """From paying to training."""
    max_vms: int | None = None
    """VMs that can be rented, by capacity or quota; None: not known."""
    is_estimate: bool = False
    """True if its throughput comes from declared ratios, not from a measurement."""
    is_stale: bool = False
    """True if its price is too old to rent by."""
    is_dated: bool = False
    """True if its price is as old, or an estimate, but nothing newer is known of that cloud:
    enough for a plan."""

    @property
    def place(self) -> Place:
        """Where and what it is."""
        return place_of(self.offer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingTerms:
    """What a ranking must know of a job: work left, limits, and costs beside rent.

    A shape of its own because pricing knows no jobs; see ``offers.ranker.ranking_terms``.
    """

    examples: float
    """Examples left to train; more than 0."""
    max_vms: int
    max_gpus: int | None = None
    min_vms: int = 1
    max_usd_per_hour: float | None = None
    allow_on_demand: bool = True
    morph_s: float = 0.0
    """Training time that a morph costs; an interruption costs two of them."""
    lag_steps: float | None = 0.0
    """Mini-batches repeated after falling back to a checkpoint; None: as many as the
    optimum interval of checkpoints lets expect."""
    stored_bytes: float = 0.0
    storage_usd_per_gb_month: float = 0.0
    zone_usd_per_gb: float | None = None
    """Traffic between zones of a region; None: the cloud's list price."""
    held: Place | None = None
    """Where the fleet is that the machines are to join, if there is one."""
    data_bytes: Mapping[str, float] = field(default_factory=dict)
    """What each VM fetches when it boots, by the cloud that holds it."""
    corrections: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Measured over predicted throughput, by cloud and instance type."""

    def fetched_usd(self, place: Place) -> float:
        """Return the egress of what a VM fetches when it boots there."""
        return egress.fetched(self.data_bytes, place.cloud).usd

    def correction(self, place: Place) -> float:
        """Return measured over predicted throughput in a place, 1 where nothing ran.

        What one type is slower than predicted by says nothing of another, whose GPU,
        network and host differ.
        """
        return self.corrections.get((place.cloud, place.instance_type), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferScore:
    """Throughput and cost of a fleet of one offer."""

    examples_per_s: float
    """Without interruptions."""
    net_examples_per_s: float
    """Expected, interruptions counted."""
    usd_per_hour: float
    """Rent of the fleet."""
    usd: float
    """Total cost of the examples left, everything counted."""
    raw_examples_per_usd: float
    """Throughput over rent."""
    examples_per_usd: float
    """Examples left over ``usd``: what offers are ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOffer:
    """An offer in the table."""

    priced: Priced
    vms: int
    """VMs that would be rented if there were enough of them; 0 if none can be."""
    throughput: FleetThroughput | None = None
    worth: OfferScore | None = None
    is_bound: bool = False
    """True if throughput and worth are upper bounds, which were enough to rank it after
    all rows whose plan was computed."""
    why_not: str = ""
    """One line: why it cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All offers: the best first, then those with bounds, then those that cannot be used."""

    rows: tuple[RankedOffer, ...]

    @property
    def best(self) -> RankedOffer | None:
        """The best offer; None if none can be used."""
        first = next(iter(self.rows), None)
        return None if first is None or first.why_not else first

    def reasons(self) -> dict[str, int]:
        """Return why offers cannot be used, the most frequent reason first."""
        counts: dict[str, int] = {}
        for row in self.rows:
            if row.why_not:
                counts[row.why_not] = counts.get(row.why_not, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def rank(
    offers: Sequence[Priced],
    throughputs: ThroughputCache,
    terms: RankingTerms,
    *,
    exact: int = EXACT,
) -> Ranking:
    """Rank offers by examples per dollar.

    A plan is computed for a fleet only if an upper bound on its worth does not rank it
    after the first ``exact`` rows; these are the same as if all plans were computed.

    Args:
        offers: In any order; the ranking does not depend on it.
        throughputs: Of fleets; what is computed stays there for the next ranking.
        terms: The job and its costs beside rent.
        exact: Rows whose plan is to be computed.

    Raises:
        PlanError: No plan can be made from the job, whatever the machines.
    """
    others = _others(offers, terms)
    out: list[RankedOffer] = []
    waiting: list[tuple[tuple[object, ...], int, int, RankedOffer]] = []
    for number, priced in enumerate(offers):
        row = _bound(priced, throughputs, terms, others.get(priced.place[:2], FREE))
        if row.why_not:
            out.append(row)
        else:
            waiting.append((_order(row), number, 0, row))
    heapq.heapify(waiting)
    done: list[RankedOffer] = []
    while waiting and len(done) < exact:
        _, number, refined, row = heapq.heappop(waiting)
        if not row.is_bound:
            done.append(row)
            continue
        row = _refined(row, refined, throughputs, terms)
        if row.why_not:
            out.append(row)
        else:
            heapq.heappush(waiting, (_order(row), number, refined + 1, row))
    done.sort(key=_order)  # a bound may round to less than what it bounds
    rest = [row for *_, row in sorted(waiting, key=lambda entry: entry[0])]
    out.sort(key=lambda row: (row.why_not, offer_key(row.priced.offer)))
    return Ranking(rows=(*done, *rest, *out))


def best_of_each(
    ranking: Ranking,
    group_of: Callable[[Priced], str],
    throughputs: ThroughputCache,
    terms: RankingTerms,
    most: int | None = None,
) -> tuple[tuple[str, RankedOffer], ...]:
    """Return the best offer of each group that has one, with its own plan; the best first.

    Args:
        ranking: Of all offers.
        group_of: Returns the group of an offer.
        throughputs: As in ``rank``.
        terms: As in ``rank``.
        most: Of the groups only so many, the most promising ones; None: all.
    """
    groups: dict[str, list[Priced]] = {}
    for row in ranking.rows:
        if not row.why_not:
            groups.setdefault(group_of(row.priced), []).append(row.priced)
    bests = (
        (name, best)
        for name, offers in groups.items()
        if (best := rank(offers, throughputs, terms, exact=1).best) is not None
    )
    return tuple(sorted(itertools.islice(bests, most), key=lambda one: _order(one[1])))


def _order(row: RankedOffer) -> tuple[object, ...]:
    """Return a key that sorts the best first; bounds before what is as good and known.

    Of equals, such as machines that cost nothing, the faster, then by name.
    """
    assert row.worth is not None
    offer, worth = row.priced.offer, row.worth
    each = -worth.examples_per_usd, -worth.net_examples_per_s
    return *each, not row.is_bound, not offer.spot, offer_key(offer), offer.usd_per_hour


def fleet_size(offer: Offer, terms: RankingTerms) -> int:
    """Return how many VMs of an offer a job would rent, if there are enough of them.

    No more than the account's quota allows; one where it allows none, as it may have grown.
    """
    limit = terms.max_vms
    if offer.quota_vms is not None:
        limit = min(limit, max(1, int(offer.quota_vms)))
    if terms.max_gpus is not None:
        limit = min(limit, terms.max_gpus // max(1, offer.gpus))
    return _affordable(offer, limit, terms, FREE)


def _affordable(offer: Offer, limit: int, terms: RankingTerms, held: Rate) -> int:
    """Return how many VMs the hourly cap pays for beside what is held, up to ``limit``."""
    price = Rate.of(offer.usd_per_hour)
    if terms.max_usd_per_hour is None or price == FREE:
        return limit
    return max(0, min(limit, (Rate.allowed(terms.max_usd_per_hour) - held) // price))


def _others(offers: Iterable[Priced], terms: RankingTerms) -> Mapping[object, Rate]:
    """Return the lowest rent of the other VMs of ``min_vms``, by cloud and region."""
    if terms.max_usd_per_hour is None or terms.min_vms <= 1:
        return {}  # Whoever pays for one pays for enough.
    usable = [(p.place[:2], p.offer) for p in offers if not _unusable(p, terms)]
    usable.sort(key=lambda one: -one[1].usd_per_hour)  # The cheapest has the last word.
    return {at: Rate.of(one.usd_per_hour) * (terms.min_vms - 1) for at, one in usable}


def _bound(
    priced: Priced, throughputs: ThroughputCache, terms: RankingTerms, others: Rate
) -> RankedOffer:
    """Return an offer with an upper bound on its worth, or why it cannot be used."""
    offer = priced.offer
    why_not = _unusable(priced, terms)
    if not why_not and _affordable(offer, 1, terms, others) < 1:
        why_not = f"{CAP} does not pay for {terms.min_vms}, as resources.min_vms asks"
    if why_not:
        return RankedOffer(priced=priced, vms=0, why_not=why_not)
    assert priced.machine is not None
    vms = fleet_size(offer, terms)
    throughput = throughputs.upper_bound(priced.machine, vms)
    worth = worth_of(throughput, priced, terms)
    if offer.usd_per_hour > 0 and not math.isfinite(worth.usd):
        why_not = f"price: got {offer.usd_per_hour:g} USD per hour"
        return RankedOffer(priced=priced, vms=vms, why_not=why_not)
    return RankedOffer(priced=priced, vms=vms, throughput=throughput, worth=worth, is_bound=True)


def _unusable(priced: Priced, terms: RankingTerms) -> str:
    """Return why an offer cannot be used at all, if so."""
    offer, machine = priced.offer, priced.machine
    usd = offer.usd_per_hour
    if not is_amount(usd):
        return f"price: got {usd:g} USD per hour"
    if not (math.isfinite(priced.losses_per_hour) and priced.losses_per_hour >= 0):
        return f"losses per hour: got {priced.losses_per_hour:g}"
    if priced.is_stale:
        return "its price is too old to rent by"
    if not offer.spot and not terms.allow_on_demand:
        return "on demand: resources.allow_on_demand is not set"
    if priced.max_vms is not None and priced.max_vms < 1:
        return "no machine is available"
    if terms.max_gpus is not None and offer.gpus > terms.max_gpus:
        return f"it has more than {counted(terms.max_gpus, 'GPU')}"
    if fleet_size(offer, terms) < 1:
        return f"{CAP} does not pay for one"
    if machine is None:
        return "its speed is unknown: no published peak at the job's precision"
    if machine.gpus < 1 or machine.gpu_memory_bytes < 1 or not machine.speed > 0:
        return "it has no GPU"
    return ""


def _refined(
    row: RankedOffer, refined: int, throughputs: ThroughputCache, terms: RankingTerms
) -> RankedOffer:
    """Return a row with a tighter bound; if it was refined once, with its own plan."""
    priced, vms = row.priced, row.vms
    assert priced.machine is not None
    throughput = (throughputs.of if refined else throughputs.tighter_bound)(priced.machine, vms)
    if throughput.why_not:
        return RankedOffer(priced=priced, vms=vms, why_not=throughput.why_not)
    worth = worth_of(throughput, priced, terms)
    return RankedOffer(
        priced=priced, vms=vms, throughput=throughput, worth=worth, is_bound=not refined
    )


def worth_of(throughput: FleetThroughput, priced: Priced, terms: RankingTerms) -> OfferScore:
    """Return throughput and cost of a fleet.

    An interruption costs two morphs (to go on without the VM, and to add another), work
    repeated where no replica is left (``policy.slowdown``), and a VM's share of the
    throughput while its replacement boots, which is paid for meanwhile. A place that will
    hardly give so many VMs costs boots in vain. Every life of a VM is billed for a cloud's
    shortest time at least.
    """
    offer, place = priced.offer, priced.place
    examples_per_s = throughput.examples_per_s * terms.correction(place)
    step_s = throughput.step_s / terms.correction(place)
    only_checkpoints = slowdown(throughput.pipeline_depth, throughput.copies, 1.0) - 1
    rent = throughput.vms * offer.usd_per_hour
    losses_per_hour = throughput.vms * priced.losses_per_hour
    lag_s = (
        interval_s(PRIOR_COST_S, losses_per_hour / HOUR_S) / 2
        if terms.lag_steps is None
        else terms.lag_steps * step_s
    )
    lost_s = 2 * terms.morph_s + only_checkpoints * lag_s
    wasted_s = priced.boot_s / throughput.vms + lost_s
    per_hour = examples_per_s * HOUR_S / (1.0 + losses_per_hour * wasted_s / HOUR_S)
    stored_gb = terms.stored_bytes / GB_BYTES
    storage = stored_gb * terms.storage_usd_per_gb_month / MONTH_H
    once = rent * priced.boot_s / HOUR_S * _starts(priced)
    fetched_usd = throughput.vms * terms.fetched_usd(place)
    once += fetched_usd
    again = fetched_usd * priced.losses_per_hour
    billing = TERMS.get(offer.cloud, EXACT_BILLING)
    unused_h = billing.unused_s(priced.losses_per_hour) / HOUR_S
    again += losses_per_hour * unused_h * offer.usd_per_hour
    whole_s = terms.examples / per_hour * HOUR_S + priced.boot_s
    once += rent * (billing.billed_s(whole_s) - whole_s) / HOUR_S
    crossing = _crossing_usd(throughput, place, terms) / step_s * HOUR_S
    usd = (rent + storage + crossing + again) * terms.examples / per_hour + once
    return OfferScore(
        examples_per_s=examples_per_s,
        net_examples_per_s=per_hour / HOUR_S,
        usd_per_hour=rent,
        usd=usd,
        raw_examples_per_usd=_per(examples_per_s * HOUR_S, rent),
        examples_per_usd=_per(terms.examples, usd),
    )


def _starts(priced: Priced) -> float:
    """Return how often a fleet is started on the average until it is complete.

    A place that gives too few VMs is left for another: those that it gave have booted, and
    been paid for, in vain. Tries that each succeed with the same probability follow a
    geometric distribution.
    """
    score = priced.obtainability
    return 1.0 if score is None else 1.0 / max(LEAST_OBTAINABLE, min(1.0, score))


def _crossing_usd(throughput: FleetThroughput, place: Place, terms: RankingTerms) -> float:
    """Return the egress of a mini-batch if the machines join a fleet in another place.

    As if all that they send each other went from one place to the other.
    """
    if terms.held is None:
        return 0.0
    here, there = terms.held.site, place.site
    usd_per_gb = egress.usd_per_gb(here, there, terms.zone_usd_per_gb)
    return throughput.sent_bytes / GB_BYTES * usd_per_gb


def _per(examples: float, usd: float) -> float:
    return examples / usd if usd > 0 else math.inf


def greedy_fleet(ranking: Ranking, terms: RankingTerms) -> list[tuple[RankedOffer, int]]:
    """Return the fleet that would be rented: the best offers first, within all limits.

    Where the best offer has too few machines, the next one of its region fills up. An
    offer is skipped if the hourly cap would leave the fleet below ``min_vms`` at its price.

    A preview of what ``core.allocation.next_launch`` comes to, launch by launch.

    Returns:
        Rows with how many VMs of each would be rented.
    """
    fleet: list[tuple[RankedOffer, int]] = []
    taken: dict[Place, int] = {}
    vms, held = 0, FREE
    waiting = list(rows := _by_region(ranking))
    while waiting:
        row = waiting.pop(0)
        offer, machines = row.priced.offer, row.priced.place
        left = _affordable(offer, terms.max_vms - vms, terms, held)
        if vms + left < terms.min_vms:
            left = 0
        if row.priced.max_vms is not None:
            left = min(left, row.priced.max_vms - taken.get(machines, 0))
        if left > 0:
            fleet.append((row, left))
            taken[machines] = taken.get(machines, 0) + left
            vms += left
            held += Rate.of(offer.usd_per_hour) * left
            if vms < terms.min_vms:
                waiting = list(rows)  # Those skipped may do beside these.
    return fleet


def _by_region(ranking: Ranking) -> Sequence[RankedOffer]:
    """Return the rows that can be rented in the region of the best one.

    If no fleet of one offer can train, all that could be rented: perhaps a mixed fleet
    can, and otherwise its plan says why not.
    """
    rows = [row for row in ranking.rows if not row.why_not]
    if not rows:
        rows = [row for row in ranking.rows if row.vms]
        rows.sort(key=lambda row: preference(row.priced.offer))
    return [row for row in rows if row.priced.place[:2] == rows[0].priced.place[:2]]
