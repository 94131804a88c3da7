"""One simulation, against the simulator that Varuna's authors published.

For each of the reference rows: how long the original took as shipped, how long ours takes (the
schedule made anew each time), and by how much the answer of our copy of the original, which tests
compare with, differs. Fails where the copy is off by more than 0.1 %, or where ours takes longer
for all rows together: of the shortest, which take less than a millisecond, some take longer.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from tests.unit.morphing.conftest import DATA
from tests.unit.morphing.original import original_finish_s
from tests.unit.morphing.pipelines import originals_inputs, reference_rows

from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.simulate.replica import (
    Link,
    StageTimes,
    simulate_pipeline,
)

ERROR = 0.001
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

    @property
    def schedule(self) -> Schedule:
        """Its lists, made anew."""
        return compact_schedule("varuna", self.depth, self.num_microbatches, recompute=True)

    def best_us(self) -> float:
        """Return what making and simulating the lists takes, the best of some, of the
        processor's time."""
        took: list[float] = []
        while not took or (len(took) < REPEATS and sum(took) < BUDGET_S * 1e6):
            begin_s = time.process_time()
            simulate_pipeline(self.schedule, self.stages, self.links)
            took.append((time.process_time() - begin_s) * 1e6)
        return min(took)


def main() -> int:
    """Print the table; returns 1 if a row fails."""
    rows = reference_rows(DATA / "reference")
    print(f"{'case':<18}{'P':>3}{'M':>6}{'shipped us':>12}{'ours us':>10}")
    failed, worst_error, worst_share, all_us, shipped_us = 0, 0.0, 0.0, 0.0, 0
    for row in rows:
        case = Case(int(row["P"]), int(row["M"]), *originals_inputs(row))
        finish_s = original_finish_s(case.schedule, case.stages, case.links)
        batch_us = finish_s * 1e6 + int(row["allreduce_us"])
        error = abs(batch_us / int(row["batch_us_nojitter"]) - 1)
        took = case.best_us()
        shipped = int(row["simtime_us_asbuilt"])
        share = took / shipped
        failed += error > ERROR
        worst_error, worst_share = max(worst_error, error), max(worst_share, share)
        all_us, shipped_us = all_us + took, shipped_us + shipped
        print(
            f"{row['case']:<18}{row['P']:>3}{row['M']:>6}{shipped:>12}"
            f"{took:>10.0f}  x{share:.3f}  {error:.4%}{'  FAILED' if error > ERROR else ''}"
        )
    print(
        f"{len(rows)} rows, {failed} failed; worst error {worst_error:.6%}; share of the "
        f"original's time {all_us / shipped_us:.3f}, of one row at most {worst_share:.2f}"
    )
    return int(failed > 0 or all_us > shipped_us)


if __name__ == "__main__":
    sys.exit(main())
