"""Replays a scenario under a rule: what the job costs, and whether it is in time.

The same cost model for every rule: a VM is paid from its launch at the market's price, and
trains once it has booted; training pauses for a morph whenever VMs join or leave; a VM
lost without notice takes some training time with it. Rules see how many VMs the market
has, where a real cloud would only refuse.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spottrain.pricing.deadline.model import Fleet, Holdings, Supply
from spottrain.pricing.prices.hazard import PRIOR_VM_HOURS, UNKNOWN_PER_HOUR
from spottrain.units import HOUR_S
from spottrain_lab.markets.scenarios import GIVE_UP, PRICE_S, Scenario

REVIEW_S = 300.0
"""Time between two decisions when nothing happens; prices change at such moments."""
ON_DEMAND = "on-demand"
_TIE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketView:
    """What a rule sees when it decides."""

    now_s: float
    examples_left: float
    usd_spent: float
    supplies: tuple[Supply, ...]
    holdings: tuple[Holdings, ...]
    paused_s: float
    """Until training goes on after a change of the fleet."""
    scenario: Scenario
    """For its fleet, deadline and budget only."""

    @property
    def usd_left(self) -> float:
        """What is left of the budget."""
        return self.scenario.max_usd - self.usd_spent


class FleetRule(Protocol):
    """Decides which VMs are rented."""

    name: str

    def wanted(self, view: MarketView) -> Mapping[str, int]:
        """Return the VMs to hold, by supply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Outcome of a job under a rule."""

    scenario: str
    rule: str
    usd: float
    finished_s: float
    """Finish, or when it was given up."""
    late_by: float
    """How late the job was, as a share of its time; 0 in time."""
    finished: bool
    in_time: bool
    in_budget: bool
    on_demand_usd: float
    """Part of ``usd`` spent on on-demand VMs."""
    booting_usd: float
    """Part spent on VMs that did not train yet."""
    paused_usd: float
    """Part spent while training paused for a morph."""
    losses: int
    """VMs that the market took."""
    launches: int


@dataclass(slots=True, eq=False)
class _Vm:
    supply: str
    ready_s: float
    ends_s: float
    life: int
    is_ready: bool = False


@dataclass(slots=True)
class _Market:
    """State of a zone's market."""

    lives: Sequence[tuple[float, float]]
    draw: random.Random
    next: int = 0
    here: list[int] = field(default_factory=list)
    """Lives that can be had, rented ones excluded."""
    lost: int = 0
    vm_s: float = 0.0

    def free(self, now_s: float, notice_s: float) -> int:
        while self.next < len(self.lives) and self.lives[self.next][0] <= now_s:
            self.here.append(self.next)
            self.next += 1
        self.here = [n for n in self.here if self.lives[n][1] - notice_s > now_s]
        return len(self.here)

    def take(self) -> int:
        return self.here.pop(self.draw.randrange(len(self.here)))

    def losses_per_hour(self) -> float:
        hours = PRIOR_VM_HOURS + self.vm_s / HOUR_S
        return (UNKNOWN_PER_HOUR * PRIOR_VM_HOURS + self.lost) / hours


def play(scenario: Scenario, rule: FleetRule) -> SimulatedRun:
    """Return the outcome of ``scenario`` under ``rule``."""
    return _Run(scenario, rule).play()


class _Run:
    """One job."""

    def __init__(self, scenario: Scenario, rule: FleetRule) -> None:
        self.scenario, self.rule = scenario, rule
        self.fleet: Fleet = scenario.fleet
        self.markets = {
            zone.name: _Market(zone.lives, random.Random(zone.name)) for zone in scenario.zones
        }
        self.vms: list[_Vm] = []
        self.now_s = self.paused_until_s = 0.0
        self.left = scenario.examples
        self.usd = self.on_demand_usd = self.booting_usd = self.paused_usd = 0.0
        self.losses = self.launches = 0
        self.prices: dict[str, float] = {}

    def play(self) -> SimulatedRun:
        last_s = GIVE_UP * self.scenario.deadline_s
        while self.left > 0 and self.now_s < last_s:
            self._update_prices()
            self._apply(self.rule.wanted(self._view()))
            self._advance(self._next_s())
            self._apply_events()
        scenario = self.scenario
        in_time = self.now_s <= scenario.deadline_s + _TIE_S
        return SimulatedRun(
            scenario=scenario.name,
            rule=self.rule.name,
            usd=self.usd,
            finished_s=self.now_s,
            late_by=max(0.0, self.now_s / scenario.deadline_s - 1),
            finished=self.left <= 0,
            in_time=in_time and self.left <= 0,
            in_budget=self.usd <= scenario.max_usd * (1 + 1e-9),
            on_demand_usd=self.on_demand_usd,
            booting_usd=self.booting_usd,
            paused_usd=self.paused_usd,
            losses=self.losses,
            launches=self.launches,
        )

    def _update_prices(self) -> None:
        self.prices = {z.name: z.price(self.now_s) for z in self.scenario.zones}
        self.prices[ON_DEMAND] = self.scenario.on_demand_usd_per_hour

    def _view(self) -> MarketView:
        notice_s = self.scenario.notice_s
        supplies = [
            Supply(
                name=name,
                spot=True,
                usd_per_hour=self.prices[name],
                available=market.free(self.now_s, notice_s),
                losses_per_hour=market.losses_per_hour(),
            )
            for name, market in self.markets.items()
        ]
        supplies.append(Supply(name=ON_DEMAND, spot=False, usd_per_hour=self.prices[ON_DEMAND]))
        holdings = [self._holdings(name) for name in dict.fromkeys(vm.supply for vm in self.vms)]
        return MarketView(
            now_s=self.now_s,
            examples_left=self.left,
            usd_spent=self.usd,
            supplies=tuple(supplies),
            holdings=tuple(holdings),
            paused_s=max(0.0, self.paused_until_s - self.now_s),
            scenario=self.scenario,
        )

    def _holdings(self, name: str) -> Holdings:
        vms = [vm for vm in self.vms if vm.supply == name]
        boots_s = [vm.ready_s - self.now_s for vm in vms if not vm.is_ready]
        return Holdings(
            name=name,
            ready=len(vms) - len(boots_s),
            booting=len(boots_s),
            boots_s=tuple(sorted(boots_s)),
        )

    def _apply(self, wanted: Mapping[str, int]) -> None:
        changed = False
        for name in self.prices:
            mine = [vm for vm in self.vms if vm.supply == name]
            count = wanted.get(name, 0)
            for _ in range(len(mine), count):
                self._launch(name)
            for vm in sorted(mine, key=lambda vm: vm.ready_s)[count:]:
                changed |= vm.is_ready
                self._give_back(vm)
        if changed:
            self._pause()

    def _launch(self, name: str) -> None:
        ends_s, life = math.inf, -1
        if name in self.markets:
            market = self.markets[name]
            if not market.here:
                return
            life = market.take()
            ends_s = market.lives[life][1] - self.scenario.notice_s
        self.launches += 1
        ready_s = self.now_s + self.fleet.boot_s
        self.vms.append(_Vm(supply=name, ready_s=ready_s, ends_s=ends_s, life=life))

    def _give_back(self, vm: _Vm) -> None:
        self.vms.remove(vm)
        if vm.life >= 0:
            self.markets[vm.supply].here.append(vm.life)

    def _pause(self) -> None:
        self.paused_until_s = max(self.paused_until_s, self.now_s + self.fleet.morph_s)

    def _rate(self) -> float:
        ready = sum(vm.is_ready for vm in self.vms)
        return self.fleet.rates[min(ready, self.fleet.max_vms)]

    def _next_s(self) -> float:
        """Return the time of the next event or review."""
        next_s = (math.floor(self.now_s / REVIEW_S + 1e-9) + 1) * REVIEW_S
        for vm in self.vms:
            next_s = min(next_s, vm.ends_s, math.inf if vm.is_ready else vm.ready_s)
        rate = self._rate()
        if rate > 0:
            done_s = max(self.now_s, self.paused_until_s) + self.left / rate
            next_s = min(next_s, done_s)
        return max(next_s, self.now_s)

    def _advance(self, until_s: float) -> None:
        seconds = until_s - self.now_s
        paused_s = min(seconds, max(0.0, self.paused_until_s - self.now_s))
        for vm in self.vms:
            usd = self.prices[vm.supply] * seconds / HOUR_S
            self.usd += usd
            if vm.supply == ON_DEMAND:
                self.on_demand_usd += usd
            else:
                self.markets[vm.supply].vm_s += seconds
            if not vm.is_ready:
                self.booting_usd += usd
            elif seconds > 0:
                self.paused_usd += usd * paused_s / seconds
        self.left -= self._rate() * (seconds - paused_s)
        if self.left < 1e-9 * self.scenario.examples:
            self.left = 0.0
        self.now_s = until_s

    def _apply_events(self) -> None:
        """Remove VMs that end now, and let those that are ready join."""
        rate, changed = self._rate(), False
        for vm in [vm for vm in self.vms if vm.ends_s <= self.now_s + _TIE_S]:
            self.vms.remove(vm)
            self.losses += 1
            self.markets[vm.supply].lost += 1
            changed |= vm.is_ready
        if changed and self.scenario.notice_s < self.fleet.morph_s and self.left > 0:
            lost = rate * self.fleet.lost_s
            self.left = min(self.scenario.examples, self.left + lost)
        for vm in self.vms:
            if not vm.is_ready and vm.ready_s <= self.now_s + _TIE_S:
                vm.is_ready = changed = True
        if changed:
            self._pause()


assert PRICE_S % REVIEW_S == 0
