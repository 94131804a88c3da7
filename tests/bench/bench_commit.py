"""What the commit of state in the host's memory takes: norms, undo, mean gradients, AdamW.

Bytes are those of every operation's operands and results, counted on their way. Times are
medians, of all threads together and by the clock; Python's share is that of a section whose
tensors are tiny. An argument sets the threads (2).
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence

import torch
from tests.unit.pipeline.memory import LocalHolder
from tests.unit.pipeline.traffic import Traffic

from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.devices.host import HostDevice
from spottrain.pipeline.model.job import TrainingJob
from spottrain.pipeline.model.loaded import ParameterSpec
from spottrain.pipeline.model.optimizer import optimizer_state_spec
from spottrain.pipeline.model.sections import TensorSpec
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.state.update import contributions

WIDTH = 512
BLOCK = [(WIDTH,)] * 4 + [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
BLOCK += [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
"""Shapes of a block of a GPT: 3.2 million parameters in 12 tensors."""
TINY = [(16,)] * len(BLOCK)
SECTIONS, REPETITIONS = 4, 9


class Stage:
    """Sections of one shape, and what commits them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        job = TrainingJob(
            model=torch.nn.Identity,
            dataset=[0],
            loss=lambda model, batch: (torch.zeros(()), 1.0),
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
            clip_grad_norm=1.0,
        )
        named = [
            (str(number), TensorSpec(shape=shape, dtype=torch.float32, requires_grad=True))
            for number, shape in enumerate(shapes)
        ]
        kept = optimizer_state_spec(job, named)
        specs = tuple(
            ParameterSpec(name, spec.shape, spec.dtype, True, kept.state[name], 0, kept.forms[name])
            for name, spec in named
        )
        memory = SlotMemory(LocalHolder(), job, [specs] * SECTIONS, HostDevice())
        memory.hold(range(SECTIONS))
        self.arenas = memory.arenas
        for arena in self.arenas.values():
            arena.set_version(0, 0)
            for run in arena.gradient_runs:
                run.normal_()
        self._updater = memory.updater(range(SECTIONS), FaultScript())
        self._step = 0
        self.commit()  # makes the optimizer's state

    def commit(self) -> None:
        """Commit a mini-batch."""
        contributions(self.arenas.values(), [], {}, {})
        decision = MinibatchDecision(0, self._step, 1.0, 1.0, 1.0, overflow=False, stop=False)
        self._updater.apply(decision, range(SECTIONS))
        self._step += 1

    def times(self) -> tuple[float, float]:
        """Return a commit's seconds of all threads together, and by the clock."""
        pairs = []
        for _ in range(REPETITIONS):
            began = time.process_time(), time.perf_counter()
            self.commit()
            pairs.append((time.process_time() - began[0], time.perf_counter() - began[1]))
        cpu, wall = zip(*pairs, strict=True)
        return statistics.median(cpu), statistics.median(wall)


def main() -> None:
    """Print the table."""
    threads = int(sys.argv[1]) if sys.argv[1:] else 2
    torch.set_num_threads(threads)
    stage = Stage(BLOCK)
    count = SECTIONS * sum(map(torch.Size.numel, map(torch.Size, BLOCK)))
    with Traffic() as traffic:
        stage.commit()
    for name, num_bytes in traffic.num_bytes.most_common(5):
        print(f"{name:24} {num_bytes / count:6.1f} bytes a parameter")
    print(f"{'all':24} {traffic.num_bytes.total() / count:6.1f}")
    cpu, wall = stage.times()
    print(
        f"{threads} threads: {1e9 * cpu / count:.2f} ns of CPU a parameter, {1e9 * wall / count:.2f} ns"
    )
    torch.set_num_threads(1)
    cpu, _ = Stage(TINY).times()
    print(f"tiny: {1e3 * cpu / SECTIONS:.2f} ms of CPU a section of {len(TINY)} tensors")


if __name__ == "__main__":
    main()
