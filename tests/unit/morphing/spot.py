"""A small model, and spot groups made from seeds, for tests of replays."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from tests.unit.morphing.plan.test_choose import measured, model

from spottrain.morphing.plan.workload import Workload
from spottrain_lab.traces.shapes import Shapes
from spottrain_lab.traces.traces import Trace, VmInterval, parse_trace

GIB = 2**30


def workload(sections: int = 6, minibatch_size: int = 64) -> Workload:
    return Workload(
        sources=("a test",),
        facts=model(sections),
        profile=measured(sections),
        minibatch_size=minibatch_size,
        gpu_memory_bytes=GIB,
        usd_per_hour=2.0,
    )


@cache
def shapes(fewest: int = 1) -> Shapes:
    """The model on GPUs so small that it needs at least ``fewest``."""
    for memory_mib in range(1024, 0, -4):
        load = replace(workload(), gpu_memory_bytes=memory_mib * 2**20)
        known = Shapes(load)
        if known.fewest() == fewest:
            return known
    raise AssertionError("no memory is right")


def lives(*spans: tuple[float, float], end_s: float) -> Trace:
    """A trace of VMs named a, b, c, …"""
    return Trace(
        lives=tuple(
            VmInterval(vm_id=chr(ord("a") + i), from_s=from_s, until_s=until_s)
            for i, (from_s, until_s) in enumerate(spans)
        ),
        end_s=end_s,
    )


def spot_group(seed: int) -> Trace:
    """A group that loses VMs in bursts, at a rate of its own, and is filled up again."""
    draw = random.Random(seed)
    target, end_s = draw.choice((3, 6, 12)), draw.choice((300, 1200))
    life_s, refill_s = draw.choice((60, 200, 1000)), draw.choice((10, 60))
    burst = draw.choice((1, 3))
    rows = [f"0,add,vm{i}" for i in range(target)]
    here, named, now_s = list(range(target)), target, 0.0
    while True:
        rates = len(here) / life_s / burst, (len(here) < target) / refill_s
        now_s += draw.expovariate(sum(rates))
        if now_s >= end_s:
            break
        if draw.random() < rates[0] / sum(rates):
            for _ in range(min(len(here), draw.randint(1, burst))):
                gone = here.pop(draw.randrange(len(here)))
                rows.append(f"{now_s * 1000:.0f},remove,vm{gone}")
        else:
            here.append(named)
            rows.append(f"{now_s * 1000:.0f},add,vm{named}")
            named += 1
    return parse_trace("\n".join([*rows, f"{end_s * 1000},add,last"]))
