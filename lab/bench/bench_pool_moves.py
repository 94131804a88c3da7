"""What a job of a pool gains by moving within its grant, over recorded prices.

One kind of VM in the regions of a file of prices, of which all but one are sold out at any time (drawn),
so that a job begins where there are VMs and not where they are cheapest. Compared are a job that
the pool lets move and one that it does not, both with the manager's own core.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from tests.simulation.test_pool_moves import GrantedWorld
from tests.simulation.test_simulation import FACTS, SPEC, settings

from spottrain.cloud.port.provider import Offer
from spottrain.units import DAY_S, HOUR_S
from spottrain.varuna_manager.core.model.events import GrantReceived
from spottrain_lab.markets.price_file import parse_prices

from .bench_moves import START_S, Market

KINDS = ("NC24", "NC24s v2")
VMS = 4
DAYS = 0.5
SEEDS = 3
SOLD_OUT_S = 3 * HOUR_S
"""Mean time between two changes of what regions have."""
LOSSES_A_DAY = 4.0
"""Of the whole fleet: it begins anew, wherever there are VMs."""


class Scarce(Market):
    """Regions that are sold out by turns."""

    def offers(self) -> tuple[Offer, ...]:
        """Return what is offered now."""
        return tuple(replace(one, available=self.free(one.zone)) for one in super().offers())


class Pooled(GrantedWorld):
    """A job whose pool grants VMs of the one kind."""

    kind = ""

    def grant(self, idle_s: float = 0.0) -> GrantReceived:
        """Return the next grant."""
        made = super().grant(idle_s)
        return replace(made, grant=replace(made.grant, vms=((self.kind, self.most),)))


def played(days: list[dict], seed: int, moves: bool) -> tuple[float, int]:  # type: ignore[type-arg]
    """Return what a job spends, and how often it goes elsewhere by itself."""
    places = sorted({place for day in days for place in day})
    cloud = Scarce(capacity={place.zone: VMS for place in places}, prices={})
    spec = replace(SPEC, steps=int(DAYS * DAY_S / 96), minibatch_size=64, checkpoint_every_steps=1)
    job_settings = settings(
        spec=spec, facts=FACTS, max_vms=VMS, min_vms=VMS, objective="examples_per_dollar"
    )
    job = Pooled(seed, job_settings, cloud)
    cloud.days, cloud.world = days, job
    job.kind = f"{places[0].cloud}/{places[0].instance_type} of 2020"
    job.most, job.asked_s, job.allows = VMS, [], moves
    job.settings = replace(job.settings, grant=job.grant().grant)
    draw = random.Random(seed)
    at_s = 0.0
    while at_s < 10 * DAYS * DAY_S:
        at_s += draw.expovariate(1 / SOLD_OUT_S)
        sold_out = draw.sample(places, len(places) - 1)
        has = {place.zone: 0 if place in sold_out else 2 * VMS for place in places}
        job.after(at_s, lambda has=has: cloud.capacity.update(has))  # type: ignore[misc]

    def lose() -> None:
        for vm in [vm for vm in cloud.vms.values() if vm.alive]:
            job.end_vm(vm.vm_id)
        job.after(draw.expovariate(LOSSES_A_DAY / DAY_S), lose)

    job.after(HOUR_S, lose)
    job.run(until_s=10 * DAYS * DAY_S)
    assert job.finished is not None
    assert job.finished.kind == "succeeded", job.finished
    assert job.now_s > START_S
    return job.ledger.spent(job.now_s).usd, sum(1 for each in job.asked_s if each == 0.0)


def main() -> None:
    """Print a row for each kind."""
    file = parse_prices(Path(sys.argv[1]).read_text())
    print("| kind | regions or zones | stays, $ | moves, $ | ratio | moves |")
    print("|---" * 6 + "|", flush=True)
    for kind in KINDS:
        days = [
            {place: min(seen) for place, seen in day.items() if place.instance_type == kind}
            for day in file.days.values()
        ]
        days = [day for day in days if len(day) > 1][-10:]
        stays, goes, moves = list[float](), list[float](), 0
        for seed in range(SEEDS):
            stays.append(played(days, seed, moves=False)[0])
            usd, moved = played(days, seed, moves=True)
            goes.append(usd)
            moves += moved
        ratio = fmean(goes) / fmean(stays)
        print(
            f"| {kind} | {len(days[0])} | {fmean(stays):.2f} | {fmean(goes):.2f} | {ratio:.3f} "
            f"| {moves} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
