"""What exact sums cost: mini-batches of exact mode over those of fast mode.

Real workers train the same model in both modes by turns; printed are medians of the time
of a mini-batch and of the CPU time that all processes took for it. One case alone takes a minute
of a core: ``--shape 1x2 --microbatch-size 4 --turns 1``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

from tests.builders import a_spec
from tests.integration.fleet import Fleet, Zygote, make_plan

from spottrain.pipeline.model.entrypoint import load_job
from spottrain.pipeline.model.tracer import trace
from spottrain.wire import messages
from spottrain.wire.model import Reduction

HERE = Path(__file__).parent
STEPS, TURNS, WARM_UP = 10, 3, 2
MICROBATCH_SIZES = (1, 4)
SHAPES = ("1x1", "1x2", "2x1")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def measure(
    zygote: Zygote, shape: tuple[int, int], microbatch_size: int, reduction: Reduction
) -> tuple[list[float], float]:
    """Return the times of mini-batches, and the CPU time of one of them."""
    with tempfile.TemporaryDirectory() as folder:
        spec = a_spec(
            name="exact",
            entrypoint="gpt_job:job",
            steps=STEPS,
            minibatch_size=8 * microbatch_size,
            microbatch_size=microbatch_size,
            reduction=reduction,
            checkpoint_path=f"{folder}/checkpoints",
            checkpoint_every_steps=1000,
            checkpoint_keep=1,
            lease_s=100.0,
        )
        sections = trace(load_job(spec.entrypoint, HERE)).num_sections
        names = "ab"[: shape[0] * shape[1]]
        with Fleet(spec, names, Path(folder) / "log", zygote, workdir=HERE) as fleet:
            fleet.ready()
            checkpoint = fleet.initialise()
            fleet.run(make_plan(spec, *shape, names, sections), checkpoint)
            fleet.wait_for_step(WARM_UP)
            began_s = cpu_s(fleet)
            fleet.wait_for_step(STEPS)
            spent_s = cpu_s(fleet) - began_s
            times_s = [
                r.step_s
                for _, r in fleet.history
                if isinstance(r, messages.MinibatchCommitted) and r.step > WARM_UP
            ]
    return times_s, spent_s / (STEPS - WARM_UP)


def cpu_s(fleet: Fleet) -> float:
    """Return the CPU time of all workers so far."""
    pids = {pid for some in fleet.pids().values() for pid in some}
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICKS_PER_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=SHAPES)
    parser.add_argument("--microbatch-size", type=int, nargs="*", default=MICROBATCH_SIZES)
    parser.add_argument("--turns", type=int, default=TURNS)
    args = parser.parse_args()
    zygote = Zygote()
    print("shape  m  fast s  exact s  exact/fast wall  CPU  fast CPU s  exact CPU s")
    for name in args.shape:
        depth, width = map(int, name.split("x"))
        for size in args.microbatch_size:
            wall: dict[Reduction, list[float]] = {"fast": [], "exact": []}
            cpu: dict[Reduction, list[float]] = {"fast": [], "exact": []}
            for _ in range(args.turns):
                for reduction in wall:
                    times_s, spent_s = measure(zygote, (depth, width), size, reduction)
                    wall[reduction] += times_s
                    cpu[reduction].append(spent_s)
            fast_s, exact_s = map(statistics.median, wall.values())
            fast_cpu_s, exact_cpu_s = map(statistics.median, cpu.values())
            print(
                f"{name}   {size:2}  {fast_s:6.3f}  {exact_s:7.3f}"
                f"  {exact_s / fast_s:15.2f}  {exact_cpu_s / fast_cpu_s:4.2f}"
                f"  {fast_cpu_s:10.3f}  {exact_cpu_s:11.3f}"
            )
    zygote.close()


if __name__ == "__main__":
    main()
