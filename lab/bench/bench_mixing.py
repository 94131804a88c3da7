"""Fast and slow GPUs in one job: the tables of docs/heterogeneous.md. All in virtual time."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.unit.morphing.mixed_fleet import facts, fleet, inputs, profile, profile_at

from spottrain.morphing.adapt.balance import start
from spottrain.morphing.adapt.shares import replica_speed, share_virtual_nodes
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import Plan
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
    plan = choose_plan(inputs(fleet((2, FAST), (8, SLOW)))).plan
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
    plans()
    like_first()
    controller()
