"""A job's measurements as plain data, as in ``metrics.jsonl``."""

from __future__ import annotations

import json
from typing import Any

from spottrain.codec import to_data
from spottrain.varuna_manager.format import finite
from spottrain.varuna_manager.jobs.measurements import Evaluation, Minibatch, Row

COLUMNS = (
    *("kind", "step", "set", "loss", "grad_norm", "learning_rate", "skipped"),
    *("weight", "examples", "step_s", "examples_per_s", "tokens_per_s", "plan"),
    *("usd_spent", "is_best", "generation", "at_s"),
)
"""Keys of ``as_data``, metrics apart."""


def as_data(row: Row) -> dict[str, Any]:
    """Return a row as plain data: numbers not rounded, what is unknown ``None``."""
    match row:
        case Minibatch():
            return {
                "kind": "minibatch",
                **to_data(row),
                "examples_per_s": row.examples_per_s,
                "tokens_per_s": row.tokens_per_s,
            }
        case Evaluation():
            data = to_data(row)
            return {"kind": "evaluation", "set": data.pop("name"), **data}


def as_line(row: Row) -> str:
    """Return a row as one line of JSON; numbers that are not finite are null."""
    return json.dumps(finite(as_data(row)), allow_nan=False) + "\n"


def position_of(line: bytes) -> int:
    """Return the position of the row that is written in a line.

    Raises:
        ValueError: It is no such line.
    """
    data = json.loads(line)
    try:
        return 2 * int(data["step"]) + int(data["kind"] == "evaluation")
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a line of measurements: {line[:80]!r}") from error


def scalars(row: Row) -> dict[str, float]:
    """Return the numbers of a row by the names that trackers show them under."""
    if isinstance(row, Evaluation):
        values = {"loss": row.loss} | dict(row.metrics)
        return {f"{row.name}/{name}": value for name, value in values.items()}
    depth, _, width = row.plan.partition("x")
    known: dict[str, float | None] = {
        "train/loss": row.loss,
        "train/grad_norm": row.grad_norm,
        "train/learning_rate": row.learning_rate,
        **{f"train/{name}": value for name, value in row.metrics.items()},
        "speed/examples_per_s": row.examples_per_s,
        "speed/tokens_per_s": row.tokens_per_s,
        "plan/pipeline_depth": float(depth) if width else None,
        "plan/data_parallel_width": float(width) if width else None,
        "cost/usd_spent": row.usd_spent,
    }
    return {name: value for name, value in known.items() if value is not None}
