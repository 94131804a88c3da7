"""What a job with a deadline gains by moving, over recorded prices: the core in virtual time.

As ``bench_moves``, with on-demand VMs everywhere at ``ON_DEMAND`` times the spot price of
the day, and a deadline. Jobs begin on each day from which on all clouds of the file are
recorded, so that no place is new because it was not looked at before. Compared are

- a job that sees only the region and the type of VM with which it is cheapest to begin, and one
  that sees all regions and clouds: both are the manager's core, which boots, saves and loads;
- Uniform Progress over zones ("Can't Be Late", NSDI 2024) and SkyServe's spread (EuroSys 2025),
  which choose a place where they have no VM: replays, in which a loss costs a boot and half of a
  mini-batch, as it does in the core, which saves each one;
- a bound: whatever is cheapest on each day, without a cost of moving.

VMs are lost at the same moments for all, as often as ``--lost`` says.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.deadline.model import Fleet
from spottrain.pricing.prices.place import Place, offer_key
from spottrain.units import DAY_S, HOUR_S
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain_lab.markets.price_file import parse_prices
from spottrain_lab.markets.price_ladder import THROUGHPUTS

from .bench_moves import START_S, Market, Recorded, each_day

ON_DEMAND = 3.0
"""Of the spot price: most ratios of the dissertation's Table 6.3 are 2 to 4."""
STEP_S = 384.0
"""Of a mini-batch on one VM, anywhere."""
EXAMPLES_PER_S = 0.95 * 64 / STEP_S
"""Of one VM, anywhere, as the deadline policy counts on it."""
DAYS = (4, 8, 16)
SLACK = 0.5
"""Time that is left over, as a share of the training time."""
MUCH = 0.2
"""By how much the place where a job begins must be dearer than the cheapest, on average."""
BOOT_S = 10.0

Days = Sequence[Mapping[Place, float]]


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
    fleet = Fleet(examples_per_s=(0.0, EXAMPLES_PER_S), boot_s=BOOT_S, morph_s=10.0, lost_s=20.0)
    return FleetTerms(cloud=cloud, instance_type=instance_type, fleet=fleet)


@dataclass(frozen=True)
class Window:
    """Jobs of one model and length that begin on one day."""

    days: Days
    lasts: int
    start: int

    @property
    def first(self) -> Place:
        """The cheapest place on the first day."""
        return min(self.days[0], key=lambda place: (self.days[0][place], place))

    @property
    def dearer(self) -> float:
        """By how much that place is dearer than the cheapest of each day, on average."""
        seen = [day for day in self.days[: self.lasts] if self.first in day]
        return fmean(day[self.first] / min(day.values()) - 1 for day in seen)

    def on(self, at_s: float) -> Mapping[Place, float]:
        """Return the prices at a time since the beginning."""
        return self.days[min(int(at_s / DAY_S), len(self.days) - 1)]

    def losses_s(self, a_day: float) -> list[float]:
        """Return when whatever VM there is is lost, since the beginning."""
        draw, at_s, found = random.Random(self.start), 0.0, list[float]()
        while a_day and at_s < 2 * self.lasts * DAY_S:
            at_s += draw.expovariate(a_day / DAY_S)
            found.append(at_s)
        return found

    def core(self, losses_s: Sequence[float], everywhere: bool) -> tuple[float, int, bool]:
        """Return what the manager's core spends, how often it moves, and whether it is late."""
        first = self.first
        seen = [
            {
                place: usd
                for place, usd in day.items()
                if everywhere or (*place.site[:2], place.instance_type) == _narrow(first)
            }
            for day in self.days
        ]
        job = Deadlined(
            self.start, seen, int(self.lasts * DAY_S / STEP_S), 0.0, allow_on_demand=True
        )
        deadline_s = START_S + (1 + SLACK) * self.lasts * DAY_S
        spec = replace(job.settings.spec, checkpoint_every_steps=1)
        job.settings = replace(job.settings, deadline_s=deadline_s, spec=spec)

        def lose() -> None:
            for vm in [vm for vm in job.cloud.vms.values() if vm.alive and vm.offer.spot]:
                job.end_vm(vm.vm_id)

        for at_s in losses_s:
            job.after(at_s, lose)
        moves = 0
        job.run(until_s=0.0)
        was = None
        while job.finished is None:
            job.play_one()
            now = job.state.fleet.move
            moves += now is not None and now.is_cut_over and was != now
            was = now
        late = job.finished.kind != "succeeded" or job.now_s > deadline_s
        return job.ledger.spent(job.now_s).usd, moves, late

    def bound(self) -> float:
        """Return what the training costs at the lowest price of each day."""
        return sum(min(day.values()) for day in self.days[: self.lasts]) * DAY_S / HOUR_S

    def baseline(self, losses_s: Sequence[float], spreads: bool) -> float:
        """Return what a job spends that chooses a place where it has no VM.

        Args:
            losses_s: When it has none.
            spreads: As SkyServe does: not where it was lost last, until fewer than two zones
                are left; else wherever it is cheapest.
        """
        avoided, held, usd, at_s = set[Place](), self.first, 0.0, 0.0
        left_s = self.lasts * DAY_S + BOOT_S
        price = self.on(0.0)[held]
        losses = [*losses_s]
        while left_s > 0:
            ends_s = min([DAY_S * (int(at_s / DAY_S) + 1), at_s + left_s, *losses[:1]])
            usd += price * (ends_s - at_s) / HOUR_S
            left_s, at_s = left_s - (ends_s - at_s), ends_s
            prices = self.on(at_s)
            if losses and at_s >= losses[0]:
                losses.pop(0)
                left_s += BOOT_S + STEP_S / 2
                avoided.add(held)
                open_ = [place for place in prices if place not in avoided or not spreads]
                if len(open_) < 2:
                    open_ = [*prices]
                    avoided = {held}
                held = min(open_, key=lambda place: (prices[place], place))
            price = prices.get(held, price)
        return usd


def _narrow(place: Place) -> tuple[str, ...]:
    return (*place.site[:2], place.instance_type)


def row(model: str, lasts: int, windows: Sequence[Window], lost: float) -> None:
    """Play the jobs of one row, and print it."""
    stays, goes, progress, spread = list[float](), list[float](), list[float](), list[float]()
    moves, late = 0, 0
    for window in windows:
        losses_s = window.losses_s(lost)
        usd, _, was_late = window.core(losses_s, everywhere=False)
        stays.append(usd)
        usd, moved, is_late = window.core(losses_s, everywhere=True)
        goes.append(usd)
        moves += moved
        late += was_late + is_late
        progress.append(window.baseline(losses_s, spreads=False))
        spread.append(window.baseline(losses_s, spreads=True))
    dearer = fmean(window.dearer for window in windows)
    bound = [window.bound() for window in windows]
    means = " | ".join(f"{fmean(each):.2f}" for each in (stays, progress, spread, goes, bound))
    print(
        f"| {model} | {lasts} | {len(windows)} | {dearer:.0%} | {means} "
        f"| {fmean(goes) / fmean(stays):.3f} | {moves} | {late} |",
        flush=True,
    )


def main() -> None:
    """Print a row for each model and length whose prices differ so much."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("prices", type=Path)
    parser.add_argument("--lost", type=float, default=0.0, help="losses a day")
    parser.add_argument("--dearer", type=float, default=MUCH, help="at least")
    parser.add_argument("--below", type=float, default=1e9, help="and less than this")
    parser.add_argument("--days", type=int, nargs="*", default=DAYS, help="lengths of the jobs")
    args = parser.parse_args()
    prices = list(parse_prices(args.prices.read_text()).days.values())
    clouds = [{place.cloud for place in day} for day in prices]
    since = next(n for n, each in enumerate(clouds) if each == set.union(*clouds))
    print(
        "| model | days | jobs | dearer | stays, $ | Uniform Progress, $ | SkyServe, $ | moves, $ "
        "| bound, $ | ratio | moves | late |"
    )
    print("|---" * 12 + "|")
    for model in THROUGHPUTS:
        days = each_day(prices, model, "")[since:]
        for lasts in args.days:
            found = [Window(days[n:], lasts, n) for n in range(len(days) - lasts)]
            found = [one for one in found if args.dearer <= one.dearer < args.below]
            if found:
                row(model, lasts, found, args.lost)


if __name__ == "__main__":
    main()
