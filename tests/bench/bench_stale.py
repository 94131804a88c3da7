"""Gradients that are stale by one mini-batch beside those that are not, on slow links.

Every stage is a process in a network namespace of its own, joined by a switch; its tasks
sleep, 20 ms forward and 40 ms backward a stage, all else is real. Both semantics run what
the planner chooses from one calibration on these links, by turns. What counts is the time
from one commit to the next, once the pipeline is filled. Needs root.

    python -m tests.bench.bench_stale [--depth 4] [--microbatches 4,32] [--links clean,100]
        [--rounds 3] [--counted 8]
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.bench.accuracy_fleet import HERE, job_spec, scratch, undisturbed
from tests.bench.accuracy_fleet import Trainer as Calibrator
from tests.bench.bench_accuracy import CALIBRATORS
from tests.bench.bench_rivals import (
    BACKWARD_S,
    BLOCKS_A_STAGE,
    FORWARD_S,
    KINDS_OF_LINKS,
    inputs_of,
    tell,
)
from tests.bench.network import Network
from tests.integration.fleet import Fleet, Heard, Host, Zygote

from spottrain.morphing.plan.choose import choose_plan
from spottrain.varuna_manager.reporting.tables import execution_line
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, ScheduleKind, Semantics

CONTENDERS: Mapping[str, tuple[Semantics, ScheduleKind | None]] = {
    "1f1b": ("synchronous", "1f1b"),
    "best": ("synchronous", None),
    "stale": ("stale_by_one", None),
}
"""Semantics, and the schedule where the planner is not free to choose: PipeDream-2BW is
compared with PipeDream-Flush, which is 1F1B that drains."""
WARM_UP = 3
"""Mini-batches of a run that do not count: the first one, and what fills the pipeline."""


@dataclass(frozen=True)
class Row:
    """What both have taken under the same conditions, medians of all rounds."""

    microbatches: int
    links: str
    plans: dict[str, Plan]
    step_s: dict[str, float]

    def text(self, depth: int) -> str:
        """Return a line of the table."""
        lines = {name: execution_line(asdict(plan)) for name, plan in self.plans.items()}
        columns = [
            str(depth),
            str(self.microbatches),
            self.links,
            *(f"{lines[name]}: {self._times(name)}" for name in CONTENDERS),
            *(self._gain(name) for name in ("1f1b", "best")),
        ]
        return f"| {' | '.join(columns)} |"

    def _times(self, name: str) -> str:
        return f"{self.step_s[name]:.3f} ({self.plans[name].predicted_step_s:.3f})"

    def _gain(self, name: str) -> str:
        predicted = self.plans[name].predicted_step_s / self.plans["stale"].predicted_step_s
        return f"{self.step_s[name] / self.step_s['stale']:.2f} ({predicted:.2f})"


HEADER = (
    "| P | micro-batches | links | 1f1b that drains, s (predicted) | best that drains "
    "| stale by one | times as fast as 1f1b | as the best |\n" + "|---" * 8 + "|"
)


def measure(
    depth: int, counts: Sequence[int], kinds: Sequence[str], rounds: int, counted: int
) -> Iterator[Row]:
    """Yield a row for each combination."""
    with undisturbed() as ahead, Network(depth) as network, scratch() as folder:
        if not ahead:
            tell("not permitted to run ahead of other programs: they will disturb")
        zygote = Zygote()
        hosts = {
            f"vm{n}": Host(network.address(n), "eth0", network.namespace(n)) for n in range(depth)
        }
        try:
            for kind in kinds:
                name, links = KINDS_OF_LINKS[kind]
                network.set_version(links)
                spec = job_spec(folder, "emulated_job:job", max(counts), 1)
                calibrator = Calibrator(spec, zygote, hosts, folder)
                profile = calibrator.calibrate(min(CALIBRATORS, depth))
                for count in counts:
                    own = replace(spec, minibatch_size=count)
                    yield _row(own, profile, hosts, folder, zygote, name, rounds, counted)
        finally:
            zygote.close()


def _row(
    spec: JobSpec,
    profile: Profile,
    hosts: dict[str, Host],
    folder: Path,
    zygote: Zygote,
    links: str,
    rounds: int,
    counted: int,
) -> Row:
    plans: dict[str, Plan] = {}
    times: dict[str, list[float]] = {}
    for contender, (semantics, schedule) in CONTENDERS.items():
        own = replace(spec, semantics=semantics, steps=10**6)
        plan = plans[contender] = _plan(own, profile, list(hosts), schedule)
        log = folder / "log"
        with Fleet(own, list(hosts), log, zygote, workdir=HERE, hosts=hosts) as fleet:
            fleet.ready()
            checkpoint = fleet.initialise()
            times[contender] = [_run(fleet, plan, checkpoint, counted) for _ in range(rounds)]
            tell(f"{spec.minibatch_size} {links} {contender}: {times[contender]}")
    step_s = {one: statistics.median(found) for one, found in times.items()}
    return Row(spec.minibatch_size, links, plans, step_s)


def _run(fleet: Fleet, plan: Plan, checkpoint: str, counted: int) -> float:
    """Run a generation; return the mean time of a mini-batch on its slowest rank."""
    fleet.run(plan, checkpoint)
    found: dict[str, list[float]] = {}

    def took(vm: str, report: Heard) -> bool | None:
        if isinstance(report, messages.MinibatchCommitted):
            if report.generation == fleet.generation:
                found.setdefault(vm, []).append(report.step_s)
        elif isinstance(report, messages.GenerationBroken | messages.WorkerDied):
            raise SystemExit(f"a run failed: {report}")
        complete = [own for own in found.values() if len(own) >= WARM_UP + counted]
        return True if len(complete) == len(plan.slots) else None

    fleet.wait_for("steps", took)
    fleet.stop()
    fleet.wait_for_end(set(fleet.machines))
    end = WARM_UP + counted
    return max(statistics.fmean(own[WARM_UP:end]) for own in found.values())


def _plan(
    spec: JobSpec,
    profile: Profile,
    vms: Sequence[str],
    schedule: ScheduleKind | None,
) -> Plan:
    """Return the plan that the planner chooses."""
    inputs = inputs_of(spec, profile, vms, recompute=False)
    plan = choose_plan(replace(inputs, schedule=schedule)).plan
    assert plan is not None
    return plan


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_stale")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--microbatches", default="4,32")
    parser.add_argument("--links", default="clean,100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--counted", type=int, default=8, help="mini-batches of a run")
    chosen = parser.parse_args()
    os.environ |= {
        "EMULATED_BLOCKS": str(BLOCKS_A_STAGE * chosen.depth),
        "EMULATED_FORWARD_S": str(FORWARD_S / BLOCKS_A_STAGE),
        "EMULATED_BACKWARD_S": str(BACKWARD_S / BLOCKS_A_STAGE),
        "OMP_NUM_THREADS": "1",
    }
    print(HEADER, flush=True)
    counts = [int(count) for count in chosen.microbatches.split(",")]
    kinds = chosen.links.split(",")
    rows = measure(chosen.depth, counts, kinds, chosen.rounds, chosen.counted)
    for row in rows:
        print(row.text(chosen.depth), flush=True)


if __name__ == "__main__":
    main()
