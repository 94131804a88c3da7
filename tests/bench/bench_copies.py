"""What copies of the state on another VM (``morphing.peer_copies``) cost a mini-batch.

Two machines of one slot train two stages of plain layers with AdamW, in turns without and
with copies, over loopback. What the mini-batches beside a copy take more than others holds the
copy within a VM's memory, for which training stands still, and what sending slows; the
whole turns are less precise.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.builders import a_spec
from tests.integration.fleet import Fleet, Heard, Zygote, make_plan

from spottrain.wire import messages
from spottrain.wire.messages import JobSpec
from spottrain.wire.plan import Plan

R = TypeVar("R")
HERE = Path(__file__).parent
SECTIONS = 16
WIDTH = 512
STATE_BYTES = SECTIONS * 4 * WIDTH * (WIDTH + 1) * 12
"""Parameters and AdamW's two moments."""
SETTLING = 5
"""Mini-batches of a turn that do not count."""


def spec_of(folder: Path) -> JobSpec:
    return a_spec(
        name="bench",
        entrypoint="linear_job:job",
        steps=10**6,
        minibatch_size=32,
        microbatch_size=8,
        checkpoint_path=str(folder / "checkpoints"),
        checkpoint_every_steps=10**6,
        checkpoint_keep=1,
    )


class Seen(NamedTuple):
    """A report of the first stage."""

    step: int
    copied: int
    at_s: float


class Turns:
    """Generations of one fleet.

    Args:
        fleet: Two machines, ready.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        fleet.ready()
        self._checkpoint = fleet.initialise()
        self._seen: list[Seen] = []

    def run(self, plan: Plan, steps: int) -> float:
        """Run a generation; return the wall time of a mini-batch once it has settled."""
        fleet, self._seen = self._fleet, []
        fleet.run(plan, self._checkpoint)
        step = self._wait(lambda report: report.step)
        begin_s = time.monotonic()
        if plan.peer_copies:
            step = self._wait(lambda r: None if r.copied_step is None else r.step)
            print(f"first copies whole after {time.monotonic() - begin_s:.2f} s")
        first = step + SETTLING
        self._wait(lambda report: True if report.step >= first else None)
        begin_s = time.monotonic()
        self._wait(lambda report: True if report.step >= first + steps else None)
        took_s = time.monotonic() - begin_s
        fleet.stop()
        fleet.wait_for_end({"a", "b"})
        if plan.peer_copies:
            self._tell_copies(first)
        return took_s / steps

    def _tell_copies(self, first: int) -> None:
        """Print by how much the mini-batches beside each copy are longer than others."""
        pairs = list(itertools.pairwise(self._seen))
        usual_s = statistics.median(one.at_s - before.at_s for before, one in pairs)
        for copied in sorted({one.copied for one in self._seen if one.step > first}):
            beside = [
                one.at_s - before.at_s
                for before, one in pairs
                if one.step > copied >= first and before.copied < copied
            ]
            if beside:
                more_s = sum(beside) - len(beside) * usual_s
                print(f"copies of step {copied}: {more_s * 1e3:.0f} ms, over {len(beside)}")

    def _wait(self, found: Callable[[messages.MinibatchCommitted], R | None]) -> R:
        """Wait for what the first stage reports in this generation."""

        def check(name: str, report: Heard) -> R | None:
            if not isinstance(report, messages.MinibatchCommitted):
                return None
            if (name, report.generation) != ("a", self._fleet.generation):
                return None
            copied = -1 if report.copied_step is None else report.copied_step
            self._seen.append(Seen(report.step, copied, time.monotonic()))
            return found(report)

        return self._fleet.wait_for("a mini-batch", check)


def main() -> None:
    """Print the time of a mini-batch without copies and with them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    chosen = parser.parse_args()
    print(f"2x1, {STATE_BYTES / 1e6:.0f} MB of state in all")
    os.environ["BENCH_WIDTH"] = str(WIDTH)
    zygote = Zygote()
    try:
        with tempfile.TemporaryDirectory() as name:
            spec, log = spec_of(Path(name)), Path(name) / "log"
            without = make_plan(spec, 2, 1, "ab", SECTIONS, recompute=False)
            plans = without, replace(without, peer_copies=1)
            with Fleet(spec, "ab", log, zygote, workdir=HERE, deadline_s=300.0) as fleet:
                turns = Turns(fleet)
                turns.run(without, SETTLING)
                pairs = []
                for _ in range(chosen.turns):
                    pair = [turns.run(plan, chosen.steps) for plan in plans]
                    pairs.append(pair)
                    print(
                        f"{pair[0] * 1e3:.1f} ms a mini-batch without, {pair[1] * 1e3:.1f} ms with"
                    )
    finally:
        zygote.close()
    more = statistics.median(one[1] / one[0] - 1 for one in pairs)
    print(f"copies cost {more:+.1%} of the time (median of {len(pairs)} pairs)")


if __name__ == "__main__":
    main()
