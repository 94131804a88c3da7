"""Fast and slow GPUs in one job: the tables of docs/heterogeneous.md. All in virtual time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

from tests.bench.mixed_types import (
    LEAST,
    examples_of,
    inputs_of,
    leaves_out_the_slowest,
    sums_s,
)
from tests.unit.morphing.mixed_fleet import facts, fleet, inputs, profile, profile_at

from spottrain.morphing.adapt.balance import start
from spottrain.morphing.adapt.shares import replica_speed, share_virtual_nodes
from spottrain.morphing.plan.choose import NOISE, choose_plan
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.plan import Plan
from spottrain_lab.traces.mixing import WorkerType, split_minibatch

SIZES = (16, 24, 32, 48, 64, 96, 128, 192, 256)
FAST, SLOW = 4.0, 1.0


def worker(name: str, count: int, speed: float) -> WorkerType:
    times = {b: (0.02 + b / 400) / speed for b in SIZES}
    return WorkerType(name=name, count=count, virtual_node_s=times)


def ring(allreduce_s: float) -> Callable[[int], float]:
    return lambda workers: 2 * (workers - 1) / workers * allreduce_s


def solver() -> None:
    print("The solver: mini-batch 8192, a slow GPU 400 examples/s and 20 ms a virtual node,")
    print("a fast one 4 times as fast, all-reduce 0.1 s times 2 (n - 1) / n\n")
    print("fast  slow  fast alone  slow alone   best    gain  examples each")
    for fast, slow in ((2, 2), (2, 4), (2, 8), (2, 16), (4, 1), (2, 1)):
        types = [worker("fast", fast, FAST), worker("slow", slow, SLOW)]
        mixing = split_minibatch(8192, types, ring(0.1))
        alone = [split.step_s for split in mixing.alone.values() if split is not None]
        each = " + ".join(f"{s.workers} {s.name} x {s.examples}" for s in mixing.best.shares)
        gain = min(alone) / mixing.best.step_s - 1
        print(
            f"{fast:4d}  {slow:4d}  {alone[0]:8.3f} s  {alone[1]:8.3f} s  "
            f"{mixing.best.step_s:.3f} s  {gain:5.1%}  {each}"
        )
    print("\nThe same, slow GPUs behind ever slower links (2 fast, 2 slow):\n")
    print("all-reduce    best  chosen")
    types = [worker("fast", 2, FAST), worker("slow", 2, SLOW)]
    for ring_s in (0.1, 0.5, 0.8, 1.0, 2.0):
        best = split_minibatch(8192, types, ring(ring_s)).best
        names = " + ".join(f"{s.workers} {s.name}" for s in best.shares)
        print(f"{ring_s:8.1f} s  {best.step_s:.3f} s  {names}")


def both_answers() -> None:
    """Compare the planner with the solver on drawn fleets."""
    print("\nThe planner beside the solver: 2 or 3 types of 1 to 4 GPUs, sizes of 16 up to 256,")
    print("mini-batches of 64 to 4096; a virtual node costs as much as so many examples besides\n")
    print("            solver's set of  planner:              at most  solver  planner")
    print("besides     GPUs             equal  faster  slower  slower   mixes    mixes")
    for least, most in ((256, 640), (0, 32)):
        random = Random(0)
        rows: dict[bool, list[tuple[float, bool, bool]]] = {True: [], False: []}
        for _ in range(200):
            types = []
            for name in random.choice(("VP", "VPK")):
                speed, beside = random.choice((1.0, 1.7, 2.0, 4.0)), random.uniform(least, most)
                sizes = [LEAST * 2**k for k in range(random.randint(1, 5))]
                times = {size: (beside + size) / 400 / speed for size in sizes}
                types.append(
                    WorkerType(name=name, count=random.randint(1, 4), virtual_node_s=times)
                )
            minibatch_size = 64 * random.randint(1, 64)
            case = inputs_of(types, minibatch_size, random.choice((0, 10**7, 10**8)))
            best = split_minibatch(minibatch_size, types, partial(sums_s, case)).best
            plan = choose_plan(case).plan
            assert plan is not None
            used = {name for name, _, _ in examples_of(plan)}
            ratio = plan.predicted_step_s / best.step_s
            rows[leaves_out_the_slowest(best, types)].append((ratio, best.is_mixed, len(used) > 1))
        for possible, found in rows.items():
            ratios = [ratio for ratio, _, _ in found]
            faster, slower = (sum(f(r) for r in ratios) for f in (is_faster, is_slower))
            print(
                f"{least:3d} to {most:3d}  {'fastest' if possible else 'others':15s}  "
                f"{len(found) - faster - slower:5d}  {faster:6d}  {slower:6d}  "
                f"{max(ratios) - 1:7.1%}  {sum(m for _, m, _ in found):6d}  "
                f"{sum(m for _, _, m in found):7d}"
            )


def is_faster(ratio: float) -> bool:
    return ratio < 1 - NOISE


def is_slower(ratio: float) -> bool:
    return ratio > 1 + NOISE


def types_of_gpus() -> None:
    """Plans with micro-batches for each type of GPU, and with one size for all."""
    print("\nchoose_plan for 2 fast and 8 slow GPUs, mini-batch 8192; a micro-batch costs 20 ms")
    print("on slow GPUs, 5 ms on fast ones, beside its examples; fast ones have memory for 256\n")
    print("largest on slow  micro-batches  step      examples of each (of a micro-batch)")
    for largest in (256, 64, 16):
        types = [
            WorkerType(
                name=name,
                count=count,
                virtual_node_s={
                    size: (0.02 + size / 400) / speed
                    for size in (16, 32, 64, 128, 256)
                    if size <= top
                },
            )
            for name, count, speed, top in (("fast", 2, FAST, 256), ("slow", 8, SLOW, largest))
        ]
        case = inputs_of(types, 8192, 10**8)
        for name, merges in (("for each type", True), ("of 16 for all", False)):
            plan = choose_plan(replace(case, merges=merges)).plan
            assert plan is not None
            rows = Counter(examples_of(plan))
            each = " ".join(f"{n} {kind} x {e} ({m})" for (kind, e, m), n in rows.items())
            print(f"{largest:15d}  {name:13s}  {plan.predicted_step_s:.3f} s   {each}")


def speeds_of(plan: Plan, devices: tuple[Device, ...]) -> list[float]:
    of_slot = {device.slot: device.speed for device in devices}
    return [of_slot[slot] for slot in plan.slots]


def plans() -> None:
    print("\nchoose_plan: 24 sections that need two devices, mini-batch 1024\n")
    print("fleet            PxD  schedule  step       virtual nodes, speeds of replicas")
    both = fleet((2, FAST), (8, SLOW))
    for name, devices in (
        ("2 fast + 8 slow", both),
        ("2 fast", both[:2]),
        ("8 slow", both[2:]),
        ("3 fast + 7 slow", fleet((3, FAST), (7, SLOW))),
        ("2 fast + 2 slow", fleet((2, FAST), (2, SLOW))),
    ):
        plan = choose_plan(inputs(devices)).plan
        assert plan is not None
        speeds = speeds_of(plan, devices)
        depth = plan.pipeline_depth
        replicas = " ".join(
            f"{end - begin}@{'/'.join(f'{v:g}' for v in speeds[d * depth :][:depth])}"
            for d, (begin, end) in enumerate(itertools.pairwise(plan.replica_bounds))
        )
        print(
            f"{name:15s}  {plan.shape:>3s}  {plan.schedule:8s}  "
            f"{plan.predicted_step_s:6.2f} s   {replicas}"
        )


def step_s(plan: Plan, speeds: list[float]) -> float:
    """Return what a mini-batch takes if the plan's devices have these speeds."""
    depth = plan.pipeline_depth
    own_s = 0.080 * len(plan.sections_of(0))
    throughputs = [
        replica_speed([own_s / v for v in speeds[i : i + depth]])
        for i in range(0, len(speeds), depth)
    ]
    bounds = share_virtual_nodes(
        plan.replica_bounds[-1],
        [pace.per_virtual_node_s for pace in throughputs],
        fixed_s=[pace.fixed_s for pace in throughputs],
    )
    shared = replace(plan, replica_bounds=bounds)
    profiles = list(map(profile_at, speeds))
    step = simulate_step(shared, profile(), facts(), reduction="fast", profiles=profiles)
    return step.step_s


def like_first() -> None:
    """What it costs to leave devices where their sections are instead."""
    case = replace(inputs(fleet((2, FAST), (8, SLOW))), schedule="varuna")
    plan = choose_plan(case).plan
    assert plan is not None
    like_s = step_s(plan, [FAST] * 2 + [SLOW] * 8)
    kept_s = step_s(plan, [FAST, SLOW] * 2 + [SLOW] * 6)
    sections = facts().sections[: len(plan.sections_of(0))]
    moved = sum(section.param_bytes + section.optimizer_bytes for section in sections)
    once_s = moved / profile().between_vms.bandwidth_bytes_per_s
    print(f"\nLike devices together or sections kept ({plan.shape}, both fast devices")
    print("hold the first half of the model when the plan is made):\n")
    print(f"like devices          {like_s:6.2f} s every mini-batch")
    print(f"sections kept         {kept_s:6.2f} s every mini-batch")
    print(f"moving {moved / 1e9:.1f} GB         {once_s:6.2f} s once")


def controller() -> None:
    print("\nThe controller: (3, 5, 12) cores, 60 virtual nodes, even shares at first,")
    print("0.2 s besides, 200 seeds of 500 mini-batches\n")
    print("noise  changes (runs)             slowest over best, at most")
    cores, fixed_s, nodes = (3, 5, 12), 0.2, 60
    best_s = fixed_s + nodes / sum(cores)
    for noise in (0.0, 0.03, 0.1):
        counts: Counter[int] = Counter()
        worst = 0.0
        for seed in range(200):
            random, seen = Random(seed), start([20, 20, 20])
            changes = 0
            for _ in range(500):
                times_s = [
                    (fixed_s + b / v) * math.exp(random.gauss(0, noise))
                    for b, v in zip(seen.shares, cores, strict=True)
                ]
                before, seen = seen, seen.observe(times_s)
                changes += seen.shares != before.shares
            counts[changes] += 1
            slowest_s = fixed_s + max(b / v for b, v in zip(seen.shares, cores, strict=True))
            worst = max(worst, slowest_s / best_s)
        counted = ", ".join(f"{n}: {counts[n]}" for n in sorted(counts))
        print(f"{noise:5.0%}  {counted:25s}  {worst:.3f}")


if __name__ == "__main__":
    solver()
    both_answers()
    types_of_gpus()
    plans()
    like_first()
    controller()
