"""spottrain's runtime against a plain 1F1B loop over the same model, in turns.

P=2, D=1, undisturbed, ``fast``, nothing recomputed: 12 blocks of width 256, 8
micro-batches, a tied embedding, global clipping. Both sets of processes live all the
time; one is idle while the other runs a few steps. A step lasts from the time at which
both ranks have reported the step before until both have reported this one; the first
step of each turn is not counted. CPU seconds are those of both ranks together.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests.bench.gpt_job import BLOCKS, MICROBATCH, MICROBATCHES
from tests.bench.processes import ROOT, cpu_s
from tests.builders import a_spec
from tests.integration.fleet import Fleet, Heard, Zygote, make_plan

from spottrain.wire import messages
from spottrain.wire.plan import Plan

SEED = 5
DEPTH = 2


@dataclass
class Record:
    """What one of the two has done."""

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of each turn, per step."""
    losses: dict[int, float] = field(default_factory=dict)
    """By step, from 1; the two must agree."""

    def add_turn(self, reported_at: list[float], used_s: float) -> None:
        """Add a turn: when its steps were reported, and what all but one have used."""
        self.step_s += [later - earlier for earlier, later in itertools.pairwise(reported_at)]
        self.cpu_s.append(used_s / (len(reported_at) - 1))


class Rival(Protocol):
    """Trains a few steps when asked to."""

    record: Record

    def turn(self, steps: int) -> None:
        """Run one step that does not count, then ``steps`` that do."""


class Ours:
    """spottrain: two supervisors, a worker each."""

    def __init__(self, fleet: Fleet, plan: Plan) -> None:
        self.record = Record()
        self._fleet = fleet
        self._plan = plan
        fleet.ready()
        self._checkpoint = fleet.initialise()
        self._step = 0

    def turn(self, steps: int) -> None:
        """Run a generation, and stop it after ``steps`` that count."""
        self._fleet.run(self._plan, self._checkpoint)
        pids: dict[str, int] = {}
        counts: dict[int, int] = {}
        times: list[float] = []
        used: list[float] = []

        def take(name: str, report: Heard) -> bool:
            if isinstance(report, messages.GenerationStarted):
                pids[name] = report.pid
            if isinstance(report, messages.MinibatchCommitted):
                counts[report.step] = counts.get(report.step, 0) + 1
                if counts[report.step] == DEPTH:
                    times.append(time.perf_counter())
                    used.append(cpu_s(pids.values()))
                    self.record.losses[report.step] = report.loss
            return True  # a report at a time has its own deadline

        while len(times) <= steps:
            self._fleet.wait_for("a report", take)
        self.record.add_turn(times, used[-1] - used[0])
        self._stop(set(pids))

    def _stop(self, running: set[str]) -> None:
        command = messages.StopGeneration(generation=self._fleet.generation, checkpoint=False)
        for name in running:
            self._fleet.machines[name].send(command)

        def stopped(name: str, report: Heard) -> bool | None:
            if isinstance(report, messages.GenerationStopped):
                running.discard(name)
            return None if running else True

        self._fleet.wait_for("GenerationStopped", stopped)


class Plain:
    """The loop written by hand."""

    def __init__(self) -> None:
        self.record = Record()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        module = "tests.bench.plain_pipeline"
        self._ranks = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), str(port), str(SEED)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            )
            for rank in range(DEPTH)
        ]

    def turn(self, steps: int) -> None:
        """Have both ranks run; ask them for one step more than those that count."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps + 1}\n")
            rank.stdin.flush()
        times: list[float] = []
        used: list[float] = []
        for _ in range(steps + 1):
            for rank in self._ranks:
                assert rank.stdout is not None
                step, loss = rank.stdout.readline().split()
                self.record.losses[int(step)] = float(loss)
            times.append(time.perf_counter())
            used.append(cpu_s(rank.pid for rank in self._ranks))
        self.record.add_turn(times, used[-1] - used[0])

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate()


@contextmanager
def start_ours(folder: Path) -> Iterator[Ours]:
    spec = a_spec(
        name="throughput",
        entrypoint="gpt_job:job",
        seed=SEED,
        steps=1_000_000,
        minibatch_size=MICROBATCHES * MICROBATCH,
        microbatch_size=MICROBATCH,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=1_000_000,
        checkpoint_keep=1,
    )
    names = ("vm-0", "vm-1")
    plan = make_plan(spec, DEPTH, 1, names, BLOCKS, schedule="1f1b", recompute=False)
    zygote = Zygote()
    workdir = Path(__file__).parent
    with Fleet(spec, names, folder / "log", zygote, workdir=workdir) as fleet:
        yield Ours(fleet, plan)
    zygote.close()


def report(ours: Record, plain: Record) -> None:
    tokens = MICROBATCHES * MICROBATCH
    print(f"{'':12}{'step, s':>10}{'best':>8}{'worst':>8}{'cpu s':>8}{'ex/s':>8}")
    for name, record in (("spottrain", ours), ("plain 1F1B", plain)):
        step_s = statistics.median(record.step_s)
        print(
            f"{name:12}{step_s:>10.3f}{min(record.step_s):>8.3f}"
            f"{max(record.step_s):>8.3f}{statistics.median(record.cpu_s):>8.3f}"
            f"{tokens / step_s:>8.1f}"
        )
    wall = statistics.median(plain.step_s) / statistics.median(ours.step_s)
    cpu = statistics.median(plain.cpu_s) / statistics.median(ours.cpu_s)
    best = min(plain.step_s) / min(ours.step_s)
    print(
        f"throughput over plain: {wall:.3f} (by best steps {best:.3f}, by CPU "
        f"seconds {cpu:.3f}); goal 0.97"
    )
    last = max(ours.losses.keys() & plain.losses.keys())
    print(
        f"medians of {len(ours.step_s)} steps each, in {len(ours.cpu_s)} turns; loss of "
        f"step {last}: {ours.losses[last]:.6f} and {plain.losses[last]:.6f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4, help="that count, in a turn")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, start_ours(Path(folder)) as ours:
        plain = Plain()
        rivals: list[Rival] = [ours, plain]
        for turn in range(arguments.turns):
            # Whoever comes first in a pair is the other one in the next.
            for rival in rivals if turn % 2 else reversed(rivals):
                rival.turn(arguments.steps)
        plain.close()
        report(ours.record, plain.record)


if __name__ == "__main__":
    main()
