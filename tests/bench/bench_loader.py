"""What waiting for examples costs a step, with and without loader processes.

Every variant has a machine of its own that lives all the time; in turns each trains a
few steps while the others are idle. The first steps of a turn, in which loaders fill
their queue, are not counted. 16 examples a mini-batch, 4 a micro-batch, each of which
takes 50 ms; the model takes 120 ms a micro-batch, on a stage. Medians of
``MinibatchCommitted.step_s`` of the first stage.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.bench import waiting_job
from tests.builders import a_spec
from tests.integration.fleet import Fleet, Zygote, make_plan

from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.model import LoaderSpec

HERE = Path(__file__).parent
FILLING = 3
"""Steps of a turn that do not count."""
VARIANTS: dict[str, tuple[float, LoaderSpec]] = {
    "nothing to wait for": (0.0, LoaderSpec(workers=0)),
    "workers: 0": (0.05, LoaderSpec(workers=0)),
    "workers: 1": (0.05, LoaderSpec(workers=1)),
    "workers: 2": (0.05, LoaderSpec(workers=2)),
    "workers: 4": (0.05, LoaderSpec(workers=4)),
    "workers: auto": (0.05, LoaderSpec()),
    "auto, nothing to wait for": (0.0, LoaderSpec()),
}


def spec_of(folder: Path, loader: LoaderSpec) -> JobSpec:
    return a_spec(
        name="bench",
        entrypoint="waiting_job:job",
        steps=100_000,
        minibatch_size=16,
        microbatch_size=4,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=100_000,
        checkpoint_keep=1,
        loader=loader,
    )


class Variant:
    """A machine, or one for each stage, and the steps that it has trained."""

    def __init__(self, fleet: Fleet, depth: int) -> None:
        self.step_s: list[float] = []
        self._fleet = fleet
        fleet.ready()
        names = "ab"[:depth]
        blocks = waiting_job.BLOCKS
        self._plan = make_plan(fleet.spec, depth, 1, names, blocks, recompute=False)
        self._names = set(names)
        self._checkpoint = fleet.initialise()
        self._step = 0

    def turn(self, steps: int, *, counts: bool = True) -> None:
        """Run a generation, and stop it after ``steps``."""
        fleet = self._fleet
        fleet.run(self._plan, self._checkpoint)
        first = self._step + FILLING
        fleet.wait_for_step(first + steps)
        fleet.stop()
        fleet.wait_for_end(set(self._names))
        took_s = [
            r.step_s
            for name, r in fleet.history
            if isinstance(r, messages.MinibatchCommitted)
            and (name, r.generation) == ("a", fleet.generation)
            and r.step > first
        ]
        self.step_s += took_s[:steps] if counts else []
        self._step = max(
            r.step for _, r in fleet.history if isinstance(r, messages.MinibatchCommitted)
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    chosen = parser.parse_args()
    for depth in (1, 2):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            zygote = Zygote()
            stack.callback(zygote.close)
            variants = {}
            for number, (name, (wait_s, loader)) in enumerate(VARIANTS.items()):
                own = folder / str(number)
                own.mkdir()
                environment = {"BENCH_WAIT_S": str(wait_s)}
                fleet = Fleet(
                    *(spec_of(own, loader), "ab"[:depth], own / "log", zygote),
                    *(environment, HERE),
                )
                variants[name] = Variant(stack.enter_context(fleet), depth)
            for variant in variants.values():
                variant.turn(chosen.steps, counts=False)
            for _ in range(chosen.turns):
                for variant in variants.values():
                    variant.turn(chosen.steps)
        print(f"\nP={depth}: {chosen.turns} turns of {chosen.steps} steps")
        medians = {n: statistics.median(v.step_s) for n, v in variants.items()}
        base_s = next(iter(medians.values()))
        print(f"{'examples':28} {'step':>9} {'more':>8}")
        for name, median_s in medians.items():
            more = median_s / base_s - 1
            print(f"{name:28} {median_s * 1e3:6.1f} ms {more:+7.1%}")


if __name__ == "__main__":
    main()
