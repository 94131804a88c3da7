"""Seconds that ranking 2,000 offers takes after the imports; fails above 3 of the CPU.

The 2.5 billion parameter GPT-2 on the catalogue's machines, in so many zones that there
are 2,000 offers, at prices drawn around the published ones: for fleets of several sizes,
with an hourly cap, which makes fleets differ in size, and by both objectives.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from spottrain.cloud.port.provider import Offer
from spottrain.codec import decode
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.workload import Workload
from spottrain.pricing.prices.catalogue import Catalogue, catalogue
from spottrain.pricing.prices.price import offers, published
from spottrain.pricing.ranking.gpu_speed import machine_of, speed_ratio, work_of
from spottrain.pricing.ranking.rank import Priced, RankingTerms, rank
from spottrain.pricing.ranking.throughput import ThroughputCache
from spottrain.varuna_manager.offers.preview import workload_inputs

PROFILE = Path(__file__).resolve().parents[2] / "examples/profiles/gpt2-2.5b-v100.json"
OFFERS, WITHIN_S = 2000, 3.0


def market(workload: Workload, facts: Catalogue) -> Iterator[Priced]:
    """Yield spot and on-demand offers."""
    draw = random.Random(0)
    base = facts.gpu_of(workload.profile.device)
    assert base is not None
    work = work_of(workload.facts, workload.precision or "fp32", workload.profile)
    known = offers((p for p in published(facts) if not p.spot), facts)
    for number in range(OFFERS):
        listed = known[number % len(known)]
        kind = facts.types[listed.cloud, listed.instance_type]
        spot = number >= len(known)
        speed = speed_ratio(kind.gpu, base, work)
        share = draw.uniform(0.15, 0.7) if spot else 1.0
        offer: Offer = replace(
            listed,
            zone=f"{listed.region}-{number // len(known)}",
            spot=spot,
            usd_per_hour=listed.usd_per_hour * share,
        )
        yield Priced(
            offer=offer,
            machine=None if speed is None else machine_of(kind, speed),
            losses_per_hour=draw.expovariate(20.0) if spot else 0.0,
            boot_s=180.0,
            is_estimate=True,
        )


def main() -> int:
    """Run all cases; returns how many took too long."""
    facts = catalogue()
    workload: Workload = decode(Workload, PROFILE.read_text())
    inputs = replace(workload_inputs(workload, 1), slots=())
    priced = list(market(workload, facts))
    terms = RankingTerms(examples=1e8, max_vms=8, morph_s=30.0, lag_steps=50.0)
    ThroughputCache(inputs).of(next(p.machine for p in priced if p.machine), 4)  # compiles
    cases: dict[str, tuple[PlanInputs, RankingTerms]] = {
        "4 VMs": (inputs, replace(terms, max_vms=4)),
        "8 VMs": (inputs, terms),
        "32 VMs": (inputs, replace(terms, max_vms=32)),
        "128 VMs": (inputs, replace(terms, max_vms=128)),
        "32 VMs, $50 an hour": (
            inputs,
            replace(terms, max_vms=32, max_usd_per_hour=50.0),
        ),
        "32 VMs, for money": (
            replace(inputs, objective="examples_per_dollar"),
            replace(terms, max_vms=32),
        ),
    }
    failed = 0
    print(f"{len(priced)} offers; wanted within {WITHIN_S} s")
    print(f"{'case':<22} {'plans':>6} {'seconds':>8} {'of the CPU':>11}")
    for name, (job, asked) in cases.items():
        throughputs = ThroughputCache(job)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        rank(priced, throughputs, asked)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        print(f"{name:<22} {len(throughputs._planned):6} {wall_s:8.3f} {cpu_s:11.3f}")
        failed += cpu_s > WITHIN_S
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
