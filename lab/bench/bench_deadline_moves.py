"""What a job with a deadline gains by moving, over recorded prices: the core in virtual time.

As ``bench_moves``, with on-demand VMs everywhere at ``ON_DEMAND`` times the spot price of
the day, and a deadline. Compared are a job that sees only the region where it is cheapest to
begin, as every job with a deadline was before, and one that sees all regions and clouds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.units import DAY_S
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain_lab.markets.price_file import parse_prices

from .bench_moves import START_S, Market, Recorded, each_day

ON_DEMAND = 3.0
"""Of the spot price: most ratios of the dissertation's Table 6.3 are 2 to 4."""
EXAMPLES_PER_S = 0.95 * 64 / 512
"""Of one VM, anywhere, as the deadline policy counts on it."""
DAYS = (4, 8, 16)
SLACK = 0.5
"""Time that is left over, as a share of the training time."""


class OpenMarket(Market):
    """On-demand VMs beside those of the spot market."""

    def offers(self) -> tuple[Offer, ...]:
        """Return what is offered now."""
        spot = super().offers()
        dear = [replace(one, spot=False, usd_per_hour=ON_DEMAND * one.usd_per_hour) for one in spot]
        return (*spot, *dear)


class Deadlined(Recorded):
    """A job with a deadline on the market of some days; it is told what fleets do."""

    market = OpenMarket

    def fold(self, event: e.Event) -> Any:
        """Rate the kinds of what is seen, as the manager's ranker would."""
        commands = super().fold(event)
        if isinstance(event, e.OffersSeen):
            self.later(self.rated)
        return commands

    def rated(self) -> e.FleetRated:
        """Return what a VM does where the job is, and in the cheapest other place."""
        kinds = [
            (o.cloud, o.instance_type)
            for o in sorted(self.cloud.offers(), key=lambda o: (o.usd_per_hour, offer_key(o)))
        ]
        held = [(vm.offer.cloud, vm.offer.instance_type) for vm in self.state.fleet.training]
        own = (held or kinds)[0]
        other = next((kind for kind in kinds if kind != own), None)
        return e.FleetRated(at_s=self.now_s, terms=_terms(own), elsewhere=other and _terms(other))


def _terms(kind: tuple[str, str]) -> FleetTerms:
    cloud, instance_type = kind
    fleet = Fleet(examples_per_s=(0.0, EXAMPLES_PER_S), boot_s=10.0, morph_s=10.0, lost_s=20.0)
    return FleetTerms(cloud=cloud, instance_type=instance_type, fleet=fleet)


def row(days: Sequence[Mapping[Place, float]], model: str, lasts: int, starts: int) -> None:
    """Play the jobs of one row with and without other regions, and print it."""
    found: dict[bool, list[float]] = {False: [], True: []}
    moves = late = 0
    spread = list[float]()
    for start in range(max(0, len(days) - starts - lasts), len(days) - lasts):
        first = min(days[start], key=lambda place: (days[start][place], place))
        spread += [
            day[first] / min(day.values()) - 1
            for day in days[start : start + lasts]
            if first in day
        ]
        for everywhere in (False, True):
            seen = [
                {p: usd for p, usd in day.items() if everywhere or p.site[:2] == first.site[:2]}
                for day in days[start:]
            ]
            steps = int(lasts * DAY_S / 512)
            job = Deadlined(start, seen, steps, 0.0, allow_on_demand=True)
            deadline_s = START_S + (1 + SLACK) * lasts * DAY_S
            job.settings = replace(job.settings, deadline_s=deadline_s)
            job.run(until_s=4 * lasts * DAY_S)
            assert job.finished is not None
            late += job.finished.kind != "succeeded" or job.now_s > deadline_s
            found[everywhere].append(job.ledger.spent(job.now_s).usd)
            moves += (len(job.cloud.vms) - 1) * everywhere
    stays, goes = fmean(found[False]), fmean(found[True])
    print(
        f"| {model} | {lasts} | {fmean(spread):.0%} | {stays:.2f} | {goes:.2f} "
        f"| {goes / stays:.3f} | {moves} | {late} |",
        flush=True,
    )


def main() -> None:
    """Print a row for each model, length and slack."""
    file, *rest = sys.argv[1:]
    starts = int(rest[0]) if rest else 6
    prices = list(parse_prices(Path(file).read_text()).days.values())
    print("| model | days | dearer | stays, $ | moves, $ | ratio | moves | late |")
    print("|---|---|---|---|---|---|---|---|")
    for model in ("A3C", "ResNet-50(128)", "Transformer(256)"):
        days = each_day(prices, model, "")
        for lasts in DAYS:
            row(days, model, lasts, starts)


if __name__ == "__main__":
    main()
