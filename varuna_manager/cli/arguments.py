"""The argument that names a job; the command runs where that job's manager is."""

from __future__ import annotations

from typing import Annotated

import typer

from spottrain.varuna_manager.jobs.folder import job_dir


def run_at_manager(context: typer.Context, name: str | None) -> str | None:
    """Run the command on the VM of the job's manager, if it has one of its own.

    Args:
        context: Of the command.
        name: The job that the command is about, if it is about one.
    """
    if name is not None and (job := job_dir(name)).remote_manager_file.exists():
        # Not above: it imports the cloud adapters, which most commands do not need.
        from spottrain.varuna_manager.cli.remote import forward_command

        forward_command(job, context.info_name or "")
    return name


NameArgument = Annotated[
    str, typer.Argument(help="Name of a job.", callback=run_at_manager)
]
