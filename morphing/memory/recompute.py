"""Recompute in runs of sections: how many runs a stage of many sections is best cut into.

A stage that keeps the inputs of ``c`` runs of its ``l`` sections recomputes one run at a
time, so that of one run alone all tensors exist at once (Narayanan's dissertation, 4.3.5;
PTD-P, 3.5). Runtime and planner recompute a stage's chunks as a whole: this says what
runs of a chunk would save.
"""

from __future__ import annotations

import math


def recompute_bytes(
    sections: int, runs: int, input_bytes: int, saved_bytes: int, in_flight: int = 1
) -> int:
    """Return what a stage holds for its backwards if it recomputes in runs.

    Args:
        sections: Of the stage, all equal.
        runs: That each recompute as a whole, as even as possible.
        input_bytes: Of one section, for one micro-batch.
        saved_bytes: That a section leaves for its backward, for one micro-batch.
        in_flight: Micro-batches whose inputs are kept.
    """
    return in_flight * runs * input_bytes + -(-sections // runs) * saved_bytes


def best_runs(
    sections: int, input_bytes: int, saved_bytes: int, in_flight: int = 1
) -> int:
    """Return the number of runs that need the least memory; arguments as above.

    Without rounding it is ``sqrt(sections * saved_bytes / input_bytes)``, inputs being
    those of all micro-batches in flight. Runs have whole sections: of all numbers whose
    longest run is as long, the fewest are needed, hence those are compared.
    """
    fewest = {-(-sections // longest) for longest in range(1, sections + 1)}
    ideal = math.sqrt(sections * saved_bytes / max(1, in_flight * input_bytes))
    return min(
        sorted(fewest),
        key=lambda runs: (
            recompute_bytes(sections, runs, input_bytes, saved_bytes, in_flight),
            abs(runs - ideal),
        ),
    )
