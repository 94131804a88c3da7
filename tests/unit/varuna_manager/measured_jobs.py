"""A job that is simulated with its whole history, to hold the measurements against."""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from spottrain.varuna_manager.jobs.measurements import (
    Evaluation,
    GenerationBegan,
    Measurements,
    Minibatch,
    Row,
    Sample,
)


def store() -> Measurements:
    """Return an empty store, whose file goes with it."""
    memory = Path("/dev/shm")  # where to write durably costs nothing
    folder = tempfile.TemporaryDirectory(dir=memory if memory.exists() else None)
    measurements = Measurements(Path(folder.name) / "measurements.sqlite")
    weakref.finalize(measurements, folder.cleanup)
    return measurements


def trained(generation: int, step: int, **more: object) -> Minibatch:
    row = Minibatch(
        step=step,
        generation=generation,
        at_s=float(step),
        loss=1000.0 * generation + step,
        grad_norm=1.0,
        step_s=0.5,
        examples=8,
        plan="1x1",
        usd_spent=0.25,
    )
    return replace(row, **more)  # type: ignore[arg-type]


def adopted(generation: int, step: int, by: int) -> Minibatch:
    """The mini-batch of ``generation``, as the ranks of the next one report it."""
    return replace(trained(generation, step), generation=by, step_s=None)


def evaluated(generation: int, step: int, name: str = "heldout") -> Evaluation:
    return Evaluation(
        step=step, name=name, generation=generation, at_s=0.0, loss=1000.0 * generation
    )


def key(row: Row) -> tuple[int, str, float]:
    return row.position, getattr(row, "name", ""), row.loss


@dataclass
class SimulatedJob:
    """What happened, and what each rank of each generation has to report."""

    random: Random
    line: dict[int, float] = field(default_factory=dict)
    """Loss of every mini-batch that the weights have gone through."""
    judged: dict[tuple[int, str], float] = field(default_factory=dict)
    queues: list[list[Sample]] = field(default_factory=list)
    """In order; the first of each generation arrives whole, others may be cut short."""
    number: int = 0
    beyond: dict[int, float] = field(default_factory=dict)
    """The line above the beginning of a generation that has not committed yet."""

    def run_generation(self) -> None:
        random, self.number = self.random, self.number + 1
        number, top = self.number, max(self.line, default=0)
        whole: list[Sample] = []
        if self.beyond and random.random() < 0.5:
            # What an earlier start gave up was still there.
            self.line |= self.beyond
            top = max(self.line)
        start = random.choice([top, top, random.randint(0, top)])
        adopts = start == top and top > 0 and random.random() < 0.3
        whole.append(GenerationBegan(generation=number, step=start))
        if adopts:
            former = int(self.line[top] // 1000)
            whole.append(adopted(former, top, number))
        self.beyond = {s: loss for s, loss in self.line.items() if s > start}
        commits = random.choice([0, 1, 2, 5])
        if commits:
            self.beyond = {}
        self.line = {s: loss for s, loss in self.line.items() if s <= start}
        for step in range(start + 1, start + commits + 1):
            self.line[step] = 1000.0 * number + step
            whole.append(trained(number, step))
            if random.random() < 0.3:
                whole.append(evaluated(number, step, random.choice("ab")))
        self.queues.append(whole)
        for _ in range(random.randint(0, 2)):
            cut = random.randint(1, len(whole))
            self.queues.append([s for s in whole[:cut] if random.random() < 0.9])

    def samples(self) -> Iterator[Sample]:
        """Yield everything that is reported, mostly in the order of generations: some
        VMs are late, and send twice."""
        random = self.random
        order = [i for i, queue in enumerate(self.queues) for _ in queue]
        order.sort(key=lambda i: i + random.choice([0.0, 0.0, 1.5, 50.0]))
        queues = [list(queue) for queue in self.queues]
        for index in order:
            sample = queues[index].pop(0)
            yield from [sample] * random.choice([1, 1, 2])


def simulated(random: Random, generations: int) -> SimulatedJob:
    job = SimulatedJob(random)
    for _ in range(generations):
        job.run_generation()
    return job
