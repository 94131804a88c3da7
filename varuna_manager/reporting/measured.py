"""What a job has measured, for people: in ``status``, and as tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.table import Table

from spottrain.varuna_manager import format as fmt
from spottrain.varuna_manager.jobs.folder import JobDir
from spottrain.varuna_manager.jobs.measurements import (
    Evaluation,
    Measurements,
    Minibatch,
)
from spottrain.varuna_manager.reporting.columns import columns

CURVE_POINTS = 40
"""Points of the loss curve in ``status``."""
SKIPPED: Mapping[str, str] = {
    "loss": "its loss was not finite",
    "gradients": "its gradients were not finite",
    "scale": "the loss scale backs off",
    "weight": "it weighs nothing, as where all its labels are masked",
}
"""Why a mini-batch changed no parameter, see ``wire.messages``."""


def newest(job: JobDir, measurements: Measurements) -> dict[str, Any]:
    """Return what ``status`` shows of a job's measurements.

    ``newest``: the newest mini-batch, and the newest loss of each held-out set;
    ``loss_curve``: losses at even distances; ``tracking``: what is in the way of writing
    measurements, by sink.
    """
    found = measurements.minibatches(last=1)
    view: dict[str, Any] = {}
    if found:
        row = found[0]
        view = {
            "step": row.step,
            "loss": row.loss,
            "grad_norm": row.grad_norm,
            "learning_rate": row.learning_rate,
            "metrics": dict(row.metrics),
            "tokens_per_s": row.tokens_per_s,
            "skipped": row.skipped,
        }
    view["evaluations"] = measurements.newest_evaluations()
    return {
        "newest": view,
        "loss_curve": measurements.losses(CURVE_POINTS),
        "tracking": _trouble(job),
    }


def _trouble(job: JobDir) -> dict[str, str]:
    with suppress(FileNotFoundError, ValueError):
        found: dict[str, str] = json.loads(job.tracking_status.read_text())
        return found
    return {}


def minibatches_table(rows: Sequence[Minibatch]) -> Table:
    """Return a table of mini-batches; columns that all lack are left out."""
    metrics = _names(rows)
    has_tokens = any(row.tokens_per_s for row in rows)
    table = columns(
        *("r:STEP", "r:LOSS", "r:GRAD NORM", "r:LR"),
        *(f"r:{name.upper()}" for name in metrics),
        *("r:EX/S", *(["r:TOKENS/S"] if has_tokens else []), "r:TIME", "r:PLAN", "r:SPENT", ""),
    )
    for row in rows:
        table.add_row(
            str(row.step),
            *(_number(v) for v in (row.loss, row.grad_norm, row.learning_rate)),
            *(_number(row.metrics.get(name)) for name in metrics),
            _number(row.examples_per_s),
            *([_number(row.tokens_per_s)] if has_tokens else []),
            fmt.step_time(row.step_s),
            row.plan or fmt.NOTHING,
            fmt.dollars(row.usd_spent),
            f"skipped: {SKIPPED[row.skipped]}" if row.skipped else "",
        )
    return table


def evaluations_table(rows: Sequence[Evaluation]) -> Table:
    """Return a table of evaluations."""
    metrics = _names(rows)
    table = columns("r:AFTER", "SET", "r:LOSS", *(f"r:{name.upper()}" for name in metrics), "")
    for row in rows:
        table.add_row(
            str(row.step),
            row.name,
            _number(row.loss),
            *(_number(row.metrics.get(name)) for name in metrics),
            "best so far" if row.is_best else "",
        )
    return table


def _names(rows: Iterable[Minibatch | Evaluation]) -> list[str]:
    return sorted({name for row in rows for name in row.metrics})


def _number(value: float | None) -> str:
    return fmt.NOTHING if value is None else f"{value:.5g}"
