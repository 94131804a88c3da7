"""Commands that only read: events, report, cost, inspect, config schema."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from spottrain.varuna_manager.api import queries
from spottrain.varuna_manager.cli.arguments import (
    FollowOption,
    NameArgument,
    NamesArgument,
)
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    say,
    show,
    show_json,
)
from spottrain.varuna_manager.config.job import json_schema, load_config
from spottrain.varuna_manager.format import clock
from spottrain.varuna_manager.jobs.folder import JobDir, find
from spottrain.varuna_manager.jobs.follow import read_state
from spottrain.varuna_manager.jobs.measurements import STEPS, Measurements, Row
from spottrain.varuna_manager.launch import inspect as tools
from spottrain.varuna_manager.reporting import documents, tables
from spottrain.varuna_manager.reporting.bill import cost_parts
from spottrain.varuna_manager.reporting.costs import By
from spottrain.varuna_manager.reporting.explain.document import (
    explanation,
    explanation_lines,
)
from spottrain.varuna_manager.reporting.html.curves import Curves, read_curves
from spottrain.varuna_manager.reporting.html.page import comparison, page, write_page
from spottrain.varuna_manager.reporting.measured import (
    evaluations_table,
    minibatches_table,
)
from spottrain.varuna_manager.reporting.text import model_lines
from spottrain.varuna_manager.tracking.lines import as_line

TABLE_ROWS = 20
"""Mini-batches in a table for people."""


class MetricsOutput(StrEnum):
    """Format of the answer of ``metrics``."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


def report(
    names: NamesArgument,
    html: Annotated[
        Path | None,
        typer.Option("--html", help="Write one HTML page with charts instead of tables."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what jobs did, what happened to them, and what they cost.

    With --html, several jobs are compared: their loss curves are overlaid.
    """
    jobs = [find(name) for name in names]
    if html is None and output is not Output.JSON:
        for job in jobs:
            show_report(job, output)
            _say_absent(job)
        return
    described = [queries.with_history(job, documents.report) for job in jobs]
    reports = [document for document, _, _ in described]
    for job in jobs:
        _say_absent(job)
    if html is not None:
        curves = [_read_curves(job) for job in jobs]
        if len(jobs) == 1:
            write_page(html, page(*described[0], curves[0]))
        else:
            pairs = list(zip(reports, curves, strict=True))
            write_page(html, comparison(pairs))
        say(f"report: {html.absolute()}")
    if output is Output.JSON:
        show_json(reports[0] if len(jobs) == 1 else reports)


def _read_curves(job: JobDir) -> Curves:
    with closing(Measurements(job.measurements, read_only=True)) as measured:
        return read_curves(measured)


def events(
    name: NameArgument,
    follow: FollowOption = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what happened to a job; -o json prints every event of its journal."""
    job = find(name)
    if output is Output.JSON and follow:
        raise typer.BadParameter("-o json prints a single document; leave --follow out")
    entries = queries.entries(job, follow=follow)
    if output is Output.JSON:
        show_json([queries.event(entry) for entry in entries])
        return
    out = console()
    for entry in entries:
        if entry.message:
            line = f"{clock(entry.event.at_s)} {entry.message}"
            out.print(line, markup=False, soft_wrap=True)


def _say_absent(job: JobDir) -> None:
    """Say what of a job's past is not here yet, if it was taken over a moment ago."""
    with closing(Measurements(job.measurements, read_only=True)) as measured:
        if pending := measured.pending():
            last = pending[0][0] + STEPS - 1
            say(
                f"measurements up to mini-batch {last} are still in the job's bucket: they "
                "come while the job runs"
            )


def explain(
    name: NameArgument,
    about: Annotated[
        str | None,
        typer.Argument(
            metavar="[EVENT|VM|last]",
            help="Number of an event, id of a VM, or last: the newest message. Without it: "
            "what the job does now, or why it ended.",
        ),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show why something happened: the chain of causes, with the numbers that decided."""
    document = explanation(find(name), about)
    if output is Output.JSON:
        show_json(document)
        return
    out = console()
    for line in explanation_lines(document):
        out.print(line, markup=False, soft_wrap=True)


def cost(
    name: NameArgument,
    by: Annotated[
        By | None,
        typer.Option("--by", help="Also break the bill down by zone, type or VM."),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what a job cost, what the money went to, and what was saved."""
    document = queries.cost(find(name))
    if output is Output.JSON:
        show_json(document)
    else:
        show(*cost_parts(document, by))


def metrics(
    name: NameArgument,
    every: Annotated[int, typer.Option("--every", min=1, help="Print every Nth step.")] = 1,
    last: Annotated[
        int | None,
        typer.Option("--last", min=1, help="Print only the newest N steps; 20 in a table."),
    ] = None,
    output: Annotated[
        MetricsOutput,
        typer.Option("--output", "-o", help="json and csv have all rows, unrounded."),
    ] = MetricsOutput.TABLE,
) -> None:
    """Show loss and other measurements of each mini-batch, and evaluations."""
    job = find(name)
    _say_absent(job)
    with closing(Measurements(job.measurements, read_only=True)) as measured:
        if output is MetricsOutput.TABLE:
            rows = measured.minibatches(last=last or TABLE_ROWS, every=every)
            show(minibatches_table(rows))
            if evaluations := measured.evaluations()[-(last or TABLE_ROWS) :]:
                show("", evaluations_table(evaluations))
            return
        found: Iterator[Row] = (
            iter(measured.minibatches(last=last, every=every))
            if last is not None
            else measured.iterate(every)
        )
        chosen = itertools.chain(found, measured.evaluations())
        if output is MetricsOutput.CSV:
            _write_csv(chosen, measured.metric_names())
        else:
            _write_json(job, chosen)


def _write_csv(rows: Iterator[Row], metrics: list[str]) -> None:
    """Print rows, with a column for each metric."""
    out = csv.DictWriter(sys.stdout, queries.row_names(metrics), restval="")
    out.writeheader()
    out.writerows(map(queries.flat_row, rows))


def _write_json(job: JobDir, rows: Iterator[Row]) -> None:
    """Print one document, row by row: there may be millions."""
    schema = documents.SCHEMA_VERSION
    head = json.dumps({"schema_version": schema, "name": job.name})[:-1]
    sys.stdout.write(f'{head}, "rows": [')
    for number, row in enumerate(rows):
        sys.stdout.write(("," if number else "") + "\n" + as_line(row).rstrip())
    sys.stdout.write("\n]}\n")


def inspect(
    file: Annotated[Path, typer.Argument(help="Job file: YAML or TOML.")],
    output: OutputOption = Output.TABLE,
) -> None:
    """Show how a model would be cut into sections, and their sizes."""
    config = load_config(file)
    facts = tools.inspect_model(config)
    if output is Output.JSON:
        show_json(dataclasses.asdict(facts))
    else:
        show(
            f"{facts.num_parameters:,} parameters, "
            + ("not cut" if facts.uncut else f"cut at {facts.blocks or 'its modules'}"),
            tables.sections_table(facts),
            *(
                f"tied: {tied.name} in sections {', '.join(map(str, tied.sections))}"
                for tied in facts.tied
            ),
            *model_lines(facts, config.microbatch_size),
        )


def schema() -> None:
    """Print the JSON Schema of job files, for editors."""
    show_json(json_schema())


def show_report(job: JobDir, output: Output) -> None:
    """Print the report of a job."""
    document = queries.report(job)
    if output is Output.JSON:
        show_json(document)
    else:
        show(*tables.summary(document))
    if job.page.exists() and document["exit_code"] is not None:
        say(f"report as an HTML page: {job.page}")


def say_failure(job: JobDir) -> None:
    """Print why a job failed, with the traceback of the user's code if there is one."""
    state = read_state(job)
    if (outcome := state.outcome) is None:
        return
    if outcome.traceback:
        say(outcome.traceback.rstrip())
    say(f"error: {outcome.reason}")
    if hint := queries.how_to_fix(state):
        say(hint)
