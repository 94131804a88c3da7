"""``spottrain simulate mix``: the fastest split over GPUs of several types."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import Field
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.simulate import files
from spottrain.varuna_manager.format import number
from spottrain_lab.traces.mixing import Mixing, Split, WorkerType, split_minibatch

Size = Annotated[int, Field(gt=0, strict=False)]
"""A key of a JSON object is text."""


class TypeSpec(files.Part):
    """GPUs of one type, measured alone."""

    name: str
    count: Annotated[int, Field(ge=0, le=10_000)]
    virtual_node_s: Annotated[dict[Size, files.Positive], Field(min_length=1)]
    """Time of a virtual node by its number of examples; only sizes that fit."""


class AllreduceSpec(files.Part):
    """A ring over all GPUs that are used; one alone needs none."""

    bytes: files.NotNegative
    bandwidth_bytes_per_s: files.Positive
    latency_s: files.NotNegative = 0.0
    """Of each message."""

    def ring_s(self, workers: int) -> float:
        """Return the time of a ring all-reduce of so many workers."""
        message_s = self.bytes / workers / self.bandwidth_bytes_per_s
        return 2 * (workers - 1) * (self.latency_s + message_s)


class MixSpec(files.Part):
    """A mini-batch and the GPUs to compute it."""

    minibatch_size: Annotated[int, Field(gt=0, le=10_000_000)]
    """Every split of it over each number of GPUs is looked at."""
    types: Annotated[list[TypeSpec], Field(min_length=1)]
    allreduce: AllreduceSpec


def mix(
    spec: Annotated[Path, typer.Argument(help="JSON: minibatch_size, types, allreduce.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Find the fastest split of a mini-batch over GPUs of several types."""
    asked = files.read_spec(spec, MixSpec)
    types = [WorkerType(**one.model_dump()) for one in asked.types]
    try:
        mixing = split_minibatch(asked.minibatch_size, types, asked.allreduce.ring_s)
    except PlanError as error:
        raise ConfigError(f"{spec.name}: {error}") from error
    if output is Output.JSON:
        show_json(_document(mixing))
        return
    show(_verdict(mixing), _table(mixing))


def _document(mixing: Mixing) -> dict[str, Any]:
    return {
        "mixed": mixing.best.is_mixed,
        "best": asdict(mixing.best),
        "alone": {
            name: None if split is None else asdict(split) for name, split in mixing.alone.items()
        },
    }


def _verdict(mixing: Mixing) -> str:
    possible = [split.step_s for split in mixing.alone.values() if split is not None]
    if not mixing.best.is_mixed:
        return f"{mixing.best.shares[0].name} alone: mixing does not pay"
    if not possible:
        return "mixed: no type alone can compute the mini-batch"
    gain = min(possible) / mixing.best.step_s - 1
    return f"mixed: {gain:.1%} more examples/s than the best type alone"


def _table(mixing: Mixing) -> Table:
    table = Table("split", "step", "GPUs", "examples each", "virtual nodes each")
    rows: dict[str, Split | None] = {"best": mixing.best}
    rows |= {f"{name} alone": split for name, split in mixing.alone.items()}
    for label, split in rows.items():
        if split is None:
            table.add_row(label, "impossible")
            continue
        for i, share in enumerate(split.shares):
            table.add_row(
                "" if i else label,
                "" if i else f"{number(split.step_s)} s",
                f"{share.workers} {share.name}",
                str(share.examples),
                f"{share.virtual_nodes} of {share.virtual_node_examples}",
            )
    return table
