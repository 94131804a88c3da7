"""``spottrain status``: a job, or all of them, at a glance.

It answers at once, however long the job: it begins with the journal's newest snapshot, and
imports nothing that only other commands, or a watch, need.
"""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain.errors import SpottrainError
from spottrain.varuna_manager.api import queries
from spottrain.varuna_manager.cli.arguments import run_at_manager
from spottrain.varuna_manager.cli.console import (
    Output,
    OutputOption,
    console,
    say,
    say_error,
    show,
    show_json,
)
from spottrain.varuna_manager.jobs.folder import JobDir, all_jobs, find
from spottrain.varuna_manager.reporting import tables


def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a job; without one, all jobs.", callback=run_at_manager),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Watch until the job ends.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the state of a job, or of all jobs."""
    if name is None:
        if watch:
            raise typer.BadParameter("--watch needs a job; name one")
        _show_all(output)
        return
    job = find(name)
    if watch:
        raise typer.Exit(_watch(job, output))
    document = queries.status(job)
    if output is Output.JSON:
        show_json(document)
        return
    show(tables.live_panel(document, None))
    if document["fleet"]:
        show(tables.fleet_table(document))
    if document["journal_copy"]:
        say(document["journal_copy"])


def _show_all(output: Output) -> None:
    """Show every job; one that cannot be read does not hide the others."""
    found, errors = [], []
    for job in all_jobs():
        try:
            if job.remote_manager_file.exists():
                # Not above: it imports the cloud adapters, which other commands do not need.
                from spottrain.varuna_manager.cli.remote import refresh

                refresh(job)
            found.append(queries.brief(job))
        except SpottrainError as error:
            errors.append(error)
    if output is Output.JSON:
        show_json(found)
    elif found or errors:
        show(tables.jobs_table(found))
    else:
        say(
            "no jobs on this machine; 'spottrain launch job.yaml' starts one, 'spottrain quickstart' a small example"
        )
    for damaged in errors:
        say_error(damaged, str(damaged))
    if errors:
        raise typer.Exit(errors[0].exit_code)


def _watch(job: JobDir, output: Output) -> int:
    from spottrain.varuna_manager.cli.watch import Watcher

    code = Watcher(job, console(stderr=True)).run()
    if output is Output.JSON:
        show_json(queries.status(job))
    return code
