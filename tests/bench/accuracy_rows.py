"""What the accuracy benchmark found out, a row a configuration."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MOST_VARIATION = 0.03
"""Of the control loop in a run that counts."""


@dataclass(frozen=True)
class Row:
    """One configuration."""

    table: str
    model: str
    links: str
    shape: str
    mode: str
    microbatch_size: int
    predicted_s: float
    measured_s: float
    spread: float
    """Of the mini-batches measured: standard deviation as a share of the mean."""
    machine_busy: float
    workers_busy: float
    control: float
    """Coefficient of variation of the control loop; 0 where there is none."""

    @property
    def error(self) -> float:
        """How far the prediction is off, as a share of what was measured."""
        return self.predicted_s / self.measured_s - 1

    @property
    def counts(self) -> bool:
        """Whether the machine was quiet enough for it."""
        return self.control < MOST_VARIATION


def markdown(rows: Sequence[Row], table: str) -> str:
    """Return a table and its summary."""
    own = [row for row in rows if row.table == table]
    columns = (
        *("model", "m", "links", "shape", "schedule", "predicted, s", "measured, s"),
        *("error", "spread", "cores busy", "control"),
    )
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in own:
        control = f"{row.control:.1%}" if row.control else ""
        lines.append(
            f"| {row.model} | {row.microbatch_size} | {row.links} | {row.shape} "
            f"| {row.mode} | {row.predicted_s:.4f} | {row.measured_s:.4f} "
            f"| {row.error:+.1%} | {row.spread:.1%} | {row.machine_busy:.0%} "
            f"| {control}{'' if row.counts else ' (does not count)'} |"
        )
    errors = [abs(row.error) for row in own if row.counts]
    if errors:
        lines.append(
            f"\n{len(errors)} configurations count: mean error "
            f"{statistics.fmean(errors):.2%}, median {statistics.median(errors):.2%}, "
            f"worst {max(errors):.2%}."
        )
    return "\n".join(lines)
