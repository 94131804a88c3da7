"""Commands that only compute: schedule, simulate step."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from spottrain.errors import ConfigError
from spottrain.morphing.errors import PlanError
from spottrain.morphing.schedules.lists import Schedule, compact_schedule
from spottrain.morphing.schedules.schedule import format_schedule
from spottrain.varuna_manager.cli.console import Output, OutputOption, show, show_json
from spottrain.varuna_manager.cli.simulate.files import read_spec
from spottrain.varuna_manager.cli.simulate.step_spec import (
    StepSpec,
    simulate_spec,
    trace_spec,
)
from spottrain.varuna_manager.cli.simulate.timeline import simulated, write_timeline
from spottrain.varuna_manager.format import number
from spottrain.wire.plan import ScheduleKind

MAX_TABLE_CHARS = 20_000
"""Longer schedules are printed as plain lines instead of a table, in characters."""
KINDS: tuple[ScheduleKind, ...] = ("varuna", "1f1b", "gpipe", "interleaved")


def schedule(
    kind: Annotated[str, typer.Argument(help=f"One of {', '.join(KINDS)}.")],
    depth: Annotated[int, typer.Option("--depth", "-P", help="Number of pipeline stages.")],
    microbatches: Annotated[
        int, typer.Option("--microbatches", "-M", help="Micro-batches per replica.")
    ],
    chunks: Annotated[
        int | None, typer.Option("--chunks", "-v", help="Model chunks per stage.")
    ] = None,
    recompute: Annotated[
        bool, typer.Option(help="Recompute activations before the backward pass.")
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print the tasks of each pipeline stage, in order.

    F3 is the forward pass of micro-batch 3, R3 its recompute, B3 its backward pass; F3.1
    is that of the stage's next chunk.
    """
    show_lists(format_schedule(_schedule(kind, depth, microbatches, chunks, recompute)), output)


def show_lists(lists: Sequence[str], output: Output) -> None:
    """Show the tasks of each stage."""
    if output is Output.JSON:
        show_json(lists)
        return
    if sum(map(len, lists)) > MAX_TABLE_CHARS:
        for stage, tasks in enumerate(lists):
            sys.stdout.write(f"{stage}: {tasks}\n")
        return
    table = Table("stage", "tasks")
    for stage, tasks in enumerate(lists):
        table.add_row(str(stage), tasks)
    show(table)


def step(
    spec: Annotated[Path, typer.Argument(help="JSON: schedule, stages, links.")],
    timeline: Annotated[
        Path | None,
        typer.Option(
            help="Also write a timeline: .json for Chrome's or Perfetto's viewer, or .svg."
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Simulate one mini-batch of one replica."""
    asked = read_spec(spec, StepSpec)
    try:
        document = simulate_spec(asked)
        if timeline is not None:
            names = [stage.name or str(p) for p, stage in enumerate(asked.stages)]
            traced = simulated(trace_spec(asked), names, asked.allreduce_s)
            write_timeline(timeline, traced)
    except PlanError as error:
        raise ConfigError(f"{spec.name}: {error}") from error
    if output is Output.JSON:
        show_json(document)
        return
    show(
        f"mini-batch {number(document['minibatch_s'])} s, of which all-reduce "
        f"{number(document['allreduce_s'])} s; conditions: {document['conditions']}",
        stages_table(asked, document),
    )


def _schedule(
    kind: str, depth: int, microbatches: int, chunks: int | None, recompute: bool
) -> Schedule:
    for known in KINDS:
        if kind == known:
            default = 2 if known == "interleaved" else 1
            try:
                return compact_schedule(
                    known,
                    depth,
                    microbatches,
                    recompute=recompute,
                    chunks=default if chunks is None else chunks,
                )
            except PlanError as error:
                raise ConfigError(str(error)) from error
    raise ConfigError(f"schedule must be one of {', '.join(KINDS)}: got {kind}")


def stages_table(spec: StepSpec, document: dict[str, Any]) -> Table:
    """Return a table of the stages of a mini-batch, see ``simulate_spec``."""
    table = Table("stage", "busy", "idle", "max in flight")
    for p, stage in enumerate(spec.stages):
        table.add_row(
            stage.name or str(p),
            f"{number(document['busy_s'][p])} s",
            f"{number(document['idle_s'][p])} s",
            str(document["peak_in_flight"][p]),
        )
    return table
