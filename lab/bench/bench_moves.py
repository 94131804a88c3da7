"""What a running job gains by moving, over recorded prices: the manager's core beside a replay.

Jobs of some days on one VM begin on each of the last days of a file of prices
(``cloud,zone,instance_type,observed_at,usd_per_hour``). Prices are those of a GPU over the speed
of its type for a model, so all places train alike, and a place is what it costs. Compared
are a job that stays where it is cheapest at its beginning, one that goes wherever
``switching.decide`` says each day, and the core in virtual time with a simulated cloud: it
boots, calibrates, saves, morphs, moves by checkpoints between regions, and pays for the
fleets that overlap.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.simulation.market import Cloud
from tests.simulation.market import offer as offer_in
from tests.simulation.ranked_world import RankedWorld
from tests.simulation.test_simulation import FACTS, SPEC, settings
from tests.simulation.world import World

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.place import Place
from spottrain.pricing.ranking.switching import (
    Frictions,
    Quote,
    SwitchingState,
    decide,
)
from spottrain.units import DAY_S, HOUR_S
from spottrain.varuna_manager.core.moves import RULE
from spottrain_lab.markets.price_file import INSTANCES, parse_prices
from spottrain_lab.markets.price_ladder import THROUGHPUTS

DAYS = (4, 8, 16)
"""Lengths of the jobs."""
DATASET_BYTES = (0.0, 150e9)
"""What a VM fetches when it boots outside of AWS: nothing, or ImageNet as in the
dissertation's Table 6.2."""
HOME = "aws"
"""The cloud that holds the dataset."""
POLL_S = 1800.0
"""Time between two looks at the market."""


class Market(Cloud):
    """Offers at the prices of each day; VMs are billed at them, as clouds do."""

    days: list[dict[Place, float]]
    world: World

    def offers(self) -> tuple[Offer, ...]:
        """Return what is offered now."""
        return tuple(
            replace(
                offer_in(place.zone, usd),
                cloud=place.cloud,
                region=place.region,
                instance_type=f"{place.instance_type} of 2020",
                available=10,
            )
            for place, usd in _on(self.days, self.world.now_s - START_S).items()
        )


START_S = 1_000_000.0
"""When a world begins."""


def _on(days: list[dict[Place, float]], after_s: float) -> dict[Place, float]:
    return days[min(int(after_s / DAY_S), len(days) - 1)]


class Recorded(RankedWorld):
    """One VM on the market of some days, ranked at every look."""

    market = Market

    def __init__(
        self,
        seed: int,
        days: list[dict[Place, float]],
        steps: int,
        data_bytes: float,
        **changes: Any,
    ) -> None:
        zones = {place.zone: 10 for day in days for place in day}
        market = self.market(capacity=zones, prices={})
        market.days, market.world = days, self
        sections = tuple(
            replace(section, param_bytes=1 << 24, optimizer_bytes=1 << 25)
            for section in FACTS.sections
        )
        spec = replace(SPEC, steps=steps, minibatch_size=64)
        job = settings(
            spec=spec,
            facts=replace(FACTS, sections=sections),
            max_vms=1,
            objective="examples_per_dollar",
            data_bytes={HOME: data_bytes} if data_bytes else {},
            **changes,
        )
        super().__init__(seed, job, market)

    def poll_again(self) -> None:
        """Look seldom: prices change by the day."""
        epoch = self.epoch
        wait_s = POLL_S if self.current_generation is not None else 30.0

        def again() -> None:
            if epoch == self.epoch:
                self.poll()

        self.after(wait_s, again)


def replayed_usd(
    days: list[dict[Place, float]], lasts_s: float, rule: bool, data_bytes: float
) -> float:
    """Return the cost of a job by a replay, hour by hour.

    Args:
        days: Prices.
        lasts_s: Training time.
        rule: Whether it moves as ``decide`` says; else it stays where it began.
        data_bytes: What it fetches wherever it is, but at home.
    """
    near = Frictions(boot_s=10.0, move_s=10.0, dataset_bytes=data_bytes)
    far = replace(near, move_s=300.0)
    held: Place | None = None
    usd, left_s, now_s, price = 0.0, lasts_s, 0.0, 0.0
    while left_s > 0:
        prices = _on(days, now_s)
        if held is None:
            quotes = [_quote(place, each) for place, each in prices.items()]
            begins = SwitchingState(examples=left_s, copies=frozenset({HOME}))
            held = decide(quotes, begins, near, RULE).quote.place
            usd += near.dataset_usd(held.cloud, {HOME})
        price = prices.get(held, price)
        if rule:
            # Each VM that boots elsewhere fetches for itself, as ours do.
            at = SwitchingState(examples=left_s, held=held, copies=frozenset({HOME}))
            moves = []
            for place, each in prices.items():
                if place == held:
                    continue
                frictions = near if place.site[:2] == held.site[:2] else far
                both = [_quote(held, price), _quote(place, each)]
                found = decide(both, at, frictions, RULE)
                if found.moves:
                    moves.append((found.saves_usd, found.quote, frictions))
            if moves:
                _, best, frictions = max(moves, key=lambda one: (one[0], one[1].place))
                usd += best.usd_per_hour * frictions.boot_s / HOUR_S
                usd += frictions.dataset_usd(best.place.cloud, {HOME})
                left_s += frictions.move_s
                held, price = best.place, best.usd_per_hour
        spent_s = min(HOUR_S, left_s)
        usd += price * spent_s / HOUR_S
        left_s -= spent_s
        now_s += spent_s
    return usd


def _quote(place: Place, usd_per_hour: float) -> Quote:
    return Quote(place=place, usd_per_hour=usd_per_hour, examples_per_s=1.0)


def main() -> None:
    """Print a row for each model, length and dataset, within a region and over all clouds."""
    file, *rest = sys.argv[1:]
    starts = int(rest[0]) if rest else 30
    days = list(parse_prices(Path(file).read_text()).days.values())
    print(
        "| model | places | days | dataset | stays, $ | replay | core | moves | of the "
        "replay's gain |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    gains = [
        row(days, model, region, lasts, data_bytes, starts)
        for model in ("A3C", "ResNet-50(128)", "Transformer(256)")
        for region in ("us-east-1", "")
        for lasts in DAYS
        for data_bytes in (DATASET_BYTES if not region else DATASET_BYTES[:1])
    ]
    replay, core = (sum(each) for each in zip(*gains, strict=True))
    print(f"all rows together: the core gains {core / replay:.1%} of what the replay does")


def each_day(
    days: Sequence[Mapping[Place, Sequence[float]]], model: str, region: str
) -> list[dict[Place, float]]:
    """Return the price of a GPU over its speed for a model, by day and place.

    Args:
        region: Where; empty: everywhere.
    """
    speeds = THROUGHPUTS[model]
    return [
        {
            place: min(seen)
            / INSTANCES[place.instance_type].count
            / (speeds[INSTANCES[place.instance_type].gpu] / speeds["v100"])
            for place, seen in day.items()
            if region in ("", place.region)
        }
        for day in days
    ]


def row(
    days: Sequence[Mapping[Place, Sequence[float]]],
    model: str,
    region: str,
    lasts: int,
    data_bytes: float,
    starts: int,
) -> tuple[float, float]:
    """Play the jobs of one row, and print it; return what replay and core gain."""
    whole = each_day(days, model, region)
    steps = int(lasts * DAY_S / 512)
    kept, by_rule, by_core = list[float](), list[float](), list[float]()
    moves = 0
    for start in range(max(0, len(whole) - starts - lasts), len(whole) - lasts):
        job = Recorded(start, whole[start:], steps, data_bytes)
        job.run(until_s=4 * lasts * DAY_S)
        assert job.finished is not None
        assert job.finished.kind == "succeeded"
        trained_s = job.now_s - START_S
        for rule, found in ((False, kept), (True, by_rule)):
            found.append(replayed_usd(whole[start:], trained_s, rule, data_bytes))
        by_core.append(job.ledger.spent(job.now_s).usd)
        moves += len(job.cloud.vms) - 1
    static, replay, core = fmean(kept), fmean(by_rule), fmean(by_core)
    gain = static - replay
    share = f"{(static - core) / gain:.0%}" if gain > 1e-9 else "-"
    print(
        f"| {model} | {region or 'all clouds'} | {lasts} | {data_bytes / 1e9:g} GB "
        f"| {static:.2f} | {replay:.2f} | {core:.2f} | {moves} | {share} |",
        flush=True,
    )
    return len(kept) * gain, len(kept) * (static - core)


if __name__ == "__main__":
    main()
