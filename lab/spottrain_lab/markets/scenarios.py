"""Jobs and markets for replays of the deadline policy: drawn from seeds, or from a trace.

A zone is a list of lives: the times in which each of its spot VMs can be had. A price
holds for ``PRICE_S``, and running VMs pay it, as on AWS, Azure and GCP.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from spottrain.pricing.deadline.model import Fleet
from spottrain.units import HOUR_S
from spottrain_lab.traces.traces import Trace, VmInterval

PRICE_S = 1800.0
"""How long a price holds."""
GIVE_UP = 10.0
"""A job that is not done after so many times its time to the deadline is given up."""

Life = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Zone:
    """The spot market of one zone."""

    name: str
    lives: tuple[Life, ...]
    """By ascending start."""
    usd_per_hour: tuple[float, ...]
    """Of one VM, for each ``PRICE_S``; the last one holds on."""

    def price(self, at_s: float) -> float:
        """Return USD per hour of one VM at a moment."""
        return self.usd_per_hour[min(int(at_s / PRICE_S), len(self.usd_per_hour) - 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job and the markets it meets; it begins at 0 s."""

    name: str
    zones: tuple[Zone, ...]
    on_demand_usd_per_hour: float
    notice_s: float
    """Notice before a spot VM is preempted; 0: none."""
    fleet: Fleet
    examples: float
    deadline_s: float
    max_usd: float
    market_s: float = math.inf
    """Length of its markets."""

    def on_demand(self) -> tuple[float, float]:
        """Return the time and cost of the fastest on-demand fleet."""
        fleet, size = self.fleet, self.fleet.max_vms
        train_s = self.examples / fleet.rates[size]
        paid_s = fleet.boot_s + fleet.morph_s + train_s
        return paid_s, size * self.on_demand_usd_per_hour * paid_s / HOUR_S


def prolonged(scenario: Scenario) -> Scenario:
    """Return the scenario with markets repeated until ``GIVE_UP``, so that late jobs go on."""
    if scenario.market_s == math.inf:
        return scenario
    times = math.ceil(GIVE_UP * scenario.deadline_s / scenario.market_s)
    starts_s = [number * scenario.market_s for number in range(times)]
    zones = tuple(
        replace(
            zone,
            lives=tuple((a + at_s, b + at_s) for at_s in starts_s for a, b in zone.lives),
            usd_per_hour=zone.usd_per_hour * times,
        )
        for zone in scenario.zones
    )
    return replace(scenario, zones=zones, market_s=math.inf)


def synthetic(seed: int) -> Scenario:
    """Draw a market and a job that on-demand VMs could finish in time and in budget.

    Markets have one to four zones; VMs live one to forty hours on average and are lost
    singly or in bursts; zones are empty for hours; prices walk below the on-demand price.
    Jobs have 4 to 16 VMs that scale well or badly, and 1.05 to 2.5 times the time and 1 to
    2 times the money that on-demand VMs need.
    """
    draw = random.Random(f"promise/{seed}")  # a former name: keeps the markets
    fleet = _fleet(draw)
    on_demand_usd = draw.uniform(1.0, 30.0)
    train_s = draw.uniform(5.0, 36.0) * HOUR_S
    start_s = fleet.boot_s + fleet.morph_s
    deadline_s = start_s + train_s * draw.uniform(1.05, 2.5)
    examples = train_s * fleet.rates[-1]
    usd = fleet.max_vms * on_demand_usd * (start_s + train_s) / HOUR_S
    end_s = 2 * deadline_s
    zones = tuple(
        _zone(draw, f"zone-{n}", fleet.max_vms, on_demand_usd, end_s)
        for n in range(draw.randint(1, 4))
    )
    return Scenario(
        name=f"seed {seed}",
        zones=zones,
        on_demand_usd_per_hour=on_demand_usd,
        notice_s=draw.choice((0.0, 30.0, 120.0)),
        fleet=fleet,
        examples=examples,
        deadline_s=deadline_s,
        max_usd=usd * (1 + draw.random() ** 2),
        market_s=end_s,
    )


def harsh(seed: int) -> Scenario:
    """Draw a market whose VMs die as they boot or join, or come and go within minutes.

    Jobs have 1 to 4 VMs, one in five 5 to 16; 0 to 10 times the time and 1 to 20 times the
    money that on-demand VMs need, one in two less than 1 % more of either.
    """
    draw = random.Random(f"harsh/{seed}")
    fleet = _fleet(draw)
    if draw.random() < 0.8:
        rates = (0.0, *(size / (1 + 0.01 * (size - 1)) for size in range(1, 5)))
        fleet = replace(fleet, examples_per_s=rates[: draw.randint(2, 5)])
    train_s = draw.uniform(1.5, 12.0) * HOUR_S
    start_s = fleet.boot_s + fleet.morph_s
    on_demand_usd = 3.0
    spare, more = (
        draw.choice((0.0, 0.01 * draw.random(), *some))
        for some in ((0.02, 0.1, 0.3, 1.0, 3.0, 9.0), (0.02, 0.05, 0.1, 19.0))
    )
    deadline_s = start_s + train_s * (1 + spare)
    usd = fleet.max_vms * on_demand_usd * (start_s + train_s) / HOUR_S
    zones = tuple(
        _harsh_zone(draw, f"zone-{n}", fleet, on_demand_usd, deadline_s)
        for n in range(draw.randint(1, 2))
    )
    return Scenario(
        name=f"harsh {seed}",
        zones=zones,
        on_demand_usd_per_hour=on_demand_usd,
        notice_s=draw.choice((0.0, 30.0, 120.0)),
        fleet=fleet,
        examples=train_s * fleet.rates[-1],
        deadline_s=deadline_s,
        max_usd=usd * (1 + more),
        market_s=deadline_s,
    )


def mostly_there(seed: int) -> Trace:
    """Draw a zone of 16 VMs that is full most of the time.

    All of them, or some, go at once, for a while; it ends after 1 to 12 days.
    """
    draw = random.Random(f"group/{seed}")
    vms, end_s = 16, draw.uniform(1, 12) * 24 * HOUR_S
    up_s = draw.uniform(2, 30) * HOUR_S
    down_s = up_s * draw.uniform(0.02, 0.4)
    whole = draw.random()
    lives = list[Life]()
    starts_s, at_s = [0.0] * vms, 0.0
    while at_s < end_s:
        at_s += draw.expovariate(1 / up_s)
        gone = vms if draw.random() < whole else draw.randint(1, vms)
        numbers, away_s = draw.sample(range(vms), gone), draw.expovariate(1 / down_s)
        for number in numbers:
            if starts_s[number] < min(at_s, end_s):
                lives.append((starts_s[number], min(at_s, end_s)))
            starts_s[number] = at_s + away_s
        at_s += away_s
    lives += [(from_s, end_s) for from_s in starts_s if from_s < end_s]
    found = (
        VmInterval(vm_id=str(number), from_s=from_s, until_s=until_s)
        for number, (from_s, until_s) in enumerate(sorted(lives))
    )
    return Trace(lives=tuple(found), end_s=end_s)


def _harsh_zone(
    draw: random.Random, name: str, fleet: Fleet, on_demand_usd: float, end_s: float
) -> Zone:
    """Draw a zone whose VMs share a fate, or each its own."""
    fates = (_dies_booting, _dies_joining, _flaps, _lives)
    fate = draw.choice((*fates, None))
    lives: list[Life] = []
    for _ in range(fleet.max_vms):
        at_s = draw.uniform(0.0, 300.0)
        while at_s < end_s:
            life_s, gap_s = (fate or draw.choice(fates))(draw, fleet)
            lives.append((at_s, at_s + life_s))
            at_s += life_s + gap_s
    usd = on_demand_usd * draw.choice((0.1, 0.3, 0.6, 0.95, 1.0))
    prices = [usd * draw.choice((1.0, 1.0, 0.5, 1.2)) for _ in range(math.ceil(end_s / PRICE_S))]
    return Zone(name=name, lives=tuple(sorted(lives)), usd_per_hour=tuple(prices))


def _dies_booting(draw: random.Random, fleet: Fleet) -> tuple[float, float]:
    """Return how long a VM lives, and the time to the next."""
    return fleet.boot_s * draw.choice((0.3, 0.9, 0.999)), draw.choice((1.0, 60.0))


def _dies_joining(draw: random.Random, fleet: Fleet) -> tuple[float, float]:
    more_s = draw.choice((1.0, fleet.morph_s, fleet.morph_s + 20.0))
    return fleet.boot_s + more_s, draw.choice((1.0, 60.0))


def _flaps(draw: random.Random, fleet: Fleet) -> tuple[float, float]:
    return draw.uniform(60.0, 1800.0), draw.uniform(10.0, 1800.0)


def _lives(draw: random.Random, fleet: Fleet) -> tuple[float, float]:
    return draw.uniform(0.5, 5.0) * HOUR_S, draw.uniform(60.0, 2 * HOUR_S)


def _fleet(draw: random.Random) -> Fleet:
    max_vms, friction = draw.randint(4, 16), draw.uniform(0.0, 0.03)
    least = draw.randint(1, max(1, max_vms // 4))
    rates = [
        0.0 if size < least else size / (1 + friction * (size - 1)) for size in range(max_vms + 1)
    ]
    return Fleet(
        examples_per_s=tuple(rates),
        boot_s=draw.uniform(90.0, 360.0),
        morph_s=draw.uniform(10.0, 45.0),
        lost_s=draw.uniform(10.0, 60.0),
    )


def _zone(draw: random.Random, name: str, max_vms: int, on_demand_usd: float, end_s: float) -> Zone:
    """Draw a zone: seats whose VMs come and go, and storms that clear many of them."""
    life_s = HOUR_S * math.exp(draw.uniform(0.0, math.log(40.0)))
    gap_s = life_s * draw.uniform(0.05, 1.0)
    storms = _storms(draw, end_s)
    lives = [
        life
        for _ in range(draw.randint(max(1, max_vms // 4), max_vms + max_vms // 2))
        for life in _calm(_seat(draw, life_s, gap_s, end_s), storms, draw)
    ]
    return Zone(
        name=name,
        lives=tuple(sorted(lives)),
        usd_per_hour=_walk(draw, on_demand_usd, end_s),
    )


def _seat(draw: random.Random, life_s: float, gap_s: float, end_s: float) -> Sequence[Life]:
    at_s = -draw.expovariate(1 / gap_s) if draw.random() < 0.5 else -life_s
    lives = []
    while at_s < end_s:
        until_s = at_s + draw.expovariate(1 / life_s)
        if until_s > 0:
            lives.append((max(0.0, at_s), until_s))
        at_s = until_s + draw.expovariate(1 / gap_s)
    return lives


def _storms(draw: random.Random, end_s: float) -> list[tuple[float, float, float]]:
    """Return storms: start, end, and the share of the zone's VMs that are lost."""
    between_s = HOUR_S * draw.uniform(4.0, 72.0)
    length_s = HOUR_S * draw.uniform(0.3, 8.0)
    storms, at_s = [], draw.expovariate(1 / between_s)
    while at_s < end_s:
        until_s = at_s + draw.expovariate(1 / length_s)
        storms.append((at_s, until_s, draw.uniform(0.3, 1.2)))
        at_s = until_s + draw.expovariate(1 / between_s)
    return storms


def _calm(
    lives: Sequence[Life],
    storms: Sequence[tuple[float, float, float]],
    draw: random.Random,
) -> list[Life]:
    """Return the lives of a seat that the storms leave."""
    for from_s, until_s, share in storms:
        if draw.random() >= share:
            continue
        parts = [
            part
            for begin_s, end_s in lives
            for part in ((begin_s, min(end_s, from_s)), (max(begin_s, until_s), end_s))
        ]
        lives = [(a, b) for a, b in parts if a < b]
    return list(lives)


def _walk(draw: random.Random, on_demand_usd: float, end_s: float) -> tuple[float, ...]:
    """Return prices that walk around a mean and sometimes jump, below on demand."""
    mean = math.log(draw.uniform(0.15, 0.65))
    swing, pull = draw.uniform(0.0, 0.08), draw.uniform(0.01, 0.1)
    share, prices = mean, []
    for _ in range(math.ceil(end_s / PRICE_S)):
        share += pull * (mean - share) + draw.gauss(0.0, swing)
        if draw.random() < 0.004:
            share += draw.choice((-0.3, 0.3, 0.5))
        prices.append(on_demand_usd * min(1.0, math.exp(share)))
    return tuple(prices)


def from_trace(
    name: str,
    traces: Sequence[Trace],
    fleet: Fleet,
    *,
    tightness: float,
    on_demand_usd_per_hour: float = 3.06,
    spot_share: float = 0.3,
    budget_share: float = 1.0,
) -> Scenario:
    """Return a job on recorded traces, with a constant spot price.

    Args:
        name: Of the scenario.
        traces: Lives of the VMs of each zone.
        fleet: Its size need not be that of a trace.
        tightness: Time that on-demand VMs need, as a share of the shortest trace, whose end
            is the deadline.
        on_demand_usd_per_hour: Of one VM.
        spot_share: The spot price as a share of it.
        budget_share: The budget as a share of what on-demand VMs cost.
    """
    start_s = fleet.boot_s + fleet.morph_s
    end_s = min(trace.end_s for trace in traces)
    train_s = end_s * tightness - start_s
    usd_per_hour = fleet.max_vms * on_demand_usd_per_hour
    return Scenario(
        name=name,
        zones=tuple(
            Zone(
                name=f"trace {number}" if number else "trace",
                lives=tuple((vm.from_s, vm.until_s) for vm in trace.lives if vm.from_s < end_s),
                usd_per_hour=(spot_share * on_demand_usd_per_hour,),
            )
            for number, trace in enumerate(traces)
        ),
        on_demand_usd_per_hour=on_demand_usd_per_hour,
        notice_s=0.0,
        fleet=fleet,
        examples=train_s * fleet.rates[-1],
        deadline_s=end_s,
        max_usd=usd_per_hour * (start_s + train_s) / HOUR_S * budget_share,
        market_s=end_s,
    )
