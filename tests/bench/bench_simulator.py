"""One simulation, against the simulator that Varuna's authors published.

For each of the reference rows: how long the original took as shipped, how long ours takes
in the original's and in the runtime's conditions (the schedule made anew each time, the
loops compiled), and by how much the answers differ. Fails where ours takes more than half
as long or is off by more than 0.1 %. Without the reference rows there is nothing to do.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.unit.morphing.pipelines import originals_inputs, reference_rows

from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.simulate.replica import (
    Conditions,
    Link,
    StageTimes,
    simulate_pipeline,
)

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = (Conditions.ORIGINAL, Conditions.RUNTIME)
SHARE, ERROR = 0.5, 0.001
REPEATS = 100
BUDGET_S = 0.2
"""For one row, after the first run."""


@dataclass(frozen=True)
class Case:
    """What one row asks."""

    depth: int
    num_microbatches: int
    stages: list[StageTimes]
    links: list[Link]

    def finish_s(self, conditions: Conditions) -> float:
        """Make the lists, simulate, and return when the pipeline has drained."""
        schedule = compact_schedule(
            "varuna", self.depth, self.num_microbatches, recompute=True
        )
        run = simulate_pipeline(
            schedule, self.stages, self.links, conditions=conditions
        )
        return max(run.finish_s)

    def best_us(self, conditions: Conditions) -> float:
        """Return what that takes, the best of some, of the processor's time."""
        took: list[float] = []
        while not took or (len(took) < REPEATS and sum(took) < BUDGET_S * 1e6):
            begin_s = time.process_time()
            self.finish_s(conditions)
            took.append((time.process_time() - begin_s) * 1e6)
        return min(took)


def compile_loops() -> float:
    """Compile, or load what was compiled before; returns the seconds that took."""
    begin_s = time.process_time()
    stage = StageTimes(forward_s=1.0, recompute_s=1.0, backward_s=1.0)
    deep = compact_schedule("varuna", 32, 256, recompute=True)
    for conditions in CONDITIONS:
        simulate_pipeline(deep, [stage] * 32, [Link()] * 31, conditions=conditions)
    return time.process_time() - begin_s


def main() -> int:
    """Print the table; returns 1 if a row fails."""
    folder = Path(
        os.environ.get("SPOTTRAIN_REFERENCE", ROOT.parent / "shared/data/reference")
    )
    rows = reference_rows(folder)
    if not rows:
        print(f"no reference rows in {folder}; SPOTTRAIN_REFERENCE names them")
        return 0
    print(f"loops compiled or loaded in {compile_loops():.1f} s")
    print(
        f"{'case':<18}{'P':>3}{'M':>6}{'shipped us':>12}{'original':>10}{'runtime':>10}"
    )
    failed, worst_error, worst_share = 0, 0.0, 0.0
    for row in rows:
        case = Case(int(row["P"]), int(row["M"]), *originals_inputs(row))
        batch_us = case.finish_s(Conditions.ORIGINAL) * 1e6 + int(row["allreduce_us"])
        error = abs(batch_us / int(row["batch_us_nojitter"]) - 1)
        took = [case.best_us(conditions) for conditions in CONDITIONS]
        shipped = int(row["simtime_us_asbuilt"])
        share = max(took) / shipped
        failed += error > ERROR or share > SHARE
        worst_error, worst_share = max(worst_error, error), max(worst_share, share)
        print(
            f"{row['case']:<18}{row['P']:>3}{row['M']:>6}{shipped:>12}"
            f"{took[0]:>10.0f}{took[1]:>10.0f}  x{share:.3f}  {error:.4%}"
            f"{'  FAILED' if error > ERROR or share > SHARE else ''}"
        )
    print(
        f"{len(rows)} rows, {failed} failed; worst error {worst_error:.6%}, "
        f"worst share of the original's time {worst_share:.2f}"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
