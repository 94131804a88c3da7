"""spottrain's runtime on slow links beside torch.distributed.pipelining and a loop by hand.

Every stage is a process in a network namespace of its own, joined by a switch
(``switch.py``); its tasks sleep, 20 ms forward and 40 ms backward a stage, all else is real.
spottrain runs what its planner chooses from its own calibration on these links: whatever is
best (``auto``), and each schedule by name. All take turns; compared are steps of the same
round. Needs root.

    python -m tests.bench.bench_rivals [--depth 4] [--microbatches 8,32] [--links clean,100]
        [--recompute yes,no] [--rounds 6] [--counted 1] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.bench.accuracy_fleet import HERE, job_spec, scratch, undisturbed
from tests.bench.accuracy_fleet import Trainer as Calibrator
from tests.bench.bench_accuracy import CALIBRATORS, facts_of
from tests.bench.network import Network
from tests.bench.rival_ranks import RIVALS, RivalRanks, Task
from tests.bench.switch import Links
from tests.integration.fleet import Fleet, Heard, Host, Zygote

from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.varuna_manager.reporting.tables import execution_line
from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, ScheduleKind, Slot

AUTO = "auto"
SCHEDULES: tuple[ScheduleKind, ...] = ("varuna", "1f1b", "gpipe", "interleaved")
KINDS_OF_LINKS: Mapping[str, tuple[str, Links]] = {
    "clean": ("clean", Links(0.0, 0.0, 0.0)),
    "100": ("100 Mbit/s, 10 ± 2 ms", Links(12.5e6, 10e-3, 2e-3, seed=1)),
    "10": ("10 Mbit/s, 20 ± 5 ms", Links(1.25e6, 20e-3, 5e-3, seed=1)),
}
FORWARD_S, BACKWARD_S = 0.02, 0.04
"""Of a stage."""
BLOCKS_A_STAGE = 2
"""So that interleaved schedules have two chunks."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Cell:
    """Conditions, and what all took in each round."""

    depth: int
    microbatches: int
    links: str
    recompute: bool
    plans: dict[str, str]
    """What spottrain's planner made of each name."""
    step_s: dict[str, list[float]]
    """By contender; those whose plan is the same have the same."""

    def ratio(self, other: str) -> tuple[float, float, float]:
        """Return how many times as long as ``auto`` another takes: median, interval.

        The interval is that of the sign test: order statistics that have the median
        between them with ``CONFIDENCE``, or the extremes if there are too few.
        """
        pairs = zip(self.step_s[other], self.step_s[AUTO], strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        count, outside = len(ratios), 0
        while _outside(count, outside + 1) <= 1 - CONFIDENCE:
            outside += 1
        return statistics.median(ratios), ratios[outside], ratios[-1 - outside]


def _outside(count: int, dropped: int) -> float:
    """Return the chance that the median is outside of all but the extreme values.

    Args:
        count: Values.
        dropped: Of them, at either end.
    """
    ways = sum(math.comb(count, k) for k in range(dropped + 1))
    return float(2 * ways / 2.0**count)


class Turns:
    """Contenders under one cell's conditions, spottrain's on machines of their own.

    Args:
        fleet: spottrain's.
        rivals: The others.
        plans: What spottrain runs, by name.
        counted: Steps of a turn, after one that does not count.
    """

    def __init__(
        self, fleet: Fleet, rivals: RivalRanks, plans: dict[str, Plan], counted: int
    ) -> None:
        self._fleet, self._rivals, self._plans = fleet, rivals, plans
        self._counted = counted
        fleet.ready()
        self._checkpoint = fleet.initialise()
        self._recompute = plans[AUTO].recompute
        self._microbatches = plans[AUTO].minibatch_size

    def play(self, rounds: int) -> dict[str, list[float]]:
        """Return the step times of all in every round."""
        distinct = {name: self._same_as(name) for name in self._plans}
        names = [*RIVALS, *sorted(set(distinct.values()))]
        step_s: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            # Whoever comes first in a round is last in the next.
            for name in names if number % 2 else reversed(names):
                turn = self._theirs if name in RIVALS else self._ours
                step_s[name].append(statistics.median(turn(name)))
        return step_s | {name: step_s[same] for name, same in distinct.items()}

    def _same_as(self, name: str) -> str:
        return next(o for o, plan in self._plans.items() if plan == self._plans[name])

    def _theirs(self, rival: str) -> list[float]:
        task = Task(rival, self._recompute, self._microbatches, 1 + self._counted)
        return self._rivals.run(task)[1:]

    def _ours(self, name: str) -> list[float]:
        """Run a generation, and stop it."""
        fleet, plan = self._fleet, self._plans[name]
        fleet.run(plan, self._checkpoint)
        times: dict[int, list[float]] = {}

        def took(_: str, report: Heard) -> bool | None:
            if isinstance(report, messages.MinibatchCommitted):
                if report.generation == fleet.generation:
                    times.setdefault(report.step, []).append(report.step_s)
            elif isinstance(report, messages.GenerationBroken | messages.WorkerDied):
                raise SystemExit(f"a run failed: {report}")
            complete = [own for own in times.values() if len(own) == len(plan.slots)]
            return True if len(complete) > self._counted else None

        fleet.wait_for("steps", took)
        stop = messages.StopGeneration(generation=fleet.generation, checkpoint=False)
        for machine in fleet.machines.values():
            machine.send(stop)
        running = set(fleet.machines)

        def stopped(vm: str, report: Heard) -> bool | None:
            if isinstance(report, messages.GenerationStopped):
                running.discard(vm)
            return None if running else True

        fleet.wait_for("the end", stopped)
        counted = sorted(times)[1 : 1 + self._counted]
        return [statistics.median(times[step]) for step in counted]


def measure(
    depth: int,
    counts: Sequence[int],
    kinds: Sequence[str],
    recomputes: Sequence[bool],
    rounds: int,
    counted: int,
) -> Iterator[Cell]:
    """Yield a cell for each combination."""
    with undisturbed() as ahead, Network(depth) as network, scratch() as folder:
        if not ahead:
            tell("not permitted to run ahead of other programs: they will disturb")
        rivals = RivalRanks(network, depth)  # forked while there is no other thread
        zygote = Zygote()
        hosts = {
            f"vm{n}": Host(network.address(n), "eth0", network.namespace(n)) for n in range(depth)
        }
        try:
            for kind in kinds:
                name, links = KINDS_OF_LINKS[kind]
                network.set_version(links)
                spec = job_spec(folder, "emulated_job:job", counts[0], 1)
                calibrator = Calibrator(spec, zygote, hosts, folder)
                profile = calibrator.calibrate(min(CALIBRATORS, depth))
                for count in counts:
                    spec = replace(spec, minibatch_size=count)
                    for recompute in recomputes:
                        plans = _plans(spec, profile, list(hosts), recompute)
                        with Fleet(
                            *(spec, list(hosts), folder / "log", zygote),
                            workdir=HERE,
                            hosts=hosts,
                        ) as fleet:
                            turns = Turns(fleet, rivals, plans, counted)
                            step_s = turns.play(rounds)
                        lines = {n: execution_line(asdict(p)) for n, p in plans.items()}
                        yield Cell(depth, count, name, recompute, lines, step_s)
        finally:
            rivals.close()
            zygote.close()


def inputs_of(spec: JobSpec, profile: Profile, vms: Sequence[str], recompute: bool) -> PlanInputs:
    """Return what the planner chooses a pipeline over all these VMs from."""
    return PlanInputs(
        facts=facts_of(spec),
        profile=profile,
        slots=tuple(
            Device(slot=Slot(vm_id=vm, index=0), memory_bytes=2**33, speed=1.0) for vm in vms
        ),
        minibatch_size=spec.minibatch_size,
        microbatch_size=1,
        reduction="fast",
        pipeline_depth=len(vms),
        recompute=recompute,
        semantics=spec.semantics,
    )


def _plans(spec: JobSpec, profile: Profile, vms: Sequence[str], recompute: bool) -> dict[str, Plan]:
    """Return what the planner makes of each name."""
    inputs = inputs_of(spec, profile, vms, recompute)
    found = {}
    for name in (AUTO, *SCHEDULES):
        kind = next((one for one in SCHEDULES if one == name), None)
        plan = choose_plan(replace(inputs, schedule=kind)).plan
        assert plan is not None
        found[name] = plan
    return found


HEADER = (
    "| P | micro-batches | links | recompute | rounds | auto, s | which is | "
    + " | ".join(RIVALS)
    + " | worst of our schedules by name | best of them |\n"
    + "|---" * (9 + len(RIVALS))
    + "|"
)


def row(cell: Cell) -> str:
    """Return a line of the table: how many times as long as ``auto`` the others take."""
    ranked = sorted(SCHEDULES, key=lambda name: cell.ratio(name)[0])
    columns = [
        str(cell.depth),
        str(cell.microbatches),
        cell.links,
        "yes" if cell.recompute else "no",
        str(len(cell.step_s[AUTO])),
        f"{statistics.median(cell.step_s[AUTO]):.3f}",
        cell.plans[AUTO],
        *(_text(cell, rival) for rival in RIVALS),
        *(f"{name}: {_text(cell, name)}" for name in (ranked[-1], ranked[0])),
    ]
    return f"| {' | '.join(columns)} |"


def _text(cell: Cell, other: str) -> str:
    middle, low, high = cell.ratio(other)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def tell(line: str) -> None:
    """Say how far it is."""
    sys.stderr.write(f"{line}\n")


def main() -> None:
    """Print the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.bench_rivals")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--microbatches", default="8,32")
    parser.add_argument("--links", default=",".join(KINDS_OF_LINKS))
    parser.add_argument("--recompute", default="no,yes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--counted", type=int, default=1, help="steps of a turn")
    parser.add_argument("--json", type=Path, help="file for what was measured")
    chosen = parser.parse_args()
    os.environ |= {
        "EMULATED_BLOCKS": str(BLOCKS_A_STAGE * chosen.depth),
        "EMULATED_FORWARD_S": str(FORWARD_S / BLOCKS_A_STAGE),
        "EMULATED_BACKWARD_S": str(BACKWARD_S / BLOCKS_A_STAGE),
        "OMP_NUM_THREADS": "1",
    }
    cells = []
    print(HEADER, flush=True)
    for cell in measure(
        chosen.depth,
        [int(count) for count in chosen.microbatches.split(",")],
        chosen.links.split(","),
        [word == "yes" for word in chosen.recompute.split(",")],
        chosen.rounds,
        chosen.counted,
    ):
        cells.append(cell)
        print(row(cell), flush=True)
        tell(json.dumps(asdict(cell)))
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(cell) for cell in cells]))


if __name__ == "__main__":
    main()
