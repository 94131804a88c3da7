"""Ranks offers by what a dollar trains on them: examples per dollar, losses counted.

The throughput of this very job on a fleet of each offer, over what that fleet costs until
the job is done: boot, the work that interruptions waste, storage and egress included
(after Narayanan's dissertation, chapter 6, which divides throughput by price alone).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.adapt.policy import slowdown
from spottrain.pricing.billing import egress
from spottrain.pricing.billing.money import FREE, Rate, is_amount
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.pricing.ranking.frictions import (
    Frictions,
    Quote,
)
from spottrain.pricing.ranking.order import preference
from spottrain.pricing.ranking.throughput import (
    FleetThroughput,
    MachineShape,
    ThroughputCache,
)
from spottrain.units import GB_BYTES, HOUR_S, MONTH_H

CAP = "budget.max_usd_per_hour"  # Reasons that are due to it begin so.
EXACT = 6
"""Rows that are worked out to the end unless more are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """An offer, what it is to the planner, and how often it is taken away."""

    offer: Offer
    machine: MachineShape | None
    """None: how fast it is cannot be told."""
    losses_per_hour: float = 0.0
    """Of one VM."""
    boot_s: float = 0.0
    """From paying to training."""
    most_vms: int | None = None
    """That can be had, by capacity or quota; None: not known."""
    is_estimate: bool = False
    """Whether its throughput is from declared ratios, not from a measurement."""
    is_stale: bool = False
    """Whether its price is too old to rent by."""

    @property
    def place(self) -> Place:
        """Where and what it is."""
        offer = self.offer
        return Place(offer.cloud, offer.region, offer.zone, offer.instance_type)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingTerms:
    """The job, as far as money is concerned, and what everything beside rent costs."""

    examples: float
    """Left to do; more than 0."""
    max_vms: int
    max_gpus: int | None = None
    min_vms: int = 1
    max_usd_per_hour: float | None = None
    allow_on_demand: bool = True
    morph_s: float = 0.0
    """Training time that going over to another plan costs; a loss costs two of them."""
    lag_steps: float = 0.0
    """Mini-batches done again where nothing but a checkpoint is left."""
    stored_bytes: float = 0.0
    storage_usd_per_gb_month: float = 0.0
    zone_usd_per_gb: float | None = None
    """Data from one zone to another of its region; None: the cloud's list price."""
    held: Place | None = None
    """Where the fleet stands that the machines are to join, if there is one."""
    data_bytes: Mapping[str, float] = field(default_factory=dict)
    """What each VM fetches when it boots, by the cloud that holds it."""
    corrections: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """By cloud and instance type: measured throughput over the predicted one."""

    def fetched_usd(self, place: Place) -> float:
        """Return the egress of what a VM fetches when it boots there."""
        return egress.fetched(self.data_bytes, place.cloud).usd

    def correction(self, place: Place) -> float:
        """Return what predictions are off by in a place.

        What was measured on a type holds for that type; for others the same error is
        taken, lest whatever was never tried look better.
        """
        known = self.corrections
        if not known:
            return 1.0
        common = math.exp(math.fsum(map(math.log, known.values())) / len(known))
        return known.get((place.cloud, place.instance_type), common)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What a fleet of one offer trains, and for how much."""

    examples_per_s: float
    """Undisturbed."""
    net_examples_per_s: float
    """To expect, interruptions counted."""
    usd_per_hour: float
    """Rent of the fleet."""
    usd: float
    """Of all examples that are left, everything counted."""
    raw_examples_per_usd: float
    """Throughput over rent."""
    examples_per_usd: float
    """Examples over ``usd``: what is ranked by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOffer:
    """An offer in the table."""

    priced: Priced
    vms: int
    """That would be rented if there were enough of them; 0 if none can be."""
    throughput: FleetThroughput | None = None
    worth: Worth | None = None
    is_bound: bool = False
    """Whether pace and worth are no more than bounds, which were enough to see that it
    comes after all rows that are worked out."""
    why_not: str = ""
    """One line: why it is out of the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """All offers: the best first, then bounds, then what is out of the question."""

    rows: tuple[RankedOffer, ...]

    @property
    def best(self) -> RankedOffer | None:
        """The row to rent by, None if all are out of the question."""
        first = next(iter(self.rows), None)
        return None if first is None or first.why_not else first

    def reasons(self) -> dict[str, int]:
        """Return why offers are out of the question, the most frequent reason first."""
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

    A plan is made for a fleet only if a bound on what it is worth does not show that it
    comes after the first ``exact`` rows; these are the same as if all had been made.

    Args:
        offers: In any order; the ranking does not depend on it.
        throughputs: What fleets do; what is worked out stays there for the next ranking.
        terms: The job and what everything beside rent costs.
        exact: Rows to work out to the end.

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
        _, number, looks, row = heapq.heappop(waiting)
        if not row.is_bound:
            done.append(row)
            continue
        row = _looked_at(row, looks, throughputs, terms)
        if row.why_not:
            out.append(row)
        else:
            heapq.heappush(waiting, (_order(row), number, looks + 1, row))
    rest = [row for *_, row in sorted(waiting, key=lambda entry: entry[0])]
    out.sort(key=lambda row: (row.why_not, offer_key(row.priced.offer)))
    return Ranking(rows=(*done, *rest, *out))


def _order(row: RankedOffer) -> tuple[object, ...]:
    """Return a key that sorts the best first; bounds before what is as good and known.

    Of equals, such as machines that cost nothing, the faster, then by name.
    """
    assert row.worth is not None
    offer, worth = row.priced.offer, row.worth
    each = -worth.examples_per_usd, -worth.net_examples_per_s
    return *each, not row.is_bound, not offer.spot, offer_key(offer), offer.usd_per_hour


def fleet_size(offer: Offer, terms: RankingTerms) -> int:
    """Return how many VMs of an offer a job would rent, if there are enough of them."""
    most = terms.max_vms
    if terms.max_gpus is not None:
        most = min(most, terms.max_gpus // max(1, offer.gpus))
    return _affordable(offer, most, terms, FREE)


def _affordable(offer: Offer, most: int, terms: RankingTerms, held: Rate) -> int:
    """Return how many more VMs the hourly cap bears beside what is held, up to a bound."""
    price = Rate.of(offer.usd_per_hour)
    if terms.max_usd_per_hour is None or price == FREE:
        return most
    return max(0, min(most, (Rate.allowed(terms.max_usd_per_hour) - held) // price))


def _others(offers: Iterable[Priced], terms: RankingTerms) -> Mapping[object, Rate]:
    """Return the least that the other VMs of ``min_vms`` can cost, by cloud and region."""
    if terms.max_usd_per_hour is None or terms.min_vms <= 1:
        return {}  # Whoever pays for one pays for enough.
    usable = [(p.place[:2], p.offer) for p in offers if not _unusable(p, terms)]
    usable.sort(key=lambda one: -one[1].usd_per_hour)  # The cheapest has the last word.
    return {at: Rate.of(one.usd_per_hour) * (terms.min_vms - 1) for at, one in usable}


def _bound(
    priced: Priced, throughputs: ThroughputCache, terms: RankingTerms, others: Rate
) -> RankedOffer:
    """Return an offer with the most that it can be worth, or why it is out."""
    offer = priced.offer
    why_not = _unusable(priced, terms)
    if not why_not and _affordable(offer, 1, terms, others) < 1:
        why_not = f"{CAP} does not pay for {terms.min_vms}, as resources.min_vms asks"
    if why_not:
        return RankedOffer(priced=priced, vms=0, why_not=why_not)
    assert priced.machine is not None
    vms = fleet_size(offer, terms)
    throughput = throughputs.at_best(priced.machine, vms)
    worth = worth_of(throughput, priced, terms)
    if offer.usd_per_hour > 0 and not math.isfinite(worth.usd):
        why_not = f"price: got {offer.usd_per_hour:g} USD per hour"
        return RankedOffer(priced=priced, vms=vms, why_not=why_not)
    return RankedOffer(
        priced=priced, vms=vms, throughput=throughput, worth=worth, is_bound=True
    )


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
    if priced.most_vms is not None and priced.most_vms < 1:
        return "there is no machine left"
    if terms.max_gpus is not None and offer.gpus > terms.max_gpus:
        return f"it has more than {terms.max_gpus} GPUs"
    if fleet_size(offer, terms) < 1:
        return f"{CAP} does not pay for one"
    if machine is None:
        return "its speed is unknown: no published peak to compare"
    if machine.gpus < 1 or machine.gpu_memory_bytes < 1 or not machine.speed > 0:
        return "it has no GPU"
    return ""


def _looked_at(
    row: RankedOffer, looks: int, throughputs: ThroughputCache, terms: RankingTerms
) -> RankedOffer:
    """Return a row with a nearer bound, or at the second look as its plan makes it."""
    priced, vms = row.priced, row.vms
    assert priced.machine is not None
    throughput = (throughputs.of if looks else throughputs.nearly)(priced.machine, vms)
    if throughput.why_not:
        return RankedOffer(priced=priced, vms=vms, why_not=throughput.why_not)
    worth = worth_of(throughput, priced, terms)
    return RankedOffer(
        priced=priced, vms=vms, throughput=throughput, worth=worth, is_bound=not looks
    )


def worth_of(throughput: FleetThroughput, priced: Priced, terms: RankingTerms) -> Worth:
    """Return what a fleet trains for its money.

    A loss stands for two morphs (to go on without the VM, and to take in another), for
    work done again where no replica is left (``policy.slowdown``), and for a VM's share of
    the throughput while its replacement boots, which is paid for meanwhile.
    """
    offer, place = priced.offer, priced.place
    examples_per_s = throughput.examples_per_s * terms.correction(place)
    step_s = throughput.step_s / terms.correction(place)
    only_checkpoints = (
        slowdown(throughput.pipeline_depth, throughput.data_parallel_width, 1.0) - 1
    )
    rent = throughput.vms * offer.usd_per_hour
    wasted = Frictions(
        boot_s=priced.boot_s / throughput.vms,
        lost_s=2 * terms.morph_s + only_checkpoints * terms.lag_steps * step_s,
    )
    per_hour = wasted.throughput(
        Quote(
            place=place,
            usd_per_hour=rent,
            examples_per_s=examples_per_s,
            losses_per_hour=throughput.vms * priced.losses_per_hour,
        )
    )
    stored_gb = terms.stored_bytes / GB_BYTES
    storage = stored_gb * terms.storage_usd_per_gb_month / MONTH_H
    once = rent * priced.boot_s / HOUR_S
    fetched_usd = throughput.vms * terms.fetched_usd(place)
    once += fetched_usd
    again = fetched_usd * priced.losses_per_hour
    crossing = _crossing_usd(throughput, place, terms) / step_s * HOUR_S
    usd = (rent + storage + crossing + again) * terms.examples / per_hour + once
    return Worth(
        examples_per_s=examples_per_s,
        net_examples_per_s=per_hour / HOUR_S,
        usd_per_hour=rent,
        usd=usd,
        raw_examples_per_usd=_per(examples_per_s * HOUR_S, rent),
        examples_per_usd=_per(terms.examples, usd),
    )


def _crossing_usd(
    throughput: FleetThroughput, place: Place, terms: RankingTerms
) -> float:
    """Return the egress of a mini-batch if the machines join a fleet that stands elsewhere.

    As if all that they send each other crossed.
    """
    if terms.held is None:
        return 0.0
    here, there = terms.held.site, place.site
    usd_per_gb = egress.usd_per_gb(here, there, terms.zone_usd_per_gb)
    return throughput.sent_bytes / GB_BYTES * usd_per_gb


def _per(examples: float, usd: float) -> float:
    return examples / usd if usd > 0 else math.inf


def greedy_fleet(
    ranking: Ranking, terms: RankingTerms
) -> list[tuple[RankedOffer, int]]:
    """Return whole fleets' worth of offers, the best first, within all limits.

    Where the best offer has too few machines the next one of the same region fills up.
    None is taken at whose price the hourly cap would leave the fleet below ``min_vms``.

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
        borne = _affordable(offer, terms.max_vms - vms, terms, held)
        left = borne if vms + borne >= terms.min_vms else 0
        if row.priced.most_vms is not None:
            left = min(left, row.priced.most_vms - taken.get(machines, 0))
        if left > 0:
            fleet.append((row, left))
            taken[machines] = taken.get(machines, 0) + left
            vms += left
            held += Rate.of(offer.usd_per_hour) * left
            if vms < terms.min_vms:
                waiting = list(rows)  # Those passed over may do beside these.
    return fleet


def _by_region(ranking: Ranking) -> Sequence[RankedOffer]:
    """Return the rows that can be rented in the region of the best one.

    If a fleet of none of them can train, all that could be rented: perhaps a mixed one
    can, and otherwise its plan tells why not.
    """
    rows = [row for row in ranking.rows if not row.why_not]
    if not rows:
        rows = [row for row in ranking.rows if row.vms]
        rows.sort(key=lambda row: preference(row.priced.offer))
    return [row for row in rows if row.priced.place[:2] == rows[0].priced.place[:2]]
